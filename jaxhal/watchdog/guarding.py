"""The watchdog itself: asks an agent's bound about every query."""

import asyncio
import copy
import dataclasses
import functools
import time
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxhal.io.checks import at_least
from jaxhal.io.showing import quoted
from jaxhal.llm.entailment import Entailment, Similarity
from jaxhal.models.batching import bucket
from jaxhal.models.encoders.encoding import embed, kept_encoder
from jaxhal.watchdog.agents import Agent, Reply
from jaxhal.watchdog.bounds import BoundaryStore, Hit, Point, now, point_id
from jaxhal.watchdog.conversation import Conversation, last_turn, looked_at
from jaxhal.watchdog.index import unit
from jaxhal.watchdog.journal import enough
from jaxhal.watchdog.monitor import NEAREST, Decision, Guard, decide, known_entropies


class Check(NamedTuple):
    """What a watchdog says of a query.

    Attributes:
      score: higher = more likely hallucinated, as :class:`jaxhal.watchdog.Decision` has
        it.
      cosine: with the centroid of the three nearest points; -1 where they do not count.
      entropy: of the agent's answers, in nats; ``None`` where it was not asked for.
      hits: the points nearest to the query, or to the part of a conversation that has
        the highest score.
      seconds: that the bound was looked through.
      error: why the entropy is not known, where it should be.
    """

    query: str
    flagged: bool
    score: float
    near: bool
    cosine: float
    entropy: float | None
    hits: list[Hit]
    seconds: float
    error: str | None = None


class Guarded(NamedTuple):
    """An answer, empty if blocked, and what the watchdog says of its query."""

    reply: Reply
    check: Check
    blocked: bool


