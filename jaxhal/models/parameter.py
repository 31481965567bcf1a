"""One parameter: where it comes from, and how the part that a device holds is read."""

import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxhal.models.config import STACKS, Config
from jaxhal.models.gguf import GGUFSource
from jaxhal.models.safetensors import SafetensorsSource
from jaxhal.models.tables import Origin, Table, rows_of, same

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


# ``(name, index)``: of a parameter's part what one of its tensors gives.
Cut = Callable[[str, tuple[slice, ...]], np.ndarray]


def cut_of(one: Parameter, source: SafetensorsSource, config: Config) -> Cut | None:
    """How to read a part of a parameter and no more, where it is some of what is there.

    None where it is not, or where a tensor has a wrong shape, which reading it finds.
    """
    wanted, shapes = one.leaf.shape[one.lead :], {*map(source.shape, one.names)}
    if one.origin.turn is same:
        return source.part if shapes == {wanted} else None
    if len(shapes) > 1:
        return None
    try:
        rows = rows_of(one.origin, shape := shapes.pop(), config)
    except (ValueError, IndexError):
        return None
    if rows is None or wanted != (*shape[:-2], *shape[1:][-1:], len(rows)):
        return None

    def cut(name: str, index: tuple[slice, ...]) -> np.ndarray:
        *others, chosen = index
        numbers = rows[chosen]
        runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
        found = [(slice(int(run[0]), int(run[-1]) + 1), *others[-1:]) for run in runs]
        parts = [source.part(name, (*others[:-1], *some)) for some in found]
        value = np.concatenate(parts, max(-2, -len(shape))) if parts[1:] else parts[0]
        return value.swapaxes(-1, -2) if others else value

    return cut


def in_parts(
    one: Parameter, cut: Cut, sharding: NamedSharding
) -> tuple[jax.Array, list[str]]:
    """A parameter of which each device's part alone is read, and what is wrong."""
    shape, lead = one.leaf.shape, one.lead
    problems: list[str] = []
    names = np.reshape(one.names, shape[:lead])

    def part(index: Any, sizes: tuple[int, ...]) -> np.ndarray:
        array = room_for(sizes, one.leaf.dtype)
        some = names[index[:lead]].ravel().tolist()
        parts = array.reshape(-1, *sizes[lead:])
        for name, room in zip(some, parts, strict=True):
            enter(room, cut(name, index[lead:]))
            if not np.isfinite(room).all() and name not in problems:
                problems.append(name)
        return array

    where = sharding.addressable_devices_indices_map(shape)
    alike: dict[str, list[Any]] = {}  # slices have no hash before Python 3.12
    for device, index in where.items():
        alike.setdefault(str(index), []).append(device)
    # A part at a time, as it is there twice until it lies on devices of their own.
    put = []
    for devices in alike.values():
        value = part(where[devices[0]], sharding.shard_shape(shape))
        put += [jax.device_put(value, device) for device in devices]
    array = jax.make_array_from_single_device_arrays(shape, sharding, put)
    return array, [f"{name} holds NaN or infinite values" for name in problems]
