"""How often promises of thresholds are kept, on splits of labelled answers."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jaxhal.evaluation.checks import Groups, Mask, Rows, group_codes, two_classes
from jaxhal.evaluation.guarantees import NoThreshold, guarantee
from jaxhal.io.checks import at_least


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

    Halves keep sources whole.  The half that is looked at is a sample as well, so a
    promise that is just kept is missed there about every other time: ``broken`` counts
    splits where chance alone would miss it by so much in less than 5 % (by the binomial
    tail over one answer of each source).

    Args:
      promise, confidence: as :func:`jaxhal.evaluation.guarantee` takes them.
      elsewhere: look at these instead of the other half: other answers than the
        threshold was chosen on.
      splits: how many random halves.

    Returns:
      ``splits``, ``made`` (the share of them where a threshold could promise that), and
      of those ``kept`` and ``broken`` (shares), ``realised`` (the mean of what was
      promised) and ``flagged`` (the mean share of answers); ``None`` where none was
      made, and where nothing was flagged that a precision could be of.
    """
    at_least(1, splits=splits)
    score, positive = two_classes(answers.scores, answers.labels)
    codes = group_codes(answers.groups, len(score))
    other = score, positive, codes
    if elsewhere is not None:
        other = *two_classes(elsewhere.scores, elsewhere.labels), None
        other = *other[:2], group_codes(elsewhere.groups, len(other[0]))
    ((kind, level),) = promise.items()
    rng, sources = np.random.default_rng(seed), int(codes.max()) + 1
    found = []
    for _ in range(splits):
        chosen = np.isin(codes, rng.permutation(sources)[: sources // 2])
        rest = np.ones(len(other[0]), bool) if elsewhere is not None else ~chosen
        half = score[chosen], positive[chosen], promise, codes[chosen]
        if len(set(half[1].tolist())) < 2:
            continue
        try:
            made = guarantee(*half, confidence=confidence)
        except NoThreshold:  # nothing is promised, which is no promise broken
            continue
        found.append(
            _looked_at(
                kind,
                level,
                other[0][rest] >= made.threshold,
                other[1][rest],
                other[2][rest],
                rng,
            )
        )
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
) -> tuple[float, float, float, float]:
    """Kept, broken beyond chance, the realised share, and the share flagged."""
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
    share = _share(good, of)
    realised = 1 - share if kind == "false_alarms" else share
    holds = np.isnan(share) or share >= wanted  # nothing flagged, nothing wrong
    return float(holds), float(broken), realised, float(flags.mean())


def _share(good: Mask, of: Mask) -> float:
    return float(good[of].mean()) if of.any() else float("nan")
