"""Windows of texts through an encoder: each once, those of like length together."""

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from jaxhal.io.progress import progress_bar
from jaxhal.models.batching import bucket
from jaxhal.models.encoders import encoder as encoder_lib
from jaxhal.models.encoders.text_encoder import TextEncoder

if TYPE_CHECKING:
    import tokenizers

SMALLEST = 16  # columns of a batch
_ROWS = 32  # of a batch
_CPU_ROWS = 8  # more at once save nothing there, and are padded more

What = Literal["pooled", "probabilities", "states"]


@jax.jit(static_argnames=("what", "layer"))
def _read(
    encoder: TextEncoder,
    tokens: Array,
    types: Array,
    valid: Array,
    what: What,
    layer: int | None,
) -> Array:
    model = nnx.merge(encoder.graphdef, encoder.params)
    embedded = encoder_lib.embed(model, tokens, types, valid)
    hidden = encoder_lib.run(model, embedded, valid, layer)
    if what == "probabilities":
        return jax.nn.softmax(encoder_lib.logits(model, hidden, valid), axis=-1)
    if what == "pooled":
        assert encoder.pooling is not None
        hidden = encoder_lib.pool(hidden, valid, encoder.pooling.how)
    return hidden.astype(jnp.float32)


class Windows(NamedTuple):
    """Windows of the distinct inputs, and where each input finds its own.

    Windows of a pair with the same window of the second text are a group; of texts, all
    windows of one.
    """

    pieces: "list[tokenizers.Encoding]"
    group: Int[np.ndarray, " groups"]  # the first window of each
    first: Int[np.ndarray, " distinct"]  # the first group of each distinct input
    row: Int[np.ndarray, " inputs"]  # the distinct input that equals each input


def cut_all(what: str, inputs: Sequence[Hashable], cut: Callable) -> Windows:
    """Windows of what is asked about, cut once where it is the same.

    ``cut`` gives the groups of one, and its ValueError names which ``what`` it was.
    """
    distinct: dict[Hashable, int] = {}
    groups, first = [], []
    for at, one in enumerate(inputs):
        if one in distinct:
            continue
        distinct[one] = len(distinct)
        first.append(len(groups))
        try:
            groups += cut(one)
        except ValueError as error:
            raise ValueError(f"{what} {at}: {error}") from error
    row = np.array([distinct[one] for one in inputs])
    starts = np.cumsum([0, *map(len, groups[:-1])])
    return Windows([*itertools.chain(*groups)], starts, np.array(first), row)


def run(
    encoder: TextEncoder,
    windows: Windows,
    what: What,
    layer: int | None = None,
    progress: bool | None = False,
) -> list[np.ndarray]:
    """What comes of each window, in order; those of like length are read together."""
    batch_size = _CPU_ROWS if jax.default_backend() == "cpu" else _ROWS
    order = np.argsort([len(piece) for piece in windows.pieces], kind="stable")
    found = {}
    with progress_bar(len(order), "reading texts", "text", progress) as bar:
        for start in range(0, len(order), batch_size):
            part = order[start : start + batch_size].tolist()
            batch = collate(encoder, [windows.pieces[at] for at in part], batch_size)
            # Rows beyond the windows are dummies.
            rows = np.asarray(_read(encoder, *batch, what, layer))
            found |= zip(part, rows, strict=False)
            bar.update(len(part))
    return [found[at] for at in range(len(order))]


def collate(
    encoder: TextEncoder, pieces: "list[tokenizers.Encoding]", batch_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids, token types and which are no padding, in a bucketed shape."""
    longest = max(len(piece) for piece in pieces)
    columns = min(bucket(longest, SMALLEST), encoder.config.context_length)
    rows = min(bucket(len(pieces), 1), batch_size)
    tokens = np.full((rows, columns), encoder.tokenizer.pad_id, np.int32)
    types, valid = np.zeros_like(tokens), np.zeros((rows, columns), bool)
    valid[:, 0] = True  # rows beyond the windows are dummies of one token
    for row, piece in enumerate(pieces):
        tokens[row, : len(piece)] = piece.ids
        types[row, : len(piece)] = piece.type_ids
        valid[row, : len(piece)] = True
    return tokens, types, valid
