"""How many tokens and verdicts does a server give, to how many clients, with scores?

The reader is SmolLM2-135M in float32; servers are processes of their own, with a
detector that rides along and without, asked in turn over HTTP.
"""

import asyncio
import functools
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx2
import numpy as np

import jaxhal
from jaxhal.bench import peer, peers, row
from jaxhal.bench.read import random_batch
from jaxhal.bench.server import MODEL, OURS, PATIENCE, started
from jaxhal.datasets import bundled_answers

CLIENTS = (1, 4, 16)
NEW, ROUNDS, ANSWERS = 96, 5, 32
# How Hugging Face's server is started for one client and for many.  On a CPU too it
# would take most of the memory for keys and values, and masks as wide as they are.
_THEIRS = {
    1: (),
    16: ("--continuous-batching", "--cb-num-blocks=64", "--cb-max-batch-tokens=512"),
}
# Hugging Face's says it unasked, and takes no such wish.
_USAGE = {"stream_options": {"include_usage": True}}


class _Asked(NamedTuple):
    """What some clients got at once."""

    seconds: float
    tokens: int
    first: list[float]  # seconds to the first tokens of each
    verdicts: int = 0

    @property
    def pace(self) -> float:
        return (self.tokens or self.verdicts) / self.seconds


def rows() -> Iterator[dict]:
    with started(*OURS) as rich:
        with started(*OURS, "--detector", "token_entropy") as plain:
            yield from _written(rich.url, plain.url)
        yield from _judged(rich.url)
        yield from _beside_peers(rich.url)


def _write(url: str, clients: int, wishes: dict[str, Any] = _USAGE) -> _Asked:
    """Answers to as many clients at once, each of them streamed."""

    async def one(client: httpx2.AsyncClient, number: int) -> tuple[int, float]:
        begin, first, tokens = time.perf_counter(), 0.0, 0
        asked = f"Tell a long story about the {number}. voyage of a small ship."
        body = {
            "messages": [{"role": "user", "content": asked}],
            "max_tokens": NEW,
            "seed": number,
            "stream": True,
            **wishes,
        }
        path = f"{url}/v1/chat/completions"
        async with client.stream("POST", path, json=body) as stream:
            stream.raise_for_status()
            async for line in stream.aiter_lines():
                if re.search('"delta": ?{"content"', line):
                    first = first or time.perf_counter() - begin
                if count := re.search('"completion_tokens": ?([0-9]+)', line):
                    tokens = int(count[1])
        if not tokens:
            raise RuntimeError(f"{url} did not say how many tokens it wrote")
        return tokens, first

    async def all_of_them() -> list[tuple[int, float]]:
        async with httpx2.AsyncClient(timeout=PATIENCE) as client:
            return await asyncio.gather(*(one(client, n) for n in range(clients)))

    begin = time.perf_counter()
    found = asyncio.run(all_of_them())
    seconds = time.perf_counter() - begin
    return _Asked(seconds, sum(n for n, _ in found), [first for _, first in found])


def _written(rich: str, plain: str) -> Iterator[dict]:
    runs = {(url, n): [] for n in CLIENTS for url in (rich, plain)}
    for url, clients in runs:
        _write(url, clients)  # compiles
    for _ in range(ROUNDS):
        for (url, clients), found in runs.items():
            found.append(_write(url, clients))
    for clients in CLIENTS:
        found, case = runs[rich, clients], _case(clients)
        paces = np.array([one.pace for one in found])
        yield _spread(case, "tokens per second, with scores", paces, "higher")
        first = 1000 * np.concatenate([one.first for one in found])
        for share in (50, 99):
            value = float(np.percentile(first, share))
            yield row("serve", case, f"first tokens, p{share}, ms", value)
        bare = np.array([one.pace for one in runs[plain, clients]])
        yield _spread(
            case, "with scores / without, time a token", bare / paces, target=1.05
        )
    paces = {n: np.array([one.pace for one in runs[rich, n]]) for n in CLIENTS}
    most = max(CLIENTS)
    metric, ratio = "tokens per second / those of one client", paces[most] / paces[1]
    yield _spread(_case(most), metric, ratio, "higher", 6.0)


def _case(clients: int) -> str:
    return f"{clients} client{'s' * (clients > 1)}"


def _spread(
    case: str,
    metric: str,
    values: np.ndarray,
    better: str = "lower",
    target: float | None = None,
) -> dict:
    low, middle, high = np.percentile(values, [25, 50, 75])
    return row("serve", case, metric, middle, target, better, (low, high))


def _judge(url: str, together: bool) -> _Asked:
    """Verdicts on answers, asked for all at once or one after another."""
    answers = bundled_answers()[:ANSWERS]
    asked = [
        {"context": one.context, "question": one.question, "response": one.response}
        for one in answers
    ]

    async def one(client: httpx2.AsyncClient, body: dict) -> float:
        begin = time.perf_counter()
        found = await client.post(f"{url}/v1/verdict", json=body)
        found.raise_for_status()
        return time.perf_counter() - begin

    async def all_of_them() -> list[float]:
        async with httpx2.AsyncClient(timeout=PATIENCE) as client:
            if together:
                return await asyncio.gather(*(one(client, body) for body in asked))
            return [await one(client, body) for body in asked]

    begin = time.perf_counter()
    each = asyncio.run(all_of_them())
    return _Asked(time.perf_counter() - begin, 0, each, len(asked))


def _judged(url: str) -> Iterator[dict]:
    runs: dict[bool, list[_Asked]] = {True: [], False: []}
    for together in runs:
        _judge(url, together)
    for _ in range(ROUNDS):
        for together, found in runs.items():
            found.append(_judge(url, together))
    case = f"{ANSWERS} answers"
    paces = {key: np.array([one.pace for one in some]) for key, some in runs.items()}
    yield _spread(case, "verdicts per second, one by one", paces[False], "higher")
    metric = "verdicts per second, all at once / one by one"
    yield _spread(case, metric, paces[True] / paces[False], "higher")
    each = 1000 * np.concatenate([one.first for one in runs[False]])
    for share in (50, 99):
        value = float(np.percentile(each, share))
        yield row("serve", case, f"a verdict, p{share}, ms", value)


def _beside_peers(url: str) -> Iterator[dict]:
    """Hugging Face's model: as many rows in one batch, and behind its own server."""
    lm = jaxhal.load(MODEL, mesh="data=1")
    if (model := peer(peers.torch_llama, lm, "sdpa")) is None:
        return
    tokens = np.asarray(random_batch(lm.config.vocab_size, 40, 1).tokens)[:, :40]
    most = max(CLIENTS)

    def batch() -> float:
        begin = time.perf_counter()
        peers.sampled(model, tokens, most, NEW)
        return most * NEW / (time.perf_counter() - begin)

    yield _beside(url, most, "Hugging Face in one batch", batch)
    with tempfile.TemporaryDirectory() as folder:
        command = peer(peers.server, model, lm.require_tokenizer(), folder)
        for clients, options in _THEIRS.items() if command else ():
            with started(*command, *options) as other:
                pace = functools.partial(_pace, other.url, clients)
                yield _beside(url, clients, "transformers serve", pace)


def _pace(url: str, clients: int) -> float:
    return _write(url, clients, {}).pace


def _beside(url: str, clients: int, name: str, theirs: Callable[[], float]) -> dict:
    """Taking turns, of which the first compiles."""
    ratios = [_write(url, clients).pace / theirs() for _ in range(1 + ROUNDS)]
    metric = f"tokens per second / those of {name}"
    return _spread(_case(clients), metric, np.array(ratios[1:]), "higher")
