"""How long does it take until something is said, and what has to be installed for it?

Each round is a process of its own; programs were compiled and files downloaded before.
A model of 2 GiB is loaded over eight devices of a CPU; memory is what the process takes
beyond the pages of files, on Linux.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from packaging.requirements import Requirement

from jaxhal.bench import row
from jaxhal.bench.server import OURS, started
from jaxhal.models import weights
from jaxhal.models.families import from_huggingface, huggingface_table

ROUNDS = 5
_IMPORT = """
import time
began = time.perf_counter()
import jaxhal
print(time.perf_counter() - began)
"""
_LOAD = """
import sys, time
from pathlib import Path
import jax, jaxhal
from jaxhal.bench.memory import Peak

def load():
    began = time.perf_counter()
    lm = jaxhal.load(sys.argv[1], mesh="model=8")
    jax.block_until_ready(lm.params)
    seconds = time.perf_counter() - began
    leaves = jax.tree.leaves(lm.params)
    held = [part.data.nbytes for leaf in leaves for part in leaf.addressable_shards]
    return seconds, sum(held)

def read():
    began = time.perf_counter()
    with open(Path(sys.argv[1], "model.safetensors"), "rb", buffering=0) as file:
        while file.read(1 << 26):
            pass
    return time.perf_counter() - began

jax.devices()
with Peak() as peak:
    _, held = load()
print(load()[0] - read(), peak.bytes / held)
"""
# What it prints, in this order, and what is wanted of it.
_LOADED = {
    "a second load, seconds beyond reading its file": 1.0,
    "peak memory of a load / parts of all devices": 1.2,
}
_LLAMA = {
    "model_type": "llama",
    "vocab_size": 16384,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 10,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
}
_ROW = '{"context": "The bridge opened in 1832.", "response": "It opened in 1932."}'


def rows() -> Iterator[dict]:
    took = {
        ("import jaxhal, seconds", 0.1): _imported,
        ("jaxhal detect on one row, seconds", 8.0): _detected,
        ("jaxhal serve until it answers, seconds", 60.0): _served,
    }
    for (metric, target), once in took.items():
        once()
        low, middle, high = np.percentile([once() for _ in range(ROUNDS)], [25, 50, 75])
        yield row("start", "a new process", metric, middle, target, spread=(low, high))
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder))
        rounds = [_loaded(folder) for _ in range(ROUNDS)]
    of_each = zip(*rounds, strict=True)
    for (metric, target), each in zip(_LOADED.items(), of_each, strict=True):
        low, middle, high = np.percentile(each, [25, 50, 75])
        about = "2 GiB on 8 devices", metric, middle, target
        yield row("start", *about, spread=(low, high))
    names = installed("jaxhal")
    size = sum(map(_bytes, names)) / 2**20
    yield row("start", "pip install jaxhal", "packages", float(len(names)))
    yield row("start", "pip install jaxhal", "their files, MiB", size)


def _imported() -> float:
    command = [sys.executable, "-c", _IMPORT]
    return float(subprocess.run(command, check=True, capture_output=True).stdout)


def _detected() -> float:
    began = time.perf_counter()
    command = [sys.executable, "-m", "jaxhal", "detect", "--input", "-"]
    done = subprocess.run(command, input=_ROW.encode(), capture_output=True)
    if done.returncode not in (0, 1):  # 1: hallucinated
        raise RuntimeError(done.stderr.decode())
    return time.perf_counter() - began


def _served() -> float:
    with started(*OURS) as server:
        return server.seconds


def _loaded(folder: str) -> tuple[float, ...]:
    flags = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    )
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-c", _LOAD, folder]
    done = subprocess.run(command, check=True, capture_output=True, env=environment)
    return tuple(map(float, done.stdout.split()))


def _write(folder: Path) -> None:
    """A model of random numbers, with a tokenizer of a few words."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models

    config = from_huggingface(dict(_LLAMA))
    table, rng = huggingface_table(config), np.random.default_rng(0)
    tensors = {}
    for path, leaf in weights.paths(weights.abstract(config, np.float32)[1]):
        stacked = path.startswith("blocks.")
        shape = leaf.shape[stacked:][:: -1 if path.endswith(".kernel") else 1]
        for layer in range(leaf.shape[0] if stacked else 1):
            numbers = rng.standard_normal(shape, np.float32) / 64
            tensors[table[path].name.format(layer)] = numbers
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_LLAMA), "utf-8")
    vocabulary = {str(number): number for number in range(16384)}
    Tokenizer(models.WordLevel(vocabulary, "0")).save(str(folder / "tokenizer.json"))


def installed(requirement: str) -> set[str]:
    """The distributions that installing one brings, of those that are here."""
    found: set[str] = set()
    left = [(Requirement(requirement), "")]
    while left:
        wanted, extra = left.pop()
        if wanted.marker and not wanted.marker.evaluate({"extra": extra}):
            continue
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        for key, extra in ((f"{name}[{one}]", one) for one in ("", *wanted.extras)):
            if key not in found:
                found.add(key)
                specs = importlib.metadata.requires(name) or ()
                left += [(Requirement(spec), extra) for spec in specs]
    return {key.partition("[")[0] for key in found}


def _bytes(name: str) -> int:
    files = importlib.metadata.files(name) or ()
    places = (Path(str(file.locate())) for file in files)
    return sum(place.stat().st_size for place in places if place.is_file())
