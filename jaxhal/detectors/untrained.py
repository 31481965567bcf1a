"""Methods that need no training, and what every method has to beat."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxhal.detectors.core import (
    Detector,
    ExampleView,
    Features,
    on_tokens,
    response_mean,
    token_mean,
)
from jaxhal.features import controls, uncertainty
from jaxhal.features.forest import SinkShare
from jaxhal.features.lookback import LookbackRatio
from jaxhal.features.topology import MaxPromptAttention, MTopDiv
from jaxhal.features.uncertainty import TokenEntropy, TokenLogprob
from jaxhal.types import Example, Reducer


def _head_mean(reducer: Reducer, name: str, summary: str, unit: str, section: str):
    """A number a head, mean of all of them."""
    return Detector(
        name=name,
        summary=f"{summary}, mean of all heads",
        unit=unit,
        reference=f"Bazarova et al. 2025 (TOHA), section {section}",
        reads=((name, reducer),),
        inputs=lambda f: f[name].mean((0, 2)),
    )


@functools.cache
def mtop_div() -> Detector:
    """MTop-Div averaged over every head: TOHA before it has chosen its heads."""
    return _head_mean(
        MTopDiv(),
        "mtop_div",
        "topological divergence of response and prompt",
        "mean edge weight, 0 to 1",
        "4",
    )


@functools.cache
def sink_share() -> Detector:
    """How much of the forest hangs from the prompt's first token, over every head."""
    return _head_mean(
        SinkShare(),
        "sink_share",
        "forest edges that end in the prompt's first token",
        "share of edges, 0 to 1",
        "5",
    )


@functools.cache
def lookback_ratio() -> Detector:
    """One minus the lookback ratio, averaged over heads and tokens, nothing trained."""
    return Detector(
        name="lookback_ratio",
        summary="attention on new tokens rather than the context, mean of all heads",
        unit="1 - mean lookback ratio, 0 to 1",
        reference="Chuang et al. 2024 (Lookback Lens), section 2.1",
        reads=(("lookback", LookbackRatio()),),
        inputs=lambda f: 1 - response_mean(f["lookback"], f).mean((0, 2)),
        tokens=lambda params, f: on_tokens(1 - f["lookback"].mean((0, 2)), f),
    )


@functools.cache
def max_prompt_attention() -> Detector:
    """One minus the largest attention to a prompt token: TOHA without the topology."""
    return Detector(
        name="max_prompt_attention",
        summary="1 - largest attention to one prompt token, mean of all heads",
        unit="0 to 1",
        reference="control for MTop-Div: the forest with every token on the prompt",
        reads=(("max_prompt", MaxPromptAttention()),),
        inputs=lambda f: jax.vmap(
            lambda largest, valid: controls.max_prompt_score(largest, valid).mean(),
            in_axes=(1, 0),
        )(f["max_prompt"], f["valid"]),
        tokens=lambda params, f: on_tokens(1 - f["max_prompt"].mean((0, 2)), f),
        control=True,
    )


# Nats of each token: the reducer, how they become one score, the sign that makes them a
# log probability, and the source.
_NATS = {
    "logprob": (
        TokenLogprob(),
        uncertainty.predictive_probability,
        1,
        "Manakul et al. 2023 (SelfCheckGPT), grey-box scores",
    ),
    "entropy": (
        TokenEntropy(),
        uncertainty.entropy_score,
        -1,
        "Fadeeva et al. 2024; maximum as in TOHA's baseline",
    ),
}


def _aggregate(
    name: str, feature: str, how: Literal["mean", "max"], summary: str
) -> Detector:
    reducer, score, sign, reference = _NATS[feature]
    return Detector(
        name=name,
        summary=summary,
        unit="nats, 0 and up",
        reference=reference,
        reads=((feature, reducer),),
        inputs=lambda f: jax.vmap(functools.partial(score, how=how))(
            f[feature], f["valid"]
        ),
        tokens=lambda params, f: on_tokens(-jnp.expm1(sign * f[feature]), f),
    )


