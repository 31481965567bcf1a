"""What a run says of single answers: coloured pages, and how well tokens are found."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxhal.evaluation.calibration import best_f1_threshold
from jaxhal.evaluation.spans import span_f1, token_metrics
from jaxhal.fitting import Fitted
from jaxhal.inputs import Inputs
from jaxhal.judging import judge, report, token_scores
from jaxhal.report import Report

# Answers on a page; more would make it too large to open.
PAGE = 200


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
    for numbers, features in data.source.chunks(rows):
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
    over the training part's tokens.  Empty where no span is annotated.
    """
    if not all(any(data.marked[row].any() for row in part) for part in (train, test)):
        return []
    learnt, judged = train.tolist(), test.tolist()
    chosen = [one for one in fitted.values() if one.detector.tokens is not None]
    found = _token_scores(data, chosen, [*learnt, *judged])
    marked = {
        n: data.marked[n][_with_text(data, n)].astype(int) for n in [*learnt, *judged]
    }
    rows = []
    for name, scores in found.items():
        seen = np.concatenate([scores[row] for row in learnt])
        known = np.concatenate([marked[row] for row in learnt])
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
        rows.append(
            {
                "method": name,
                "threshold": threshold,
                "token AUROC": tokens["auroc"],
                "token F1": tokens["f1"],
                "token precision": tokens["precision"],
                "token recall": tokens["recall"],
                "span F1": characters["f1"],
                "tokens marked": float(
                    np.mean(np.concatenate([marked[n] for n in judged]))
                ),
            }
        )
    return sorted(rows, key=lambda row: -row["token AUROC"])


def _token_scores(
    data: Inputs, chosen: Sequence[Fitted], rows: Sequence[int]
) -> dict[str, dict[int, np.ndarray]]:
    detectors = tuple(one.detector for one in chosen)
    params = tuple(one.params for one in chosen)
    out: dict[str, dict[int, np.ndarray]] = {one.name: {} for one in detectors}
    for numbers, features in data.source.chunks(rows):
        for name, scores in token_scores(detectors, params, features).items():
            values = np.asarray(scores)
            for at, number in enumerate(numbers):
                text = _with_text(data, number)
                out[name][number] = values[at, : len(text)][text]
    return out


def _with_text(data: Inputs, row: int) -> np.ndarray:
    """Which tokens have text; the end of the sequence has none."""
    offsets = data.rows[row].offsets
    return offsets[:, 0] < offsets[:, 1]


def _flagged(data: Inputs, row: int, flags: np.ndarray) -> list[list[int]]:
    """Characters of the flagged tokens."""
    return data.rows[row].offsets[_with_text(data, row)][flags].tolist()
