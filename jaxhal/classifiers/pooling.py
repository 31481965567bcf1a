"""Attention-pooling probe: which response tokens give a hallucination away?"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from jaxhal.classifiers.data import Values, check_series, moments
from jaxhal.classifiers.train import fit_probe

_LOWEST = -1e30  # a finite minus infinity, whose differences are not NaN


class Pooling(NamedTuple):
    """A learned query, and a linear probe on the tokens it pools; a pytree."""

    query: Float[Array, " width"]
    w: Float[Array, " width"]
    b: Float[Array, ""]
    mean: Float[Array, " width"]
    std: Float[Array, " width"]


def fit_pooling(
    key: PRNGKeyArray,
    hidden: Any,
    valid: Any,
    y: Any,
    weight: Any,
    validation_weight: Any,
) -> Pooling:
    r"""A query and a probe trained together, by AdamW with early stopping.

    .. math:: \alpha = \mathrm{softmax}(H q), \quad
      \mathrm{logit} = w^\top \textstyle\sum_t \alpha_t h_t + b

    over valid response tokens, standardised by those of the training rows (CH-Wang et
    al., `Do Androids Know They're Only Dreaming of Electric Sheep?
    <https://arxiv.org/abs/2312.17249>`_, 2023, the attention-pooling probe).

    Args:
      key: draws the starting query.
      hidden: ``[rows, response, width]``; padding may hold anything.
      valid: ``[rows, response]``, False on padding.
      y, weight, validation_weight: as :func:`~jaxhal.classifiers.mlp.fit_mlp` has them.
    """
    rows = check_series(hidden, valid, y, weight, validation_weight)
    return _fit(key, *rows)


@jax.jit
def _fit(key, hidden, valid, y, weight, validation_weight) -> Pooling:
    mean, std = moments(hidden, weight[:, None] * valid)
    hidden = jnp.where(valid[..., None], (hidden - mean) / std, 0.0)
    width = hidden.shape[-1]
    query = jax.random.normal(key, (width,)) / jnp.sqrt(width)
    start = (query, jnp.zeros(width), jnp.zeros(()))

    def logits(params):
        query, w, b = params
        return _pooled(query, hidden, valid) @ w + b

    with jax.default_matmul_precision("highest"):
        found = fit_probe(logits, start, y, weight, validation_weight, 1e-2)
    return Pooling(*found, mean=mean, std=std)


def _pooled(
    query: Float[Array, " width"],
    hidden: Float[Array, "*rows response width"],
    valid: Bool[Values, "*rows response"],
) -> Float[Array, "*rows width"]:
    score = jnp.where(valid, hidden @ query, _LOWEST)
    share = jnp.where(valid, jnp.exp(score - score.max(-1, keepdims=True)), 0.0)
    # With a valid token the sum is at least 1; without one all weights are 0.
    attention = share / jnp.maximum(share.sum(-1, keepdims=True), 1.0)
    return jnp.einsum("...r,...rd->...d", attention, hidden)


def pooling_logits(
    params: Pooling,
    hidden: Float[Values, "*rows response width"],
    valid: Bool[Values, "*rows response"],
) -> Float[Array, "*rows"]:
    """Logits; higher = more likely hallucinated, ``b`` when all is padding."""
    with jax.default_matmul_precision("highest"):
        hidden = jnp.where(valid[..., None], (hidden - params.mean) / params.std, 0.0)
        return _pooled(params.query, hidden, valid) @ params.w + params.b
