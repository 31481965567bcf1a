"""How well a threshold tells hallucinated answers from grounded, and probabilities fit.

Scores are higher for what is more likely hallucinated, the positive class.  A score at
or above the threshold flags its answer.  A ratio of nothing is 0: the precision when
nothing is flagged, the recall when nothing is hallucinated.
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, Shaped

from jaxhal.evaluation.checks import Mask, Numbers, OfDraws, Rows, rows, shares
from jaxhal.evaluation.ranking import auprc, auprc_trapezoid, auroc
from jaxhal.io.checks import at_least


def decided(scores: Rows, labels: Rows, threshold: float) -> dict[str, float]:
    """Accuracy, precision, recall and F1 of flagging from the threshold on.

    >>> decided([0.1, 0.4, 0.4, 0.9], [0, 0, 1, 1], threshold=0.4)
    {'accuracy': 0.75, 'precision': 0.66..., 'recall': 1.0, 'f1': 0.8}
    """
    score, positive = rows(scores, labels)
    found = _decided(_kinds(score, positive, threshold).sum(1))
    return {name: float(value) for name, value in found.items()}


@dataclasses.dataclass(frozen=True)
class Decided:
    """One number of :func:`decided` as a metric, ``(scores, labels) -> number``."""

    name: str
    threshold: float = 0.5

    def __call__(self, scores: Rows, labels: Rows) -> float:
        return decided(scores, labels, self.threshold)[self.name]

    def of_draws(self, score: Numbers, positive: Mask) -> OfDraws:
        """The metric as a function of how often each row counts."""
        kinds = _kinds(score, positive, self.threshold).astype(float)
        return lambda draws: _decided(kinds @ draws.T)[self.name]


def _kinds(
    score: Numbers, positive: Mask, threshold: float
) -> Bool[np.ndarray, "5 rows"]:
    """Which rows are right, flagged ones that are true, flagged, true, and all."""
    flagged = score >= threshold
    every = np.ones_like(flagged)
    return np.stack([flagged == positive, flagged & positive, flagged, positive, every])


def _decided(counts: Shaped[np.ndarray, "5 *draws"]) -> dict[str, Any]:
    right, both, marked, true, total = counts
    return {"accuracy": right / total, **_f1(both, marked, true)}


def _f1(both: Any, marked: Any, true: Any) -> dict[str, Any]:
    return {
        "precision": _ratio(both, marked),
        "recall": _ratio(both, true),
        "f1": _ratio(2 * both, marked + true),
    }


def _ratio(part: Any, whole: Any) -> Any:
    return part / np.maximum(whole, 1)  # counts, of which a part of none is none


def brier(probabilities: Rows, labels: Rows) -> float:
    """Mean squared error of probabilities of hallucination, in [0, 1]; 0 is best."""
    probability, positive = shares(probabilities, labels)
    return float(np.mean((probability - positive) ** 2))


def ece(probabilities: Rows, labels: Rows, bins: int = 10) -> float:
    r"""Expected calibration error (Naeini et al., 2015), in [0, 1].

    :math:`\sum_b \frac{n_b}{n} \left| \bar y_b - \bar p_b \right|` over bins of equal
    width, each closed on the left.  Small bins make it larger than it is, so compare
    numbers from equally many answers only.
    """
    probability, positive = shares(probabilities, labels)
    off = np.bincount(in_bins(probability, bins), positive - probability)
    return float(np.abs(off).sum() / len(probability))


def ece_by_chance(probabilities: Rows, bins: int = 10) -> float:
    r"""The :func:`ece` that right probabilities have all the same, in [0, 1].

    It is what labels drawn by the probabilities give on average,
    :math:`\frac1n \sum_b \sqrt{\frac2\pi \sum_{i \in b} p_i (1 - p_i)}`, the
    labels of each bin taken as normal.  An ``ece`` near it shows no miscalibration.

    >>> f"{ece_by_chance([0.5] * 100):.2f}, {ece_by_chance([0.5] * 10_000):.3f}"
    '0.04, 0.004'
    """
    probability, _ = shares(probabilities, np.zeros(len(probabilities)))
    variance = np.bincount(in_bins(probability, bins), probability * (1 - probability))
    return float(np.sqrt(2 / np.pi * variance).sum() / len(probability))


def in_bins(probability: Numbers, bins: int) -> Int[np.ndarray, " answers"]:
    """The number of each one's bin; bins are equally wide and closed on the left."""
    at_least(1, bins=bins)
    # Not np.linspace, by which 0.3 is below the fourth of ten.
    return np.digitize(probability, np.arange(1, bins) / bins)


def evaluate(
    scores: Rows,
    labels: Rows,
    threshold: float | None = None,
    probabilities: Rows | None = None,
) -> dict[str, float]:
    """Every metric of a set of answers by name, each in [0, 1].

    A ``threshold`` adds those of :func:`decided`, ``probabilities`` their calibration;
    choose and fit them on other answers.

    >>> evaluate([0.1, 0.4, 0.4, 0.9], [0, 0, 1, 1], threshold=0.4)
    {'auroc': 0.875, 'auprc': 0.83..., 'auprc_trapezoid': 0.91...,
     'accuracy': 0.75, 'precision': 0.66..., 'recall': 1.0, 'f1': 0.8}
    """
    ranking = auroc, auprc, auprc_trapezoid
    found = {each.__name__: each(scores, labels) for each in ranking}
    if threshold is not None:
        found |= decided(scores, labels, threshold)
    if probabilities is not None:
        found |= {each.__name__: each(probabilities, labels) for each in (ece, brier)}
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
    found = decided(scores, labels, threshold) | {"auroc": auroc(scores, labels)}
    del found["accuracy"]  # of tokens most are grounded
    return found


def span_f1(
    predicted: Sequence[Collection[Sequence[Any]]],
    annotated: Sequence[Collection[Sequence[Any]]],
) -> dict[str, float]:
    """Precision, recall and F1 of the marked characters of all responses, in [0, 1].

    Counted over all responses together (micro average), as RAGTruth's span-level
    evaluation is (Niu et al., 2024); a character in several spans counts once.

    Args:
      predicted: per response, spans that begin with ``start, end``, end exclusive.
      annotated: per response, the same, such as the ``labels`` of an example.

    >>> span_f1([[(0, 10)], []], [[(5, 10), (5, 9)], [(0, 5)]])
    {'precision': 0.5, 'recall': 0.5, 'f1': 0.5}
    """
    _check_pairs(predicted, annotated, "predicted", "annotated")
    both = marked = true = 0
    for row, (some, others) in enumerate(zip(predicted, annotated, strict=True)):
        found = _characters(some, f"predicted[{row}]")
        known = _characters(others, f"annotated[{row}]")
        both += len(found & known)
        marked += len(found)
        true += len(known)
    return {name: float(value) for name, value in _f1(both, marked, true).items()}


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
