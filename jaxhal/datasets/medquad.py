"""MedQuAD: medical questions with answers from pages of the US health institutes."""

import os
from collections.abc import Collection

from jaxhal.datasets.questions import Question
from jaxhal.datasets.records import chosen, records
from jaxhal.datasets.root import require

_FIELDS = {"qid": str, "file": str, "qtype": str, "question": str, "answer": str}


def medquad(
    root: str | os.PathLike | None = None, qtypes: str | Collection[str] | None = None
) -> list[Question]:
    """Questions about diseases and drugs; the domain is the question type.

    Reads every ``.jsonl`` file in the folder ``medquad``.  Ids join the name of the
    page's file and the question's, because the latter repeats.  Some answers repeat as
    well, so a split should keep equal answers together.

    Args:
      root: see :func:`jaxhal.datasets.root.data_root`.
      qtypes: such as ``"treatment"``; all by default.

    Raises:
      FileNotFoundError: when the folder is not there or holds no such file.
      ValueError: on an unknown type, or a row without one of the texts.

    References:
      Ben Abacha and Demner-Fushman, A Question-Entailment Approach to Question
      Answering, BMC Bioinformatics 2019.  CC BY 4.0.
    """
    folder = require(root, "medquad")
    paths = sorted(folder.glob("*.jsonl"))
    if not paths:
        raise FileNotFoundError(f"{folder} holds no .jsonl file; put some there")
    rows = [row for path in paths for row in records(path, _FIELDS)]
    keep = chosen("qtype", qtypes, (row["qtype"] for row in rows))
    return [
        Question(
            row["question"], row["answer"], row["qtype"], f"{row['file']}:{row['qid']}"
        )
        for row in rows
        if row["qtype"] in keep
    ]
