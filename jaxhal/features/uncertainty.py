"""How sure was the model of its own words?

Read from the next-token logits on the rows that *predict* the response, ``P - 1`` to
``P + R - 2``; the rows of the response itself would drop the first token and add what
follows the last.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxhal.features.base import OfRows, Reducer
from jaxhal.types import View

Logits = Float[Array, "query vocab"]


def token_logprob(logits: Logits, target: Int[Array, " query"]) -> OfRows:
    """Log probability of the token that each row predicts, in nats, at most 0.

    Example:
      >>> token_logprob(jnp.zeros((1, 4)), jnp.array([2]))  # -log(4)
      Array([-1.3862944], dtype=float32)
    """
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def token_entropy(logits: Logits) -> OfRows:
    r"""Entropy of each next-token distribution, in nats, in ``[0, log vocab]``.

    .. math:: H_t = -\sum_v p_{t, v} \log p_{t, v}

    over the whole vocabulary; a probability that underflows adds nothing.
    """
    logits = logits.astype(jnp.float32)
    # This form, selects included, keeps XLA on CPU from fusing the reductions into the
    # matrix product that made the logits, at three times its cost.
    logp = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    p = jnp.exp(logp)
    # What is not a number is none of 0, and stays what it is.
    term = p * jnp.where(p == 0.0, 0.0, -logp)
    return jnp.sum(jnp.where(p == 0.0, 0.0, term), axis=-1)


def over_tokens(
    values: Float[Array, "*batch response"],
    valid: Bool[Array, "*batch response"],
    how: Literal["mean", "max"] = "mean",
) -> Float[Array, "*batch"]:
    """Mean of the real tokens' values, or the maximum of none below 0; 0.0 of none."""
    values = jnp.where(valid, values, 0.0)
    if how == "max":
        return values.max(-1, initial=0.0)
    return values.sum(-1) / jnp.maximum(valid.sum(-1), 1)


@dataclasses.dataclass(frozen=True)
class TokenLogprob(Reducer):
    """Log probability of each response token, in nats."""

    reads = "logits"
    row = "predictor"
    reads_target = True

    def rows(self, rows: Logits, view: View) -> OfRows:
        return token_logprob(rows, view.target)


@dataclasses.dataclass(frozen=True)
class TextLogprob(TokenLogprob):
    """Log probability of a whole response, in nats, its last token left out.

    That is the end of the sequence, which ``lm.encode`` appends: whether the model
    would stop there is no part of how likely it finds the text.  0 without text.
    """

    def finish(self, rows: Float[Array, " response"], view: View) -> Float[Array, ""]:
        length = view.valid[view.prompt_length :].sum()
        return jnp.where(jnp.arange(len(rows)) < length - 1, rows, 0.0).sum()


@dataclasses.dataclass(frozen=True)
class TokenEntropy(Reducer):
    """Entropy of the distribution each response token was drawn from, in nats."""

    reads = "logits"
    row = "predictor"

    def rows(self, rows: Logits, view: View) -> OfRows:
        return token_entropy(rows)
