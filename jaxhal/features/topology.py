"""How far does the answer's attention graph hang from the prompt?  (TOHA)

Take the tokens of prompt and response as vertices and ``1 - attention`` as edges.
Edges inside the prompt weigh nothing, so the prompt is one vertex, the root, and the
minimum spanning forest that attaches ``R`` response tokens to it is the minimum
spanning tree of ``R + 1`` vertices.
"""

import dataclasses
import functools
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxhal.features.arrays import causal_attention, static_int
from jaxhal.features.base import Reducer
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

    Example:
      >>> parent, weight = spanning_forest(
      ...     jnp.array([[0.5, 0.0, 0.0], [0.2, 0.75, 0.0]]), jnp.array([True, True])
      ... )
      >>> parent.tolist(), weight.tolist()
      ([0, 1], [0.5, 0.25])
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


@functools.partial(jax.jit, static_argnames="prompt_length")
def _mtop_div(
    attention: Float[Array, "*lead seq seq"], prompt_length: int
) -> Float[Array, "*lead"]:
    response = attention[..., prompt_length:, :]
    root = response[..., :prompt_length].max(-1, keepdims=True)
    similarity = jnp.concatenate([root, response[..., prompt_length:]], -1)
    valid = jnp.ones(response.shape[-2], bool)
    forest = jnp.vectorize(spanning_forest, signature="(r,p),(r)->(r),(r)")
    return forest(similarity, valid)[1].sum(-1)


def mtop_div(attention: Any, prompt_length: SupportsIndex) -> Float[Array, "..."]:
    r"""MTop-Div of response and prompt per head, a summed edge weight in ``[0, R]``.

    The sum of the finite :math:`H_0` deaths of the attention graph whose edges inside
    the prompt weigh zero, which is the weight of the minimum spanning forest that
    attaches the response to the prompt:

    .. math:: \sum_{e \in \mathrm{MSF}(R, P)} w(e), \quad
      w(i, j) = 1 - \max(a_{ij}, 0) \text{ for } j < i

    Higher means a looser hold on the prompt, more likely hallucinated.  It grows with
    the response: divide by ``R`` to compare answers, as :class:`MTopDiv` does.

    Args:
      attention: ``[..., seq, seq]`` causal attention of any framework and any leading
        dimensions; a tuple of them, one per layer, is stacked.
      prompt_length: tokens before the response, a static integer in ``1..seq-1``.

    Returns:
      ``Float[...]`` in float32, one number per leading index.

    Raises:
      TypeError: when ``prompt_length`` is not a static integer.
      ValueError: on shapes, lengths or values :func:`causal_attention` refuses.

    Example:
      The last token looks at the one before it (0.7) rather than the prompt (0.2), so
      it is attached there: ``(1 - 0.5) + (1 - 0.7)``.

      >>> attention = [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.2, 0.7, 0.1]]
      >>> print(f"{mtop_div(attention, prompt_length=1):.4f}")
      0.8000

    References:
      Bazarova et al., `Hallucination Detection in LLMs via Topological Divergence on
      Attention Graphs <https://arxiv.org/abs/2504.10063>`_, 2025, Proposition 4.1 and
      equation (7); the bound is equation (6).
    """
    attention = causal_attention(attention, prompt_length)
    return _mtop_div(attention, static_int("prompt_length", prompt_length))


@dataclasses.dataclass(frozen=True)
class MTopDiv(Reducer):
    """MTop-Div per head: mean weight of the edges that attach the response, in [0, 1].

    The same number as :func:`mtop_div`, divided by the count of response tokens; 0.0
    for an empty response.  It needs all response rows, so it cannot ride along while
    decoding.

    Args:
      normalize: divide by the count; without it the score grows with the response.

    Example:
      >>> MTopDiv().rowwise
      False

    References:
      Bazarova et al., 2025, section 4.2, :math:`d_{ij}(s)`.
    """

    normalize: bool = True

    def rows(
        self, rows: Float[Array, "query key"], view: View
    ) -> Float[Array, "query parents"]:
        root = MaxPromptAttention().rows(rows, view)
        return jnp.concatenate([root[:, None], rows[:, view.prompt_length :]], -1)

    def finish(
        self, rows: Float[Array, "response parents"], view: View
    ) -> Float[Array, ""]:
        valid = view.valid[view.prompt_length :]
        total = spanning_forest(rows, valid)[1].sum()
        return total / jnp.maximum(valid.sum(), 1) if self.normalize else total


@dataclasses.dataclass(frozen=True)
class MaxPromptAttention(Reducer):
    """Largest attention of each response token to one prompt token, in [0, 1].

    ``1 -`` its mean over the response is the control that :func:`mtop_div` has to
    beat: it is the weight of the forest in which every token hangs from the prompt.

    Example:
      >>> MaxPromptAttention().rowwise
      True
    """

    def rows(
        self, rows: Float[Array, "query key"], view: View
    ) -> Float[Array, " query"]:
        prompt = slice(view.prompt_length)
        return jnp.where(view.valid[prompt], rows[:, prompt], 0.0).max(-1)
