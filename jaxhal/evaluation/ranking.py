"""How well scores rank hallucinated answers above grounded ones, at no threshold."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Int

from jaxhal.evaluation.checks import Mask, Numbers, Rows, two_classes


def auroc(scores: Rows, labels: Rows) -> float:
    """Area under the ROC curve, in [0, 1]: 0.5 is chance, 1 a perfect ranking.

    The share of (hallucinated, grounded) pairs that the scores put in the right order;
    a tie counts one half.

    >>> auroc([0.1, 0.4, 0.4, 0.9], [0, 0, 1, 1])
    0.875
    """
    score, positive = two_classes(scores, labels)
    return auroc_of_draws(score, positive)(np.ones(len(score), int))


def auroc_of_draws(
    score: Numbers, positive: Mask
) -> Callable[[Int[np.ndarray, " rows"]], float]:
    """AUROC as a function of how often each row counts; one sort serves all."""
    hallucinated, grounded = np.flatnonzero(positive), np.flatnonzero(~positive)
    grounded = grounded[np.argsort(score[grounded])]
    # Grounded rows below each hallucinated one, and those up to it: a tie is half won.
    below, up_to = (
        np.searchsorted(score[grounded], score[hallucinated], side)
        for side in ("left", "right")
    )

    def measure(drawn: Int[np.ndarray, " rows"]) -> float:
        hits, misses = drawn[hallucinated], np.append(0, np.cumsum(drawn[grounded]))
        wins = hits @ (misses[below] + misses[up_to])
        return float(wins / (2 * hits.sum() * misses[-1]))

    return measure


def auprc(scores: Rows, labels: Rows) -> float:
    r"""Area under the precision-recall curve in steps (average precision), in [0, 1].

    :math:`\sum_n (R_n - R_{n-1}) P_n` over the distinct scores as thresholds.  Chance
    is the share of hallucinated answers.

    >>> round(auprc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1]), 3)
    0.833
    """
    from sklearn.metrics import average_precision_score

    score, positive = two_classes(scores, labels)
    return float(average_precision_score(positive, score))


def auprc_trapezoid(scores: Rows, labels: Rows) -> float:
    """Area under the precision-recall curve by the trapezoid rule, in [0, 1].

    Straight lines between the points of the curve are too optimistic; use it to compare
    with published numbers that are made this way, those of TOHA among them, and
    :func:`auprc` otherwise.

    >>> round(auprc_trapezoid([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1]), 3)
    0.792
    """
    from sklearn.metrics import auc, precision_recall_curve

    score, positive = two_classes(scores, labels)
    precisions, recalls, _ = precision_recall_curve(positive, score)
    return float(auc(recalls, precisions))
