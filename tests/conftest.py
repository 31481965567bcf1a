"""Fixtures that several test files share, and a compiler in a hurry."""

import atexit
import ctypes
import gc
import math
import os
import shutil
import signal
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import hypothesis
import pytest

# Most of a test's time is compiling tiny programs: little is spent on making them fast,
# and what one process has compiled, workers and notebooks find.  Set before jax is
# imported, and inherited by all of them.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _compiled = tempfile.mkdtemp(prefix="jaxhal-compiled-")
    atexit.register(shutil.rmtree, _compiled, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    _flags = "backend_optimization_level=0 cpu_parallel_codegen_split_count=1"
    if tuple(map(int, version("jax").split(".")[:2])) < (0, 11):  # later ones abort
        _flags += " cpu_use_fusion_emitters=false"
    _flags = " ".join(f"--xla_{flag}" for flag in _flags.split())
    os.environ.setdefault("XLA_FLAGS", _flags)
    os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

# A shell ignores Ctrl-C for what it runs in the background; tests send it themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from browser import chromium
from jaxhal.models import registry

pytest_plugins = ["shown"]
pytest.register_assert_rewrite("eight")

# No test is timed: a loaded machine is slow.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


def pytest_collection_finish() -> None:
    """What was imported stays, so collecting garbage need not look at it again.

    Writing a program to the compilation cache costs a tenth of compiling it, and few of
    these are compiled again: this process writes only those that took half a second,
    the commands and notebooks that tests start write shorter ones too.
    """
    if "jax" in sys.modules:
        name = "jax_persistent_cache_min_compile_time_secs"
        sys.modules["jax"].config.update(name, 0.5)
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


@pytest.fixture(scope="module", autouse=True)
def _compiled_programs():
    """What a file compiled serves the next ones, until it adds up to gigabytes."""
    yield
    if "jax" in sys.modules and _resident() > 4 * 2**30:
        sys.modules["jax"].clear_caches()
        gc.collect()
        _give_back()


def _give_back() -> None:
    """Memory that is free goes back to the system, which would count it as taken."""
    if os.name != "posix":
        return
    process = ctypes.CDLL(None)
    for name in ("MallocExtension_ReleaseFreeMemory", "malloc_trim"):
        if hasattr(process, name):
            getattr(process, name)(0)


def _resident() -> float:
    """Bytes of this process in memory, infinite where the system does not say."""
    pages = Path("/proc/self/statm")
    if not pages.exists():
        return math.inf
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real small model; skipped only where JAXHAL_OFFLINE forbids the download."""
    try:
        return registry.fetch("smollm2-135m")
    except RuntimeError as error:
        if os.environ.get("JAXHAL_OFFLINE"):
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path):
    """The real small model, loaded by its registry name."""
    import jaxhal

    return jaxhal.load("smollm2-135m")


@pytest.fixture(scope="session")
def narrow(smollm2_gguf: Path, tmp_path_factory) -> Path:
    """A random model of few channels that can stand in the place of the real one.

    It has the real one's tokens, layers and heads: detectors of heads that come with
    the package fit it.
    """
    from jaxhal.models.gguf import GGUFSource
    from jaxhal.models.gguf_config import config_from_gguf
    from jaxhal.models.tokenizer import Tokenizer
    from tiny_lm import write_lm

    source = GGUFSource(smollm2_gguf)
    real = config_from_gguf(source)
    return write_lm(
        tmp_path_factory.mktemp("narrow") / "model",
        context=real.context_length,
        tokenizer=Tokenizer.from_gguf(source).hf,
        vocab_size=real.vocab_size,
        head_dim=4,
        num_hidden_layers=real.num_hidden_layers,
        num_attention_heads=real.num_attention_heads,
        num_key_value_heads=real.num_key_value_heads,
    )


@pytest.fixture(scope="session")
def look():
    """``look(see, **options)``: what ``see(page)`` returns of a page in Chromium."""
    with chromium() as looking:
        yield looking
