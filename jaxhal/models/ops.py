"""The primitives a decoder is made of, as an argument of its one forward.

Swapping an entry swaps how relevance flows back through it, and nothing is patched:
inference passes :data:`STANDARD`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxhal.models import kernels, recurrence

# Accelerators may round float32 products to fewer bits unless told otherwise.
EXACT = jax.lax.Precision.HIGHEST

# Rows that CPU multiplies faster with a kernel that is turned.
_FEW = 64


def precision(*operands: Any) -> jax.lax.Precision:
    """Of a product: exact, unless an operand has 16 bits.

    Products of two such are exact anyway; on the way back they meet float32 ones, whose
    last bits are not worth a tenth of an accelerator's speed.
    """
    narrow = any(jnp.dtype(x).itemsize < 4 for x in operands)
    return jax.lax.Precision.DEFAULT if narrow else EXACT


def wide(dtype: Any) -> Any:
    """What sums are taken in: float32, or float64 where that is asked for."""
    return jnp.promote_types(dtype, jnp.float32)


_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "tanh": jnp.tanh,
    "clip": lambda x: x,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
}


def linear(
    x: Float[Array, "*batch width_in"],
    kernel: Float[Array, "width_in width_out"],
    bias: Float[Array, " width_out"] | None,
    dtype: Any = None,
) -> Float[Array, "*batch width_out"]:
    """``x W + b``, summed in float32 or wider, in ``dtype`` (by default that of ``x``).

    Accelerators sum in float32 and round when a product is asked for in bfloat16, and
    so stay with that type on the way back; on CPU that is a path four times slower than
    to round after.
    """
    out = x.dtype if dtype is None else dtype

    def product(platform: kernels.Platform, x: Array, kernel: Array) -> Array:
        asked = out if platform.rounds else wide(x.dtype)
        exact = precision(x.dtype)
        # CPU multiplies two rows of 16 bits eight times as fast as one.
        alone = x.ndim > 1 and x.size == x.shape[-1]
        alone = alone and x.dtype.itemsize < 4 and not platform.rounds
        rows = jnp.repeat(x, 2, axis=0) if alone else x
        y = jnp.matmul(rows, kernel, precision=exact, preferred_element_type=asked)
        return (y[:1] if alone else y).astype(out)

    y = kernels.by_platform(product, x, kernel)
    return y if bias is None else y + bias.astype(y.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Turned:
    """A kernel that lies in memory as ``Float[width_out width_in]``; a pytree."""

    rows: Any

    def linear(
        self, x: Array, bias: Array | None, ops: "Ops", dtype: Any = None
    ) -> Array:
        """``ops.linear(x, rows.T, bias, dtype)``, faster with few rows of ``x`` on CPU.

        There a kernel is copied into blocks for each product, which takes longer where
        it stands on the right.
        """
        few = x.size <= _FEW * x.shape[-1]
        if ops.linear is not linear or not few or x.dtype.itemsize < 4:
            return ops.linear(x, self.rows.T, bias, dtype)

        def product(platform: kernels.Platform, x: Array, rows: Array) -> Array:
            if platform.rounds:
                return linear(x, rows.T, None, dtype)
            y = jnp.matmul(rows, x.reshape(-1, x.shape[-1]).T, precision=EXACT)
            # Or the compiler would turn the product.
            y = jax.lax.optimization_barrier(y).T
            return y.reshape(*x.shape[:-1], -1).astype(dtype or x.dtype)

        y = kernels.by_platform(product, x, self.rows)
        return y if bias is None else y + bias.astype(y.dtype)


def scores(
    query: Float[Array, "batch kv_heads group query head"],
    key: Float[Array, "batch kv_heads key head"],
) -> Float[Array, "batch kv_heads group query key"]:
    """``q k^T``, float32 or wider; each key head serves its group of query heads."""
    return jnp.einsum(
        "bngqd,bnkd->bngqk",
        query,
        key,
        precision=precision(query.dtype),
        preferred_element_type=wide(query.dtype),
    )


def attend(
    scores: Float[Array, "batch kv_heads group query key"],
    bias: Float[Array, "batch 1 1 query key"],
    value: Float[Array, "batch kv_heads key head"],
    sink: Float[Array, "1 kv_heads group 1 1"] | None = None,
) -> tuple[
    Float[Array, "batch kv_heads group query head"],
    Float[Array, "batch kv_heads group query key"],
]:
    """Softmax over keys and the values it mixes, and the probabilities themselves.

    ``bias`` is 0 on allowed keys and hugely negative elsewhere; a row that allows none
    comes out uniform, not NaN.  The values are mixed before the division: on CPU the
    compiler otherwise recomputes the softmax inside the product, at three times the
    cost, and a select in place of the addition costs as much again.

    A ``sink`` is the score of one more key, whose value is 0: probabilities of the
    others add up to what it leaves, and are 0 in a row that allows none.
    """
    (weight,), total = _weights([scores + bias], sink)
    return (mixed(weight, value) / total).astype(value.dtype), weight / total


def _weights(parts: list[Array], sink: Array | None) -> tuple[list[Array], Array]:
    """Exponentials of scores, which are in parts along their keys, and what they and
    that of a sink add up to.
    """
    top = functools.reduce(jnp.maximum, (x.max(-1, keepdims=True) for x in parts))
    top = top if sink is None else jnp.maximum(top, sink)
    parts = [jnp.exp(x - top) for x in parts]
    total = functools.reduce(jnp.add, (x.sum(-1, keepdims=True) for x in parts))
    return parts, total if sink is None else total + jnp.exp(sink - top)


def mixed(weight: Array, value: Array) -> Array:
    """Values ``[batch kv_heads key head]`` summed by weights, float32 or wider."""
    return jnp.einsum(
        "bngqk,bnkd->bngqd",
        weight.astype(value.dtype),
        value,
        precision=precision(value.dtype),
        preferred_element_type=wide(value.dtype),
    )


def attend_after(
    query: Float[Array, "batch kv_heads group query head"],
    prefix: tuple[Array, Array],
    own: tuple[Array, Array],
    bias: Float[Array, "batch 1 1 query key"],
    cap: float | None = None,
    sink: Float[Array, "1 kv_heads group 1 1"] | None = None,
) -> tuple[
    Float[Array, "batch kv_heads group query head"],
    Float[Array, "batch kv_heads group query key"],
]:
    """:func:`scores`, capped, and :func:`attend` over keys and values that several rows
    share and a row's own.

    A row of ``prefix``, keys ``[prompts kv_heads head prompt]`` and values ``[prompts
    kv_heads prompt head]``, stands before those of as many consecutive rows of ``own``
    as there are for one.  It is read once for all of them, as more queries of one
    group.  On CPU keys of the other order would be transposed again for each token.
    """
    (keys, values), rows = prefix, query.shape[0]
    prompts, kv_heads, columns, _ = values.shape
    copies = rows // prompts

    # Rows of one prompt side by side under each head, [prompts heads copies ...], is
    # how products with the prefix come out and go in; only what is short is moved.
    def gather(x: Array) -> Array:
        return x.reshape(prompts, copies, *x.shape[1:]).swapaxes(1, 2)

    def spread(x: Array) -> Array:
        return x.swapaxes(1, 2).reshape(rows, *x.shape[1:2], *x.shape[3:])

    def grouped(x: Array) -> Array:
        return x.reshape(prompts, kv_heads, -1, *x.shape[4:])

    def apart(x: Array) -> Array:
        return x.reshape(prompts, kv_heads, copies, -1, *x.shape[3:])

    bias = gather(bias)
    queries = grouped(gather(query))
    shared = capped(apart(scores(queries, keys.swapaxes(-1, -2))), cap)
    lone = capped(gather(scores(query, own[0])), cap)
    both = [shared + bias[..., :columns], lone + bias[..., columns:]]
    (shared, lone), total = _weights(both, None if sink is None else sink[:, :, None])
    out = apart(mixed(grouped(shared), values))
    out = spread((out + gather(mixed(spread(lone), own[1]))) / total)
    weight = spread(jnp.concatenate([shared, lone], axis=-1) / total)
    return out.astype(values.dtype), weight


def normalize(
    x: Float[Array, "*batch width"], eps: float, center: bool
) -> Float[Array, "*batch width"]:
    """Unit root mean square (``center``: variance about the mean), float32 or wider."""
    x = x.astype(wide(x.dtype))
    if center:
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def activate(
    x: Float[Array, "*shape"], kind: str, limit: float | None = None
) -> Float[Array, "*shape"]:
    """The MLP's non-linearity, and that of :func:`capped`; of ``x`` up to a limit.

    ``clip`` is ``x`` within ``-limit`` and ``limit``.
    """
    if limit is not None:
        x = jnp.clip(x, -limit if kind == "clip" else None, limit)
    return _ACTIVATIONS[kind](x)


class Ops(NamedTuple):
    """One function per primitive; signatures as in this module."""

    linear: Callable[..., Array] = linear
    scores: Callable[..., Array] = scores
    attend: Callable[..., tuple[Array, Array]] = attend
    normalize: Callable[..., Array] = normalize
    activate: Callable[..., Array] = activate
    multiply: Callable[[Array, Array], Array] = jnp.multiply
    add: Callable[[Array, Array], Array] = jnp.add
    # Weights of experts, and what those give.
    route: Callable[[Array, Array], Array] = jnp.multiply
    delta: Callable[..., tuple[Array, Array]] = recurrence.delta


STANDARD = Ops()


def capped(x: Array, limit: float | None, ops: Ops = STANDARD) -> Array:
    """``limit tanh(x / limit)``; ``x`` where there is no limit."""
    return x if limit is None else ops.activate(x / limit, "tanh") * limit
