"""JAX's splash attention, a Pallas kernel for TPUs, for rows that see what came before.

Imported where a program is traced for one: Pallas takes its time to import.
"""

import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as pallas
from jaxtyping import Array, Float


class How(NamedTuple):
    """Rows of a block, how far they see, and the cap of their scores, if any."""

    block: int
    left: int | None
    cap: float | None
    interpret: bool


class _Window(pallas.LocalMask):
    """What rows see: columns up to their own, and at most ``left`` before it."""

    def __init__(self, size: int, left: int | None):
        super().__init__((size, size), (left, 0), 0)
        self.most = size if left is None else left

    def __getitem__(self, idx: tuple[slice, slice]) -> np.ndarray:
        """A block; where all of it is one value, as nearly everywhere, a single one.

        Those are only asked for any and for all; writing them out takes minutes where
        there are many.
        """
        rows, columns = idx
        nearest = rows.start - columns.stop + 1
        farthest = rows.stop - 1 - columns.start
        if farthest < 0 or nearest > self.most:
            return np.zeros((1, 1), bool)
        if nearest >= 0 and farthest <= self.most:
            return np.ones((1, 1), bool)
        return super().__getitem__(idx)


def sizes(seq: int) -> tuple[int, int]:
    """Rows of a block, and of a sequence that is a multiple of it.

    The largest blocks that leave at most an eighth of the rows to padding.

    >>> [sizes(seq) for seq in (1024, 1200, 1920, 700, 40)]
    [(512, 1024), (256, 1280), (512, 2048), (256, 768), (128, 128)]
    """
    for block in (512, 256, 128):
        size = math.ceil(seq / block) * block
        if size - seq <= seq // 8:
            break
    return block, size


def attend(
    q: Float[Array, "batch heads size head"],
    k: Float[Array, "batch kv_heads size head"],
    v: Float[Array, "batch kv_heads size head"],
    sinks: Float[Array, " heads"] | None,
    how: How,
) -> Float[Array, "batch heads size head"]:
    """What rows mix of the columns up to their own, and of ``left`` before it."""
    _, heads, size, _ = q.shape
    block = how.block
    blocks = pallas.BlockSizes(
        block_q=block,
        block_kv=block,
        # Of the way back.
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    kernel: Any = pallas.make_splash_mha(
        pallas.MultiHeadMask([_Window(size, how.left)] * heads),
        block_sizes=blocks,
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=how.cap,
        interpret=how.interpret,
    )
    return jax.vmap(lambda q, k, v: kernel(q, k, v, sinks=sinks))(q, k, v)
