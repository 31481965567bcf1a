"""Attention-pooling probe: which response tokens give a hallucination away?"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from jaxhal.classifiers.data import Values, check_tokens, moments
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
    row: Any,
    y: Any,
    weight: Any,
    validation_weight: Any,
) -> Pooling:
    r"""A query and a probe trained together, by AdamW with early stopping.

    .. math:: \alpha = \mathrm{softmax}(H q), \quad
      \mathrm{logit} = w^\top \textstyle\sum_t \alpha_t h_t + b

    over the tokens of a response, standardised by those of the training rows (CH-Wang
    et al., `Do Androids Know They're Only Dreaming of Electric Sheep?
    <https://arxiv.org/abs/2312.17249>`_, 2023, the attention-pooling probe).

    Args:
      key: draws the starting query.
      hidden: ``[tokens, width]`` of all rows, one after the other.
      row: ``[tokens]``, the number of the row that each token is of.
      y, weight, validation_weight: as :func:`~jaxhal.classifiers.mlp.fit_mlp` has them.
    """
    return _fit(key, *check_tokens(hidden, row, y, weight, validation_weight))


@jax.jit
def _fit(key, hidden, row, y, weight, validation_weight) -> Pooling:
    mean, std = moments(hidden, weight[row])
    hidden = (hidden - mean) / std
    width = hidden.shape[-1]
    query = jax.random.normal(key, (width,)) / jnp.sqrt(width)
    start = (query, jnp.zeros(width), jnp.zeros(()))
    summed = functools.partial(
        jax.ops.segment_sum,
        segment_ids=row,
        num_segments=len(y),
        indices_are_sorted=True,
    )

    def logits(params):
        query, w, b = params
        # A token is two numbers: how much it counts, and what it says.
        score, says = (hidden @ jnp.stack([query, w], 1)).T
        highest = jax.ops.segment_max(
            jax.lax.stop_gradient(score), row, len(y), indices_are_sorted=True
        )
        share = jnp.exp(score - highest[row])
        total = summed(share)  # 0 of a row without tokens
        return summed(share * says) / jnp.where(total > 0, total, 1.0) + b

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
