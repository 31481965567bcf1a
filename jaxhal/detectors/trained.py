"""Methods that are fitted to labelled answers."""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxhal.classifiers import heads, linear, mlp, pooling, selection
from jaxhal.classifiers.data import balanced
from jaxhal.detectors.core import (
    LOG_ODDS,
    Detector,
    Features,
    Known,
    Targets,
    flat_heads,
    on_tokens,
    response_mean,
)
from jaxhal.evaluation.splits import holdout
from jaxhal.features.graphs import Barcode, VertexDegree
from jaxhal.features.hidden import HiddenStates
from jaxhal.features.lookback import WINDOW, LookbackRatio
from jaxhal.features.topology import MaxPromptAttention, MTopDiv


def _linear(inputs: Float[Array, "samples *layers size"]) -> Float[Array, "..."]:
    """The inputs with an axis of layers: one, unless they have it."""
    return inputs if inputs.ndim == 3 else inputs[:, None]


def _fit_held_out(
    inputs: Any, targets: Targets, known: Known
) -> tuple[selection.Chosen, Float[np.ndarray, " samples"]]:
    """Layer and penalty by grouped folds inside the training part, then all of it."""
    del known
    return selection.choose_held_out(
        _linear(jnp.asarray(inputs)), targets.labels, targets.groups, targets.weight
    )


def _fit_linear(inputs: Any, targets: Targets) -> selection.Chosen:
    return _fit_held_out(inputs, targets, {})[0]


def _decide_linear(params: selection.Chosen, inputs: Array) -> Array:
    fitted, given = params.linear.w.shape[-1], inputs.shape[-1]
    if fitted != given:
        raise ValueError(
            f"the classifier was fitted to {fitted} features (of lookback ratios, one "
            f"a head) and is given {given}; read with the model it was fitted to"
        )
    return selection.chosen_logits(params, _linear(inputs))


class Heads(NamedTuple):
    """Which heads count.

    Attributes:
      weights: one over the count for a chosen head, else 0.
      separation: mean score of hallucinated minus grounded answers, of every head.
    """

    weights: Float[Any, " heads"]
    separation: Float[Any, " heads"]


@functools.cache
def toha(
    max_heads: int = 6,
    probe: Literal["split", "shared"] = "split",
    name: str = "toha",
) -> Detector:
    """MTop-Div averaged over the few heads that tell hallucinations apart best.

    Args:
      max_heads: the most heads to average.
      probe: ``"split"`` ranks heads on one half of the training part (by source) and
        counts them on the other, as in the paper; ``"shared"`` uses all of it for
        both, as in the published code.
      name: what to call it beside another choice.

    Raises:
      ValueError: on another ``probe``, or ``max_heads`` below 1.
    """
    if probe not in ("split", "shared"):
        raise ValueError(f"probe is {probe!r}; use 'split' or 'shared'")
    if max_heads < 1:
        raise ValueError(f"max_heads is {max_heads}; use at least 1")

    def fit(inputs: Any, targets: Targets) -> Heads:
        scores, labels = np.asarray(inputs), np.asarray(targets.labels)
        first = second = targets.rows
        if probe == "split":
            first, second = _parts(targets, 0.5)
        choice = heads.choose_heads(
            scores[first], labels[first], scores[second], labels[second], max_heads
        )
        weights = np.zeros(scores.shape[1], np.float32)
        weights[np.asarray(choice.chosen)] = 1 / int(choice.count)
        return Heads(jnp.asarray(weights), jnp.asarray(choice.separation))

    return Detector(
        name=name,
        summary="topological divergence, mean of the heads chosen on the training part",
        unit="mean edge weight, 0 to 1",
        reference="Bazarova et al. 2025 (TOHA), algorithm 1",
        reads=(("mtop_div", MTopDiv()),),
        inputs=lambda f: flat_heads(f["mtop_div"]),
        # No matrix product: on an accelerator that would round to a few digits.
        decide=lambda params, inputs: (inputs * params.weights).sum(-1),
        fit=fit,
    )


def _head_probe(name: str, summary: str, reference: str, inputs: Any, *reads: Any):
    return Detector(
        name=name,
        summary=summary,
        unit=LOG_ODDS,
        reference=reference,
        reads=reads,
        inputs=inputs,
        decide=_decide_linear,
        fit=_fit_linear,
        fit_held_out=_fit_held_out,
    )


@functools.cache
def toha_supervised() -> Detector:
    """Logistic regression on the MTop-Div of all heads."""
    return _head_probe(
        "toha_supervised",
        "logistic regression on the topological divergence of all heads",
        "Bazarova et al. 2025 (TOHA), supervised variant",
        lambda f: flat_heads(f["mtop_div"]),
        ("mtop_div", MTopDiv()),
    )


