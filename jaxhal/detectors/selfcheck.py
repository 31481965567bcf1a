"""SelfCheckGPT: do sampled answers support the sentences of the answer?

References:
  Manakul et al., `SelfCheckGPT <https://arxiv.org/abs/2303.08896>`_, EMNLP 2023.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxhal.detectors.base import Detector, Features, Info, measured, on_tokens
from jaxhal.detectors.sentences import (
    SUPPORT,
    Ngrams,
    Places,
    SentenceSupport,
    Unmatched,
)
from jaxhal.detectors.settings import Settings, cached, draw_of
from jaxhal.features import consistency
from jaxhal.llm.endpoint import Endpoint, endpoint_of
from jaxhal.llm.entailment import Entailment, YesNo, named
from jaxhal.reading.bulk import Measure
from jaxhal.reading.samples import Draw

_PUBLISHED = Draw(n=20, max_new_tokens=256)

_PLACES = Places()
_SELFCHECK = "Manakul et al., SelfCheckGPT, EMNLP 2023"


@cached
def selfcheck_nli(
    entailment: str | Entailment = "similarity",
    draw: Settings = None,
    how: Literal["mean", "max"] = "mean",
    name: str = "selfcheck_nli",
) -> Detector:
    """SelfCheckGPT: how much the samples contradict the answer, sentence by sentence.

    Args:
      entailment: as :func:`semantic_entropy` takes it; the published model is
        ``"nli:potsawee/deberta-v3-large-mnli"``.
      draw: how to sample, as :func:`jaxhal.detectors.settings.draw_of` takes it.
      how: of its sentences, what an answer scores: the ``"mean"`` or the ``"max"``.
      name: what to call it beside another choice.

    References:
      Manakul et al., SelfCheckGPT, 2023, section 5.4.
    """
    drawn = draw_of(draw, _PUBLISHED)
    support = SentenceSupport(entailment, drawn, "published")
    summary = f"contradiction by {drawn}; {named(entailment)}"
    return _over_sentences(name, summary, "0 to 1", _SELFCHECK, support, how)


def selfcheck_prompt(
    endpoint: str | None = None,
    model: str | None = None,
    draw: Settings = None,
    how: Literal["mean", "max"] = "mean",
    name: str = "selfcheck_prompt",
) -> Detector:
    """SelfCheckGPT: a model is asked whether each sample supports each sentence.

    The reader by its odds of Yes and No; a model behind an OpenAI-compatible endpoint,
    as in the published code, by what its reply begins with (the question is put in
    other words):
    :func:`jaxhal.features.consistency.selfcheck_prompt`.

    Args:
      endpoint, model: as :func:`jaxhal.detectors.detection_prompt` takes them.
      draw, how, name: as :func:`selfcheck_nli` takes them.

    Raises:
      ValueError: when only one of ``endpoint`` and ``model`` is given, or they name
        nothing.

    References:
      Manakul et al., SelfCheckGPT, 2023, section 5.5.
    """
    return _selfcheck_prompt(endpoint_of(endpoint, model), draw, how, name)


@cached
def _selfcheck_prompt(
    there: Endpoint | None, draw: Settings, how: Literal["mean", "max"], name: str
) -> Detector:
    drawn = draw_of(draw, _PUBLISHED)
    judge = "reader" if there is None else YesNo(there, SUPPORT)
    support = SentenceSupport(judge, drawn, "ordinary")
    who = "the reader" if there is None else there.name
    summary = f"{who} asked whether each of {drawn} supports a sentence"
    return _over_sentences(name, summary, "0 to 1", _SELFCHECK, support, how)


@cached
def selfcheck_ngram(
    n: int = 1,
    over: Literal["mean", "max"] = "max",
    draw: Settings = None,
    name: str = "selfcheck_ngram",
) -> Detector:
    """SelfCheckGPT: surprise of the answer's words under the samples.

    Args:
      n: words in an n-gram.
      over: the mean of all the answer's n-grams, or, averaged over its sentences, the
        least likely one of each.
      draw: how to sample, as :func:`jaxhal.detectors.settings.draw_of` takes it.
      name: what to call it beside another choice.

    References:
      Manakul et al., SelfCheckGPT, 2023, section 5.3.
    """
    drawn = draw_of(draw, _PUBLISHED)
    surprise = Ngrams(drawn, n, over)
    summary = f"surprise of words under {drawn}"
    return _over_sentences(
        *(name, summary, "nats", _SELFCHECK, surprise, "mean"),
        to_share=lambda nats: -jnp.expm1(-nats),
    )


@cached
def selfcheck_bertscore(
    encoder: str = "all-minilm-l6-v2",
    layer: int | None = None,
    baseline: float = 0.0,
    draw: Settings = None,
    how: Literal["mean", "max"] = "mean",
    name: str = "selfcheck_bertscore",
) -> Detector:
    """SelfCheckGPT: how far the answer's sentences are from those of the samples.

    The published code takes RoBERTa large (``"FacebookAI/roberta-large"``), its layer
    17 and, rescaled, the baseline 0.83122575.

    Args:
      encoder: whose token embeddings are compared, as
        :func:`jaxhal.models.encoders.load_encoder` takes it.
      layer: as :func:`jaxhal.models.encoders.encoding.token_states` takes it.
      baseline: F1 of unrelated sentences, which becomes 0 as F1 is rescaled; all scores
        grow by ``1 / (1 - baseline)``, so no ranking changes.
      draw: how to sample, as :func:`jaxhal.detectors.settings.draw_of` takes it.
      how: of its sentences, what an answer scores: the ``"mean"`` or the ``"max"``.
      name: what to call it beside another choice.

    Raises:
      ValueError: on a baseline of 1 or more, or a setting of ``draw`` that is unknown.

    References:
      Manakul et al., SelfCheckGPT, 2023, section 5.1; Zhang et al., BERTScore, 2020.
    """
    if not baseline < 1:
        raise ValueError(f"baseline is {baseline}; give a number below 1")
    drawn = draw_of(draw, _PUBLISHED)
    measure = Unmatched(encoder, layer, baseline, drawn)
    where = "its last layer" if layer is None else f"layer {layer}"
    summary = f"BERTScore's distance from {drawn}; {where} of {encoder}"
    return _over_sentences(name, summary, "1 - F1", _SELFCHECK, measure, how)


@cached
def nli_context(
    entailment: str | Entailment = "similarity",
    how: Literal["mean", "max"] = "mean",
    name: str = "nli_context",
) -> Detector:
    """How little the source text supports the answer, sentence by sentence.

    That is 1 minus the probability that a sentence follows from it.  Nothing is
    sampled.  Arguments are those of :func:`selfcheck_nli`.

    References:
      Baseline of Chuang et al., Lookback Lens, 2024.
    """
    support = SentenceSupport(entailment, None, "ordinary")
    summary = f"sentences that the source does not support; {named(entailment)}"
    reference = "baseline of Chuang et al., Lookback Lens, EMNLP 2024"
    return _over_sentences(name, summary, "0 to 1", reference, support, how)


def _over_sentences(
    name: str,
    summary: str,
    unit: str,
    reference: str,
    measure: Measure,
    how: Literal["mean", "max"],
    to_share: Callable[[Any], Any] = lambda values: values,
) -> Detector:
    """Of an answer from a measure of its sentences; each token has its sentence's.

    A token's score is cut to [0, 1]; ``to_share`` brings other units there.
    """

    def inputs(features: Features) -> Any:
        found = features[measure.feature]
        score = functools.partial(consistency.passage_score, how=how)
        weight = {"weight": found["weight"]} if "weight" in found else {}
        return jax.vmap(score)(found["values"], found["valid"], **weight)

    def tokens(params: Any, features: Features) -> Any:
        del params
        values = jnp.clip(to_share(features[measure.feature]["values"]), 0.0, 1.0)
        # As long as the longest of all answers, a batch as the longest of its own.
        length = features["valid"].shape[1]
        place = features[_PLACES.feature][:, :length]
        missing = length - place.shape[1]
        place = jnp.pad(place, [(0, 0), (0, missing)], constant_values=-1)
        scores = jnp.take_along_axis(values, jnp.maximum(place, 0), 1)
        return on_tokens(jnp.where(place >= 0, scores, 0.0), features)

    summary = f"{summary}, the worst sentence" if how == "max" else summary
    return Detector(
        Info(name, summary, unit, reference),
        measured(measure, _PLACES),
        inputs,
        tokens=tokens,
    )
