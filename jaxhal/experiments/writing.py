"""Questions that a reader answers, and its answers kept as they come."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from jaxhal.datasets import Question, check_questions, load_questions
from jaxhal.generation import requests
from jaxhal.io.checks import at_least, check_name, one_of
from jaxhal.io.configuration import MISSING
from jaxhal.io.files import append, lines_of
from jaxhal.io.progress import progress_bar
from jaxhal.models.lm import DTYPES, LM
from jaxhal.models.mesh import rows_at_once
from jaxhal.reading.keys import digest
from jaxhal.texts import filled


@dataclasses.dataclass
class Writing:
    """Questions and what answers them.

    Attributes:
      name: of the folder that results go to.
      questions: of :data:`QUESTIONS`, or a file of one's own that ends in ``.jsonl``,
        as :func:`jaxhal.datasets.questions_from` takes it.
      options: of their loader.
      limit: keep this many questions, drawn by the seed; all by default.
      prompt: the user's turn, with ``{context}`` and ``{question}`` in it.
      max_new_tokens: the most tokens of an answer.
      temperature: of sampling; 0 takes the likeliest token.
      top_p: keep the likeliest tokens that hold this much probability.
      model: what answers.
      dtype: of its parameters.
      mesh: devices it is spread over, such as ``data=2,model=4``; by default all.
      batch_size: answers written together, on each device along ``data``.
      seed: of all chance.
      out: folder that the named folder goes to.
    """

    name: str = MISSING
    questions: str = MISSING
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    limit: int | None = None
    prompt: str = "{context}\n\n{question}"
    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float | None = None
    model: str = "smollm2-135m"
    dtype: str = "float32"
    mesh: str = ""
    batch_size: int = 16
    seed: int = 0
    out: str = "runs"


def check_writing(config: Writing) -> None:
    """Makes sure of a name, the questions and a type; ValueError says what is wrong."""
    check_name(config.name)
    check_questions(config.questions)
    one_of(DTYPES, dtype=config.dtype)
    at_least(1, batch_size=config.batch_size, max_new_tokens=config.max_new_tokens)


def questions_of(config: Writing) -> list[Question]:
    """The questions that a configuration names, or those it draws from them."""
    found = load_questions(config.questions, config.options)
    if config.limit is not None:
        if not 1 <= config.limit <= len(found):
            raise ValueError(
                f"limit is {config.limit}; there are {len(found)} questions"
            )
        order = np.random.default_rng(config.seed).permutation(len(found))
        found = [found[at] for at in sorted(order[: config.limit])]
    names = [question.id for question in found]
    if len(set(names)) < len(names):
        raise ValueError(f"two of the {len(names)} questions share an id; give others")
    return found


def prompt_of(config: Writing, question: Question) -> str:
    """The user's turn."""
    parts = {"question": question.text, "context": question.context or ""}
    return filled(config.prompt, **parts).strip()


def source_of(question: Question) -> str:
    """What it shares with questions that are not independent of it."""
    return question.source or question.context or question.id


def journal(
    path: Path,
    lm: LM,
    config: Writing,
    by: str,
    prompts: Mapping[str, str],
    write: Callable[[list[int]], list[dict[str, Any]]],
    failed: Mapping[str, Any],
    progress: bool | None,
) -> dict[str, dict[str, Any]]:
    """What is written to each prompt, by the question's id, kept in a file as it comes.

    A run that was killed writes nothing twice.  ``by`` is a fingerprint of what writes,
    ``write`` gives rows for the prompts of these numbers, and ``failed`` is that of one
    which leaves no room, but for its error.
    """
    # An answer to what the question or its context was before is none, nor is that of
    # another model which had the name.
    wanted = [(name, digest(prompt)) for name, prompt in prompts.items()]
    known = {
        (row["id"], row.get("prompt")): row
        for row in lines_of(path)
        if row.get("by", by) == by  # earlier versions did not say
    }
    lacking = [at for at, key in enumerate(wanted) if key not in known]
    every = [*prompts.values()]
    lacking.sort(key=lambda at: len(every[at]))  # a batch is padded to its longest
    size = rows_at_once(lm.params) * config.batch_size
    with progress_bar(len(lacking), "writing", "answer", progress) as bar:
        for start in range(0, len(lacking), size):
            part = lacking[start : start + size]
            some = {at: every[at] for at in part}
            errors = requests.unanswerable(lm, some, config.max_new_tokens)
            rows = {at: {**failed, "error": error} for at, error in errors.items()}
            if left := [at for at in part if at not in errors]:
                rows |= zip(left, write(left), strict=True)
            fresh = [
                {"id": wanted[at][0], "prompt": wanted[at][1], "by": by, **row}
                for at, row in rows.items()
            ]
            append(path, fresh)
            known |= {(row["id"], row["prompt"]): row for row in fresh}
            bar.update(len(part))
    return {key[0]: known[key] for key in wanted}


def keys_of(key: Array, count: int) -> Array:
    """A key for each question, whatever is asked together."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, np.arange(count))