@functools.cache
def topology_probe() -> Detector:
    """Logistic regression on barcodes and vertex degrees of all heads' graphs."""
    return _head_probe(
        "topology_probe",
        "logistic regression on barcodes and vertex degrees of all heads",
        "Bazarova et al. 2025 (TOHA), appendix D.3; Kushnareva et al. 2021",
        lambda f: jnp.concatenate(
            [flat_heads(f["barcode"]), flat_heads(f["degree"])], 1
        ),
        ("barcode", Barcode()),
        ("degree", VertexDegree()),
    )


@functools.cache
def max_prompt_probe() -> Detector:
    """Logistic regression on the largest prompt attention of all heads."""
    return _head_probe(
        "max_prompt_probe",
        "logistic regression on the largest prompt attention of all heads",
        "comparison for toha_supervised: the same without topology",
        lambda f: flat_heads(response_mean(f["max_prompt"], f)),
        ("max_prompt", MaxPromptAttention()),
    )


@functools.cache
def lookback_probe() -> Detector:
    """Logistic regression on the mean lookback ratio of all heads over a response."""
    return _head_probe(
        "lookback_probe",
        "logistic regression on the mean lookback ratios of all heads",
        "Chuang et al. 2024 (Lookback Lens), one span per response",
        lambda f: flat_heads(response_mean(f["lookback"], f)),
        ("lookback", LookbackRatio()),
    )._replace(tokens=_lookback_tokens)


class Spans(NamedTuple):
    """Mean lookback ratios of parts of a response, as Lookback Lens is fitted to them.

    Attributes:
      whole: over the response's text.
      parts: over the marked tokens together, those before the first marked one, and
        those after the last.
      there: whether a part has any token.
    """

    whole: Float[Array, "batch size"]
    parts: Float[Array, "batch 3 size"]
    there: Bool[Array, "batch 3"]


def lookback_spans(features: Features) -> Spans:
    """The predefined spans of Lookback Lens; what lies between two marks is unused."""
    # The end of the sequence is never marked: in a part it would give the label away.
    ratio, text = features["lookback"], features["text"]
    marked = features["marked"] & text
    before = text & (jnp.cumsum(marked, -1) == 0) & marked.any(-1, keepdims=True)
    left = jnp.cumsum(marked[:, ::-1], -1)[:, ::-1]
    after = text & (left == 0) & marked.any(-1, keepdims=True)
    whole, *parts = (
        flat_heads(response_mean(ratio, {"valid": part}))
        for part in (text, marked, before, after)
    )
    there = jnp.stack([part.any(-1) for part in (marked, before, after)], 1)
    return Spans(whole, jnp.stack(parts, 1), there)


def _fit_spans(inputs: Spans, targets: Targets, heads: int | None) -> selection.Chosen:
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


def _lookback_tokens(params: Any, features: Features) -> Array:
    """Probability of each token's window: itself and the seven before it."""
    ratio = jnp.moveaxis(features["lookback"], 1, 0)  # batch layer heads response
    batch, _, _, response = ratio.shape
    ratio = ratio.reshape(batch, -1, response)
    total = jnp.cumsum(jnp.pad(ratio, ((0, 0), (0, 0), (WINDOW, 0))), -1)
    count = jnp.minimum(jnp.arange(response) + 1, WINDOW)
    means = (total[..., WINDOW:] - total[..., :-WINDOW]) / count
    logits = jax.vmap(lambda one: _decide_linear(params, one.T))(means)
    return on_tokens(jax.nn.sigmoid(logits), features)


@functools.cache
def lookback_lens(heads: int | None = None, name: str = "lookback_lens") -> Detector:
    """Lookback Lens: logistic regression on the lookback ratios of annotated spans.

    A hallucinated answer without marks is learnt whole, as hallucinated; the published
    code skips it.

    Args:
      heads: use only so many, those of the largest coefficients in a first fit to all,
        as in the paper's study of heads; all by default.
      name: what to call it beside another choice.

    Fitting raises:
      ValueError: when ``heads`` is below 1 or above the number the model has.
    """
    return Detector(
        name=name,
        summary="logistic regression on lookback ratios, fitted to annotated spans",
        unit=LOG_ODDS,
        reference="Chuang et al. 2024 (Lookback Lens), predefined spans",
        reads=(("lookback", LookbackRatio()),),
        inputs=lookback_spans,
        decide=lambda params, inputs: _decide_linear(params, inputs.whole),
        fit=functools.partial(_fit_spans, heads=heads),
        tokens=_lookback_tokens,
    )


