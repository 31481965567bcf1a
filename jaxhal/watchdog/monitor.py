"""Is a query beyond what an agent can answer?  Algorithm 1 of HalMit as one function.

References:
  Liu et al., 2025, section 3.2; see :mod:`jaxhal.watchdog`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxhal.features import semantic
from jaxhal.io.checks import one_of
from jaxhal.llm.endpoint import NoReply
from jaxhal.llm.entailment import Entailment, answering, both_ways
from jaxhal.watchdog.index import check_cosine, nearest, unit

#: Points that are looked at.
NEAREST = 3


@dataclasses.dataclass(frozen=True)
class Guard:
    """How a query is judged, static by value.

    Args:
      similarity: from which cosine on a query is near the bound, the paper's epsilon.
      gate: the third nearest point must be that near too.
      centroid: of the three, ``"weighted"`` by their cosines (equation 7) or their
        ``"mean"``.
      entropy: where a query is not near the bound, its semantic entropy must not exceed
        that of the ``"nearest"`` point (the text of section 3.2), or of all points
        (``"highest"``, Algorithm 1); ``None`` asks for no entropy.
    """

    similarity: float = 0.8
    gate: bool = True
    centroid: str = "weighted"
    entropy: str | None = "nearest"

    def __post_init__(self):
        check_cosine(similarity=self.similarity)
        if self.similarity < 0:
            raise ValueError(
                f"similarity is {self.similarity}; what is near has a cosine of at "
                "least 0"
            )
        one_of(("weighted", "mean"), centroid=self.centroid)
        one_of(("nearest", "highest", None), entropy=self.entropy)


#: Named ways to judge: the paper's text, its Algorithm 1, and the published code.
PRESETS = {
    "paper": Guard(),
    "algorithm": Guard(entropy="highest"),
    "repo": Guard(gate=False, centroid="mean", entropy=None),
}


class Decision(NamedTuple):
    """What is known of a query.

    Attributes:
      score: higher = more likely so; above 1 near the bound, up to 1 by entropy, the
        cosine with the centroid where no entropy counts.
      near: the query is near the bound, so its entropy does not matter.
      cosine: with the centroid; -1 where the three nearest do not count.
    """

    flagged: Bool[Array, ""]
    score: Float[Array, ""]
    near: Bool[Array, ""]
    cosine: Float[Array, ""]


@functools.partial(jax.jit, static_argnames="guard")
def decide(
    query: Float[Array, " width"],
    entropy: Float[Array, ""] | float,
    vectors: Float[Array, "points width"],
    cosines: Float[Array, " points"],
    entropies: Float[Array, " points"],
    highest: Float[Array, ""] | float,
    guard: Guard = PRESETS["paper"],
) -> Decision:
    r"""Judges a query by the points nearest to it; maps over queries with ``jax.vmap``.

    .. math:: C = \sum_i S_i v_i \Big/ \sum_i S_i, \qquad S_C = \cos(q, C)

    flagged where :math:`S_3 \ge \epsilon` and :math:`S_C \ge \epsilon`, or else where
    the entropy of the query exceeds that of the bound (Liu et al., 2025, equation 7 and
    Algorithm 1); the published code flags where :math:`S_C > \epsilon`.  The score,
    ours, is :math:`1 + S_C` near the bound, :math:`\sigma(H_q - H)` elsewhere.  With no
    point nothing is flagged.

    Vectors are those of the three nearest points, nearest first, at length 1 or 0, as
    the query; cosines and ``highest``, of all points' entropies, are ``-inf`` where
    there is none; entropies are in nats.
    """
    there = cosines > -jnp.inf
    safe = jnp.where(there, cosines, 0.0)
    weights = safe if guard.centroid == "weighted" else there.astype(jnp.float32)
    # The sum of weights is a length, which does not matter; its sign does.
    centroid = unit(jnp.sign(weights.sum()) * (weights @ vectors))
    cosine = jnp.clip(centroid @ query, -1.0, 1.0)
    counts = there[-1] if guard.gate else there.any()
    if guard.gate:
        counts &= cosines[-1] >= guard.similarity
    cosine = jnp.where(counts, cosine, -1.0)
    if guard.entropy is None:
        near = cosine > guard.similarity
        return Decision(near, cosine, near, cosine)
    near = counts & (cosine >= guard.similarity)
    bound = entropies[0] if guard.entropy == "nearest" else highest
    known = there[0]
    excess = jnp.where(known, entropy - jnp.where(known, bound, 0.0), 0.0)
    return Decision(
        flagged=near | (excess > 0),
        score=jnp.where(near, 1 + cosine, jax.nn.sigmoid(excess)),
        near=near,
        cosine=cosine,
    )


@functools.partial(jax.jit, static_argnames="guard")
def monitor(
    query: Any, entropy: Any, vectors: Any, entropies: Any, guard: Guard = Guard()
) -> Decision:
    """Algorithm 1 on a whole bound: finds the three nearest points, then decides.

    ``query: Float[width]``, ``vectors: Float[points width]`` of any length,
    ``entropies: Float[points]`` in nats.
    """
    vectors, query = jnp.asarray(vectors, jnp.float32), unit(query)
    entropies = jnp.asarray(entropies, jnp.float32)
    short = max(0, NEAREST - len(vectors))
    whole = unit(jnp.pad(vectors, [(0, short), (0, 0)]))
    cosines, rows = nearest(query[None], whole, len(vectors), NEAREST)
    found = jnp.pad(entropies, (0, short))[rows[0]]
    highest = jnp.max(entropies, initial=-jnp.inf)
    return decide(query, entropy, whole[rows[0]], cosines[0], found, highest, guard)


def known_entropies(
    queries: Sequence[str], answers: Sequence[Sequence[str]], entailment: Entailment
) -> list[tuple[float, str | None]]:
    """Discrete semantic entropy of each query's answers, in nats, or why there is none.

    Answers mean the same where each entails the other; not a number where none came.
    Where an endpoint has no reply of use, each query is looked at alone.

    References:
      Farquhar et al., Nature, 2024, discrete, as HalMit asks black boxes.
    """
    pairs = [*zip(queries, answers, strict=True)]
    said = [
        [answering(entailment, query, one) for one in some] for query, some in pairs
    ]
    try:
        both = both_ways(entailment, said)
    except NoReply as error:
        if len(queries) == 1:
            return [(np.nan, f"entailment is not known: {error}")]
        alone = (known_entropies([query], [some], entailment) for query, some in pairs)
        return [found for (found,) in alone]
    most = max(map(len, said), default=0)
    found: list[tuple[float, str | None]] = []
    for one in both:
        missing = most - len(one)
        padded = np.pad(one, [(0, missing), (0, missing), (0, 0)])
        entropy = _entropy(padded, np.arange(most) < len(one)) if len(one) else np.nan
        found.append((float(entropy), None))
    return found


@jax.jit
def _entropy(probabilities: Array, valid: Array) -> Float[Array, ""]:
    same = semantic.equivalence(jnp.asarray(probabilities), "strict")
    return semantic.semantic_entropy(semantic.cluster(same, valid), preset="discrete")
