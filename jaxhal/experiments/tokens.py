"""What a run says of tokens, and of the spans that they mark."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxhal.evaluation.calibration import best_f1_threshold
from jaxhal.evaluation.metrics import Decided, span_f1, token_metrics
from jaxhal.evaluation.ranking import auroc
from jaxhal.reporting.results import Judged, estimates
from jaxhal.scoring.fitting import Fitted
from jaxhal.scoring.inputs import Inputs
from jaxhal.scoring.spans import find_spans
from jaxhal.scoring.tokens import (
    are_supported,
    characters_of,
    scores_of_tokens,
    tokens_of,
    unseen_highlights,
    with_text,
)

# Of the sources; one takes milliseconds, a test part has many tokens.
_RESAMPLES = 200


def token_table(
    data: Inputs, fitted: Mapping[str, Fitted], train: np.ndarray, test: np.ndarray
) -> list[dict[str, Any]]:
    """A row per detector that scores tokens, highest AUROC first, controls last.

    Over the test part, tokens beside annotated spans, and the characters of the spans
    that a report shows where that detector decides; micro-averaged as in RAGTruth.
    Each detector marks the tokens from the score on that gives the best F1 over the
    training part's tokens.  AUROC and F1 have 95 % intervals over sources, as ``"...
    low"`` and ``"... high"``.  Hallucinated answers without spans are left out: none of
    their tokens is known to be either.  Empty where no span is annotated.
    """
    train, test = (_annotated(data, part) for part in (train, test))
    if not all(any(data.marked[row].any() for row in part) for part in (train, test)):
        return []
    learnt, judged = train.tolist(), test.tolist()
    everyone = [*learnt, *judged]
    marked = {n: data.marked[n][with_text(data, n)].astype(int) for n in everyone}
    known = np.concatenate([marked[n] for n in learnt])
    true = [marked[n] for n in judged]
    spans = [data.examples[n].labels or () for n in judged]
    letters = [
        characters_of(data, n, some) for n, some in zip(judged, spans, strict=True)
    ]
    rows = []
    for name, scores in scores_of_tokens(data, fitted, everyone).items():
        seen = np.concatenate([scores[row] for row in learnt])
        threshold = best_f1_threshold(seen, known)
        some = [scores[row] for row in judged]
        found = [
            [] if supported else find_spans(*tokens_of(data, n, name, each), threshold)
            for n, each, supported in zip(
                judged, some, are_supported(data, fitted[name], judged), strict=True
            )
        ]
        held = [
            characters_of(data, n, one) for n, one in zip(judged, found, strict=True)
        ]
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


def _annotated(data: Inputs, rows: np.ndarray) -> np.ndarray:
    some = [data.examples[row] for row in rows]
    return rows[[one.labels is not None or one.label == 0 for one in some]]


def first_highlights(
    data: Inputs, fitted: Mapping[str, Fitted], parts: Sequence[Judged]
) -> dict[str, Float[np.ndarray, "sources steps"]]:
    """What was fitted on the first split highlights in the answers it was judged on.

    Of detectors that score tokens and beat the controls, as
    :func:`jaxhal.scoring.tokens.unseen_highlights` has it.
    """
    some = [part.frame["row"].tolist() for part in parts if not part.fit]
    rows = sorted({row for each in some for row in each})
    may = [name for name, one in fitted.items() if one.beats == "yes"]
    return unseen_highlights(data, [(rows, fitted)], may)


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
