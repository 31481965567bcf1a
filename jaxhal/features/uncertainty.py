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

from jaxhal.features.base import Reducer
from jaxhal.types import View


def token_logprob(
    logits: Float[Array, "query vocab"], target: Int[Array, " query"]
) -> Float[Array, " query"]:
    r"""Log probability of each target token, in nats, at most 0.

    .. math:: \log p_t = z_{t, y_t} - \log \sum_v e^{z_{t, v}}

    Args:
      logits: ``[query vocab]``, of any float type; computed in float32.
      target: ``[query]``, the token that each row predicts, an id of the vocabulary.

    Example:
      >>> token_logprob(jnp.zeros((1, 4)), jnp.array([2]))  # -log(4)
      Array([-1.3862944], dtype=float32)
    """
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def token_entropy(logits: Float[Array, "query vocab"]) -> Float[Array, " query"]:
    r"""Entropy of each next-token distribution, in nats, in ``[0, log vocab]``.

    .. math:: H_t = -\sum_v p_{t, v} \log p_{t, v}

    over the whole vocabulary; a probability that underflows adds nothing.

    Args:
      logits: ``[query vocab]``, of any float type; computed in float32.

    Example:
      >>> token_entropy(jnp.array([[0.0, 0.0], [0.0, -jnp.inf]]))
      Array([0.6931472, 0. ], dtype=float32)
    """
    logits = logits.astype(jnp.float32)
    # This form, selects included, keeps XLA on CPU from fusing the reductions into the
    # matrix product that made the logits, at three times its cost.
    logp = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    p = jnp.exp(logp)
    term = p * jnp.where(p > 0.0, -logp, 0.0)
    return jnp.sum(jnp.where(p > 0.0, term, 0.0), axis=-1)


def predictive_probability(
    logprob: Float[Array, " response"],
    valid: Bool[Array, " response"],
    how: Literal["mean", "max"] = "mean",
) -> Float[Array, ""]:
    r"""Negative log probability of a response, in nats a token; 0.0 when empty.

    .. math:: -\frac{1}{R} \sum_t \log p_t \quad\text{or}\quad \max_t (-\log p_t)

    Higher means the model found its own answer less likely, more likely hallucinated.

    Args:
      logprob: ``[response]`` of :func:`token_logprob`.
      valid: ``[response]``, False on padding.
      how: ``"mean"`` over tokens, or ``"max"``, the least likely token.

    Raises:
      ValueError: on another ``how``.

    Example:
      >>> logprob, valid = jnp.array([-1.0, -3.0, 0.0]), jnp.array([True, True, False])
      >>> predictive_probability(logprob, valid)
      Array(2., dtype=float32)

    References:
      Manakul et al., `SelfCheckGPT <https://arxiv.org/abs/2303.08896>`_, 2023, the
      grey-box scores Avg(-log p) and Max(-log p), there taken per sentence.
    """
    return _over_tokens(-logprob, valid, how)


def entropy_score(
    entropy: Float[Array, " response"],
    valid: Bool[Array, " response"],
    how: Literal["max", "mean"] = "max",
) -> Float[Array, ""]:
    r"""Token-wise entropy of a response, in nats; 0.0 when empty.

    .. math:: \max_t H_t \quad\text{or}\quad \frac{1}{R} \sum_t H_t

    Higher means less sure, more likely hallucinated.

    Args:
      entropy: ``[response]`` of :func:`token_entropy`.
      valid: ``[response]``, False on padding.
      how: ``"max"``, the least sure token, or ``"mean"``.

    Raises:
      ValueError: on another ``how``.

    Example:
      >>> entropy_score(jnp.array([0.5, 2.0, 9.0]), jnp.array([True, True, False]))
      Array(2., dtype=float32)

    References:
      Manakul et al., 2023, the grey-box scores Max(H) and Avg(H); Bazarova et al.,
      `TOHA <https://arxiv.org/abs/2504.10063>`_, 2025, take the maximum (appendix E).
    """
    return _over_tokens(entropy, valid, how)


def _over_tokens(values: Array, valid: Array, how: str) -> Array:
    """Mean or maximum over valid tokens of values that are never negative."""
    if how not in ("mean", "max"):
        raise ValueError(f"how is {how!r}; use 'mean' or 'max'")
    values = jnp.where(valid, values, 0.0)
    if how == "max":
        return values.max(initial=0.0)
    return values.sum() / jnp.maximum(valid.sum(), 1)


@dataclasses.dataclass(frozen=True)
class TokenLogprob(Reducer):
    """Log probability of each response token, in nats.

    Example:
      >>> TokenLogprob().reads, TokenLogprob().row
      ('logits', 'predictor')
    """

    reads = "logits"
    row = "predictor"
    reads_target = True

    def rows(
        self, rows: Float[Array, "query vocab"], view: View
    ) -> Float[Array, " query"]:
        return token_logprob(rows, view.target)


@dataclasses.dataclass(frozen=True)
class TextLogprob(TokenLogprob):
    r"""Log probability of a whole response, in nats, its last token left out.

    .. math:: \sum_{t < R} \log p_t

    The last token is the end of the sequence, which ``lm.encode`` appends: whether the
    model would stop there is no part of how likely it finds the text.  0 without text.

    Example:
      >>> TextLogprob().rowwise
      False
    """

    def finish(self, rows: Float[Array, " response"], view: View) -> Float[Array, ""]:
        length = view.valid[view.prompt_length :].sum()
        return jnp.where(jnp.arange(len(rows)) < length - 1, rows, 0.0).sum()


@dataclasses.dataclass(frozen=True)
class TokenEntropy(Reducer):
    """Entropy of the distribution each response token was drawn from, in nats.

    Example:
      >>> TokenEntropy().reads, TokenEntropy().row
      ('logits', 'predictor')
    """

    reads = "logits"
    row = "predictor"

    def rows(
        self, rows: Float[Array, "query vocab"], view: View
    ) -> Float[Array, " query"]:
        return token_entropy(rows)
