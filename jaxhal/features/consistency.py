"""Do the sampled answers support this one?  (SelfCheckGPT)

Each score but that of n-grams is written for one sentence of the answer; map it over
sentences with ``jax.vmap``.  Higher means less support, more likely hallucinated.

Manakul et al., `SelfCheckGPT: Zero-Resource Black-Box Hallucination Detection for
Generative Large Language Models <https://arxiv.org/abs/2303.08896>`_, 2023.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxhal.features.samples import present
from jaxhal.io.checks import at_least, one_of


def selfcheck_nli(probabilities: Any, valid: Any = None) -> Float[Array, ""]:
    r"""Mean probability that the samples contradict a sentence (section 5.4).

    .. math:: \frac{1}{n} \sum_{i=1}^n
      \frac{P_i(\text{contradiction})}
      {P_i(\text{contradiction}) + P_i(\text{entailment})}

    of ``Float[samples 3]``: contradiction, neutral and entailment for the sentence as
    the premise and each sample as the hypothesis.  A sample that is neutral for certain
    counts 1/2; no sample, inside a trace, is 0.0.
    """
    values, valid = present("probabilities", probabilities, valid)
    if values.ndim != 2 or values.shape[1] != 3:
        raise ValueError(
            f"probabilities have shape {values.shape}; pass [samples, 3] of "
            "contradiction, neutral and entailment"
        )
    contradiction, entailment = values[:, 0], values[:, 2]
    both = contradiction + entailment
    score = jnp.where(both > 0, contradiction / jnp.where(both > 0, both, 1.0), 0.5)
    return _mean(score, valid)


def selfcheck_prompt(answers: Sequence[str]) -> float:
    """Share of samples that a judge says do not support a sentence (section 5.5).

    An answer of the judge that starts with "yes" counts 0, with "no" 1, whatever the
    case and also in "not" or "none", and any other 1/2.

    Example:
      >>> selfcheck_prompt(["Yes.", "No, it is not.", "I cannot tell", "no"])
      0.625
    """
    if isinstance(answers, str) or not len(answers):
        raise ValueError(f"answers are {answers!r}; pass one text for each sample")
    values = {"yes": 0.0, "no": 1.0}
    scores = [
        next((values[word] for word in values if head.startswith(word)), 0.5)
        for head in (answer.strip().lower() for answer in answers)
    ]
    return sum(scores) / len(scores)


def tokenize(text: str) -> list[str]:
    r"""Lower-case words and punctuation marks, ``\w+|[^\w\s]``."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def selfcheck_ngram(
    sentences: Sequence[str], samples: Sequence[str], n: int = 1
) -> list[Float[np.ndarray, " ngrams"]]:
    r"""Surprise of every n-gram of each sentence, in nats (section 5.3).

    .. math:: -\log p(g) = -\log \frac{c(g)}{N}

    where :math:`c` counts n-grams in the answer **and** the samples, and :math:`N` is
    their sum, so that every score lies between 0 and :math:`\log N`.  An n-gram does
    not cross the start of a text, which is padded: for ``n > 1``, give the samples
    sentence by sentence.

    Example:
      >>> [one.round(3) for one in selfcheck_ngram(["Paris", "Rome"], ["Paris"])]
      [array([0.405]), array([1.099])]
    """
    if isinstance(sentences, str) or isinstance(samples, str):
        raise ValueError("got one text; pass lists of sentences and of samples")
    if not len(sentences) or not len(samples):
        raise ValueError(
            f"got {len(sentences)} sentences and {len(samples)} samples; at least one "
            "of each is needed"
        )
    at_least(1, n=n)
    answer = [_ngrams(text, n) for text in sentences]
    if not all(answer):
        raise ValueError(f"sentence {answer.index([])} has no token; leave it out")
    counts = Counter(gram for text in answer for gram in text)
    counts.update(gram for text in samples for gram in _ngrams(text, n))
    total = np.log(counts.total())
    return [total - np.log([counts[gram] for gram in text]) for text in answer]


def _ngrams(text: str, n: int) -> list[tuple[str, ...]]:
    """As many n-grams as tokens: the first ones are padded on the left."""
    tokens = [""] * (n - 1) + tokenize(text)
    return list(zip(*(tokens[i:] for i in range(n)), strict=False))


