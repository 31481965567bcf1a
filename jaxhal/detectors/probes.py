"""Probes of hidden states.

``layer`` says which hidden state, as :func:`jaxhal.features.hidden.state_number` has
it: a share of the reader's layers, such as 0.67, or a number, 0 for the embeddings.  Of
several the best is chosen by grouped folds inside the training part.  A probe of whole
answers chooses among four by default, for it keeps one vector a layer in memory; one
that keeps every token's hidden states would take four times as much, so it looks at one
layer unless it is given some.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxhal.classifiers import mlp, pooling
from jaxhal.classifiers.linear import Linear, fit_grid, linear_logits
from jaxhal.detectors import base
from jaxhal.detectors.layers import (
    LAYER,
    LAYERS,
    Choice,
    best_of,
    in_words,
    several,
    state_of,
)
from jaxhal.detectors.series import Ragged, Series, flat
from jaxhal.features.hidden import HiddenStates, Layer
from jaxhal.io.checks import at_least


@base.factory
def hidden_probe(layer: Choice = LAYERS) -> base.Detector:
    """Logistic regression on the mean hidden state of the tokens.

    Unlike :func:`linear_probe` it can judge a part of a response, so a store keeps the
    hidden states of every token, at each layer to choose from.
    """
    layers = several(layer)
    states = [state_of(one) for one in layers]

    def inputs(features: base.Features) -> Float[Array, "batch layers width"]:
        each = [jnp.swapaxes(features[name][0], 1, 2) for name, _ in states]
        return jnp.stack([base.response_mean(one, features) for one in each], 1)

    return base.logistic(
        "hidden_probe",
        f"logistic regression, mean of the tokens; {in_words(layers)}",
        "Chuang et al. 2024 (Lookback Lens), hidden-state baseline",
        inputs,
        *states,
    )


@base.factory
def linear_probe(tokens: Literal["mean", "last"] = "mean") -> base.Detector:
    """Logistic regression on the hidden state of the layer that suits it best.

    ``tokens`` is of the response's mean, or of its last token (the end of sequence).
    """
    state = f"hidden_{tokens}"
    return base.Detector(
        "linear_probe" if tokens == "mean" else "linear_probe_last",
        f"logistic regression on a hidden state, {tokens} of the response",
        base.LOG_ODDS,
        "Bazarova et al. 2025 (TOHA), linear probe; layer chosen in training",
        features=((state, HiddenStates(tokens=tokens)),),
        inputs=lambda f: jnp.moveaxis(f[state], 1, 0),
        decide=base.logistic_scores,
        fit=base.fit_logistic,
    )


@base.factory
def linear_probe_last() -> base.Detector:
    """:func:`linear_probe` on the last response token, the end of sequence."""
    return linear_probe("last")


@base.factory
def mlp_probe(layer: Choice = LAYERS) -> base.Detector:
    """A network of one hidden layer on the response's mean hidden state."""

    def one(layer: Layer) -> base.Detector:
        name, state = state_of(layer, "mean")
        return base.Detector(
            "mlp_probe",
            "a small network, mean of the response",
            base.LOG_ODDS,
            "Azaria and Mitchell 2023 (SAPLMA), one hidden layer",
            features=((name, state),),
            inputs=lambda f: f[name][0],
            decide=mlp.mlp_logits,
            fit=lambda x, targets: mlp.fit_mlp(*base.early_stopping(targets, x)),
        )

    return best_of(one, several(layer))


@base.factory
def attention_pooling(layer: Choice = LAYER) -> base.Detector:
    """A learned query pools the response's hidden states for a linear probe."""

    def one(layer: Layer) -> base.Detector:
        name, state = state_of(layer)
        return base.Detector(
            "attention_pooling",
            "a learned query pools hidden states of the response",
            base.LOG_ODDS,
            "CH-Wang et al. 2023, attention-pooling probe",
            features=((name, state),),
            inputs=lambda f: Series(f[name][0], f["valid"]),
            decide=lambda params, x: pooling.pooling_logits(params, *x),
            fit=lambda x, to: pooling.fit_pooling(*base.early_stopping(to, *flat(x))),
        )

    return best_of(one, several(layer))


# Tokens whose log odds an answer's score is the mean of.  On the training part of
# RAGTruth QA the five highest rank answers better than one, a tenth, or all of them.
HIGHEST = 5
# Inverse penalty C times the number of tokens.
_STRENGTH = 10.0


def highest_mean(
    values: Float[Array, "batch response"],
    valid: Bool[Array, "batch response"],
    count: int,
) -> Float[Array, " batch"]:
    """Mean of the highest values over real tokens; of all where there are fewer.

    0 for an empty response.
    """
    there = jnp.minimum(valid.sum(-1), count)
    ordered = -jnp.sort(-jnp.where(valid, values, -jnp.inf), -1)[:, :count]
    chosen = jnp.arange(ordered.shape[1]) < there[:, None]
    return jnp.where(chosen, ordered, 0.0).sum(-1) / jnp.maximum(there, 1)


