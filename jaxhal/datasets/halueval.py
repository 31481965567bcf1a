"""HaluEval: right answers and hallucinated ones that ChatGPT wrote on purpose."""

import os

from jaxhal.datasets.records import records
from jaxhal.datasets.root import require
from jaxhal.types import Example

_ANSWERS = {"right": 0, "hallucinated": 1}


def halueval(
    root: str | os.PathLike | None = None, file: str = "qa_one-turn_500"
) -> list[Example]:
    """Two answers to each HotpotQA question, a right one (0) and a made-up one (1).

    The context is ``knowledge``; both answers share it as their source.  Right answers
    are a few words, hallucinated ones sentences, so that length alone nearly separates
    them.

    Args:
      root: see :func:`jaxhal.datasets.root.data_root`.
      file: of the question-answering part in the folder ``halueval``, without its
        ending: ``"qa_one-turn_500"`` or ``"qa_multi-turn_500"``.

    Raises:
      FileNotFoundError: when the file is not there.
      ValueError: on a row without one of the four texts.

    References:
      Li et al., HaluEval: A Large-Scale Hallucination Evaluation Benchmark for Large
      Language Models, EMNLP 2023.  MIT licence.
    """
    fields = ("knowledge", "question", *(f"{each}_answer" for each in _ANSWERS))
    path = require(root, f"halueval/{file}.jsonl")
    rows = records(path, dict.fromkeys(fields, str))
    return [
        Example(
            response=row[f"{answer}_answer"],
            context=row["knowledge"],
            question=row["question"],
            id=f"{number}-{answer}",
            label=label,
            source=row["knowledge"],
        )
        for number, row in enumerate(rows)
        for answer, label in _ANSWERS.items()
    ]
