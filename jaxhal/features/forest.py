"""The edges of the forest that MTop-Div weighs: where every answer token hangs from."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxhal.features.base import Attention
from jaxhal.features.topology import ToPrompt, spanning_forest, unfolded
from jaxhal.types import View


class Edges(NamedTuple):
    """One edge for each response token; its weight is ``1 - attention``, in [0, 1]."""

    parents: Int[Array, "*lead response"]  # columns of the text; -1 on padding
    weights: Float[Array, "*lead response"]  # 0 on padding


@dataclasses.dataclass(frozen=True)
class Forest(ToPrompt):
    """The edge by which each response token joins the prompt's forest, per head.

    The weights add up to :func:`~jaxhal.features.topology.mtop_div`.  Tokens join one
    by one, the closest first, so a parent is a prompt token or a response token that
    has joined before, which may be a later column that looks back at this one.
    Following parents always ends in the prompt (Bazarova et al. 2025, figures 2 and 5).

    Ties are settled alike everywhere: the earliest token joins first; it prefers the
    prompt to other response tokens, of those the one that joined first, and in the
    prompt the first column, from which a token without any attention hangs.  Columns
    are those of the batch, so padding to the left of the prompt counts.
    """

    def rows(self, rows: Attention, view: View) -> Any:
        """Those of :class:`ToPrompt`, and which token of the prompt that is."""
        prompt = slice(view.prompt_length)
        # Negative attention counts as none, as in the weights, but padding as less: a
        # row that sees nothing still ends in a real token.
        seen = jnp.maximum(rows[:, prompt], 0.0)
        best = jnp.argmax(jnp.where(view.valid[prompt], seen, -1.0), -1)
        return super().rows(rows, view), best

    def pack(self, rows: Any, view: View) -> Any:
        similarity, best = rows
        return super().pack(similarity, view), best

    def finish(
        self,
        packed: tuple[Float[Array, "half_response parents"], Int[Array, " response"]],
        view: View,
    ) -> Any:
        valid = view.valid[view.prompt_length :]
        similarity, best = packed
        parent, weights = spanning_forest(unfolded(similarity), valid)
        columns = jnp.where(parent == 0, best, view.prompt_length - 1 + parent)
        return Edges(jnp.where(valid, columns, -1), weights)


@dataclasses.dataclass(frozen=True)
class SinkShare(Forest):
    """Share of forest edges that end in the prompt's first token, per head, in [0, 1].

    The first token, often a beginning-of-sequence token, draws the attention of heads
    that have nothing to read (Xiao et al., `attention sinks
    <https://arxiv.org/abs/2309.17453>`_, 2024); a forest that hangs from it says little
    about the answer (Bazarova et al. 2025, section 5).  0.0 for an empty response.
    """

    def finish(self, packed: Any, view: View) -> Float[Array, ""]:
        parents, weights = super().finish(packed, view)
        count = view.valid[view.prompt_length :].sum()
        share = (parents == jnp.argmax(view.valid)).sum() / jnp.maximum(count, 1)
        return share + 0.0 * weights.sum()  # no number where attention is none
