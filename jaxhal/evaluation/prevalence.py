"""How many of some answers are hallucinated, where nobody has labelled them."""

import math
import warnings
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxhal.evaluation.checks import (
    Groups,
    Mask,
    Numbers,
    Rows,
    group_codes,
    shares,
    two_kinds,
)
from jaxhal.evaluation.intervals import drawn_sources

# Resamples of fewer sources are too much alike for an interval.
_FEW = 10


class Rate(NamedTuple):
    """A share in [0, 1] with its 95 % interval."""

    value: float
    low: float
    high: float


def adapted(
    probabilities: Rows,
    prior: float,
    groups: Groups = None,
    *,
    known: Rows | None = None,
    known_groups: Groups = None,
) -> tuple[Numbers, float]:
    r"""Probabilities for answers of another base rate, and that base rate.

    Calibration carries its own base rate :math:`\pi` along.  Where grounded and
    hallucinated answers look as before but are more or fewer, the new rate
    :math:`\rho` is that of most likelihood, and :math:`p' \propto p \rho / \pi`
    (Saerens, Latinne and Decaestecker, 2002, who find it by expectation maximisation).
    Of :math:`n` sources it stays :math:`1/(n+2)` away from 0 and 1, where nothing that
    is seen in one answer would count.

    Probabilities stay as they are where they are all alike, and where another rate is
    not clearly likelier (a likelihood ratio test at 5 %): few answers always seem to
    have some other rate.  Answers to one source rise and fall together: with ``groups``
    the ratio counts less, as the scores' variance over sources has it (Rao and Scott,
    1981).  And those of the calibration are a sample too: what seems another rate may
    be the chance of either.

    Args:
      probabilities: of unlabelled answers, calibrated.
      prior: the share of hallucinated answers that they were calibrated to.
      known: probabilities of the answers of the calibration, by fits that had not seen
        them; without these it is taken for exact.
      groups, known_groups: sources of both.
    """
    from scipy.optimize import root_scalar

    given, _ = shares(probabilities, np.zeros(len(probabilities), int))
    if not 0 < prior < 1:
        raise ValueError(f"prior is {prior}; give a share above 0 and below 1")
    if not np.ptp(given):
        return given, prior
    true, false = given / prior, (1 - given) / (1 - prior)

    def slope(rate: float) -> float:  # of the likelihood, which has one top
        return float(np.mean((true - false) / (rate * true + (1 - rate) * false)))

    sources = int(group_codes(groups, len(given)).max()) + 1
    least, most = 1 / (sources + 2), 1 - 1 / (sources + 2)
    if slope(least) <= 0:
        rate = least
    elif slope(most) >= 0:
        rate = most
    else:
        rate = float(root_scalar(slope, bracket=(least, most)).root)
    whole = rate * true + (1 - rate) * false  # at the old rate these are 1
    design, free = _design(true - false, groups)
    if known is not None:
        seen, _ = shares(known, np.zeros(len(known), int))
        own, few = _design(seen / prior - (1 - seen) / (1 - prior), known_groups)
        design, free = design + own * len(given) / len(seen), min(free, few)
    if 2 * np.log(whole).sum() < design * _once_in_twenty(free):
        return given, prior
    return at_rate(given, prior, rate), rate


def _design(scores: Numbers, groups: Groups) -> tuple[float, float]:
    """How much more a mean varies than of as many sources, and degrees of freedom.

    ``scores`` are derivatives of the answers' likelihoods.
    """
    code = group_codes(groups, len(scores))
    sources = int(code.max()) + 1
    if sources == len(scores):
        return 1.0, math.inf
    apart = scores - scores.mean()
    if sources == 1 or not apart.any():
        return 1.0, float(sources - 1)
    together = np.bincount(code, apart)
    design = sources / (sources - 1) * (together**2).sum() / (apart**2).sum()
    return max(1.0, float(design)), float(sources - 1)


def _once_in_twenty(free: float) -> float:
    """What the square of a normal number exceeds so often, its variance estimated."""
    from scipy.stats import chi2, f

    if math.isinf(free):
        return float(chi2.ppf(0.95, 1))
    return float(f.ppf(0.95, 1, free)) if free else math.inf


