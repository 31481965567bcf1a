"""The KV cache: a pytree in the same seam layout as a batch."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxhal.types import Batch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of the columns read so far, and what reducers need to know.

    Columns run as in :class:`jaxhal.types.Batch`: the prompt fills ``[0, P)`` and
    decoding writes column ``P + t``.

    Attributes:
      key, value: ``[layer batch kv_heads capacity head]``.
      position: ``Int[batch capacity]``.
      valid, context, document, question: ``Bool[batch capacity]``.
      length: ``Int[batch]``, tokens read so far, which is the next token's position.
      rope_length: ``Int[batch]``, the length that ``dynamic`` rope assumes throughout.
      column: ``Int[]``, the next column to be written.
      prompt_length: the static ``P``.
    """

    key: Any
    value: Any
    position: Any
    valid: Any
    context: Any
    document: Any
    question: Any
    length: Any
    rope_length: Any
    column: Any
    prompt_length: int = dataclasses.field(metadata={"static": True})

    @property
    def capacity(self) -> int:
        """Columns that exist; writing past them is an error."""
        return self.valid.shape[1]


def widen(mask: Array, capacity: int) -> Array:
    """Pads the last axis with zeros (False) up to ``capacity`` columns."""
    pad = [(0, 0)] * (mask.ndim - 1) + [(0, capacity - mask.shape[-1])]
    return jnp.pad(mask, pad)


def start(batch: Batch, key: Array, value: Array, new_tokens: int) -> Cache:
    """The cache after a prefill: prompt columns filled, ``new_tokens`` columns free."""
    prompt = batch.prompt_length
    capacity = prompt + new_tokens
    valid = jnp.asarray(batch.valid)[:, :prompt]
    length = jnp.sum(valid, axis=1, dtype=jnp.int32)
    grow = [(0, 0), (0, 0), (0, 0), (0, new_tokens), (0, 0)]

    def mask(name: str) -> Array:
        return widen(jnp.asarray(getattr(batch, name))[:, :prompt], capacity)

    return Cache(
        key=jnp.pad(key, grow),
        value=jnp.pad(value, grow),
        position=widen(positions(valid), capacity),
        valid=widen(valid, capacity),
        context=mask("context"),
        document=mask("document"),
        question=mask("question"),
        length=length,
        rope_length=length + new_tokens,
        column=jnp.asarray(prompt, jnp.int32),
        prompt_length=prompt,
    )


def positions(valid: Bool[Array, "batch seq"]) -> Array:
    """Position of each token among the valid ones of its row; 0 on leading padding."""
    return jnp.maximum(jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, 0)


def write(cache: Cache, valid: Bool[Array, "batch query"]) -> tuple[Cache, Array]:
    """Enters the next columns, not yet their keys and values; returns positions too."""
    new = cache.length[:, None] + positions(valid)
    origin = (jnp.zeros_like(cache.column), cache.column)

    def put(old: Array, part: Array) -> Array:
        return jax.lax.dynamic_update_slice(old, part.astype(old.dtype), origin)

    entered = dataclasses.replace(
        cache,
        position=put(cache.position, new),
        valid=put(cache.valid, valid),
        length=cache.length + jnp.sum(valid, axis=1, dtype=cache.length.dtype),
        column=cache.column + valid.shape[1],
    )
    return entered, new
