"""Detectors that ask the reader again: do its other answers agree?

They sample answers to the same prompt, so they cost as much as writing them.  What
decides whether two texts say the same is named in every summary.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxhal.detectors.bulk import Measure, Settings, cached, draw_of
from jaxhal.detectors.core import Detector, Features, on_tokens
from jaxhal.detectors.measures import (
    SUPPORT,
    Embedded,
    Likelihood,
    Meanings,
    Ngrams,
    Places,
    SentenceSupport,
    Unmatched,
)
from jaxhal.features import consistency, semantic
from jaxhal.features import eigenscore as spread
from jaxhal.features.hidden import HiddenStates
from jaxhal.generation import Sampling
from jaxhal.llm.endpoint import Endpoint, endpoint_of
from jaxhal.llm.entailment import Entailment, YesNo, named
from jaxhal.reading.samples import Draw

_PLACES = Places()
_SELFCHECK = "Manakul et al., SelfCheckGPT, EMNLP 2023"
_PUBLISHED = {
    "nature": Draw(n=10, max_new_tokens=50),
    "discrete": Draw(n=10, max_new_tokens=50),
    "toha": Draw(n=20, max_new_tokens=256),
    "iclr": Draw(n=10, max_new_tokens=256, sampling=Sampling(temperature=0.5)),
    "selfcheck": Draw(n=20, max_new_tokens=256),
    "official": Draw(
        n=10,
        max_new_tokens=256,
        sampling=Sampling(temperature=0.5, top_p=0.99, top_k=10),
    ),
    "lm_polygraph": Draw(n=10, max_new_tokens=256),
}


@cached
def semantic_entropy(
    preset: str = "nature",
    entailment: str | Entailment = "similarity",
    draw: Settings = None,
    name: str = "semantic_entropy",
) -> Detector:
    """Entropy over the meanings of sampled answers.

    As published, all presets but ``"toha"`` compare samples as answers to the question,
    and Nature's two let a later cluster take over what an earlier one holds.  The code
    of ``"iclr"`` compares all pairs; here each sample is compared with the first of
    each cluster.  An answer none of whose samples holds text is in error.

    Args:
      preset: of :data:`jaxhal.features.semantic.PRESETS`.
      entailment: what decides that two answers mean the same: ``"similarity"``,
        ``"nli:SOURCE"``, ``"reader"``, ``"endpoint:MODEL@URL"``, or any
        :class:`jaxhal.llm.entailment.Entailment`.
      draw: how to sample, as :func:`jaxhal.detectors.bulk.draw_of` takes it.
      name: what to call it beside another choice.

    Raises:
      ValueError: on another preset, entailment or setting.

    References:
      Farquhar et al., Nature, 2024; Kuhn et al., ICLR 2023; Bazarova et al., TOHA,
      2025, appendix E.
    """
    if preset not in semantic.PRESETS:
        raise ValueError(
            f"preset is {preset!r}; use one of {', '.join(semantic.PRESETS)}"
        )
    how = draw_of(draw, _PUBLISHED[preset])
    rule = semantic.PRESETS[preset].rule
    asked, nature = preset != "toha", preset in ("nature", "discrete")
    meanings = Meanings(how, entailment, rule, asked, published=nature)
    score = functools.partial(semantic.semantic_entropy, preset=preset)
    measures: tuple[Measure, ...] = (meanings,)
    if semantic.PRESETS[preset].weighing != "number":
        measures += (Likelihood(how, per_token=True, end=not nature),)

    def inputs(features: Features) -> Any:
        return jax.vmap(score)(*(features[one.feature] for one in measures))

    return _detector(
        name,
        f"entropy over meanings of {how}; {named(entailment)}",
        "nats, 0 to log n" if preset != "iclr" else "nats, shifted",
        "Farquhar et al., Nature 2024; Kuhn et al., ICLR 2023",
        inputs,
        measures,
    )


semantic_entropy_discrete = functools.partial(
    semantic_entropy, "discrete", name="semantic_entropy_discrete"
)


@cached
def predictive_entropy(
    normalized: bool = False, draw: Settings = None, name: str = "predictive_entropy"
) -> Detector:
    """Mean negative log probability of sampled answers, ``normalized`` by length.

    References:
      Malinin and Gales, ICLR 2021.
    """
    how = draw_of(draw, _PUBLISHED["nature"])
    likely = Likelihood(how, per_token=normalized)
    return _detector(
        name,
        f"entropy of {how}" + (", per token" if normalized else ""),
        "nats a token" if normalized else "nats",
        "Malinin and Gales, ICLR 2021",
        # A sample's whole log probability, or its mean over tokens, stands for them.
        lambda f: jax.vmap(semantic.predictive_entropy)(f[likely.feature][..., None]),
        (likely,),
    )


length_normalized_entropy = functools.partial(
    predictive_entropy, True, name="length_normalized_entropy"
)


@cached
def eigenscore(
    preset: str = "official",
    alpha: float | None = None,
    base: float | None = None,
    per_feature: bool | None = None,
    tokens: Literal["last", "before_last", "mean"] | None = None,
    draw: Settings = None,
    name: str = "eigenscore",
) -> Detector:
    """INSIDE: how far apart the samples lie in the reader's middle layer.

    Fewer samples that hold text give higher scores; an answer with less than two is in
    error.

    Args:
      preset: of :data:`jaxhal.features.eigenscore.PRESETS`; ``"official"`` reads the
        last word of a sample, the others the end of the sequence.
      alpha, base, per_feature: instead of the preset's, as
        :class:`jaxhal.features.eigenscore.Preset` has them.
      tokens: which token stands for a sample instead, as :class:`jaxhal.HiddenStates`
        has it.
      draw: how to sample, as :func:`jaxhal.detectors.bulk.draw_of` takes it.
      name: what to call it beside another choice.

    Raises:
      ValueError: on another preset, setting or token, or fewer than two samples.

    References:
      Chen et al., INSIDE, ICLR 2024.
    """
    form = spread.form_of(preset, alpha=alpha, base=base, per_feature=per_feature)
    how = draw_of(draw, _PUBLISHED[preset])
    if how.n < 2:
        raise ValueError(f"n is {how.n}; samples lie apart from two on")
    if tokens is None:
        tokens = "before_last" if preset == "official" else "last"
    states = Embedded(how, tokens)
    HiddenStates(tokens=tokens)  # says what is wrong before anything is sampled

    def inputs(features: Features) -> Any:
        found = features[states.feature]
        score = functools.partial(spread.eigenscore, preset=form)
        return jax.vmap(score)(found["values"], found["valid"])

    return _detector(
        name,
        f"spread of {how} in the middle layer, {preset} preset",
        "mean log eigenvalue",
        "Chen et al., INSIDE, ICLR 2024",
        inputs,
        (states,),
    )


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
      draw: how to sample, as :func:`jaxhal.detectors.bulk.draw_of` takes it.
      how: of its sentences, what an answer scores: the ``"mean"`` or the ``"max"``.
      name: what to call it beside another choice.

    References:
      Manakul et al., SelfCheckGPT, 2023, section 5.4.
    """
    drawn = draw_of(draw, _PUBLISHED["selfcheck"])
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
    drawn = draw_of(draw, _PUBLISHED["selfcheck"])
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
      draw: how to sample, as :func:`jaxhal.detectors.bulk.draw_of` takes it.
      name: what to call it beside another choice.

    References:
      Manakul et al., SelfCheckGPT, 2023, section 5.3.
    """
    drawn = draw_of(draw, _PUBLISHED["selfcheck"])
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
        :func:`jaxhal.models.encoders.encoding.load_encoder` takes it.
      layer: as :func:`jaxhal.models.encoders.encoding.token_states` takes it.
      baseline: F1 of unrelated sentences, which becomes 0 as F1 is rescaled; all scores
        grow by ``1 / (1 - baseline)``, so no ranking changes.
      draw: how to sample, as :func:`jaxhal.detectors.bulk.draw_of` takes it.
      how: of its sentences, what an answer scores: the ``"mean"`` or the ``"max"``.
      name: what to call it beside another choice.

    Raises:
      ValueError: on a baseline of 1 or more, or a setting of ``draw`` that is unknown.

    References:
      Manakul et al., SelfCheckGPT, 2023, section 5.1; Zhang et al., BERTScore, 2020.
    """
    if not baseline < 1:
        raise ValueError(f"baseline is {baseline}; give a number below 1")
    drawn = draw_of(draw, _PUBLISHED["selfcheck"])
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
    measures = (measure, _PLACES)
    detector = _detector(name, summary, unit, reference, inputs, measures)
    return detector._replace(tokens=tokens)


def _detector(
    name: str,
    summary: str,
    unit: str,
    reference: str,
    inputs: Any,
    measures: tuple[Measure, ...],
) -> Detector:
    return Detector(name, summary, unit, reference, inputs, measures=measures)
