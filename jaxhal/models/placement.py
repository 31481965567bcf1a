"""Where a model goes: on which devices, its weights as numbers or in blocks."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxhal.io.checks import one_of
from jaxhal.models import blocks, devices
from jaxhal.models import mesh as mesh_lib
from jaxhal.models.config import Config
from jaxhal.models.gguf import GGUFSource
from jaxhal.models.weights import abstract, paths

_ROUNDED = {"int8": "Q8_0", "int4": "Q4_0"}
# Of the memory at hand, what weights may take; the rest is for what is made with them.
_SHARE = 0.5


def choose(
    config: Config,
    source: Any,
    dtype: Any,
    weights: str | None,
    mesh: Mesh | None,
    rules: Mapping[str, str | None] = mesh_lib.RULES,
) -> tuple[str, Mesh | None]:
    """In which blocks matrices are kept, and on which mesh, by what fits into memory.

    Blocks are ``"stored"`` for those of the file, a format's name, or ``""`` for
    numbers.  Numbers come first, and meshes with few devices along ``model``; where
    nothing fits, the smallest.  ``None`` is for one device.
    """
    in_blocks = isinstance(source, GGUFSource)
    packings = packings_of(weights, source.where, in_blocks)
    if weights is None and in_blocks and not source.stays:
        packings = ("",)
    meshes = _meshes(config, mesh)
    ways = list(itertools.product(packings, meshes))
    for packed, over in ways[:-1]:
        held = _width(source, dtype, packed) * _numbers(config, source, over, rules)
        if held <= _SHARE * _memory(over):
            return packed, over
    return ways[-1]


def on(
    mesh: Mesh, config: Config, rules: Mapping[str, str | None]
) -> Callable[[str, tuple[int, ...]], NamedSharding]:
    """Where each parameter lies, by its path and shape."""
    return lambda path, shape: mesh_lib.sharding_of(path, shape, config, mesh, rules)


def packings_of(weights: str | None, where: str, in_blocks: bool) -> Sequence[str]:
    """The blocks that matrices may be kept in, ``in_blocks`` being of a GGUF file.

    Raises:
      ValueError: on ``weights`` that are unknown, or not for such a source.
    """
    if weights is None:
        return ("", "stored") if in_blocks else ("",)
    one_of(("stored", "dequantised", *_ROUNDED), weights=weights)
    if weights == "dequantised":
        return ("",)
    if in_blocks != (weights == "stored"):
        fitting = "int8 or int4" if weights == "stored" else "stored"
        what = "no" if weights == "stored" else "a"
        raise ValueError(
            f"weights is {weights!r}, but {where} is {what} GGUF file; use "
            f"{fitting}, or leave it out"
        )
    return (_ROUNDED.get(weights, "stored"),)


def _meshes(config: Config, mesh: Mesh | None) -> Sequence[Mesh | None]:
    """The mesh asked for, or all that this process has devices for."""
    if mesh is not None:
        mesh_lib.check_mesh(mesh, config)
        mesh_lib.check_processes(mesh)
        return (mesh,)
    here = jax.local_devices()
    return tuple(mesh_lib.choices(config, here)) if len(here) > 1 else (None,)


def _numbers(
    config: Config, source: Any, mesh: Mesh | None, rules: Mapping[str, str | None]
) -> int:
    """How many weights a device holds."""
    if mesh is None:
        return source.size
    _, params = abstract(config, jnp.float32)
    place = on(mesh, config, rules)
    shapes = [(path, leaf.shape) for path, leaf in paths(params)]
    return sum(math.prod(place(*one).shard_shape(one[1])) for one in shapes)


def _width(source: Any, dtype: Any, packed: str) -> float:
    """Bytes of a weight."""
    if packed == "stored":
        return source.bytes / source.size
    return blocks.width(packed) if packed else float(jnp.dtype(dtype).itemsize)


def room() -> float:
    """Bytes that the weights of a model may take on all devices of this process."""
    here = jax.local_devices()
    return _SHARE * len(here) * devices.memory_of_each(here)


def _memory(mesh: Mesh | None) -> float:
    """Bytes that a device has left; CPUs share those of the machine."""
    if mesh is None:
        return float(devices.memory())
    return devices.memory_of_each(mesh.local_devices)