class Watchdog:
    """Guards an agent by its bound.

    A query near the bound is flagged at once.  For another one the agent is asked for
    some answers, and how much they differ decides, unless the guard asks for none.

    Args:
      guard: how queries are judged.
      encoder: of queries, the one that made the bound.
      samples: answers that an entropy is of.
      answer_temperature: of the answer that :meth:`guard` gives.
      entailment: what decides whether two answers mean the same.
      domain: of the points that it learns, in words.
    """

    def __init__(
        self,
        agent: Agent,
        store: BoundaryStore,
        *,
        guard: Guard = Guard(),  # noqa: B008  (an immutable default)
        encoder: str = "all-minilm-l6-v2",
        samples: int = 10,
        temperature: float = 1.0,
        answer_temperature: float = 0.1,
        entailment: Entailment | None = None,
        domain: str = "",
    ):
        at_least(1, samples=samples)
        width = kept_encoder(encoder).config.hidden_size
        if width != store.width:
            raise ValueError(
                f"encoder {encoder!r} makes vectors of {width} numbers, and the store "
                f"holds {store.width}; use the encoder that made the bound"
            )
        self.agent, self.store, self.settings = agent, store, guard
        self.encoder, self.samples, self.temperature = encoder, samples, temperature
        self.answer_temperature = answer_temperature
        self.entailment, self.domain = entailment or Similarity(), domain

    def behind(self, store: BoundaryStore, **settings: Any) -> "Watchdog":
        """The same agent behind another bound, or guarded by other settings."""
        other = copy.copy(self)
        other.store = store
        other.settings = dataclasses.replace(self.settings, **settings)
        return other

    async def check(self, query: str, known: Container[str] = ()) -> Check:
        """Judges one query; see :meth:`checks`."""
        return (await self.checks([query], known))[0]

    async def checks(
        self, queries: Sequence[str], known: Container[str] = ()
    ) -> list[Check]:
        """Judges queries, before the agent answers them.

        Of a :class:`~jaxhal.watchdog.Conversation` the part with the highest score
        counts; nothing is looked for in the agent's ``known`` answers.
        """
        seen, seconds = await asyncio.to_thread(self._look, [*queries], known)
        vectors, hits, decisions = map(list, zip(*seen, strict=True))
        open_ = [
            at
            for at, decision in enumerate(decisions)
            if self.settings.entropy is not None and not decision.near and hits[at]
        ]
        entropies: list[float | None] = [None] * len(queries)
        errors: list[str | None] = [None] * len(queries)
        if open_:
            found = await self._entropies([queries[at] for at in open_])
            for at, (entropy, error) in zip(open_, found, strict=True):
                entropies[at] = entropy if error is None else None
                errors[at] = error
            again = await asyncio.to_thread(self._all_decided, vectors, hits, entropies)
            for at in open_:
                decisions[at] = again[at]
        return [
            Check(
                last_turn(query),
                bool(decision.flagged),
                float(decision.score),
                bool(decision.near),
                float(decision.cosine),
                entropies[at],
                hits[at],
                seconds / len(decisions),
                errors[at],
            )
            for at, (query, decision) in enumerate(zip(queries, decisions, strict=True))
        ]

    async def guard(self, query: str, *, block: bool = False) -> Guarded:
        """Has the agent answer, unless a flagged query is blocked."""
        if block:
            check = await self.check(query)
            if check.flagged:
                return Guarded(Reply(""), check, True)
            return Guarded(await self._answer(query), check, False)
        check, reply = await asyncio.gather(self.check(query), self._answer(query))
        return Guarded(reply, check, False)

    async def learn(
        self,
        query: str,
        response: str,
        hallucinated: bool,
        context: str = "",
        *,
        named: Sequence[str] | None = None,
    ) -> int:
        """Takes in what an answer was found to be; how many points the bound gained.

        A hallucination becomes a point of the bound.  An answer that is none takes out
        the point that the query itself became, and those ``named``, as :meth:`close`
        has them; by default those near it now.
        """
        if not hallucinated:
            if named is None:
                _, (hits,), _ = await asyncio.to_thread(self._near, [query])
                named = self.close(hits)
            own = point_id(self.agent.name, last_turn(query))
            return -await asyncio.to_thread(self.store.remove, [own, *named])
        (vector,), _, _ = await asyncio.to_thread(self._near, [query])
        ((entropy, error),) = await self._entropies([query])
        if error is not None:
            raise RuntimeError(
                f"{self.agent.name} answers nothing to {quoted(query)}: {error}"
            )
        point = Point(
            point_id(self.agent.name, last_turn(query)),
            last_turn(query),
            response,
            context,
            entropy,
            "someone found it hallucinated",
            self.domain,
            self.agent.name,
            now(),
        )
        return await asyncio.to_thread(self._add, point, vector)

    def close(self, hits: Sequence[Hit]) -> list[str]:
        """Names of the points that are as near as the guard's similarity."""
        least = self.settings.similarity
        return [hit.point.id for hit in hits if hit.similarity >= least]

    def _add(self, point: Point, vector: np.ndarray) -> int:
        fresh = point.id not in self.store
        self.store.add([point], vector[None])
        return int(fresh)

    def _look(
        self, queries: list[str], known: Container[str]
    ) -> tuple[list[tuple[np.ndarray, list[Hit], Decision]], float]:
        """Of each query what has the highest score, the whole one if all are equal."""
        texts = [looked_at(query, known) for query in queries]
        vectors, hits, seconds = self._near([one for some in texts for one in some])
        decisions = self._all_decided(vectors, hits, [None] * len(hits))
        found, end = [], 0
        for some in texts:
            rows = range(end, end := end + len(some))
            best = max(rows, key=lambda row: decisions[row].score)
            found.append((vectors[best], hits[best], decisions[best]))
        return found, seconds

    def _near(
        self, queries: list[str]
    ) -> tuple[Float[np.ndarray, "queries width"], list[list[Hit]], float]:
        last = [*map(last_turn, queries)]
        vectors = embed(kept_encoder(self.encoder), last, progress=False)
        began = time.perf_counter()
        hits = self.store.search(vectors, NEAREST)
        return vectors, hits, time.perf_counter() - began

    def _all_decided(
        self,
        vectors: Sequence[np.ndarray] | np.ndarray,
        hits: Sequence[Sequence[Hit]],
        entropies: Sequence[float | None],
    ) -> list[Decision]:
        """Of each query; without an entropy, as if it were that of the bound."""
        rows, width = bucket(len(vectors), 1), self.store.width
        query = np.zeros((rows, width), np.float32)
        query[: len(vectors)] = vectors
        near = np.zeros((rows, NEAREST, width), np.float32)
        cosines = np.full((rows, NEAREST), -np.inf, np.float32)
        of_points = np.zeros((rows, NEAREST), np.float32)
        for row, some in enumerate(hits):
            for place, hit in enumerate(some):
                near[row, place], cosines[row, place] = hit.vector, hit.similarity
                of_points[row, place] = hit.point.entropy
        asked = any(entropy is not None for entropy in entropies)
        highest = np.full(rows, -np.inf, np.float32)
        if asked and self.settings.entropy == "highest":
            highest[:] = self.store.highest_entropy() or 0.0
        own = np.zeros(rows, np.float32)
        for row, entropy in enumerate(entropies):
            own[row] = of_points[row, 0] if entropy is None else entropy
            highest[row] = own[row] if entropy is None else highest[row]
        arrays = unit(query), own, near, cosines, of_points, highest
        found = jax.device_get(_decide(*arrays, guard=self.settings))
        return [Decision(*one) for one in zip(*found, strict=True)][: len(vectors)]

    async def _entropies(
        self, queries: Sequence[str]
    ) -> list[tuple[float, str | None]]:
        """Semantic entropy of each query, or why it is not known."""
        asked = [
            Conversation(one.turns) if isinstance(one, Conversation) else one
            for one in queries
        ]
        replies = await self.agent.respond(asked, self.samples, self.temperature)
        said = [[one.text for one in some if one.error is None] for some in replies]
        last = [*map(last_turn, queries)]
        found = await asyncio.to_thread(known_entropies, last, said, self.entailment)
        return [
            (entropy, _lacking(some) or error)
            for (entropy, error), some in zip(found, replies, strict=True)
        ]

    async def _answer(self, query: str) -> Reply:
        ((reply,),) = await self.agent.respond([query], 1, self.answer_temperature)
        return reply


