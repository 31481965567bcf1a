"""Questions that an agent was not explored with, and what it says to them."""

import asyncio
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jaxhal.datasets import Question
from jaxhal.llm.judges import OverlapRule
from jaxhal.watchdog.agents import Reply
from jaxhal.watchdog.config import Watch
from jaxhal.watchdog.domain import questions_of
from jaxhal.watchdog.guarding import Watchdog
from jaxhal.watchdog.journal import enough


class Known(NamedTuple):
    """Held-out queries, what the agent said, and whether it made it up.

    Attributes:
      samples: other answers of the agent, as many as came.
      labels: 1 hallucinated, by the references.
      left_out: questions without an answer, or with too few others of use.
    """

    questions: list[Question]
    replies: list[Reply]
    samples: list[list[Reply]]
    labels: Int[np.ndarray, " queries"]
    left_out: int


def known_of(config: Watch, dog: Watchdog) -> Known:
    """Asks the held-out questions; what gets no answer is left out."""
    _, questions = questions_of(config)
    queries = [one.text for one in questions]

    async def ask() -> tuple[list[list[Reply]], list[list[Reply]]]:
        return await asyncio.gather(
            dog.agent.respond(queries, 1, dog.answer_temperature),
            dog.agent.respond(queries, dog.samples, dog.temperature),
        )

    answers, samples = asyncio.run(ask())
    rule, kept = OverlapRule(config.contained), []
    # All methods look at equally many; a question with few would cost all others.
    least = enough(dog.samples)
    for question, (reply,), some in zip(questions, answers, samples, strict=True):
        good = [one for one in some if one.error is None]
        if reply.error is None and len(good) >= least:
            kept.append((question, reply, good, rule(question, reply.text).label))
    labels = np.array([label for *_, label in kept], int)
    if len(set(labels.tolist())) < 2:
        raise ValueError(
            f"of {len(questions)} held-out questions {len(kept)} were answered, "
            f"{int(labels.sum())} of them wrongly; that leaves nothing to tell apart"
        )
    return Known(
        [one for one, *_ in kept],
        [reply for _, reply, *_ in kept],
        [some for _, _, some, _ in kept],
        labels,
        len(questions) - len(kept),
    )
