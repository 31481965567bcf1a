"""Values of every token: padded where they are decided on, without padding in a fit.

The longest answer of a data set may have five times the tokens of the middle one, so
padded to it hidden states take five times their memory.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxhal.models.batching import bucket

_SHORTEST = 16


class Series(NamedTuple):
    """Values of the tokens of some answers, padded to the longest; a pytree."""

    values: Any  # leaves [batch response ...]
    valid: Bool[Array | np.ndarray, "batch response"]  # padding may hold anything


class Ragged:
    """Values of the tokens of many answers, one after the other; a leaf of a pytree.

    As of an array, its length is the number of answers, and an index of answers gives
    these, padded.

    Attributes:
      values: pytree of NumPy arrays, leaves ``[tokens ...]``.
      counts: ``Int[answers]``, tokens of each.
    """

    def __init__(self, values: Any, counts: Int[np.ndarray, " answers"]):
        self.values, self.counts = values, counts

    @classmethod
    def of(cls, series: "Series | Ragged") -> "Ragged":
        """Without what is padding."""
        if isinstance(series, Ragged):
            return series
        valid = np.asarray(series.valid)
        values = jax.tree.map(lambda leaf: np.asarray(leaf)[valid], series.values)
        return cls(values, valid.sum(1))

    @classmethod
    def joined(cls, parts: Sequence["Ragged"], order: Sequence[int]) -> "Ragged":
        """Of parts, one after another, in which answer ``i`` is number ``order[i]``."""
        counts = np.zeros(len(order), int)
        counts[list(order)] = np.concatenate([part.counts for part in parts])
        ends = np.cumsum(counts)
        values = [part.values for part in parts]

        def placed(*leaves: np.ndarray) -> np.ndarray:
            out = aligned_zeros((int(ends[-1]), *leaves[0].shape[1:]), leaves[0].dtype)
            rows = iter(order)
            for leaf, part in zip(leaves, parts, strict=True):
                for own in np.split(leaf, np.cumsum(part.counts)[:-1]):
                    end = ends[row := next(rows)]
                    out[end - counts[row] : end] = own
            return out

        return cls(jax.tree.map(placed, *values), counts)

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, rows: Any) -> Series:
        counts, ends = self.counts[rows], np.cumsum(self.counts)[rows]
        size = bucket(int(max(counts, default=0)), _SHORTEST)
        valid = np.arange(size) < counts[:, None]

        def padded(leaf: np.ndarray) -> np.ndarray:
            out = aligned_zeros((*valid.shape, *leaf.shape[1:]), leaf.dtype)
            for own, end, count in zip(out, ends, counts, strict=True):
                own[:count] = leaf[end - count : end]
            return out

        return Series(jax.tree.map(padded, self.values), valid)

    @property
    def rows(self) -> Int[np.ndarray, " tokens"]:
        """The number of the answer that each token is of."""
        return np.repeat(np.arange(len(self), dtype=np.int32), self.counts)


def flat(inputs: Series | Ragged) -> tuple[Any, Int[np.ndarray, " tokens"]]:
    """What classifiers of tokens are fitted to: values, and whose each token is."""
    tokens = Ragged.of(inputs)
    return tokens.values, tokens.rows


# What the runtime of JAX wants of memory that it uses as it is.
_ALIGNED = 64


def aligned_zeros(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Zeros that a CPU device takes without a copy: for the largest arrays."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + _ALIGNED, np.uint8)
    start = -raw.ctypes.data % _ALIGNED
    return raw[start : start + size].view(dtype).reshape(shape)