@functools.partial(jax.jit, static_argnames="guard")
def _decide(*of_queries: Array, guard: Guard) -> Decision:
    return jax.vmap(functools.partial(decide, guard=guard))(*of_queries)


def _lacking(replies: Sequence[Reply]) -> str | None:
    """Why no entropy can be taken of some answers, if it cannot."""
    failures = [one.error for one in replies if one.error is not None]
    if len(replies) - len(failures) >= enough(len(replies)):
        return None
    return f"{len(failures)} of {len(replies)} answers failed: {failures[0]}"


#: Said in place of an answer that is held back.
BLOCKED = (
    "I may not know enough to answer this question without making something up, so I "
    "would rather not."
)


def verdict(check: Check, mode: str, blocked: bool) -> dict[str, Any]:
    """What the watchdog says, as the response has it."""
    return {
        "flagged": check.flagged,
        "blocked": blocked,
        "score": check.score,
        "near": check.near,
        "cosine": check.cosine,
        "entropy": check.entropy,
        "mode": mode,
        "error": check.error,
        "nearest": [
            {"query": hit.point.query, "similarity": hit.similarity}
            for hit in check.hits
        ],
    }


def headers(check: Check, blocked: bool) -> dict[str, str]:
    """The same in short, as headers."""
    return {
        "X-Watchdog-Flagged": str(check.flagged).lower(),
        "X-Watchdog-Blocked": str(blocked).lower(),
        "X-Watchdog-Score": f"{check.score:.4f}",
    }
