"""Vectors on the device, searched whole: exact, at one read of the matrix."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxhal.io.checks import at_least

# Rows that there is room for at first, and by which it grows; queries that are looked
# for at once, few numbers and so few programs.
_ROOM, _AT_ONCE = 256, (1, 8, 64)


def check_cosine(**values: float) -> None:
    """Raises ValueError, by name, on a least cosine that none or every one reaches."""
    for name, value in values.items():
        if not -1 < value <= 1:
            raise ValueError(f"{name} is {value}; give a cosine in (-1, 1]")


def unit(vectors: Any) -> Float[Array, "*rows width"]:
    """Vectors scaled to length 1; one of zeros stays as it is."""
    vectors = jnp.asarray(vectors, jnp.float32)
    length = jnp.linalg.norm(vectors, axis=-1, keepdims=True)
    return jnp.where(length > 0, vectors / jnp.where(length > 0, length, 1.0), 0.0)


@functools.partial(jax.jit, static_argnames="k")
def nearest(
    queries: Float[Array, "queries width"],
    vectors: Float[Array, "rows width"],
    count: Int[Array, ""] | int,
    k: int,
) -> tuple[Float[Array, "queries {k}"], Int[Array, "queries {k}"]]:
    """The ``k`` most similar of the first ``count`` rows: cosines in [-1, 1], numbers.

    Of equal ones the first comes first.  Where there are fewer the number is -1 and the
    cosine ``-inf``.  Vectors have length 1, or 0, as :func:`unit` makes them.
    """
    cosines = jnp.matmul(queries, vectors.T, precision=jax.lax.Precision.HIGHEST)
    cosines = jnp.where(jnp.arange(len(vectors)) < count, cosines, -jnp.inf)
    short = max(0, k - len(vectors))
    cosines = jnp.pad(cosines, [(0, 0), (0, short)], constant_values=-jnp.inf)
    values, numbers = jax.lax.top_k(cosines, k)
    return values, jnp.where(values > -jnp.inf, numbers, -1)


def checked(vectors: Any, width: int) -> Float[np.ndarray, "rows {width}"]:
    """Vectors of a width, as float32; ValueError on others."""
    block = np.asarray(vectors, np.float32)
    if block.ndim != 2 or block.shape[1] != width:
        raise ValueError(
            f"vectors have the shape {list(block.shape)}; they must be [any, {width}], "
            "from the encoder that made the others"
        )
    if not np.isfinite(block).all():
        raise ValueError("a vector holds a number that is not finite")
    return block


class Index:
    """Unit vectors in the order they were added, copied to the device when searched."""

    def __init__(self, vectors: Float[np.ndarray, "rows width"]):
        at_least(1, width=vectors.shape[1])
        self.width, self._count = vectors.shape[1], 0
        self._rows = np.zeros((_ROOM, self.width), np.float32)
        self._on_device: Array | None = None
        self.add(vectors)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, rows: Any) -> Float[np.ndarray, "... width"]:
        return self._rows[rows]

    def add(self, vectors: Any) -> None:
        """Adds vectors of any length."""
        block = checked(vectors, self.width)
        begin, self._count = self._count, self._count + len(block)
        if (missing := self._count - len(self._rows)) > 0:
            # By an eighth, so that little of what is read is empty.
            more = -(-max(missing, len(self._rows) // 8) // _ROOM) * _ROOM
            self._rows = np.pad(self._rows, [(0, more), (0, 0)])
        self._write(slice(begin, self._count), block)

    def put(self, row: int, vector: Any) -> None:
        """Another vector in place of one."""
        self._write(row, checked(np.asarray(vector)[None], self.width)[0])

    def remove(self, row: int) -> None:
        """Takes one out; the last one gets its number."""
        self._count -= 1
        self._write(row, self._rows[self._count])

    def _write(self, rows: int | slice, vectors: np.ndarray) -> None:
        length = np.linalg.norm(vectors, axis=-1, keepdims=True)
        self._rows[rows] = vectors / np.where(length > 0, length, 1.0)
        self._on_device = None

    def search(
        self, queries: Any, k: int
    ) -> tuple[Float[np.ndarray, "queries k"], Int[np.ndarray, "queries k"]]:
        """Cosines and numbers of the ``k`` nearest rows, as of :func:`nearest`."""
        at_least(1, k=k)
        block = checked(queries, self.width)
        if not len(block):
            return np.zeros((0, k), np.float32), np.zeros((0, k), np.int32)
        known = self._on_device
        if known is None:
            known = self._on_device = jnp.array(self._rows, copy=True)
        found = []
        for start in range(0, len(block), _AT_ONCE[-1]):
            part = block[start : start + _AT_ONCE[-1]]
            size = next(size for size in _AT_ONCE if size >= len(part))
            part = np.pad(part, [(0, size - len(part)), (0, 0)])
            found.append(jax.device_get(nearest(unit(part), known, self._count, k)))
        cosines, rows = map(np.concatenate, zip(*found, strict=True))
        return cosines[: len(block)], rows[: len(block)]
