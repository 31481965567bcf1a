"""A probe whose heads each look at the most suspicious place of a response."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxhal.classifiers.data import Values, check_tokens, moments
from jaxhal.classifiers.train import fit_probe
from jaxhal.io.checks import at_least

_HIDDEN, _HEADS = 64, 10
_LOWEST = -1e30  # a finite minus infinity, whose differences are not NaN


class MultiMax(NamedTuple):
    """A rectified layer for every token, and heads on it; a pytree."""

    w_in: Float[Array, "width hidden"]
    b_in: Float[Array, " hidden"]
    query: Float[Array, "hidden heads"]
    value: Float[Array, "hidden heads"]
    b: Float[Array, ""]
    mean: Float[Array, " width"]
    std: Float[Array, " width"]


def fit_multimax(
    key: PRNGKeyArray,
    hidden: Any,
    row: Any,
    y: Any,
    weight: Any,
    validation_weight: Any,
    window: int = 1,
) -> MultiMax:
    r"""Ten heads on 64 rectified units, by AdamW with early stopping.

    .. math:: \mathrm{logit} = b + \sum_h \max_t \frac{\sum_{j = t - w + 1}^t
      e^{q_h^\top y_j} v_h^\top y_j}{\sum_{j = t - w + 1}^t e^{q_h^\top y_j}},
      \quad y_j = \mathrm{relu}(W x_j + c)

    over windows of ``w`` tokens, or the whole of a shorter response (Kramár et al.,
    `Building Production-Ready Probes For Gemini <https://arxiv.org/abs/2601.11516>`_,
    2026).  With windows of one token, in which queries have no say, it is MultiMax
    (section 3.2.1); with more, the max of rolling means attention probe (3.2.2).  It is
    trained as it decides; the paper sometimes trains with a softmax over all tokens.

    Args:
      key: draws the starting weights.
      hidden: ``[tokens, width]`` of all rows, one after the other.
      row: ``[tokens]``, the number of the row that each token is of.
      y, weight, validation_weight: as :func:`~jaxhal.classifiers.mlp.fit_mlp` has them.
    """
    at_least(1, window=window)
    rows = check_tokens(hidden, row, y, weight, validation_weight)
    return _fit(key, *rows, window=window)


@functools.partial(jax.jit, static_argnames="window")
def _fit(key, hidden, row, y, weight, validation_weight, window) -> MultiMax:
    mean, std = moments(hidden, weight[row])
    hidden = (hidden - mean) / std
    width = hidden.shape[-1]
    key_in, key_query, key_value = jax.random.split(key, 3)
    start = (
        jax.random.normal(key_in, (width, _HIDDEN)) * jnp.sqrt(2 / width),
        jnp.zeros(_HIDDEN),
        jax.random.normal(key_query, (_HIDDEN, _HEADS)) / _HIDDEN,
        jax.random.normal(key_value, (_HIDDEN, _HEADS)) / _HIDDEN,
        jnp.zeros(()),
    )

    count = jnp.zeros(len(y), int).at[row].add(1)
    place = jnp.arange(len(row)) - (jnp.cumsum(count) - count)[row]
    whole = place >= jnp.minimum(window, count[row]) - 1

    def of_rows(reduce: Callable[..., Array], values: Array) -> Array:
        return reduce(values, row, len(y), indices_are_sorted=True)

    def logits(layers):
        b = layers[-1]
        values = _values(layers, hidden, window, place)
        # The highest of a row has no derivative of its own; which tokens have it does.
        there = jax.lax.stop_gradient(jnp.where(whole[:, None], values, _LOWEST))
        chosen = whole[:, None] & (there == of_rows(jax.ops.segment_max, there)[row])
        best, ties = (
            of_rows(jax.ops.segment_sum, jnp.where(chosen, one, 0.0))
            for one in (values, jnp.ones_like(values))
        )
        return (best / jnp.maximum(ties, 1.0)).sum(-1) + b

    with jax.default_matmul_precision("highest"):
        layers = fit_probe(logits, start, y, weight, validation_weight)
    return MultiMax(*layers, mean=mean, std=std)


def multimax_logits(
    params: MultiMax,
    hidden: Float[Values, "*rows response width"],
    valid: Bool[Values, "*rows response"],
    window: int = 1,
) -> Float[Array, "*rows"]:
    """Logits; higher = more likely hallucinated, ``b`` when all is padding."""
    with jax.default_matmul_precision("highest"):
        hidden = jnp.asarray((hidden - params.mean) / params.std)
        return _logits(params[:5], hidden, jnp.asarray(valid), window)


def _logits(
    layers: tuple[Array, ...],
    hidden: Float[Array, "*rows response width"],
    valid: Bool[Array, "*rows response"],
    window: int,
) -> Float[Array, "*rows"]:
    hidden = jnp.where(valid[..., None], hidden, 0.0)
    values = _values(layers, hidden, window, jnp.arange(valid.shape[-1]))
    # A window ends at its last token; those that lack some begin the response.
    length = valid.sum(-1, keepdims=True)
    whole = jnp.arange(valid.shape[-1]) >= jnp.minimum(window, length) - 1
    best = jnp.where((valid & whole)[..., None], values, _LOWEST).max(-2)
    return jnp.where(length > 0, best, 0.0).sum(-1) + layers[-1]


def _values(
    layers: tuple[Array, ...],
    hidden: Float[Array, "*rows tokens width"],
    window: int,
    place: Int[Array, " tokens"],
) -> Float[Array, "*rows tokens heads"]:
    """What heads see in the window that ends at a token, ``place`` tokens into its row.

    Those after the last token of a row mean nothing.
    """
    w_in, b_in, query, value, _ = layers
    units = jax.nn.relu(hidden @ w_in + b_in)
    values = units @ value
    if window == 1:
        return values
    there = place[:, None] + 1 >= window - jnp.arange(window)
    score = jnp.where(there[:, None], _windows(units @ query, window), _LOWEST)
    return (jax.nn.softmax(score, -1) * _windows(values, window)).sum(-1)


def _windows(
    x: Float[Array, "*rows tokens heads"], window: int
) -> Float[Array, "*rows tokens heads window"]:
    """The values of each token and of those before it, 0 before the first."""
    size = x.shape[-2]
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(window - 1, 0), (0, 0)])
    return jnp.stack([padded[..., k : k + size, :] for k in range(window)], -1)
