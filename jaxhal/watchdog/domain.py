"""The questions of a domain, and the passages that come with them."""

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from jaxhal.datasets import Question, load_questions
from jaxhal.evaluation.intervals import fewest_sources
from jaxhal.io.files import replacing
from jaxhal.llm.judges import OverlapRule, references
from jaxhal.reading.keys import digest
from jaxhal.texts import sentences_of
from jaxhal.watchdog.agents import Reply, together
from jaxhal.watchdog.config import Watch
from jaxhal.watchdog.guarding import Watchdog
from jaxhal.watchdog.journal import enough
from jaxhal.watchdog.queries import plain

# Of an exploration's folder: says what questions it had.
_DIGEST = "questions.digest"


def questions_of(config: Watch) -> tuple[list[Question], list[Question]]:
    """Questions to explore from, and others; related ones are on one side."""
    questions = load_questions(config.questions, config.options)
    several: list[list[Question]] = [[] for _ in questions]
    for one, group in zip(questions, related(questions), strict=True):
        several[group].append(one)
    several = [*filter(None, several)]
    order = np.random.default_rng(config.seed).permutation(len(several))
    parts: tuple[list[Question], list[Question]] = ([], [])
    for at in order:
        side = 0 if len(parts[0]) < config.explored else 1
        parts[side].extend(several[at])
    if len(parts[1]) < config.held_out:
        total = len(parts[0]) + len(parts[1])
        raise ValueError(
            f"explored is {config.explored} and held_out {config.held_out}; there are "
            f"{total} questions, in {len(several)} groups of related ones; "
            "set explored and held_out to fewer, or give more questions"
        )
    return parts[0][: config.explored], parts[1][: config.held_out]


def check_unchanged(config: Watch, *, keep: bool = False) -> None:
    """Makes sure that the domain's questions are those that an exploration had.

    With ``keep`` those are kept where it has none yet.
    """
    path = config.folder / _DIGEST
    questions = load_questions(config.questions, config.options)
    own = digest(json.dumps([dataclasses.astuple(one) for one in questions]))
    if keep and not path.is_file():
        with replacing(path) as file:
            file.write(own)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is not there, which says what questions {config.folder} was "
            "explored with; explore it again, which asks nothing twice"
        )
    if path.read_text("utf-8") != own:
        raise ValueError(
            f"{config.questions} has other questions, answers or contexts than when "
            f"{config.folder} was explored; explore under another 'name'"
        )


def related(questions: Sequence[Question]) -> Int[np.ndarray, " questions"]:
    """A number for each, the same for those that share words, answers or sources.

    Those with one context share a source.
    """
    keys: dict[tuple, int] = {}
    pairs = []
    for at, one in enumerate(questions):
        shared: list[tuple] = [("words", plain(one.text)), ("answers", references(one))]
        shared += [("source", one.source)] if one.source else []
        shared += [("context", one.context)] if one.context else []
        pairs += [(at, keys.setdefault(key, len(keys))) for key in shared]
    rows, columns = np.array(pairs).T
    many = len(questions)
    graph = csr_array(
        (np.ones(len(rows)), (rows, many + columns)), (many + len(keys),) * 2
    )
    return connected_components(graph, directed=False)[1][:many]


def passages_of(config: Watch, words: int) -> list[str]:
    """What all questions of the domain come with, cut in pieces.

    That is their contexts, or else their answers, each piece below its question.
    """
    texts: dict[str, None] = {}
    for one in load_questions(config.questions, config.options):
        head = "" if one.context else f"{one.text}\n"
        for text in [one.context] if one.context else references(one):
            for piece in _pieces(text, words):
                texts[head + piece] = None
    return list(texts)


def _pieces(text: str, words: int) -> list[str]:
    """Sentences put together up to so many words."""
    pieces: list[str] = []
    for sentence in sentences_of(text):
        longer = f"{pieces[-1]} {sentence}" if pieces else sentence
        if pieces and len(longer.split()) <= words:
            pieces[-1] = longer
        else:
            pieces.append(sentence)
    return [piece for piece in pieces if piece.strip()]


class Known(NamedTuple):
    """Held-out queries, what the agent said, and whether it made it up.

    ``samples`` are other answers, as many as came; ``left_out`` had too few of use.
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

    async def ask() -> list[list[list[Reply]]]:
        return await together(
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
    asked, replies, others, _ = map(list, zip(*kept, strict=True))
    # What learns, learns of each half of the groups and is judged on the other.
    if fewest_sources(labels, related(asked).tolist()) < 2:
        raise ValueError(
            f"of {len(kept)} held-out questions that were answered, {labels.sum()} "
            "wrongly, all that were answered rightly or all wrongly are related; raise "
            "held_out"
        )
    return Known(asked, replies, others, labels, len(questions) - len(kept))
