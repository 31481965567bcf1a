"""What a run says of tokens, and of the spans that they mark."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from jaxhal.evaluation.calibration import best_f1_threshold
from jaxhal.evaluation.guarantees import highlighted
from jaxhal.evaluation.metrics import Decided, span_f1, token_metrics
from jaxhal.evaluation.ranking import auroc
from jaxhal.reading.units import has_text
from jaxhal.reporting.report import Token
from jaxhal.reporting.results import estimates
from jaxhal.scoring.detection import token_scores
from jaxhal.scoring.fitting import Fitted
from jaxhal.scoring.inputs import Inputs
from jaxhal.scoring.spans import find_spans, span_levels
from jaxhal.scoring.verdicts import verdict

# Of the sources; one takes milliseconds, a test part has many tokens.
_RESAMPLES = 200
# Detector -> answer -> scores of the tokens that have text.
_Scores = dict[str, dict[int, np.ndarray]]


def token_table(
    data: Inputs, fitted: Mapping[str, Fitted], train: np.ndarray, test: np.ndarray
) -> list[dict[str, Any]]:
    """A row per detector that scores tokens, highest AUROC first, controls last.

    Over the test part, tokens beside annotated spans, and the characters of the spans
    that a report shows where that detector decides; micro-averaged as in RAGTruth.
    Each detector marks the tokens from the score on that gives the best F1 over the
    training part's tokens.  AUROC and F1 have 95 % intervals over sources, as ``"...
    low"`` and ``"... high"``.  Empty where no span is annotated.
    """
    if not all(any(data.marked[row].any() for row in part) for part in (train, test)):
        return []
    learnt, judged = train.tolist(), test.tolist()
    everyone = [*learnt, *judged]
    marked = {n: data.marked[n][_with_text(data, n)].astype(int) for n in everyone}
    known = np.concatenate([marked[n] for n in learnt])
    true = [marked[n] for n in judged]
    spans = [data.examples[n].labels or () for n in judged]
    letters = [
        _characters(data, n, some) for n, some in zip(judged, spans, strict=True)
    ]
    rows = []
    for name, scores in _token_scores(data, fitted, everyone).items():
        seen = np.concatenate([scores[row] for row in learnt])
        threshold = best_f1_threshold(seen, known)
        some = [scores[row] for row in judged]
        found = [
            [] if supported else find_spans(*_tokens(data, n, name, each), threshold)
            for n, each, supported in zip(
                judged, some, _supported(data, fitted[name], judged), strict=True
            )
        ]
        held = [_characters(data, n, one) for n, one in zip(judged, found, strict=True)]
        metrics = {"token AUROC": auroc, "token F1": Decided("f1", threshold)}
        tokens, characters = token_metrics(some, true, threshold), span_f1(found, spans)
        row = {"method": name, "control": fitted[name].detector.control}
        row |= {"threshold": threshold}
        row |= _estimates(data, judged, metrics, some, true)
        row |= {f"token {key}": tokens[key] for key in ("precision", "recall")}
        row |= _estimates(data, judged, {"span F1": Decided("f1")}, held, letters)
        row |= {f"span {key}": characters[key] for key in ("precision", "recall")}
        rows.append(row | {"tokens marked": float(np.concatenate(true).mean())})
    return sorted(rows, key=lambda row: (row["control"], -row["token AUROC"]))


def highlights(
    data: Inputs, fitted: Mapping[str, Fitted], rows: Sequence[int]
) -> dict[str, Float[np.ndarray, "answers steps"]]:
    """Per detector that scores tokens, :func:`jaxhal.evaluation.highlighted`.

    Of the spans that a report shows where that detector decides.  A hallucinated answer
    without annotated spans has no character that is known to be supported.
    """
    made = {}
    for name, scores in _token_scores(data, fitted, rows).items():
        levels, labels = [], []
        for n, supported in zip(
            rows, _supported(data, fitted[name], rows), strict=True
        ):
            one = data.examples[n]
            level = span_levels(*_tokens(data, n, name, scores[n]))
            levels.append(np.full_like(level, -1.0) if supported else level)
            unknown = one.labels is None and one.label == 1
            labels.append(_characters(data, n, one.labels or ()) | unknown)
        made[name] = highlighted(
            levels, labels, [np.ones_like(each) for each in levels]
        )
    return made


def _token_scores(
    data: Inputs, fitted: Mapping[str, Fitted], rows: Sequence[int]
) -> _Scores:
    chosen = [one for one in fitted.values() if one.detector.tokens is not None]
    detectors = tuple(one.detector for one in chosen)
    params = tuple(one.params for one in chosen)
    out: _Scores = {one.name: {} for one in detectors}
    for numbers, features in data.source.batches(set(rows)):
        for name, scores in token_scores(detectors, params, features).items():
            values = np.asarray(scores)
            for at, number in enumerate(numbers):
                text = _with_text(data, number)
                out[name][number] = values[at, : len(text)][text]
    return out


def _with_text(data: Inputs, row: int) -> np.ndarray:
    return np.asarray(has_text(data.rows[row].offsets))


def _tokens(
    data: Inputs, row: int, name: str, scores: np.ndarray
) -> tuple[str, list[Token], str]:
    """What :func:`find_spans` takes."""
    response = data.examples[row].response
    places = data.rows[row].offsets[_with_text(data, row)].tolist()
    pairs = zip(places, scores.tolist(), strict=True)
    tokens = [Token(response[a:b], a, b, {name: score}) for (a, b), score in pairs]
    return response, tokens, name


def _supported(data: Inputs, one: Fitted, rows: Sequence[int]) -> list[bool]:
    """Whether the verdict is that, and a report shows no span."""
    scores = one.score(data.inputs[one.detector.name])[list(rows)]
    return [verdict(one, score)[0] == "supported" for score in scores.tolist()]


def _characters(
    data: Inputs, row: int, spans: Sequence[Any]
) -> Bool[np.ndarray, " characters"]:
    held = np.zeros(len(data.examples[row].response), bool)
    for start, end, *_ in spans:
        held[start:end] = True
    return held


def _estimates(
    data: Inputs,
    rows: Sequence[int],
    metrics: Mapping[str, Any],
    scores: Sequence[np.ndarray],
    labels: Sequence[np.ndarray],
) -> dict[str, float]:
    """Metrics over tokens, or characters, of answers, with intervals over sources."""
    sources = np.repeat(data.groups[list(rows)], [len(each) for each in labels])
    both = np.concatenate(scores), np.concatenate(labels)
    return estimates(metrics, *both, sources.tolist(), _RESAMPLES)
