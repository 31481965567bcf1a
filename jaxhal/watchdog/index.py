"""Vectors on the device, searched whole: exact, at one read of the matrix."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxhal.io.checks import at_least

# Rows that there is room for at first; rows written at once, few numbers and so few
# programs; rows of which the largest cosine is known before its place is.
_ROOM, _BLOCKS, _GROUP = 256, (1 << 14, 1 << 10, 16), 256
# Queries that are looked for at once, few numbers and so few programs.
_AT_ONCE = (1, 8, 64)


def unit(vectors: Any) -> Float[Array, "*rows width"]:
    """Vectors scaled to length 1; one of zeros stays as it is.

    Example:
      >>> unit(jnp.array([[3.0, 4.0], [0.0, 0.0]])).tolist()
      [[0.6000000238418579, 0.800000011920929], [0.0, 0.0]]
    """
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
    short = -len(vectors) % _GROUP
    cosines = jnp.pad(cosines, [(0, 0), (0, short)], constant_values=-jnp.inf)
    cosines = cosines.reshape(len(queries), -1, _GROUP)
    each = jnp.arange(len(queries))

    # Largest numbers are found many at a time, their places one by one: so the places
    # are looked for in the one group that has the largest.
    def best(
        left: tuple[Array, Array], _: None
    ) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        cosines, largest = left
        group = jnp.argmax(largest, axis=1)
        own = cosines[each, group]
        at, value = jnp.argmax(own, axis=1), jnp.max(own, axis=1)
        own = own.at[each, at].set(-jnp.inf)
        cosines = cosines.at[each, group].set(own)
        largest = largest.at[each, group].set(jnp.max(own, axis=1))
        number = jnp.where(value > -jnp.inf, group * _GROUP + at, -1)
        return (cosines, largest), (value, number)

    _, (values, numbers) = jax.lax.scan(
        best, (cosines, jnp.max(cosines, axis=2)), length=k
    )
    return values.T, numbers.T


@functools.partial(jax.jit, donate_argnums=0)
def _write(vectors: Array, block: Array, start: Array) -> Array:
    return jax.lax.dynamic_update_slice(vectors, unit(block), (start, 0))


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
    """Unit vectors in the order they were added; room for them grows by an eighth."""

    def __init__(self, width: int):
        at_least(1, width=width)
        self.width = width
        self._count = 0
        self._vectors = jnp.zeros((_ROOM, width), jnp.float32)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, rows: Any) -> Float[np.ndarray, "... width"]:
        """Of some rows, by their numbers, the vectors at length 1."""
        return np.asarray(self._vectors[jnp.asarray(rows)])

    def add(self, vectors: Any) -> None:
        """Adds vectors of any length."""
        rest = checked(vectors, self.width)
        self._make_room(len(rest))
        while len(rest):
            size = next((size for size in _BLOCKS if size <= len(rest)), _BLOCKS[-1])
            part, rest = rest[:size], rest[size:]
            block = np.pad(part, [(0, size - len(part)), (0, 0)])
            self._vectors = _write(self._vectors, block, self._count)
            self._count += len(part)

    def put(self, row: int, vector: Any) -> None:
        """Another vector in place of one."""
        block = checked(np.asarray(vector)[None], self.width)
        self._vectors = _write(self._vectors, block, row)

    def remove(self, row: int) -> None:
        """Takes one out; the last one gets its number."""
        self._count -= 1
        last = self._vectors[self._count : self._count + 1]
        self._vectors = _write(self._vectors, last, row)

    def search(
        self, queries: Any, k: int
    ) -> tuple[Float[np.ndarray, "queries k"], Int[np.ndarray, "queries k"]]:
        """Cosines and numbers of the ``k`` nearest rows, as of :func:`nearest`."""
        at_least(1, k=k)
        block = checked(queries, self.width)
        if not len(block):
            return np.zeros((0, k), np.float32), np.zeros((0, k), np.int32)
        found = []
        for start in range(0, len(block), _AT_ONCE[-1]):
            part = block[start : start + _AT_ONCE[-1]]
            size = next(size for size in _AT_ONCE if size >= len(part))
            part = np.pad(part, [(0, size - len(part)), (0, 0)])
            some = nearest(unit(part), self._vectors, self._count, k)
            found.append(jax.device_get(some))
        cosines, rows = map(np.concatenate, zip(*found, strict=True))
        return cosines[: len(block)], rows[: len(block)]

    def _make_room(self, more: int) -> None:
        # The last block is written whole, however little of it is filled.
        wanted = self._count + more + _BLOCKS[-1]
        room = before = len(self._vectors)
        while room < wanted:
            room += -(-room // (8 * _GROUP)) * _GROUP
        if room > before:
            self._vectors = jnp.pad(self._vectors, [(0, room - before), (0, 0)])
