"""How far does the answer's attention graph hang from the prompt?  (TOHA)

Tokens are vertices, ``1 - attention`` weighs edges, edges inside the prompt weigh
nothing: the prompt is one vertex, the root of the minimum spanning forest.

Bazarova et al., `Hallucination Detection in LLMs via Topological Divergence on
Attention Graphs <https://arxiv.org/abs/2504.10063>`_, 2025.
"""

import dataclasses
from typing import Any, SupportsIndex

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxhal.features.arrays import reduce
from jaxhal.features.base import Attention, OfRows, Reducer
from jaxhal.types import View


def spanning_forest(
    similarity: Float[Array, "response parents"], valid: Bool[Array, " response"]
) -> tuple[Int[Array, " response"], Float[Array, " response"]]:
    """The edge that attaches each response token of one head: parent, weight (Prim).

    Column 0 is the similarity to the root, column ``1 + j`` to response token ``j``;
    only ``j`` before the row counts.  A parent is such a column; it may come after its
    token, which then hangs from a token that looks back at it.  Among equals the
    earliest token joins first, and it joins the root or else whoever joined before.
    Padded tokens join nothing and weigh 0.
    """
    weight = 1.0 - jnp.maximum(similarity, 0.0)
    root, earlier = weight[:, 0], weight[:, 1:]
    token = jnp.arange(len(valid))
    distance = jnp.where(token < token[:, None], earlier, earlier.T)

    def grow(carry, _):
        nearest, parent, loose = carry
        v = jnp.argmin(jnp.where(loose, nearest, jnp.inf))
        loose &= token != v
        # A token keeps the edge it joined by; when none is loose, nothing changes.
        parent = jnp.where(loose & (distance[v] < nearest), 1 + v, parent)
        nearest = jnp.where(loose, jnp.minimum(nearest, distance[v]), nearest)
        return (nearest, parent, loose), None

    start = (root, jnp.zeros_like(token), valid)
    (nearest, parent, _), _ = lax.scan(grow, start, length=len(valid))
    return parent, jnp.where(valid, nearest, 0.0)


def folded(
    rows: Float[Array, "response parents"],
) -> Float[Array, "half_response parents"]:
    """The same for :func:`spanning_forest` in half the memory.

    Row ``i`` counts up to column ``i``, so the last row has room for the first one.

    >>> folded(jnp.array([[1, 0, 0, 0], [2, 3, 0, 0], [4, 5, 6, 0.0]]))
    Array([[4., 5., 6., 1.],
           [2., 3., 3., 2.]], dtype=float32)
    """
    count = len(rows)
    first = jnp.arange((count + 1) // 2)[:, None]
    late = jnp.arange(count + 1) > count - 1 - first
    return jnp.where(late, rows[: len(first), ::-1], rows[::-1][: len(first)])


def unfolded(
    packed: Float[Array, "half_response parents"],
) -> Float[Array, "response parents"]:
    """The rows that :func:`folded` got, up to their own column."""
    count = packed.shape[1] - 1
    return jnp.concatenate([packed[: count // 2, ::-1], packed[::-1]])


@dataclasses.dataclass(frozen=True)
class MaxPromptAttention(Reducer):
    """Largest attention of each response token to one prompt token, in [0, 1].

    ``1 -`` its mean is the control that :class:`MTopDiv` has to beat: the weight of the
    forest in which every token hangs from the prompt.
    """

    def rows(self, rows: Attention, view: View) -> OfRows:
        prompt = slice(view.prompt_length)
        return jnp.where(view.valid[prompt], rows[:, prompt], 0.0).max(-1)


@dataclasses.dataclass(frozen=True)
class ToPrompt(Reducer):
    """Per response token the largest attention to the prompt, then to the response."""

    def rows(self, rows: Attention, view: View) -> Any:
        root = MaxPromptAttention().rows(rows, view)
        return jnp.concatenate([root[:, None], rows[:, view.prompt_length :]], -1)

    def pack(self, rows: Any, view: View) -> Any:
        return folded(rows)


@dataclasses.dataclass(frozen=True)
class MTopDiv(ToPrompt):
    r"""MTop-Div per head: mean weight of the edges that attach the response, in [0, 1].

    The sum of the finite :math:`H_0` deaths of the attention graph, by default over the
    count ``R`` of response tokens (section 4.2, :math:`d_{ij}(s)`):

    .. math:: \sum_{e \in \mathrm{MSF}(R, P)} w(e), \quad
      w(i, j) = 1 - \max(a_{ij}, 0) \text{ for } j < i

    Higher means a looser hold on the prompt, more likely hallucinated; 0.0 for an empty
    response.  Without ``normalize`` it lies in ``[0, R]`` and grows with the response.
    """

    normalize: bool = True

    def finish(
        self, packed: Float[Array, "half_response parents"], view: View
    ) -> Float[Array, ""]:
        valid = view.valid[view.prompt_length :]
        total = spanning_forest(unfolded(packed), valid)[1].sum()
        return total / jnp.maximum(valid.sum(), 1) if self.normalize else total


def mtop_div(attention: Any, prompt_length: SupportsIndex) -> Float[Array, "..."]:
    """MTop-Div of attention from any framework, per head: a summed weight in [0, R].

    It grows with the response: divide by ``R`` to compare answers, as :class:`MTopDiv`
    does.  Proposition 4.1 and equation (7) of the paper; the bound is equation (6).

    Args:
      attention: ``[..., seq, seq]``, causal; a tuple, one per layer, is stacked.
      prompt_length: tokens before the response, a static integer in ``1..seq-1``.

    Raises as :func:`~jaxhal.features.arrays.causal_attention` does.

    Example:
      The last token looks at the one before it (0.7) rather than the prompt (0.2), so
      it is attached there: ``(1 - 0.5) + (1 - 0.7)``.

      >>> attention = [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.2, 0.7, 0.1]]
      >>> print(f"{mtop_div(attention, prompt_length=1):.4f}")
      0.8000
    """
    return reduce(MTopDiv(normalize=False), attention, prompt_length)
