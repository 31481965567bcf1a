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
from jaxhal.models.feedforward import MLP, Experts, Shared, apply, linear
from jaxhal.models.mesh import shares
from jaxhal.models.norm import Norm
from jaxhal.models.ops import STANDARD, Ops, attend_after, capped, wide


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
    # Where layers that see all keys have heads of their own: (cos, sin) of those.
    full: tuple[Array, Array] | None = None
    # What each layer gets of every token.
    layer_inputs: Float[Array, "layer batch query part"] | None = None


class LayerIndex(NamedTuple):
    """What differs between the layers of one model, scanned along with the weights."""

    layer: Int[Array, ""]
    window: Int[Array, ""]
    rope: Int[Array, ""]
    inputs: Float[Array, "batch query part"] | None = None

    @classmethod
    def of(cls, config: Config, inputs: Any = None) -> "LayerIndex":
        """Those of all layers, stacked."""
        layers = jnp.arange(config.num_hidden_layers)
        windows, ropes = map(jnp.asarray, (config.windows, config.rope_of_layer))
        return cls(layers, windows, ropes, inputs)


class RowTap(NamedTuple):
    """``reduce(probs [batch heads query key], rows [query])`` for rows >= first_row."""

    first_row: int
    reduce: Callable[[Array, Array], Any]


