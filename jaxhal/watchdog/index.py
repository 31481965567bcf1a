"""Vectors on the device, searched whole: exact, at one read of the matrix."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

# Rows that there is room for at first, and what is written at once.
_ROOM, _BLOCK = 256, 16


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
    cosine ``-inf``.

    Args:
      queries, vectors: of length 1 each, or 0, as :func:`unit` makes them.
      count: rows that are in use.
      k: how many are wanted.
    """
    cosines = jnp.matmul(queries, vectors.T, precision=jax.lax.Precision.HIGHEST)
    cosines = jnp.where(jnp.arange(len(vectors)) < count, cosines, -jnp.inf)

    # For few, passes over the cosines cost less than sorting them.
    def best(cosines: Array, _: None) -> tuple[Array, tuple[Array, Array]]:
        at = jnp.argmax(cosines, axis=1)
        value = jnp.take_along_axis(cosines, at[:, None], 1)[:, 0]
        rows = jnp.arange(len(cosines))
        left = cosines.at[rows, at].set(-jnp.inf)
        return left, (value, jnp.where(value > -jnp.inf, at, -1))

    _, (values, numbers) = jax.lax.scan(best, cosines, length=k)
    return values.T, numbers.T


@functools.partial(jax.jit, donate_argnums=0)
def _write(vectors: Array, block: Array, start: Array) -> Array:
    return jax.lax.dynamic_update_slice(vectors, unit(block), (start, 0))


def checked(vectors: Any, width: int) -> Float[np.ndarray, "rows {width}"]:
    """Vectors of a width, as float32.

    Raises:
      ValueError: on another shape, or a number that is not finite.
    """
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
    """Unit vectors in the order they were added; room for them doubles as they grow.

    Args:
      width: of the vectors.
    """

    def __init__(self, width: int):
        if width < 1:
            raise ValueError(f"width is {width}; give at least 1")
        self.width = width
        self._count = 0
        self._vectors = jnp.zeros((_ROOM, width), jnp.float32)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, rows: Any) -> Float[np.ndarray, "... width"]:
        """Of some rows, by their numbers, the vectors at length 1."""
        return np.asarray(self._vectors[jnp.asarray(rows)])

    def add(self, vectors: Any) -> None:
        """Adds vectors of any length.

        Raises:
          ValueError: on another width, or a number that is not finite.
        """
        block = checked(vectors, self.width)
        self._make_room(len(block))
        for start in range(0, len(block), self._step(len(block))):
            part = block[start : start + self._step(len(block))]
            self._put(part, self._count)
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
        """Cosines and numbers of the ``k`` nearest rows, as :func:`nearest` has them.

        Raises:
          ValueError: on another width, a number that is not finite, or ``k`` below 1.
        """
        if k < 1:
            raise ValueError(f"k is {k}; ask for at least 1")
        block = checked(queries, self.width)
        if not len(block):
            return np.zeros((0, k), np.float32), np.zeros((0, k), np.int32)
        found = nearest(unit(block), self._vectors, self._count, k)
        cosines, rows = jax.device_get(found)
        return cosines, rows

    def _step(self, count: int) -> int:
        # Few shapes, so few programs: blocks of 16, or of as much as there is room for.
        return _BLOCK if count < 4 * _BLOCK else 1 << 14

    def _make_room(self, more: int) -> None:
        # A block is written whole, however little of it is filled.
        wanted = self._count + more + self._step(more)
        room = len(self._vectors)
        if wanted > room:
            while room < wanted:
                room *= 2
            self._vectors = jnp.pad(
                self._vectors, [(0, room - len(self._vectors)), (0, 0)]
            )

    def _put(self, part: np.ndarray, row: int) -> None:
        size = _BLOCK if len(part) <= _BLOCK else 1 << 14
        block = np.zeros((size, self.width), np.float32)
        block[: len(part)] = part
        self._vectors = _write(self._vectors, block, row)
