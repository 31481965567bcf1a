"""Which tokens gather attention, and the spectrum of the attention graph.

Binkowski et al., `Hallucination Detection in LLMs Using Spectral Features of Attention
Maps <https://arxiv.org/abs/2502.17598>`_, 2025, and `Attention Sinks as Internal
Signals for Hallucination Detection in Large Language Models
<https://arxiv.org/abs/2604.10697>`_, 2026.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxhal.features.base import Attention, Reducer
from jaxhal.io.checks import at_least
from jaxhal.types import View


@dataclasses.dataclass(frozen=True)
class SinkScores(Reducer):
    r"""The largest sink scores of a head's tokens, falling, in [0, 1].

    Of a token i, the mean attention :math:`a_{ui}` that it gets from itself and the
    tokens after it, which makes tokens of any place alike:

    .. math:: s_i = \frac{1}{|U_i|} \sum_{u \in U_i} a_{ui}

    In the papers all tokens at :math:`i` or later count; here only those of the
    response do, whose rows are read.  Zeros follow where there are fewer tokens.

    Args:
      top: how many; the papers try 5 to 100.
    """

    values = ("score",)

    top: int = 10

    def __post_init__(self):
        at_least(1, top=self.top)

    def rows(self, rows: Attention, view: View) -> Attention:
        return rows

    def of_keys(
        self, rows: Float[Array, "response key"], view: View
    ) -> Float[Array, " key"]:
        """The score of every token; rows of padding are zero, and add nothing."""
        valid = view.valid[view.prompt_length :]
        later = jnp.cumsum(valid[::-1])[::-1]
        before = jnp.broadcast_to(valid.sum(), view.prompt_length)
        count = jnp.maximum(jnp.concatenate([before, later]), 1)
        return rows.sum(0) / count

    def finish(
        self, rows: Float[Array, "response key"], view: View
    ) -> Float[Array, " top"]:
        valid = view.valid & view.valid[view.prompt_length :].any()
        found = jnp.where(valid, self.of_keys(rows, view), -jnp.inf)
        # Sorted, not `top_k`, before which heads would be gathered on each device.
        largest = jnp.sort(found, descending=True)[: self.top]
        largest = jnp.where(largest == -jnp.inf, 0.0, largest)
        return jnp.pad(largest, (0, self.top - len(largest)))


@dataclasses.dataclass(frozen=True)
class LaplacianEigenvalues(SinkScores):
    r"""The largest eigenvalues of a head's graph Laplacian, falling, in [-1, 1].

    Tokens are vertices, and :math:`a_{ui}` weighs the edge by which a token :math:`u`
    attends to :math:`i \le u`.  The Laplacian :math:`D - A` is lower triangular, so its
    diagonal holds its eigenvalues (equations 1 to 3), sink scores without what a token
    gives itself:

    .. math:: \lambda_i = s_i - a_{ii}

    A prompt token, whose own row is not read, has no edge to itself.
    """

    values = ("eigenvalue",)

    def of_keys(
        self, rows: Float[Array, "response key"], view: View
    ) -> Float[Array, " key"]:
        itself = jnp.diagonal(rows[:, view.prompt_length :])
        itself = jnp.pad(itself, (view.prompt_length, 0))
        return super().of_keys(rows, view) - itself
