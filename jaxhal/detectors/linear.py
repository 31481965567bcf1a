"""Logistic regression on a vector an answer, or on one of several layers'."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxhal.classifiers import selection
from jaxhal.classifiers.data import balanced
from jaxhal.detectors.base import (
    LOG_ODDS,
    Detector,
    Features,
    HeldOut,
    Info,
    Targets,
)
from jaxhal.evaluation.splits import holdout
from jaxhal.features.base import Feature


def _linear(inputs: Float[Array, "samples *layers size"]) -> Float[Array, "..."]:
    """The inputs with an axis of layers: one, unless they have it."""
    return inputs if inputs.ndim == 3 else inputs[:, None]


def fit_logistic(inputs: Any, targets: Targets) -> HeldOut:
    """Layer and penalty by grouped folds inside the training part, then all of it."""
    params, unseen = selection.choose_held_out(
        _linear(jnp.asarray(inputs)), targets.labels, targets.groups, targets.weight
    )
    return HeldOut(params, unseen)


def logistic_scores(params: selection.Chosen, inputs: Array) -> Array:
    """Log odds of what :func:`fit_logistic` fitted.

    Raises:
      ValueError: when it was fitted to another number of features.
    """
    fitted, given = params.linear.w.shape[-1], inputs.shape[-1]
    if fitted != given:
        raise ValueError(
            f"the classifier was fitted to {fitted} features (of lookback ratios, one "
            f"a head) and is given {given}; read with the model it was fitted to"
        )
    return selection.chosen_logits(params, _linear(inputs))


def logistic(
    name: str,
    summary: str,
    reference: str,
    inputs: Callable[[Features], Any],
    *features: tuple[str, Feature],
) -> Detector:
    """A detector that is a logistic regression on ``inputs``."""
    return Detector(
        Info(name, summary, LOG_ODDS, reference),
        features=features,
        inputs=inputs,
        decide=logistic_scores,
        fit=fit_logistic,
    )


def split_rows(targets: Targets, share: float) -> tuple[np.ndarray, np.ndarray]:
    """The rows to learn from in two parts, whole sources, the second with ``share``."""
    rows = targets.rows
    labels, groups = np.asarray(targets.labels)[rows], np.asarray(targets.groups)[rows]
    rest, part = holdout(labels, groups.tolist(), share)
    return rows[rest], rows[part]


def early_parts(targets: Targets) -> tuple[Array, Array]:
    """Weights of the rows to train on and of the fifth to stop by, classes even."""
    train, stop = (targets.only(rows).weight for rows in split_rows(targets, 0.2))
    return balanced(targets.labels, train), balanced(targets.labels, stop)