class Attention(nnx.Module):
    """Grouped-query attention with rotary or no position code.

    Layers that borrow keys and values make queries alone.
    """

    def __init__(
        self, config: Config, dtype: Any, rngs: nnx.Rngs, kind: str = "self_attn"
    ):
        self.kind, self.config = kind, (config := config.of(kind))
        d, width = config.head_dim, config.hidden_size

        heads = config.num_attention_heads * d
        kv_heads = config.num_key_value_heads * d

        def project(size: int) -> nnx.Linear:
            return linear(width, size, config.qkv_bias, dtype, rngs)

        own, one = not config.borrows, config.keys_as_values
        self.q_proj = project(heads)
        self.k_proj = project(kv_heads) if own else None
        self.v_proj = project(kv_heads) if own and not one else None
        self.o_proj = linear(heads, width, config.o_bias, dtype, rngs)
        self.output_gate = project(heads) if config.attention_gate else None
        widths = (heads, kv_heads) if config.qk_norm == "whole" else (d, d)
        norms = [Norm(config, of, dtype) if config.qk_norm else None for of in widths]
        self.q_norm, self.k_norm = norms[0], norms[1] if own else None
        sinks = jnp.zeros(config.num_attention_heads, dtype) if config.sinks else None
        self.sinks = None if sinks is None else nnx.Param(sinks)

    def queries(
        self, x: Float[Array, "batch query width"], geo: Geometry, at: LayerIndex, ops
    ) -> Float[Array, "batch kv_heads group query head"]:
        """Those of each group of heads that share a key head."""
        config, (batch, query, _) = self.config, x.shape
        q = self._heads(apply(self.q_proj, x, ops), self.q_norm, ops)
        q = self._turned(q, geo, at)
        if config.query_growth is not None:
            by, over = config.query_growth
            grown = jnp.log1p((geo.query_position // over).astype(wide(q.dtype)))
            q = (q * (1 + by * grown[:, :, None, None])).astype(q.dtype)
        q = q * config.scale
        q = q.reshape(batch, query, config.num_key_value_heads, -1, config.head_dim)
        return q.transpose(0, 2, 3, 1, 4)

    def keys(
        self, x: Float[Array, "batch query width"], geo: Geometry, at: LayerIndex, ops
    ) -> tuple[Array, Array]:
        """Keys and values, ``[batch kv_heads query head]``."""
        assert self.k_proj is not None
        k = apply(self.k_proj, x, ops)
        v = k if self.v_proj is None else apply(self.v_proj, x, ops)
        k = self._turned(self._heads(k, self.k_norm, ops), geo, at)
        v = self._heads(v, None, ops)
        if self.config.value_norm:
            v = ops.normalize(v, self.config.norm_eps, False).astype(v.dtype)
        return k.swapaxes(1, 2), v.swapaxes(1, 2)

    def _heads(self, x: Array, norm: Norm | None, ops: Ops) -> Array:
        """``[batch query heads head]``, normed as one or each head by itself."""
        whole = self.config.qk_norm == "whole"
        if norm is not None and whole:
            x = norm(x, ops)
        x = x.reshape(*x.shape[:2], -1, self.config.head_dim)
        return x if norm is None or whole else norm(x, ops)

    def _turned(self, x: Array, geo: Geometry, at: LayerIndex) -> Array:
        if self.kind == "full_attn" and geo.full is not None:
            return rope.rotate(x, *geo.full)
        if geo.cos is None or geo.sin is None:
            return x
        return rope.rotate(x, geo.cos[at.rope], geo.sin[at.rope])

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
        mixed = functools.partial(self._mixed, tap=tap, ops=ops)
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
        fused = platform.fused if whole and ordinary else None
        outputs, seen, segments = [], None, [(0, first)]
        if fused is not None and platform.takes(q, k, cap, sink):
            widths = self.config.windows
            out = fused(q, k, v, geo.key_valid, widths, window, cap, sink)
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
            if 3 * row_bytes * rows > platform.kept * math.prod(shares(q, batch)):
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
        self.self_attn = Attention(config, dtype, rngs) if config.alike else None
        self.full_attn: Any = None
        self.linear_attn: Any = None
        self.mlp = (Experts if config.num_experts else MLP)(config, dtype, rngs)
        assert not (config.shared and block.startswith("parallel")), "none is computed"
        self.shared = Shared(config, dtype, rngs) if config.shared else None

        def norm(*blocks: str) -> Norm | None:
            return Norm(config, width, dtype) if block in blocks else None

        self.input_norm = norm("pre", "sandwich", "parallel", "parallel_two_norms")
        own = config.shared == "normed"  # which has norms of its own
        self.mlp_norm = None if own else norm("pre", "sandwich", "parallel_two_norms")
        self.post_attention_norm = norm("sandwich", "post")
        self.post_mlp_norm = norm("sandwich", "post")
        part = config.layer_inputs
        self.input_gate = part and linear(width, part[1], False, dtype, rngs)
        self.input_proj = part and linear(part[1], width, False, dtype, rngs)
        self.post_input_norm = part and Norm(config, width, dtype)
        self.scale = nnx.Param(jnp.ones(1, dtype)) if config.layer_scale else None

    def __call__(
        self,
        x: Float[Array, "batch query width"],
        attend: Callable[[Any, Array], tuple[Array, Any]],
        ops: Ops,
        inputs: Float[Array, "batch query part"] | None = None,
    ) -> tuple[
        Float[Array, "batch query width"], Float[Array, "batch query width"], Any
    ]:
        """``attend(mixer, normed)`` returns mixed values and anything beside.

        What leaves the layer comes with what would without its feed-forward part, to
        which what is made of the layer's own ``inputs`` counts.
        """
        scale = self.config.residual_scale

        def normed(norm: Norm | None, x: Array) -> Array:
            return x if norm is None else norm(x, ops)

        def scaled(part: Array) -> Array:
            return part if scale == 1.0 else part * scale

        read = normed(self.input_norm, x)
        kinds = self.self_attn, self.full_attn, self.linear_attn
        mixer: Any = next(kind for kind in kinds if kind is not None)
        mixed, beside = attend(mixer, read)
        mixed = mixer.output(mixed, read, ops)
        if self.config.block in ("parallel", "parallel_two_norms"):
            other = read if self.mlp_norm is None else self.mlp_norm(x, ops)
            out = ops.add(x, ops.add(mixed, self.mlp(other, ops)))
            return out, ops.add(x, mixed), beside
        x = ops.add(x, scaled(normed(self.post_attention_norm, mixed)))
        inner, shared = normed(self.mlp_norm, x), self.shared
        inner = self.mlp(inner, ops) if shared is None else shared(inner, self.mlp, ops)
        out = ops.add(x, scaled(normed(self.post_mlp_norm, inner)))
        if inputs is not None:
            out = ops.add(out, self._of_inputs(out, inputs, ops))
        if self.scale is not None:
            out, x = (part * self.scale[...] for part in (out, x))
        return out, x, beside

    def _of_inputs(self, x: Array, inputs: Array, ops: Ops) -> Array:
        """To relevance the inputs are constants that weigh what a gate lets through."""
        assert self.input_gate and self.input_proj and self.post_input_norm
        gate = ops.activate(apply(self.input_gate, x, ops), self.config.activation)
        out = apply(self.input_proj, ops.route(inputs, gate), ops)
        return self.post_input_norm(out, ops)
