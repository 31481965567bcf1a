"""The feed-forward part of a layer: one perceptron, or many of which a token takes few.

Tokens are put in order of their experts and cut into blocks of one expert's each; a
loop over the blocks looks up its expert's kernels.  No token is dropped, and shapes
depend on the number of tokens alone.  On TPUs, ``jax.lax.ragged_dot`` takes what stands
in that order without blocks, but for kernels of few bits and rules of relevance.
Elsewhere it would multiply every row by the kernels of every expert, masked
(``jaxhal bench mixture``).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxhal.models import kernels, quantized
from jaxhal.models.config import Config
from jaxhal.models.norm import Norm
from jaxhal.models.ops import STANDARD, Ops, Turned, precision, wide

# Of a projection and what goes through it.
Product = Callable[[Any, Array], Array]


def linear(
    features_in: int, features_out: int, bias: bool, dtype: Any, rngs: nnx.Rngs
) -> nnx.Linear:
    """Parameters of one projection."""
    return nnx.Linear(
        features_in, features_out, use_bias=bias, param_dtype=dtype, rngs=rngs
    )


def apply(layer: nnx.Linear, x: Array, ops: Ops) -> Array:
    """What a linear layer makes of ``x``."""
    bias = None if layer.bias is None else layer.bias[...]
    # Not `kernel[...]`: a primitive may know kernels that are not one array.
    return _product(x, layer.kernel.get_value(), bias, ops)


def _product(x: Array, kernel: Any, bias: Array | None, ops: Ops) -> Array:
    if isinstance(kernel, Turned):
        return kernel.linear(x, bias, ops)
    if quantized.is_packed(kernel) and x.size == x.shape[-1]:
        # XLA on CPU would make the numbers within the product with a single row, one by
        # one: 7B parameters take a third of the time with a second row.
        return ops.linear(jnp.repeat(x, 2, 0), quantized.dense(kernel), bias)[:1]
    return ops.linear(x, quantized.dense(kernel), bias)


def perceptron(own: Any, product: Product, x: Array, ops: Ops) -> Array:
    """``down(act(gate x) * up x)``, or ``down(act(up x))`` without a gate.

    With a limit ``down(act(min(gate x, limit)) * (clip(up x) + 1))``.  ``product`` is
    taken of the module's ``own`` projections.
    """
    kind, limit = own.config.activation, own.config.gate_limit
    inner = product(own.up_proj, x)
    if own.gate_proj is None:
        return product(own.down_proj, ops.activate(inner, kind))
    if limit is not None:
        inner = ops.activate(inner, "clip", limit) + 1
    gate = ops.activate(product(own.gate_proj, x), kind, limit)
    return product(own.down_proj, ops.multiply(gate, inner))


class MLP(nnx.Module):
    """One :func:`perceptron`, gated where the family's are."""

    def __init__(self, config: Config, dtype: Any, rngs: nnx.Rngs):
        width, inner = config.hidden_size, config.intermediate_size
        bias, gate = config.mlp_bias, config.gated
        self.gate_proj = linear(width, inner, bias, dtype, rngs) if gate else None
        self.up_proj = linear(width, inner, bias, dtype, rngs)
        self.down_proj = linear(inner, width, bias, dtype, rngs)
        self.config = config

    def __call__(self, x: Array, ops: Ops) -> Array:
        return perceptron(self, lambda layer, x: apply(layer, x, ops), x, ops)


class Kernels(nnx.Module):
    """One projection of every expert, ``[experts width_in width_out]``."""

    def __init__(
        self, shape: tuple[int, int, int], bias: bool, dtype: Any, rngs: nnx.Rngs
    ):
        draw = nnx.initializers.lecun_normal(batch_axis=0)
        self.kernel = nnx.Param(draw(rngs.params(), shape, dtype))
        self.bias = nnx.Param(jnp.zeros(shape[::2], dtype)) if bias else None


