"""A probe of tokens that also sees where each of them looks."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxhal.classifiers.linear import linear_logits
from jaxhal.detectors import base
from jaxhal.detectors.layers import LAYER, Choice, best_of, several, state_of
from jaxhal.detectors.probes import (
    centred_mean,
    check_window,
    fit_tokens,
    fits_of_tokens,
)
from jaxhal.detectors.series import Series
from jaxhal.features.hidden import Layer
from jaxhal.features.lookback import LookbackRatio
from jaxhal.features.topology import MaxPromptAttention

# Both by folds of the training part of RAGTruth QA: how much the worst tokens outweigh
# others, and the tokens that a shown score is the mean of.
_TEMPERATURE = 0.5
WINDOW = 9
# Added to attention before its logarithm.
_FLOOR = 1e-4


def soft_maximum(
    values: Float[Array, "batch response"],
    valid: Bool[Array, "batch response"],
    temperature: float,
) -> Float[Array, " batch"]:
    r"""Maximum over real tokens to which others add: 0 for an empty response.

    .. math:: T \log \sum_t e^{x_t / T}
    """
    scaled = jnp.where(valid, values / temperature, -jnp.inf)
    total = temperature * jax.nn.logsumexp(scaled, -1)
    return jnp.where(valid.any(-1), total, 0.0)


@base.factory
def attentive_probe(layer: Choice = LAYER, window: int = WINDOW) -> base.Detector:
    """Logistic regression on hidden state and attention of every token.

    Beside the hidden state stand, of every head, the lookback ratio and the logarithm
    of the largest attention to a prompt token.  It learns from annotated spans; those
    of one answer weigh as much together as those of any other, for what counts is
    whether an answer has any.  An answer's score is a soft maximum over its tokens.

    A token's score is the probability of the mean log odds of the tokens around it, for
    spans are seldom one token long.  While a response is written, it has none after it.

    Args:
      layer: which hidden state, as :mod:`~jaxhal.detectors.probes` has it.
      window: tokens of that mean, an odd number; 1 for the token alone.
    """
    check_window(window)

    def one(layer: Layer) -> base.Detector:
        name, state = state_of(layer)

        def columns(f: base.Features) -> Float[Array, "batch response size"]:
            looks = [f["lookback"], jnp.log(f["max_prompt"] + _FLOOR)]
            return jnp.concatenate([f[name][0], *map(_by_token, looks)], -1)

        def tokens(params: Any, f: base.Features) -> Array:
            logits = linear_logits(params, columns(f))
            mean = centred_mean(logits, jnp.asarray(f["valid"]), window)
            return base.on_tokens(jax.nn.sigmoid(mean), f)

        return base.Detector(
            "attentive_probe",
            "logistic regression on every token's hidden state and attention, fitted "
            "to spans",
            f"{base.LOG_ODDS} of a token, soft maximum",
            "comparison for token_probe: the same beside the attention of all heads",
            features=(
                (name, state),
                ("lookback", LookbackRatio()),
                ("max_prompt", MaxPromptAttention()),
            ),
            inputs=lambda f: Series((columns(f), f["marked"]), f["valid"]),
            decide=lambda params, x: soft_maximum(
                linear_logits(params, x.values[0]), jnp.asarray(x.valid), _TEMPERATURE
            ),
            fit=functools.partial(fit_tokens, even=True),
            fits=functools.partial(fits_of_tokens, even=True),
            tokens=tokens,
            marked=True,
        )

    return best_of(one, several(layer))


def _by_token(
    heads: Float[Array, "layer batch heads response"],
) -> Float[Array, "batch response size"]:
    moved = jnp.moveaxis(heads, (1, 3), (0, 1))
    return moved.reshape(*moved.shape[:2], -1)
