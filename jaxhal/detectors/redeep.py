"""ReDeEP: heads that copy from the context against layers that know by heart."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxhal.detectors import base
from jaxhal.features.knowledge import ExternalContext, ParametricKnowledge


@base.factory
def redeep(share: float = 0.1) -> base.Detector:
    """Logistic regression on the external context and parametric knowledge scores.

    As published an answer's score is the mean of its tokens', each a weighted sum; the
    paper sums those of the heads and layers with the highest AUROC, here all of them
    are weighed, with a penalty that is chosen in training.

    Args:
      share: of the context that a head attends to most, as
        :class:`~jaxhal.features.knowledge.ExternalContext` has it.
    """
    context = f"external_context_{share:g}"

    def of_tokens(f: base.Features) -> Float[Array, "batch response size"]:
        external = jnp.moveaxis(f[context], (1, 3), (0, 1))
        external = external.reshape(*external.shape[:2], -1)
        return jnp.concatenate([external, jnp.moveaxis(f["parametric"], 0, -1)], -1)

    def tokens(params: Any, f: base.Features) -> Array:
        logits = jax.vmap(partial(base.logistic_scores, params))(of_tokens(f))
        return base.on_tokens(jax.nn.sigmoid(logits), f)

    return base.logistic(
        "redeep",
        "logistic regression on closeness to what heads attend to, and on what "
        "feed-forward parts change",
        "Sun et al. 2025 (ReDeEP), token level",
        lambda f: base.response_mean(jnp.swapaxes(of_tokens(f), 1, 2), f),
        (context, ExternalContext(share)),
        ("parametric", ParametricKnowledge()),
    )._replace(tokens=tokens)