@functools.cache
def hidden_probe(layer: int = 20, name: str = "hidden_probe") -> Detector:
    """Logistic regression on the mean hidden state of one layer's tokens.

    Unlike :func:`linear_probe` it can judge a part of a response.

    Args:
      layer: which hidden state; 20 is two thirds up a model of 30 layers.
      name: what to call it beside another choice.
    """
    state = f"hidden_{layer}"
    return _head_probe(
        name,
        "logistic regression on one layer's hidden states, mean of the tokens",
        "Chuang et al. 2024 (Lookback Lens), hidden-state baseline",
        lambda f: response_mean(jnp.swapaxes(f[state][0], 1, 2), f),
        (state, HiddenStates(layers=(layer,))),
    )


@functools.cache
def linear_probe(
    tokens: Literal["mean", "last"] = "mean", name: str | None = None
) -> Detector:
    """Logistic regression on the hidden state of the layer that suits it best.

    Args:
      tokens: of the response's mean, or of its last token (the end of sequence).
      name: what to call it; by default as in the catalogue.
    """
    state = f"hidden_{tokens}"
    return Detector(
        name=name or ("linear_probe" if tokens == "mean" else "linear_probe_last"),
        summary=f"logistic regression on a hidden state, {tokens} of the response",
        unit=LOG_ODDS,
        reference="Bazarova et al. 2025 (TOHA), linear probe; layer chosen in training",
        reads=((state, HiddenStates(tokens=tokens)),),
        inputs=lambda f: jnp.moveaxis(f[state], 1, 0),
        decide=_decide_linear,
        fit=_fit_linear,
        fit_held_out=_fit_held_out,
    )


@functools.cache
def linear_probe_last() -> Detector:
    """:func:`linear_probe` on the last response token, the end of sequence."""
    return linear_probe(tokens="last")


def _parts(targets: Targets, share: float) -> tuple[np.ndarray, np.ndarray]:
    """The rows to learn from in two parts, whole sources, the second with ``share``."""
    rows = targets.rows
    labels, groups = np.asarray(targets.labels)[rows], np.asarray(targets.groups)[rows]
    rest, part = holdout(labels, groups.tolist(), share)
    return rows[rest], rows[part]


def early_parts(targets: Targets) -> tuple[Array, Array]:
    """Weights of the rows to train on and of the fifth to stop by, classes even."""
    train, stop = (targets.only(rows).weight for rows in _parts(targets, 0.2))
    return balanced(targets.labels, train), balanced(targets.labels, stop)


@functools.cache
def mlp_probe(layer: int = 20, name: str = "mlp_probe") -> Detector:
    """A network of one hidden layer on the mean hidden state of one layer.

    Args:
      layer: which hidden state; 20 is two thirds up a model of 30 layers.
      name: what to call it beside another choice.
    """

    def inputs(features: Features) -> Array:
        hidden = features["hidden_mean"]
        if not 0 <= layer < len(hidden):
            raise ValueError(
                f"{name} looks at hidden state {layer} of {len(hidden)}; choose "
                f"layer in 0..{len(hidden) - 1}"
            )
        return hidden[layer]

    def fit(inputs: Any, targets: Targets) -> Any:
        train, stop = early_parts(targets)
        y = jnp.asarray(targets.labels)
        return mlp.fit_mlp(targets.key, jnp.asarray(inputs), y, train, stop)

    return Detector(
        name=name,
        summary=f"a small network on hidden state {layer}, mean of the response",
        unit=LOG_ODDS,
        reference="Azaria and Mitchell 2023 (SAPLMA), one hidden layer",
        reads=(("hidden_mean", HiddenStates(tokens="mean")),),
        inputs=inputs,
        decide=mlp.mlp_logits,
        fit=fit,
    )


class Tokens(NamedTuple):
    """Hidden states of a response's tokens at one layer."""

    hidden: Float[Array, "batch response width"]
    valid: Bool[Array, "batch response"]


@functools.cache
def attention_pooling(layer: int = 20, name: str = "attention_pooling") -> Detector:
    """A learned query pools the response's hidden states, a linear probe judges them.

    Args:
      layer: which hidden state; 20 is two thirds up a model of 30 layers.
      name: what to call it beside another choice.
    """

    def fit(inputs: Tokens, targets: Targets) -> Any:
        train, stop = early_parts(targets)
        y = jnp.asarray(targets.labels)
        hidden, valid = jnp.asarray(inputs.hidden), jnp.asarray(inputs.valid)
        return pooling.fit_pooling(targets.key, hidden, valid, y, train, stop)

    state = f"hidden_{layer}"
    return Detector(
        name=name,
        summary="a learned query pools hidden states of the response",
        unit=LOG_ODDS,
        reference="CH-Wang et al. 2023, attention-pooling probe",
        reads=((state, HiddenStates(layers=(layer,))),),
        inputs=lambda f: Tokens(f[state][0], f["valid"]),
        decide=lambda params, x: pooling.pooling_logits(params, x.hidden, x.valid),
        fit=fit,
    )
