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
from jax.extend.backend import backends
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

# Compute capability of the first GPUs that have cuDNN's flash attention.
_OLDEST = 8.0
# Bytes of a GPU from which on ways back may keep what they do of 80 GiB, of which JAX
# takes three quarters.
_ROOMY = 48 << 30


class Platform(NamedTuple):
    """How attention is computed on one kind of device."""

    # Bytes alive at once: of attention probabilities of plain rows and of tapped rows,
    # and of the logits of rows that reducers look at.
    plain: int
    tapped: int
    logits: int
    # Bytes of rows of all devices that wait until those of some layers are there, for
    # reducers that look at all rows of a response together.
    waiting: int
    # Bytes of one device that a way back may keep, of all layers or of one layer's
    # attention, beyond which they are computed again; and of ways back that run
    # together.
    kept: int
    pulled: int
    # Parts of a prompt whose rows see the keys up to their own end and no others.
    segments: int
    # Whether rows that stand together by their experts are multiplied by those in one
    # call.
    ragged: bool = False
    # Whether products of 16 bits are asked for in that type, though summed in more.
    rounds: bool = False
    # (q, k, v, valid, windows, window, cap, sink) -> what all rows mix, where
    # `takes(q, k, cap, sink)`.
    fused: Callable[..., Array] | None = None
    takes: Callable[..., bool] = lambda *about: False


def flash(
    q: Float[Array, "batch kv_heads group seq head"],
    k: Float[Array, "batch kv_heads seq head"],
    v: Float[Array, "batch kv_heads seq head"],
    valid: Bool[Array, "batch seq"],
    windows: tuple[int, ...],
    window: Int[Array, ""],
    cap: None = None,
    sink: None = None,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "batch kv_heads group seq head"]:
    """Each valid row sees the valid columns up to its own that a window reaches.

    As ``jax.nn.dot_product_attention`` has it; ``windows`` are those of all layers.
    """
    del cap, sink
    batch, kv, group, seq, d = q.shape
    order, place = _packed(valid, seq)
    # A row of padding alone has to have a key to look at.
    length = jnp.maximum(jnp.sum(valid, axis=1, dtype=jnp.int32), 1)

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


def flash_takes(q: Array, k: Array, cap: float | None, sink: Array | None) -> bool:
    """Heads of up to 128 numbers of 16 bits, which all devices take.

    It caps no scores; and with the sums of its rows, to which a sink would be added, it
    comes in 16 bits as well.
    """
    del k
    d, plain = q.shape[-1], cap is None and sink is None
    small = q.dtype in (jnp.bfloat16, jnp.float16)
    return plain and small and d <= 128 and d % 8 == 0


def splash(
    q: Float[Array, "batch kv_heads group seq head"],
    k: Float[Array, "batch kv_heads seq head"],
    v: Float[Array, "batch kv_heads seq head"],
    valid: Bool[Array, "batch seq"],
    windows: tuple[int, ...],
    window: Int[Array, ""],
    cap: float | None = None,
    sink: Float[Array, "1 kv_heads group 1 1"] | None = None,
    interpret: bool = False,
) -> Float[Array, "batch kv_heads group seq head"]:
    """What :func:`flash` computes, by JAX's Pallas kernel for TPUs.

    Of scores up to a cap, and beside a sink for each head, where a model has them.  On
    a mesh each device runs it on its own rows and heads.
    """
    attend = functools.partial(_splash, windows=windows, cap=cap, interpret=interpret)
    mesh = jax.typeof(q).sharding.mesh
    if not mesh.empty:  # XLA cannot split a kernel itself
        # Rows that do not divide are copied.
        along = "data" in mesh.shape and len(q) % mesh.shape["data"] == 0
        rows = PartitionSpec("data" if along else None)
        heads = PartitionSpec(*rows, "model" if "model" in mesh.shape else None)
        queries = PartitionSpec(*heads, "group" if "group" in mesh.shape else None)
        sinks = PartitionSpec(None, *queries[1:])
        parts = queries, heads, heads, rows, PartitionSpec(), sinks
        attend = jax.shard_map(
            attend, mesh=mesh, in_specs=parts, out_specs=queries, check_vma=False
        )
    return attend(q, k, v, valid, window, sink)


def splash_takes(q: Array, k: Array, cap: float | None, sink: Array | None) -> bool:
    """bfloat16, and on a mesh key heads that its devices can share out."""
    del cap, sink
    mesh = jax.typeof(q).sharding.mesh
    whole = k.shape[1] % mesh.shape.get("model", 1) == 0
    return q.dtype == jnp.bfloat16 and q.shape[-1] % 8 == 0 and whole


