"""Lookback Lens: does the model look at its context, or at what it just wrote?"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxhal.classifiers import linear, selection
from jaxhal.detectors import base
from jaxhal.features.lookback import WINDOW, LookbackRatio
from jaxhal.io.checks import at_least


@base.factory
def lookback_ratio() -> base.Detector:
    """One minus the lookback ratio, averaged over heads and tokens, nothing trained."""
    return base.Detector(
        "lookback_ratio",
        "attention on new tokens rather than the context, mean of all heads",
        "1 - mean lookback ratio, 0 to 1",
        "Chuang et al. 2024 (Lookback Lens), section 2.1",
        features=(("lookback", LookbackRatio()),),
        inputs=lambda f: 1 - base.response_mean(f["lookback"], f).mean((0, 2)),
        tokens=lambda params, f: base.on_tokens(1 - f["lookback"].mean((0, 2)), f),
    )


@base.factory
def lookback_probe() -> base.Detector:
    """Logistic regression on the mean lookback ratio of all heads over a response."""
    return base.logistic(
        "lookback_probe",
        "logistic regression on the mean lookback ratios of all heads",
        "Chuang et al. 2024 (Lookback Lens), one span per response",
        lambda f: base.flat_heads(base.response_mean(f["lookback"], f)),
        ("lookback", LookbackRatio()),
    )._replace(tokens=_lookback_tokens)


class Spans(NamedTuple):
    """Mean lookback ratios of parts of a response, as Lookback Lens is fitted to them.

    The parts are the marked tokens together, those before the first, those after the
    last.
    """

    whole: Float[Array, "batch size"]  # over the response's text
    parts: Float[Array, "batch 3 size"]
    there: Bool[Array, "batch 3"]  # whether a part has any token


def lookback_spans(features: base.Features) -> Spans:
    """The predefined spans of Lookback Lens; what lies between two marks is unused."""
    # The end of the sequence is never marked: in a part it would give the label away.
    ratio, text = features["lookback"], features["text"]
    marked = features["marked"] & text
    before = text & (jnp.cumsum(marked, -1) == 0) & marked.any(-1, keepdims=True)
    left = jnp.cumsum(marked[:, ::-1], -1)[:, ::-1]
    after = text & (left == 0) & marked.any(-1, keepdims=True)
    whole, *parts = (
        base.flat_heads(base.response_mean(ratio, {"valid": part}))
        for part in (text, marked, before, after)
    )
    there = jnp.stack([part.any(-1) for part in (marked, before, after)], 1)
    return Spans(whole, jnp.stack(parts, 1), there)


def _fit_spans(
    inputs: Spans, targets: base.Targets, heads: int | None
) -> selection.Chosen:
    """Logistic regression on spans, unscaled and with C = 1 as published."""
    labels = jnp.asarray(targets.labels)
    spanned = jnp.asarray(inputs.there).any(1)
    # Whole responses where nothing is marked: grounded ones, and those hallucinated
    # ones whose spans are unknown.
    x = jnp.concatenate([inputs.whole[:, None], inputs.parts], 1)
    kind = jnp.array([1, 0, 0])
    y = jnp.concatenate([labels[:, None], jnp.tile(kind, (len(labels), 1))], 1)
    weight = jnp.concatenate([~spanned[:, None], inputs.there], 1)
    weight = weight * jnp.asarray(targets.weight)[:, None]
    x, y, weight = x.reshape(-1, x.shape[-1]), y.reshape(-1), weight.reshape(-1)
    fitted = linear.fit_linear(x, y, weight, 1.0, standardize=False)
    if heads is not None:
        if not 1 <= heads <= x.shape[1]:
            raise ValueError(
                f"heads is {heads}; the model has {x.shape[1]}, choose in "
                f"1..{x.shape[1]}"
            )
        chosen = jnp.argsort(-jnp.abs(fitted.w))[:heads]
        kept = jnp.zeros(x.shape[1]).at[chosen].set(1.0)
        fitted = linear.fit_linear(x * kept, y, weight, 1.0, standardize=False)
        fitted = fitted._replace(w=fitted.w * kept)
    return selection.published(fitted)


def _lookback_tokens(params: Any, features: base.Features) -> Array:
    """Probability of each token's window: itself and the seven before it."""
    ratio = jnp.moveaxis(features["lookback"], 1, 0)  # batch layer heads response
    batch, _, _, response = ratio.shape
    ratio = ratio.reshape(batch, -1, response)
    total = jnp.cumsum(jnp.pad(ratio, ((0, 0), (0, 0), (WINDOW, 0))), -1)
    count = jnp.minimum(jnp.arange(response) + 1, WINDOW)
    means = (total[..., WINDOW:] - total[..., :-WINDOW]) / count
    logits = jax.vmap(lambda one: base.logistic_scores(params, one.T))(means)
    return base.on_tokens(jax.nn.sigmoid(logits), features)


@base.factory
def lookback_lens(heads: int | None = None) -> base.Detector:
    """Lookback Lens: logistic regression on the lookback ratios of annotated spans.

    A hallucinated answer without marks is learnt whole, as hallucinated; the published
    code skips it.

    Args:
      heads: use only so many, those of the largest coefficients in a first fit to all,
        as in the paper's study of heads; all by default.
    """
    at_least(1, heads=heads)
    return base.Detector(
        "lookback_lens",
        "logistic regression on lookback ratios, fitted to annotated spans",
        base.LOG_ODDS,
        "Chuang et al. 2024 (Lookback Lens), predefined spans",
        features=(("lookback", LookbackRatio()),),
        inputs=lookback_spans,
        decide=lambda params, inputs: base.logistic_scores(params, inputs.whole),
        fit=functools.partial(_fit_spans, heads=heads),
        tokens=_lookback_tokens,
    )
