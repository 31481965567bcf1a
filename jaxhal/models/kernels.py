"""Attention by platform: fused kernels where there are any, and sizes of blocks.

What a kernel computes is what blocks of rows do, in one call and without any scores in
memory.  It mixes the values of all rows; probabilities, of the rows that reducers look
at, are computed beside it.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Heads wider than this are left to blocks: only some devices take them.
_WIDEST = 128
# Compute capability of the first GPUs that have cuDNN's flash attention.
_OLDEST = 8.0


class Platform(NamedTuple):
    """How attention is computed on one kind of device."""

    # Bytes alive at once: of attention probabilities of plain rows and of tapped rows,
    # and of the logits of rows that reducers look at.
    plain: int
    tapped: int
    logits: int
    # Parts of a prompt whose rows see the keys up to their own end and no others.
    segments: int
    # Whether products of 16 bits are asked for in that type, though summed in more.
    rounds: bool = False
    # (q, k, v, valid, windows, window) -> what all rows mix, for what `takes` them.
    fused: Callable[..., Array] | None = None


def flash(
    q: Float[Array, "batch kv_heads group seq head"],
    k: Float[Array, "batch kv_heads seq head"],
    v: Float[Array, "batch kv_heads seq head"],
    valid: Bool[Array, "batch seq"],
    windows: tuple[int, ...],
    window: Int[Array, ""],
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "batch kv_heads group seq head"]:
    """Each valid row sees the valid columns up to its own that a window reaches.

    As ``jax.nn.dot_product_attention`` has it; ``windows`` are those of all layers.
    """
    batch, kv, group, seq, d = q.shape
    # Padding goes after a row's tokens, where a length can say so.
    real = jnp.cumsum(valid, axis=1, dtype=jnp.int32)
    count = real[:, -1:]
    place = jnp.where(valid, real - 1, count + jnp.arange(seq) - real)
    order = jax.vmap(lambda at: jnp.zeros_like(at).at[at].set(jnp.arange(seq)))(place)
    # A row of padding alone has to have a key to look at.
    length = jnp.maximum(count[:, 0], 1)

    def taken(x: Array, at: Array) -> Array:
        return jnp.take_along_axis(x, at[:, :, None, None], axis=1)

    query = q.transpose(0, 3, 1, 2, 4).reshape(batch, seq, kv * group, d)
    rows = query, k.swapaxes(1, 2), v.swapaxes(1, 2)
    query, key, value = (taken(x, order) for x in rows)

    def attend(width: int) -> Callable[[], Array]:
        return lambda: jax.nn.dot_product_attention(
            query,
            key,
            value,
            scale=1.0,
            is_causal=True,
            query_seq_lengths=length,
            key_value_seq_lengths=length,
            local_window_size=(width - 1, 0) if 0 < width < seq else None,
            implementation=implementation,
        )

    out = _by_window(attend, windows, window)
    out = taken(out, place).reshape(batch, seq, kv, group, d)
    return out.transpose(0, 2, 3, 1, 4)


def _by_window(
    attend: Callable[[int], Callable[[], Array]],
    windows: tuple[int, ...],
    window: Int[Array, ""],
) -> Array:
    """What a layer of one of a model's windows gives, as kernels fix them."""
    widths = sorted(set(windows)) or [0]
    if len(widths) == 1:
        return attend(widths[0])()
    at = jnp.searchsorted(jnp.asarray(widths), window)
    return jax.lax.switch(at, [attend(width) for width in widths])


def takes(q: Array) -> bool:
    """Whether kernels compute what these queries ask for."""
    return q.dtype in (jnp.bfloat16, jnp.float16) and (
        q.shape[-1] <= _WIDEST and q.shape[-1] % 8 == 0
    )


# Measured on CPU at (512, 96) and (2048, 256): small enough to stay near the caches,
# large enough that a block's matrix product is efficient.
CPU = Platform(plain=8 << 20, tapped=64 << 20, logits=64 << 20, segments=8)
# Measured on an H200 at 8 x 2,048: few large products, few programs to compile.
CUDA = Platform(
    plain=256 << 20,
    tapped=128 << 20,
    logits=256 << 20,
    segments=2,
    rounds=True,
    fused=flash,
)
# Compiled for a v5e and not measured: blocks of hundreds of rows for its matrix units.
TPU = Platform(
    plain=256 << 20, tapped=128 << 20, logits=256 << 20, segments=4, rounds=True
)


@functools.cache
def installed() -> dict[str, Platform]:
    """Platforms that JAX's plugins here compile for, beside the CPU."""
    found = {}
    if any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))):
        found["cuda"] = CUDA
        if jax.default_backend() == "gpu":
            device: Any = jax.devices()[0]
            if float(device.compute_capability) < _OLDEST:
                found["cuda"] = CUDA._replace(fused=None)
    if importlib.util.find_spec("libtpu"):
        found["tpu"] = TPU
    return found


def by_platform(function: Callable[..., Any], *arrays: Any) -> Any:
    """``function(platform, *arrays)`` of the platform it is lowered for."""
    each = {
        name: functools.partial(function, platform)
        for name, platform in installed().items()
    }
    default = functools.partial(function, CPU)
    if not each:
        return default(*arrays)
    return jax.lax.platform_dependent(*arrays, default=default, **each)
