"""A probe with one hidden layer, for signals that no hyperplane separates."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from jaxhal.classifiers.data import Values, check, moments
from jaxhal.classifiers.train import Schedule, fit_probe

SCHEDULE = Schedule()


class MLP(NamedTuple):
    """``relu(((x - mean) / std) @ w_in + b_in) @ w_out + b_out``; a pytree."""

    w_in: Float[Array, "width hidden"]
    b_in: Float[Array, " hidden"]
    w_out: Float[Array, " hidden"]
    b_out: Float[Array, ""]
    mean: Float[Array, " width"]
    std: Float[Array, " width"]


def fit_mlp(
    key: PRNGKeyArray,
    x: Any,
    y: Any,
    weight: Any,
    validation_weight: Any = None,
    *,
    hidden: int = 128,
    schedule: Schedule = SCHEDULE,
) -> MLP:
    """A multilayer perceptron with ReLU, by AdamW with early stopping.

    Args:
      key: draws the starting weights.
      x: ``[rows, width]`` features, standardised by the training rows.
      y: ``[rows]``, 1 for hallucinated and 0 for grounded.
      weight: ``[rows]``, 0 off the training rows.
      validation_weight: ``[rows]``, 0 off the validation rows, which should share no
        source with the training rows; without it all steps are run.
      hidden: units of the hidden layer.
      schedule: of AdamW.

    Raises:
      ValueError: when shapes do not pair up, a value is not finite, a weight is
        negative, a class has no rows in a part, or ``hidden`` is below 1.

    Example:
      >>> x, y = [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]], [0, 1, 1, 0]
      >>> probe = fit_mlp(jax.random.key(0), x, y, [1, 1, 1, 1])
      >>> print((mlp_logits(probe, jnp.array(x)) > 0).astype(int))
      [0 1 1 0]
    """
    if hidden < 1:
        raise ValueError(f"hidden is {hidden}; give at least 1 unit")
    parts = {"weight": weight, "validation_weight": validation_weight}
    x, y, (weight, validation_weight) = check(x, y, **parts)
    if x.ndim != 2:
        raise ValueError(f"features have shape {x.shape}; pass [rows, width]")
    return _fit(key, x, y, weight, validation_weight, hidden, schedule)


@functools.partial(jax.jit, static_argnames=("hidden", "schedule"))
def _fit(
    key: PRNGKeyArray,
    x: Float[Array, "rows width"],
    y: Float[Array, " rows"],
    weight: Float[Array, " rows"],
    validation_weight: Float[Array, " rows"] | None,
    hidden: int,
    schedule: Schedule,
) -> MLP:
    mean, std = moments(x, weight)
    x = (x - mean) / std
    key_in, key_out = jax.random.split(key)
    start = (
        jax.random.normal(key_in, (x.shape[1], hidden)) * jnp.sqrt(2 / x.shape[1]),
        jnp.zeros(hidden),
        jax.random.normal(key_out, (hidden,)) / jnp.sqrt(hidden),
        jnp.zeros(()),
    )

    def logits(params: tuple[Array, Array, Array, Array]) -> Array:
        return _logits(params, x)

    with jax.default_matmul_precision("highest"):
        w_in, b_in, w_out, b_out = fit_probe(
            logits, start, y, weight, validation_weight, schedule
        )
    return MLP(w_in, b_in, w_out, b_out, mean, std)


def _logits(
    layers: tuple[Array, Array, Array, Array], x: Float[Array, "*rows width"]
) -> Float[Array, "*rows"]:
    w_in, b_in, w_out, b_out = layers
    return jax.nn.relu(x @ w_in + b_in) @ w_out + b_out


def mlp_logits(params: MLP, x: Float[Values, "*rows width"]) -> Float[Array, "*rows"]:
    """Logits of the probe; higher = more likely hallucinated.

    Example:
      >>> one, eye = jnp.ones(2), jnp.eye(2)
      >>> probe = MLP(eye, 0 * one, one, jnp.array(0.5), 0 * one, one)
      >>> mlp_logits(probe, jnp.array([3.0, -1.0]))
      Array(3.5, dtype=float32)
    """
    with jax.default_matmul_precision("highest"):
        return _logits(params[:4], jnp.asarray((x - params.mean) / params.std))
