"""What a classifier may learn from attention graphs besides MTop-Div, per head.

Bazarova et al. 2025, appendix D.3, after Kushnareva et al., `Artificial Text Detection
via Examining the Topology of Attention Maps <https://arxiv.org/abs/2109.04825>`_, 2021,
who look at the rows of the prompt too; these say nothing about the answer.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxhal.features.base import Attention, Reducer
from jaxhal.features.topology import ToPrompt, spanning_forest, unfolded
from jaxhal.types import View


def _check_thresholds(thresholds: tuple[float, ...]) -> None:
    if not thresholds or not all(0 < t <= 1 for t in thresholds):
        raise ValueError(
            f"thresholds is {thresholds!r}; name at least one, each above 0 and at "
            "most 1 as attention is"
        )
    if len(set(thresholds)) < len(thresholds):
        raise ValueError(f"thresholds {thresholds} name a number twice; name it once")


@dataclasses.dataclass(frozen=True)
class Barcode(ToPrompt):
    """Statistics of the :math:`H_0` bars of each head, ``[features]`` in this order.

    The bars are the edge weights of the forest behind
    :func:`~jaxhal.features.topology.mtop_div`, one for each response token, in [0, 1]:
    sum, mean, variance and longest of their lengths, the entropy of the lengths as
    shares of their sum, in nats, and for each threshold how many are at least so long.
    Sum, entropy and counts grow with the response, so compare a classifier on them with
    the response's length.  All are 0.0 for an empty response.
    """

    values = ("features",)
    thresholds: tuple[float, ...] = (0.25, 0.5, 0.75)

    def __post_init__(self):
        _check_thresholds(self.thresholds)

    def finish(
        self, packed: Float[Array, "half_response parents"], view: View
    ) -> Float[Array, " features"]:
        valid = view.valid[view.prompt_length :]
        bars = spanning_forest(unfolded(packed), valid)[1]
        count, total = jnp.maximum(valid.sum(), 1), bars.sum()
        mean = total / count
        variance = jnp.where(valid, (bars - mean) ** 2, 0.0).sum() / count
        share = bars / jnp.where(total > 0, total, 1.0)
        entropy = -(share * jnp.log(jnp.where(share > 0, share, 1.0))).sum()
        above = [(bars >= t).sum() for t in self.thresholds]
        return jnp.stack(
            [total, mean, variance, bars.max(initial=0.0), entropy, *above]
        )


@dataclasses.dataclass(frozen=True)
class VertexDegree(Reducer):
    """Edges and vertex degrees of each head's graph, ``[features]`` in this order.

    Two tokens are joined when the later one is of the response and pays the earlier one
    attention of at least the threshold ``t``; attention to itself joins nothing.
    One threshold after the other, how many pairs are joined, and to how many tokens,
    earlier or later ones, a response token is in the mean, and at most: three numbers
    each.  All are 0.0 for an empty response.
    """

    values = ("features",)
    thresholds: tuple[float, ...] = (0.025, 0.05, 0.1, 0.25, 0.5, 0.75)

    def __post_init__(self):
        _check_thresholds(self.thresholds)

    def rows(self, rows: Attention, view: View) -> Any:
        """Per threshold the edges to the prompt, then the attention to the response."""
        prompt = slice(view.prompt_length)
        seen = jnp.where(view.valid[prompt], rows[:, prompt], 0.0)
        edges = [(seen >= t).sum(-1) for t in self.thresholds]
        counts = jnp.stack(edges, -1).astype(rows.dtype)
        counts += 0.0 * seen.sum(-1, keepdims=True)  # no number where attention is none
        return jnp.concatenate([counts, rows[:, view.prompt_length :]], -1)

    def finish(
        self, rows: Float[Array, "response counts_and_response"], view: View
    ) -> Float[Array, " features"]:
        valid = view.valid[view.prompt_length :]
        to_prompt, attention = jnp.split(rows, [len(self.thresholds)], -1)
        token = jnp.arange(len(valid))
        real = valid & valid[:, None] & (token < token[:, None])
        count = jnp.maximum(valid.sum(), 1)

        def degrees(threshold, to_prompt):
            joined = real & (attention >= threshold)
            degree = to_prompt + joined.sum(0) + joined.sum(1)
            edges = to_prompt.sum() + joined.sum()
            return jnp.stack([edges, degree.sum() / count, degree.max(initial=0.0)])

        thresholds = jnp.array(self.thresholds, rows.dtype)
        return jax.vmap(degrees, (0, 1))(thresholds, to_prompt).ravel()
