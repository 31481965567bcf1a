"""The edges of the forest that MTop-Div weighs: where every answer token hangs from."""

import dataclasses
import functools
from typing import Any, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxhal.features.arrays import causal_attention, static_int
from jaxhal.features.base import Reducer
from jaxhal.features.topology import MTopDiv, spanning_forest
from jaxhal.types import View


class Edges(NamedTuple):
    """One edge for each response token.

    Attributes:
      parents: ``Int[... response]``, the column each token hangs from; -1 on padding.
      weights: ``Float[... response]``, ``1 - attention`` along that edge, in [0, 1]; 0
        on padding.
    """

    parents: Int[Array, "*lead response"]
    weights: Float[Array, "*lead response"]


def _first_largest(
    prompt: Float[Array, "*lead prompt"], valid: Bool[Array, " prompt"]
) -> Int[Array, "*lead"]:
    # Negative attention counts as none, as in the weights, but padding as less: a row
    # that sees nothing still ends in a real token.
    return jnp.argmax(jnp.where(valid, jnp.maximum(prompt, 0.0), -1.0), -1)


def _columns(
    parent: Int[Array, "*lead response"],
    best: Int[Array, "*lead response"],
    prompt_length: int,
) -> Int[Array, "*lead response"]:
    """Parents as columns of the text; ``best`` is where the edge to the root ends."""
    return jnp.where(parent == 0, best, prompt_length - 1 + parent)


@functools.partial(jax.jit, static_argnames="prompt_length")
def _forest(attention: Float[Array, "*lead seq seq"], prompt_length: int) -> Edges:
    response = attention[..., prompt_length:, :]
    prompt = response[..., :prompt_length]
    similarity = jnp.concatenate(
        [prompt.max(-1, keepdims=True), response[..., prompt_length:]], -1
    )
    valid = jnp.ones(response.shape[-2], bool)
    grow = jnp.vectorize(spanning_forest, signature="(r,p),(r)->(r),(r)")
    parent, weights = grow(similarity, valid)
    best = _first_largest(prompt, jnp.ones(prompt_length, bool))
    return Edges(_columns(parent, best, prompt_length), weights)


def forest(attention: Any, prompt_length: SupportsIndex) -> Edges:
    """The edge by which each response token joins the prompt's forest, per head.

    The weights add up to :func:`~jaxhal.features.topology.mtop_div`.  Tokens join one
    by one, the closest first, so a parent is a prompt token or a response token that
    has joined before, not always one to the left: a token whose own row looks nowhere
    in particular may hang from a later token that looks back at it, and its parent is
    then a later column.  Following parents always ends in the prompt.

    Ties are settled alike everywhere: the earliest token joins first; it prefers the
    prompt to other response tokens, of those the one that joined first, and in the
    prompt the first column.  So a token without any attention hangs from column 0.

    Args:
      attention: ``[..., seq, seq]`` causal attention of any framework and any leading
        dimensions; a tuple of them, one per layer, is stacked.
      prompt_length: tokens before the response, a static integer in ``1..seq-1``.

    Returns:
      ``(parents, weights)``, ``[..., response]`` each, parents as columns of ``seq``.

    Raises:
      TypeError: when ``prompt_length`` is not a static integer.
      ValueError: on shapes, lengths or values that
        :func:`~jaxhal.features.arrays.causal_attention` refuses.

    Example:
      >>> attention = [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.25, 0.75, 0.0]]
      >>> parents, weights = forest(attention, prompt_length=1)
      >>> parents.tolist(), weights.tolist()
      ([0, 1], [0.5, 0.25])

    References:
      Bazarova et al., 2025, Figures 2 and 5.
    """
    attention = causal_attention(attention, prompt_length)
    return _forest(attention, static_int("prompt_length", prompt_length))


@dataclasses.dataclass(frozen=True)
class Forest(Reducer):
    """Parent and edge weight of each response token, per head, as :class:`Edges`.

    The same edges as :func:`forest` gives; parents are columns of the batch, so padding
    to the left of the prompt counts.

    Example:
      >>> Forest().rowwise
      False
    """

    def rows(
        self, rows: Float[Array, "query key"], view: View
    ) -> tuple[Float[Array, "query parents"], Int[Array, " query"]]:
        prompt = slice(view.prompt_length)
        best = _first_largest(rows[:, prompt], view.valid[prompt])
        return MTopDiv().rows(rows, view), best

    def finish(
        self,
        rows: tuple[Float[Array, "response parents"], Int[Array, " response"]],
        view: View,
    ) -> Edges:
        valid = view.valid[view.prompt_length :]
        similarity, best = rows
        parent, weights = spanning_forest(similarity, valid)
        columns = _columns(parent, best, view.prompt_length)
        return Edges(jnp.where(valid, columns, -1), weights)


@dataclasses.dataclass(frozen=True)
class SinkShare(Reducer):
    """Share of forest edges that end in the prompt's first token, per head, in [0, 1].

    The first token, often a beginning-of-sequence token, draws the attention of heads
    that have nothing to read; a forest that hangs from it says little about the answer.
    0.0 for an empty response.

    Example:
      >>> SinkShare().rowwise
      False

    References:
      Bazarova et al., 2025, section 5 ("attention to the utility token"); Xiao et al.,
      `Efficient Streaming Language Models with Attention Sinks
      <https://arxiv.org/abs/2309.17453>`_, 2024, section 3.1.
    """

    def rows(
        self, rows: Float[Array, "query key"], view: View
    ) -> tuple[Float[Array, "query parents"], Int[Array, " query"]]:
        return Forest().rows(rows, view)

    def finish(
        self,
        rows: tuple[Float[Array, "response parents"], Int[Array, " response"]],
        view: View,
    ) -> Float[Array, ""]:
        parents = Forest().finish(rows, view).parents
        count = view.valid[view.prompt_length :].sum()
        return (parents == jnp.argmax(view.valid)).sum() / jnp.maximum(count, 1)
