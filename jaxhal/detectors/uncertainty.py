"""How sure the reader is of each token, alone and with its context."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxhal.detectors.base import Detector, Features, factory, on_tokens
from jaxhal.features.base import OfRewrite
from jaxhal.features.uncertainty import TokenEntropy, TokenLogprob, over_tokens
from jaxhal.io.showing import quoted
from jaxhal.types import Example

# Nats of each token: the reducer, the sign that makes them positive, and the source.
_NATS = {
    "logprob": (
        TokenLogprob(),
        -1,
        "Manakul et al. 2023 (SelfCheckGPT), grey-box scores",
    ),
    "entropy": (
        TokenEntropy(),
        1,
        "Fadeeva et al. 2024; maximum as in TOHA's baseline",
    ),
}


@factory
def _nats(of: str, read: str, how: Literal["mean", "max"], summary: str) -> Detector:
    """Mean or maximum over the response's tokens; nothing is trained."""
    reducer, sign, reference = _NATS[read]
    return Detector(
        *(of, summary, "nats, 0 and up", reference),
        features=((read, reducer),),
        inputs=lambda f: over_tokens(sign * f[read], f["valid"], how),
        tokens=lambda params, f: on_tokens(-jnp.expm1(-sign * f[read]), f),
    )


predictive_probability = functools.partial(
    *(_nats, "predictive_probability", "logprob", "mean"),
    "mean -log p of the response tokens",
)
predictive_probability_max = functools.partial(
    *(_nats, "predictive_probability_max", "logprob", "max"),
    "-log p of the least likely token",
)
token_entropy = functools.partial(
    _nats, "token_entropy", "entropy", "max", "largest next-token entropy"
)
token_entropy_mean = functools.partial(
    _nats, "token_entropy_mean", "entropy", "mean", "mean next-token entropy"
)


def closed_book(example: Example) -> Example:
    """The same response after its question alone, or after a prompt without context.

    ValueError when nothing but the context was given, or nothing but the question.
    """
    prompt, templated = example.question, False
    if not prompt and example.prompt is not None and example.context:
        prompt = example.prompt.replace(example.context, "")
        templated = example.templated
    if not prompt or not prompt.strip():
        raise ValueError(
            f"example {quoted(example.id)} has no question apart from its context, "
            "which the context gain compares with; give 'question'"
        )
    if prompt.strip() == example.source_text.strip():
        raise ValueError(
            f"example {quoted(example.id)} has no context apart from its question; "
            "leave out context_gain"
        )
    return Example(example.response, prompt=prompt, id=example.id, templated=templated)


def _gain(features: Features) -> Array:
    """What the context adds to the log probability of each response token, in nats."""
    return features["logprob"] - features["closed_logprob"]


def _context_gain(of: str, summary: str, unit: str, inputs: Any) -> Detector:
    """Of what the context adds to the log probability of each token."""
    return Detector(
        *(of, summary, unit),
        "pointwise mutual information of token and context; van der Poel et al. 2022 "
        "decode by it",
        features=(
            ("logprob", TokenLogprob()),
            ("closed_logprob", OfRewrite(closed_book, TokenLogprob())),
        ),
        inputs=inputs,
        tokens=lambda params, f: on_tokens(jax.nn.sigmoid(-_gain(f)), f),
    )


@factory
def context_gain() -> Detector:
    """Minus the mean gain in log probability that a token owes to the context."""
    return _context_gain(
        "context_gain",
        "minus the mean log probability that the context adds to a token",
        "nats, any sign",
        lambda f: -over_tokens(_gain(f), f["valid"]),
    )


@factory
def context_gain_count() -> Detector:
    """Number of response tokens that the context makes less likely."""
    return _context_gain(
        "context_gain_count",
        "number of tokens that the context makes less likely",
        "tokens",
        lambda f: ((_gain(f) < 0) & f["valid"]).sum(-1).astype(jnp.float32),
    )
