"""Relevance of any number of tokens as vectors of one length.

Hu et al., `LRP4RAG <https://arxiv.org/abs/2408.15533>`_, 2024, section 3.3.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def bin_weights(
    valid: Bool[Any, " tokens"], bins: int, padding: str = "last"
) -> Float[Array, "bins tokens"]:
    """Weights whose product with a profile is its mean in each bin (equations 7 to 9).

    Of ``n`` tokens bin ``i`` holds those from ``floor(i n / bins)`` up to, but not
    including, ``floor((i + 1) n / bins)``.

    Args:
      valid: False on padding, which belongs to no bin.
      bins: how many.
      padding: of the empty bins there are when tokens are fewer than bins: ``"last"``
        repeats the token such a bin falls into (the paper); ``"zeros"`` leaves it 0
        (the published code), which draws a comb whose teeth tell the length.

    Example:
      >>> bin_weights(jnp.array([True, True, True, False]), 2)
      Array([[1. , 0. , 0. , 0. ],
             [0. , 0.5, 0.5, 0. ]], dtype=float32)
    """
    if bins < 1:
        raise ValueError(f"bins is {bins}; resample to at least 1")
    if padding not in ("last", "zeros"):
        raise ValueError(f"padding is {padding!r}; use 'last' or 'zeros'")
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
    profile: Float[Any, " tokens"],
    length: int,
    valid: Bool[Any, " tokens"] | None = None,
    padding: str = "last",
) -> Float[Array, " length"]:
    """A profile as its means in ``length`` bins, with :func:`bin_weights`.

    Example:
      >>> resample(jnp.array([1.0, 2.0]), 4)
      Array([1., 1., 2., 2.], dtype=float32)
      >>> resample(jnp.array([1.0, 2.0]), 4, padding="zeros")
      Array([0., 1., 0., 2.], dtype=float32)
    """
    profile = jnp.asarray(profile)
    valid = jnp.ones(profile.shape, bool) if valid is None else valid
    weights = bin_weights(valid, length, padding).astype(profile.dtype)
    return _product(weights, profile)


def resample_2d(
    matrix: Float[Any, "rows columns"],
    shape: tuple[int, int],
    valid_rows: Bool[Any, " rows"] | None = None,
    valid_columns: Bool[Any, " columns"] | None = None,
    padding: str = "last",
) -> Float[Array, "bins other_bins"]:
    """:func:`resample` along both axes of a matrix."""
    matrix = jnp.asarray(matrix)
    rows = jax.vmap(lambda c: resample(c, shape[0], valid_rows, padding), 1, 1)(matrix)
    return jax.vmap(lambda r: resample(r, shape[1], valid_columns, padding))(rows)


def _product(weights: Array, values: Array) -> Array:
    return jnp.matmul(weights, values, precision=jax.lax.Precision.HIGHEST)


def normalized(
    relevance: Float[Any, "*rows tokens"], by: str, eps: float = 1e-6
) -> Float[Array, "*rows tokens"]:
    """Relevance of each row over its size, signs kept.

    Args:
      relevance: rows of ``R*``, or a mean of them; padding holds zeros.
      by: ``"sum"`` of the absolute values, or the ``"max"`` of them.
      eps: added to the size (section 4.2); a row of zeros stays so.
    """
    relevance = jnp.asarray(relevance)
    sizes = {"sum": jnp.sum, "max": jnp.max}
    if by not in sizes:
        raise ValueError(f"by is {by!r}; use 'sum' or 'max'")
    return relevance / (sizes[by](jnp.abs(relevance), axis=-1, keepdims=True) + eps)


def profile_level(
    profile: Float[Any, " tokens"],
    valid: Bool[Any, " tokens"] | None = None,
    length: int = 110,
    trim: int = 5,
) -> Float[Array, ""]:
    """Mean of a profile scaled to [0, 1] by its own extremes; low means hallucinated.

    The published threshold rule: resample to 110 with zeros in empty bins, drop 5 at
    both ends, subtract the least value and divide by the range.  It looks at the shape
    of the profile, not at its strength; a constant profile gives 1/2.
    """
    if trim < 0 or length <= 2 * trim:
        raise ValueError(f"trim is {trim} of {length} bins; leave at least 1 of them")
    bins = resample(profile, length, valid, "zeros")[trim : length - trim]
    low, high = bins.min(), bins.max()
    level = (bins - low).mean() / jnp.where(high > low, high - low, 1.0)
    return jnp.where(high > low, level, 0.5)
