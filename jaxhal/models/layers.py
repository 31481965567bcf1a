"""The parts of a decoder block: parameter containers whose calls take ``ops``.

Attention goes in blocks of query rows, so that no array of heads x seq x seq exists;
rows from ``first_row`` on are shown to a tap, which turns them into small features.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxhal.models import kernels, rope
from jaxhal.models.config import Config
from jaxhal.models.feedforward import MLP, Experts, apply, linear
from jaxhal.models.ops import STANDARD, Ops, attend_after, capped, wide

# Of one layer's attention, what a way back may keep; beyond it blocks run again.
KEPT_BYTES = 4 << 30


class Geometry(NamedTuple):
    """Where the tokens of a call stand; shared by all layers."""

    query_position: Int[Array, "batch query"]
    key_position: Int[Array, "batch key"]
    key_valid: Bool[Array, "batch key"]
    cos: Float[Array, "rope batch query 1 turned"] | None
    sin: Float[Array, "rope batch query 1 turned"] | None
    # Of an encoder of n rows, added to scores: by key - query, from 1 - n on.
    by_distance: Float[Array, "heads distance"] | None = None
    # Where layers keep a state: the rows that may change it.
    query_valid: Bool[Array, "batch query"] | None = None


class LayerIndex(NamedTuple):
    """What differs between the layers of one model, scanned along with the weights."""

    layer: Int[Array, ""]
    window: Int[Array, ""]
    rope: Int[Array, ""]

    @classmethod
    def of(cls, config: Config) -> "LayerIndex":
        """Those of all layers, stacked."""
        layers = jnp.arange(config.num_hidden_layers)
        parts = (config.windows, config.rope_of_layer)
        return cls(layers, *map(jnp.asarray, parts))


class RowTap(NamedTuple):
    """``reduce(probs [batch heads query key], rows [query])`` for rows >= first_row."""

    first_row: int
    reduce: Callable[[Array, Array], Any]


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


class Attention(nnx.Module):
    """Grouped-query attention with rotary or no position code."""

    def __init__(self, config: Config, dtype: Any, rngs: nnx.Rngs):
        self.config = config
        d, width = config.head_dim, config.hidden_size

        heads = config.num_attention_heads * d
        kv_heads = config.num_key_value_heads * d
        self.q_proj = linear(width, heads, config.qkv_bias, dtype, rngs)
        self.k_proj = linear(width, kv_heads, config.qkv_bias, dtype, rngs)
        self.v_proj = linear(width, kv_heads, config.qkv_bias, dtype, rngs)
        self.o_proj = linear(heads, width, config.o_bias, dtype, rngs)
        self.output_gate = (
            linear(width, heads, config.qkv_bias, dtype, rngs)
            if config.attention_gate
            else None
        )
        widths = (heads, kv_heads) if config.qk_norm == "whole" else (d, d)
        norms = [Norm(config, of, dtype) if config.qk_norm else None for of in widths]
        self.q_norm, self.k_norm = norms
        sinks = jnp.zeros(config.num_attention_heads, dtype) if config.sinks else None
        self.sinks = None if sinks is None else nnx.Param(sinks)

    def project(
        self, x: Float[Array, "batch query width"], geo: Geometry, at: LayerIndex, ops
    ) -> tuple[Array, Array, Array]:
        """Queries ``[batch kv group query head]``, keys and values without group."""
        config, (batch, query, _) = self.config, x.shape
        d, kv = config.head_dim, config.num_key_value_heads
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (apply(layer, x, ops) for layer in layers)
        if config.qk_norm == "whole":
            q, k = self._normed(q, k, ops)
        q, k, v = (part.reshape(batch, query, -1, d) for part in (q, k, v))
        if config.qk_norm == "head":
            q, k = self._normed(q, k, ops)
        if geo.cos is not None and geo.sin is not None:
            cos, sin = geo.cos[at.rope], geo.sin[at.rope]
            q, k = rope.rotate(q, cos, sin), rope.rotate(k, cos, sin)
        if config.query_growth is not None:
            by, over = config.query_growth
            grown = jnp.log1p((geo.query_position // over).astype(wide(q.dtype)))
            q = (q * (1 + by * grown[:, :, None, None])).astype(q.dtype)
        q = (q * config.scale).reshape(batch, query, kv, -1, d)
        swap = (0, 2, 1, 3)
        return q.transpose(0, 2, 3, 1, 4), k.transpose(swap), v.transpose(swap)

    def _normed(self, q: Array, k: Array, ops: Ops) -> tuple[Array, Array]:
        assert self.q_norm is not None and self.k_norm is not None
        return self.q_norm(q, ops), self.k_norm(k, ops)

    def mix(
        self,
        q: Float[Array, "batch kv_heads group query head"],
        k: Float[Array, "batch kv_heads key head"],
        v: Float[Array, "batch kv_heads key head"],
        geo: Geometry,
        at: LayerIndex,
        tap: RowTap | None,
        ops: Ops,
        prefix: tuple[Array, Array] | None = None,
    ) -> tuple[Float[Array, "batch query width"], Any]:
        """Attention output of every row, and what the tap made of the rows it saw.

        ``prefix`` are keys and values before ``k`` and ``v``, shared by several rows.
        """
        batch, kv, _, rows, _ = q.shape
        sink = None
        if self.sinks is not None:
            sink = self.sinks[...].astype(wide(q.dtype)).reshape(1, kv, -1, 1, 1)

        def mixed(platform, *arrays):
            q, k, v, geo, window, prefix, sink = arrays
            return self._mixed(platform, q, k, v, geo, window, prefix, sink, tap, ops)

        out, seen = kernels.by_platform(mixed, q, k, v, geo, at.window, prefix, sink)
        return out.transpose(0, 3, 1, 2, 4).reshape(batch, rows, -1), seen

    def _mixed(
        self,
        platform: kernels.Platform,
        q: Array,
        k: Array,
        v: Array,
        geo: Geometry,
        window: Array,
        prefix: tuple[Array, Array] | None,
        sink: Array | None,
        tap: RowTap | None,
        ops: Ops,
    ) -> tuple[Float[Array, "batch kv_heads group query head"], Any]:
        """The same on one platform: a kernel, and blocks where none will do."""
        batch, _, _, rows, _ = q.shape
        columns = k.shape[2] + (0 if prefix is None else prefix[1].shape[2])
        first, cap = rows if tap is None else tap.first_row, self.config.attention_cap
        row_bytes = 4 * batch * self.config.num_attention_heads * columns
        index = jnp.arange(rows)

        def block(q, position, index, keys: int, reduce=None, values=True):
            bias = _bias(position, geo, keys, window, self.config.causal)
            if prefix is None:
                scores = capped(ops.scores(q, k[:, :, :keys]), cap, ops)
                if geo.by_distance is not None:
                    distance = jnp.arange(keys) - index[:, None]
                    added = geo.by_distance[:, distance + rows - 1]
                    scores = scores + added.reshape(*scores.shape[1:])
                out, probs = ops.attend(scores, bias, v[:, :, :keys], sink)
            else:
                out, probs = attend_after(q, prefix, (k, v), bias, cap, sink)
            out = out if values else None
            if reduce is None:
                return out, None
            merged = (batch, self.config.num_attention_heads, *probs.shape[-2:])
            return out, reduce(probs.reshape(merged), index)

        # Keys beyond a segment's last row are masked anyway; a cached call (fewer rows
        # than columns) cannot know its columns and looks at all of them.
        whole = rows == columns and self.config.causal
        ordinary = (ops.scores, ops.attend) == (STANDARD.scores, STANDARD.attend)
        plain = whole and ordinary and cap is None and sink is None
        fused = platform.fused if plain else None
        outputs, seen, segments = [], None, [(0, first)]
        if fused is not None and platform.takes(q, k):
            out = fused(q, k, v, geo.key_valid, self.config.windows, window)
            outputs, segments = [out], []
        elif whole:
            segments = _segments(first, platform.segments)
        fused_already = bool(outputs)
        ranges = [*segments, (first, rows)]
        # Split at once: the way back joins parts, where it pads and adds up slices.
        parts = jnp.split(q, [start for start, _ in ranges], axis=3)[1:]
        for (start, stop), part in zip(ranges, parts, strict=True):
            if start == stop:
                continue
            keys = stop if rows == columns else columns
            budget, reduce = platform.plain, None
            if tap is not None and start == first:
                budget, reduce = platform.tapped, tap.reduce
            size = max(16, budget // (row_bytes * keys // columns))
            each = part, geo.query_position[:, start:stop], index[start:stop]
            shown = functools.partial(
                block, keys=keys, reduce=reduce, values=not fused_already
            )
            if 3 * row_bytes * rows > KEPT_BYTES:
                shown = jax.checkpoint(shown)
            out, seen = in_blocks(shown, each, (3, 1, 0), (3, 2), size)
            outputs += [] if fused_already else [out]
        out = jnp.concatenate(outputs, axis=3) if len(outputs) > 1 else outputs[0]
        return out, seen

    def output(self, mixed: Array, read: Array, ops: Ops) -> Array:
        """The output projection, of what a gate lets through where there is one.

        To relevance the gate is a constant, as weights of experts are.
        """
        if self.output_gate is not None:
            gate = jax.nn.sigmoid(apply(self.output_gate, read, ops))
            mixed = ops.route(gate, mixed)
        return apply(self.o_proj, mixed, ops)


def _bias(
    position: Int[Array, "batch query"],
    geo: Geometry,
    keys: int,
    window: Array,
    causal: bool,
) -> Float[Array, "batch 1 1 query key"]:
    """0 on valid keys up to the query, or all, inside the window; -1e30 elsewhere."""
    distance = position[:, :, None] - geo.key_position[:, None, :keys]
    allowed = geo.key_valid[:, None, :keys]
    if causal:
        allowed, near = allowed & (distance >= 0), distance < window
    else:  # the window counts keys on either side
        near = jnp.abs(distance) <= window
    return jnp.where(allowed & ((window == 0) | near), 0.0, -1e30)[:, None, None]


def _segments(rows: int, most: int) -> list[tuple[int, int]]:
    """Splits rows into at most ``most`` ranges of a multiple of 64 rows."""
    size = max(64, math.ceil(rows / most / 64) * 64)
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]


def in_blocks(
    function: Callable[..., tuple],
    arrays: tuple[Array, ...],
    axes: tuple[int, ...],
    out_axes: tuple[int, ...],
    size: int,
) -> tuple:
    """Maps a function over blocks of at most ``size`` rows.

    Rows are one axis of each array, and one of all leaves of each output.
    """
    rows = arrays[0].shape[axes[0]]
    count = math.ceil(rows / size)
    if count <= 1:
        return function(*arrays)
    size = math.ceil(rows / count)
    count = math.ceil(rows / size)
    pad = count * size - rows

    def split(x, axis):
        x = jnp.pad(x, [(0, pad if a == axis else 0) for a in range(x.ndim)], "edge")
        shape = (*x.shape[:axis], count, size, *x.shape[axis + 1 :])
        return jnp.moveaxis(x.reshape(shape), axis, 0)

    def join(x, axis):
        x = jnp.moveaxis(x, 0, axis)
        x = x.reshape(*x.shape[:axis], count * size, *x.shape[axis + 2 :])
        return jax.lax.slice_in_dim(x, 0, rows, axis=axis)

    blocks = tuple(map(split, arrays, axes))
    outputs = jax.lax.map(lambda block: function(*block), blocks)
    return tuple(
        jax.tree.map(lambda leaf, axis=axis: join(leaf, axis), part)
        for part, axis in zip(outputs, out_axes, strict=True)
    )


class Block(nnx.Module):
    """One layer; ``config.block`` says how norms, parts and residuals are wired."""

    def __init__(self, config: Config, dtype: Any, rngs: nnx.Rngs):
        self.config = config
        width, block = config.hidden_size, config.block
        # Where mixers differ each kind is stacked by itself: see jaxhal.models.stacks.
        alike = config.delta is None
        self.self_attn = Attention(config, dtype, rngs) if alike else None
        self.linear_attn: Any = None
        self.mlp = (Experts if config.num_experts else MLP)(config, dtype, rngs)

        def norm(*blocks: str) -> Norm | None:
            return Norm(config, width, dtype) if block in blocks else None

        self.input_norm = norm("pre", "sandwich", "parallel", "parallel_two_norms")
        self.mlp_norm = norm("pre", "sandwich", "parallel_two_norms")
        self.post_attention_norm = norm("sandwich", "post")
        self.post_mlp_norm = norm("sandwich", "post")

    def __call__(
        self,
        x: Float[Array, "batch query width"],
        attend: Callable[[Any, Array], tuple[Array, Any]],
        ops: Ops,
    ) -> tuple[
        Float[Array, "batch query width"], Float[Array, "batch query width"], Any
    ]:
        """``attend(mixer, normed)`` returns mixed values and anything beside.

        What leaves the layer comes with what would without its feed-forward part.
        """
        scale = self.config.residual_scale

        def normed(norm: Norm | None, x: Array) -> Array:
            return x if norm is None else norm(x, ops)

        def scaled(part: Array) -> Array:
            return part if scale == 1.0 else part * scale

        read = normed(self.input_norm, x)
        mixer = self.linear_attn if self.self_attn is None else self.self_attn
        mixed, beside = attend(mixer, read)
        mixed = mixer.output(mixed, read, ops)
        if self.config.block in ("parallel", "parallel_two_norms"):
            other = read if self.mlp_norm is None else self.mlp_norm(x, ops)
            out = ops.add(x, ops.add(mixed, self.mlp(other, ops)))
            return out, ops.add(x, mixed), beside
        x = ops.add(x, scaled(normed(self.post_attention_norm, mixed)))
        inner = self.mlp(normed(self.mlp_norm, x), ops)
        return ops.add(x, scaled(normed(self.post_mlp_norm, inner))), x, beside
