"""Whether two classes differ in a number at all, and by how much.

References:
  Mann and Whitney, "On a Test of Whether one of Two Random Variables is Stochastically
  Larger than the Other", 1947.
"""

from typing import Any, NamedTuple

import numpy as np

from jaxhal.evaluation.checks import Rows, two_classes


class UTest(NamedTuple):
    """Of the hypothesis that hallucinated and grounded answers share a distribution.

    Attributes:
      u: pairs of a hallucinated and a grounded answer in which the hallucinated one has
        the higher value; a tie counts one half.
      p_value: two-sided; exact for a few values without ties, otherwise by the normal
        distribution with corrections for ties and continuity.
      auroc: ``u`` over the number of pairs, the size of the effect: 0.5 is none.
    """

    u: float
    p_value: float
    auroc: float


def mann_whitney(values: Rows, labels: Rows) -> UTest:
    r"""Mann-Whitney U test of all answers.

    :math:`U = \sum_{i: y_i = 1} \sum_{j: y_j = 0} [v_i > v_j] + [v_i = v_j] / 2`

    It takes answers for independent, which those to one source are not, and its p-value
    falls with their number however small the effect is.

    >>> mann_whitney([1, 2, 3, 4], [0, 0, 1, 1])
    UTest(u=4.0, p_value=0.333..., auroc=1.0)
    """
    from scipy.stats import mannwhitneyu

    value, positive = two_classes(values, labels, "values")
    found: Any = mannwhitneyu(value[positive], value[~positive])
    pairs = positive.sum() * (~positive).sum()
    u = float(found.statistic)
    return UTest(u, float(found.pvalue), float(u / pairs))


def sampled_mann_whitney(
    values: Rows, labels: Rows, size: int = 200, repeats: int = 200, seed: int = 0
) -> float:
    """Median p-value of U tests of equally many answers of each class.

    Each draw takes ``size`` answers of each class without replacement, or as many as
    the smaller class has.

    >>> sampled_mann_whitney([1, 2, 3, 4, 5], [0, 0, 1, 1, 1], size=2)
    0.333...

    References:
      Hu et al., `LRP4RAG <https://arxiv.org/abs/2408.15533>`_, 2024, section 4.4.1,
      which draws 200 answers 200 times and does not say how many of each class.
    """
    from scipy.stats import mannwhitneyu

    for name, number in (("size", size), ("repeats", repeats)):
        if number < 1:
            raise ValueError(f"{name} is {number}; give at least 1")
    value, positive = two_classes(values, labels, "values")
    classes = value[positive], value[~positive]
    size = min(size, *map(len, classes))
    rng = np.random.default_rng(seed)
    high, low = (
        np.stack([rng.choice(one, size, replace=False) for _ in range(repeats)])
        for one in classes
    )
    found: Any = mannwhitneyu(high, low, axis=1)
    return float(np.median(found.pvalue))
