"""How good it is to keep only the answers that a detector trusts.

Answers are kept from the lowest score up; the risk is the share of hallucinated ones
among those kept.
"""

import numpy as np

from jaxhal.evaluation.checks import Numbers, Rows, two_classes


def aurc(scores: Rows, labels: Rows) -> float:
    """Mean risk over all coverages (Geifman et al., 2019), in [0, 1]; 0 is best.

    Chance is the share of hallucinated answers.  Answers of equal score are kept in
    no order: each counts as their mean.

    >>> round(aurc([0.1, 0.4, 0.6, 0.9], [0, 0, 1, 1]), 4)
    0.2083
    """
    score, positive = two_classes(scores, labels)
    return float(_risks(score, positive.astype(float)).mean())


def prr(scores: Rows, labels: Rows) -> float:
    """Prediction rejection ratio (Malinin et al., 2021): 1 is best, 0 is chance.

    How much of the area between rejecting at random and rejecting by the truth lies
    above the risks of rejecting by score.

    >>> prr([0.1, 0.4, 0.6, 0.9], [0, 0, 1, 1])
    1.0
    """
    score, positive = two_classes(scores, labels)
    label = positive.astype(float)
    best, chance = _risks(label, label).mean(), label.mean()
    return float((chance - _risks(score, label).mean()) / (chance - best))


def coverage_at_precision(scores: Rows, labels: Rows, precision: float) -> float:
    """The largest share of answers kept of which ``precision`` are grounded.

    >>> coverage_at_precision([0.1, 0.4, 0.6, 0.9], [0, 0, 1, 1], 0.6)
    0.75
    """
    if not 0 < precision <= 1:
        raise ValueError(f"precision is {precision}; give one above 0, at most 1")
    score, positive = two_classes(scores, labels)
    order = np.argsort(score, kind="stable")
    last = np.flatnonzero(np.append(np.diff(score[order]) > 0, True))
    grounded = np.cumsum(~positive[order])[last] / (last + 1)
    reached = np.flatnonzero(grounded >= precision)
    return float((last[reached[-1]] + 1) / len(score)) if len(reached) else 0.0


def _risks(score: Numbers, label: Numbers) -> Numbers:
    """The risk when the first 1, 2, ... answers are kept."""
    _, rank = np.unique(score, return_inverse=True)
    mean = np.bincount(rank, label) / np.bincount(rank)
    kept = mean[rank][np.argsort(score, kind="stable")]
    return np.cumsum(kept) / np.arange(1, len(kept) + 1)
