"""Does the answer say something else than its context says at that place?"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxhal.classifiers.linear import Linear, fit_linear, linear_logits
from jaxhal.detectors import base
from jaxhal.detectors.probes import highest_mean
from jaxhal.detectors.series import Ragged, Series
from jaxhal.features.support import COLUMNS, ContextSupport, CopiedAttention

# Tokens whose log odds an answer's score is the mean of: an altered number is one or
# two of them.
HIGHEST = 2
# Inverse penalty C times the number of tokens.
_STRENGTH = 10.0
# Tokens on each side whose columns are looked at too: a model is often surprised by
# what follows.
_BESIDE = 2


def evidence(features: base.Features) -> Float[Array, "batch response column"]:
    """What tells whether each token is supported, of itself and of its neighbours."""
    of = dict(zip(COLUMNS, jnp.moveaxis(features["support"], -1, 0), strict=True))
    attention = features["copied"]  # layer batch heads response
    logprob, follows = of["logprob"], of["other_run"] > of["run"]
    columns = jnp.stack(
        [
            *of.values(),
            logprob - of["copied"],
            logprob - of["there"],
            of["nearest"] - of["near"],
            jnp.where(of["other_run"] > 0, logprob - of["after_run"], 0.0),
            jnp.where(follows, of["other_run"] - of["run"], 0.0),
            attention.mean((0, 2)),
            attention.max((0, 2)),
        ],
        -1,
    )
    columns = jnp.where(features["text"][..., None], columns, 0.0)
    size = columns.shape[1]
    padded = jnp.pad(columns, ((0, 0), (_BESIDE, _BESIDE), (0, 0)))
    beside = [padded[:, at : at + size] for at in range(2 * _BESIDE + 1)]
    return jnp.concatenate(beside, -1)


def _fit(inputs: Series | Ragged, targets: base.Targets) -> Linear:
    tokens = Ragged.of(inputs)
    (columns, marked), row = tokens.values, tokens.rows
    spanned = np.bincount(row, marked, len(tokens)) > 0
    if not spanned[targets.rows].any():
        raise ValueError(
            "a contradiction is learnt from annotated spans, and no token of the "
            "training part is marked; give 'labels', such as those of "
            "jaxhal.datasets.altered"
        )
    known = spanned | (np.asarray(targets.labels) == 0)
    weight = (np.asarray(targets.weight) * known)[row]
    strength = _STRENGTH / float(weight.sum())
    return fit_linear(columns, marked.astype(int), weight, strength)


@base.factory
def contradiction() -> base.Detector:
    """Logistic regression on how well the context supports every token.

    The evidence is that of :class:`~jaxhal.features.support.ContextSupport`: what the
    context offers in the place of each token, and how much likelier that would be.
    Made to be fitted to :func:`jaxhal.datasets.alterations`; answers that are
    hallucinated without a span are not learnt from.
    """

    def tokens(params: Linear, features: base.Features) -> Array:
        probability = jax.nn.sigmoid(linear_logits(params, evidence(features)))
        return base.on_tokens(jnp.where(features["text"], probability, 0.0), features)

    return base.Detector(
        "contradiction",
        "logistic regression on what the context supports in the place of every token",
        f"{base.LOG_ODDS} of a token, mean of the {HIGHEST} highest",
        "this package; fitted to spans",
        features=(("support", ContextSupport()), ("copied", CopiedAttention())),
        inputs=lambda f: Series((evidence(f), f["marked"]), f["text"]),
        decide=lambda params, x: highest_mean(
            linear_logits(params, x.values[0]), jnp.asarray(x.valid), HIGHEST
        ),
        fit=_fit,
        tokens=tokens,
    )
