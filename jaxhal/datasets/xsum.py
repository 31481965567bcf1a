"""XSum: news texts to be summed up in a sentence."""

import os

from jaxhal.datasets.questions import Question
from jaxhal.datasets.records import records
from jaxhal.datasets.root import require

_FIELDS = {"document": str, "summary": str, "id": str}


def xsum_inputs(root: str | os.PathLike | None = None) -> list[Question]:
    """Requests to sum up a news text, with the sentence that the BBC wrote.

    The 1000 texts on which Lookback Lens guides decoding; nobody's answers come with
    them.  The text is the ``context`` of each; the request is worded here.

    Args:
      root: see :func:`jaxhal.datasets.root.data_root`.

    Raises:
      FileNotFoundError: when ``lookback_lens/xsum-1000.jsonl`` is not there.
      ValueError: on a row without one of the texts.

    References:
      Narayan et al., Don't Give Me the Details, Just the Summary!, EMNLP 2018; taken
      from Chuang et al., Lookback Lens, EMNLP 2024.  BBC texts, for research use.
    """
    rows = records(require(root, "lookback_lens/xsum-1000.jsonl"), _FIELDS)
    return [
        Question(
            text="Summarize the text in one sentence.",
            answer=row["summary"],
            domain="news",
            id=row["id"],
            context=row["document"],
        )
        for row in rows
    ]
