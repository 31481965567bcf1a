"""What a run says of single answers, of their tokens and of their sentences."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxhal.evaluation.calibration import best_f1_threshold
from jaxhal.evaluation.intervals import correlation, interval
from jaxhal.evaluation.metrics import Decided, span_f1, token_metrics
from jaxhal.evaluation.ranking import auprc, auroc
from jaxhal.experiments.running import Result, kind_of
from jaxhal.reading.units import has_text
from jaxhal.reporting.report import Report
from jaxhal.reporting.results import estimates, interval_markdown, pooled
from jaxhal.scoring.detection import judge, report, token_scores
from jaxhal.scoring.fitting import Fitted
from jaxhal.scoring.inputs import Inputs

# Answers on a page; more would make it too large to open.
PAGE = 200
# Of the sources; one takes milliseconds, a test part has many tokens.
_RESAMPLES = 200
_READING = (
    "AUPRC of finding hallucinated sentences, and of finding the grounded ones by the "
    "lowest scores. Pearson's correlation is that, over answers, of the mean score of "
    "an answer's sentences with the share of them that is hallucinated; its interval "
    "resamples sources."
)


_KINDS = (
    "AUROC of answers whose first span is of that kind over all grounded ones, of all "
    "test parts together, by the three best methods and the best control; results.json "
    "has the others. Intervals resample sources."
)


def reports(
    model: str, data: Inputs, fitted: Mapping[str, Fitted], rows: Sequence[int]
) -> list[Report]:
    """Reports of the answers of these numbers, in their order."""
    chosen = list(fitted.values())
    scores = {name: one.score(data.inputs[name]) for name, one in fitted.items()}
    made = {}
    for numbers, features in data.source.batches(set(rows)):
        known = {name: score[numbers] for name, score in scores.items()}
        judged = judge(chosen, features, known)
        for at, number in enumerate(numbers):
            example, row = data.examples[number], data.rows[number]
            made[number] = report(chosen, model, example, row, judged, at)
    return [made[number] for number in rows]


def token_table(
    data: Inputs, fitted: Mapping[str, Fitted], train: np.ndarray, test: np.ndarray
) -> list[dict[str, Any]]:
    """A row per detector that scores tokens, highest AUROC over tokens first.

    Tokens and characters of annotated spans in the test part, micro-averaged as in
    RAGTruth; each detector marks the tokens from the score on that gives the best F1
    over the training part's tokens.  AUROC and F1 have 95 % intervals over sources, as
    ``"... low"`` and ``"... high"``.  Empty where no span is annotated.
    """
    if not all(any(data.marked[row].any() for row in part) for part in (train, test)):
        return []
    learnt, judged = train.tolist(), test.tolist()
    everyone = [*learnt, *judged]
    marked = {n: data.marked[n][_with_text(data, n)].astype(int) for n in everyone}
    known = np.concatenate([marked[n] for n in learnt])
    true = np.concatenate([marked[n] for n in judged])
    sources = np.repeat(data.groups[judged], [len(marked[n]) for n in judged]).tolist()
    spans = [
        [(label.start, label.end) for label in data.examples[row].labels or ()]
        for row in judged
    ]
    rows = []
    for name, scores in _token_scores(data, fitted, everyone).items():
        seen = np.concatenate([scores[row] for row in learnt])
        threshold = best_f1_threshold(seen, known)
        some = [scores[row] for row in judged]
        tokens = token_metrics(some, [marked[row] for row in judged], threshold)
        flagged = [
            data.rows[row].offsets[_with_text(data, row)][each >= threshold].tolist()
            for row, each in zip(judged, some, strict=True)
        ]
        metrics = {"auroc": auroc, "f1": Decided("f1", threshold)}
        found = {"method": name, "threshold": threshold}
        for key, metric in metrics.items():
            low, high = interval(
                metric, np.concatenate(some), true, sources, _RESAMPLES
            )
            shown = f"token {key.upper()}"
            found |= {shown: tokens[key], f"{shown} low": low, f"{shown} high": high}
        found |= {
            "token precision": tokens["precision"],
            "token recall": tokens["recall"],
            "span F1": span_f1(flagged, spans)["f1"],
            "tokens marked": float(true.mean()),
        }
        rows.append(found)
    return sorted(rows, key=lambda row: -row["token AUROC"])


def _token_scores(
    data: Inputs, fitted: Mapping[str, Fitted], rows: Sequence[int]
) -> dict[str, dict[int, np.ndarray]]:
    """Detector -> answer -> scores of the tokens that have text."""
    chosen = [one for one in fitted.values() if one.detector.tokens is not None]
    detectors = tuple(one.detector for one in chosen)
    params = tuple(one.params for one in chosen)
    out: dict[str, dict[int, np.ndarray]] = {one.name: {} for one in detectors}
    for numbers, features in data.source.batches(set(rows)):
        for name, scores in token_scores(detectors, params, features).items():
            values = np.asarray(scores)
            for at, number in enumerate(numbers):
                text = _with_text(data, number)
                out[name][number] = values[at, : len(text)][text]
    return out


def _with_text(data: Inputs, row: int) -> np.ndarray:
    return np.asarray(has_text(data.rows[row].offsets))


def kind_table(found: Result) -> list[dict[str, Any]]:
    """A row a kind of span: AUROC of its answers over all grounded ones, by method.

    Of all test parts together, with intervals over sources.  An answer counts by its
    first span.  Empty with several data sets, or fewer than two kinds.
    """
    if len(found.data) > 1:
        return []
    (one,) = found.data.values()
    whole = pooled(found.judged, found.methods)
    kinds = np.array([kind_of(one.examples[row]) for row in whole.rows])
    names = sorted(set(kinds.tolist()) - {""})
    rows = []
    for name in names if len(names) > 1 else ():
        some = np.flatnonzero((kinds == name) | (kinds == ""))
        labels, sources = whole.labels[some], [whole.sources[at] for at in some]
        row: dict[str, Any] = {"kind": name, "answers": int(labels.sum())}
        for method, scores in whole.scores.items():
            row |= estimates({method: auroc}, scores[some], labels, sources)
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
