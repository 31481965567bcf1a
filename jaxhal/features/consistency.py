"""Do the sampled answers support this one?  (SelfCheckGPT)

Each score but that of n-grams is written for one sentence of the answer; map it over
sentences with ``jax.vmap``.  Higher means less support, more likely hallucinated.

Manakul et al., `SelfCheckGPT: Zero-Resource Black-Box Hallucination Detection for
Generative Large Language Models <https://arxiv.org/abs/2303.08896>`_, 2023.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxhal.features.samples import present


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
    heads = [answer.strip().lower() for answer in answers]
    scores = [
        next((score for word, score in values.items() if head.startswith(word)), 0.5)
        for head in heads
    ]
    return sum(scores) / len(scores)


class NgramScores(NamedTuple):
    """Surprise of an answer's n-grams in nats, higher = more likely hallucinated."""

    mean: Float[np.ndarray, " sentences"]
    max: Float[np.ndarray, " sentences"]
    document_mean: float  # over all n-grams of the answer
    document_max: float  # mean over sentences of `max`


def tokenize(text: str) -> list[str]:
    r"""Lower-case words and punctuation marks, ``\w+|[^\w\s]``."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def selfcheck_ngram(
    sentences: Sequence[str], samples: Sequence[str], n: int = 1, smoothing: float = 0.0
) -> NgramScores:
    r"""Surprise of an answer under an n-gram model of it and the samples (section 5.3).

    .. math:: -\log p(g) = -\log \frac{c(g) + k}{N + k V}

    where :math:`c` counts n-grams in the answer **and** the samples, :math:`N` is their
    sum and :math:`V` the number of different ones and one for the unknown.  As the
    answer is counted too, every score is finite, at least 0 and, unsmoothed, at most
    :math:`\log N` nats.  An n-gram does not cross the start of a text, which is padded:
    for ``n > 1``, give the samples sentence by sentence.

    Example:
      >>> scores = selfcheck_ngram(["Paris.", "Rome."], ["Paris.", "Paris."])
      >>> scores.max.round(3), round(scores.document_max, 3)
      (array([0.981, 2.079]), 1.53)
    """
    if isinstance(sentences, str) or isinstance(samples, str):
        raise ValueError("got one text; pass lists of sentences and of samples")
    if not len(sentences) or not len(samples):
        raise ValueError(
            f"got {len(sentences)} sentences and {len(samples)} samples; at least one "
            "of each is needed"
        )
    if n < 1 or not 0 <= smoothing < math.inf:
        raise ValueError(
            f"n is {n} and smoothing {smoothing}; n must be at least 1, smoothing at "
            "least 0 and finite"
        )
    answer = [_ngrams(text, n) for text in sentences]
    if not all(answer):
        raise ValueError(f"sentence {answer.index([])} has no token; leave it out")
    counts = Counter(gram for text in answer for gram in text)
    counts.update(gram for text in samples for gram in _ngrams(text, n))
    total = counts.total() + smoothing * (len(counts) + 1)
    surprise = [
        np.log(total) - np.log([counts[gram] + smoothing for gram in text])
        for text in answer
    ]
    worst = np.array([values.max() for values in surprise])
    return NgramScores(
        mean=np.array([values.mean() for values in surprise]),
        max=worst,
        document_mean=float(np.concatenate(surprise).mean()),
        document_max=float(worst.mean()),
    )


def _ngrams(text: str, n: int) -> list[tuple[str, ...]]:
    """As many n-grams as tokens: the first ones are padded on the left."""
    tokens = [""] * (n - 1) + tokenize(text)
    return list(zip(*(tokens[i:] for i in range(n)), strict=False))


class BERTScore(NamedTuple):
    """How much of a candidate the reference holds, the other way round, and both."""

    precision: Float[Array, ""]
    recall: Float[Array, ""]
    f1: Float[Array, ""]


def bertscore(
    candidate: Any,
    reference: Any,
    candidate_valid: Any = None,
    reference_valid: Any = None,
    baseline: tuple[float, float, float] | None = None,
) -> BERTScore:
    r"""Likeness of two sentences by their tokens' embeddings, in [-1, 1].

    .. math:: P = \frac{1}{|c|} \sum_i \max_j \cos(c_i, r_j), \quad
      R = \frac{1}{|r|} \sum_j \max_i \cos(c_i, r_j), \quad F_1 = \frac{2 P R}{P + R}

    without weights for rare tokens (Zhang et al., `BERTScore
    <https://arxiv.org/abs/1904.09675>`_, 2020, section 3).  F1 is 0 unless both are
    positive, and everything is 0 for a sentence without tokens, inside a trace.

    Args:
      candidate, reference: ``Float[tokens width]``; computed in float32 or wider.
      candidate_valid, reference_valid: False on padding and special tokens.
      baseline: three numbers ``b`` below 1, the precision, recall and F1 of unrelated
        sentences; each score ``x`` becomes ``(x - b) / (1 - b)``, and may be negative.
    """
    candidate, candidate_valid = present("candidate", candidate, candidate_valid)
    reference, reference_valid = present("reference", reference, reference_valid)
    if candidate.ndim != 2 or candidate.shape[1:] != reference.shape[1:]:
        raise ValueError(
            f"candidate has shape {candidate.shape}, reference {reference.shape}; pass "
            "[tokens, width] of one width"
        )
    if baseline is not None and not all(b < 1 for b in baseline):
        raise ValueError(f"baseline is {baseline}; each number must be below 1")
    cosine = jnp.matmul(
        _unit(candidate), _unit(reference).T, precision=lax.Precision.HIGHEST
    )
    cosine = jnp.where(candidate_valid[:, None] & reference_valid, cosine, -jnp.inf)
    precision = _mean(_finite(cosine.max(1)), candidate_valid)
    recall = _mean(_finite(cosine.max(0)), reference_valid)
    positive = (precision > 0) & (recall > 0)
    total = jnp.where(positive, precision + recall, 1.0)
    f1 = jnp.where(positive, 2 * precision * recall / total, 0.0)
    score = BERTScore(precision, recall, f1)
    if baseline is None:
        return score
    return BERTScore(*((x - b) / (1 - b) for x, b in zip(score, baseline, strict=True)))


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
    if how not in ("mean", "max"):
        raise ValueError(f"how is {how!r}; use 'mean' or 'max'")
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
