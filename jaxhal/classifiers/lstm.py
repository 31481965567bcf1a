"""A recurrent network on a series, such as the relevance of every response token."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxhal.classifiers.data import Values, balanced, check_series, moments
from jaxhal.classifiers.train import fit
from jaxhal.io.checks import at_least

_EPOCHS, _PATIENCE = 20, 5


class Cell(NamedTuple):
    """Arrays of a Flax ``OptimizedLSTMCell``, gates in the order i, f, g, o."""

    w_in: Float[Array, "features gates"]
    w_hidden: Float[Array, "hidden gates"]
    b: Float[Array, " gates"]


class LSTM(NamedTuple):
    """Layers by name in their order, and a linear probe on the last state; a pytree."""

    cells: dict[str, Cell]
    w: Float[Array, " hidden"]
    b: Float[Array, ""]
    mean: Float[Array, " features"]
    std: Float[Array, " features"]


# What is trained: all of an `LSTM` but the moments.
_Weights = tuple[dict[str, Cell], Float[Array, " hidden"], Float[Array, ""]]


def fit_lstm(
    key: PRNGKeyArray,
    series: Any,
    valid: Any,
    labels: Any,
    train: Any,
    stop: Any,
    *,
    hidden: int = 256,
    learning_rate: float = 5e-4,
    batch: int = 64,
) -> LSTM:
    """An LSTM of two layers by Adam on minibatches, with the classes balanced.

    Of 20 epochs, and the start, the parameters of the least loss on the rows of
    ``stop`` are kept; five epochs without a lower one end it.  One compiled program;
    under ``vmap`` over ``train`` and ``stop`` every fold stops by itself.

    Three things of the released code (Hu et al., `LRP4RAG
    <https://arxiv.org/abs/2408.15533>`_, 2024, sections 3.4 and 4.2) are mistakes and
    not repeated: it applies a softmax before a loss that applies one itself, it reports
    the best epoch on the very fold it is tested on, and it calls an answer hallucinated
    when its probability is above 0.2 *and* that of the other class not above 0.8.

    Args:
      key: draws the starting weights and the order of the rows.
      series: ``[samples, time, features]``; padding may hold anything.
      valid: ``[samples, time]``, False on padding, wherever it lies.
      labels: ``[samples]``, 1 for hallucinated and 0 for grounded.
      train, stop: ``[samples]``, 0 off the rows to train on and to stop by, which
        should share no source.
      learning_rate: of Adam; the released code has 1e-4, the paper the default.
    """
    at_least(1, hidden=hidden, batch=batch)
    rows = check_series(series, valid, labels, train, stop)
    return _fit(key, rows, learning_rate, hidden, min(batch, len(rows[2])))


@functools.partial(jax.jit, static_argnames=("hidden", "batch"))
def _fit(key, rows, learning_rate, hidden, batch) -> LSTM:
    series, valid, y, train, stop = rows
    mean, std = moments(series, train[:, None] * valid)
    train, stop = balanced(y, train), balanced(y, stop)
    key_start, key_order = jax.random.split(key)
    adam = optax.adam(learning_rate)

    def loss(params: _Weights, rows: Array, weight: Array) -> Array:
        logits = _logits(LSTM(*params, mean, std), series[rows], valid[rows])
        return weight @ optax.sigmoid_binary_cross_entropy(logits, y[rows])

    # The shared loop takes an epoch for one step of this optimizer.
    def init(params):
        return jnp.zeros((), int), adam.init(params)

    def epoch(updates, state, params=None):
        del updates  # it takes those of its minibatches
        number, inner = state
        order = jax.random.uniform(jax.random.fold_in(key_order, number), y.shape)
        rows, weight, count = _batches(order, train, batch)

        def step(at, carry):
            params, inner = carry
            share = weight[at] / weight[at].sum()
            updates, inner = adam.update(jax.grad(loss)(params, rows[at], share), inner)
            return optax.apply_updates(params, updates), inner

        end, inner = jax.lax.fori_loop(0, count, step, (params, inner))
        return jax.tree.map(jnp.subtract, end, params), (number + 1, inner)

    held, held_weight, held_count = _batches(jnp.arange(len(y)), stop, batch)

    def validation_loss(params):
        def add(at, total):
            return total + loss(params, held[at], held_weight[at])

        return jax.lax.fori_loop(0, held_count, add, jnp.zeros(()))

    with jax.default_matmul_precision("highest"):
        best: _Weights = fit(
            lambda params: jnp.zeros(()),
            _start(key_start, series.shape[-1], hidden),
            optax.GradientTransformation(init, epoch),
            _EPOCHS,
            validation_loss,
            _PATIENCE,
        )
    return LSTM(*best, mean, std)


def _batches(
    order: Array, weight: Float[Array, " samples"], size: int
) -> tuple[Int[Array, "batches size"], Float[Array, "batches size"], Int[Array, ""]]:
    """Rows and their weights in parts, and in how many of the parts there is weight.

    Rows of weight 0 come last, then repeated ones of weight 0 that fill up.
    """
    rows = jnp.argsort(jnp.where(weight > 0, order, jnp.inf))
    fill = (0, -len(rows) % size)
    weights = jnp.pad(weight[rows], fill).reshape(-1, size)
    count = (weights > 0).any(1).sum()
    return jnp.pad(rows, fill).reshape(-1, size), weights, count


def _start(key: PRNGKeyArray, features: int, hidden: int) -> _Weights:
    cells, rngs = {}, nnx.Rngs(key)
    for layer in range(2):
        cell = nnx.OptimizedLSTMCell(features, hidden, rngs=rngs)
        kernels = cell.dense_i.kernel[...], cell.dense_h.kernel[...]
        cells[f"layer{layer}"] = Cell(*kernels, jnp.zeros(4 * hidden))
        features = hidden
    return cells, jnp.zeros(hidden), jnp.zeros(())


def _logits(
    params: LSTM,
    series: Float[Values, "*rows time features"],
    valid: Bool[Values, "*rows time"],
) -> Float[Array, "*rows"]:
    series = jnp.where(valid[..., None], series, params.mean)
    series = (series - params.mean) / params.std
    cells = [params.cells[name] for name in sorted(params.cells)]
    zeros = jnp.zeros((*valid.shape[:-1], len(params.w)))

    def step(carries, now):
        x, there = now
        kept = []
        for cell, old in zip(cells, carries, strict=True):
            c, h = old
            gates = x @ cell.w_in + (h @ cell.w_hidden + cell.b)
            i, f, g, o = jnp.split(gates, 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            x = jax.nn.sigmoid(o) * jnp.tanh(c)
            pairs = zip((c, x), old, strict=True)
            kept.append(tuple(jnp.where(there[..., None], *pair) for pair in pairs))
        return kept, None

    steps = (jnp.moveaxis(series, -2, 0), jnp.moveaxis(jnp.asarray(valid), -1, 0))
    ends, _ = jax.lax.scan(step, [(zeros, zeros)] * len(cells), steps)
    return ends[-1][1] @ params.w + params.b


@jax.jit
def lstm_logits(
    params: LSTM,
    series: Float[Values, "*rows time features"],
    valid: Bool[Values, "*rows time"],
) -> Float[Array, "*rows"]:
    """Logits; higher = more likely hallucinated, ``b`` when all is padding."""
    with jax.default_matmul_precision("highest"):
        return _logits(params, series, valid)
