"""Data sets of labelled answers, and of questions to answer."""

import difflib
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxhal.datasets.alterations import alterations as alterations
from jaxhal.datasets.alterations import altered as altered
from jaxhal.datasets.handwritten import bundled as bundled
from jaxhal.datasets.handwritten import bundled_answers as bundled_answers
from jaxhal.datasets.jsonl import Row as Row
from jaxhal.datasets.logprobs import logprobs_of as logprobs_of
from jaxhal.datasets.published import halueval as halueval
from jaxhal.datasets.published import medquad as medquad
from jaxhal.datasets.published import toha as toha
from jaxhal.datasets.published import toha_questions as toha_questions
from jaxhal.datasets.published import truthfulqa as truthfulqa
from jaxhal.datasets.published import truthfulqa_questions as truthfulqa_questions
from jaxhal.datasets.published import xsum_inputs as xsum_inputs
from jaxhal.datasets.questions import Question as Question
from jaxhal.datasets.questions import questions_from as questions_from
from jaxhal.datasets.sources import data_root as data_root
from jaxhal.datasets.spans import Passage as Passage
from jaxhal.datasets.spans import ragtruth as ragtruth
from jaxhal.datasets.spans import token_labels as token_labels
from jaxhal.datasets.spans import wikibio as wikibio
from jaxhal.datasets.spans import wikibio_passages as wikibio_passages
from jaxhal.datasets.tables import examples as examples
from jaxhal.datasets.tables import from_dataset as from_dataset
from jaxhal.datasets.tables import from_hub as from_hub
from jaxhal.datasets.tables import from_jsonl as from_jsonl
from jaxhal.datasets.tables import from_parquet as from_parquet
from jaxhal.datasets.tables import from_rows as from_rows
from jaxhal.types import Example


class Entry(NamedTuple):
    """A data set that goes by name: what loads it, and where it comes from."""

    loader: Callable[..., list[Example]]
    summary: str
    licence: str
    reference: str


DATASETS = {
    "bundled": Entry(
        bundled,
        "104 answers to 52 questions over short texts, written by hand",
        "Apache-2.0",
        "this package",
    ),
    "bundled_answers": Entry(
        bundled_answers,
        "66 answers of several sentences to 22 texts, 30 % hallucinated, by hand",
        "Apache-2.0",
        "this package",
    ),
    "ragtruth": Entry(
        ragtruth,
        "answers of language models to retrieved text, hallucinated spans marked",
        "MIT",
        "Niu et al., RAGTruth, ACL 2024",
    ),
    "alterations": Entry(
        alterations,
        "grounded answers of RAGTruth, as they are and with one thing altered by rule",
        "MIT",
        "this package, from Niu et al., RAGTruth, ACL 2024",
    ),
    "toha_coqa": Entry(
        functools.partial(toha, "coqa"),
        "answers of Mistral-7B to questions in a dialogue about a story",
        "MIT",
        "Bazarova et al., Topological Divergence on Attention Graphs, 2025",
    ),
    "toha_squad": Entry(
        functools.partial(toha, "squad"),
        "answers of Mistral-7B to questions about a paragraph of Wikipedia",
        "MIT",
        "Bazarova et al., Topological Divergence on Attention Graphs, 2025",
    ),
    "halueval": Entry(
        halueval,
        "a right and a made-up answer to each question over a text",
        "MIT",
        "Li et al., HaluEval, EMNLP 2023",
    ),
    "truthfulqa": Entry(
        truthfulqa,
        "true and false answers to questions that invite misconceptions",
        "Apache-2.0",
        "Lin et al., TruthfulQA, ACL 2022",
    ),
    "wikibio": Entry(
        wikibio,
        "passages of GPT-3 about subjects of Wikipedia, inaccurate sentences marked",
        "CC BY-SA 3.0",
        "Manakul et al., SelfCheckGPT, EMNLP 2023",
    ),
}


#: Questions with right answers by name, and what loads them.
QUESTIONS: dict[str, Callable[..., list[Question]]] = {
    "squad": functools.partial(toha_questions, "squad"),
    "coqa": functools.partial(toha_questions, "coqa"),
    "truthfulqa": truthfulqa_questions,
    "medquad": medquad,
    "xsum": xsum_inputs,
}


def load_dataset(name: str | os.PathLike, /, **options: Any) -> list[Example]:
    """The examples of a data set of :data:`DATASETS`, or of a file.

    Raises ValueError on an unknown name or option, or at the first bad row of a file.

    Args:
      name: in :data:`DATASETS`, or the path of a ``.jsonl`` or ``.parquet`` file with
        the columns of :mod:`jaxhal.datasets.tables`.
      options: of the loader, such as ``root`` or ``split``; a file takes none.

    >>> len(load_dataset("bundled"))
    104
    """
    name = str(name)
    rows = None if name in DATASETS else read_file(name)
    loader = DATASETS[name].loader if rows is None else None
    _check_options(name, options, loader)
    return loader(**options) if loader else examples(rows or ())


def _check_options(
    name: str, options: Mapping[str, Any], loader: Callable[..., Any] | None
) -> None:
    """ValueError on an option that a loader does not take; a file takes none."""
    known = inspect.signature(loader).parameters if loader else ()
    for option in options:
        if option not in known:
            takes = ", ".join(known) or "none"
            raise ValueError(
                f"unknown option {option!r} of {name!r}; it takes: {takes}"
            )


def read_file(name: str | os.PathLike) -> Iterator[Row]:
    """The rows of a ``.jsonl`` or ``.parquet`` file, good and bad."""
    readers = {".jsonl": from_jsonl, ".parquet": from_parquet}
    reader = readers.get(Path(name).suffix.lower())
    if reader is not None:
        return reader(name)
    if name in QUESTIONS:
        raise ValueError(
            f"{name!r} holds questions and no answers; have a model answer them with "
            "jaxhal generate"
        )
    near = difflib.get_close_matches(str(name), DATASETS, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(
        f"unknown data set {str(name)!r}; {hint}give one of {', '.join(DATASETS)}, or "
        "the path of a .jsonl or .parquet file"
    )


def check_questions(name: str) -> None:
    """Raises ValueError unless questions can go by that name, or are in such a file."""
    if name not in QUESTIONS and not name.endswith(".jsonl"):
        raise ValueError(
            f"questions is {name!r}; use one of {', '.join(QUESTIONS)}, or a file of "
            "your own that ends in .jsonl"
        )


def load_questions(name: str, options: Mapping[str, Any]) -> list[Question]:
    """Those of :data:`QUESTIONS`, or of a file as :func:`questions_from` reads it.

    Raises ValueError on an unknown option.
    """
    loader = QUESTIONS.get(name)
    _check_options(name, options, loader)
    return loader(**options) if loader else questions_from(name)
