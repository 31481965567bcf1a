"""Does the model look back at what it was given, or at what it just wrote?

Chuang et al., `Lookback Lens: Detecting and Mitigating Contextual Hallucinations in
Large Language Models Using Only Attention Maps <https://arxiv.org/abs/2407.07071>`_,
2024, section 2.1.
"""

import dataclasses
from typing import Any, SupportsIndex

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxhal.features.arrays import reduce
from jaxhal.features.base import Attention, OfRows, Reducer
from jaxhal.types import View

# Tokens of a sliding window, as published.
WINDOW = 8


def _lookback(
    probs: Attention, context: Bool[Array, " key"], new: Bool[Array, "query key"]
) -> OfRows:
    """Means over the two masks, compared; 0 without context, else 1 without new."""

    def mean(mask):
        return jnp.where(mask, probs, 0.0).sum(-1) / jnp.maximum(mask.sum(-1), 1)

    back, total = mean(context), mean(context) + mean(new)
    # As of padding; a learnt sink may take nearly all of a row.
    unseen = total == 0
    ratio = jnp.where(unseen, 0.0, back / jnp.where(unseen, 1.0, total))
    return jnp.where(context.any() & ~new.any(-1), 1.0, ratio)


@dataclasses.dataclass(frozen=True)
class LookbackRatio(Reducer):
    r"""Share of attention that looks back at the context, per token, in [0, 1].

    .. math:: \mathrm{LR}_t = \frac{A_t(\text{context})}
      {A_t(\text{context}) + A_t(\text{new})}

    Both :math:`A_t` are **means** over tokens.  A response token is read from the row
    that predicts it; new tokens are the rest of the prompt and the response up to that
    row.  Where there is none (the first row, when the whole prompt is context) the
    ratio is 1.0.  Low ratios tend to mean hallucination, but heads differ in sign.
    """

    row = "predictor"

    def rows(self, rows: Attention, view: View) -> OfRows:
        before = jnp.arange(len(view.valid)) <= view.position[:, None]
        new = view.valid & ~view.context & before
        return _lookback(rows, view.context & view.valid, new)


def lookback_ratio(
    attention: Any, context_length: SupportsIndex, prompt_length: SupportsIndex
) -> Float[Array, "... response"]:
    """:class:`LookbackRatio` of attention from any framework.

    Args:
      attention: ``[..., seq, seq]``, causal; a tuple, one per layer, is stacked.
      context_length: leading tokens that count as context, in ``1..prompt_length``.
        Leave out the end of the prompt (the turn marker, "Answer:"), which is new.
      prompt_length: tokens before the response, in ``1..seq-1``.  Both are static.

    Raises as :func:`~jaxhal.features.arrays.causal_attention` does.

    Example:
      Row 1 predicts the response: 0.75 on the context, 0.25 on itself.

      >>> attention = [[1.0, 0.0, 0.0], [0.75, 0.25, 0.0], [0.2, 0.4, 0.4]]
      >>> lookback_ratio(attention, context_length=1, prompt_length=2)
      Array([0.75], dtype=float32)
    """
    return reduce(LookbackRatio(), attention, prompt_length, context_length)
