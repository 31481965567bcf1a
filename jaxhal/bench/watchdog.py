"""What does a watchdog cost beside the agent it guards, and how near is its search to
one read of the bound?

Vectors are random, of MiniLM's width; the agent is SmolLM2-135M, the queries are those
of the bundled examples.
"""

import asyncio
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxhal
from jaxhal.bench import interleave, row
from jaxhal.datasets import bundled
from jaxhal.models.encoders.encoding import embed, kept_encoder
from jaxhal.watchdog import ExactStore, Guard, LocalAgent, MilvusStore, Point, Watchdog
from jaxhal.watchdog.index import Index

WIDTH = 384
SIZES = (1_000, 100_000)
LARGEST = 1_000_000
QUERIES = 200
_TOKENS, _ROUNDS, _BATCH, _BLOCK = 64, 15, 64, 50_000


def rows() -> Iterator[dict]:
    yield from _checks()
    for size in SIZES:
        yield from _lookups(size)
    yield from _throughput()


def _vectors(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((size, WIDTH), np.float32)


def _filled(size: int) -> Index:
    index = Index(np.zeros((0, WIDTH), np.float32))
    for seed, begin in enumerate(range(0, size, _BLOCK)):
        index.add(_vectors(min(_BLOCK, size - begin), seed))
    return index


@jax.jit
def _read(matrix: Any) -> Any:
    """One read of a matrix, with as little to do as can be."""
    return jnp.max(matrix, axis=1).max()


def _lookups(size: int) -> Iterator[dict]:
    """Three nearest of one query, again and again."""
    index, case = _filled(size), f"{size} points"
    matrix = jnp.asarray(index[np.arange(size)])
    queries = _vectors(QUERIES, 1)
    turns = itertools.cycle(queries[:, None])
    index.search(queries[:1], 3)
    yield from _percentiles(case, "lookup, ms", lambda: index.search(next(turns), 3))
    functions = {
        "lookup": lambda: index.search(queries[:1], 3),
        "read": lambda: _read(matrix),
    }
    times = interleave("watchdog", case, functions, 3 * _ROUNDS)
    target = 1.5 if size == max(SIZES) else None
    yield times.ratio("lookup / one read of the matrix", "lookup", "read", target)


def _throughput() -> Iterator[dict]:
    """Queries a second at the largest size, many at a time."""
    index, queries = _filled(LARGEST), _vectors(_BATCH, 1)
    yield _paced("exact", index, queries)
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield _milvus(Path(folder) / "bound.db", queries)
    except ModuleNotFoundError as error:
        print(f"Milvus is not measured: {error}", file=sys.stderr)


def _paced(name: str, store: Index | MilvusStore, queries: np.ndarray) -> dict:
    functions = {"search": lambda: store.search(queries, 3)}
    times = interleave("watchdog", f"{LARGEST} points", functions, 3)
    metric = f"{name}: queries per second, {_BATCH} at a time"
    return times.pace(metric, "search", _BATCH)


def _milvus(path: Path, queries: np.ndarray) -> dict:
    store, numbers = MilvusStore(WIDTH, path), itertools.count()
    for seed in range(LARGEST // _BLOCK):
        some = [Point(f"p{next(numbers)}", "query", "") for _ in range(_BLOCK)]
        store.add(some, _vectors(_BLOCK, seed))
    found = _paced("Milvus Lite", store, queries)
    store.close()
    return found


def _checks() -> Iterator[dict]:
    """A whole check beside the agent's own answer; no other answers are drawn."""
    queries = [str(one.question) for one in bundled()[::2]]
    agent = LocalAgent(
        jaxhal.load("smollm2-135m", mesh="data=1"), max_new_tokens=_TOKENS
    )
    encoder = "all-minilm-l6-v2"
    known = embed(kept_encoder(encoder), queries, progress=False)
    for size in SIZES:
        store = ExactStore(WIDTH)
        points = [Point(f"p{n}", "query", "") for n in range(size)]
        others = _vectors(size - len(known))
        store.add(points, np.concatenate([known, others]))
        dog = Watchdog(agent, store, guard=Guard(entropy=None), encoder=encoder)
        yield from _beside_answers(dog, queries, f"{size} points")


def _beside_answers(dog: Watchdog, queries: list[str], case: str) -> Iterator[dict]:
    checked, asked = itertools.cycle(queries), itertools.cycle(queries)

    def check() -> Any:
        return asyncio.run(dog.check(next(checked)))

    def answer() -> Any:
        return asyncio.run(dog.agent.respond([next(asked)], 1, 0.0))

    times = interleave("watchdog", case, {"check": check, "answer": answer}, _ROUNDS)
    metric = f"check / the agent's answer of up to {_TOKENS} tokens"
    yield times.ratio(metric, "check", "answer")
    yield from _percentiles(case, "check, ms, embedding included", check)


def _percentiles(case: str, metric: str, function: Callable[[], Any]) -> Iterator[dict]:
    """Milliseconds of single calls, one after another."""
    found = []
    for _ in range(QUERIES):
        began = time.perf_counter()
        function()
        found.append(1000 * (time.perf_counter() - began))
    for share in (50, 99):
        value = float(np.percentile(found, share))
        yield row("watchdog", case, f"{metric}, p{share}", value)
