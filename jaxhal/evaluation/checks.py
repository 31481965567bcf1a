"""What every measure asks of its rows: numbers that pair up with labels and groups."""

from collections.abc import Callable, Collection, Hashable
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

# One number per answer, or per token; and the source of each.
Rows = Collection[Any]
Groups = Collection[Hashable] | None
Numbers = Float[np.ndarray, " rows"]
Mask = Bool[np.ndarray, " rows"]
# A metric of resamples, by how often each row counts in them.
OfDraws = Callable[[Int[np.ndarray, "draws rows"]], Float[np.ndarray, " draws"]]


def rows(scores: Rows, labels: Rows, name: str = "scores") -> tuple[Numbers, Mask]:
    """Scores as float64, ``name`` in errors, and the mask of hallucinated rows."""
    score, label = np.asarray(scores, float), np.asarray(labels)
    if score.ndim != 1 or score.shape != label.shape:
        raise ValueError(
            f"{name} of shape {score.shape} and labels of shape {label.shape} do not "
            "pair up; give two flat sequences of one length"
        )
    if not len(score):
        raise ValueError(f"{name} and labels are empty; give at least one row")
    if not np.isfinite(score).all():
        row = int(np.argmin(np.isfinite(score)))
        raise ValueError(f"{name}[{row}] is {score[row]}; every number must be finite")
    return score, mask(label)


def shares(probabilities: Rows, labels: Rows) -> tuple[Numbers, Mask]:
    """:func:`rows` of probabilities; ValueError on one outside [0, 1]."""
    probability, positive = rows(probabilities, labels, "probabilities")
    outside = (probability < 0) | (probability > 1)
    if outside.any():
        row = int(np.argmax(outside))
        raise ValueError(
            f"probabilities[{row}] is {probability[row]}, outside [0, 1]; calibrate "
            "the scores first, for instance with platt"
        )
    return probability, positive


def mask(labels: Rows) -> Mask:
    """True where the label is 1; ValueError on any but a flat row of 0 and 1."""
    label = np.asarray(labels)
    if label.ndim != 1:
        raise ValueError(f"labels are of shape {label.shape}; give a flat sequence")
    if not np.isin(label, (0, 1)).all():
        row = int(np.argmin(np.isin(label, (0, 1))))
        raise ValueError(f"labels[{row}] is {label[row]!r}; use 0 or 1")
    return label.astype(bool)


def two_kinds(labels: Rows) -> Mask:
    """:func:`mask` of both classes; ValueError when only one is present."""
    positive = mask(labels)
    if positive.all() or not positive.any():
        raise ValueError(
            f"all {len(positive)} labels are of one class; give at least one "
            "hallucinated and one grounded answer"
        )
    return positive


def two_classes(
    scores: Rows, labels: Rows, name: str = "scores"
) -> tuple[Numbers, Mask]:
    """:func:`rows` of both classes, as :func:`two_kinds` asks."""
    score, _ = rows(scores, labels, name)
    return score, two_kinds(labels)


def group_codes(groups: Groups, count: int) -> Int[np.ndarray, " rows"]:
    """Groups numbered by first appearance; each row is its own group without any."""
    if groups is None:
        return np.arange(count)
    if len(groups) != count:
        raise ValueError(f"got {len(groups)} groups for {count} rows; give one per row")
    codes: dict[Hashable, int] = {}
    return np.array([codes.setdefault(group, len(codes)) for group in groups], int)
