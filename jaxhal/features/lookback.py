"""Does the model look back at what it was given, or at what it just wrote?"""

import dataclasses
import functools
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxhal.features.arrays import causal_attention, static_int
from jaxhal.features.base import Reducer
from jaxhal.types import View

# Rows of a softmax sum to one, so a sum of two means this small is a row of padding.
_EMPTY = 1e-12
# Tokens of a sliding window, as published.
WINDOW = 8


def _lookback(
    probs: Float[Array, "query key"],
    context: Bool[Array, " key"],
    new: Bool[Array, "query key"],
) -> Float[Array, " query"]:
    """Lookback ratio of each row of one head: the means over the two masks, compared.

    0.0 without context and for a row of zeros, else 1.0 without new tokens.
    """

    def mean(mask):
        return jnp.where(mask, probs, 0.0).sum(-1) / jnp.maximum(mask.sum(-1), 1)

    back, total = mean(context), mean(context) + mean(new)
    seen = total > _EMPTY
    ratio = jnp.where(seen, back / jnp.where(seen, total, 1.0), 0.0)
    return jnp.where(context.any() & ~new.any(-1), 1.0, ratio)


@functools.partial(jax.jit, static_argnames=("context_length", "prompt_length"))
def _lookback_ratio(
    attention: Float[Array, "*lead seq seq"], context_length: int, prompt_length: int
) -> Float[Array, "*lead response"]:
    key = jnp.arange(attention.shape[-1])
    query = key[prompt_length - 1 : -1, None]
    ratio = jnp.vectorize(_lookback, signature="(q,k),(k),(q,k)->(q)")
    return ratio(
        attention[..., prompt_length - 1 : -1, :],
        key < context_length,
        (key >= context_length) & (key <= query),
    )


def lookback_ratio(
    attention: Any, context_length: SupportsIndex, prompt_length: SupportsIndex
) -> Float[Array, "... response"]:
    r"""Share of attention that looks back, per head and response token, in [0, 1].

    .. math:: \mathrm{LR}_t = \frac{A_t(\text{context})}
      {A_t(\text{context}) + A_t(\text{new})}

    where both :math:`A_t` are **means** over tokens.  Response token ``t`` is read from
    the row that predicts it, row ``prompt_length - 1 + t``; new tokens are the columns
    from ``context_length`` up to and including that row.  Where a row has no new token
    (the first one, when the whole prompt is context) the ratio is 1.0.  Low ratios
    tend to mean hallucination, but heads differ in sign: fit a classifier.

    Args:
      attention: ``[..., seq, seq]`` causal attention of any framework and any leading
        dimensions; a tuple of them, one per layer, is stacked.
      context_length: leading tokens that count as context, in ``1..prompt_length``.
        Leave out the end of the prompt (the turn marker, "Answer:"), which counts as
        new.
      prompt_length: tokens before the response, in ``1..seq-1``.  Both are static.

    Returns:
      ``Float[... response]`` in float32, ``response = seq - prompt_length``.

    Raises:
      TypeError: when a length is not a static integer.
      ValueError: on a ``context_length`` outside its range, and on shapes, lengths or
        values :func:`causal_attention` refuses.

    Example:
      Row 1 predicts the response: 0.75 on the context, 0.25 on itself.

      >>> attention = [[1.0, 0.0, 0.0], [0.75, 0.25, 0.0], [0.2, 0.4, 0.4]]
      >>> lookback_ratio(attention, context_length=1, prompt_length=2)
      Array([0.75], dtype=float32)

    References:
      Chuang et al., `Lookback Lens: Detecting and Mitigating Contextual Hallucinations
      in Large Language Models Using Only Attention Maps
      <https://arxiv.org/abs/2407.07071>`_, 2024, section 2.1.
    """
    attention = causal_attention(attention, prompt_length)
    context_length = static_int("context_length", context_length)
    prompt_length = static_int("prompt_length", prompt_length)
    if not 1 <= context_length <= prompt_length:
        raise ValueError(
            f"context_length is {context_length} but the prompt holds {prompt_length} "
            f"tokens; it must lie in 1..{prompt_length}"
        )
    return _lookback_ratio(attention, context_length, prompt_length)


@dataclasses.dataclass(frozen=True)
class LookbackRatio(Reducer):
    """Lookback ratio per head and response token, in [0, 1].

    The same numbers as :func:`lookback_ratio`, with the batch's context mask: new
    tokens are the rest of the prompt and the response up to the querying token.

    Example:
      >>> LookbackRatio().row, LookbackRatio().rowwise
      ('predictor', True)

    References:
      Chuang et al., 2024, section 2.1.
    """

    row = "predictor"

    def rows(
        self, rows: Float[Array, "query key"], view: View
    ) -> Float[Array, " query"]:
        seen = jnp.arange(len(view.valid)) <= view.position[:, None]
        new = view.valid & ~view.context & seen
        return _lookback(rows, view.context & view.valid, new)
