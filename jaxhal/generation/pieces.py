"""A prompt that is read in pieces, beside what is being written.

What it begins with like one that was read before is not read again.
"""

import functools
from collections import OrderedDict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from jaxhal.models import decoder, delta
from jaxhal.models.batching import Encoded
from jaxhal.models.cache import positions, room, turned
from jaxhal.models.lm import LM
from jaxhal.models.ops import STANDARD

# Tokens of a prompt that are read at once; what is being written waits so long.
PIECE = 64
# Of what is left over, a piece of fewer.
_SMALL = 16
# Prompts that are kept once read, and bytes of their keys and values.
_KEPT, _KEPT_BYTES = 128, 512 << 20


class Prompt(NamedTuple):
    """A prompt that is read piece by piece: keys and values of what has been."""

    row: Encoded
    # As a cache's prefix has them, of one row, and its states.
    buffers: tuple[Any, ...]
    read: int  # columns, padding included
    reused: int  # tokens that were read with another prompt

    @property
    def states(self) -> tuple[Array, ...]:
        """Of layers of linear attention."""
        return self.buffers[2:]

    @property
    def width(self) -> int:
        """Columns, flush with the seam, for all but the last token."""
        return jax.tree.leaves(self.buffers[1])[0].shape[3]

    @property
    def complete(self) -> bool:
        """Whether only the last token is left."""
        return self.read == self.width

    @property
    def before(self) -> Int[np.ndarray, " tokens"]:
        """All tokens but the last."""
        return self.row.prompt_ids[:-1]


class Prefixes:
    """Prompts that were read, for others that begin like them.

    Those that were of no use for longest leave where there would be too many.
    """

    def __init__(self, most_bytes: int = _KEPT_BYTES):
        self._most, self._kept = most_bytes, OrderedDict[bytes, Prompt]()

    def add(self, prompt: Prompt) -> None:
        """Keeps a prompt that is complete, in place of those it begins with.

        Not one with states: they are of all its tokens, and not of the first few.
        """
        if prompt.states or _bytes(prompt) > self._most:
            return
        ids = prompt.before
        for key, one in [*self._kept.items()]:
            if _common(one.before, ids) == len(one.before):
                del self._kept[key]
        self._kept[ids.tobytes()] = prompt
        while (
            len(self._kept) > _KEPT
            or sum(map(_bytes, self._kept.values())) > self._most
        ):
            self._kept.popitem(last=False)

    def longest(
        self, lm: LM, ids: Int[np.ndarray, " tokens"]
    ) -> tuple[int, Prompt | None]:
        """How many of the tokens one of the prompts begins with, and that prompt."""
        if not self._kept or any(rope.by_length for rope in lm.config.ropes):
            return 0, None
        count, key = max(
            (_common(one.before, ids), key) for key, one in self._kept.items()
        )
        self._kept.move_to_end(key)
        return count, self._kept[key]


def _bytes(prompt: Prompt) -> int:
    return sum(buffer.nbytes for buffer in jax.tree.leaves(prompt.buffers))


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """How many numbers two rows begin with alike."""
    some = min(len(one), len(other))
    differ = one[:some] != other[:some]
    return int(differ.argmax()) if differ.any() else some


def doubled(least: int, count: int) -> int:
    """The smallest of ``least`` and its doubles that holds a count.

    >>> [doubled(128, count) for count in (0, 128, 129, 600)]
    [128, 128, 256, 1024]
    """
    while least < count:
        least *= 2
    return least


def begin(lm: LM, row: Encoded, prefixes: Prefixes) -> Prompt:
    """A prompt of which nothing is read yet but what one of the prefixes has."""
    config, before = lm.config, row.prompt_ids[:-1]
    width = doubled(PIECE, len(before))
    reused, like = prefixes.longest(lm, before)
    if like is not None and reused:
        first = like.width - len(like.before)
        buffers = _moved(like.buffers, first, width - len(before), reused, width)
    else:
        dtype = lm.params["embed_tokens"]["embedding"].get_value().dtype
        values = room(config, 1, width, dtype)
        buffers = turned(values), values, *delta.states(config, 1, dtype)
    # Pieces of padding alone are passed over.
    return Prompt(row, buffers, width - _columns(len(before) - reused), reused)


def _columns(tokens: int) -> int:
    """Columns of the pieces in which so many tokens are read.

    >>> [_columns(tokens) for tokens in (0, 1, 16, 17, 64, 65, 130, 150)]
    [0, 16, 16, 64, 64, 80, 144, 192]
    """
    whole, rest = divmod(tokens, PIECE)
    if rest > _SMALL:
        return (whole + 1) * PIECE
    return whole * PIECE + (_SMALL if rest else 0)


def read_piece(lm: LM, prompt: Prompt, limit: int, pad_id: int) -> Prompt:
    """The prompt with its next piece read; ``limit`` new tokens may follow it."""
    ids = prompt.row.prompt_ids
    length, first = len(ids) + limit, prompt.width - len(ids) + 1
    tokens = np.full(prompt.width, pad_id, np.int32)
    tokens[first:] = ids[:-1]
    size = (prompt.width - prompt.read) % PIECE or PIECE
    piece = tokens[prompt.read : prompt.read + size]
    buffers = _read_piece(lm.bare, prompt.buffers, piece, first, prompt.read, length)
    return prompt._replace(buffers=buffers, read=prompt.read + size)


@functools.partial(jax.jit, static_argnames="width")
def _moved(buffers, first, start, count, width: int):
    """A prompt's first columns from where they stand to where another's do."""
    keys, values = buffers
    token = jnp.arange(width) - start
    there = (token >= 0) & (token < count)
    at = jnp.where(there, first + token, 0)
    keys = jax.tree.map(lambda x: jnp.where(there, x[..., at], 0), keys)
    there = there[:, None]
    return keys, jax.tree.map(lambda x: jnp.where(there, x[..., at, :], 0), values)


@functools.partial(jax.jit, donate_argnames="buffers")
def _read_piece(lm: LM, buffers, tokens, first, start, length):
    model, (keys, values, *_) = nnx.merge(lm.graphdef, lm.params), buffers
    column = jnp.arange(jax.tree.leaves(values)[0].shape[3])
    valid = (column >= first)[None]
    position, at = positions(valid), start + jnp.arange(len(tokens))
    own = position[:, at]
    geo = decoder.geometry(
        lm.config,
        own,
        jnp.concatenate([position, own], axis=1),
        jnp.concatenate([valid & (column < start), valid[:, at]], axis=1),
        jnp.asarray(length, jnp.int32)[None],
    )
    x, geo = decoder.embed(model, tokens[None], geo)
    *_, kept = decoder.run(model, x, geo, ops=STANDARD, prefix=buffers, keep=True)
    k, v, *states = kept

    def put(buffers: Any, new: Any, axis: int) -> Any:
        def one(buffer: Array, part: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(buffer, part, start, axis)

        return jax.tree.map(one, buffers, new)

    return put(keys, turned(k), 4), put(values, v, 3), *states
