"""How far apart do the sampled answers lie inside the model?  (INSIDE)

Chen et al., `INSIDE: LLMs' Internal States Retain the Power of Hallucination
Detection <https://arxiv.org/abs/2402.03744>`_, 2024, sections 3.1 and 3.2.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float

from jaxhal.features.samples import present
from jaxhal.io.checks import one_of


class Preset(NamedTuple):
    """One published form of EigenScore: what is added, divided by, and the log's base.

    ``alpha`` is added to the eigenvalues, which are those of the covariance or, if not
    ``per_feature``, of ``width - 1`` times that.
    """

    alpha: float
    base: float
    per_feature: bool


PRESETS = {
    "official": Preset(alpha=1e-3, base=10.0, per_feature=True),
    "toha": Preset(alpha=1.0, base=math.e, per_feature=True),
    "lm_polygraph": Preset(alpha=1e-3, base=math.e, per_feature=False),
}


def form_of(preset: str | Preset, **changes: float | bool | None) -> Preset:
    """A preset by its name, with what is not ``None`` of the changes."""
    if isinstance(preset, str):
        one_of(PRESETS, preset=preset)
        preset = PRESETS[preset]
    form = preset._replace(**{k: v for k, v in changes.items() if v is not None})
    if not 0 < form.alpha < math.inf:
        raise ValueError(f"alpha is {form.alpha}; give a positive number")
    if not 1 < form.base < math.inf:
        raise ValueError(f"base is {form.base}; give a number above 1, such as 10")
    return form


def eigenscore(
    embeddings: Any, valid: Any = None, preset: str | Preset = "official"
) -> Float[Array, ""]:
    r"""Mean log eigenvalue of the answers' covariance; higher = further apart.

    .. math:: \frac{1}{n} \sum_{i=1}^n \log(\lambda_i + \alpha), \quad
      \lambda = \mathrm{eig}\Big(\frac{1}{d - 1} Z J Z^\top\Big)

    where :math:`J` takes its mean off each row of :math:`Z`, the embedding of an
    answer.  At least :math:`\log \alpha`, and unbounded above; :math:`\alpha` changes
    the order of the scores too.  The published code takes log10.

    Args:
      embeddings: ``Float[samples width]``, usually the hidden state of an answer's last
        token in the middle layer.
      valid: ``Bool[samples]``, False on a missing answer; inside a trace, 0.0 when all.
      preset: a key of :data:`PRESETS`, or a form of one's own.
    """
    form = form_of(preset)
    values, valid = present("embeddings", embeddings, valid, least=2)
    if values.ndim != 2 or values.shape[1] < 2:
        raise ValueError(
            f"embeddings have shape {values.shape}; pass [samples, width] with a width "
            "of at least 2"
        )
    samples, width = values.shape
    centred = values - values.mean(1, keepdims=True)
    # The covariance itself cannot hold the eigenvalues of answers that are nearly alike
    # to within alpha, and might turn them negative.
    singular = jnp.linalg.svd(centred, compute_uv=False, full_matrices=False)
    eigenvalue = jnp.square(singular) / (width - 1 if form.per_feature else 1)
    # More answers than features leave eigenvalues of zero that have no singular value;
    # those of missing answers come last, as singular values descend.
    eigenvalue = jnp.pad(eigenvalue, (0, samples - len(eigenvalue)))
    log = jnp.log(eigenvalue + form.alpha) / math.log(form.base)
    count = valid.sum()
    log = jnp.where(jnp.arange(samples) < count, log, 0.0)
    return log.sum() / jnp.maximum(count, 1)


# How many tokens, the last ones, say what is extreme.
BANK = 3000


def clip_thresholds(
    hidden: Any, share: float
) -> tuple[Float[Array, " width"], Float[Array, " width"]]:
    """Low and high quantiles of the last tokens' activations ``Float[tokens width]``.

    The ``share`` of a feature's activations lies below the first threshold, and above
    the second; 0.2 % in the paper.
    """
    if not 0 <= share < 0.5:
        raise ValueError(f"share is {share}; give one in [0, 0.5)")
    ordered = jnp.sort(jnp.asarray(hidden)[-BANK:], axis=0)
    last = len(ordered) - 1
    if last < 0:
        raise ValueError(
            f"hidden has shape {ordered.shape}; give at least one token's activations"
        )

    def quantile(share: float) -> Float[Array, " width"]:
        position = np.float32(share) * np.float32(last)
        below = int(position)
        low, high = ordered[below], ordered[min(below + 1, last)]
        return low + (position - below) * (high - low)

    return quantile(share), quantile(1 - share)


def clip_features(hidden: Any, low: Any, high: Any) -> Float[Array, "*lead width"]:
    """Activations with extreme features moved to the thresholds, in their own type.

    Applied to the last layer while answers are sampled, it keeps the model from being
    sure of the same wrong answer each time.
    """
    hidden, low, high = jnp.asarray(hidden), jnp.asarray(low), jnp.asarray(high)
    if not hidden.shape[-1:] == low.shape == high.shape:
        raise ValueError(
            f"hidden has shape {hidden.shape}, low {low.shape} and high {high.shape}; "
            "pass [..., width] and twice [width]"
        )
    ordered = low <= high
    if not isinstance(ordered, Tracer) and not ordered.all():
        worst = int(jnp.argmin(ordered))
        raise ValueError(
            f"feature {worst} has low {low[worst]} and high {high[worst]}; low must "
            "not exceed high"
        )
    return jnp.clip(hidden, low, high).astype(hidden.dtype)
