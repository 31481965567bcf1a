"""How unsure an agent is of what it means, from its answers alone."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxhal.features import semantic
from jaxhal.llm.endpoint import NoReply
from jaxhal.llm.entailment import Entailment, answering, both_ways


def semantic_entropies(
    queries: Sequence[str], answers: Sequence[Sequence[str]], entailment: Entailment
) -> Float[np.ndarray, " queries"]:
    """Discrete semantic entropy of each query's answers, in nats; higher = less sure.

    Answers mean the same where each entails the other.  No probabilities are needed, so
    any agent can be looked at.

    It is not a number where no answer came.  What of a query the entailment sees says
    :func:`jaxhal.llm.entailment.answering`.

    References:
      Farquhar et al., Nature, 2024, discrete; chosen here because HalMit asks black
      boxes, whose likelihoods its published code reads nevertheless.
    """
    said = [
        [answering(entailment, query, text) for text in some]
        for query, some in zip(queries, answers, strict=True)
    ]
    most = max((len(some) for some in said), default=0)
    found = np.full(len(said), np.nan)
    for row, probabilities in enumerate(both_ways(entailment, said)):
        count = len(probabilities)
        if count:
            missing = most - count
            padded = np.pad(probabilities, [(0, missing), (0, missing), (0, 0)])
            found[row] = _entropy(padded, np.arange(most) < count)
    return found


def known_entropies(
    queries: Sequence[str], answers: Sequence[Sequence[str]], entailment: Entailment
) -> list[tuple[float, str | None]]:
    """:func:`semantic_entropies`, and why one is not known.

    Where an endpoint that is asked about entailment has no reply of use, each query is
    looked at alone, so that the error is that of one.
    """
    try:
        found = semantic_entropies(queries, answers, entailment)
        return [(float(one), None) for one in found]
    except NoReply as error:
        if len(queries) == 1:
            return [(np.nan, f"entailment is not known: {error}")]
    return [
        known_entropies([query], [some], entailment)[0]
        for query, some in zip(queries, answers, strict=True)
    ]


@jax.jit
def _entropy(probabilities: Array, valid: Array) -> Float[Array, ""]:
    same = semantic.equivalence(jnp.asarray(probabilities), "strict")
    return semantic.semantic_entropy(semantic.cluster(same, valid), preset="discrete")
