"""A parameter over devices, of which each device's part alone is read."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxhal.models import blocks, quantized
from jaxhal.models.config import Config
from jaxhal.models.parameter import Parameter, enter, room_for
from jaxhal.models.quantized import Packed, Stored
from jaxhal.models.safetensors import SafetensorsSource
from jaxhal.models.tables import same, taken

# ``(name, index)``: of a parameter's part what one of its tensors gives.
Cut = Callable[[str, tuple[slice, ...]], np.ndarray]
# Of what alternates in a tensor, as GPT-OSS's gates do with what they let through, the
# other is read along.
_STEP = 2


def cut_of(one: Parameter, source: SafetensorsSource, config: Config) -> Cut | None:
    """How to read a part of a parameter, where it is some of what is stored.

    None where it is not, or where a tensor has a wrong shape, which reading it finds.
    """
    wanted, shapes = one.leaf.shape[one.lead :], {*map(source.shape, one.names)}
    if one.origin.turn is same:
        return source.part if shapes == {wanted} else None
    if len(shapes) > 1:
        return None
    try:
        found = taken(one.origin, shape := shapes.pop(), config)
    except (ValueError, IndexError):
        return None
    if found is None:
        return None
    axis, places = found
    # Of a convolution its single channel is left out.
    before, columns = shape[:axis], () if axis == -1 else shape[-1:]
    if wanted != (*before, *columns, len(places)):
        return None

    def cut(name: str, index: tuple[slice, ...]) -> np.ndarray:
        *others, chosen = index
        numbers = places[chosen]
        held = np.unique(numbers)
        runs = np.split(held, np.flatnonzero(np.diff(held) > _STEP) + 1)
        spans = [slice(int(run[0]), int(run[-1]) + 1) for run in runs]
        lead, rest = others[: len(before)], others[len(before) :]
        rest = [slice(1), *rest] if axis == -3 else rest
        parts = [source.part(name, (*lead, span, *rest)) for span in spans]
        value = np.concatenate(parts, axis) if parts[1:] else parts[0]
        value, along = (value[:, 0], -2) if axis == -3 else (value, axis)
        read = np.concatenate([np.arange(span.start, span.stop) for span in spans])
        if not np.array_equal(read, numbers):
            value = value.take(np.searchsorted(read, numbers), along)
        return value if along == -1 else value.swapaxes(-1, -2)

    return cut


def in_parts(
    one: Parameter, cut: Cut, sharding: NamedSharding
) -> tuple[jax.Array, list[str]]:
    """A parameter in numbers, and what is wrong with it."""
    outline = outline_of(one, (), sharding)

    def part(names: list[str], index: Any) -> tuple[np.ndarray, list[bool]]:
        array = room_for(sharding.shard_shape(outline.shape), outline.dtype)
        rooms = array.reshape(-1, *array.shape[one.lead :])
        for name, room in zip(names, rooms, strict=True):
            enter(room, cut(name, index))
        return array, [bool(np.isfinite(room).all()) for room in rooms]

    return _by_parts(one, outline, outline, part)


def rounded_in_parts(
    one: Parameter, cut: Cut, kind: str, sharding: NamedSharding
) -> tuple[Stored, list[str]]:
    """The same in blocks of a format; a part is of whole blocks."""
    outline = outline_of(one, [kind] * len(one.names), sharding)
    scale, size = outline.packs[0].scale, blocks.numbers_of_a_block(kind)

    def part(names: list[str], index: Any) -> tuple[Packed, list[bool]]:
        *experts, rows, run = index
        start, stop, _ = run.indices(scale.shape[-1])
        columns = slice(start * size, stop * size)
        inner = (columns, rows) if one.kernel else (rows, columns)
        each = (cut(name, (*experts, *inner)) for name in names)
        turned = (x.swapaxes(-1, -2) if one.kernel else x for x in each)
        packs = [blocks.rounded(kind, numbers) for numbers in turned]
        whole = jax.tree.map(lambda *leaves: np.stack(leaves), *packs)
        return whole, [pack.finite for pack in packs]

    return _by_parts(one, outline, scale, part)


def outline_of(one: Parameter, kinds: Sequence[str], sharding: NamedSharding) -> Any:
    """A parameter by shapes, types and places alone, in blocks of those formats."""
    shape, dtype = one.leaf.shape, one.leaf.dtype
    if not kinds:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    made = {kind: blocks.outline(kind, one.packed_shape) for kind in set(kinds)}
    packs = [(kind, made[kind]) for kind in kinds]
    return quantized.stored(packs, shape, dtype, one.kernel, sharding)


def _by_parts(
    one: Parameter, outline: Any, along: Any, part: Callable[..., Any]
) -> tuple[Any, list[str]]:
    """The arrays of an outline, a ``part`` at a time as ``along``, one of them, is cut.

    It is given tensors and what to take of each, and says which are finite.
    """
    names = np.reshape(one.names, one.leaf.shape[: one.lead])
    leaves, tree = jax.tree.flatten(outline)
    put: list[list[jax.Array]] = [[] for _ in leaves]
    wrong: list[str] = []
    # A part at a time, as it is there twice until it lies on devices of their own.
    for index, devices in _each_part(along.shape, along.sharding):
        some = names[index[: one.lead]].ravel().tolist()
        made, finite = part(some, index[one.lead :])
        wrong += [name for name, fine in zip(some, finite, strict=True) if not fine]
        for leaf, value, into in zip(leaves, jax.tree.leaves(made), put, strict=True):
            value = value.reshape(leaf.sharding.shard_shape(leaf.shape))
            into += [jax.device_put(value, device) for device in devices]
    whole = jax.make_array_from_single_device_arrays
    arrays = [whole(x.shape, x.sharding, p) for x, p in zip(leaves, put, strict=True)]
    problems = [f"{name} holds NaN or infinite values" for name in dict.fromkeys(wrong)]
    return jax.tree.unflatten(tree, arrays), problems


def _each_part(
    shape: tuple[int, ...], sharding: NamedSharding
) -> Iterator[tuple[tuple[slice, ...], list[Any]]]:
    """The parts that devices of this process hold, each with those that hold it."""
    alike: dict[str, list[Any]] = {}  # slices have no hash before Python 3.12
    where = sharding.addressable_devices_indices_map(shape)
    for device, index in where.items():
        alike.setdefault(str(index), []).append(device)
    for devices in alike.values():
        index = where[devices[0]]
        assert index is not None
        yield index, devices
