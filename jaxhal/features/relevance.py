"""Relevance of any number of tokens as vectors of one length.

Hu et al., `LRP4RAG <https://arxiv.org/abs/2408.15533>`_, 2024, section 3.3.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

from jaxhal.io.checks import at_least, one_of


def bin_weights(
    valid: Bool[Any, " tokens"], bins: int, padding: str = "last"
) -> Float[Array, "bins tokens"]:
    """Weights whose product with a profile is its mean in each bin (equations 7 to 9).

    Of ``n`` valid tokens bin ``i`` holds those from ``floor(i n / bins)`` up to, but
    not including, ``floor((i + 1) n / bins)``.  When tokens are fewer than bins,
    padding ``"last"`` repeats the token an empty bin falls into (the paper);
    ``"zeros"`` leaves it 0 (the published code): a comb whose teeth tell the length.

    Example:
      >>> bin_weights(jnp.array([True, True, True, False]), 2)
      Array([[1. , 0. , 0. , 0. ],
             [0. , 0.5, 0.5, 0. ]], dtype=float32)
    """
    at_least(1, bins=bins)
    one_of(("last", "zeros"), padding=padding)
    valid = jnp.asarray(valid)
    index, count = jnp.cumsum(valid) - 1, jnp.sum(valid)
    edge = jnp.arange(bins + 1)[:, None] * count // bins
    start, end = edge[:-1], edge[1:]
    inside = (index >= start) & (index < end)
    if padding == "last":
        inside |= (start == end) & (index == start)
    inside &= valid
    return inside / jnp.maximum(inside.sum(-1, keepdims=True), 1)


def resample(
    profile: Num[Any, " tokens"],
    length: int,
    valid: Bool[Any, " tokens"] | None = None,
    padding: str = "last",
) -> Float[Array, " length"]:
    """A profile as its means in ``length`` bins, with :func:`bin_weights`."""
    profile = jnp.asarray(profile)
    profile = profile.astype(jnp.promote_types(profile.dtype, jnp.float32))
    valid = jnp.ones(profile.shape, bool) if valid is None else valid
    weights = bin_weights(valid, length, padding).astype(profile.dtype)
    return jnp.matmul(weights, profile, precision=jax.lax.Precision.HIGHEST)


def normalized(
    relevance: Float[Any, "*rows tokens"], by: str = "sum", eps: float = 1e-6
) -> Float[Array, "*rows tokens"]:
    """Relevance of each row over the ``"sum"`` or ``"max"`` of its absolute values.

    A row of zeros stays so, by ``eps`` (section 4.2).
    """
    sizes = {"sum": jnp.sum, "max": jnp.max}
    one_of(sizes, by=by)
    relevance = jnp.asarray(relevance)
    return relevance / (sizes[by](jnp.abs(relevance), axis=-1, keepdims=True) + eps)


def profile_level(
    profile: Num[Any, " tokens"],
    valid: Bool[Any, " tokens"] | None = None,
) -> Float[Array, ""]:
    """Mean of a profile scaled to [0, 1] by its own extremes; low means hallucinated.

    The published threshold rule: resample to 110 with zeros in empty bins, drop 5 at
    both ends, subtract the least value and divide by the range.  It looks at the shape
    of the profile, not at its strength; a constant profile gives 1/2.  Of fewer tokens
    than bins, empty bins are most of what it sees, so it follows their number.
    """
    bins = resample(profile, 110, valid, "zeros")[5:-5]
    low, high = bins.min(), bins.max()
    level = (bins - low).mean() / jnp.where(high > low, high - low, 1.0)
    return jnp.where(high > low, level, 0.5)
