"""Data sets of labelled answers, and of questions to answer."""

import difflib
import functools
import inspect
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxhal.datasets.bundled import bundled as bundled
from jaxhal.datasets.fields import Row as Row
from jaxhal.datasets.halueval import halueval as halueval
from jaxhal.datasets.medquad import medquad as medquad
from jaxhal.datasets.questions import Question as Question
from jaxhal.datasets.questions import questions_from as questions_from
from jaxhal.datasets.ragtruth import ragtruth as ragtruth
from jaxhal.datasets.root import data_root as data_root
from jaxhal.datasets.spans import token_labels as token_labels
from jaxhal.datasets.tables import examples as examples
from jaxhal.datasets.tables import from_dataset as from_dataset
from jaxhal.datasets.tables import from_hub as from_hub
from jaxhal.datasets.tables import from_jsonl as from_jsonl
from jaxhal.datasets.tables import from_parquet as from_parquet
from jaxhal.datasets.tables import from_rows as from_rows
from jaxhal.datasets.toha import toha as toha
from jaxhal.datasets.toha import toha_questions as toha_questions
from jaxhal.datasets.truthfulqa import truthfulqa as truthfulqa
from jaxhal.datasets.truthfulqa import truthfulqa_questions as truthfulqa_questions
from jaxhal.datasets.wikibio import Passage as Passage
from jaxhal.datasets.wikibio import wikibio as wikibio
from jaxhal.datasets.wikibio import wikibio_passages as wikibio_passages
from jaxhal.datasets.xsum import xsum_inputs as xsum_inputs
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
    "ragtruth": Entry(
        ragtruth,
        "answers of language models to retrieved text, hallucinated spans marked",
        "MIT",
        "Niu et al., RAGTruth, ACL 2024",
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


def load_dataset(name: str | os.PathLike, /, **options: Any) -> list[Example]:
    """The examples of a data set of :data:`DATASETS`, or of a file.

    Args:
      name: in :data:`DATASETS`, or the path of a ``.jsonl`` or ``.parquet`` file with
        the columns of :mod:`jaxhal.datasets.tables`.
      options: of the loader, such as ``root`` or ``split``; a file takes none.

    Raises:
      ValueError: on an unknown name or option, or at the first bad row of a file.
      FileNotFoundError: when the data is not there.

    >>> len(load_dataset("bundled"))
    104
    """
    name = str(name)
    if name not in DATASETS:
        rows = read_file(name)
        _check_options(name, options, ())
        return examples(rows)
    loader = DATASETS[name].loader
    _check_options(name, options, inspect.signature(loader).parameters)
    return loader(**options)


def read_file(name: str | os.PathLike) -> Iterator[Row]:
    """The rows of a ``.jsonl`` or ``.parquet`` file, good and bad.

    Raises:
      ValueError: on a name with another ending.
      FileNotFoundError: when the file does not exist.
    """
    readers = {".jsonl": from_jsonl, ".parquet": from_parquet}
    reader = readers.get(Path(name).suffix.lower())
    if reader is not None:
        return reader(name)
    near = difflib.get_close_matches(str(name), DATASETS, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(
        f"unknown data set {str(name)!r}; {hint}give one of {', '.join(DATASETS)}, or "
        "the path of a .jsonl or .parquet file"
    )


def _check_options(name: str, options: Iterable[str], known: Collection[str]) -> None:
    for option in options:
        if option not in known:
            takes = ", ".join(known) or "none"
            raise ValueError(
                f"unknown option {option!r} of {name!r}; it takes: {takes}"
            )
