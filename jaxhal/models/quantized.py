"""Weights as small as a GGUF file stores them, made numbers where they are used.

A row of a matrix is cut into blocks of whole numbers of 4 to 8 bits, times a scale a
block or a part of one, plus an offset in some formats.  What comes out is, to the last
bit, what dequantising the file gives: every product is exact in float32.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxhal.models.mesh import along, laid


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """Matrices ``[..., rows, columns]`` in blocks along their columns.

    A number is ``scale * scales * (q - zero) + offset * offsets``; whole numbers ``q``
    have their lowest four bits in ``low``, those of the first half of a block below
    those of the second, and what is above in ``high``, likewise in more parts.

    Attributes:
      low: ``[..., rows, blocks * bytes]``, or the whole numbers themselves (8 bits).
        Like the following it has no axis of a block's own, which is so short that a
        TPU would lay it out in many times the memory.
      scale, offset: ``[..., rows, blocks]``, float16.
      scales, offsets: ``[..., rows, blocks * parts]``, of equal parts of a block.
    """

    low: Any
    high: Any
    scale: Any
    offset: Any
    scales: Any
    offsets: Any
    bits: int = dataclasses.field(metadata={"static": True})
    zero: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrices."""
        halves = 1 if self.bits == 8 else 2
        *lead, size = self.low.shape
        return *lead, size * halves

    @property
    def finite(self) -> bool:
        """Whether none of its numbers, on the host, is NaN or infinite."""
        scaled = (self.scale, self.offset)
        return all(np.isfinite(one).all() for one in scaled if one is not None)

    def numbers(self) -> Float[Array, "*lead rows columns"]:
        """The matrices in float32."""

        def blocks(leaf: Any) -> Any:
            blocked = (*self.scale.shape, -1)
            return None if leaf is None else _by_rows(leaf).reshape(blocked)

        parts = self.low, self.high, self.scales, self.offsets
        low, high, scales, offsets = map(blocks, parts)
        whole = low
        if self.bits < 8:
            whole = _unpacked(low, 4)
            if high is not None:
                whole |= _unpacked(high, self.bits - 4) << 4
        value = whole.astype(jnp.float32) - self.zero
        scale = _each(self.scale, scales)
        value = value.reshape(*scale.shape, -1) * scale[..., None]
        if self.offset is not None:
            value += _each(self.offset, offsets)[..., None]
        return value.reshape(*self.scale.shape[:-1], -1)

    def parts(self, most: int, ways: int = 1) -> "Packed":
        """The rows of a matrix in parts, of ``most`` bytes of float32 at best.

        ``[parts, ways, rows, ...]``: an equal run of each of ``ways`` runs of rows,
        which may lie on as many devices.
        """
        rows, columns = self.shape
        rows //= ways
        wanted = -(-4 * rows * columns // most)
        runs = max(n for n in range(1, wanted + 1) if rows % n == 0)

        def fold(leaf: Array) -> Array:
            each = leaf.reshape(ways, runs, rows // runs, *leaf.shape[1:])
            return each.swapaxes(0, 1)

        return jax.tree.map(fold, self)


def _by_rows(leaf: Array) -> Array:
    """As it lies in memory; XLA would copy the packs of all layers to turn them.

    Not on a mesh, whose devices would gather all of it: XLA cannot split this.
    """
    if jax.typeof(leaf).sharding.mesh.size > 1:
        return leaf
    return with_layout_constraint(leaf, Layout(tuple(range(leaf.ndim))))


def _unpacked(packed: Array, bits: int) -> Array:
    """Numbers of some bits each, as many parts of a block as there are in a byte."""
    mask = np.uint8((1 << bits) - 1)
    parts = [(packed >> np.uint8(shift)) & mask for shift in range(0, 8, bits)]
    return jnp.concatenate(parts, axis=-1)


def _each(one: Array, many: Array | None) -> Array:
    one = one.astype(jnp.float32)[..., None]
    return one if many is None else one * many.astype(jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stored:
    """A parameter that stays packed: a matrix, or one in every layer or of each of its
    experts.

    Layers may differ in their format; each stands in the pack of its own.

    Attributes:
      packs: a matrix, or as many as there are layers of that format.
      places: the pack of each layer and where it stands in it; ``None`` for a single
        matrix.
      shape: of the parameter when it is not packed.
      transposed: whether its rows are the matrix's columns, as a kernel's are.
      dtype: of its numbers.
      ways: devices that the matrix's rows are shared by.
    """

    packs: tuple[Packed, ...]
    places: tuple[tuple[int, int], ...] | None = dataclasses.field(
        metadata={"static": True}
    )
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    transposed: bool = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})
    ways: int = dataclasses.field(default=1, metadata={"static": True})

    @property
    def size(self) -> int:
        """How many numbers it is."""
        return int(np.prod(self.shape))

    def each(self) -> Iterator[Float[Array, "*experts rows columns"]]:
        """The numbers of every layer, one after another, or of the matrix."""
        if self.places is None:
            yield _dense(self)
        else:
            yield from (_dense_layer(self, *place) for place in self.places)

    def layer(self, which: Any, place: Any) -> Float[Array, "*experts rows columns"]:
        """The numbers of one layer, or of one expert where ``place`` is a pair."""

        def of(pack: Packed) -> Callable[[Any], Array]:
            def numbers(at: Any) -> Array:
                chosen = jax.tree.map(lambda leaf: leaf[at], pack)
                return self._turned(chosen.numbers())

            return numbers

        if len(self.packs) == 1:
            return of(self.packs[0])(place)
        return jax.lax.switch(which, [of(pack) for pack in self.packs], place)

    def dense(self) -> Float[Array, "*experts rows columns"]:
        """The numbers of a single matrix, or of all experts."""
        return self._turned(self.packs[0].numbers())

    def rows(self, ids: Int[Array, "*ids"]) -> Float[Array, "*ids width"]:
        """Some rows of a single matrix, as it is stored."""
        chosen = jax.tree.map(lambda leaf: leaf[ids], self.packs[0])
        return chosen.numbers().astype(self.dtype)

    def _turned(self, numbers: Array) -> Array:
        turned = numbers.swapaxes(-1, -2) if self.transposed else numbers
        return turned.astype(self.dtype)


@jax.jit
def _dense(matrix: Stored) -> Float[Array, "*experts rows columns"]:
    return matrix.dense()


@jax.jit
def _dense_layer(
    layers: Stored, which: Any, place: Any
) -> Float[Array, "*experts rows columns"]:
    return layers.layer(which, place)


class OfLayer(NamedTuple):
    """Stands for a :class:`Stored` parameter in one layer of a loop over layers."""

    whole: Stored
    which: Any
    place: Any


def is_stored(value: Any) -> bool:
    return isinstance(value, Stored)


def is_packed(value: Any) -> bool:
    return isinstance(value, Stored | OfLayer)


def dense(value: Any) -> Any:
    """A parameter as one array, whether or not it was stored."""
    match value:
        case Stored():
            return value.dense()
        case OfLayer():
            return value.whole.layer(value.which, value.place)
        case _:
            return value


def of_expert(value: Any, expert: Int[Array, ""]) -> Any:
    """The kernel of one expert of a layer, packed if all are."""
    if isinstance(value, OfLayer):
        return value._replace(place=(value.place, expert))
    return jax.lax.dynamic_index_in_dim(value, expert, keepdims=False)


def unstacked(weights: Any) -> tuple[Any, Callable[[Any], Any]]:
    """What a loop over layers goes along, and what makes a layer's weights of its part.

    Packs are looked up, as layers share them; other arrays are gone along.
    """
    leaves, tree = jax.tree.flatten(weights, is_leaf=is_stored)
    kept = [leaf if is_stored(leaf) else None for leaf in leaves]
    along = [
        tuple(jnp.array(leaf.places).T) if is_stored(leaf) else leaf for leaf in leaves
    ]

    def layer(part: Any) -> Any:
        pairs = zip(kept, part, strict=True)
        made = [own if whole is None else OfLayer(whole, *own) for whole, own in pairs]
        return jax.tree.unflatten(tree, made)

    return along, layer


def rows_of(table: Any, ids: Int[Array, "*ids"]) -> Float[Array, "*ids width"]:
    """Rows of a table of embeddings."""
    return table.rows(ids) if isinstance(table, Stored) else table[ids]


def stored(
    packs: Sequence[tuple[str, Packed]],
    shape: tuple[int, ...],
    dtype: Any,
    transposed: bool,
    sharding: NamedSharding | None = None,
) -> Stored:
    """A parameter of its matrices: one, or those of the layers by format.

    Experts of a layer are of one format, and come together or one after the other.

    Rows lie along the axes of a mesh that the parameter's do.  Columns are shared where
    each device's are whole blocks, and are otherwise copied.

    Args:
      packs: each with its format, on the host or of shapes and types alone; so is what
        comes out.
      shape: of the parameter, with layers first where there are several.
      sharding: of the parameter, for one that is spread over devices.
    """
    *before, rows, columns = sharding.spec if sharding else [None] * len(shape)
    each = len(packs) // shape[0] if before else 1
    kinds = [kind for kind, _ in packs[::each]]
    rows, columns = (columns, rows) if transposed else (rows, columns)

    def put(blocks: int, *leaves: Any) -> Any:
        first, at = leaves[0], None
        lead = (len(leaves) // each, *shape[1:-2]) if before else ()
        held = (*lead, *first.shape[-2:])
        if sharding is not None:
            divides = blocks % along(sharding.mesh, columns) == 0
            spec = PartitionSpec(*before, rows, columns if divides else None)
            at = NamedSharding(sharding.mesh, spec)
        if isinstance(first, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(held, first.dtype, sharding=at)
        whole = np.stack(leaves) if before else first
        return laid(whole.reshape(held), at)

    def together(some: Sequence[Packed]) -> Packed:
        return jax.tree.map(partial(put, some[0].scale.shape[-1]), *some)

    if not before:
        ((_, one),) = packs
        made, places = (together([one]),), None
    else:
        order = list(dict.fromkeys(kinds))
        places = tuple(
            (order.index(kind), kinds[:at].count(kind)) for at, kind in enumerate(kinds)
        )
        made = tuple(together([one for k, one in packs if k == kind]) for kind in order)
    ways = along(sharding.mesh, rows) if sharding else 1
    return Stored(made, places, shape, transposed, jnp.dtype(dtype), ways)
