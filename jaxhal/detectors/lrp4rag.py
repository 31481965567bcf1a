"""LRP4RAG: how strongly a response rests on its prompt, by layer-wise relevance.

The published settings were chosen on the folds they are reported for, without scaling,
and zeros in empty bins tell the classifier how long the answer is.  Here settings are
chosen inside the training part and empty bins repeat a value; ``published=True`` takes
the released settings and zeros.  Relevance is that of the logit itself, where the
released code divides it by the square of the temperature.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxhal.classifiers import lstm, mlp, svm, trees
from jaxhal.classifiers.selection import choose
from jaxhal.detectors import base
from jaxhal.features.base import Reducer
from jaxhal.features.relevance import profile_level, resample
from jaxhal.io.checks import at_least, one_of
from jaxhal.lrp import PromptRelevance, RelevanceMap, ResponseRelevance

_REFERENCE = "Hu et al. 2024 (LRP4RAG)"
_MARGIN = "distance from the machine's boundary"
# The paper's best length of R_response, and the one in the released code.
LENGTH, PUBLISHED_LENGTH = 220, 235
# What each profile is read as.
_READS: dict[str, tuple[str, Reducer]] = {
    "response": ("relevance", ResponseRelevance()),
    "prompt": ("prompt_relevance", PromptRelevance()),
}


# Of a classifier: in words, how it is fitted as published, and with a setting of the
# grid, how it decides, and the grid.
_CLASSIFIERS: dict[str, tuple[str, Any, Any, Any, Mapping[str, Sequence[Any]]]] = {
    "svm": (
        "support vector machine",
        svm.fit_svm,
        functools.partial(svm.fit_svm, standardize=True),
        svm.svm_logits,
        svm.GRID,
    ),
    "forest": (
        "random forest",
        trees.fit_forest,
        trees.fit_forest,
        trees.forest_logits,
        trees.GRID,
    ),
    "mlp": (
        "one hidden layer",
        mlp.fit_perceptron,
        functools.partial(mlp.fit_perceptron, standardize=True),
        mlp.mlp_logits,
        mlp.GRID,
    ),
}


def _read(of: str) -> tuple[str, Reducer]:
    one_of(_READS, of=of)
    return _READS[of]


def _named(usual: str, of: str) -> str:
    return usual if of == "response" else f"{usual}_{of}"


def _profiles(features: base.Features, of: str) -> tuple[Array, Array]:
    """The profile of each answer, and where it has values."""
    profile = jnp.asarray(features[_read(of)[0]])
    if of == "prompt":  # in bins, of which none is empty
        return profile, jnp.ones(profile.shape, bool)
    return profile, jnp.asarray(features["valid"])


@base.factory
def _on_profile(
    classifier: Literal["svm", "forest", "mlp"],
    length: int | None = None,
    published: bool = False,
    of: str = "response",
) -> base.Detector:
    """A classifier of scikit-learn on ``R_response`` or ``R_prompt``.

    Args:
      length: bins the profile is resampled to; 220, or 235 as released.
      published: the released settings (C = 30 and gamma = 1; 200 trees of depth 3) on
        unscaled profiles with zeros in empty bins.
      of: which profile; that of the ``"prompt"`` comes in 500 bins, none of them empty,
        and its detector's name ends in ``_prompt``.
    """
    at_least(1, length=length)
    kind, fit_published, fit_chosen, decide, grid = _CLASSIFIERS[classifier]
    read = _read(of)
    if length is None:
        length = PUBLISHED_LENGTH if published else LENGTH
    padding = "zeros" if published else "last"

    def inputs(features: base.Features) -> Float[Array, "batch length"]:
        binned = jax.vmap(lambda x, valid: resample(x, length, valid, padding))
        return binned(*_profiles(features, of))

    def fit(inputs: Any, targets: base.Targets) -> Any:
        labels, groups, weight = targets.labels, targets.groups, targets.weight
        if published:
            return fit_published(inputs, labels, weight)
        how = (fit_chosen, decide, grid)
        return base.HeldOut(*choose(*how, inputs, labels, groups, weight))

    how = "as released" if published else "setting chosen in training"
    return base.Detector(
        _named(f"lrp4rag_{classifier}", of),
        f"{kind} on the relevance of {length} parts of the {of}, {how}",
        _MARGIN if classifier == "svm" else base.LOG_ODDS,
        f"{_REFERENCE}, table 2",
        features=(read,),
        inputs=inputs,
        decide=decide if published else lambda tuned, x: decide(tuned.params, x),
        fit=fit,
    )


lrp4rag_svm = functools.partial(_on_profile, "svm")
lrp4rag_forest = functools.partial(_on_profile, "forest")
lrp4rag_mlp = functools.partial(_on_profile, "mlp")


@base.factory
def lrp4rag_comb() -> base.Detector:
    """The published machine on empty bins alone: what zeros tell of the length.

    Relevance is replaced by 1, so a response of fewer tokens than bins leaves a comb,
    and a longer one nothing.  Whatever this ranks, ``lrp4rag_svm(published=True)`` can
    rank by length without relevance.
    """
    comb = jax.vmap(lambda v: resample(jnp.ones(v.shape), PUBLISHED_LENGTH, v, "zeros"))
    return base.Detector(
        "lrp4rag_comb",
        f"the published machine on which of {PUBLISHED_LENGTH} bins are empty",
        _MARGIN,
        f"length leak of {_REFERENCE}",
        features=(),
        inputs=lambda features: comb(jnp.asarray(features["valid"])),
        decide=svm.svm_logits,
        fit=lambda x, targets: svm.fit_svm(x, targets.labels, targets.weight),
    )


@base.factory
def lrp4rag_lstm(response_bins: int = 64, prompt_bins: int = 16) -> base.Detector:
    """A recurrent network that reads ``R*`` along the response.

    ``response_bins`` are steps in time, ``prompt_bins`` features of a step, in the
    released code 300 and 800.  The fewer of the two is what ``R*`` costs in passes.
    """
    at_least(1, response_bins=response_bins, prompt_bins=prompt_bins)

    def inputs(features: base.Features) -> tuple[Array, Array]:
        relevance = jnp.asarray(features[feature])
        there = jnp.asarray(features["valid"]).any(-1, keepdims=True)
        return relevance, jnp.broadcast_to(there, relevance.shape[:2])

    feature = f"relevance_{response_bins}x{prompt_bins}"
    whole = RelevanceMap(response_bins=response_bins, prompt_bins=prompt_bins)
    return base.Detector(
        "lrp4rag_lstm",
        f"LSTM on {response_bins} x {prompt_bins} bins of relevance",
        base.LOG_ODDS,
        f"{_REFERENCE}, section 3.4",
        features=((feature, whole),),
        inputs=inputs,
        decide=lambda params, x: lstm.lstm_logits(params, *x),
        fit=lambda x, targets: lstm.fit_lstm(*base.early_stopping(targets, *x)),
    )


@base.factory
def lrp4rag_threshold(of: str = "response") -> base.Detector:
    """The naive rule: a relevance profile that is low between its own extremes.

    It looks at the shape of the profile alone:
    :func:`jaxhal.features.relevance.profile_level`.  ``of`` is that of
    :func:`lrp4rag_svm`.
    """
    return base.Detector(
        _named("lrp4rag_threshold", of),
        f"1 - mean of the {of}'s relevance between its extremes",
        "1 - mean relative relevance, 0 to 1",
        f"{_REFERENCE}, table 1",
        features=(_read(of),),
        inputs=lambda features: 1 - jax.vmap(profile_level)(*_profiles(features, of)),
    )
