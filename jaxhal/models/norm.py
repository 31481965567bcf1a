"""The norms of a decoder."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxhal.models.config import Config
from jaxhal.models.ops import STANDARD, Ops


class Norm(nnx.Module):
    """RMSNorm or LayerNorm, computed in float32 or wider."""

    def __init__(self, config: Config, width: int, dtype: Any):
        self.scale = nnx.Param(jnp.full(width, 1.0 - config.norm_offset, dtype))
        self.centered = config.norm == "layer"
        biased = self.centered and config.norm_bias
        self.bias = nnx.Param(jnp.zeros(width, dtype)) if biased else None
        self.eps, self.offset = config.norm_eps, config.norm_offset

    def __call__(self, x: Array, ops: Ops = STANDARD) -> Array:
        y = ops.normalize(x, self.eps, self.centered)
        y = y * (self.scale[...].astype(y.dtype) + self.offset)
        if self.bias is not None:
            y = y + self.bias[...].astype(y.dtype)
        return y.astype(x.dtype)
