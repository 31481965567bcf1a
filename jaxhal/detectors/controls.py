"""A control that is trained: which words does a made-up answer use?"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxhal.classifiers.selection import Chosen, choose_held_out, chosen_logits
from jaxhal.detectors.core import LOG_ODDS, Detector, Known, Targets
from jaxhal.types import Example

BUCKETS = 4096


def word_counts(example: Example) -> Float[np.ndarray, " buckets"]:
    """How often each hashed word and pair of words stands in the response."""
    from sklearn.feature_extraction.text import HashingVectorizer

    options: Any = {"norm": None, "alternate_sign": False}
    hashing = HashingVectorizer(n_features=BUCKETS, ngram_range=(1, 2), **options)
    counts: Any = hashing.transform([example.response])
    return counts.toarray()[0].astype(np.float32)


class TfIdf(NamedTuple):
    """Weights of rare words, and the probe on weighted counts."""

    idf: Float[Any, " buckets"]
    probe: Chosen


def _weighted(counts: Array, idf: Array) -> Float[Array, "samples 1 buckets"]:
    weighted = counts * idf
    norm = jnp.linalg.norm(weighted, axis=-1, keepdims=True)
    return (weighted / jnp.where(norm > 0, norm, 1.0))[:, None]


def _fit_held_out(
    counts: Any, targets: Targets, known: Known
) -> tuple[TfIdf, Float[np.ndarray, " samples"]]:
    del known
    counts, weight = jnp.asarray(counts), jnp.asarray(targets.weight)
    holding = weight @ (counts > 0)
    idf = jnp.log((1 + weight.sum()) / (1 + holding)) + 1
    # Unit vectors are not standardised: a rare word would weigh as much as a common.
    probe, unseen = choose_held_out(
        _weighted(counts, idf),
        targets.labels,
        targets.groups,
        targets.weight,
        strengths=(0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0),
        standardize=False,
    )
    return TfIdf(idf, probe), unseen


@functools.cache
def tfidf() -> Detector:
    """TF-IDF of the response's words and a logistic regression: text alone, trained."""
    return Detector(
        name="tfidf",
        summary="logistic regression on the response's words (TF-IDF)",
        unit=LOG_ODDS,
        reference="trained text-only control",
        text=(("word_counts", word_counts),),
        inputs=lambda f: f["word_counts"],
        decide=lambda params, counts: chosen_logits(
            params.probe, _weighted(counts, params.idf)
        ),
        fit=lambda counts, targets: _fit_held_out(counts, targets, {})[0],
        fit_held_out=_fit_held_out,
        control=True,
    )
