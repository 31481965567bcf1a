"""Questions with right answers, by name."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxhal import datasets
from jaxhal.datasets import Question

#: Name -> what loads them.
QUESTIONS: dict[str, Callable[..., list[Question]]] = {
    "squad": lambda **options: datasets.toha_questions("squad", **options),
    "coqa": lambda **options: datasets.toha_questions("coqa", **options),
    "truthfulqa": datasets.truthfulqa_questions,
    "medquad": datasets.medquad,
    "xsum": datasets.xsum_inputs,
}


def check_questions(name: str) -> None:
    """Makes sure that questions can go by that name.

    Raises:
      ValueError: when it is neither of :data:`QUESTIONS` nor that of a JSONL file.
    """
    if name not in QUESTIONS and not name.endswith(".jsonl"):
        raise ValueError(
            f"questions is {name!r}; use one of {', '.join(QUESTIONS)}, or a file of "
            "your own that ends in .jsonl"
        )


def load_questions(name: str, options: Mapping[str, Any]) -> list[Question]:
    """Questions by name, or those of a file as ``datasets.questions_from`` reads it.

    Raises:
      FileNotFoundError: when there is no such file.
      ValueError: as what loads them does; on options of a file, which has none.
    """
    if name in QUESTIONS:
        return QUESTIONS[name](**options)
    if options:
        raise ValueError(f"options are {dict(options)}; a file of questions takes none")
    return datasets.questions_from(name)
