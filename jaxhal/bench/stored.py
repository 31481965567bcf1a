"""Does a 4-bit file stay as small as it is stored, and is it read as well and as fast?

The readers are those known by name that are such files; what is measured of one is left
out where it cannot be had.  Dequantised it is float32.  Tokens are random.
"""

import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxhal
from jaxhal.bench import interleave, row
from jaxhal.bench.read import REDUCERS, random_batch
from jaxhal.models import registry
from jaxhal.models.lm import LM

MODELS = ("qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")
SEQ, RESPONSE, REPEATS = 512, 96, 5
TOKENS = 256
_RESIDENT = """
import gc, sys
import jax, jaxhal
from jaxhal.bench.memory import own

jaxhal.load("smollm2-135m")  # what any model needs
gc.collect()
before = own()
lm = jaxhal.load(sys.argv[1], weights="stored", mesh="data=1")
jax.block_until_ready(lm.params)
gc.collect()
print(own() - before)
"""


def rows() -> Iterator[dict]:
    for name in MODELS:
        try:
            path = registry.locate(name)
        except (OSError, RuntimeError, ValueError) as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        yield from _rows(name, path)


def _rows(name: str, path: Path) -> Iterator[dict]:
    size = path.stat().st_size
    stored = jaxhal.load(path, weights="stored", mesh="data=1")
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(stored.params))
    yield row("stored", name, "bytes of weights / of the file", held / size, 1.25)
    if Path("/proc/self/statm").exists():
        metric = "memory of a process that loads it / the file"
        yield row("stored", name, metric, _resident(path) / size, 1.25)
    plain = jaxhal.load(path, weights="dequantised", mesh="data=1")
    yield from _logits(name, stored, plain)
    batch = random_batch(stored.config.vocab_size, SEQ, RESPONSE)
    functions = {
        which: functools.partial(jaxhal.read, lm, batch, REDUCERS)
        for which, lm in (("stored", stored), ("plain", plain))
    }
    times = interleave("stored", name, functions, REPEATS)
    metric = f"reading {SEQ} tokens, stored / dequantised"
    yield times.ratio(metric, "stored", "plain", 1.3)


def _resident(path: Path) -> float:
    command = [sys.executable, "-c", _RESIDENT, str(path)]
    return float(subprocess.run(command, check=True, capture_output=True).stdout)


def _logits(name: str, stored: LM, plain: LM) -> Iterator[dict]:
    tokens = random_batch(stored.config.vocab_size, TOKENS, 1).tokens
    some, others = (
        np.asarray(lm.forward(jnp.asarray(tokens))) for lm in (stored, plain)
    )
    worst = float(np.abs(some - others).max())
    yield row("stored", name, "largest difference of a logit", worst, 1e-3)
    same = float((some.argmax(-1) == others.argmax(-1)).mean())
    metric = f"share of {TOKENS} tokens with the same likeliest one"
    yield row("stored", name, metric, same, 1.0, "higher")
