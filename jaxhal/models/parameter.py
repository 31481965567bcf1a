"""One parameter: where it comes from, and room for its numbers."""

import math
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

from jaxhal.models.config import STACKS
from jaxhal.models.gguf import GGUFSource
from jaxhal.models.safetensors import SafetensorsSource
from jaxhal.models.tables import Origin, Table

# Bytes at multiples of which XLA's CPU client takes arrays without a copy.
_ALIGNED = 64
# Columns of a turned matrix that are entered together: measured four times as fast as
# all of them, for caches keep their rows.
_COLUMNS = 16

Source = SafetensorsSource | GGUFSource


class Parameter(NamedTuple):
    """A parameter, its outline, and where it comes from."""

    path: str
    leaf: Any
    origin: Origin

    @classmethod
    def of(
        cls, path: str, leaf: Any, table: Table, present: Collection[str]
    ) -> "Parameter":
        """With its origin among the stored tensors that there are."""
        origin = table[path]
        one = cls(path, leaf, origin)
        if origin.instead is None:
            return one
        other = cls(path, leaf, origin.instead._replace(layers=origin.layers))
        return other if other.names[0] in present else one

    @property
    def stacked(self) -> bool:
        """Whether it leads with an axis of layers."""
        return self.path.startswith(STACKS)

    @property
    def kernel(self) -> bool:
        return self.path.endswith(".kernel")

    @property
    def lead(self) -> int:
        """How many axes it leads with that a stored tensor of it has not."""
        return self.stacked + ("{expert}" in self.origin.name)

    @property
    def names(self) -> list[str]:
        """Of the stored tensors."""
        name, layers, shape = self.origin.name, self.origin.layers, self.leaf.shape
        if not self.stacked:
            return [name]
        return [
            name.format(layer, next=layer + 1, expert=expert)
            for layer in (range(shape[0]) if layers is None else layers)
            for expert in range(shape[1] if self.lead == 2 else 1)
        ]

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """Of what one tensor gives: rows and columns as they are packed, of each expert
        where it has those of a layer."""
        *lead, rows, columns = self.leaf.shape[self.lead :]
        return (*lead, columns, rows) if self.kernel else (*lead, rows, columns)

    def stored(self, name: str, source: Source) -> np.ndarray:
        """What it takes of one of its tensors, not yet turned."""
        if self.origin.half is None:
            return source.get(name)
        assert isinstance(source, SafetensorsSource)
        return source.half(name, self.origin.half)


def room_for(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """For numbers, where a CPU's device can leave them as they lie."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    room = np.empty(size + _ALIGNED, np.uint8)
    start = -room.ctypes.data % _ALIGNED
    return room[start : start + size].view(dtype).reshape(shape)


def enter(room: np.ndarray, value: np.ndarray) -> None:
    """Numbers in their place and type, of a turned matrix some columns at a time."""
    with np.errstate(over="ignore"):
        if value.ndim < 2 or value.strides[-2] >= value.strides[-1]:
            room[...] = value
            return
        for start in range(0, value.shape[-1], _COLUMNS):
            some = ..., slice(start, start + _COLUMNS)
            room[some] = value[some]
