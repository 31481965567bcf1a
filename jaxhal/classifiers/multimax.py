"""A probe whose heads each look at the most suspicious place of a response."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from jaxhal.classifiers.data import Values, check_series, moments
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
    valid: Any,
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
      hidden: ``[rows, response, width]``; padding may hold anything.
      valid: ``[rows, response]``, False on padding, which comes last.
      y, weight, validation_weight: as :func:`~jaxhal.classifiers.mlp.fit_mlp` has them.
    """
    at_least(1, window=window)
    rows = check_series(hidden, valid, y, weight, validation_weight)
    return _fit(key, *rows, window=window)


@functools.partial(jax.jit, static_argnames="window")
def _fit(key, hidden, valid, y, weight, validation_weight, window) -> MultiMax:
    mean, std = moments(hidden, weight[:, None] * valid)
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

    def logits(layers):
        return _logits(layers, hidden, valid, window)

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
    w_in, b_in, query, value, b = layers
    units = jax.nn.relu(jnp.where(valid[..., None], hidden, 0.0) @ w_in + b_in)
    values = units @ value
    if window > 1:
        score = jnp.where(valid[..., None], units @ query, _LOWEST)
        share = jax.nn.softmax(_windows(score, window, _LOWEST), -1)
        values = (share * _windows(values, window, 0.0)).sum(-1)
    # A window ends at its last token; those that lack some begin the response.
    length = valid.sum(-1, keepdims=True)
    whole = jnp.arange(valid.shape[-1]) >= jnp.minimum(window, length) - 1
    best = jnp.where((valid & whole)[..., None], values, _LOWEST).max(-2)
    return jnp.where(length > 0, best, 0.0).sum(-1) + b


def _windows(
    x: Float[Array, "*rows response heads"], window: int, fill: float
) -> Float[Array, "*rows response heads window"]:
    """The values of each token and of those before it, ``fill`` before the first."""
    size = x.shape[-2]
    pad = [(0, 0)] * (x.ndim - 2) + [(window - 1, 0), (0, 0)]
    padded = jnp.pad(x, pad, constant_values=fill)
    return jnp.stack([padded[..., k : k + size, :] for k in range(window)], -1)
