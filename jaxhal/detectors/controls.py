"""What every method has to beat."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxhal.classifiers.selection import Chosen, choose_linear, chosen_logits
from jaxhal.detectors import base
from jaxhal.features import controls
from jaxhal.features.base import OfText
from jaxhal.features.topology import MaxPromptAttention
from jaxhal.types import Example


@base.factory
def max_prompt_attention() -> base.Detector:
    """One minus the largest attention to a prompt token: TOHA without the topology."""
    return base.Detector(
        "max_prompt_attention",
        "1 - largest attention to one prompt token, mean of all heads",
        "0 to 1",
        "control for MTop-Div: the forest with every token on the prompt",
        features=(("max_prompt", MaxPromptAttention()),),
        inputs=lambda f: base.response_mean(1 - f["max_prompt"], f).mean((0, 2)),
        tokens=lambda params, f: base.on_tokens(1 - f["max_prompt"].mean((0, 2)), f),
        control=True,
    )


@base.factory
def max_prompt_probe() -> base.Detector:
    """Logistic regression on the largest prompt attention of all heads."""
    return base.logistic(
        "max_prompt_probe",
        "logistic regression on the largest prompt attention of all heads",
        "comparison for toha_supervised: the same without topology",
        lambda f: base.flat_heads(base.response_mean(f["max_prompt"], f)),
        ("max_prompt", MaxPromptAttention()),
    )


def _text_control(
    function: Callable[[Example], float], summary: str, unit: str
) -> base.Detector:
    """A number that the texts alone give; nothing is trained."""
    name = function.__name__
    return base.Detector(
        *(name, summary, unit, "text-only control"),
        features=((name, OfText(function)),),
        inputs=lambda f: f[name],
        control=True,
    )


_ABSENT = "response words absent from the prompt"


@base.factory
def response_length() -> base.Detector:
    """Number of words of the response."""
    summary = "number of words of the response"
    return _text_control(controls.response_length, summary, "words")


@base.factory
def novel_words() -> base.Detector:
    """Number of response words that the prompt does not have."""
    return _text_control(controls.novel_words, _ABSENT, "words")


@base.factory
def novel_word_share() -> base.Detector:
    """Share of response words that the prompt does not have."""
    return _text_control(controls.novel_word_share, f"share of {_ABSENT}", "0 to 1")


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


def _fit_tfidf(counts: Any, targets: base.Targets) -> base.HeldOut:
    counts, weight = jnp.asarray(counts), jnp.asarray(targets.weight)
    holding = weight @ (counts > 0)
    idf = jnp.log((1 + weight.sum()) / (1 + holding)) + 1
    # Unit vectors are not standardised: a rare word would weigh as much as a common.
    probe, unseen = choose_linear(
        _weighted(counts, idf),
        targets.labels,
        targets.groups,
        targets.weight,
        strengths=(0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0),
        standardize=False,
    )
    return base.HeldOut(TfIdf(idf, probe), unseen)


@base.factory
def tfidf() -> base.Detector:
    """TF-IDF of the response's words and a logistic regression: text alone, trained."""
    return base.Detector(
        "tfidf",
        "logistic regression on the response's words (TF-IDF)",
        base.LOG_ODDS,
        "trained text-only control",
        features=(("word_counts", OfText(word_counts, ("buckets",))),),
        inputs=lambda f: f["word_counts"],
        decide=lambda params, counts: chosen_logits(
            params.probe, _weighted(counts, params.idf)
        ),
        fit=_fit_tfidf,
        control=True,
    )
