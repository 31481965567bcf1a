"""The KV cache: a pytree in the same seam layout as a batch."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from jaxhal.models.config import ATTENTION, Config
from jaxhal.models.mesh import mesh_of
from jaxhal.types import Batch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of the columns read so far, and what reducers need to know.

    Columns run as in :class:`jaxhal.types.Batch`: the prompt fills ``[0, P)`` and
    decoding writes column ``P + t``.  Prompts are kept apart (``prefix``), so that
    several consecutive rows can go on from one that was read once.  Keys and values may
    be tuples over layers instead: :func:`apart`.  Where layers have heads of two kinds
    they are dictionaries of both: :func:`by_kind`.  Layers of linear attention have no
    keys, but a state of each row, and layers that borrow keys have nothing.
    """

    # Keys [layer prompts kv_heads head P] as products want them, and values
    # [layer prompts kv_heads P head].
    prefix: Any
    key: Any  # of the rows' own columns, [layer batch kv_heads new head]
    value: Any
    # Of jaxhal.models.delta.Recurrent, each [layer batch heads ...]; or none.
    states: tuple[Any, ...]
    position: Any  # Int[batch capacity]
    valid: Any  # Bool[batch capacity], and so on
    context: Any
    document: Any
    question: Any
    tokens: Any  # Int[batch capacity]
    length: Any  # Int[batch], tokens read so far: the next one's position
    rope_length: Any  # Int[batch], the length that `dynamic` rope assumes throughout
    column: Any  # Int[], the next to be written, or Int[batch] where rows differ
    prompt_length: int = dataclasses.field(metadata={"static": True})

    @property
    def capacity(self) -> int:
        """Columns that exist; writing past them is an error."""
        return self.valid.shape[1]

    @property
    def shared(self) -> int:
        """Columns of ``prefix``; those of ``key`` and ``value`` come after them."""
        return jax.tree.leaves(self.prefix[1])[0].shape[-2]


# What a row has of a batch's, column by column.
_GIVEN = ("context", "document", "question", "tokens")
#: What a row of a cache has of its own beside its keys and values.
OWN = ("position", "valid", *_GIVEN, "length", "rope_length")


def by_kind(config: Config, key: Any, value: Any) -> dict[str, tuple[Any, Any]]:
    """Keys and values of the layers of each kind of attention, as a block names it."""
    if config.full is None:
        return {"self_attn": (key, value)}
    return {kind: (key[kind], value[kind]) for kind in key}


def joined(config: Config, kinds: dict[str, tuple[Any, Any]]) -> tuple[Any, Any]:
    """The same as a cache has them."""
    if config.full is None:
        return kinds["self_attn"]
    key, value = ({kind: kinds[kind][at] for kind in kinds} for at in (0, 1))
    return key, value


def room(config: Config, rows: int, columns: int, dtype: Any) -> Any:
    """Free columns ``[layer rows kv_heads columns head]``, of keys or values."""

    def of(kind: str) -> Array:
        own, layers = config.of(kind), len(config.parts[0].layers_with(kind))
        shape = layers, rows, own.num_key_value_heads, columns, own.head_dim
        return jnp.zeros(shape, dtype)

    if config.full is None:
        return of("self_attn")
    mixers = config.parts[0].mixers
    return {kind: of(kind) for kind in ATTENTION if kind in mixers}


def turned(keys: Any) -> Any:
    """Keys as those of prompts lie, or back."""
    return jax.tree.map(lambda leaf: leaf.swapaxes(-1, -2), keys)


def start(
    batch: Batch, kept: tuple[Any, ...], new_tokens: int, reach: int | Array
) -> Cache:
    """The cache after a prefill; a row will go on by ``reach`` new columns at most."""
    key, value, *states = kept
    valid = jnp.asarray(batch.valid)[:, : batch.prompt_length]
    length = jnp.sum(valid, axis=1, dtype=jnp.int32)

    def own(part: Array) -> Array:
        return jnp.zeros((*part.shape[:3], new_tokens, part.shape[4]), part.dtype)

    def widened(prompts: Any) -> Array:
        prompts = jnp.asarray(prompts)[:, : batch.prompt_length]
        return jnp.pad(prompts, [(0, 0), (0, new_tokens)])

    return Cache(
        prefix=(turned(key), value),
        key=jax.tree.map(own, key),
        value=jax.tree.map(own, value),
        states=tuple(states),
        position=widened(positions(valid)),
        valid=widened(valid),
        **{name: widened(getattr(batch, name)) for name in _GIVEN},
        length=length,
        rope_length=length + reach,
        column=jnp.asarray(batch.prompt_length, jnp.int32),
        prompt_length=batch.prompt_length,
    )


def laid(cache: Cache) -> Cache:
    """The same on a mesh: its free columns where those of the prompts are.

    A compiler makes them of nothing, and so on every device.
    """
    if mesh_of(cache.prefix) is None:
        return cache
    places = jax.tree.map(lambda leaf: leaf.sharding, cache.prefix[1])
    key, value = jax.device_put((cache.key, cache.value), (places, places))
    return dataclasses.replace(cache, key=key, value=value)


def positions(valid: Bool[Array, "batch seq"]) -> Array:
    """Position of each token among the valid ones of its row; 0 on leading padding."""
    return jnp.maximum(jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, 0)


def write(
    cache: Cache, tokens: Int[Array, "batch query"], valid: Bool[Array, "batch query"]
) -> tuple[Cache, Array]:
    """Enters the next columns, not yet their keys and values; returns positions too."""
    new = cache.length[:, None] + positions(valid)
    put = functools.partial(put_columns, at=cache.column)
    entered = dataclasses.replace(
        cache,
        position=put(cache.position, new),
        valid=put(cache.valid, valid),
        tokens=put(cache.tokens, tokens),
        length=cache.length + jnp.sum(valid, axis=1, dtype=cache.length.dtype),
        column=cache.column + valid.shape[1],
    )
    return entered, new


def put_columns(
    rows: Shaped[Array, "*batch column"], part: Array, at: Int[Array, "*each"]
) -> Array:
    """Rows with a part written from a column on, one for all or one for each.

    Where each has its own, what lies outside is dropped.
    """
    part = part.astype(rows.dtype)
    if not at.ndim:
        return jax.lax.dynamic_update_slice_in_dim(rows, part, at, axis=1)
    row = jnp.arange(len(rows))[:, None]
    return rows.at[row, at[:, None] + jnp.arange(part.shape[1])].set(part, mode="drop")


def take(cache: Cache, rows: Int[Array, " chosen"]) -> Cache:
    """The cache of chosen rows, any number of times each.

    They must stand in the order of their prompts, equally many for each.
    """
    own = {name: jnp.take(getattr(cache, name), rows, axis=0) for name in OWN}
    # [batch kv_heads new head] come last, whether layers are stacked or apart.
    key, value, states = jax.tree.map(
        lambda leaf: jnp.take(leaf, rows, axis=leaf.ndim - 4),
        (cache.key, cache.value, cache.states),
    )
    return dataclasses.replace(cache, key=key, value=value, states=states, **own)


@jax.jit
def apart(cache: Cache) -> Cache:
    """The cache for a decoder of :func:`jaxhal.models.decoder.apart`."""

    def layers(stacked: Array) -> Any:
        return tuple(stacked[at] for at in range(len(stacked))) or stacked

    names = ("prefix", "key", "value", "states")
    parts = {name: jax.tree.map(layers, getattr(cache, name)) for name in names}
    return dataclasses.replace(cache, **parts)
