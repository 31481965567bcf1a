"""LRP4RAG: how strongly a response rests on its prompt, by layer-wise relevance.

The published settings were chosen on the folds they are reported for, without scaling,
and zeros in empty bins tell the classifier how long the answer is.  Here settings are
chosen inside the training part and empty bins repeat a value; ``published=True`` gives
what the released code did.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxhal.classifiers import lstm, perceptron, svm, trees
from jaxhal.classifiers.mlp import mlp_logits
from jaxhal.classifiers.nested import Tuned
from jaxhal.detectors.base import LOG_ODDS, Detector, Features, HeldOut, Info, Targets
from jaxhal.detectors.linear import early_parts
from jaxhal.features.base import Reducer
from jaxhal.features.relevance import profile_level, resample
from jaxhal.lrp import PromptRelevance, RelevanceMap, ResponseRelevance

_REFERENCE = "Hu et al. 2024 (LRP4RAG)"
# The paper's best length of R_response, and the one in the released code.
LENGTH, PUBLISHED_LENGTH = 220, 235
# What each profile is read as.
_READS: dict[str, tuple[str, Reducer]] = {
    "response": ("relevance", ResponseRelevance()),
    "prompt": ("prompt_relevance", PromptRelevance()),
}


def _read(of: str) -> tuple[str, Reducer]:
    if of not in _READS:
        raise ValueError(f"of is {of!r}; use 'response' or 'prompt'")
    return _READS[of]


def _named(name: str | None, usual: str, of: str) -> str:
    return name or (usual if of == "response" else f"{usual}_{of}")


def _profiles(features: Features, of: str) -> tuple[Array, Array]:
    """The profile of each answer, and where it has values."""
    profile = jnp.asarray(features[_read(of)[0]])
    if of == "prompt":  # in bins, of which none is empty
        return profile, jnp.ones(profile.shape, bool)
    return profile, jnp.asarray(features["valid"])


def _resampled(of: str, length: int, padding: str) -> Callable[[Features], Array]:
    def inputs(features: Features) -> Float[Array, "batch length"]:
        return jax.vmap(lambda x, v: resample(x, length, v, padding))(
            *_profiles(features, of)
        )

    return inputs


def _classifier(
    usual: str,
    kind: str,
    choose: Callable[..., tuple[Tuned, Any]],
    fit: Callable[..., Any],
    decide: Callable[[Any, Array], Array],
    length: int | None,
    published: bool,
    of: str,
    name: str | None,
) -> Detector:
    read = _read(of)
    if length is None:
        length = PUBLISHED_LENGTH if published else LENGTH

    def fit_nested(inputs: Any, targets: Targets) -> HeldOut:
        labels, groups, weight = targets.labels, targets.groups, targets.weight
        return HeldOut(*choose(inputs, labels, groups, weight))

    def fit_published(inputs: Any, targets: Targets) -> Any:
        return fit(inputs, targets.labels, targets.weight)

    how = "as released" if published else "setting chosen in training"
    return Detector(
        Info(
            _named(name, usual, of),
            f"{kind} on the relevance of {length} parts of the {of}, {how}",
            LOG_ODDS,
            f"{_REFERENCE}, table 2",
        ),
        features=(read,),
        inputs=_resampled(of, length, "zeros" if published else "last"),
        decide=decide if published else lambda tuned, x: decide(tuned.params, x),
        fit=fit_published if published else fit_nested,
    )


def _fit_svm(x: Any, labels: Any, weight: Any) -> svm.SVM:
    return svm.fit_svm(x, labels, weight, svm.PUBLISHED["C"], svm.PUBLISHED["gamma"])


@functools.cache
def lrp4rag_svm(
    length: int | None = None,
    published: bool = False,
    of: str = "response",
    name: str | None = None,
) -> Detector:
    """A support vector machine with a radial kernel on ``R_response`` or ``R_prompt``.

    Args:
      length: bins the profile is resampled to; 220, or 235 as released.
      published: C = 30 and gamma = 1 on unscaled profiles with zeros in empty bins.
      of: which profile; that of the ``"prompt"`` comes in 500 bins, none of them empty.
      name: what to call it beside another choice; its own ends in ``_prompt`` for that
        profile.

    Raises:
      ValueError: on another ``of``.
    """

    options = (length, published, of, name)
    choose, decide, kind = svm.choose_svm, svm.svm_logits, "support vector machine"
    return _classifier("lrp4rag_svm", kind, choose, _fit_svm, decide, *options)


@functools.cache
def lrp4rag_forest(
    length: int | None = None,
    published: bool = False,
    of: str = "response",
    name: str | None = None,
) -> Detector:
    """A random forest on ``R_response`` or ``R_prompt``.

    Args:
      length: bins the profile is resampled to; 220, or 235 as released.
      published: 200 trees of depth 3 on profiles with zeros in empty bins.
      of: which profile; that of the ``"prompt"`` comes in 500 bins, none of them empty.
      name: what to call it beside another choice; its own ends in ``_prompt`` for that
        profile.

    Raises:
      ValueError: on another ``of``.
    """
    options = (length, published, of, name)
    choose, fit, decide = trees.choose_forest, trees.fit_forest, trees.forest_logits
    return _classifier("lrp4rag_forest", "random forest", choose, fit, decide, *options)


@functools.cache
def lrp4rag_mlp(
    length: int | None = None,
    published: bool = False,
    of: str = "response",
    name: str | None = None,
) -> Detector:
    """A network with one hidden layer on ``R_response`` or ``R_prompt``.

    Args:
      length: bins the profile is resampled to; 220, or 235 as released.
      published: unscaled, on profiles with zeros in empty bins.
      of: which profile; that of the ``"prompt"`` comes in 500 bins, none of them empty.
      name: what to call it beside another choice; its own ends in ``_prompt`` for that
        profile.

    Raises:
      ValueError: on another ``of``.
    """
    options = (length, published, of, name)
    choose, fit = perceptron.choose_perceptron, perceptron.fit_perceptron
    kind = "one hidden layer"
    return _classifier("lrp4rag_mlp", kind, choose, fit, mlp_logits, *options)


@functools.cache
def lrp4rag_comb() -> Detector:
    """The published machine on empty bins alone: what zeros tell of the length.

    Relevance is replaced by 1, so a response of fewer tokens than bins leaves a comb,
    and a longer one nothing.  Whatever this ranks, ``lrp4rag_svm(published=True)`` can
    rank by length without relevance.
    """
    comb = jax.vmap(lambda v: resample(jnp.ones(v.shape), PUBLISHED_LENGTH, v, "zeros"))
    return Detector(
        Info(
            "lrp4rag_comb",
            f"the published machine on which of {PUBLISHED_LENGTH} bins are empty",
            LOG_ODDS,
            f"length leak of {_REFERENCE}",
        ),
        features=(),
        inputs=lambda features: comb(jnp.asarray(features["valid"])),
        decide=svm.svm_logits,
        fit=lambda x, targets: _fit_svm(x, targets.labels, targets.weight),
    )


class Series(NamedTuple):
    """``R*`` as a series over the response, its prompt bins as features."""

    relevance: Float[Array, "batch time features"]
    valid: Bool[Array, "batch time"]


@functools.cache
def lrp4rag_lstm(
    response_bins: int = 64, prompt_bins: int = 16, name: str = "lrp4rag_lstm"
) -> Detector:
    """A recurrent network that reads ``R*`` along the response.

    Args:
      response_bins: steps in time; the released code has 300.
      prompt_bins: features of a step; the released code has 800.  The fewer of the two
        is what ``R*`` costs in passes.
      name: what to call it beside another choice.
    """

    def inputs(features: Features) -> Series:
        relevance = jnp.asarray(features[feature])
        there = jnp.asarray(features["valid"]).any(-1, keepdims=True)
        return Series(relevance, jnp.broadcast_to(there, relevance.shape[:2]))

    def fit(inputs: Series, targets: Targets) -> Any:
        train, stop = early_parts(targets)
        series, y = jnp.asarray(inputs.relevance), jnp.asarray(targets.labels)
        return lstm.fit_lstm(targets.key, series, inputs.valid, y, train, stop)

    feature = f"relevance_{response_bins}x{prompt_bins}"
    whole = RelevanceMap(response_bins=response_bins, prompt_bins=prompt_bins)
    return Detector(
        Info(
            name,
            f"LSTM on {response_bins} x {prompt_bins} bins of relevance",
            LOG_ODDS,
            f"{_REFERENCE}, section 3.4",
        ),
        features=((feature, whole),),
        inputs=inputs,
        decide=lambda params, x: lstm.lstm_logits(params, x.relevance, x.valid),
        fit=fit,
    )


@functools.cache
def lrp4rag_threshold(of: str = "response", name: str | None = None) -> Detector:
    """The naive rule: a relevance profile that is low between its own extremes.

    What the threshold is compared with depends on the shape of the profile alone, see
    :func:`jaxhal.features.relevance.profile_level`.

    Args:
      of: which profile, that of the ``"response"`` or of the ``"prompt"``.
      name: what to call it beside another choice; its own ends in ``_prompt`` for that
        profile.

    Raises:
      ValueError: on another ``of``.
    """
    read = _read(of)
    return Detector(
        Info(
            _named(name, "lrp4rag_threshold", of),
            f"1 - mean of the {of}'s relevance between its extremes",
            "1 - mean relative relevance, 0 to 1",
            f"{_REFERENCE}, table 1",
        ),
        features=(read,),
        inputs=lambda features: 1 - jax.vmap(profile_level)(*_profiles(features, of)),
    )
