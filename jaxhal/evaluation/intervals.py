"""How far a metric, or the difference of two, could be off by the luck of the sample.

Answers to one context rise and fall together, so resampling them singly makes an
interval too narrow: give their source as ``groups`` and whole sources are drawn with
replacement.  A resample with one class has no AUROC and is drawn again.

References:
  Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13.
"""

import math
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxhal.evaluation.checks import group_codes, two_classes
from jaxhal.evaluation.ranking import auroc

# (scores, labels) -> number; labels are integers.
Metric = Callable[[Any, Any], float]


class Difference(NamedTuple):
    """How much better one score is than another on the same answers.

    Attributes:
      value: metric of the score minus metric of the baseline.
      low, high: percentile 95 % interval of the value.
      p_value: two-sided, of the value being 0: twice the share of resamples on the
        other side of 0, and at least ``2 / (repeats + 1)``.
    """

    value: float
    low: float
    high: float
    p_value: float


def bootstrap(
    scores: Collection[Any],
    labels: Collection[Any],
    groups: Collection[Hashable] | None = None,
    repeats: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile 95 % interval of the AUROC; :func:`interval` of it.

    Args:
      scores: one finite number per answer.
      labels: 1 for hallucinated, 0 for grounded.
      groups: the source of each answer; each answer by itself when left out.
      repeats: number of resamples.
      seed: of the resampling; the same seed gives the same interval.

    Raises:
      ValueError: as :func:`interval` does.

    >>> bootstrap([0.1, 0.4, 0.4, 0.9], [0, 1, 0, 1], groups=["a", "a", "b", "b"])
    (0.875, 1.0)
    """
    return interval(auroc, scores, labels, groups, repeats, seed)


def interval(
    metric: Metric,
    scores: Collection[Any],
    labels: Collection[Any],
    groups: Collection[Hashable] | None = None,
    repeats: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile 95 % interval of a metric, in the metric's unit.

    Args:
      metric: ``(scores, labels) -> number``, such as :func:`auroc` or
        ``functools.partial(f1, threshold=0.5)``.
      scores: one finite number per answer.
      labels: 1 for hallucinated, 0 for grounded.
      groups: the source of each answer; each answer by itself when left out.
      repeats: number of resamples.
      seed: of the resampling; the same seed gives the same interval.

    Raises:
      ValueError: when only one class is present, a score is not finite, a label is not
        0 or 1, the lengths differ, or ``repeats`` is below 1.

    >>> interval(lambda scores, labels: labels.mean(), [1, 2, 3, 4], [0, 1, 0, 1])
    (0.25, 0.75)
    """
    score, positive = two_classes(scores, labels)
    measure = _of_draws(metric, score, positive)
    found = [measure(drawn) for drawn in _draws(positive, groups, repeats, seed)]
    low, high = np.percentile(found, [2.5, 97.5])
    return float(low), float(high)


def mean_interval(
    values: Collection[Any],
    groups: Collection[Hashable] | None = None,
    repeats: int = 1000,
    seed: int = 0,
) -> tuple[Float[np.ndarray, " columns"], Float[np.ndarray, " columns"]]:
    """Percentile 95 % interval of each column's mean, in the unit of the values.

    Args:
      values: ``[rows, columns]``, finite.
      groups: the source of each row; each row by itself when left out.
      repeats: number of resamples.
      seed: of the resampling; the same seed gives the same interval.

    Raises:
      ValueError: when there are no rows, a value is not finite, groups and rows differ
        in number, or ``repeats`` is below 1.

    >>> low, high = mean_interval([[1.0, 2.0], [3.0, 2.0]])
    >>> low.tolist(), high.tolist()
    ([1.0, 2.0], [3.0, 2.0])
    """
    value = np.asarray(values, float)
    if value.ndim != 2 or not value.size or not np.isfinite(value).all():
        raise ValueError(
            f"values of shape {list(value.shape)} must be [rows, columns] of finite "
            "numbers"
        )
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; give at least 1")
    group = group_codes(groups, len(value))
    size = np.bincount(group)
    total = np.zeros((len(size), value.shape[1]))
    np.add.at(total, group, value)
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(len(size), np.full(len(size), 1 / len(size)), repeats)
    found = (drawn @ total) / (drawn @ size)[:, None]
    low, high = np.percentile(found, [2.5, 97.5], axis=0)
    return low, high


def correlation(
    x: Collection[Any],
    y: Collection[Any],
    groups: Collection[Hashable] | None = None,
    repeats: int = 1000,
    seed: int = 0,
) -> tuple[float, float, float]:
    """Pearson's correlation with its percentile 95 % interval, in [-1, 1].

    Not a number where one of the two is the same everywhere; resamples in which one is
    do not count.

    Args:
      x, y: one finite number per answer.
      groups: the source of each answer; each answer by itself when left out.
      repeats: number of resamples.
      seed: of the resampling; the same seed gives the same interval.

    Raises:
      ValueError: when there are no answers, a number is not finite, the lengths differ,
        or ``repeats`` is below 1.

    >>> [round(r, 3) for r in correlation([1, 2, 3, 4], [2, 4, 6, 8])]
    [1.0, 1.0, 1.0]
    """
    pairs = np.stack([np.asarray(x, float), np.asarray(y, float)])
    if not pairs.size or not np.isfinite(pairs).all():
        raise ValueError(
            f"{pairs.shape[1]} pairs of numbers: give at least one, all of them finite"
        )
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; give at least 1")
    group = group_codes(groups, pairs.shape[1])
    if not np.ptp(pairs, axis=1).all():
        return math.nan, math.nan, math.nan
    count = int(group.max()) + 1
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(count, np.full(count, 1 / count), repeats)
    weights = np.concatenate([np.ones((1, count)), drawn])[:, group]
    weights /= weights.sum(1, keepdims=True)
    off = pairs[:, None] - np.einsum("ra,va->vr", weights, pairs)[..., None]
    covariance = np.einsum("ra,ura,vra->ruv", weights, off, off)
    spread = covariance[:, 0, 0] * covariance[:, 1, 1]
    varied = spread > 1e-20 * spread[0]  # less is rounding
    r = covariance[varied, 0, 1] / np.sqrt(spread[varied])
    low, high = np.percentile(r, [2.5, 97.5])
    return float(r[0]), float(low), float(high)


def paired(
    scores: Collection[Any],
    baseline: Collection[Any],
    labels: Collection[Any],
    groups: Collection[Hashable] | None = None,
    metric: Metric = auroc,
    repeats: int = 2000,
    seed: int = 0,
) -> Difference:
    """Metric of one score minus that of another on the same answers.

    Both are measured on every resample, so what makes the answers hard for both
    cancels; the interval is much narrower than two intervals side by side.

    Args:
      scores: one finite number per answer.
      baseline: the same, of the score to beat.
      labels: 1 for hallucinated, 0 for grounded.
      groups: the source of each answer; each answer by itself when left out.
      metric: ``(scores, labels) -> number``.
      repeats: number of resamples.
      seed: of the resampling; the same seed gives the same interval.

    Raises:
      ValueError: as :func:`interval` does, for either score.

    >>> paired([1, 2, 3, 4], [4, 3, 2, 1], [0, 0, 1, 1], repeats=99)
    Difference(value=1.0, low=1.0, high=1.0, p_value=0.02)
    """
    score, positive = two_classes(scores, labels)
    other, _ = two_classes(baseline, labels, "baseline")
    ours, theirs = (_of_draws(metric, each, positive) for each in (score, other))
    once = np.ones(len(score), int)
    draws = _draws(positive, groups, repeats, seed)
    found = np.array([ours(drawn) - theirs(drawn) for drawn in draws])
    low, high = np.percentile(found, [2.5, 97.5])
    # With the sample itself among the resamples, no p-value is 0.
    beyond = 1 + min((found <= 0).sum(), (found >= 0).sum())
    return Difference(
        value=float(ours(once) - theirs(once)),
        low=float(low),
        high=float(high),
        p_value=min(1.0, float(2 * beyond / (1 + repeats))),
    )


def _of_draws(
    metric: Metric,
    score: Float[np.ndarray, " rows"],
    positive: Bool[np.ndarray, " rows"],
) -> Callable[[np.ndarray], float]:
    """The metric as a function of how often each row is drawn."""
    if metric is auroc:
        return _auroc_of_draws(score, positive)
    label = positive.astype(int)
    return lambda drawn: float(metric(np.repeat(score, drawn), np.repeat(label, drawn)))


def _auroc_of_draws(
    score: Float[np.ndarray, " rows"], positive: Bool[np.ndarray, " rows"]
) -> Callable[[np.ndarray], float]:
    """AUROC of a resample; the order of the scores stays, so one sort serves all."""
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


def _draws(
    positive: Bool[np.ndarray, " rows"],
    groups: Collection[Hashable] | None,
    repeats: int,
    seed: int,
) -> Iterator[Int[np.ndarray, " rows"]]:
    """How often each row is drawn, for every resample that has both classes."""
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; give at least 1")
    group = group_codes(groups, len(positive))
    total = int(group.max()) + 1
    kinds = [np.unique(group[kind]) for kind in (positive, ~positive)]
    rng = np.random.default_rng(seed)
    made = 0
    while made < repeats:
        drawn = np.bincount(rng.integers(total, size=total), minlength=total)
        if all(drawn[sources].any() for sources in kinds):
            made += 1
            yield drawn[group]
