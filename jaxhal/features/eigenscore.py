"""How far apart do the sampled answers lie inside the model?  (INSIDE)

Chen et al., `INSIDE: LLMs' Internal States Retain the Power of Hallucination
Detection <https://arxiv.org/abs/2402.03744>`_, 2024, sections 3.1 and 3.2.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from jaxhal.features.samples import present


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
        if preset not in PRESETS:
            raise ValueError(f"preset is {preset!r}; use one of {', '.join(PRESETS)}")
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


class FeatureBank(NamedTuple):
    """The last token activations seen, a ring of fixed size; a pytree."""

    values: Float[Array, "capacity width"]  # in no order that matters
    seen: Int[Array, ""]  # how many tokens were ever added


def feature_bank(width: int, capacity: int = 3000) -> FeatureBank:
    """An empty bank for ``capacity`` tokens of ``width`` features."""
    if width < 1 or capacity < 1:
        raise ValueError(
            f"width is {width} and capacity {capacity}; both must be at least 1"
        )
    return FeatureBank(jnp.zeros((capacity, width)), jnp.zeros((), jnp.int32))


def add_features(bank: FeatureBank, hidden: Any, valid: Any = None) -> FeatureBank:
    """The bank with activations ``Float[tokens width]`` in the place of the oldest.

    Tokens come oldest first; those that are not ``valid`` are not added.
    """
    hidden, valid = present("hidden", hidden, valid, least=0)
    capacity, width = bank.values.shape
    if hidden.shape[1:] != (width,):
        raise ValueError(
            f"hidden has shape {hidden.shape}; this bank holds [tokens, {width}]"
        )
    rank, total = jnp.cumsum(valid) - 1, valid.sum()
    # Of more tokens than fit only the last are written: a slot written twice in one
    # scatter holds either.
    kept = valid & (rank >= total - capacity)
    slot = jnp.where(kept, (bank.seen + rank) % capacity, capacity)
    values = bank.values.at[slot].set(hidden.astype(bank.values.dtype), mode="drop")
    return FeatureBank(values, bank.seen + total.astype(bank.seen.dtype))


def clip_thresholds(
    bank: FeatureBank, share: float = 0.002
) -> tuple[Float[Array, " width"], Float[Array, " width"]]:
    """Low and high quantiles of what the bank holds; -inf and inf when it is empty.

    The ``share`` of a feature's activations lies below the first threshold, and above
    the second; 0.2 % in the paper.
    """
    if not 0 <= share < 0.5:
        raise ValueError(f"share is {share}; it must lie in [0, 0.5)")
    slot = jnp.arange(len(bank.values))[:, None]
    held = jnp.minimum(bank.seen, len(bank.values))
    ordered = jnp.sort(jnp.where(slot < held, bank.values, jnp.inf), axis=0)
    ordered = jnp.where(slot < held, ordered, 0.0)
    last = jnp.maximum(held - 1, 0)

    def quantile(position):
        below = jnp.floor(position).astype(int)
        low, high = ordered[below], ordered[jnp.minimum(below + 1, last)]
        return low + (position - below) * (high - low)

    low, high = quantile(share * last), quantile((1 - share) * last)
    return jnp.where(held > 0, low, -jnp.inf), jnp.where(held > 0, high, jnp.inf)


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