def _splash(
    q: Array,
    k: Array,
    v: Array,
    valid: Array,
    window: Array,
    sink: Array | None,
    windows: tuple[int, ...],
    cap: float | None,
    interpret: bool,
) -> Array:
    from jaxhal.models import splash as kernel

    batch, _, _, seq, d = q.shape
    block, size = kernel.sizes(seq)
    order, place = _packed(valid, size)

    def taken(x: Array, at: Array) -> Array:
        return jnp.take_along_axis(x, at[:, None, :, None], axis=2)

    query = taken(q.reshape(batch, -1, seq, d), order)
    key, value = taken(k, order), taken(v, order)
    sinks = None if sink is None else sink.reshape(-1)

    def attend(width: int) -> Callable[[], Array]:
        how = kernel.How(block, width - 1 if 0 < width < seq else None, cap, interpret)
        return lambda: kernel.attend(query, key, value, sinks, how)

    return taken(_by_window(attend, windows, window), place).reshape(q.shape)


def _packed(
    valid: Bool[Array, "batch seq"], size: int
) -> tuple[Int[Array, "batch size"], Int[Array, "batch seq"]]:
    """Which column goes where for padding to come last, and where each went.

    The diagonal then masks it for all rows that count, and windows are of tokens.
    """
    real = jnp.cumsum(valid, axis=1, dtype=jnp.int32)
    columns = jnp.arange(valid.shape[1])
    place = jnp.where(valid, real - 1, real[:, -1:] + columns - real)
    order = jax.vmap(lambda at: jnp.zeros(size, at.dtype).at[at].set(columns))(place)
    return order, place


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


# Measured on CPU at (512, 96) and (2048, 256): small enough to stay near the caches,
# large enough that a block's matrix product is efficient.  More ways back together,
# whose arrays leave the processor's caches, are slower each.
CPU = Platform(
    plain=8 << 20,
    tapped=64 << 20,
    logits=64 << 20,
    waiting=80 << 20,
    kept=4 << 30,
    pulled=384 << 20,
    segments=8,
)
# Measured on an H200 at 8 x 2,048: few large products, few programs to compile.  What
# ways back take is compiled for 80 GiB, beside the weights, and not measured.
CUDA = Platform(
    plain=256 << 20,
    tapped=128 << 20,
    logits=256 << 20,
    waiting=80 << 20,
    kept=16 << 30,
    pulled=2 << 30,
    segments=2,
    rounds=True,
    fused=flash,
    takes=flash_takes,
)
# Compiled for a v5e, of 16 GiB, and not measured: blocks of hundreds of rows for its
# matrix units.
TPU = Platform(
    plain=256 << 20,
    tapped=128 << 20,
    logits=64 << 20,
    waiting=40 << 20,
    kept=4 << 30,
    pulled=1 << 30,
    segments=4,
    ragged=True,
    rounds=True,
    fused=splash,
    takes=splash_takes,
)


@functools.cache
def installed() -> dict[str, Platform]:
    """Platforms that JAX's plugins here compile for, beside the CPU."""
    found = {}
    if any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))):
        found["cuda"] = CUDA
        if jax.default_backend() == "gpu":
            device: Any = jax.local_devices()[0]
            if float(device.compute_capability) < _OLDEST:
                found["cuda"] = found["cuda"]._replace(fused=None)
            known = device.memory_stats() or {}
            if known.get("bytes_limit", 0) < _ROOMY:
                found["cuda"] = found["cuda"]._replace(kept=CPU.kept)
    if importlib.util.find_spec("libtpu"):
        found["tpu"] = TPU
    return found


def described(arrays: Any) -> str | None:
    """The platform of the mesh that arrays lie on, such as ``"cpu"``, if on any."""
    for leaf in jax.tree.leaves(arrays):
        device = jax.typeof(leaf).sharding.mesh.abstract_device
        if device is not None:
            return device.platform
    return None


def platform_of(arrays: Any) -> Platform:
    """Of the mesh that arrays lie on, else of the devices that JAX takes by default."""
    return _of_name(described(arrays) or jax.default_backend())


def _of_name(name: str) -> Platform:
    return installed().get("cuda" if name == "gpu" else name, CPU)


def by_platform(function: Callable[..., Any], *arrays: Any) -> Any:
    """``function(platform, *arrays)`` of the platform it is lowered for.

    Arrays on a mesh lie on its devices, be they here or only described; others may lie
    on any that is here.
    """
    known = described(arrays)
    if known is not None:
        return function(_of_name(known), *arrays)
    each = {
        name: functools.partial(function, platform)
        for name, platform in installed().items()
        if name in backends()
    }
    default = functools.partial(function, CPU)
    if not each:
        return default(*arrays)
    return jax.lax.platform_dependent(*arrays, default=default, **each)
