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

from jaxhal.models.mesh import along


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
    """As it lies in memory; XLA would copy the packs of all layers to turn them."""
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
    """A parameter that stays packed: a matrix, or one in every layer.

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

    def at(self, layer: int) -> "Stored":
        """One layer, with a pack of its own."""
        assert self.places is not None
        which, place = self.places[layer]
        one = jax.tree.map(lambda leaf: leaf[place], self.packs[which])
        changed: Any = {"packs": (one,), "places": None, "shape": self.shape[1:]}
        return dataclasses.replace(self, **changed)

    def each(self) -> Iterator[Float[Array, "rows columns"]]:
        """The numbers of every layer, one after another, or of the matrix."""
        if self.places is None:
            yield _dense(self)
        else:
            yield from (_dense(self.at(layer)) for layer in range(len(self.places)))

    def layer(self, which: Any, place: Any) -> Float[Array, "rows columns"]:
        """The numbers of one layer."""

        def of(pack: Packed) -> Callable[[Any], Array]:
            def numbers(at: Any) -> Array:
                chosen = jax.tree.map(lambda leaf: leaf[at], pack)
                return self._turned(chosen.numbers())

            return numbers

        if len(self.packs) == 1:
            return of(self.packs[0])(place)
        return jax.lax.switch(which, [of(pack) for pack in self.packs], place)

    def dense(self) -> Float[Array, "rows columns"]:
        """The numbers of a single matrix."""
        return self._turned(self.packs[0].numbers())

    def rows(self, ids: Int[Array, "*ids"]) -> Float[Array, "*ids width"]:
        """Some rows of a single matrix, as it is stored."""
        chosen = jax.tree.map(lambda leaf: leaf[ids], self.packs[0])
        return chosen.numbers().astype(self.dtype)

    def _turned(self, numbers: Array) -> Array:
        return (numbers.T if self.transposed else numbers).astype(self.dtype)


@jax.jit
def _dense(matrix: Stored) -> Float[Array, "rows columns"]:
    return matrix.dense()


class OfLayer(NamedTuple):
    """Stands for a :class:`Stored` parameter in one layer of a loop over layers."""

    whole: Stored
    which: Any
    place: Any


def is_stored(value: Any) -> bool:
    return isinstance(value, Stored)


def dense(value: Any) -> Any:
    """A parameter as one array, whether or not it was stored."""
    match value:
        case Stored():
            return value.dense()
        case OfLayer():
            return value.whole.layer(value.which, value.place)
        case _:
            return value


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


# --- from a file --------------------------------------------------------------------


class _Blocks(NamedTuple):
    """What blocks hold: whole numbers ``[rows blocks columns]``, unsigned but of 8
    bits, and what they are scaled by; ``None`` where the format has none."""

    whole: np.ndarray
    bits: int
    zero: int
    scale: np.ndarray
    offset: np.ndarray | None = None
    scales: np.ndarray | None = None
    offsets: np.ndarray | None = None


def _half(blocks: np.ndarray) -> np.ndarray:
    return blocks.view(np.float16)[..., 0]


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Lowest four bits first, of each run of the last axis."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _split(blocks: np.ndarray, *sizes: int) -> list[np.ndarray]:
    """Fields of a block one after the other."""
    parts = np.split(blocks, np.cumsum(sizes)[:-1], axis=-1)
    return [np.ascontiguousarray(part) for part in parts]


def _plain(bits: int, offset: bool) -> Callable[[np.ndarray], _Blocks]:
    """Q4_0, Q4_1, Q5_0 and Q5_1: a scale, an offset or none, a fifth bit or none."""

    def read(blocks: np.ndarray) -> _Blocks:
        sizes = [2, 2 * offset, 4 * (bits == 5), 16]
        scale, low, fifth, whole = _split(blocks, *sizes)
        whole = _nibbles(whole)
        if bits == 5:
            whole |= np.unpackbits(fifth, axis=-1, bitorder="little") << 4
        zero = 0 if offset else 1 << (bits - 1)
        return _Blocks(whole, bits, zero, _half(scale), _half(low) if offset else None)

    return read


def _q8(blocks: np.ndarray) -> _Blocks:
    scale, whole = _split(blocks, 2, 32)
    return _Blocks(whole.view(np.int8), 8, 0, _half(scale))


def _k(bits: int) -> Callable[[np.ndarray], _Blocks]:
    """Q4_K and Q5_K: 256 numbers, eight scales and offsets of six bits."""

    def read(blocks: np.ndarray) -> _Blocks:
        fifth_bytes = 32 * (bits == 5)
        scale, low, packed, fifth, whole = _split(blocks, 2, 2, 12, fifth_bytes, 128)
        runs = whole.reshape(*whole.shape[:-1], 4, 32)
        whole = _nibbles(runs).reshape(*blocks.shape[:-1], 256)
        if bits == 5:
            each = np.unpackbits(fifth[..., None], axis=-1, bitorder="little")
            each = each.swapaxes(-1, -2).reshape(whole.shape)
            whole |= each << 4
        # Four scales and four offsets, then four of which the upper two bits lie above
        # those: "scales", "offsets" and the lower four bits of both.
        first, second, mixed = np.split(packed, 3, axis=-1)
        upper_first, upper_second = (first >> 6) << 4, (second >> 6) << 4
        scales = np.concatenate([first & 63, mixed & 15 | upper_first], -1)
        offsets = np.concatenate([second & 63, mixed >> 4 | upper_second], -1)
        return _Blocks(whole, bits, 0, _half(scale), -_half(low), scales, offsets)

    return read


def _q6_k(blocks: np.ndarray) -> _Blocks:
    low, high, scales, scale = _split(blocks, 128, 64, 16, 2)
    lead = blocks.shape[:-1]
    low = _nibbles(low.reshape(*lead, 2, 64))
    high = high.reshape(*lead, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    whole = low | (high & 3).reshape(*lead, 2, 128) << 4
    whole = whole.reshape(*lead, 256)
    return _Blocks(whole, 6, 32, _half(scale), None, scales.view(np.int8))


# Bytes of a block, and how it is read.
_FORMATS: dict[str, tuple[int, Callable[[np.ndarray], _Blocks]]] = {
    "Q4_0": (18, _plain(4, offset=False)),
    "Q4_1": (20, _plain(4, offset=True)),
    "Q5_0": (22, _plain(5, offset=False)),
    "Q5_1": (24, _plain(5, offset=True)),
    "Q8_0": (34, _q8),
    "Q4_K": (144, _k(4)),
    "Q5_K": (176, _k(5)),
    "Q6_K": (210, _q6_k),
}
# Bytes of a file that are packed together.
_AT_ONCE = 4 << 20
#: Formats that weights may stay in, as GGUF calls them.
FORMATS = tuple(_FORMATS)


def width(kind: str) -> float:
    """Bytes of a number in a format."""
    return _FORMATS[kind][0] / numbers_of_a_block(kind)


def numbers_of_a_block(kind: str) -> int:
    """What the length of a row is a multiple of."""
    import gguf

    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]


def pack(kind: str, data: np.ndarray) -> Packed:
    """Rows ``UInt8[rows bytes]`` of a file, packed.

    Args:
      kind: one of :data:`FORMATS`.
    """
    # A run of rows at a time, as whole numbers take a byte each before they are packed.
    step = max(1, _AT_ONCE // data.shape[1])
    runs = [_pack(kind, data[at : at + step]) for at in range(0, len(data), step)]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *runs)


def _pack(kind: str, data: np.ndarray) -> Packed:
    size, read = _FORMATS[kind]
    found = read(np.ascontiguousarray(data).reshape(len(data), -1, size))
    low, high = found.whole, None
    if found.bits < 8:
        low, high = _repacked(found.whole & 15, 4), None
        if found.bits > 4:
            high = _repacked(found.whole >> 4, found.bits - 4)
    scaled = found.scale, found.offset, found.scales, found.offsets
    made = Packed(low, high, *scaled, bits=found.bits, zero=found.zero)
    return jax.tree.map(lambda leaf: leaf.reshape(len(data), -1), made)


def rounded(kind: str, rows: Float[np.ndarray, "rows columns"]) -> Packed:
    """Numbers rounded to blocks of a format.

    Args:
      kind: one of those without K.

    Raises:
      ValueError: on rows that make no whole blocks.
    """
    import gguf

    if (columns := rows.shape[1]) % (size := numbers_of_a_block(kind)):
        raise ValueError(f"rows of {columns} make no whole blocks of {size}")
    return pack(kind, gguf.quants.quantize(rows, gguf.GGMLQuantizationType[kind]))


def outline(kind: str, rows: int, columns: int) -> Packed:
    """What :func:`pack` gives for a matrix, by shapes and types alone."""
    count = columns // numbers_of_a_block(kind)
    one = pack(kind, np.zeros((1, _FORMATS[kind][0]), np.uint8))

    def whole(leaf: np.ndarray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, count * leaf.shape[1]), leaf.dtype)

    return jax.tree.map(whole, one)


def _repacked(whole: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of unpacking."""
    parts = np.split(whole, 8 // bits, axis=-1)
    out = parts[0].copy()
    for number, part in enumerate(parts[1:], 1):
        out |= part << (bits * number)
    return out


def stored(
    packs: Sequence[tuple[str, Packed]],
    shape: tuple[int, ...],
    dtype: Any,
    transposed: bool,
    sharding: NamedSharding | None = None,
) -> Stored:
    """A parameter of its matrices: one, or those of the layers by format.

    Rows lie along the axes of a mesh that the parameter's do.  Columns are shared where
    each device's are whole blocks, and are otherwise copied.

    Args:
      packs: each with its format, on the host or of shapes and types alone; so is what
        comes out.
      shape: of the parameter, with layers first where there are several.
      sharding: of the parameter, for one that is spread over devices.
    """
    kinds = [kind for kind, _ in packs]
    *before, rows, columns = sharding.spec if sharding else [None] * len(shape)
    rows, columns = (columns, rows) if transposed else (rows, columns)

    def put(blocks: int, *leaves: Any) -> Any:
        first, at = leaves[0], None
        if sharding is not None:
            whole = blocks % along(sharding.mesh, columns) == 0
            spec = PartitionSpec(*before, rows, columns if whole else None)
            at = NamedSharding(sharding.mesh, spec)
        if isinstance(first, jax.ShapeDtypeStruct):
            lead = (len(leaves),) * len(before)
            return jax.ShapeDtypeStruct((*lead, *first.shape), first.dtype, sharding=at)
        return jax.device_put(np.stack(leaves) if before else first, at)

    def together(some: Sequence[Packed]) -> Packed:
        return jax.tree.map(partial(put, some[0].scale.shape[1]), *some)

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
