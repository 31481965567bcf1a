"""Blocks of few bits as a GGUF file has them, packed for a device."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float, UInt8

from jaxhal.models.quantized import Packed


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


def pack(kind: str, data: UInt8[np.ndarray, "*lead rows bytes"]) -> Packed:
    """Rows of a file, packed.

    Args:
      kind: one of :data:`FORMATS`.
    """
    # A run of rows at a time, as whole numbers take a byte each before they are packed.
    *lead, size = data.shape
    rows, step = data.reshape(-1, size), max(1, _AT_ONCE // size)
    runs = [_pack(kind, rows[at : at + step]) for at in range(0, len(rows), step)]

    def joined(*leaves: np.ndarray) -> np.ndarray:
        return np.concatenate(leaves).reshape(*lead, -1)

    return jax.tree.map(joined, *runs)


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


def rounded(kind: str, rows: Float[np.ndarray, "*lead rows columns"]) -> Packed:
    """Numbers rounded to blocks of a format.

    Args:
      kind: one of those without K.

    Raises:
      ValueError: on rows that make no whole blocks.
    """
    import gguf

    if (columns := rows.shape[-1]) % (size := numbers_of_a_block(kind)):
        raise ValueError(f"rows of {columns} make no whole blocks of {size}")
    rows = np.asarray(rows, np.float32)
    return pack(kind, gguf.quants.quantize(rows, gguf.GGMLQuantizationType[kind]))


def outline(kind: str, shape: tuple[int, ...]) -> Packed:
    """What :func:`pack` gives for matrices, by shapes and types alone."""
    count = shape[-1] // numbers_of_a_block(kind)
    one = pack(kind, np.zeros((1, _FORMATS[kind][0]), np.uint8))

    def whole(leaf: np.ndarray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*shape[:-1], count * leaf.shape[1]), leaf.dtype)

    return jax.tree.map(whole, one)


def _repacked(whole: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of unpacking."""
    parts = np.split(whole, 8 // bits, axis=-1)
    out = parts[0].copy()
    for number, part in enumerate(parts[1:], 1):
        out |= part << (bits * number)
    return out
