"""Is this version slower than an earlier one?

Each is a process that lives through all rounds and answers when asked, so both see the
same machine.  The other is a checkout, such as ``git worktree add ../v1 v1`` makes, and
rows call it by its folder's name.  SmolLM2-135M is read and written with programs that
are there; small random models of the first families are read after these were thrown
away, so what is timed there is tracing and compiling.
"""

import contextlib
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jaxhal
from jaxhal.bench import interleave, peer

_IDS = {"vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SMALL: dict[str, Any] = _IDS | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _SMALL,
    "mistral": _SMALL | {"sliding_window": 32},
    "qwen2": _SMALL,
    "qwen3": _SMALL | {"head_dim": 16},
    "falcon": _SMALL | {"new_decoder_architecture": True, "num_kv_heads": 2},
    "gpt2": _IDS | {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512},
    "gemma3_text": _SMALL | {"head_dim": 16, "sliding_window": 32},
}
# Only what every version has: what is imported here must not be renamed.
_WORKER = """
import inspect
import sys
import jax
import jaxhal
from jaxhal.bench.read import REDUCERS, random_batch
from jaxhal.generation import GREEDY

print(jaxhal.__file__, flush=True)
models = {}

def model(source):
    if source not in models:
        how = {"weights": "dequantised", "mesh": "data=1"}
        known = inspect.signature(jaxhal.load).parameters
        how = {name: value for name, value in how.items() if name in known}
        models[source] = jaxhal.load(source, **how)
    return models[source]

def compiled(source, seq, response):
    jax.clear_caches()
    return read(source, seq, response)

def read(source, seq, response):
    lm = model(source)
    batch = random_batch(lm.config.vocab_size, seq, response)
    return jaxhal.read(lm, batch, REDUCERS)

def written(source, new):
    how = {"sampling": GREEDY, "max_new_tokens": new, "progress": False}
    jaxhal.generate(model(source), ["Count from one to a thousand."], **how)

for line in sys.stdin:
    jax.block_until_ready(eval(line))
    print("done", flush=True)
"""


@contextlib.contextmanager
def version(folder: Path) -> Iterator[Callable[[str], None]]:
    """What makes a process of a folder's ``jaxhal`` do a call of the worker's.

    The folder's path is whole.  A call returns when it is done; RuntimeError where the
    process ended in it.

    Raises:
      FileNotFoundError: where there is none.
      RuntimeError: where it does not begin.
    """
    package = folder / "jaxhal" / "__init__.py"
    if not package.is_file():
        raise FileNotFoundError(f"{folder} has no folder jaxhal; give a checkout of it")
    env = os.environ | {"PYTHONPATH": str(folder)}
    env["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    command = [sys.executable, "-P", "-c", _WORKER]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=env, text=True, **pipes) as process:
        assert process.stdin and process.stdout
        asked, said = process.stdin, process.stdout

        def done(what: str) -> None:
            print(what, file=asked, flush=True)
            if said.readline() != "done\n":
                raise RuntimeError(f"the other process ended in {what}")

        try:
            place = said.readline().strip()
            if place != str(package):
                raise RuntimeError(f"{package} was asked for and {place!r} imported")
            yield done
        finally:
            process.kill()


def rows(against: str | Path) -> Iterator[dict]:
    """``against`` is a checkout of another version.

    Raises:
      FileNotFoundError: where it is none.
    """
    here, there = Path(jaxhal.__file__).parent.parent, Path(against).resolve()
    with version(here) as now, version(there) as before:
        both = {"now": now, there.name: before}
        for seq, response, repeats in ((512, 96, 9), (2048, 256, 5)):
            what = f"read('smollm2-135m', {seq}, {response})"
            case = f"S={seq} R={response}"
            yield _ratio(both, case, "all reducers", what, 1.03, repeats)
        what = "written('smollm2-135m', 64)"
        yield _ratio(both, "R=64", "a greedy answer", what, 1.03, 9)
        with tempfile.TemporaryDirectory() as folder:
            for family, shape in FAMILIES.items():
                place = peer(_saved, family, shape, Path(folder) / family)
                if place is None:
                    return
                what = f"compiled({str(place)!r}, 128, 32)"
                metric = "reading with all reducers, compiled anew"
                yield _ratio(both, family, metric, what, 1.05, 15)


def _ratio(
    both: dict[str, Callable[[str], None]],
    case: str,
    metric: str,
    what: str,
    target: float,
    repeats: int,
) -> dict:
    functions = {n: functools.partial(done, what) for n, done in both.items()}
    times = interleave("versions", case, functions, repeats)
    now, before = both
    return times.ratio(f"{metric}, {now} / {before}", now, before, target)


def _saved(family: str, shape: dict[str, Any], folder: Path) -> Path:
    """A random model as Hugging Face saves it, with a tokenizer of numbers.

    Raises:
      ImportError: without torch.
    """
    import torch
    import transformers
    from tokenizers import Tokenizer, models

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **shape)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    words = {str(number): number for number in range(config.vocab_size)}
    Tokenizer(models.WordLevel(words, "0")).save(str(folder / "tokenizer.json"))
    return folder
