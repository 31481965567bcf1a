"""The watchdog itself: asks an agent's bound about every query."""

import asyncio
import datetime
import math
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from jaxhal.encoding import embed, kept_encoder
from jaxhal.entailment import Entailment, Similarity
from jaxhal.showing import quoted
from jaxhal.store.keys import digest
from jaxhal.watchdog.agents import Agent, Reply
from jaxhal.watchdog.bounds import BoundaryStore, Hit, Point
from jaxhal.watchdog.conversation import Conversation, last_turn
from jaxhal.watchdog.entropy import known_entropies
from jaxhal.watchdog.index import unit
from jaxhal.watchdog.journal import enough
from jaxhal.watchdog.monitor import NEAREST, Decision, Guard, decide


class Check(NamedTuple):
    """What a watchdog says of a query.

    Attributes:
      query: what was asked.
      flagged: the agent may hallucinate.
      score: higher = more likely so, as :class:`jaxhal.watchdog.Decision` has it.
      near: the query is near the bound.
      cosine: with the centroid of the three nearest points; -1 where they do not count.
      entropy: of the agent's answers, in nats; ``None`` where it was not asked for.
      hits: the nearest points.
      seconds: that the bound was looked through.
      error: why the entropy is not known, where it should be; the query is not flagged
        then.
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
    """An answer and what the watchdog says of its query.

    Attributes:
      reply: what the agent said; empty where it was blocked.
      check: of the query.
      blocked: whether the agent's answer is held back.
    """

    reply: Reply
    check: Check
    blocked: bool


class Watchdog:
    """Guards an agent by its bound.

    A query near the bound is flagged at once.  For another one the agent is asked for
    some answers, and how much they differ decides, unless the guard asks for none.
    What holds a bound of no points flags nothing.

    Args:
      agent: who is guarded.
      store: its bound.
      guard: how queries are judged.
      encoder: of queries, the one that made the bound.
      samples: answers that an entropy is of.
      temperature: at which they are drawn.
      answer_temperature: of the answer that :meth:`guard` gives.
      entailment: what decides whether two answers mean the same.
      domain: of the points that it learns, in words.

    Raises:
      ValueError: when ``samples`` is below 1, or the encoder's vectors are not as wide
        as those of the store.
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
        if samples < 1:
            raise ValueError(f"samples is {samples}; give at least 1")
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

    async def check(self, query: str) -> Check:
        """Judges one query; see :meth:`checks`."""
        return (await self.checks([query]))[0]

    async def checks(self, queries: Sequence[str]) -> list[Check]:
        """Judges queries, before the agent answers them.

        Args:
          queries: of which one may be a :class:`~jaxhal.watchdog.Conversation`; its
            wishes are for the answer alone.

        Raises:
          ValueError: on no query, or an empty one.
          RuntimeError: when the agent takes no query at all, or the store does not
            answer.
        """
        vectors, hits, seconds = await asyncio.to_thread(self._near, [*queries])
        none = [None] * len(hits)
        known = await asyncio.to_thread(self._all_decided, vectors, hits, none)
        open_ = [
            at
            for at, decision in enumerate(known)
            if self.settings.entropy is not None and not decision.near and hits[at]
        ]
        entropies: dict[int, float] = {}
        errors: dict[int, str] = {}
        if open_:
            found = await self._entropies([queries[at] for at in open_])
            for at, (entropy, error) in zip(open_, found, strict=True):
                if error is not None:
                    errors[at] = error
                else:
                    entropies[at] = entropy
            sure = [*entropies]
            decided = await asyncio.to_thread(
                self._all_decided,
                [vectors[at] for at in sure],
                [hits[at] for at in sure],
                [*entropies.values()],
            )
            for at, decision in zip(sure, decided, strict=True):
                known[at] = decision
        return [
            Check(
                last_turn(query),
                bool(decision.flagged),
                float(decision.score),
                bool(decision.near),
                float(decision.cosine),
                entropies.get(at),
                hits[at],
                seconds / len(known),
                errors.get(at),
            )
            for at, (query, decision) in enumerate(zip(queries, known, strict=True))
        ]

    async def guard(self, query: str, *, block: bool = False) -> Guarded:
        """Has the agent answer a query, beside what the watchdog says of it.

        Args:
          query: what is asked.
          block: ask the agent only where the query is not flagged.
        """
        if block:
            check = await self.check(query)
            if check.flagged:
                return Guarded(Reply(""), check, True)
            return Guarded(await self._answer(query), check, False)
        check, reply = await asyncio.gather(self.check(query), self._answer(query))
        return Guarded(reply, check, False)

    async def learn(
        self, query: str, response: str, hallucinated: bool, context: str = ""
    ) -> int:
        """Takes in what someone found an answer to be.

        A hallucination becomes a point of the bound; the same query is near the bound
        from three such points on.  An answer that is none takes out all points that its
        query is as near to as the guard's similarity, which exploring again would find
        again.

        Args:
          query: what was asked; of a conversation the last turn becomes the point.
          response: what the agent said.
          hallucinated: what it was found to be.
          context: what it was answered from.

        Returns:
          How many points the bound has gained, or lost as a negative number.

        Raises:
          ValueError: on an empty query.
          RuntimeError: when the entropy of the query is needed and the agent answers
            nothing.
        """
        (vector,), (hits,), _ = await asyncio.to_thread(self._near, [query])
        if not hallucinated:
            return -await asyncio.to_thread(self._forget, vector, hits)
        ((entropy, error),) = await self._entropies([query])
        if error is not None:
            raise RuntimeError(
                f"{self.agent.name} answers nothing to {quoted(query)}: {error}"
            )
        last = last_turn(query)
        point = Point(
            id=digest(f"{self.agent.name}\n{last}"),
            query=last,
            response=response,
            context=context,
            entropy=entropy,
            verdict="someone found it hallucinated",
            domain=self.domain,
            agent=self.agent.name,
            time=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )
        return await asyncio.to_thread(self._add, point, vector)

    def _add(self, point: Point, vector: np.ndarray) -> int:
        fresh = point.id not in self.store
        self.store.add([point], vector[None])
        return int(fresh)

    def _forget(self, vector: np.ndarray, hits: Sequence[Hit]) -> int:
        """Takes out what is near, and what is near when that is gone."""
        gone = 0
        while close := [h for h in hits if h.similarity >= self.settings.similarity]:
            removed = self.store.remove([hit.point.id for hit in close])
            if not removed:
                break
            gone += removed
            (hits,) = self.store.search(vector[None], NEAREST)
        return gone

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
        vectors: Iterable[np.ndarray],
        hits: Sequence[Sequence[Hit]],
        entropies: Sequence[float | None],
    ) -> list[Decision]:
        """Of each query; without an entropy, as if it were that of the bound."""
        highest = -math.inf
        asked = any(entropy is not None for entropy in entropies)
        if asked and self.settings.entropy == "highest":
            highest = self.store.highest_entropy() or 0.0
        each = zip(vectors, hits, entropies, strict=True)
        return [self._decided(*one, highest) for one in each]

    def _decided(
        self,
        vector: np.ndarray,
        hits: Sequence[Hit],
        entropy: float | None,
        highest: float,
    ) -> Decision:
        missing = NEAREST - len(hits)
        vectors = np.zeros((NEAREST, self.store.width), np.float32)
        if hits:
            vectors[: len(hits)] = [hit.vector for hit in hits]
        cosines = [hit.similarity for hit in hits] + [-math.inf] * missing
        entropies = [hit.point.entropy for hit in hits] + [0.0] * missing
        if entropy is None:
            entropy = highest = entropies[0]
        found = decide(
            np.asarray(unit(vector)),
            np.float32(entropy),
            vectors,
            np.array(cosines, np.float32),
            np.array(entropies, np.float32),
            np.float32(highest),
            self.settings,
        )
        return Decision(*jax.device_get(found))

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


def _lacking(replies: Sequence[Reply]) -> str | None:
    """Why no entropy can be taken of some answers, if it cannot."""
    failures = [one.error for one in replies if one.error is not None]
    if len(replies) - len(failures) >= enough(len(replies)):
        return None
    return f"{len(failures)} of {len(replies)} answers failed: {failures[0]}"
