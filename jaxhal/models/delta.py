"""Linear attention: a layer that mixes by the gated delta rule."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxhal.models.config import Config, Delta
from jaxhal.models.feedforward import apply, linear
from jaxhal.models.layers import Geometry
from jaxhal.models.norm import Norm
from jaxhal.models.ops import Ops, wide

# What a layer goes on from: the last columns of queries, keys and values before they
# are convolved, and the state, [batch heads ...] each.
Recurrent = tuple[Array, Array, Array, Array]
_EPS = 1e-6


def nothing(delta: Delta, batch: int, dtype: Any) -> Recurrent:
    """Of rows of which nothing is read yet."""
    keys = jnp.zeros((batch, delta.key_heads, delta.kernel - 1, delta.key_dim), dtype)
    heads = batch, delta.value_heads
    values = jnp.zeros((*heads, delta.kernel - 1, delta.value_dim), dtype)
    state = jnp.zeros((*heads, delta.key_dim, delta.value_dim), wide(dtype))
    return keys, keys, values, state


def states(config: Config, batch: int, dtype: Any) -> tuple[Array, ...]:
    """The same of all layers, stacked; none where no layer has one."""
    if config.delta is None:
        return ()
    layers, each = len(config.delta.layers), nothing(config.delta, batch, dtype)
    return tuple(jnp.broadcast_to(part, (layers, *part.shape)) for part in each)


class DeltaNet(nnx.Module):
    """Queries, keys and values through a short causal convolution and the delta rule.

    To relevance all but the values are constants: what a layer gives is linear in them.
    """

    def __init__(self, config: Config, dtype: Any, rngs: nnx.Rngs):
        assert config.delta is not None
        self.delta, width = config.delta, config.hidden_size
        keys = self.delta.key_heads * self.delta.key_dim
        values = self.delta.value_heads * self.delta.value_dim
        heads = self.delta.value_heads

        def project(size: int) -> nnx.Linear:
            return linear(width, size, False, dtype, rngs)

        def convolve(size: int) -> nnx.Param:
            draw = nnx.initializers.normal(self.delta.kernel**-0.5)
            return nnx.Param(draw(rngs.params(), (self.delta.kernel, size), dtype))

        self.in_proj_q, self.in_proj_k = project(keys), project(keys)
        self.in_proj_v, self.in_proj_z = project(values), project(values)
        self.in_proj_a, self.in_proj_b = project(heads), project(heads)
        self.conv_q, self.conv_k = convolve(keys), convolve(keys)
        self.conv_v = convolve(values)
        self.log_decay = nnx.Param(jnp.zeros(heads, dtype))
        self.decay_bias = nnx.Param(jnp.ones(heads, dtype))
        plain = dataclasses.replace(config, norm_offset=0.0)
        self.norm = Norm(plain, self.delta.value_dim, dtype)
        self.out_proj = linear(values, width, False, dtype, rngs)
        self.activation = config.activation

    def mix(
        self,
        x: Float[Array, "batch query width"],
        geo: Geometry,
        before: Recurrent | None,
        ops: Ops,
    ) -> tuple[Float[Array, "batch query values"], Recurrent]:
        """What every row reads, and what the next ones go on from.

        Rows that are not valid change nothing; the valid ones stand side by side.
        """
        delta, (batch, query, _), valid = self.delta, x.shape, geo.query_valid
        assert valid is not None
        *columns, state = before or nothing(delta, batch, x.dtype)
        # The columns that end with the last valid row, or those before.
        end = jnp.max(jnp.where(valid, jnp.arange(1, query + 1), 0), axis=1)
        parts, after = [], []
        for layer, conv, heads, old in (
            (self.in_proj_q, self.conv_q, delta.key_heads, columns[0]),
            (self.in_proj_k, self.conv_k, delta.key_heads, columns[1]),
            (self.in_proj_v, self.conv_v, delta.value_heads, columns[2]),
        ):
            new = jnp.where(valid[..., None], apply(layer, x, ops), 0)
            new = new.reshape(batch, query, heads, -1).swapaxes(1, 2)
            seen = jnp.concatenate([old, new], axis=2)
            at = end[:, None] + jnp.arange(delta.kernel - 1)
            after.append(jnp.take_along_axis(seen, at[:, None, :, None], axis=2))
            kernel = conv[...].reshape(delta.kernel, heads, 1, -1)
            some = [seen[:, :, i : i + query] * kernel[i] for i in range(delta.kernel)]
            total = functools.reduce(ops.add, some)
            parts.append(ops.activate(total, self.activation))
        q, k, v = parts
        exact = wide(x.dtype)

        def unit(x: Array) -> Array:  # of length 1; `normalize` makes the mean 1
            size = delta.key_dim
            return ops.normalize(x, _EPS / size, False) * size**-0.5

        def spread(x: Array) -> Array:
            each = delta.value_heads // delta.key_heads
            return jnp.tile(x, (1, each, 1, 1)) if delta.tiled else x.repeat(each, 1)

        def each(layer: nnx.Linear) -> Array:  # [batch heads query]
            return apply(layer, x, ops).swapaxes(1, 2).astype(exact)

        slope = jnp.exp(self.log_decay[...].astype(exact))[:, None]
        bias = self.decay_bias[...].astype(exact)[:, None]
        decay = -slope * jax.nn.softplus(each(self.in_proj_a) + bias)
        beta = jax.nn.sigmoid(each(self.in_proj_b))
        decay, beta = (jnp.where(valid[:, None], it, 0) for it in (decay, beta))
        q = spread(unit(q) * delta.key_dim**-0.5)
        out, state = ops.delta(q, spread(unit(k)), v.astype(exact), decay, beta, state)
        out = self.norm(out.astype(x.dtype), ops)
        gate = ops.activate(apply(self.in_proj_z, x, ops), "silu")
        out = out.swapaxes(1, 2).reshape(batch, query, -1)
        return ops.multiply(gate, out), (*after, state)

    def output(self, mixed: Array, read: Array, ops: Ops) -> Array:
        """The output projection."""
        return apply(self.out_proj, mixed, ops)
