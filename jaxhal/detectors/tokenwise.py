"""A probe of single tokens, fitted to annotated spans."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxhal.classifiers.linear import Linear, fit_linear, linear_logits
from jaxhal.detectors.core import LOG_ODDS, Detector, Features, Targets, on_tokens
from jaxhal.features.hidden import HiddenStates

# Tokens whose log odds an answer's score is the mean of.  On the training part of
# RAGTruth QA the five highest rank answers better than one, a tenth, or all of them.
HIGHEST = 5
# Inverse penalty C times the number of tokens.
_STRENGTH = 10.0


class Marked(NamedTuple):
    """Hidden states of a response's tokens at one layer, and which are annotated."""

    hidden: Float[Array, "batch response width"]
    valid: Bool[Array, "batch response"]
    marked: Bool[Array, "batch response"]


def highest_mean(
    values: Float[Array, "batch response"], valid: Bool[Array, "batch response"]
) -> Float[Array, " batch"]:
    """Mean of the five highest values over real tokens; of all where there are fewer.

    0 for an empty response.
    """
    there = jnp.minimum(valid.sum(-1), HIGHEST)
    ordered = -jnp.sort(-jnp.where(valid, values, -jnp.inf), -1)[:, :HIGHEST]
    chosen = jnp.arange(ordered.shape[1]) < there[:, None]
    return jnp.where(chosen, ordered, 0.0).sum(-1) / jnp.maximum(there, 1)


@functools.cache
def token_probe(
    layer: int = 20, whole: bool = False, name: str = "token_probe"
) -> Detector:
    """Logistic regression on the hidden state of every token; the worst few count.

    It learns from annotated spans, which say more than one label an answer does.  The
    token scores are probabilities of being annotated.

    Args:
      layer: which hidden state; 20 is two thirds up a model of 30 layers.
      whole: learn a hallucinated answer without a span as one span, as
        :func:`~jaxhal.detectors.lookback_lens` does; else nothing is learnt from it.
      name: what to call it beside another choice.

    Fitting raises:
      ValueError: when no token of the training part is marked, and not ``whole``.
    """

    def fit(inputs: Marked, targets: Targets) -> Linear:
        valid = np.asarray(inputs.valid)
        spans = np.asarray(inputs.marked)
        unmarked = (np.asarray(targets.labels) == 1) & ~spans.any(1)
        marked = (spans | (whole & unmarked)[:, None])[valid]
        row = np.broadcast_to(np.arange(len(valid))[:, None], valid.shape)[valid]
        weight = np.asarray(targets.weight) * (whole | ~unmarked)
        if not marked[weight[row] > 0].any():
            raise ValueError(
                f"{name} learns from annotated spans, and no token of the training "
                "part is marked; give 'labels', set whole=True to learn hallucinated "
                "answers as one span each, or use linear_probe"
            )
        weight = weight[row]
        strength = _STRENGTH / float(weight.sum())
        hidden = np.asarray(inputs.hidden)[valid]
        return fit_linear(hidden, marked.astype(int), weight, strength)

    def tokens(params: Linear, features: Features) -> Array:
        logits = linear_logits(params, features[state][0])
        return on_tokens(jax.nn.sigmoid(logits), features)

    state = f"hidden_{layer}"
    return Detector(
        name=name,
        summary="logistic regression on every token's hidden state, fitted to spans"
        + (", or to whole answers that have none" if whole else ""),
        unit=f"{LOG_ODDS} of a token, mean of the {HIGHEST} highest",
        reference="Obeso et al. 2025, linear probes of tokens",
        reads=((state, HiddenStates(layers=(layer,))),),
        inputs=lambda f: Marked(f[state][0], f["valid"], f["marked"] & f["valid"]),
        decide=lambda params, x: highest_mean(
            linear_logits(params, x.hidden), jnp.asarray(x.valid)
        ),
        fit=fit,
        tokens=tokens,
    )
