"""What scores of sentences say of the answers they stand in."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxhal.detectors import Detector
from jaxhal.evaluation.intervals import correlation
from jaxhal.evaluation.ranking import auprc
from jaxhal.reporting.markdown import Markdown, measured
from jaxhal.reporting.markdown import table as markdown_table
from jaxhal.reporting.results import Judged, pooled
from jaxhal.scoring.inputs import Inputs

_READING = (
    "AUPRC of finding hallucinated sentences, and of finding the grounded ones by the "
    "lowest scores. Pearson's correlation is that, over answers, of the mean score of "
    "an answer's sentences with the share of them that is hallucinated; its interval "
    "resamples sources."
)


def table(
    data: Mapping[str, Inputs], judged: Sequence[Judged], detectors: Sequence[Detector]
) -> list[dict[str, Any]]:
    """A row a detector and data set tested on itself, highest correlation first.

    References:
      Manakul et al., SelfCheckGPT, 2023, table 2.
    """
    rows = []
    for label, one in data.items():
        own = [part for part in judged if part.train == part.test == label]
        found = pooled(own, detectors)
        answers = [one.source.parts[row].row for row in found.rows]
        first = np.unique(answers, return_index=True)[1]
        sources = np.asarray(found.sources)[first].tolist()
        share = _means(found.labels, answers)
        for name, scores in found.scores.items():
            r, low, high = correlation(_means(scores, answers), share, sources)
            known = not math.isnan(r)
            rows.append(
                {
                    "data": label,
                    "method": name,
                    "AUPRC of hallucinated": auprc(scores, found.labels),
                    "AUPRC of grounded": auprc(-scores, 1 - found.labels),
                    "Pearson of answers": r if known else None,
                    "low": low if known else None,
                    "high": high if known else None,
                }
            )
    order = [row["Pearson of answers"] for row in rows]
    ranked = np.argsort([2.0 if r is None else -r for r in order], kind="stable")
    return [rows[at] for at in ranked]


def _means(values: np.ndarray, answers: Sequence[int]) -> np.ndarray:
    _, place = np.unique(answers, return_inverse=True)
    return np.bincount(place, values) / np.bincount(place)


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table as people read it, and how."""
    names = ["method", "AUPRC of hallucinated", "AUPRC of grounded"]
    several = len({row["data"] for row in rows}) > 1
    names = ["data", *names] if several else names
    lines = []
    for row in rows:
        cells = [v if isinstance(v := row[n], str) else f"{v:.3f}" for n in names]
        r, low, high = (row[n] for n in ("Pearson of answers", "low", "high"))
        cells.append("" if r is None else measured(r, low, high))
        lines.append(cells)
    head = [*names, Markdown("Pearson of answers [95 %]")]
    return f"{markdown_table(head, lines)}\n\n{_READING}"
