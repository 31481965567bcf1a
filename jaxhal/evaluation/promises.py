"""How often promises of thresholds are kept, on splits of labelled answers."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxhal.evaluation.checks import Groups, Mask, Rows, group_codes, two_classes
from jaxhal.evaluation.guarantees import (
    STEPS,
    NoThreshold,
    bounded,
    guaranteed,
    guaranteed_highlights,
    highlighted_means,
)
from jaxhal.io.checks import at_least

# Kept, broken beyond chance, the realised share, and the share flagged.
_Looked = tuple[float, float, float, float]
_Others = Bool[np.ndarray, " others"]
_Sources = Int[np.ndarray, " _"]


class Answers(NamedTuple):
    """Scores and labels of answers, with their sources."""

    scores: Rows
    labels: Rows
    groups: Groups = None


def kept(
    answers: Answers,
    promise: Mapping[str, float],
    *,
    confidence: float | None = 0.9,
    elsewhere: Answers | None = None,
    splits: int = 200,
    seed: int = 0,
) -> dict[str, Any]:
    """What becomes of a promise: chosen on a random half, looked at on the other.

    Halves keep sources whole, and each source weighs alike, however many answers it
    has: a promise is about an answer of a new one.  The half that is looked at is a
    sample as well, so a promise that is just kept is missed there about every other
    time: ``broken`` counts splits where chance alone would miss it by so much in less
    than 5 % (by the binomial tail over one answer of each source).

    Args:
      promise, confidence: as :func:`jaxhal.evaluation.guarantee` takes them.
      elsewhere: look at these instead of the other half: other answers than the
        threshold was chosen on.  Those of a source in that half are left out.
      splits: how many random halves.

    Returns:
      ``splits``, ``made`` (the share of them where a threshold could promise that), and
      of those ``kept`` and ``broken`` (shares), ``realised`` (the mean of what was
      promised) and ``flagged`` (the mean share of answers); ``None`` where none was
      made, and where nothing was flagged that a precision could be of.
    """
    score, positive = two_classes(answers.scores, answers.labels)
    looked, wrong = score, positive
    if elsewhere is not None:
        looked, wrong = two_classes(elsewhere.scores, elsewhere.labels)
    groups = answers.groups, elsewhere and elsewhere.groups
    codes, there = _numbered(*groups, len(score), elsewhere and len(looked))
    ((kind, level),) = promise.items()

    def look(chosen: Mask, rest: _Others, rng: np.random.Generator) -> _Looked:
        half = score[chosen], positive[chosen], promise, codes[chosen]
        if len(set(half[1].tolist())) < 2:
            raise NoThreshold("answers of one class")
        made = guaranteed(*half, confidence=confidence)
        if made is None:
            raise NoThreshold("none keeps the promise")
        flags = looked[rest] >= made.threshold
        return _looked_at(kind, level, flags, wrong[rest], there[rest], rng)

    return _over_halves(look, codes, there, splits, seed)


class Highlights(NamedTuple):
    """Of answers, what :func:`jaxhal.evaluation.highlighted` gives, and sources."""

    shares: Float[np.ndarray, "answers steps"]
    groups: Groups = None


def kept_highlights(
    answers: Highlights,
    promise: Mapping[str, float],
    *,
    confidence: float | None = 0.9,
    elsewhere: Highlights | None = None,
    splits: int = 200,
    seed: int = 0,
) -> dict[str, Any]:
    """:func:`kept` of a promise like ``{"highlighted": 0.05}``, of spans.

    It is broken where the share in the other half is beyond that by a test at 5 %, over
    sources; no answer is flagged.
    """
    level = promise["highlighted"]
    other = answers if elsewhere is None else elsewhere
    groups = answers.groups, elsewhere and elsewhere.groups
    count = len(answers.shares), elsewhere and len(elsewhere.shares)
    codes, there = _numbered(*groups, *count)

    def look(chosen: Mask, rest: _Others, rng: np.random.Generator) -> _Looked:
        del rng
        half = answers.shares[chosen], level, codes[chosen].tolist()
        made = guaranteed_highlights(*half, confidence=confidence)
        if np.isnan(other.shares[rest][:, 0]).all():
            return np.nan, np.nan, np.nan, np.nan
        means = highlighted_means(other.shares[rest], there[rest])
        share = means[:, np.flatnonzero(STEPS == made.threshold)[0]]
        broken = bounded(1 - share, 1 - level) < 0.05
        return float(share.mean() <= level), float(broken), float(share.mean()), np.nan

    return _over_halves(look, codes, there, splits, seed)


def _numbered(
    groups: Groups, others: Groups, count: int, elsewhere: int | None
) -> tuple[_Sources, _Sources]:
    """Sources of rows and of those looked at, which are the same without others.

    A source of both has one number; rows without groups are sources of their own.
    """
    codes = group_codes(groups, count)
    if elsewhere is None:
        return codes, codes
    if groups is None or others is None:
        return codes, group_codes(others, elsewhere) + count
    both = group_codes([*groups, *others], count + elsewhere)
    return codes, both[count:]


def _over_halves(
    look: Callable[[Mask, _Others, np.random.Generator], _Looked],
    codes: _Sources,
    there: _Sources,
    splits: int,
    seed: int,
) -> dict[str, Any]:
    """What is found of rows chosen, and of those looked at of other sources."""
    at_least(1, splits=splits)
    rng, sources = np.random.default_rng(seed), int(codes.max()) + 1
    found = []
    for _ in range(splits):
        half = rng.permutation(sources)[: sources // 2]
        chosen, rest = np.isin(codes, half), ~np.isin(there, half)
        if not rest.any():
            raise ValueError(
                "every answer to be looked at is of a source that the threshold is "
                "chosen on; give answers of other sources"
            )
        with contextlib.suppress(NoThreshold):  # what is not promised is not broken
            found.append(look(chosen, rest, rng))
    row: dict[str, Any] = {"splits": splits, "made": len(found) / splits}
    for at, name in enumerate(("kept", "broken", "realised", "flagged")):
        known = [one[at] for one in found if not np.isnan(one[at])]
        row[name] = float(np.mean(known)) if known else None
    return row


def _looked_at(
    kind: str,
    level: float,
    flags: Mask,
    positive: Mask,
    codes: Int[np.ndarray, " rows"],
    rng: np.random.Generator,
) -> _Looked:
    from scipy.stats import binom

    of, good = {
        "precision": (flags, positive),
        "recall": (positive, flags),
        "false_alarms": (~positive, ~flags),
    }[kind]
    wanted = 1 - level if kind == "false_alarms" else level
    order = rng.permutation(len(codes))
    one = order[np.unique(codes[order], return_index=True)[1]]  # of each source
    count, right = int(of[one].sum()), int((of & good)[one].sum())
    broken = binom.cdf(right, count, wanted) < 0.05
    # Of an answer of a new source, which any of its answers may be.
    weight = 1 / np.bincount(codes)[codes]
    share = _share(good, of, weight)
    realised = 1 - share if kind == "false_alarms" else share
    # Nothing flagged, nothing wrong; what is rounded off is none.
    holds = np.isnan(share) or share >= wanted - 1e-9
    flagged = float(np.average(flags, weights=weight))
    return float(holds), float(broken), realised, flagged


def _share(good: Mask, of: Mask, weight: Float[np.ndarray, " rows"]) -> float:
    return float(np.average(good[of], weights=weight[of])) if of.any() else np.nan