def centred_mean(
    values: Float[Array, "batch response"],
    valid: Bool[Array, "batch response"],
    window: int,
) -> Float[Array, "batch response"]:
    """Mean of each token and its neighbours, as many before it as after it.

    Only real tokens count, so there are fewer at the ends.
    """
    half = window // 2
    stacked = jnp.stack([jnp.where(valid, values, 0.0), valid.astype(values.dtype)])
    padded = jnp.pad(stacked, [(0, 0), (0, 0), (half, half)])
    size = values.shape[1]
    shifted = [padded[..., at : at + size] for at in range(2 * half + 1)]
    total, count = jnp.stack(shifted).sum(0)
    return total / jnp.maximum(count, 1)


def check_window(window: int) -> None:
    """ValueError where a token has not as many neighbours before it as after it."""
    at_least(1, window=window)
    if window % 2 == 0:
        raise ValueError(f"window is {window}; give an odd number, or 1 for no mean")


@base.factory
def token_probe(
    layer: Choice = LAYER,
    whole: bool = False,
    highest: int = HIGHEST,
    window: int = 1,
) -> base.Detector:
    """Logistic regression on the hidden state of every token; the worst few count.

    It learns from annotated spans, which say more than one label an answer does.  The
    token scores are probabilities of being annotated.

    Args:
      whole: learn a hallucinated answer without a span as one span, as
        :func:`~jaxhal.detectors.lookback_lens` does; else nothing is learnt from it.
      highest: tokens whose log odds an answer's score is the mean of.
      window: tokens around one, an odd number, of whose mean log odds its own score is
        the probability; spans found by nine are better on RAGTruth QA.
    """
    at_least(1, highest=highest)
    check_window(window)

    def one(layer: Layer) -> base.Detector:
        name, state = state_of(layer)

        def tokens(params: Linear, features: base.Features) -> Array:
            logits = linear_logits(params, features[name][0])
            if window > 1:
                valid = jnp.asarray(features["valid"])
                logits = centred_mean(logits, valid, window)
            return base.on_tokens(jax.nn.sigmoid(logits), features)

        return base.Detector(
            "token_probe",
            "logistic regression on every token's hidden state, fitted to spans"
            + (", or to whole answers that have none" if whole else ""),
            f"{base.LOG_ODDS} of a token, mean of the {highest} highest",
            "Obeso et al. 2025, linear probes of tokens",
            features=((name, state),),
            inputs=lambda f: Series((f[name][0], f["marked"]), f["valid"]),
            decide=lambda params, x: highest_mean(
                linear_logits(params, x.values[0]), jnp.asarray(x.valid), highest
            ),
            fit=functools.partial(fit_tokens, whole=whole),
            fits=functools.partial(fits_of_tokens, whole=whole),
            tokens=tokens,
            marked=not whole,
        )

    return best_of(one, several(layer))


def fit_tokens(
    inputs: Series | Ragged,
    targets: base.Targets,
    *,
    whole: bool = False,
    even: bool = False,
) -> Linear:
    """Logistic regression of tokens on whether they are annotated.

    ValueError where no token of the answers to learn from is.

    Args:
      inputs: features of every token, and which of them are annotated.
      whole: as :func:`token_probe` has it.
      even: the annotated tokens of an answer weigh together as those of any other, and
        all together as much as they are.
    """
    weights = np.asarray(targets.weight)[None]
    found = fits_of_tokens(inputs, targets, weights, whole=whole, even=even)
    return jax.tree.map(lambda leaf: leaf[0], found)


def fits_of_tokens(
    inputs: Series | Ragged,
    targets: base.Targets,
    weights: Float[np.ndarray, "fits rows"],
    *,
    whole: bool = False,
    even: bool = False,
) -> Linear:
    """:func:`fit_tokens` for each of several weights; leaves lead with ``fits``."""
    tokens = Ragged.of(inputs)
    (columns, spans), row = tokens.values, tokens.rows
    spanned = np.bincount(row, spans, len(tokens)) > 0
    unmarked = (np.asarray(targets.labels) == 1) & ~spanned
    marked = spans | (whole & unmarked)[row]
    count = np.bincount(row, marked, len(tokens))

    def of_tokens(answers: Float[np.ndarray, " rows"]) -> Float[np.ndarray, " tokens"]:
        learnt = answers > 0
        weight = answers[row]
        if not marked[weight > 0].any():
            else_ = "set whole=True to learn hallucinated answers as one span each, or "
            if marked[weights[0][row] > 0].any():
                raise ValueError(
                    "a probe of tokens is fitted without some sources after others, "
                    "and without some of these no token is marked; annotate spans in "
                    f"answers of more sources, {else_}use linear_probe"
                )
            raise ValueError(
                "a probe of tokens learns from annotated spans, and no token of the "
                f"training part is marked; give 'labels', {else_}use linear_probe"
            )
        strength = _STRENGTH / float(weight.sum())
        if even:
            mean = count[learnt & (count > 0)].mean()
            weight = weight * np.where(marked, mean / np.maximum(count, 1)[row], 1.0)
        return strength * weight

    train = np.stack([of_tokens(one) for one in weights * (whole | ~unmarked)])
    x = jnp.asarray(columns, jnp.float32)[None]  # of which there should be one copy
    found = fit_grid(x, marked.astype(int), train, [1.0])
    return jax.tree.map(lambda leaf: leaf[0, :, 0], found)
