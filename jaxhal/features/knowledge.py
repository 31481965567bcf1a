"""What does an answer rest on: the context, or what the model knows itself?

Sun et al., `ReDeEP: Detecting Hallucination in Retrieval-Augmented Generation via
Mechanistic Interpretability <https://arxiv.org/abs/2410.11414>`_, ICLR 2025.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from jaxhal.features.base import Attention, OfRows, Reducer
from jaxhal.features.uncertainty import Logits
from jaxhal.types import View


@dataclasses.dataclass(frozen=True)
class ExternalContext(Reducer):
    r"""How close each response token is to what a head attended to, in [-1, 1].

    The external context score, the cosine of two last hidden states:

    .. math:: E_t = \cos\Big(\frac{1}{|I_t|} \sum_{j \in I_t} x_j, \; x_t\Big)

    :math:`I_t` are the context tokens that the head attends to most, ``share`` of them
    (rounded down, at least one; all that are attended to alike).  As in the published
    code row t is the one that predicts the token.  0 without context.

    Args:
      share: a tenth, as published.
    """

    row = "predictor"
    values = ("response",)

    share: float = 0.1

    def __post_init__(self):
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share}; give one above 0 and at most 1")

    def rows(self, rows: Attention, view: View) -> UInt8[Array, "query bytes"]:
        """Which tokens are attended to most, a bit each."""
        length = view.prompt_length
        context = (view.context & view.valid)[:length]
        counts = np.maximum((np.arange(length + 1) * self.share).astype(int), 1)
        given = jnp.where(context, rows[:, :length].astype(jnp.float32), -1.0)
        least = _highest(given, jnp.asarray(counts)[context.sum()])
        return jnp.packbits(context & (given >= least[:, None]), axis=-1)

    def settle(
        self,
        kept: UInt8[Array, "response bytes"],
        hidden: Float[Array, "key width"],
        view: View,
    ) -> Float[Array, " response"]:
        hidden = hidden.astype(jnp.float32)
        chosen = jnp.unpackbits(kept, axis=-1, count=view.prompt_length)
        total = jnp.matmul(
            chosen.astype(jnp.float32),
            hidden[: view.prompt_length],
            precision=jax.lax.Precision.HIGHEST,
        )
        own = hidden[view.position]
        # Of the squares, for a root has no gradient at 0.
        squares = (total**2).sum(-1) * (own**2).sum(-1)
        return (total * own).sum(-1) / jnp.sqrt(jnp.maximum(squares, 1e-18))


def _highest(
    values: Float[Array, "rows keys"], rank: Int[Array, ""]
) -> Float[Array, " rows"]:
    """Of each row the value of a rank from the highest, 0 where that is below.

    Numbers that are not negative are in the order of their bits, found one by one.  A
    row is summed over and not sorted, so it stays on its device.
    """
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)

    def narrower(step: Array, found: Array) -> Array:
        tried = found | jnp.left_shift(1, 30 - step)
        enough = (bits >= tried[:, None]).sum(-1) >= rank
        return jnp.where(enough, tried, found)

    found = jax.lax.fori_loop(0, 31, narrower, jnp.zeros(len(values), jnp.int32))
    return jax.lax.bitcast_convert_type(found, jnp.float32)


@dataclasses.dataclass(frozen=True)
class ParametricKnowledge(Reducer):
    r"""How much the feed-forward part of each layer changes what comes next, in nats.

    The parametric knowledge score, the Jensen-Shannon divergence of two next-token
    distributions, those of the residual stream before and after that part, in
    ``[0, log 2]``:

    .. math:: P_t = \tfrac12 \mathrm{KL}(p \| m) + \tfrac12 \mathrm{KL}(q \| m), \quad
      m = \tfrac12 (p + q)

    The published code takes the divergences of m from p and q, of no bound, and their
    mean over the vocabulary.  Each costs two products with the whole vocabulary a layer
    and token, several times the rest of the pass of a small model.
    """

    reads = "lens"
    row = "predictor"

    def rows(self, rows: tuple[Logits, Logits], view: View) -> OfRows:
        p, q = (jax.nn.log_softmax(one.astype(jnp.float32)) for one in rows)
        middle = jnp.logaddexp(p, q) - jnp.log(2.0)
        divergence = jnp.exp(p) * (p - middle) + jnp.exp(q) * (q - middle)
        return jnp.maximum(0.5 * divergence.sum(-1), 0.0)
