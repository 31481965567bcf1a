"""TruthfulQA: questions that people answer wrongly from common misconceptions."""

import csv
import os
from collections.abc import Collection
from typing import Literal

from jaxhal.datasets.questions import Question
from jaxhal.datasets.records import chosen
from jaxhal.datasets.root import require
from jaxhal.types import Example

_FILE = "truthfulqa/TruthfulQA.csv"
_COLUMNS = (
    "Category",
    "Question",
    "Best Answer",
    "Correct Answers",
    "Incorrect Answers",
)


def truthfulqa(
    root: str | os.PathLike | None = None,
    categories: str | Collection[str] | None = None,
    answers: Literal["best", "all"] = "best",
) -> list[Example]:
    """True (0) and false (1) answers to 817 questions, without any context.

    People wrote the answers; the prompt is the question, which is also the source.  An
    answer that is listed twice counts once, and one that is listed as both true and
    false ("Unknown", to two questions) is left out.

    Args:
      root: see :func:`jaxhal.datasets.root.data_root`.
      categories: such as ``"Health"``, of 38; all by default.
      answers: ``"best"`` gives the best answer and the first false one, ``"all"``
        every answer.

    Raises:
      FileNotFoundError: when ``truthfulqa/TruthfulQA.csv`` is not there.
      ValueError: on an unknown category or ``answers``, or a file with other columns.

    References:
      Lin et al., TruthfulQA: Measuring How Models Mimic Human Falsehoods, ACL 2022.
      Apache-2.0.
    """
    if answers not in ("best", "all"):
        raise ValueError(f"answers is {answers!r}; use 'best' or 'all'")
    return [
        Example(
            response=answer,
            prompt=row["Question"],
            question=row["Question"],
            id=f"{row['number']}-{name}-{index}",
            label=label,
            source=row["Question"],
        )
        for row in _rows(root, categories)
        for name, label, listed in _answers(row, answers == "best")
        for index, answer in enumerate(listed)
    ]


def truthfulqa_questions(
    root: str | os.PathLike | None = None,
    categories: str | Collection[str] | None = None,
) -> list[Question]:
    """The questions with their right answers, the best first.

    The domain is the category.  Args and errors as for :func:`truthfulqa`.
    """
    return [
        Question(row["Question"], _right(row), row["Category"], row["number"])
        for row in _rows(root, categories)
    ]


def _right(row: dict[str, str]) -> tuple[str, ...]:
    (_, _, true), _ = _answers(row, best=False)
    return tuple(dict.fromkeys([row["Best Answer"], *true]))


def _rows(
    root: str | os.PathLike | None, categories: str | Collection[str] | None
) -> list[dict[str, str]]:
    path = require(root, _FILE)
    with path.open(encoding="utf-8-sig", newline="") as file:
        table = csv.DictReader(file)
        missing = [name for name in _COLUMNS if name not in (table.fieldnames or ())]
        if missing:
            raise ValueError(f"{path}: no column {missing[0]!r}; take the original CSV")
        rows = [
            {name: (row[name] or "").strip() for name in _COLUMNS}
            | {"number": str(number)}
            for number, row in enumerate(table)
        ]
    keep = chosen("category", categories, (row["Category"] for row in rows))
    return [row for row in rows if row["Category"] in keep]


def _answers(row: dict[str, str], best: bool) -> list[tuple[str, int, list[str]]]:
    true, false = _split(row["Correct Answers"]), _split(row["Incorrect Answers"])
    both = {*true} & {*false}
    true = [answer for answer in true if answer not in both]
    false = [answer for answer in false if answer not in both]
    if best:
        true, false = [row["Best Answer"]], false[:1]
    return [("true", 0, true), ("false", 1, false)]


def _split(answers: str) -> list[str]:
    stripped = (answer.strip() for answer in answers.split(";"))
    return list(dict.fromkeys(answer for answer in stripped if answer))