@functools.cache
def predictive_probability() -> Detector:
    """Mean negative log probability of the response's tokens."""
    return _aggregate(
        "predictive_probability",
        "logprob",
        "mean",
        "mean -log p of the response tokens",
    )


@functools.cache
def predictive_probability_max() -> Detector:
    """Negative log probability of the least likely token."""
    return _aggregate(
        "predictive_probability_max",
        "logprob",
        "max",
        "-log p of the least likely token",
    )


@functools.cache
def token_entropy() -> Detector:
    """Largest entropy of a next-token distribution along the response."""
    return _aggregate("token_entropy", "entropy", "max", "largest next-token entropy")


@functools.cache
def token_entropy_mean() -> Detector:
    """Mean entropy of the next-token distributions along the response."""
    return _aggregate(
        "token_entropy_mean", "entropy", "mean", "mean next-token entropy"
    )


def _text_control(function: Callable[[Example], float], summary: str, unit: str):
    name = function.__name__
    return Detector(
        name=name,
        summary=summary,
        unit=unit,
        reference="text-only control",
        text=((name, function),),
        inputs=lambda f: f[name],
        control=True,
    )


@functools.cache
def response_length() -> Detector:
    """Number of words of the response."""
    return _text_control(
        controls.response_length, "number of words of the response", "words"
    )


@functools.cache
def novel_words() -> Detector:
    """Count of response words that the prompt does not have."""
    return _text_control(
        controls.novel_words, "response words absent from the prompt", "words"
    )


@functools.cache
def novel_word_share() -> Detector:
    """Share of response words that the prompt does not have."""
    return _text_control(
        controls.novel_word_share,
        "share of response words absent from the prompt",
        "0 to 1",
    )


def closed_book(example: Example) -> Example:
    """The same response after its question alone, or after a prompt without context.

    Raises:
      ValueError: when nothing but the context was given, or nothing but the question.
    """
    prompt, templated = example.question, False
    if not prompt and example.prompt is not None and example.context:
        prompt, templated = (
            example.prompt.replace(example.context, ""),
            example.templated,
        )
    if not prompt or not prompt.strip():
        raise ValueError(
            f"example {example.id!r} has no question apart from its context, which the "
            "context gain compares with; give 'question'"
        )
    if prompt.strip() == example.source_text.strip():
        raise ValueError(
            f"example {example.id!r} has no context apart from its question; leave out "
            "context_gain"
        )
    return Example(example.response, prompt=prompt, id=example.id, templated=templated)


def _gain(features: Features) -> Array:
    """What the context adds to the log probability of each response token, in nats."""
    return features["logprob"] - features["closed_logprob"]


def _context_gain(name: str, summary: str, unit: str, inputs: Any) -> Detector:
    return Detector(
        name=name,
        summary=summary,
        unit=unit,
        reference="pointwise mutual information of token and context; van der Poel et "
        "al. 2022 decode by it",
        reads=(("logprob", TokenLogprob()),),
        views=(ExampleView(closed_book, (("closed_logprob", TokenLogprob()),)),),
        inputs=inputs,
        tokens=lambda params, f: on_tokens(jax.nn.sigmoid(-_gain(f)), f),
    )


@functools.cache
def context_gain() -> Detector:
    """Minus the mean gain in log probability that a token owes to the context."""
    return _context_gain(
        "context_gain",
        "minus the mean log probability that the context adds to a token",
        "nats, any sign",
        lambda f: -token_mean(_gain(f), f["valid"]),
    )


@functools.cache
def context_gain_count() -> Detector:
    """Number of response tokens that the context makes less likely."""
    return _context_gain(
        "context_gain_count",
        "number of tokens that the context makes less likely",
        "tokens",
        lambda f: ((_gain(f) < 0) & f["valid"]).sum(-1).astype(jnp.float32),
    )
