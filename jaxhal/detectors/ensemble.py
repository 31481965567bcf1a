"""Several detectors as one: a logistic regression over their scores."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxhal.classifiers.selection import FOLDS, Chosen, choose_linear, chosen_logits
from jaxhal.detectors.core import LOG_ODDS, Detector, Features, Targets
from jaxhal.evaluation.splits import grouped_kfold


class Stack(NamedTuple):
    """Members fitted to the whole training part, and how they are weighed."""

    members: dict[str, Any]
    weights: Chosen


def ensemble(members: Sequence[Detector], name: str = "ensemble") -> Detector:
    """A logistic regression over the standardised scores of other detectors.

    It is fitted to scores of answers that a trained member had not seen, by grouped
    folds inside the training part.  One pass of the model feeds all members.

    Args:
      members: any detectors.
      name: what to call it.

    Raises:
      ValueError: on fewer than two members, or two of one name.
    """
    members = tuple(members)
    names = [member.name for member in members]
    if len(names) < 2 or len(set(names)) < len(names):
        raise ValueError(
            f"members are {names}; give at least two detectors of different names"
        )

    def inputs(features: Features) -> dict[str, Any]:
        return {member.name: member.inputs(features) for member in members}

    def decide(params: Stack, inputs: dict[str, Any]) -> Any:
        each = [m.decide(params.members[m.name], inputs[m.name]) for m in members]
        return chosen_logits(params.weights, jnp.stack(each, 1)[:, None])

    def fit(inputs: dict[str, Any], targets: Targets) -> Stack:
        unseen = {m.name: out_of_fold(m, inputs[m.name], targets) for m in members}
        fitted = {m.name: fit_all(m, inputs[m.name], targets) for m in members}
        return Stack(fitted, weigh([unseen[name] for name in names], targets))

    return Detector(
        name=name,
        summary=f"logistic regression over the scores of {', '.join(names)}",
        unit=LOG_ODDS,
        reference="Wolpert 1992, stacked generalization",
        reads=_merged(member.reads for member in members),
        closed_book=_merged(member.closed_book for member in members),
        text=_merged(member.text for member in members),
        inputs=inputs,
        decide=decide,
        fit=fit,
        members=members,
    )


def weigh(unseen: Sequence[Float[Any, " samples"]], targets: Targets) -> Chosen:
    """The logistic regression over scores of answers that the members had not seen."""
    x = np.stack(unseen, 1)[:, None]
    return choose_linear(x, targets.labels, targets.groups, targets.weight)


def fit_all(detector: Detector, inputs: Any, targets: Targets) -> Any:
    """Parameters from every row to learn from; ``()`` for a method without any."""
    return () if detector.fit is None else detector.fit(inputs, targets)


def folds_of(targets: Targets, seed: int) -> Iterator[tuple[Targets, np.ndarray]]:
    """The rows to learn from in folds: targets without one, and that one's rows.

    Raises:
      ValueError: when the folds cannot hold both classes.
    """
    rows = targets.rows
    labels, groups = np.asarray(targets.labels)[rows], np.asarray(targets.groups)[rows]
    for train, test in grouped_kfold(labels, groups.tolist(), FOLDS, seed):
        yield targets.only(rows[train]), rows[test]


def out_of_fold(
    detector: Detector, inputs: Any, targets: Targets
) -> Float[np.ndarray, " samples"]:
    """A score of each row to learn from, by a fit that had not seen its source.

    Other rows get what the first fold's fit says.

    Raises:
      ValueError: when the folds cannot hold both classes.
    """
    inputs = jax.device_put(inputs)
    if detector.fit is None:
        return np.asarray(detector.decide((), inputs))
    out = None
    for seen, test in folds_of(targets, seed=1):
        score = np.array(detector.decide(detector.fit(inputs, seen), inputs))
        out = score if out is None else out
        out[test] = score[test]
    assert out is not None
    return out


def take(inputs: Any, rows: Any) -> Any:
    """Some rows of every leaf."""
    return jax.tree.map(lambda leaf: leaf[rows], inputs)


def _merged(parts: Iterable[tuple]) -> tuple:
    return tuple(dict.fromkeys(pair for part in parts for pair in part))
