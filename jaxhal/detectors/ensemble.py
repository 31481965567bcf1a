"""Several detectors as one: a logistic regression over their scores."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from jaxhal.classifiers.selection import (
    FOLDS,
    Aurocs,
    Chosen,
    choose_linear,
    chosen_logits,
    linear_aurocs,
)
from jaxhal.detectors import base

# What a member has to add to the AUROC to be chosen.
GAIN = 0.001


class Stack(NamedTuple):
    """Members fitted to the whole training part, and how they are weighed."""

    members: dict[str, Any]  # by name, those that count
    weights: Chosen  # of their scores, in the order in which the detector lists them


@base.factory
def ensemble(
    members: Iterable[base.Detector], *, choose: bool = False
) -> base.Detector:
    """A logistic regression over the standardised scores of other detectors.

    It is fitted to scores of answers that a trained member had not seen, by grouped
    folds inside the training part.  One pass of the model feeds all members.

    Args:
      members: any detectors, two at least.
      choose: keep few of them: first the one of the highest AUROC on those scores, then
        again and again the one that adds most to it, while that is 0.001 or more.
    """
    members = tuple(members)
    names = [member.name for member in members]
    if len(names) < 2 or len(set(names)) < len(names):
        raise ValueError(
            f"members are {names}; give at least two detectors of different names"
        )

    def inputs(features: base.Features) -> dict[str, Any]:
        return {member.name: member.inputs(features) for member in members}

    def decide(params: Stack, inputs: dict[str, Any]) -> Any:
        each = [
            m.decide(params.members[m.name], inputs[m.name])
            for m in members
            if m.name in params.members
        ]
        return chosen_logits(params.weights, jnp.stack(each, 1)[:, None])

    kept = "those chosen of " if choose else ""
    features = (one for member in members for one in member.features)
    return base.Detector(
        "ensemble",
        f"logistic regression over the scores of {kept}{', '.join(names)}",
        base.LOG_ODDS,
        "Wolpert 1992, stacked generalization"
        + ("; Caruana et al. 2004, forward selection" if choose else ""),
        features=tuple(dict.fromkeys(features)),
        inputs=inputs,
        decide=decide,
        fit=functools.partial(_stack, members, choose),
        members=members,
    )


def _stack(
    members: Sequence[base.Detector],
    choose: bool,
    inputs: dict[str, Any],
    targets: base.Targets,
) -> base.HeldOut:
    """Members that count with their weights, and unseen scores of the whole."""
    known = targets.known or {}
    fitted = {
        m.name: known.get(m.name) or base.held_out(m, inputs[m.name], targets)
        for m in members
    }
    names = list(fitted)
    scores = np.stack([one.unseen for one in fitted.values()], 1)
    about = targets.labels, targets.groups, targets.weight
    sets = [np.ones(len(names), bool)]
    if choose:
        tried: dict[bytes, Aurocs] = {}
        # Of all folds, and for the scores of each by the others.
        sets = [_forward(scores, about, tried, one) for one in (None, *range(FOLDS))]
    kept = np.flatnonzero(sets[0])
    weights, unseen = choose_linear(scores[:, None, kept], *about)
    if any((one != sets[0]).any() for one in sets):
        of_each = scores[:, None] * np.array(sets)
        _, unseen = choose_linear(of_each, *about, given=(0, range(1, FOLDS + 1)))
    params = Stack({names[at]: fitted[names[at]].params for at in kept}, weights)
    return base.HeldOut(params, unseen)


def _forward(
    scores: Float[np.ndarray, "samples members"],
    about: Sequence[Any],
    tried: dict[bytes, Aurocs],
    without: int | None,
) -> Bool[np.ndarray, " members"]:
    """Members that the ensemble gains by, found one by one, ``without`` a fold.

    ``tried`` has what was found of members tried before.
    """
    kept, best = np.zeros(scores.shape[1], bool), 0.0
    while True:
        # The members so far and each of the others, one set a layer to choose from.
        # Scores of 0 weigh nothing, and with them every step has one shape.
        sets, name = kept | np.eye(len(kept), dtype=bool), kept.tobytes()
        if name not in tried:
            tried[name] = linear_aurocs(scores[:, None] * sets, *about)
        found = tried[name].whole
        if without is not None:
            found = np.delete(tried[name].inner[:, :, without], without, axis=2)
        each = found.mean(2).max(1)  # at the best strength
        if each.max() < best + GAIN:
            return kept
        kept, best = sets[each.argmax()], each.max()
