"""One training loop: full-batch Optax steps that keep the best parameters so far."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

Loss = Callable[[Any], Float[Array, ""]]


class Schedule(NamedTuple):
    """How AdamW runs; hashable, so it can be static."""

    learning_rate: float = 1e-3
    weight_decay: float = 1e-2
    steps: int = 500  # at most, each over all rows
    patience: int = 50  # steps without a lower validation loss before stopping


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
    validation_loss: Loss | None = None,
    patience: int = 50,
) -> Any:
    """Parameters of the least validation loss, or the last where there is none.

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
    for name, value in (("steps", steps), ("patience", patience)):
        if value < 1:
            raise ValueError(f"{name} is {value}; give at least 1")
    gradient = jax.grad(loss)

    def advance(state: _State) -> _State:
        updates, inner = optimizer.update(
            gradient(state.params), state.optimizer, state.params
        )
        params = optax.apply_updates(state.params, updates)
        if validation_loss is None:
            none = state.best_loss
            return _State(state.step + 1, state.stale, params, inner, params, none)
        value = validation_loss(params)
        better = value < state.best_loss
        keep = jax.tree.map(
            lambda new, old: jnp.where(better, new, old), params, state.best
        )
        stale = jnp.where(better, 0, state.stale + 1)
        lower = jnp.where(better, value, state.best_loss)
        return _State(state.step + 1, stale, params, inner, keep, lower)

    zero = jnp.zeros((), int)
    first = jnp.inf if validation_loss is None else validation_loss(params)
    first = jnp.nan_to_num(jnp.asarray(first, jnp.float32), nan=jnp.inf)
    start = _State(zero, zero, params, optimizer.init(params), params, first)
    end = jax.lax.while_loop(
        lambda state: (state.step < steps) & (state.stale < patience), advance, start
    )
    return end.best


def log_loss(
    logits: Float[Array, " rows"],
    y: Float[Array, " rows"],
    weight: Float[Array, " rows"],
) -> Float[Array, ""]:
    """Weighted mean of the binary cross-entropy, in nats a row."""
    return weight @ optax.sigmoid_binary_cross_entropy(logits, y) / weight.sum()


def fit_probe(
    logits: Callable[[Any], Float[Array, " rows"]],
    params: Any,
    y: Float[Array, " rows"],
    weight: Float[Array, " rows"],
    validation_weight: Float[Array, " rows"] | None,
    schedule: Schedule,
) -> Any:
    """AdamW on the weighted log loss, stopped early on the validation rows."""

    def over(rows: Float[Array, " rows"]) -> Loss:
        return lambda params: log_loss(logits(params), y, rows)

    return fit(
        over(weight),
        params,
        optax.adamw(schedule.learning_rate, weight_decay=schedule.weight_decay),
        schedule.steps,
        None if validation_weight is None else over(validation_weight),
        schedule.patience,
    )
