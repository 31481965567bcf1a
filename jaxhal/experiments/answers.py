"""What a run says of single answers, their kinds and their sentences."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxhal.evaluation.intervals import FEWEST, correlation, fewest_sources
from jaxhal.evaluation.ranking import WithinParts, auprc
from jaxhal.experiments.running import Result
from jaxhal.experiments.splitting import kinds_of
from jaxhal.reporting.report import Report
from jaxhal.reporting.results import estimates, interval_markdown, pooled, ranked
from jaxhal.scoring.detection import judge, report
from jaxhal.scoring.fitting import Fitted
from jaxhal.scoring.inputs import Inputs

# Answers on a page; more would make it too large to open.
PAGE = 200
_READING = (
    "AUPRC of finding hallucinated sentences, and of finding the grounded ones by the "
    "lowest scores. Pearson's correlation is that, over answers, of the mean score of "
    "an answer's sentences with the share of them that is hallucinated; its interval "
    "resamples sources."
)
_KINDS = (
    "AUROC of answers whose first span is of that kind over all grounded ones, of all "
    "test parts together, by the three best methods and the best control; results.json "
    "has the others. Intervals resample sources; kinds of fewer than five sources are "
    "left out."
)


def reports(
    data: Inputs, fitted: Mapping[str, Fitted], rows: Sequence[int]
) -> list[Report]:
    """Reports of the answers of these numbers, in their order."""
    chosen, lm = list(fitted.values()), data.source.lm
    scores = {name: one.score(data.inputs[name]) for name, one in fitted.items()}
    made = {}
    for numbers, features in data.source.batches(set(rows)):
        known = {name: score[numbers] for name, score in scores.items()}
        judged = judge(chosen, features, known)
        for at, number in enumerate(numbers):
            example, row = data.examples[number], data.rows[number]
            made[number] = report(chosen, lm, example, row, judged, at).checked()
    return [made[number] for number in rows]


def kind_table(found: Result) -> list[dict[str, Any]]:
    """A row a kind of span: AUROC of its answers over all grounded ones, by method.

    Of all test parts together, with intervals over sources.  An answer counts by its
    first span.  Kinds in the answers of fewer than five sources are left out.  Empty
    with several data sets, or fewer than two kinds.
    """
    if len(found.data) > 1:
        return []
    (one,) = found.data.values()
    whole = ranked(found.judged, found.methods)
    several = [kinds_of(one.examples[row]) for row in whole.rows]
    kinds = np.array([next(iter(each), "") for each in several])
    names = sorted(set(kinds.tolist()) - {""})
    rows = []
    for name in names if len(names) > 1 else ():
        some = np.flatnonzero((kinds == name) | (kinds == ""))
        labels, sources = whole.labels[some], [whole.sources[at] for at in some]
        if fewest_sources(labels, sources) < FEWEST:
            continue
        row: dict[str, Any] = {"kind": name, "answers": int(labels.sum())}
        metric = whole.metric
        if isinstance(metric, WithinParts):
            metric = WithinParts([metric.parts[at] for at in some.tolist()])
        for method, scores in whole.scores.items():
            row |= estimates({method: metric}, scores[some], labels, sources)
        rows.append(row)
    return rows


def kind_markdown(rows: Sequence[Mapping[str, Any]], table: Sequence[Any]) -> str:
    """What the three best methods and the best control say of each kind."""
    best = [row["method"] for row in table if not row["control"]][:3]
    best += [row["method"] for row in table if row["control"]][:1]
    shown = [
        {
            key: value
            for key, value in row.items()
            if key.removesuffix(" low").removesuffix(" high")
            in ("kind", "answers", *best)
        }
        for row in rows
    ]
    return f"{interval_markdown(shown)}\n\n{_KINDS}"


def sentence_table(found: Result) -> list[dict[str, Any]]:
    """A row a detector and data set tested on itself, highest correlation first.

    What scores of sentences say of the answers they stand in, as in table 2 of Manakul
    et al., SelfCheckGPT, 2023.
    """
    rows = []
    for label, one in found.data.items():
        own = [part for part in found.judged if part.train == part.test == label]
        whole = pooled(own, found.methods)
        answers = [one.source.parts[row].row for row in whole.rows]
        first = np.unique(answers, return_index=True)[1]
        sources = np.asarray(whole.sources)[first].tolist()
        share = _means(whole.labels, answers)
        for name, scores in whole.scores.items():
            r, low, high = correlation(_means(scores, answers), share, sources)
            known = not math.isnan(r)
            rows.append(
                {
                    "data": label,
                    "method": name,
                    "AUPRC of hallucinated": auprc(scores, whole.labels),
                    "AUPRC of grounded": auprc(-scores, 1 - whole.labels),
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


def sentence_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table as people read it, and how."""
    several = len({row["data"] for row in rows}) > 1
    ends = {end: f"Pearson of answers {end}" for end in ("low", "high")}
    shown = [
        {
            ends.get(name, name): "" if value is None else value
            for name, value in row.items()
            if several or name != "data"
        }
        for row in rows
    ]
    return f"{interval_markdown(shown)}\n\n{_READING}"