def bertscore(
    candidate: Any,
    reference: Any,
    candidate_valid: Any = None,
    reference_valid: Any = None,
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    r"""Precision, recall and F1 of two sentences by tokens' embeddings, in [-1, 1].

    .. math:: P = \frac{1}{|c|} \sum_i \max_j \cos(c_i, r_j), \quad
      R = \frac{1}{|r|} \sum_j \max_i \cos(c_i, r_j), \quad F_1 = \frac{2 P R}{P + R}

    without weights for rare tokens (Zhang et al., `BERTScore
    <https://arxiv.org/abs/1904.09675>`_, 2020, section 3).  F1 is 0 unless both are
    positive, and everything is 0 for a sentence without tokens, inside a trace.

    Args:
      candidate, reference: ``Float[tokens width]``; computed in float32 or wider.
      candidate_valid, reference_valid: False on padding and special tokens.
    """
    candidate, candidate_valid = present("candidate", candidate, candidate_valid)
    reference, reference_valid = present("reference", reference, reference_valid)
    if candidate.ndim != 2 or candidate.shape[1:] != reference.shape[1:]:
        raise ValueError(
            f"candidate has shape {candidate.shape}, reference {reference.shape}; pass "
            "[tokens, width] of one width"
        )
    cosine = jnp.matmul(
        _unit(candidate), _unit(reference).T, precision=lax.Precision.HIGHEST
    )
    cosine = jnp.where(candidate_valid[:, None] & reference_valid, cosine, -jnp.inf)
    precision = _mean(_finite(cosine.max(1)), candidate_valid)
    recall = _mean(_finite(cosine.max(0)), reference_valid)
    positive = (precision > 0) & (recall > 0)
    total = jnp.where(positive, precision + recall, 1.0)
    return precision, recall, jnp.where(positive, 2 * precision * recall / total, 0.0)


def selfcheck_bertscore(f1: Any, valid: Any = None) -> Float[Array, ""]:
    r"""How far the samples are from a sentence, 0 when each holds it (equation 1).

    .. math:: 1 - \frac{1}{n} \sum_{i=1}^n \max_k F_1(s, s_{ik})

    of ``Float[samples others]``, :func:`bertscore` with each sentence of each sample,
    over the samples that have a valid one, long enough to say anything (the paper drops
    those of three tokens or fewer); none at all, inside a trace, is 0.0.
    """
    values, valid = present("f1", f1, valid, axes=2)
    best = _finite(jnp.where(valid, values, -jnp.inf).max(1))
    usable = valid.any(1)
    return jnp.where(usable.any(), 1.0 - _mean(best, usable), 0.0)


def passage_score(
    scores: Any, valid: Any = None, how: str = "mean", weight: Any = None
) -> Float[Array, ""]:
    """Score of a passage from those of its sentences, in their unit.

    The ``"mean"``, to which sentences count alike or by ``weight``, or the ``"max"``,
    the worst sentence; 0.0 of none, inside a trace.
    """
    one_of(("mean", "max"), how=how)
    values, valid = present("scores", scores, valid)
    if how == "mean":
        if weight is None:
            return _mean(values, valid)
        weight = jnp.where(valid, jnp.asarray(weight, values.dtype), 0.0)
        total = weight.sum()
        return (weight * values).sum() / jnp.where(total > 0, total, 1.0)
    return _finite(jnp.where(valid, values, -jnp.inf).max())


def _mean(values: Array, valid: Array) -> Array:
    """Mean over what is valid; 0.0 when nothing is."""
    return jnp.where(valid, values, 0.0).sum() / jnp.maximum(valid.sum(), 1)


def _finite(best: Array) -> Array:
    """A maximum over nothing as 0."""
    return jnp.where(best > -jnp.inf, best, 0.0)


def _unit(vectors: Array) -> Array:
    """Vectors of length 1; those of zeros stay so."""
    square = jnp.sum(vectors * vectors, -1, keepdims=True)
    return vectors / jnp.sqrt(jnp.where(square > 0, square, 1.0))
