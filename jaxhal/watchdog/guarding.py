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
from jaxhal.watchdog.agents import Agent, Reply, Threads
from jaxhal.watchdog.bounds import BoundaryStore, Hit, Point, now, point_id
from jaxhal.watchdog.conversation import Conversation, last_turn, looked_at
from jaxhal.watchdog.index import unit
from jaxhal.watchdog.journal import enough
from jaxhal.watchdog.monitor import NEAREST, Decision, Guard, decide, known_entropies

# Whose answers are compared at a time.
_COMPARED = 4


class Check(NamedTuple):
    """What a watchdog says of a query, beside its :class:`jaxhal.watchdog.Decision`.

    ``entropy`` is that of the agent's answers, in nats, ``None`` where it was not asked
    for; ``error`` is why it is not known, where it should be.  ``hits`` are the points
    nearest to the query, or to the part of a conversation that has the highest score,
    and ``seconds`` those that the bound was looked through.
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


class Watchdog:
    """Guards an agent by its bound.

    A query near the bound is flagged at once.  For another one the agent is asked for
    some answers, and how much they differ decides, unless the guard asks for none.

    Args:
      encoder: of queries, the one that made the bound.
      samples: answers that an entropy is of.
      answer_temperature: of an answer that is given.
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
        self._comparing = Threads(_COMPARED)

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
        looked = await asyncio.to_thread(self._look, [*queries], known)
        vectors, hits, decisions, seconds = looked
        open_ = [
            at
            for at, decision in enumerate(decisions)
            if self.settings.entropy is not None and not decision.near and hits[at]
        ]
        found: dict[int, tuple[float | None, str | None]] = {}
        if open_:
            asked = await self._entropies([queries[at] for at in open_])
            found = dict(zip(open_, asked, strict=True))
        entropies = [found.get(at, (None, None)) for at in range(len(queries))]
        if open_:
            of = [entropy for entropy, _ in entropies]
            decisions = await asyncio.to_thread(self._all_decided, vectors, hits, of)
        return [
            Check(
                query=last_turn(query),
                **{name: v.item() for name, v in decisions[at]._asdict().items()},
                entropy=entropies[at][0],
                hits=hits[at],
                seconds=seconds / len(decisions),
                error=entropies[at][1],
            )
            for at, query in enumerate(queries)
        ]

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
        last, act = last_turn(query), asyncio.to_thread
        own = point_id(self.agent.name, last)
        if not hallucinated:
            if named is None:
                _, (hits,), _ = await act(self._near, [last])
                named = self.close(hits)
            return -await act(self.store.remove, [own, *named])
        vectors, _, _ = await act(self._near, [last])
        ((entropy, error),) = await self._entropies([query])
        if entropy is None:
            raise RuntimeError(
                f"{self.agent.name} answers nothing to {quoted(query)}: {error}"
            )
        why = "someone found it hallucinated"
        about = why, self.domain, self.agent.name, now()
        point = Point(own, last, response, context, entropy, *about)
        known = await act(self.store.__contains__, own)
        await act(self.store.add, [point], vectors)
        return int(not known)

    def close(self, hits: Sequence[Hit]) -> list[str]:
        """Names of the points that are as near as the guard's similarity."""
        least = self.settings.similarity
        return [hit.point.id for hit in hits if hit.similarity >= least]

    def _look(
        self, queries: list[str], known: Container[str]
    ) -> tuple[np.ndarray, list[list[Hit]], list[Decision], float]:
        """Of each query what has the highest score, the whole one if all are equal."""
        texts = [looked_at(query, known) for query in queries]
        vectors, hits, seconds = self._near([one for some in texts for one in some])
        decisions = self._all_decided(vectors, hits, [None] * len(hits))
        best, end = [], 0
        for some in texts:
            rows = range(end, end := end + len(some))
            best.append(max(rows, key=lambda row: decisions[row].score))
        found = [hits[row] for row in best], [decisions[row] for row in best]
        return vectors[best], *found, seconds

    def _near(
        self, texts: list[str]
    ) -> tuple[Float[np.ndarray, "texts width"], list[list[Hit]], float]:
        vectors = embed(kept_encoder(self.encoder), texts, progress=False)
        began = time.perf_counter()
        hits = self.store.search(vectors, NEAREST)
        return vectors, hits, time.perf_counter() - began

    def _all_decided(
        self,
        vectors: np.ndarray,
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
        own = np.full(rows, np.nan, np.float32)
        own[: len(entropies)] = entropies
        known, highest = ~np.isnan(own), 0.0
        if known.any() and self.settings.entropy == "highest":
            highest = self.store.highest_entropy() or 0.0
        own = np.where(known, own, of_points[:, 0])
        bound = np.where(known, np.float32(highest), own)
        arrays = unit(query), own, near, cosines, of_points, bound
        found = jax.device_get(_decide(*arrays, guard=self.settings))
        return [Decision(*one) for one in zip(*found, strict=True)][: len(vectors)]

    async def _entropies(
        self, queries: Sequence[str]
    ) -> list[tuple[float | None, str | None]]:
        """Semantic entropy of each query, or why it is not known."""
        talks = [*map(Conversation.of, queries)]
        asked = [Conversation(one.turns) for one in talks]  # wishes are the answer's
        replies = await self.agent.respond(asked, self.samples, self.temperature)
        said = [[one.text for one in some if one.error is None] for some in replies]
        last = [one.query for one in talks]
        found = await self._comparing(known_entropies, last, said, self.entailment)
        errors = [_lacking(some) for some in replies]
        return [
            (None if lacking or error else entropy, lacking or error)
            for (entropy, error), lacking in zip(found, errors, strict=True)
        ]


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


def verdict(check: Check, block: bool) -> dict[str, Any]:
    """What the watchdog says, as the response has it."""
    names = ("score", "near", "cosine", "entropy", "error")
    return {
        "flagged": check.flagged,
        "blocked": block and check.flagged,
        **{name: getattr(check, name) for name in names},
        "mode": "block" if block else "flag",
        "nearest": [
            {"query": hit.point.query, "similarity": hit.similarity}
            for hit in check.hits
        ],
    }
