"""From scores to probabilities, and to thresholds; fit them on answers held out.

Both calibrations never decrease, so they keep the order of the scores.
"""

import dataclasses

import numpy as np
from jaxtyping import Num

from jaxhal.evaluation.checks import Numbers, Rows, two_classes


@dataclasses.dataclass(frozen=True)
class Platt:
    """A sigmoid of the score, :math:`p(s) = 1 / (1 + e^{-(a s + b)})`."""

    slope: float
    intercept: float

    @property
    def flat(self) -> bool:
        """Whether every score has one probability."""
        return self.slope == 0

    def __call__(self, scores: Rows) -> Numbers:
        """Probability of hallucination of each score."""
        logit = self.slope * np.asarray(scores, float) + self.intercept
        return np.exp(-np.logaddexp(0.0, -logit))


@dataclasses.dataclass(frozen=True)
class Isotonic:
    """Lines between knots at scores ``x``, increasing, constant outside them."""

    x: tuple[float, ...]
    y: tuple[float, ...]

    @property
    def flat(self) -> bool:
        """Whether every score has one probability."""
        return len(set(self.y)) == 1

    def __call__(self, scores: Rows) -> Numbers:
        """Probability of hallucination of each score."""
        return np.interp(np.asarray(scores, float), self.x, self.y)


def platt(scores: Rows, labels: Rows) -> Platt:
    """The sigmoid of most likelihood among those that do not decrease (Platt, 1999).

    Targets are smoothed to :math:`(N_+ + 1) / (N_+ + 2)` and :math:`1 / (N_- + 2)`, so
    that separated classes get a finite slope.  Scores that rank no better than chance
    get slope 0, a constant probability.

    >>> platt([0.0, 1.0, 2.0, 3.0], [0, 0, 1, 1])([0.0, 1.5, 3.0]).round(2)
    array([0.2, 0.5, 0.8])
    """
    from sklearn.linear_model import LogisticRegression

    score, positive = two_classes(scores, labels)
    hits, misses = positive.sum(), (~positive).sum()
    target = np.where(positive, (hits + 1) / (hits + 2), 1 / (misses + 2))
    centred = score - score.mean()
    spread = np.ptp(score) or 1.0
    # Where the likelihood does not rise from slope 0, it is concave and never will.
    if centred @ (target - target.mean()) <= 1e-9 * spread:
        return Platt(0.0, float(np.log(target.mean() / (1 - target.mean()))))
    # A target t is a hallucinated row of weight t and a grounded one of weight 1 - t.
    model = LogisticRegression(C=np.inf, solver="newton-cholesky", tol=1e-8)
    model.fit(
        np.tile(centred / spread, 2)[:, None],
        np.repeat([1, 0], len(score)),
        np.append(target, 1 - target),
    )
    slope = float(np.ravel(model.coef_)[0] / spread)
    return Platt(slope, float(np.ravel(model.intercept_)[0] - slope * score.mean()))


def isotonic(scores: Rows, labels: Rows) -> Isotonic:
    """Rising probabilities of least squared error (Zadrozny and Elkan, 2002)."""
    from sklearn.isotonic import IsotonicRegression

    score, positive = two_classes(scores, labels)
    model = IsotonicRegression(out_of_bounds="clip").fit(score, positive)
    knots = model.X_thresholds_, model.y_thresholds_
    return Isotonic(*(tuple(map(float, each)) for each in knots))


def best_f1_threshold(scores: Rows, labels: Rows) -> float:
    """The threshold of highest F1, in the score's unit; the highest among equals.

    It lies half-way between the lowest flagged score and the next below it.

    >>> best_f1_threshold([0.1, 0.4, 0.6, 0.9], [0, 0, 1, 1])
    0.5
    """
    threshold, flagged, hits = _splits(scores, labels)
    return float(threshold[np.argmax(2 * hits / (flagged + hits[-1]))])


def best_accuracy_threshold(scores: Rows, labels: Rows) -> float:
    """Of the thresholds that flag any answer that of highest accuracy, as for F1."""
    threshold, flagged, hits = _splits(scores, labels)
    return float(threshold[np.argmax(2 * hits - flagged)])


def precision_threshold(scores: Rows, labels: Rows, target: float) -> float:
    """The threshold of most recall whose precision reaches ``target``.

    Precision goes up and down along the scores, so a higher threshold may well miss the
    target.  Raises ValueError when no threshold reaches it.

    >>> precision_threshold([0.1, 0.4, 0.6, 0.9], [0, 1, 0, 1], target=0.6)
    0.25
    """
    if not 0 < target <= 1:
        raise ValueError(f"target is {target}; give a precision above 0, at most 1")
    threshold, flagged, hits = _splits(scores, labels)
    precision = hits / flagged
    if precision.max() < target:
        raise ValueError(
            f"no threshold reaches a precision of {target}; the best is "
            f"{precision.max():.3f}, so give a target no higher"
        )
    return float(threshold[np.argmax(np.where(precision >= target, hits, -1))])


def _splits(scores: Rows, labels: Rows) -> tuple[Num[np.ndarray, " splits"], ...]:
    """Thresholds from the highest down, how many each flags, how many of them hits."""
    score, positive = two_classes(scores, labels)
    value, rank = np.unique(score, return_inverse=True)
    threshold = thresholds(value)
    flagged = np.cumsum(np.bincount(rank)[::-1])
    hits = np.cumsum(np.bincount(rank[positive], minlength=len(value))[::-1])
    return threshold[::-1], flagged, hits


def thresholds(value: Num[np.ndarray, " splits"]) -> Num[np.ndarray, " splits"]:
    """Of rising scores: those that flag all, all but the lowest, and so on, rising."""
    below, above = value[:-1], value[1:]
    half = below / 2 + above / 2
    # Of neighbouring floats the lower may be its own half-way point.
    return np.append(value[0], np.where(half > below, half, above))
