"""How good it is to keep only the answers that a detector trusts.

Answers are kept from the lowest score up; the risk is the share of hallucinated ones
among those kept.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int

from jaxhal.evaluation.checks import Mask, Numbers, OfDraws, Rows
from jaxhal.evaluation.ranking import once

# Counts at each score, lowest first.
Kept = Int[np.ndarray, "draws scores"]


def aurc(scores: Rows, labels: Rows) -> float:
    """Mean risk over all coverages (Geifman et al., 2019), in [0, 1]; 0 is best.

    Chance is the share of hallucinated answers.  Answers of equal score are kept in
    no order: each counts as their mean.

    >>> round(aurc([0.1, 0.4, 0.6, 0.9], [0, 0, 1, 1]), 4)
    0.2083
    """
    return once(aurc_of_draws, scores, labels)


def aurc_of_draws(score: Numbers, positive: Mask) -> OfDraws:
    """AURC as a function of how often each row counts; one sort serves all."""
    kept_up_to = _kept(score, positive)

    def measure(draws: Int[np.ndarray, "draws rows"]) -> Float[np.ndarray, " draws"]:
        # Of c rows of equal score after k others, h of them hallucinated, each counts
        # as their mean m: the risks (h + m) / (k + 1), ..., (h + c m) / (k + c) add up
        # to c m + (h - k m) (1 / (k + 1) + ... + 1 / (k + c)).
        kept, hits = kept_up_to(draws)
        more, hit = np.diff(kept, prepend=0), np.diff(hits, prepend=0)
        total = int(kept[:, -1].max())
        harmonic = np.append(0.0, np.cumsum(1 / np.arange(1, total + 1)))
        inverse = np.diff(harmonic[kept], prepend=0.0)
        before, mean = kept - more, hit / np.maximum(more, 1)
        risks = hit + (hits - hit - before * mean) * inverse
        return risks.sum(1) / kept[:, -1]

    return measure


def prr(scores: Rows, labels: Rows) -> float:
    """Prediction rejection ratio (Malinin et al., 2021): 1 is best, 0 is chance.

    How much of the area between rejecting at random and rejecting by the truth lies
    above the risks of rejecting by score.

    >>> round(prr([0.1, 0.4, 0.6, 0.9], [0, 0, 1, 1]), 4)
    1.0
    """
    return once(prr_of_draws, scores, labels)


def prr_of_draws(score: Numbers, positive: Mask) -> OfDraws:
    """PRR as a function of how often each row counts."""
    found = aurc_of_draws(score, positive)
    best = aurc_of_draws(positive.astype(float), positive)

    def measure(draws: Int[np.ndarray, "draws rows"]) -> Float[np.ndarray, " draws"]:
        chance = draws @ positive.astype(float) / draws.sum(1)
        return (chance - found(draws)) / (chance - best(draws))

    return measure


def coverage_at_precision(scores: Rows, labels: Rows, precision: float) -> float:
    """The largest share of answers kept of which ``precision`` are grounded.

    >>> coverage_at_precision([0.1, 0.4, 0.6, 0.9], [0, 0, 1, 1], 0.6)
    0.75
    """
    return CoverageAtPrecision(precision)(scores, labels)


@dataclasses.dataclass(frozen=True)
class CoverageAtPrecision:
    """:func:`coverage_at_precision` as a metric, ``(scores, labels) -> number``."""

    precision: float

    def __post_init__(self):
        if not 0 < self.precision <= 1:
            raise ValueError(
                f"precision is {self.precision}; give one above 0, at most 1"
            )

    def __call__(self, scores: Rows, labels: Rows) -> float:
        return once(self.of_draws, scores, labels)

    def of_draws(self, score: Numbers, positive: Mask) -> OfDraws:
        """The metric as a function of how often each row counts."""
        kept_up_to = _kept(score, positive)

        def measure(
            draws: Int[np.ndarray, "draws rows"],
        ) -> Float[np.ndarray, " draws"]:
            kept, hits = kept_up_to(draws)
            precise = (kept - hits) / np.maximum(kept, 1) >= self.precision
            return np.where(precise, kept, 0).max(1) / kept[:, -1]

        return measure


def _kept(score: Numbers, positive: Mask) -> Callable[..., tuple[Kept, Kept]]:
    """Rows, and hallucinated ones, of each score and all lower ones, by their draws."""
    order = np.argsort(score, kind="stable")
    last = np.flatnonzero(np.append(np.diff(score[order]) > 0, True))

    def kept_up_to(draws: Int[np.ndarray, "draws rows"]) -> tuple[Kept, Kept]:
        draws = draws[:, order]
        kept = np.cumsum(draws, axis=1)[:, last]
        return kept, np.cumsum(draws * positive[order], axis=1)[:, last]

    return kept_up_to
