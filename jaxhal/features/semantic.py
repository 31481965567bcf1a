"""Do the sampled answers mean the same?  (semantic entropy)

Answers that entail each other form a cluster; the entropy over clusters says how unsure
the model is of what it means, whatever words it finds for that.

Kuhn et al., `Semantic Uncertainty <https://arxiv.org/abs/2302.09664>`_, 2023; Farquhar
et al., `Detecting hallucinations in large language models using semantic entropy
<https://doi.org/10.1038/s41586-024-07421-0>`_, Nature, 2024.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxhal.features.samples import present
from jaxhal.io.checks import one_of


class Preset(NamedTuple):
    """One published form of semantic entropy.

    ``rule`` says which answers mean the same (:func:`equivalence`), ``weighing`` what
    a cluster counts: the ``"likelihood"`` or ``"number"`` of its answers, as a share
    of all, or the ``"shifted"`` log of a likelihood that is no share of anything.
    """

    rule: Literal["strict", "non_strict", "no_contradiction"]
    weighing: Literal["likelihood", "number", "shifted"]


PRESETS = {
    "nature": Preset("strict", "likelihood"),
    "discrete": Preset("strict", "number"),
    "toha": Preset("non_strict", "likelihood"),
    "iclr": Preset("no_contradiction", "shifted"),
}
_CONTRADICTION, _NEUTRAL, _ENTAILMENT = range(3)
_SHIFT = 5.0


def equivalence(probabilities: Any, rule: str) -> Bool[Array, "samples samples"]:
    """Which answers mean the same, from the likeliest class of either direction.

    Args:
      probabilities: ``Float[samples samples 3]``, that premise ``i`` and hypothesis
        ``j`` are a contradiction, neutral or an entailment; the diagonal is not used.
      rule: ``"strict"``, both directions entail; ``"non_strict"``, neither contradicts
        and not both are neutral; ``"no_contradiction"``, neither contradicts.
    """
    values = jnp.asarray(probabilities)
    samples = len(values) if values.ndim else 0
    if values.shape != (samples, samples, 3):
        raise ValueError(
            f"probabilities have shape {values.shape}; pass [samples, samples, 3] of "
            "contradiction, neutral and entailment"
        )
    same = jnp.eye(samples, dtype=bool)
    values, _ = present("probabilities", jnp.where(same[..., None], 0, values))
    there = jnp.argmax(values, -1)
    back = there.T
    contradicts = (there == _CONTRADICTION) | (back == _CONTRADICTION)
    rules = {
        "strict": (there == _ENTAILMENT) & (back == _ENTAILMENT),
        "non_strict": ~contradicts & ~((there == _NEUTRAL) & (back == _NEUTRAL)),
        "no_contradiction": ~contradicts,
    }
    one_of(rules, rule=rule)
    return rules[rule] | same


def cluster(
    equivalent: Any, valid: Any = None, published: bool = False
) -> Int[Array, " samples"]:
    """Number of each answer's cluster, counted from 0 in order of appearance.

    Answers are taken in turn and compared with the first member of each cluster only,
    as meaning the same is not transitive between real answers.  One joins the first
    cluster it fits, or founds the next; as ``published`` the last one it fits, where a
    new cluster takes over what an earlier one already held.

    Args:
      equivalent: ``Bool[samples samples]``; entry ``(i, j)`` with ``i < j`` is read.
      valid: ``Bool[samples]``, False on a missing answer, whose cluster is -1.
      published: as in the published code.

    Example:
      The last answer fits both clusters.

      >>> same = jnp.array([[1, 0, 1], [0, 1, 1], [1, 1, 1]], bool)
      >>> cluster(same).tolist(), cluster(same, published=True).tolist()
      ([0, 1, 0], [0, 1, 1])
    """
    same, valid = present("equivalent", equivalent, valid)
    samples = len(valid)
    if same.shape != (samples, samples):
        raise ValueError(f"equivalent has shape {same.shape}; pass [samples, samples]")
    fits = jnp.triu(same > 0, 1)

    def found(founder, j):
        return founder.at[j].set(valid[j] & ~jnp.any(founder & fits[:, j])), None

    founder, _ = lax.scan(found, jnp.zeros(samples, bool), jnp.arange(samples))
    takes = (fits & founder[:, None]) | jnp.diag(founder)
    if published:
        first = samples - 1 - jnp.argmax(takes[::-1], axis=0)
    else:
        first = jnp.argmax(takes, axis=0)
    return jnp.where(valid, jnp.cumsum(founder)[first] - 1, -1)


def semantic_entropy(
    clusters: Int[Array, " samples"], loglik: Any = None, preset: str = "nature"
) -> Float[Array, ""]:
    r"""Entropy over the meanings of the sampled answers, in nats; higher = less sure.

    .. math:: -\sum_c p_c \log p_c, \quad
      p_c = \sum_{i \in c} e^{l_i} \Big/ \sum_i e^{l_i}

    in ``[0, log samples]``; ``"discrete"`` counts answers: :math:`p_c = |c| / n`.
    ``"iclr"`` (Kuhn et al. 2023, equation 4) is a mean without weights and bounds,

    .. math:: -\frac{1}{C} \sum_c \Big(\log \sum_{i \in c} e^{l_i} - 5\Big)

    whose constant is part of the published code, for no stated reason.

    Args:
      clusters: ``[samples]`` of :func:`cluster`, -1 for a missing answer.
      loglik: ``Float[samples]``, mean log probability of an answer's tokens, its end
        among them but for ``"nature"``; ``"discrete"`` needs none.
      preset: a key of :data:`PRESETS`.
    """
    one_of(PRESETS, preset=preset)
    weighing = PRESETS[preset].weighing
    if weighing == "number":
        loglik = jnp.zeros(clusters.shape)
    elif loglik is None:
        raise ValueError(f"preset {preset!r} weighs answers; give their loglik")
    values, valid = present("loglik", loglik, clusters >= 0)
    member = clusters == jnp.arange(len(clusters))[:, None]
    used = member.any(1)
    # An empty sum would be -inf, so an unused cluster sums anything and is dropped.
    mass = jax.nn.logsumexp(values, axis=1, where=member | ~used[:, None])
    if weighing == "shifted":
        surprise = jnp.where(used, _SHIFT - mass, 0.0)
        return surprise.sum() / jnp.maximum(used.sum(), 1)
    share = mass - jax.nn.logsumexp(values, where=valid)
    entropy = -jnp.sum(jnp.where(used, jnp.exp(share) * share, 0.0))
    return jnp.maximum(entropy, 0.0)


def two_means(values: Float[np.ndarray, " values"]) -> float:
    r"""Where the higher of two groups of numbers begins.

    Of all splits the one of least squared deviation from the two means (Kossen et al.
    2024, section 4, whose code tries a hundred even ones):

    .. math:: \sum_{H < \gamma} (H - \bar H_{<\gamma})^2
      + \sum_{H \ge \gamma} (H - \bar H_{\ge\gamma})^2

    Raises ValueError where all are alike.

    Example:
      >>> two_means(np.array([0.1, 0.9, 0.0, 1.0, 0.2]))
      0.9
    """

    def error(start: float) -> float:
        parts = values[values < start], values[values >= start]
        return sum(float(((part - part.mean()) ** 2).sum()) for part in parts)

    starts = np.unique(values)[1:].tolist()
    if not starts:
        raise ValueError(f"all {len(values)} values are {values[0]}, and have no split")
    return min(starts, key=error)
