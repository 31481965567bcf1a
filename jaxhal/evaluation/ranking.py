"""How well scores rank hallucinated answers above grounded ones, at no threshold."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jaxhal.evaluation.checks import Mask, Numbers, OfDraws, Rows, two_classes
from jaxhal.io.checks import at_least


def auroc(scores: Rows, labels: Rows) -> float:
    """Area under the ROC curve, in [0, 1]: 0.5 is chance, 1 a perfect ranking.

    >>> auroc([0.1, 0.4, 0.4, 0.9], [0, 0, 1, 1])
    0.875
    """
    return once(auroc_of_draws, scores, labels)


def once(
    of_draws: Callable[[Numbers, Mask], OfDraws], scores: Rows, labels: Rows
) -> float:
    """A metric of the rows themselves, each of which counts once."""
    score, positive = two_classes(scores, labels)
    return float(of_draws(score, positive)(np.ones((1, len(score)), int))[0])


def auroc_of_draws(score: Numbers, positive: Mask) -> OfDraws:
    """AUROC as a function of how often each row counts; one sort serves all."""
    count = _wins(score, positive)

    def measure(draws: Int[np.ndarray, "draws rows"]) -> Float[np.ndarray, " draws"]:
        wins, pairs = count(draws)
        return wins / pairs

    return measure


def _wins(score: Numbers, positive: Mask) -> Callable[[Any], tuple[Any, Any]]:
    """Per draw, pairs of both classes that are ranked rightly, and all of them."""
    hallucinated, grounded = np.flatnonzero(positive), np.flatnonzero(~positive)
    grounded = grounded[np.argsort(score[grounded])]
    # Grounded rows below each hallucinated one, and those up to it: a tie is half won.
    below, up_to = (
        np.searchsorted(score[grounded], score[hallucinated], side)
        for side in ("left", "right")
    )

    def count(draws: Int[np.ndarray, "draws rows"]) -> tuple[Any, Any]:
        hits = draws[:, hallucinated]
        misses = np.pad(np.cumsum(draws[:, grounded], axis=1), [(0, 0), (1, 0)])
        wins = (hits * (misses[:, below] + misses[:, up_to])).sum(1) / 2
        return wins, hits.sum(1) * misses[:, -1]

    return count


@dataclasses.dataclass(frozen=True, eq=False)
class WithinParts:
    """AUROC over the pairs of answers that one part holds, all parts together.

    Where another fit judges each part, scores of two parts do not compare, and one that
    says nothing would be far from 0.5 where the parts differ in their share of
    hallucinated answers, or hold the answers of one class more often.

    Args:
      parts: of each row, the part that it was judged in.

    >>> WithinParts([0, 0, 1, 1])([1, 2, 3, 4], [0, 1, 0, 1])
    1.0
    """

    parts: Sequence[int]

    def __call__(self, scores: Rows, labels: Rows) -> float:
        return once(self.of_draws, scores, labels)

    def of_draws(self, score: Numbers, positive: Mask) -> OfDraws:
        """As a function of how often each row counts."""
        part = np.asarray(self.parts)
        each = [np.flatnonzero(part == one) for one in np.unique(part)]
        counts = [(rows, _wins(score[rows], positive[rows])) for rows in each]

        def measure(
            draws: Int[np.ndarray, "draws rows"],
        ) -> Float[np.ndarray, " draws"]:
            found = [count(draws[:, rows]) for rows, count in counts]
            wins, pairs = map(sum, zip(*found, strict=True))
            return np.divide(wins, pairs, out=np.full(len(draws), 0.5), where=pairs > 0)

        return measure


def auprc(scores: Rows, labels: Rows) -> float:
    """Area under the precision-recall curve in steps (average precision), in [0, 1].

    Chance is the share of hallucinated answers.
    """
    return once(auprc_of_draws, scores, labels)


def auprc_of_draws(score: Numbers, positive: Mask) -> OfDraws:
    """AUPRC as a function of how often each row counts; one sort serves all."""
    order = np.argsort(-score)
    positive, ranked = positive[order], score[order]
    last = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))  # of equal ones

    def measure(draws: Int[np.ndarray, "draws rows"]) -> Float[np.ndarray, " draws"]:
        draws = draws[:, order]
        flagged = np.cumsum(draws, axis=1)[:, last]
        hits = np.cumsum(draws * positive, axis=1)[:, last]
        precision = hits / np.maximum(flagged, 1)
        return (np.diff(hits, prepend=0) * precision).sum(1) / hits[:, -1]

    return measure


def auprc_trapezoid(scores: Rows, labels: Rows) -> float:
    """Area under the precision-recall curve by the trapezoid rule, in [0, 1].

    Straight lines between its points are too optimistic: use it to compare with
    published numbers that are made this way, those of TOHA among them, and
    :func:`auprc` otherwise.
    """
    from sklearn.metrics import auc, precision_recall_curve

    score, positive = two_classes(scores, labels)
    precisions, recalls, _ = precision_recall_curve(positive, score)
    return float(auc(recalls, precisions))


def mann_whitney(values: Rows, labels: Rows) -> float:
    """Two-sided p-value of the U test of all answers (Mann and Whitney, 1947).

    Of the hypothesis that hallucinated and grounded answers share a distribution; exact
    for a few values without ties, else by the normal distribution.  It takes answers
    for independent, which those to one source are not, and falls with their number
    however small the effect is; :func:`auroc` is the size of the effect.
    """
    from scipy.stats import mannwhitneyu

    value, positive = two_classes(values, labels, "values")
    return float(_p_value(mannwhitneyu(value[positive], value[~positive])))


def _p_value(found: Any) -> Any:
    """1 where all values are equal, of which some versions of SciPy say NaN."""
    return np.nan_to_num(found.pvalue, nan=1.0)


def sampled_mann_whitney(
    values: Rows, labels: Rows, size: int = 200, repeats: int = 200, seed: int = 0
) -> float:
    """Median p-value of U tests of equally many answers of each class.

    Each draw takes ``size`` answers of each class without replacement, or as many as
    the smaller class has (Hu et al., `LRP4RAG <https://arxiv.org/abs/2408.15533>`_,
    2024, section 4.4.1).
    """
    from scipy.stats import mannwhitneyu

    at_least(1, size=size, repeats=repeats)
    value, positive = two_classes(values, labels, "values")
    classes = value[positive], value[~positive]
    size = min(size, *map(len, classes))
    rng = np.random.default_rng(seed)
    high, low = (
        np.stack([rng.choice(one, size, replace=False) for _ in range(repeats)])
        for one in classes
    )
    return float(np.median(_p_value(mannwhitneyu(high, low, axis=1))))
