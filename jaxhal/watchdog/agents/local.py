"""Models of this process as agents."""

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxhal.generation import GREEDY, Sampling, generate, requests
from jaxhal.models.lm import LM
from jaxhal.reading.keys import digest
from jaxhal.watchdog.agents import Reply, checked, failed

# Seconds that a model waits for more queries before it writes.
_GATHER = 0.005
# Queries read at once, and answers written, of which a step of many takes little longer
# than one of few; but each keeps its prompt, and all so many characters in any case.
_FEW, _MANY, _KEPT = 32, 128, 2**18


class _Waiting(NamedTuple):
    """A query that waits for a model."""

    query: str
    n: int
    temperature: float
    replies: concurrent.futures.Future[list[Reply]]


class LocalAgent:
    """A model in this process; ``prompt``, the user's turn, has ``{query}`` in it.

    What it says to a query follows from the query and the temperature (rounded to
    tenths, as each compiles a program, but none above 0 to 0).  Queries that come in
    while it writes wait, and are then answered together.
    """

    def __init__(self, lm: LM, prompt: str = "{query}", *, max_new_tokens: int = 128):
        if "{query}" not in prompt:
            raise ValueError(f"prompt is {prompt!r}; it must hold {{query}}")
        self.lm, self.name, self.prompt = lm, lm.name, prompt
        self.max_new_tokens = max_new_tokens
        self.settings = {"prompt": prompt, "max_new_tokens": max_new_tokens}
        self._waiting: list[_Waiting] = []
        self._lock, self._busy = threading.Lock(), False

    async def respond(
        self, queries: Sequence[str], n: int = 1, temperature: float = 1.0
    ) -> list[list[Reply]]:
        if n < 1 or not temperature >= 0:
            raise ValueError(
                f"n is {n} and temperature {temperature}; give at least 1 and 0"
            )
        kind = n, max(round(temperature, 1), 0.1) if temperature else 0.0
        asked = [
            _Waiting(query, *kind, concurrent.futures.Future()) for query in queries
        ]
        with self._lock:
            self._waiting += asked
            if not self._busy and asked:
                self._busy = True
                threading.Thread(target=self._work, daemon=True).start()
        return await asyncio.gather(*(asyncio.wrap_future(o.replies) for o in asked))

    def _work(self) -> None:
        """Answers whatever waits, as much of one kind as fits at a time."""
        while True:
            time.sleep(_GATHER)  # what is asked at the same time comes along
            with self._lock:
                if not self._waiting:
                    self._busy = False
                    return
                _, n, temperature, _ = self._waiting[0]
                most, alike, rest = self._most(n), [], []
                for one in self._waiting:
                    fits = (one.n, one.temperature) == (n, temperature)
                    (alike if fits and len(alike) < most else rest).append(one)
                self._waiting = rest
            alike = [one for one in alike if one.replies.set_running_or_notify_cancel()]
            try:
                found = self._respond([one.query for one in alike], n, temperature)
            except BaseException as error:
                for one in alike:
                    one.replies.set_exception(error)
                continue
            for one, replies in zip(alike, found, strict=True):
                one.replies.set_result(replies)

    def _most(self, n: int) -> int:
        """Queries that are answered at once, each ``n`` times."""
        # Four characters are about a token.
        long = max(len(one.query) for one in self._waiting) + 4 * self.max_new_tokens
        return max(1, min(_FEW, min(_MANY, max(_FEW, _KEPT // long)) // n))

    def _respond(
        self, queries: list[str], n: int, temperature: float
    ) -> list[list[Reply]]:
        asked = {at: self.prompt.replace("{query}", q) for at, q in enumerate(queries)}
        errors = requests.unanswerable(self.lm, asked, self.max_new_tokens)
        found = {at: [failed(error)] * n for at, error in errors.items()}
        if asked := {at: text for at, text in asked.items() if at not in errors}:
            numbers = [int(digest(one.encode())[:8], 16) for one in asked.values()]
            key = jax.random.fold_in(jax.random.key(0), round(1000 * temperature))
            written = generate(
                self.lm,
                list(asked.values()),
                n=n,
                max_new_tokens=self.max_new_tokens,
                sampling=Sampling(temperature=temperature) if temperature else GREEDY,
                key=jax.vmap(jax.random.fold_in, (None, 0))(
                    key, np.array(numbers, np.uint32)
                ),
                batch_size=max(n, _MANY),
                progress=False,
            )
            for at, some in zip(asked, written, strict=True):
                found[at] = [checked(one.text, one.stopped == "length") for one in some]
        return [found[at] for at in range(len(queries))]