def at_rate(probabilities: Numbers, prior: float, rate: float) -> Numbers:
    """Probabilities that were calibrated at one base rate, where it is another.

    What is certain stays so, also where a rate of 0 or 1 has it impossible.
    """
    true = rate * (probabilities / prior)
    whole = true + (1 - rate) * ((1 - probabilities) / (1 - prior))
    return np.where(whole > 0, true / np.where(whole > 0, whole, 1), probabilities)


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
    interval for both samples, of which sources are drawn anew.

    - ``shifted``: the labelled answers come from elsewhere, with another base rate.
      With the mean probability :math:`m` of the unlabelled ones, and :math:`m_1` and
      :math:`m_0` of hallucinated and of grounded ones, the share is :math:`(m - m_0) /
      (m_1 - m_0)` (Bella et al., 2010).
    - else they are a random part of the same answers: :math:`\lambda m` plus the mean
      of label minus :math:`\lambda` times probability over them, where :math:`\lambda`
      weighs the detector by what it is worth (prediction-powered inference,
      `Angelopoulos et al. <https://arxiv.org/abs/2311.01453>`_, 2023).  A source that
      has answers on both sides is drawn for both at once.

    Raises ValueError when the detector does not tell the classes apart; warns where
    answers of either kind have fewer than ten sources, of which resamples differ too
    little.

    Args:
      probabilities: of the unlabelled answers.
      known: of the labelled ones, by a fit that had not seen them.
      labels: of these.
      known_groups, groups: their sources, and those of the unlabelled ones.
    """
    score, _ = shares(probabilities, np.zeros(len(probabilities), int))
    seen, positive = shares(known, labels)
    two_kinds(labels)
    for which, sources in (
        ("the answers", group_codes(groups, len(score))),
        ("the labelled answers", group_codes(known_groups, len(seen))),
    ):
        if (few := len(np.unique(sources))) < _FEW:
            warnings.warn(
                f"number of sources of {which}: {few}, so the interval is too narrow; "
                f"give answers to {_FEW} sources or more",
                stacklevel=2,
            )
    columns = seen, positive.astype(float), seen * positive
    if shifted or groups is None or known_groups is None:
        new = _sums(group_codes(groups, len(score)), score)
        old = _sums(group_codes(known_groups, len(seen)), *columns)
        draws = [_of_draws(new, repeats, seed), _of_draws(old, repeats, seed + 1)]
        count, total, known_count, *known_sums = np.concatenate(draws)
    else:
        both = group_codes([*groups, *known_groups], len(score) + len(seen))
        codes, known_codes = np.split(both, [len(score)])
        every = int(both.max()) + 1
        new = _sums(codes, score, sources=every)
        old = _sums(known_codes, *columns, sources=every)
        draws = _of_draws(np.concatenate([new, old]), repeats, seed)
        # A draw without an answer of either side says nothing.
        count, total, known_count, *known_sums = draws[:, (draws[[0, 2]] > 0).all(0)]
    if shifted:
        found = _shifted(total / count, known_count, *known_sums)
    else:
        weight, (known_total, true, _) = _weight(score, seen, positive), known_sums
        found = weight * total / count + (true - weight * known_total) / known_count
    value, *drawn = np.clip(found, 0, 1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Rate(float(value), float(min(low, value)), float(max(high, value)))


# Of the sample itself, then of each resample.
_Draws = Float[np.ndarray, " draws"]


def _sums(
    codes: Int[np.ndarray, " rows"], *columns: Numbers, sources: int = 0
) -> Float[np.ndarray, "columns sources"]:
    """The number of rows and the sum of each column, of each source."""
    values = np.ones(len(codes)), *columns
    return np.stack([np.bincount(codes, each, sources) for each in values])


def _of_draws(
    sums: Float[np.ndarray, "columns sources"], repeats: int, seed: int
) -> Float[np.ndarray, "columns draws"]:
    """Of the sample itself, then of each resample of its sources."""
    drawn = drawn_sources(sums.shape[1], repeats, seed)
    return np.column_stack([sums.sum(1), *(sums @ some.T for some in drawn)])


def _shifted(
    mean: _Draws, count: _Draws, seen: _Draws, true: _Draws, both: _Draws
) -> _Draws:
    high = both / np.maximum(true, 1e-12)
    low = (seen - both) / np.maximum(count - true, 1e-12)
    apart = high > low
    if not apart[0]:
        raise ValueError(
            "the detector gives hallucinated answers no higher probability than "
            "grounded ones, so it says nothing of their share; use another detector"
        )
    # A resample where the classes cannot be told apart says nothing of the share.
    nothing = np.arange(len(apart)) % 2
    return np.where(apart, (mean - low) / np.where(apart, high - low, 1.0), nothing)


def _weight(score: np.ndarray, seen: Numbers, positive: Mask) -> float:
    """How much the detector's word is worth, by least variance, in [0, 1]."""
    spread = np.var(np.append(score, seen)) * (1 + len(seen) / len(score))
    if not spread:
        return 0.0
    return float(np.clip(np.cov(seen, positive, ddof=0)[0, 1] / spread, 0, 1))
