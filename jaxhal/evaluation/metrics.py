"""How well a threshold tells hallucinated answers from grounded, and probabilities fit.

Scores are higher for what is more likely hallucinated, the positive class.  A score at
or above the threshold flags its answer.  A ratio of nothing is 0: the precision when
nothing is flagged, the recall when nothing is hallucinated.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxhal.evaluation.checks import Mask, Numbers, Rows, rows
from jaxhal.evaluation.ranking import auprc, auprc_trapezoid, auroc
from jaxhal.io.checks import at_least


class Confusion(NamedTuple):
    """Numbers of answers by what they are and whether they are flagged."""

    true_positive: int
    false_positive: int
    false_negative: int
    true_negative: int


def confusion(scores: Rows, labels: Rows, threshold: float) -> Confusion:
    """Counts of answers, of which ``score >= threshold`` is flagged."""
    score, positive = rows(scores, labels)
    flagged = score >= threshold
    hits, found, true = (flagged & positive).sum(), flagged.sum(), positive.sum()
    counts = hits, found - hits, true - hits, len(score) - found - true + hits
    return Confusion(*map(int, counts))


def accuracy(scores: Rows, labels: Rows, threshold: float) -> float:
    """Share of answers on the right side of the threshold, in [0, 1]."""
    counts = confusion(scores, labels, threshold)
    return (counts.true_positive + counts.true_negative) / sum(counts)


def precision(scores: Rows, labels: Rows, threshold: float) -> float:
    """Share of the flagged answers that are hallucinated, in [0, 1]."""
    counts = confusion(scores, labels, threshold)
    return ratio(counts.true_positive, counts.true_positive + counts.false_positive)


def recall(scores: Rows, labels: Rows, threshold: float) -> float:
    """Share of the hallucinated answers that are flagged, in [0, 1]."""
    counts = confusion(scores, labels, threshold)
    return ratio(counts.true_positive, counts.true_positive + counts.false_negative)


def f1(scores: Rows, labels: Rows, threshold: float) -> float:
    """Harmonic mean of :func:`precision` and :func:`recall`, in [0, 1]."""
    counts = confusion(scores, labels, threshold)
    hits = 2 * counts.true_positive
    return ratio(hits, hits + counts.false_positive + counts.false_negative)


def ratio(part: int, whole: int) -> float:
    """``part / whole``, and 0 of nothing."""
    return part / whole if whole else 0.0


def brier(probabilities: Rows, labels: Rows) -> float:
    """Mean squared error of probabilities of hallucination, in [0, 1]; 0 is best."""
    probability, positive = _probabilities(probabilities, labels)
    return float(np.mean((probability - positive) ** 2))


def ece(probabilities: Rows, labels: Rows, bins: int = 10) -> float:
    r"""Expected calibration error, in [0, 1]: how far probabilities are from shares.

    :math:`\sum_b \frac{n_b}{n} \left| \bar y_b - \bar p_b \right|` over bins of equal
    width, each closed on the left.  Small bins make it larger than it is, so compare
    numbers from equally many answers only.

    References:
      Naeini et al., "Obtaining Well Calibrated Probabilities Using Bayesian Binning",
      2015.
    """
    at_least(1, bins=bins)
    probability, positive = _probabilities(probabilities, labels)
    at = np.digitize(probability, np.linspace(0, 1, bins + 1)[1:-1])
    return float(np.abs(np.bincount(at, positive - probability)).sum() / len(at))


def evaluate(
    scores: Rows,
    labels: Rows,
    threshold: float | None = None,
    probabilities: Rows | None = None,
) -> dict[str, float]:
    """Every metric of a set of answers by name, each in [0, 1].

    Args:
      threshold: adds accuracy, precision, recall and F1; choose it on other answers.
      probabilities: adds the calibration of these; fit them on other answers.

    >>> evaluate([0.1, 0.4, 0.4, 0.9], [0, 0, 1, 1], threshold=0.4)
    {'auroc': 0.875, 'auprc': 0.83..., 'auprc_trapezoid': 0.91...,
     'accuracy': 0.75, 'precision': 0.66..., 'recall': 1.0, 'f1': 0.8}
    """
    ranking = auroc, auprc, auprc_trapezoid
    found = {each.__name__: each(scores, labels) for each in ranking}
    if threshold is not None:
        for each in (accuracy, precision, recall, f1):
            found[each.__name__] = each(scores, labels, threshold)
    if probabilities is not None:
        for each in (ece, brier):
            found[each.__name__] = each(probabilities, labels)
    return found


def token_metrics(
    token_scores: Sequence[Collection[Any]],
    token_labels: Sequence[Collection[Any]],
    threshold: float,
) -> dict[str, float]:
    """Precision, recall, F1 and AUROC over the tokens of all responses, in [0, 1].

    All tokens count the same, whichever response they are from (micro average).

    Args:
      token_scores: per response, one finite number per token.
      token_labels: per response, 1 for each token of an annotated span, 0 otherwise.
      threshold: a token with a score at or above it is flagged.

    >>> token_metrics([[0.9, 0.1], [0.6, 0.2, 0.3]], [[1, 0], [0, 0, 1]], 0.5)
    {'precision': 0.5, 'recall': 0.5, 'f1': 0.5, 'auroc': 0.8333333333333334}
    """
    _check_pairs(token_scores, token_labels, "token_scores", "token_labels")
    for row, (score, label) in enumerate(zip(token_scores, token_labels, strict=True)):
        if len(score) != len(label):
            raise ValueError(
                f"response {row} has {len(score)} token scores and {len(label)} token "
                "labels; give one each per token"
            )
    scores = np.concatenate([np.asarray(each, float) for each in token_scores])
    labels = np.concatenate([np.asarray(each) for each in token_labels])
    found = {m.__name__: m(scores, labels, threshold) for m in (precision, recall, f1)}
    return found | {"auroc": auroc(scores, labels)}


def span_f1(
    predicted: Sequence[Collection[Sequence[Any]]],
    annotated: Sequence[Collection[Sequence[Any]]],
) -> dict[str, float]:
    """Precision, recall and F1 of the marked characters of all responses, in [0, 1].

    Characters are counted over all responses together (micro average); one in several
    spans counts once.

    Args:
      predicted: per response, spans that begin with ``start, end``, end exclusive.
      annotated: per response, the same, such as the ``labels`` of an example.

    >>> span_f1([[(0, 10)], []], [[(5, 10), (5, 9)], [(0, 5)]])
    {'precision': 0.5, 'recall': 0.5, 'f1': 0.5}

    References:
      Niu et al., RAGTruth, 2024, span-level evaluation.
    """
    _check_pairs(predicted, annotated, "predicted", "annotated")
    both = marked = true = 0
    for row, (some, others) in enumerate(zip(predicted, annotated, strict=True)):
        found = _characters(some, f"predicted[{row}]")
        known = _characters(others, f"annotated[{row}]")
        both += len(found & known)
        marked += len(found)
        true += len(known)
    return {
        "precision": ratio(both, marked),
        "recall": ratio(both, true),
        "f1": ratio(2 * both, marked + true),
    }


def _check_pairs(some: Sequence[Any], others: Sequence[Any], name: str, other: str):
    if len(some) != len(others):
        raise ValueError(
            f"{name} is of {len(some)} responses and {other} of {len(others)}; give "
            "both for the same responses"
        )
    if not len(some):
        raise ValueError(f"{name} and {other} are empty; give at least one response")


def _characters(spans: Collection[Sequence[Any]], where: str) -> set[int]:
    for start, end, *_ in spans:
        if not 0 <= start < end:
            raise ValueError(
                f"{where} holds the span [{start}, {end}); it needs 0 <= start < end"
            )
    return {at for start, end, *_ in spans for at in range(start, end)}


def _probabilities(probabilities: Rows, labels: Rows) -> tuple[Numbers, Mask]:
    probability, positive = rows(probabilities, labels, "probabilities")
    outside = (probability < 0) | (probability > 1)
    if outside.any():
        row = int(np.argmax(outside))
        raise ValueError(
            f"probabilities[{row}] is {probability[row]}, outside [0, 1]; calibrate "
            "the scores first, for instance with platt"
        )
    return probability, positive
