"""A prompt that is read in pieces, beside what is being written."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from jaxhal.models import decoder
from jaxhal.models.batching import Encoded
from jaxhal.models.cache import positions
from jaxhal.models.lm import LM
from jaxhal.models.ops import STANDARD

# Tokens of a prompt that are read at once; what is being written waits so long.
PIECE = 64


class Prompt(NamedTuple):
    """A prompt that is read piece by piece: keys and values of what has been."""

    row: Encoded
    buffers: tuple[Array, Array]  # as a cache's prefix has them, of one row
    read: int  # columns, padding included

    @property
    def width(self) -> int:
        """Columns, flush with the seam, for all but the last token."""
        return self.buffers[1].shape[3]

    @property
    def complete(self) -> bool:
        """Whether only the last token is left."""
        return self.read == self.width


def doubled(least: int, count: int) -> int:
    """The smallest of ``least`` and its doubles that holds a count.

    >>> [doubled(128, count) for count in (0, 128, 129, 600)]
    [128, 128, 256, 1024]
    """
    while least < count:
        least *= 2
    return least


def begin(lm: LM, row: Encoded) -> Prompt:
    """A prompt of which nothing is read yet."""
    config, before = lm.config, len(row.prompt_ids) - 1
    width = doubled(PIECE, before)
    shape = (config.num_hidden_layers, 1, config.num_key_value_heads)
    dtype = lm.params["embed_tokens"]["embedding"].get_value().dtype
    d = config.head_dim
    buffers = jnp.zeros((*shape, d, width), dtype), jnp.zeros((*shape, width, d), dtype)
    # Pieces of padding alone are passed over.
    return Prompt(row, buffers, (width - before) // PIECE * PIECE)


def read_piece(lm: LM, prompt: Prompt, limit: int, pad_id: int) -> Prompt:
    """The prompt with its next piece read; ``limit`` new tokens may follow it."""
    ids = prompt.row.prompt_ids
    length, first = len(ids) + limit, prompt.width - len(ids) + 1
    tokens = np.full(prompt.width, pad_id, np.int32)
    tokens[first:] = ids[:-1]
    piece = tokens[prompt.read : prompt.read + PIECE]
    buffers = _read_piece(lm.bare, prompt.buffers, piece, first, prompt.read, length)
    return prompt._replace(buffers=buffers, read=prompt.read + PIECE)


@functools.partial(jax.jit, donate_argnames="buffers")
def _read_piece(lm: LM, buffers, tokens, first, start, length):
    model, (keys, values) = nnx.merge(lm.graphdef, lm.params), buffers
    column = jnp.arange(values.shape[3])
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
    x = decoder.embed(model, tokens[None], own)
    *_, (k, v) = decoder.run(model, x, geo, ops=STANDARD, prefix=buffers, keep=True)
    put = jax.lax.dynamic_update_slice_in_dim
    return put(keys, k.swapaxes(-1, -2), start, 4), put(values, v, start, 3)
