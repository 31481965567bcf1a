"""The catalogue: a named method = what it reads + how it scores + where it is from.

A detector is a tuple of pure functions, like ``optax.GradientTransformation``: ``init``
makes its parameters (``()`` when there is nothing to fit) and ``score`` turns
features into one number a response, **higher = more likely hallucinated**.  Several
detectors share one reading pass: :func:`reads` merges what they ask for.
"""

import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxhal.features import controls, uncertainty
from jaxhal.features.lookback import LookbackRatio
from jaxhal.features.topology import MaxPromptAttention, MTopDiv
from jaxhal.features.uncertainty import TokenEntropy, TokenLogprob
from jaxhal.types import Example, Reducer

# name -> array; "valid" (Bool[batch response]) is always there.
Features = Mapping[str, Any]


def _no_params(key: Any, features: Features) -> tuple[()]:
    del key, features
    return ()


class Detector(NamedTuple):
    """One method, as pure functions.

    Attributes:
      name: its catalogue name.
      summary: what it measures, in one line.
      unit: of the score, with its range.
      reference: where it comes from.
      score: ``(params, features) -> Float[batch]``.
      tokens: ``(params, features) -> Float[batch response]`` in [0, 1], or ``None`` for
        a method that only judges whole responses.
      reads: reducers by feature name; equal names mean equal reducers everywhere.
      text: numbers computed from the example's text, by feature name.
      control: True for what a method has to beat to be worth its cost.
      init: ``(key, features) -> params``.
    """

    name: str
    summary: str
    unit: str
    reference: str
    score: Callable[[Any, Features], Array]
    tokens: Callable[[Any, Features], Array] | None = None
    reads: tuple[tuple[str, Reducer], ...] = ()
    text: tuple[tuple[str, Callable[[Example], float]], ...] = ()
    control: bool = False
    init: Callable[[Any, Features], Any] = _no_params


def response_mean(
    values: Float[Array, "*lead batch heads response"], features: Features
) -> Float[Array, "*lead batch heads"]:
    """Mean over the real tokens of each response; 0 for an empty one."""
    valid = features["valid"][:, None]
    count = jnp.maximum(valid.sum(-1), 1)
    return jnp.where(valid, values, 0.0).sum(-1) / count


@functools.cache
def mtop_div() -> Detector:
    """MTop-Div averaged over every head: TOHA before it has chosen its heads."""
    return Detector(
        name="mtop_div",
        summary="topological divergence of response and prompt, mean of all heads",
        unit="mean edge weight, 0 to 1",
        reference="Bazarova et al. 2025 (TOHA), section 4",
        reads=(("mtop_div", MTopDiv()),),
        score=lambda params, f: f["mtop_div"].mean((0, 2)),
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
        score=lambda params, f: 1 - response_mean(f["lookback"], f).mean((0, 2)),
        tokens=lambda params, f: 1 - f["lookback"].mean((0, 2)),
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
        score=lambda params, f: jax.vmap(
            lambda largest, valid: controls.max_prompt_score(largest, valid).mean(),
            in_axes=(1, 0),
        )(f["max_prompt"], f["valid"]),
        tokens=lambda params, f: 1 - f["max_prompt"].mean((0, 2)),
        control=True,
    )


def _surprise(params: Any, features: Features) -> Array:
    return -jnp.expm1(features["logprob"])


def _perplexity(name: str, how: Any, summary: str) -> Detector:
    return Detector(
        name=name,
        summary=summary,
        unit="nats, 0 and up",
        reference="Manakul et al. 2023 (SelfCheckGPT), grey-box scores",
        reads=(("logprob", TokenLogprob()),),
        score=lambda params, f: jax.vmap(
            lambda logprob, valid: uncertainty.predictive_probability(
                logprob, valid, how
            )
        )(f["logprob"], f["valid"]),
        tokens=_surprise,
    )


@functools.cache
def predictive_probability() -> Detector:
    """Mean negative log probability of the response's tokens."""
    return _perplexity(
        "predictive_probability", "mean", "mean -log p of the response tokens"
    )


@functools.cache
def predictive_probability_max() -> Detector:
    """Negative log probability of the least likely token."""
    return _perplexity(
        "predictive_probability_max", "max", "-log p of the least likely token"
    )


def _entropy(name: str, how: Any, summary: str) -> Detector:
    return Detector(
        name=name,
        summary=summary,
        unit="nats, 0 and up",
        reference="Fadeeva et al. 2024; maximum as in TOHA's baseline",
        reads=(("entropy", TokenEntropy()),),
        score=lambda params, f: jax.vmap(
            lambda entropy, valid: uncertainty.entropy_score(entropy, valid, how)
        )(f["entropy"], f["valid"]),
        tokens=lambda params, f: -jnp.expm1(-f["entropy"]),
    )


@functools.cache
def token_entropy() -> Detector:
    """Largest entropy of a next-token distribution along the response."""
    return _entropy("token_entropy", "max", "largest next-token entropy")


@functools.cache
def token_entropy_mean() -> Detector:
    """Mean entropy of the next-token distributions along the response."""
    return _entropy("token_entropy_mean", "mean", "mean next-token entropy")


def _text_control(function: Callable[[Example], float], summary: str, unit: str):
    name = function.__name__
    return Detector(
        name=name,
        summary=summary,
        unit=unit,
        reference="text-only control",
        text=((name, function),),
        score=lambda params, f: f[name],
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


CATALOGUE: dict[str, Callable[[], Detector]] = {
    "mtop_div": mtop_div,
    "lookback_ratio": lookback_ratio,
    "predictive_probability": predictive_probability,
    "predictive_probability_max": predictive_probability_max,
    "token_entropy": token_entropy,
    "token_entropy_mean": token_entropy_mean,
    "max_prompt_attention": max_prompt_attention,
    "response_length": response_length,
    "novel_words": novel_words,
    "novel_word_share": novel_word_share,
}


def get(names: Sequence[str] | None = None) -> list[Detector]:
    """Detectors by catalogue name; all of them for ``None``.

    Raises:
      ValueError: on an unknown name, with the nearest known one.

    Example:
      >>> [detector.name for detector in get(["mtop_div", "novel_words"])]
      ['mtop_div', 'novel_words']
    """
    chosen = []
    for name in CATALOGUE if names is None else names:
        if name not in CATALOGUE:
            near = difflib.get_close_matches(name, CATALOGUE, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"unknown detector {name!r}{hint} (known: {', '.join(CATALOGUE)})"
            )
        chosen.append(CATALOGUE[name]())
    return chosen


def reads(detectors: Sequence[Detector]) -> dict[str, Reducer]:
    """Everything the detectors read, each feature once.

    Raises:
      ValueError: when two detectors give one feature name to different reducers.

    Example:
      >>> sorted(reads(get(["predictive_probability", "predictive_probability_max"])))
      ['logprob']
    """
    merged: dict[str, Reducer] = {}
    for detector in detectors:
        for name, reducer in detector.reads:
            if merged.setdefault(name, reducer) != reducer:
                raise ValueError(
                    f"detector {detector.name!r} reads {name!r} as {reducer}, another "
                    f"as {merged[name]}; name the feature otherwise"
                )
    return merged
