r"""Thresholds that keep a promise on answers to come, of sources never seen.

A threshold chosen where some answers look best promises nothing on others.  These leave
room for the luck of the sample: with the stated ``confidence`` over the answers they
are chosen on, the promise holds on all others like them (Angelopoulos et al., `Learn
then Test <https://arxiv.org/abs/2110.01052>`_, 2021).  Thresholds are tested from the
most careful one on, each by the exact binomial tail, until the first that fails.
Without a confidence the promise holds in expectation only (`conformal risk control
<https://arxiv.org/abs/2208.02814>`_, 2022), and a few answers go further.

Answers to one source are not independent.  With ``groups`` a promise is about an answer
drawn from a new source: p-values come from one answer of each source, twice the median
over draws of it (Rüger, 1978).
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, Num

from jaxhal.evaluation.calibration import thresholds
from jaxhal.evaluation.checks import (
    Groups,
    Mask,
    Numbers,
    Rows,
    group_codes,
    two_classes,
)
from jaxhal.io.showing import shown

KINDS = ("precision", "recall", "false_alarms")
#: Scores that highlights are tried from, careful ones first.
STEPS = np.linspace(1, 0, 201)
_DRAWS = 25


class NoThreshold(ValueError):
    """Of a promise that no known threshold keeps."""


@dataclasses.dataclass(frozen=True)
class Guarantee:
    """A threshold and what it promises.

    Attributes:
      kind: ``"precision"``, the share of flagged answers that are hallucinated,
        ``"recall"``, the share of hallucinated answers that are flagged, are at least
        ``level``; ``"false_alarms"``, the share of grounded answers that are flagged,
        or ``"highlighted"``, of their characters, is at most ``level``.
      confidence: ``None`` for a promise that holds in expectation.
      threshold: flags scores at or above it.
      sources: the number of independent answers that it was chosen on, of both classes.
    """

    kind: str
    level: float
    confidence: float | None
    threshold: float
    sources: int

    def __str__(self) -> str:
        bound = "at least" if self.kind in ("precision", "recall") else "at most"
        sure = "on average"
        if self.confidence is not None:
            sure = f"with {_percent(self.confidence)} confidence"
        what = self.kind.replace("_", " ")
        return f"{what} {bound} {_percent(self.level)} {sure} ({self.sources} sources)"


def _percent(share: float) -> str:
    """As it was given: a promise that is rounded is another one."""
    return f"{100 * share:.10g}%"


def guarantee(
    scores: Rows,
    labels: Rows,
    promise: Mapping[str, float],
    groups: Groups = None,
    *,
    confidence: float | None = 0.9,
) -> Guarantee:
    """The threshold that flags most (for recall: least) and keeps one promise.

    Raises :class:`NoThreshold` when no threshold does, ValueError on a promise that is
    none.

    Args:
      promise: ``{"precision": 0.9}``, ``{"recall": 0.9}`` or ``{"false_alarms":
        0.05}``.
      confidence: ``None`` for one in expectation, which precision cannot have.

    >>> scores, labels = range(100), [0] * 50 + [1] * 50
    >>> print(guarantee(scores, labels, {"recall": 0.9}))
    recall at least 90% with 90% confidence (100 sources)
    >>> guarantee(scores, labels, {"recall": 0.9}).threshold
    50.5
    """
    kept = partial(guaranteed, scores, labels, groups=groups, confidence=confidence)
    if made := kept(promise=promise):
        return made
    ((kind, level),) = promise.items()
    shares = [n / 20 for n in range(1, 20)]
    if kind == "false_alarms":
        weaker = [share for share in shares if share > level]
    else:
        weaker = [share for share in reversed(shares) if share < level]
    could = next((share for share in weaker if kept(promise={kind: share})), None)
    most = "a larger share" if kind == "false_alarms" else "less"
    less = most if could is None else f"{could:g}, which one keeps"
    sources = group_codes(groups, len(scores)).max() + 1
    raise NoThreshold(
        f"no known threshold keeps {kind} {level} on {len(scores)} answers of "
        f"{sources} sources; promise {less}, or give more labelled answers"
    )


def guaranteed(
    scores: Rows,
    labels: Rows,
    promise: Mapping[str, float],
    groups: Groups = None,
    *,
    confidence: float | None = 0.9,
) -> Guarantee | None:
    """What :func:`guarantee` returns; ``None`` where no threshold keeps the promise."""
    kind, level = check_promise(promise, confidence)
    score, positive = two_classes(scores, labels)
    codes = group_codes(groups, len(score))
    steps = thresholds(np.unique(score))
    if kind != "recall":
        steps = steps[::-1]  # careful ones first
    given = kind, steps, score, positive, codes, level
    if confidence is None:
        count = _passed(_in_expectation(*given))
    else:
        count = _passed(_tested(*given, 1 - confidence))
    if not count:
        return None
    best = float(steps[count - 1])
    return Guarantee(kind, level, confidence, best, int(codes.max()) + 1)


def highlighted(
    token_scores: Sequence[Collection[Any]],
    token_labels: Sequence[Collection[Any]],
    lengths: Sequence[Collection[Any]],
) -> Float[np.ndarray, "answers steps"]:
    """Per answer, which share of its supported characters :data:`STEPS` highlight.

    Highlighted are tokens of at least that score.  Not a number where no character is
    supported.

    Args:
      token_scores: per answer, a number per token, up to 1; below 0 for what is never
        highlighted.
      token_labels: per answer, 1 for each token of an annotated span, 0 otherwise.
      lengths: per answer, the characters of each token.
    """
    found = np.full((len(token_scores), len(STEPS)), np.nan)
    for row, some in enumerate(zip(token_scores, token_labels, lengths, strict=True)):
        score, label, length = (np.asarray(each, float) for each in some)
        if not score.shape == label.shape == length.shape:
            raise ValueError(
                f"an answer has {score.size} scores, {label.size} labels and "
                f"{length.size} lengths; give one of each a token"
            )
        if not (np.isfinite(score).all() and np.isin(label, (0, 1)).all()):
            raise ValueError(
                f"answer {row} has a score that is not finite or a label that is not 0 "
                "or 1; give a number and a label of each token"
            )
        supported = np.where(label == 0, length, 0.0)
        if supported.sum() > 0:
            found[row] = supported @ (score[:, None] >= STEPS) / supported.sum()
    return found


def guaranteed_highlights(
    shares: Float[np.ndarray, "answers steps"],
    level: float,
    groups: Groups = None,
    *,
    confidence: float | None = 0.9,
) -> Guarantee:
    """The token score from which on supported characters are seldom highlighted.

    The promise: of the supported characters of an answer, the share that lies in
    highlighted tokens is at most ``level`` in the mean over answers.  Answers without
    a supported character say nothing.

    Args:
      shares: of :func:`highlighted`.
      level: above 0, below 1.
    """
    _check("highlighted", level, confidence)
    mean = highlighted_means(shares, group_codes(groups, len(shares)))
    if confidence is None:
        kept = _conformal(mean.sum(0), len(mean), level)
    else:
        kept = np.array([bounded(each, level) for each in mean.T]) <= 1 - confidence
    if not (passed := _passed(kept)):
        raise NoThreshold(
            f"no known threshold keeps the share of highlighted characters at {level} "
            f"on {len(mean)} sources; allow a larger share, or give more answers"
        )
    found = float(STEPS[passed - 1])
    return Guarantee("highlighted", level, confidence, found, len(mean))


def check_promise(
    promise: Any, confidence: float | None = 0.9, kinds: Sequence[str] = KINDS
) -> tuple[str, float]:
    """Its kind and level; ValueError where it is none."""
    known = isinstance(promise, Mapping) and set(promise) <= set(kinds)
    if not known or len(promise) != 1:
        raise ValueError(
            f"promise is {shown(promise)}; give one of {', '.join(kinds)}, such as "
            '{"precision": 0.9}'
        )
    ((kind, level),) = promise.items()
    _check(kind, level, confidence)
    if confidence is None and kind == "precision":
        raise ValueError("precision cannot be promised on average; give a confidence")
    return kind, level


def _check(kind: str, level: Any, confidence: float | None) -> None:
    if not isinstance(level, int | float) or not 0 < level < 1:
        raise ValueError(
            f"{kind} is {shown(level)}; promise a share above 0 and below 1"
        )
    if confidence is not None and not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; give one above 0 and below 1")


_Steps = Float[np.ndarray, " steps"]
_Kept = Bool[np.ndarray, " steps"]
_Codes = Int[np.ndarray, " rows"]
_Losses = Num[np.ndarray, "rows steps"]


def _passed(kept: _Kept) -> int:
    """How many thresholds passed before the first that failed."""
    return int(np.argmin(np.append(kept, False)))


def _counts(
    kind: str, steps: _Steps, score: Numbers, positive: Mask
) -> tuple[np.ndarray, np.ndarray]:
    """How many rows count at each threshold, and how many of them are bad."""
    true, false = np.sort(score[positive]), np.sort(score[~positive])
    hits = len(true) - np.searchsorted(true, steps)
    alarms = len(false) - np.searchsorted(false, steps)
    if kind == "precision":
        return hits + alarms, alarms
    if kind == "recall":
        return np.full_like(hits, len(true)), len(true) - hits
    return np.full_like(alarms, len(false)), alarms


def _tested(
    kind: str,
    steps: _Steps,
    score: Numbers,
    positive: Mask,
    codes: _Codes,
    level: float,
    risk: float,
) -> _Kept:
    """Which thresholds pass; the few too careful to be tested count as passed."""
    from scipy.stats import binom

    allowed = level if kind == "false_alarms" else 1 - level
    sources = int(codes.max()) + 1
    alone = sources == len(score)
    rng = np.random.default_rng(0)
    values, sizes = [], []
    for _ in range(1 if alone else _DRAWS):
        order = rng.permutation(len(score))
        rows = order[np.unique(codes[order], return_index=True)[1]]
        count, bad = _counts(kind, steps, score[rows], positive[rows])
        values.append(binom.cdf(bad, count, allowed))
        sizes.append(count)
    value = values[0] if alone else np.minimum(1, 2 * np.median(values, axis=0))
    kept = value <= risk
    if kind == "precision":
        # So few flagged that one mistake among them ends the search say too little.
        fewest = _fewest(level, risk, alone)
        untested = int(np.sum(np.median(sizes, axis=0) < fewest))
        # Those are the first; without the one after them nothing is promised.
        kept[:untested] = untested < len(kept) and kept[untested]
    return kept


def _fewest(level: float, risk: float, alone: bool) -> float:
    return 2 * math.log(risk / (1 if alone else 2)) / math.log(level)


def says_enough(flagged: Mask, groups: Groups, level: float, confidence: float) -> bool:
    """Whether so many answers are flagged that a promise of precision was tested.

    Of answers to one source one counts.
    """
    codes = group_codes(groups, len(flagged))
    sizes = np.bincount(codes)
    alone = len(sizes) == len(codes)
    expected = float(np.sum(flagged / sizes[codes]))
    return expected >= _fewest(level, 1 - confidence, alone)


def _in_expectation(
    kind: str,
    steps: _Steps,
    score: Numbers,
    positive: Mask,
    codes: _Codes,
    level: float,
) -> _Kept:
    recall = kind == "recall"
    rows = np.flatnonzero(positive == recall)
    order = rows[np.argsort(score[rows])]
    # What rows below the first, the second and so on weigh, a source 1 in all.  Each
    # loses the weight of its bad rows less the level times that of those that could
    # be: the mean is to be 0 at most.
    below = np.append(0.0, np.cumsum(1 / np.bincount(codes)[codes[order]]))
    whole, below = below[-1], below[np.searchsorted(score[order], steps)]
    bad = below if recall else whole - below
    return _conformal(bad, whole, 1 - level if recall else level)


def highlighted_means(
    shares: _Losses, codes: _Codes
) -> Float[np.ndarray, "sources steps"]:
    """The mean over each source's answers that have a supported character."""
    known = ~np.isnan(shares[:, 0])
    if not known.any():
        raise NoThreshold("no answer has a supported character; give some that have")
    return _source_means(shares[known], codes[known])


def _source_means(
    losses: _Losses, sources: _Codes
) -> Float[np.ndarray, "sources steps"]:
    _, at = np.unique(sources, return_inverse=True)
    total = np.zeros((at.max() + 1, losses.shape[1]))
    np.add.at(total, at, losses)
    return total / np.bincount(at)[:, None]


def _conformal(
    losses: Float[np.ndarray, " steps"], count: int | float, level: float
) -> _Kept:
    """Where the mean loss, with one more source of loss 1, is at most the level.

    ``losses`` are those of so many sources together; what is rounded off is none.
    """
    return losses + 1 <= level * (count + 1) + 1e-9


def bounded(losses: Numbers, level: float) -> float:
    """p-value of a mean of at least ``level``, of losses in [0, 1].

    One over the wealth of bets against it, evenly spread over their sizes
    (Waudby-Smith and Ramdas, 2024).
    """
    bets = np.linspace(0, 1 / (1 - level), 66)[1:-1]
    wealth = np.log1p(-np.outer(bets, losses - level)).sum(1)
    with np.errstate(under="ignore"):
        most = wealth.max()
        mean = most + math.log(np.exp(wealth - most).mean())
    return math.exp(min(0.0, -mean))