class Experts(nnx.Module):
    """Gated perceptrons of which each token goes through those a router prefers.

    What they give is weighed by the router's softmax, over all experts or over those
    chosen (``norm_topk_prob``), and added up.  Of kernels in blocks of few bits, one
    expert's at a time become numbers.

    To relevance, an expert's products are linear layers like any other, and
    ``ops.route`` weighs what they give.  But for rule sets that follow derivatives the
    router's weights are constants, as gates and attention are to CP-LRP.
    """

    def __init__(self, config: Config, dtype: Any, rngs: nnx.Rngs):
        self.config, bias = config, config.mlp_bias
        count, width = config.num_experts, config.hidden_size
        into = count, width, config.expert_size or config.intermediate_size
        self.router = linear(width, count, bias, dtype, rngs)
        self.gate_proj = Kernels(into, bias, dtype, rngs)
        self.up_proj = Kernels(into, bias, dtype, rngs)
        self.down_proj = Kernels((count, into[2], width), bias, dtype, rngs)
        scaled = config.shared == "normed"
        self.scale = nnx.Param(jnp.ones(count, dtype)) if scaled else None

    def __call__(
        self,
        x: Float[Array, "batch query width"],
        ops: Ops,
        routed: Float[Array, "batch query width"] | None = None,
    ) -> Float[Array, "batch query width"]:
        """``routed`` is what the router sees, by default what its experts do."""
        read = (x,) if routed is None else (x, routed)
        return kernels.by_platform(functools.partial(self._on, ops), *read)

    def _on(self, ops: Ops, platform: kernels.Platform, *read: Array) -> Array:
        x, config = read[0], self.config
        packed = quantized.is_packed(self.up_proj.kernel.get_value())
        rows = x.size // x.shape[-1] * config.num_experts_per_tok
        ragged = platform.ragged and ops == STANDARD and not packed
        ragged = ragged and rows >= 2 * config.num_experts  # fewer are blocks of one
        mesh = jax.typeof(x).sharding.mesh
        count = mesh.shape.get("data", 1)
        if count == 1 or len(x) % count:
            return self.mixed(read, ops, ragged)
        # Each device sorts tokens of its own; XLA would gather those of all.
        definition, params = nnx.split(self)
        along = PartitionSpec("data")
        mixed = jax.shard_map(
            lambda params, read: nnx.merge(definition, params).mixed(read, ops, ragged),
            mesh=mesh,
            in_specs=(PartitionSpec(), along),
            out_specs=along,
            axis_names={"data"},
            check_vma=False,
        )
        return mixed(params, read)

    def mixed(self, read: tuple[Array, ...], ops: Ops, ragged: bool) -> Array:
        """Of what experts see, and what the router sees if that is something else."""
        x = read[0]
        rows, *seen = (part.reshape(-1, x.shape[-1]) for part in read)
        weights, chosen = self.routed(seen[0] if seen else rows, ops)
        if ragged:
            given = self._in_runs(rows, chosen)
        else:
            given = self._in_blocks(rows, chosen, ops)
        parts = ops.route(weights[..., None], given.astype(weights.dtype))
        total = functools.reduce(ops.add, jnp.moveaxis(parts, 1, 0))
        return total.astype(x.dtype).reshape(x.shape)

    def _in_runs(
        self, rows: Float[Array, "tokens width"], chosen: Int[Array, "tokens chosen"]
    ) -> Float[Array, "tokens chosen width"]:
        """What experts make of rows that stand together by them."""
        flat = chosen.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        held = jnp.bincount(flat, length=self.config.num_experts)

        def product(part: Kernels, x: Array) -> Array:
            kernel = part.kernel[...]
            bias = 0 if part.bias is None else part.bias[...][flat[order]]
            exact = precision(kernel.dtype)
            return jax.lax.ragged_dot(x, kernel, held, precision=exact) + bias

        given = perceptron(self, product, rows[order // chosen.shape[1]], STANDARD)
        return given[jnp.argsort(order)].reshape(*chosen.shape, -1)

    def _in_blocks(
        self,
        rows: Float[Array, "tokens width"],
        chosen: Int[Array, "tokens chosen"],
        ops: Ops,
    ) -> Float[Array, "tokens chosen width"]:
        """What experts make of rows in blocks that are all of one's own."""
        order = in_order(chosen, self.config.num_experts)
        # A way back keeps what products gave, and not the kernels of every block.
        block = jax.checkpoint(
            functools.partial(self._block, ops),
            policy=jax.checkpoint_policies.dots_saveable,
            prevent_cse=False,
        )
        given = jax.lax.map(block, (rows[order.source], order.expert))
        return given.reshape(-1, rows.shape[-1])[order.slot]

    def routed(
        self, rows: Float[Array, "tokens width"], ops: Ops
    ) -> tuple[Float[Array, "tokens chosen"], Int[Array, "tokens chosen"]]:
        """Weights of the experts that each token goes through, and their numbers."""
        logits = apply(self.router, rows, ops)
        shares = jax.nn.softmax(logits.astype(wide(logits.dtype)), axis=-1)
        weights, chosen = jax.lax.top_k(shares, self.config.num_experts_per_tok)
        if self.config.norm_topk_prob:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        if self.scale is not None:
            weights = weights * self.scale[...].astype(weights.dtype)[chosen]
        return weights, chosen

    def _block(self, ops: Ops, block: tuple[Array, Array]) -> Array:
        """What one expert makes of rows that are all its own."""
        x, expert = block

        def product(part: Kernels, x: Array) -> Array:
            # Or on CPU all kernels of 16 bits would become float32 before the loop.
            whole, at = jax.lax.optimization_barrier((part.kernel.get_value(), expert))
            own = quantized.of_expert(whole, at)
            bias = None if part.bias is None else part.bias[...][expert]
            return _product(x, own, bias, ops)

        return perceptron(self, product, x, ops)


class Shared(nnx.Module):
    """A perceptron that every token goes through, beside experts.

    Either a sigmoid of the token weighs it, or norms stand before and after both it and
    the experts, and the router reads the residual through a norm of its own.

    To relevance it is as other perceptrons are, and its gate is a constant, as the
    router's weights are: ``ops.route`` weighs what it gives.
    """

    def __init__(self, config: Config, dtype: Any, rngs: nnx.Rngs):
        width, gated = config.hidden_size, config.shared == "gated"

        def norm() -> Any:
            return None if gated else Norm(config, width, dtype)

        self.mlp = MLP(config, dtype, rngs)
        self.gate = linear(width, 1, False, dtype, rngs) if gated else None
        self.norm, self.post_norm = norm(), norm()
        self.experts_norm, self.post_experts_norm = norm(), norm()
        self.router_norm = norm()

    def __call__(
        self,
        x: Float[Array, "batch query width"],
        experts: Callable[..., Array],
        ops: Ops,
    ) -> Float[Array, "batch query width"]:
        """What both give; ``x`` is the residual where norms stand here."""
        if self.gate is not None:
            gate = jax.nn.sigmoid(apply(self.gate, x, ops))
            return ops.add(experts(x, ops), ops.route(gate, self.mlp(x, ops)))
        own = self.post_norm(self.mlp(self.norm(x, ops), ops), ops)
        routed = self.router_norm(x, ops) * x.shape[-1] ** -0.5
        given = experts(self.experts_norm(x, ops), ops, routed)
        return ops.add(own, self.post_experts_norm(given, ops))


class Order(NamedTuple):
    """Where rows of tokens stand in blocks of one expert's each."""

    source: Int[Array, "blocks size"]  # the token that a place holds; of free ones 0
    expert: Int[Array, " blocks"]
    slot: Int[Array, "tokens chosen"]  # the place of a token's row


def in_order(chosen: Int[Array, "tokens chosen"], experts: int) -> Order:
    """Blocks that hold every token once for each expert it goes through.

    A block holds half of an expert's share of all rows, so that at most half as many
    places as there are rows stay free; of few tokens it holds one row.
    """
    tokens, each = chosen.shape
    rows = tokens * each
    size = max(1, rows // (2 * experts))
    begun = min(experts, rows)
    count = begun + (rows - begun) // size  # no more, however rows fall

    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    held = jnp.bincount(flat, length=experts)
    blocks = -(-held // size)
    after = jnp.cumsum(blocks)
    within = jnp.arange(rows) - (jnp.cumsum(held) - held)[flat[order]]
    place = (after - blocks)[flat[order]] * size + within
    slot = jnp.zeros(rows, place.dtype).at[order].set(place)
    source = jnp.zeros(count * size, place.dtype).at[slot].set(jnp.arange(rows) // each)
    expert = jnp.searchsorted(after, jnp.arange(count), side="right")
    return Order(
        source.reshape(count, size),
        jnp.minimum(expert, experts - 1),
        slot.reshape(tokens, each),
    )
