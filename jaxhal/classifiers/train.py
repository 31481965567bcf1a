"""One training loop: full-batch Optax steps that keep the best parameters so far."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

# Of probes: steps at most, each over all rows, and without a lower validation loss.
STEPS, PATIENCE = 500, 50

Loss = Callable[[Any], Float[Array, ""]]


class _State(NamedTuple):
    step: Int[Array, ""]
    stale: Int[Array, ""]  # steps since the validation loss last fell
    params: Any
    optimizer: Any
    best: Any
    best_loss: Float[Array, ""]


def fit(
    loss: Loss,
    params: Any,
    optimizer: optax.GradientTransformation,
    steps: int,
    validation_loss: Loss,
    patience: int,
) -> Any:
    """Parameters of the least validation loss.

    Takes at most ``steps``; stops once ``patience`` of them in a row have not lowered
    the validation loss.  The starting point counts, and a loss that is NaN never does.
    Under ``vmap`` every fit stops by itself.

    Example:
      Training pulls towards 4, validation likes 1 best.

      >>> best = fit(lambda p: (p - 4) ** 2, jnp.array(0.0), optax.sgd(0.125), 20,
      ...            validation_loss=lambda p: (p - 1) ** 2, patience=3)
      >>> print(best)
      1.0
    """
    gradient = jax.grad(loss)

    def advance(state: _State) -> _State:
        updates, inner = optimizer.update(
            gradient(state.params), state.optimizer, state.params
        )
        params = optax.apply_updates(state.params, updates)
        value = validation_loss(params)
        better = value < state.best_loss
        keep = jax.tree.map(
            lambda new, old: jnp.where(better, new, old), params, state.best
        )
        stale = jnp.where(better, 0, state.stale + 1)
        lower = jnp.where(better, value, state.best_loss)
        return _State(state.step + 1, stale, params, inner, keep, lower)

    zero, first = jnp.zeros((), int), validation_loss(params)
    first = jnp.nan_to_num(jnp.asarray(first, jnp.float32), nan=jnp.inf)
    start = _State(zero, zero, params, optimizer.init(params), params, first)
    end = jax.lax.while_loop(
        lambda state: (state.step < steps) & (state.stale < patience), advance, start
    )
    return end.best


def fit_probe(
    logits: Callable[[Any], Float[Array, " rows"]],
    params: Any,
    y: Float[Array, " rows"],
    weight: Float[Array, " rows"],
    validation_weight: Float[Array, " rows"],
    learning_rate: float = 1e-3,
) -> Any:
    """AdamW on the weighted log loss, stopped early on the validation rows."""

    def over(rows: Float[Array, " rows"]) -> Loss:
        def loss(params: Any) -> Float[Array, ""]:
            each = optax.sigmoid_binary_cross_entropy(logits(params), y)
            return rows @ each / rows.sum()

        return loss

    adam = optax.adamw(learning_rate, weight_decay=1e-2)
    return fit(over(weight), params, adam, STEPS, over(validation_weight), PATIENCE)
