"""How well scores rank hallucinated answers above grounded ones, at no threshold.

Scores are higher for what is more likely hallucinated, the positive class.
"""

from collections.abc import Collection
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, Num

from jaxhal.evaluation.checks import two_classes


def auroc(scores: Collection[Any], labels: Collection[Any]) -> float:
    """Area under the ROC curve, in [0, 1]: 0.5 is chance, 1 a perfect ranking.

    The share of (hallucinated, grounded) pairs that the scores put in the right order;
    a tie counts one half.

    Args:
      scores: one finite number per answer, higher = more likely hallucinated.
      labels: 1 for hallucinated, 0 for grounded.

    Raises:
      ValueError: when only one class is present, a score is not finite, a label is not
        0 or 1, or the lengths differ.

    >>> auroc([0.1, 0.4, 0.4, 0.9], [0, 0, 1, 1])
    0.875
    """
    score, positive = two_classes(scores, labels)
    rank = np.unique(score, return_inverse=True)[1]
    return weighted_auroc(rank, positive, np.ones(len(rank)))


def weighted_auroc(
    rank: Int[np.ndarray, " rows"],
    positive: Bool[np.ndarray, " rows"],
    weight: Num[np.ndarray, " rows"],
) -> float:
    """AUROC of rows that count ``weight`` times, from dense ranks (ties share one)."""
    high = np.bincount(rank, weight * positive)
    low = np.bincount(rank, weight * ~positive)
    wins = high @ (np.cumsum(low) - low / 2)
    return float(wins / (high.sum() * low.sum()))


def auprc(scores: Collection[Any], labels: Collection[Any]) -> float:
    r"""Area under the precision-recall curve in steps (average precision), in [0, 1].

    :math:`\sum_n (R_n - R_{n-1}) P_n` over the distinct scores as thresholds.  Chance
    is the share of hallucinated answers.

    Args:
      scores: one finite number per answer, higher = more likely hallucinated.
      labels: 1 for hallucinated, 0 for grounded.

    Raises:
      ValueError: as :func:`auroc` does.

    >>> round(auprc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1]), 3)
    0.833
    """
    from sklearn.metrics import average_precision_score

    score, positive = two_classes(scores, labels)
    return float(average_precision_score(positive, score))


def auprc_trapezoid(scores: Collection[Any], labels: Collection[Any]) -> float:
    """Area under the precision-recall curve by the trapezoid rule, in [0, 1].

    Straight lines between the points of the curve are too optimistic; use it to compare
    with published numbers that are made this way, those of TOHA among them, and
    :func:`auprc` otherwise.

    Args:
      scores: one finite number per answer, higher = more likely hallucinated.
      labels: 1 for hallucinated, 0 for grounded.

    Raises:
      ValueError: as :func:`auroc` does.

    >>> round(auprc_trapezoid([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1]), 3)
    0.792
    """
    from sklearn.metrics import auc, precision_recall_curve

    score, positive = two_classes(scores, labels)
    precisions, recalls, _ = precision_recall_curve(positive, score)
    return float(auc(recalls, precisions))
