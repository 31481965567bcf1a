"""Rotary position embeddings and their length scalings.

References:
  Su et al. 2021, RoFormer; Peng et al. 2023, YaRN (equations 17-25); the ``llama3`` and
  ``dynamic`` rules are those of the Hugging Face checkpoints that name them.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxhal.models.ops import wide
from jaxhal.models.rope_config import Rope


def frequencies(
    rope: Rope, head_dim: int, length: Int[Array, " batch"]
) -> Float[Array, "batch half"]:
    """Radians per position of each pair of channels, per sample.

    Only ``dynamic`` and ``longrope`` depend on ``length``, the sample's tokens, so that
    each row of a batch gets the frequencies it would get alone.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    base = rope.theta**-exponents
    if rope.kind == "linear":
        base = base / rope.factor
    elif rope.kind == "llama3":
        base = _llama3(rope, base)
    elif rope.kind == "yarn":
        base = _yarn(rope, base, head_dim)
    elif rope.kind in ("proportional", "none"):  # which is of no pairs
        base = np.where(np.arange(len(base)) < rope.pairs, base / rope.factor, 0.0)
    longer = base / np.asarray(rope.long_divisors or 1.0)
    base = base / np.asarray(rope.divisors or 1.0)
    inverse = jnp.broadcast_to(
        jnp.asarray(base, jnp.float32), (length.shape[0], len(base))
    )
    if rope.kind == "longrope":
        over = (length > rope.original_length)[:, None]
        inverse = jnp.where(over, jnp.asarray(longer, jnp.float32), inverse)
    if rope.kind == "dynamic":
        longest = jnp.maximum(length, rope.original_length).astype(jnp.float32)
        stretch = rope.factor * longest / rope.original_length - (rope.factor - 1)
        power = jnp.asarray(exponents * head_dim / (head_dim - 2), jnp.float32)
        inverse = inverse * stretch[:, None] ** -power
    return inverse


def _llama3(rope: Rope, base: np.ndarray) -> np.ndarray:
    wavelength = 2 * math.pi / base
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = (rope.original_length / wavelength - low) / (high - low)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * base / rope.factor + smooth * base


def _yarn(rope: Rope, base: np.ndarray, head_dim: int) -> np.ndarray:
    def channel(rotations: float) -> float:
        turns = rope.original_length / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(head_dim // 2) - low) / max(high - low, 0.001)
    keep = 1 - np.clip(ramp, 0, 1)
    return base / rope.factor * (1 - keep) + base * keep


def amplitude(rope: Rope) -> float:
    """The factor yarn and longrope put on cos and sin (1 for every other kind)."""
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "longrope":
        stretch = math.log(max(rope.factor, 1.0)) / math.log(rope.original_length)
        return math.sqrt(1 + stretch)

    def growth(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return growth(rope.mscale) / growth(rope.mscale_all_dim)
    return growth(1.0)


def tables(
    ropes: tuple[Rope, ...],
    turned: int,
    positions: Int[Array, "batch query"],
    length: Int[Array, " batch"],
) -> tuple[Float[Array, "rope batch query 1 turned"], ...]:
    """``(cos, sin)`` of every rope a model uses, float32."""
    cos, sin = [], []
    for rope in ropes:
        inverse = frequencies(rope, turned, length)
        angle = positions[:, :, None].astype(jnp.float32) * inverse[:, None, :]
        angle = jnp.concatenate([angle, angle], axis=-1)[:, :, None, :]
        cos.append(jnp.cos(angle) * amplitude(rope))
        sin.append(jnp.sin(angle) * amplitude(rope))
    return jnp.stack(cos), jnp.stack(sin)


def rotate(
    x: Float[Array, "batch query heads head"],
    cos: Float[Array, "batch query 1 turned"],
    sin: Float[Array, "batch query 1 turned"],
) -> Float[Array, "batch query heads head"]:
    """Turns each channel pair ``(i, i + head/2)`` by its position's angle.

    Where there are angles for the first channels only, the others stay.
    """
    if cos.shape[-1] < x.shape[-1]:
        x, rest = jnp.split(x, [cos.shape[-1]], axis=-1)
        return jnp.concatenate([rotate(x, cos, sin), rest], axis=-1)
    exact = x.astype(wide(x.dtype))
    first, second = jnp.split(exact, 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    return (exact * cos + turned * sin).astype(x.dtype)
