"""Which layer, and how strong a penalty: chosen inside the training part."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxhal.classifiers.linear import (
    Linear,
    fit_grid,
    fit_linear,
    grid_logits,
    linear_logits,
)
from jaxhal.evaluation.splits import grouped_kfold

# Inverse penalties C to choose from; probes of hundreds of features want strong ones.
STRENGTHS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 1.0)
FOLDS = 5


class Chosen(NamedTuple):
    """A linear probe and how it was chosen.

    Attributes:
      linear: the probe, fitted to the whole training part.
      layer: which layer it looks at.
      strength: its inverse penalty C.
      auroc: the mean AUROC of that choice on the folds left out; 0 where there was
        nothing to choose.
    """

    linear: Linear
    layer: Int[Any, ""]
    strength: Float[Any, ""]
    auroc: Float[Any, ""]


def choose_linear(
    x: Float[Any, "samples layers size"],
    labels: Int[Any, " samples"],
    groups: Int[Any, " samples"],
    weight: Float[Any, " samples"],
    strengths: Sequence[float] = STRENGTHS,
    folds: int = FOLDS,
    standardize: bool = True,
) -> Chosen:
    """Fits layers x folds x strengths at once, then the best pair to everything.

    The best has the highest mean AUROC over grouped folds; among equals the lower layer
    and the stronger penalty.

    Args:
      x: one vector a layer and answer.
      labels: 1 hallucinated, 0 grounded.
      groups: the source of each answer; a fold never splits one.
      weight: 1 for the answers to learn from, 0 for those to leave out.
      strengths: inverse penalties C, as in scikit-learn.
      folds: how many.
      standardize: scale features by their training deviation.

    Raises:
      ValueError: when the folds cannot hold both classes.
    """
    labels, weight = np.asarray(labels), np.asarray(weight, np.float32)
    rows = np.flatnonzero(weight > 0)
    sources = np.asarray(groups)[rows].tolist()
    train = np.tile(weight, (folds, 1))
    for fold, (_, test) in enumerate(grouped_kfold(labels[rows], sources, folds)):
        train[fold, rows[test]] = 0.0
    x, y = jnp.asarray(x), jnp.asarray(labels)
    layers = jnp.swapaxes(x, 0, 1)
    c = jnp.asarray(sorted(strengths), jnp.float32)
    grid = fit_grid(layers, y, jnp.asarray(train), c, standardize=standardize)
    found = _held_out_auroc(grid_logits(grid, layers), y, weight - train).mean(1)
    layer, strength = np.unravel_index(int(jnp.argmax(found)), found.shape)
    linear = fit_linear(
        layers[layer], y, weight, float(c[strength]), standardize=standardize
    )
    return Chosen(
        linear, jnp.asarray(layer, jnp.int32), c[strength], found[layer, strength]
    )


def chosen_logits(
    chosen: Chosen, x: Float[Any, "samples layers size"]
) -> Float[Array, " samples"]:
    """Log odds of a hallucination, from the chosen layer."""
    layer = jnp.take(jnp.asarray(x), chosen.layer, axis=1)
    return linear_logits(chosen.linear, layer)


@jax.jit
def _held_out_auroc(
    logits: Float[Array, "layers folds strengths samples"],
    labels: Int[Array, " samples"],
    test: Float[Array, "folds samples"],
) -> Float[Array, "layers folds strengths"]:
    """AUROC of every fit on the rows it did not see; a tie counts one half."""

    def one(logits, test):
        order = jnp.argsort(logits)
        score, weight = logits[order], test[order]
        high, low = weight * labels[order], weight * (1 - labels[order])
        below = jnp.cumsum(low) - low
        left = jnp.searchsorted(score, score, side="left")
        right = jnp.searchsorted(score, score, side="right") - 1
        tied = below[right] + low[right] - below[left]
        return (high * (below[left] + tied / 2)).sum() / (high.sum() * low.sum())

    over_strengths = jax.vmap(one, in_axes=(0, None))
    return jax.vmap(jax.vmap(over_strengths), in_axes=(0, None))(logits, test)
