"""How many of some answers are hallucinated, where nobody has labelled them."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxhal.evaluation.checks import (
    Groups,
    Mask,
    Numbers,
    Rows,
    group_codes,
    shares,
    two_kinds,
)


class Rate(NamedTuple):
    """A share in [0, 1] with its 95 % interval."""

    value: float
    low: float
    high: float


def adapted(
    probabilities: Rows, prior: float, steps: int = 1000
) -> tuple[Numbers, float]:
    r"""Probabilities for answers of another base rate, and that base rate.

    Calibration carries its own base rate :math:`\pi` along.  Where grounded and
    hallucinated answers look as before but are more or fewer, the new rate
    :math:`\rho` is that of most likelihood, found by expectation maximisation, and
    :math:`p' \propto p \rho / \pi` (Saerens, Latinne and Decaestecker, 2002).

    Args:
      probabilities: of unlabelled answers, calibrated.
      prior: the share of hallucinated answers that they were calibrated to.
    """
    given, _ = shares(probabilities, np.zeros(len(probabilities), int))
    if not 0 < prior < 1:
        raise ValueError(f"prior is {prior}; give a share above 0 and below 1")
    rate, found = prior, given
    for _ in range(steps):
        true = given * rate / prior
        false = (1 - given) * (1 - rate) / (1 - prior)
        found = true / (true + false)
        before, rate = rate, float(found.mean())
        if abs(rate - before) < 1e-9:
            break
    return found, rate


def rate(
    probabilities: Rows,
    known: Rows,
    labels: Rows,
    known_groups: Groups = None,
    groups: Groups = None,
    *,
    shifted: bool = True,
    repeats: int = 2000,
    seed: int = 0,
) -> Rate:
    r"""The share of hallucinated answers in unlabelled ones, with its 95 % interval.

    What a detector says of them, corrected by how it errs on labelled answers, and an
    interval for both samples: sources are drawn anew in each.

    - ``shifted``: the labelled answers come from elsewhere, with another base rate.
      With the mean probability :math:`m` of the unlabelled ones, and :math:`m_1` and
      :math:`m_0` of hallucinated and of grounded ones, the share is :math:`(m - m_0) /
      (m_1 - m_0)` (Bella et al., 2010).
    - else they are a random part of the same answers: :math:`\lambda m` plus the mean
      of label minus :math:`\lambda` times probability over them, where :math:`\lambda`
      weighs the detector by what it is worth (prediction-powered inference,
      `Angelopoulos et al. <https://arxiv.org/abs/2311.01453>`_, 2023).

    Raises ValueError when the detector does not tell the classes apart.

    Args:
      probabilities: of the unlabelled answers.
      known: of the labelled ones, by a fit that had not seen them.
      labels: of these.
      known_groups, groups: their sources, and those of the unlabelled ones.
    """
    score, _ = shares(probabilities, np.zeros(len(probabilities), int))
    seen, positive = shares(known, labels)
    if shifted:
        two_kinds(labels)
    unlabelled = _Sample(groups, score)
    labelled = _Sample(known_groups, seen, positive.astype(float), seen * positive)
    if shifted and not _gap(labelled.sums) > 0:
        raise ValueError(
            "the detector gives hallucinated answers no higher probability than "
            "grounded ones, so it says nothing of their share; use another detector"
        )
    rng = np.random.default_rng(seed)
    estimate = _shifted if shifted else _powered
    options = () if shifted else (_weight(score, seen, positive),)
    value = estimate(unlabelled.sums, labelled.sums, *options)
    drawn = []
    while len(drawn) < repeats:
        one, other = unlabelled.draw(rng), labelled.draw(rng)
        # A resample where the classes cannot be told apart says nothing of the share.
        if shifted and not _gap(other) > 0:
            drawn.append(float(rng.integers(2)))
        else:
            drawn.append(estimate(one, other, *options))
    low, high = np.percentile(np.clip(drawn, 0, 1), [2.5, 97.5])
    value = float(np.clip(value, 0, 1))
    return Rate(value, float(min(low, value)), float(max(high, value)))


# Of ones, and of each column.
_Sums = Float[np.ndarray, " columns"]


class _Sample:
    """Sums over rows, whole and of sources drawn with replacement."""

    def __init__(self, groups: Groups, *columns: Numbers):
        codes = group_codes(groups, len(columns[0]))
        values = np.stack([np.ones(len(codes)), *columns], axis=1)
        self._sums = np.zeros((codes.max() + 1, values.shape[1]))
        np.add.at(self._sums, codes, values)

    @property
    def sums(self) -> _Sums:
        return self._sums.sum(0)

    def draw(self, rng: np.random.Generator) -> _Sums:
        count = len(self._sums)
        return rng.multinomial(count, np.full(count, 1 / count)) @ self._sums


def _means(sums: _Sums) -> tuple[float, float]:
    """Mean probability of hallucinated and of grounded answers."""
    count, seen, true, both = sums
    return both / max(true, 1e-12), (seen - both) / max(count - true, 1e-12)


def _gap(sums: _Sums) -> float:
    true, false = _means(sums)
    return true - false


def _shifted(unlabelled: np.ndarray, labelled: np.ndarray) -> float:
    true, false = _means(labelled)
    return float((unlabelled[1] / unlabelled[0] - false) / (true - false))


def _weight(score: np.ndarray, seen: Numbers, positive: Mask) -> float:
    """How much the detector's word is worth, by least variance, in [0, 1]."""
    spread = np.var(np.append(score, seen)) * (1 + len(seen) / len(score))
    if not spread:
        return 0.0
    return float(np.clip(np.cov(seen, positive, ddof=0)[0, 1] / spread, 0, 1))


def _powered(unlabelled: np.ndarray, labelled: np.ndarray, weight: float) -> float:
    count, seen, true, _ = labelled
    return float(
        weight * unlabelled[1] / unlabelled[0] + (true - weight * seen) / count
    )
