"""What a run says of single answers: coloured pages, and how well tokens are found."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxhal.evaluation.calibration import best_f1_threshold
from jaxhal.evaluation.intervals import interval
from jaxhal.evaluation.metrics import f1, span_f1, token_metrics
from jaxhal.evaluation.ranking import auroc
from jaxhal.reading.units import has_text
from jaxhal.reporting.report import Report
from jaxhal.scoring.detection import judge, report, token_scores
from jaxhal.scoring.fitting import Fitted
from jaxhal.scoring.inputs import Inputs

# Answers on a page; more would make it too large to open.
PAGE = 200
# Of the sources; one takes milliseconds, a test part has many tokens.
_RESAMPLES = 200


def reports(
    model: str, data: Inputs, fitted: Mapping[str, Fitted], rows: Sequence[int]
) -> list[Report]:
    """Reports of answers, in their order.

    Args:
      model: name of the reader.
      data: what was read.
      fitted: the detectors.
      rows: numbers of the answers.
    """
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
    chosen = [one for one in fitted.values() if one.detector.tokens is not None]
    found = _token_scores(data, chosen, everyone)
    marked = {n: data.marked[n][_with_text(data, n)].astype(int) for n in everyone}
    known = np.concatenate([marked[n] for n in learnt])
    true = np.concatenate([marked[n] for n in judged])
    sources = np.repeat(data.groups[judged], [len(marked[n]) for n in judged]).tolist()
    rows = []
    for name, scores in found.items():
        seen = np.concatenate([scores[row] for row in learnt])
        threshold = best_f1_threshold(seen, known)
        tokens = token_metrics(
            [scores[row] for row in judged], [marked[row] for row in judged], threshold
        )
        characters = span_f1(
            [_flagged(data, row, scores[row] >= threshold) for row in judged],
            [
                [(label.start, label.end) for label in data.examples[row].labels or ()]
                for row in judged
            ],
        )
        flat = np.concatenate([scores[row] for row in judged])
        at_threshold = functools.partial(f1, threshold=threshold)
        area, best = (
            interval(metric, flat, true, sources, _RESAMPLES)
            for metric in (auroc, at_threshold)
        )
        rows.append(
            {
                "method": name,
                "threshold": threshold,
                "token AUROC": tokens["auroc"],
                "token AUROC low": area[0],
                "token AUROC high": area[1],
                "token F1": tokens["f1"],
                "token F1 low": best[0],
                "token F1 high": best[1],
                "token precision": tokens["precision"],
                "token recall": tokens["recall"],
                "span F1": characters["f1"],
                "tokens marked": float(true.mean()),
            }
        )
    return sorted(rows, key=lambda row: -row["token AUROC"])


def _token_scores(
    data: Inputs, chosen: Sequence[Fitted], rows: Sequence[int]
) -> dict[str, dict[int, np.ndarray]]:
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


def _flagged(data: Inputs, row: int, flags: np.ndarray) -> list[list[int]]:
    """Characters of the flagged tokens."""
    return data.rows[row].offsets[_with_text(data, row)][flags].tolist()
