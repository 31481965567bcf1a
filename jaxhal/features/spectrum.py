"""The spectrum of the attention graph.

Binkowski et al., `Hallucination Detection in LLMs Using Spectral Features of Attention
Maps <https://arxiv.org/abs/2502.17598>`_, 2025.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxhal.features.base import Attention, Reducer
from jaxhal.io.checks import at_least
from jaxhal.types import View


@dataclasses.dataclass(frozen=True)
class LaplacianEigenvalues(Reducer):
    r"""The largest eigenvalues of a head's graph Laplacian, falling, in [-1, 1].

    Tokens are vertices, and :math:`a_{ui}` weighs the edge by which a token :math:`u`
    attends to :math:`i \le u`.  The Laplacian :math:`D - A` is lower triangular, so its
    diagonal holds its eigenvalues (equations 1 to 3):

    .. math:: \lambda_i = \frac{1}{|U_i|} \sum_{u \in U_i} a_{ui} - a_{ii}

    The paper draws the edges of all tokens; here only those of the response draw some,
    :math:`U_i` are the ones at :math:`i` or later, and a prompt token, whose own row is
    not read, has no edge to itself.  Zeros follow where there are fewer tokens.

    Args:
      top: how many; the paper tries 5 to 100.
    """

    values = ("eigenvalue",)

    top: int = 10

    def __post_init__(self):
        at_least(1, top=self.top)

    def rows(self, rows: Attention, view: View) -> Attention:
        return rows

    def finish(
        self, rows: Float[Array, "response key"], view: View
    ) -> Float[Array, " eigenvalue"]:
        valid = view.valid[view.prompt_length :]
        later = jnp.cumsum(valid[::-1])[::-1]
        before = jnp.broadcast_to(valid.sum(), view.prompt_length)
        count = jnp.maximum(jnp.concatenate([before, later]), 1)
        itself = jnp.diagonal(rows[:, view.prompt_length :])
        itself = jnp.pad(itself, (view.prompt_length, 0))
        # Rows of padding are zero: they add nothing.
        found = rows.sum(0) / count - itself
        found = jnp.where(view.valid & valid.any(), found, -jnp.inf)
        largest: Any = lax.top_k(found, min(self.top, len(found)))[0]
        largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
        return jnp.pad(largest, (0, self.top - len(largest)))
