"""Probes with one hidden layer, for signals that no hyperplane separates."""

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from jaxhal.classifiers.data import Values, check, moments, weighted_rows
from jaxhal.classifiers.train import fit_probe

_HIDDEN = 128

# Penalties to choose from, strongest first, for scikit-learn's network.
GRID = {"alpha": (1.0, 1e-2, 1e-4)}
_SEED = 42  # of LRP4RAG's released code


class MLP(NamedTuple):
    """``relu(((x - mean) / std) @ w_in + b_in) @ w_out + b_out``; a pytree."""

    w_in: Float[Array, "width hidden"]
    b_in: Float[Array, " hidden"]
    w_out: Float[Array, " hidden"]
    b_out: Float[Array, ""]
    mean: Float[Array, " width"]
    std: Float[Array, " width"]


def fit_mlp(
    key: PRNGKeyArray, x: Any, y: Any, weight: Any, validation_weight: Any
) -> MLP:
    """128 rectified units, by AdamW with early stopping.

    Args:
      key: draws the starting weights.
      x: ``[rows, width]`` features, standardised by the training rows.
      y: ``[rows]``, 1 for hallucinated and 0 for grounded.
      weight, validation_weight: ``[rows]``, 0 off the rows to train on and to stop by,
        which should share no source.
    """
    parts = {"weight": weight, "validation_weight": validation_weight}
    x, y, (weight, validation_weight) = check(x, y, **parts)
    if x.ndim != 2:
        raise ValueError(f"features have shape {x.shape}; pass [rows, width]")
    return _fit(key, x, y, weight, validation_weight)


@jax.jit
def _fit(key, x, y, weight, validation_weight) -> MLP:
    mean, std = moments(x, weight)
    x = (x - mean) / std
    key_in, key_out = jax.random.split(key)
    start = (
        jax.random.normal(key_in, (x.shape[1], _HIDDEN)) * jnp.sqrt(2 / x.shape[1]),
        jnp.zeros(_HIDDEN),
        jax.random.normal(key_out, (_HIDDEN,)) / jnp.sqrt(_HIDDEN),
        jnp.zeros(()),
    )

    def logits(layers):
        return _logits(layers, x)

    with jax.default_matmul_precision("highest"):
        layers = fit_probe(logits, start, y, weight, validation_weight)
    return MLP(*layers, mean=mean, std=std)


def _logits(layers: tuple[Array, ...], x: Array) -> Float[Array, "*rows"]:
    w_in, b_in, w_out, b_out = layers
    return jax.nn.relu(x @ w_in + b_in) @ w_out + b_out


def mlp_logits(params: MLP, x: Float[Values, "*rows width"]) -> Float[Array, "*rows"]:
    """Logits of the probe; higher = more likely hallucinated."""
    with jax.default_matmul_precision("highest"):
        return _logits(params[:4], jnp.asarray((x - params.mean) / params.std))


def fit_perceptron(
    x: Any, labels: Any, weight: Any, alpha: float = 1e-4, *, standardize: bool = False
) -> MLP:
    """scikit-learn's ``MLPClassifier`` with 100 rectified units, 200 epochs of Adam.

    The penalty ``alpha`` and the seed are those of LRP4RAG's released code, which does
    not standardise.  Arrays of an :class:`MLP` come back, so nothing is pickled.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPClassifier

    if not 0 <= alpha < np.inf:
        raise ValueError(f"alpha is {alpha}; give 0 or more")
    rows = weighted_rows(x, labels, weight, standardize)
    network = MLPClassifier((100,), alpha=alpha, max_iter=200, random_state=_SEED)
    with warnings.catch_warnings():
        # So many epochs are what was published, converged or not.
        warnings.simplefilter("ignore", ConvergenceWarning)
        rows.fit(network)
    (w_in, w_out), (b_in, b_out) = network.coefs_, network.intercepts_
    leaves = (w_in, b_in, w_out[:, 0], b_out[0], rows.mean, rows.std)
    return MLP(*(jnp.asarray(leaf, jnp.float32) for leaf in leaves))
