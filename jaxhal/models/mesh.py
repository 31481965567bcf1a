"""A model over several devices: which axis of a parameter lies along which of a mesh.

XLA's partitioner does the rest: programs are those of one device.  Heads, the inner
width and the vocabulary lie along ``model``, rows of a batch along ``data``; what
leaves a layer is summed over ``model``, and attention rows never leave their device.
"""

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
)

from jaxhal.models.config import STACKS, Config

AXES = ("data", "model")
#: Along which axis of a mesh parameters lie, by what they count.
RULES: Mapping[str, str | None] = {
    "heads": "model",
    "kv_heads": "model",
    "mlp": "model",
    # Any device may get every token, so experts are not shared out; their widths are.
    "experts": None,
    "vocab": "model",
    "embed": None,
}
#: The same, and each device of ``data`` keeps a part of what is otherwise copied to it.
FULLY_SHARDED: Mapping[str, str | None] = {**RULES, "embed": "data"}

# What the axes of parameters count, by module; of a bias the last.
_MODULES = {
    "embed_tokens": ("vocab", "embed"),
    "embed_positions": (None, "embed"),
    "embed_layers": ("vocab", "embed"),
    "lm_head": ("embed", "vocab"),
    "q_proj": ("embed", "heads"),
    "k_proj": ("embed", "kv_heads"),
    "v_proj": ("embed", "kv_heads"),
    "o_proj": ("heads", "embed"),
    "self_attn": ("heads",),  # sinks
    "gate_proj": ("embed", "mlp"),
    "up_proj": ("embed", "mlp"),
    "down_proj": ("mlp", "embed"),
    "output_gate": ("embed", "heads"),
    "in_proj_q": ("embed", "linear_keys"),
    "in_proj_k": ("embed", "linear_keys"),
    "in_proj_v": ("embed", "linear_values"),
    "in_proj_z": ("embed", "linear_values"),
    "in_proj_a": ("embed", "linear_values"),
    "in_proj_b": ("embed", "linear_values"),
    "out_proj": ("linear_values", "embed"),
}
# Heads of linear attention, which lie where other heads do.
_LINEAR = {"linear_keys": "key_heads", "linear_values": "value_heads"}


def make_mesh(
    data: int = 1, model: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh of ``data x model`` devices, by default the first of this process.

    Raises:
      ValueError: on counts below 1, or on more devices than there are.
    """
    for name, count in (("data", data), ("model", model)):
        if count < 1:
            raise ValueError(f"{name} is {count}; a mesh has at least 1 device a side")
    devices = list(jax.local_devices() if devices is None else devices)
    if data * model > len(devices):
        raise ValueError(
            f"a mesh of data={data} and model={model} needs {data * model} devices and "
            f"there {'is' if len(devices) == 1 else 'are'} {len(devices)}; ask for "
            "fewer, or on CPU start with XLA_FLAGS="
            f"--xla_force_host_platform_device_count={data * model}"
        )
    some = np.array(devices[: data * model]).reshape(data, model)
    return Mesh(some, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def sides(text: str) -> dict[str, int]:
    """``"data=2,model=4"`` in numbers; ValueError on anything else."""
    found = {}
    for part in text.split(","):
        side = re.fullmatch(r"\s*(data|model)\s*=\s*(\d{1,9})\s*", part)
        if side is None or side[1] in found:
            raise ValueError(
                f"mesh is {text!r}; write how many devices lie along each axis, such "
                "as data=2,model=4"
            )
        found[side[1]] = int(side[2])
    return found


def parse_mesh(text: str) -> Mesh:
    """The mesh of :func:`sides`; errors of both."""
    found = sides(text)
    return make_mesh(found.get("data", 1), found.get("model", 1))


def check_mesh(mesh: Mesh | AbstractMesh, config: Config) -> None:
    """Raises ValueError on a mesh that this model cannot be spread over."""
    unknown = [name for name in mesh.axis_names if name not in AXES]
    if unknown or not mesh.axis_names:
        raise ValueError(
            f"the mesh has axes {mesh.axis_names}; name them {' and '.join(AXES)}"
        )
    count, heads = mesh.shape.get("model", 1), config.num_attention_heads
    if heads % count:
        fits = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ValueError(
            f"{heads} attention heads cannot be shared by model={count} devices; use "
            f"one of {', '.join(map(str, fits))}"
        )
    kv = config.num_key_value_heads
    if count > kv and count % kv:
        raise ValueError(
            f"{kv} key heads cannot be shared by model={count} devices; use a divisor "
            "or a multiple of them"
        )


def check_processes(mesh: Mesh) -> None:
    """Raises ValueError on devices of other processes without those of all."""
    there = {device.process_index for device in mesh.devices.flat}
    if there - {jax.process_index()} and len(there) < jax.process_count():
        raise ValueError(
            f"the mesh has devices of {len(there)} of {jax.process_count()} processes; "
            "take some of each, or of this one alone (jax.local_devices())"
        )


def choices(config: Config, devices: Sequence[Any]) -> Iterator[Mesh]:
    """Meshes of all of some devices that a model can be spread over.

    The fewest along ``model`` come first.
    """
    for model in range(1, len(devices) + 1):
        if len(devices) % model == 0:
            mesh = make_mesh(len(devices) // model, model, devices)
            with contextlib.suppress(ValueError):
                check_mesh(mesh, config)
                yield mesh


def by_heads(mesh: Mesh, config: Config) -> Mesh:
    """The same devices, ``model`` cut in two where it has more than key heads.

    Those heads lie along what is left of ``model``; devices along ``group`` share one.
    """
    names, sizes = list(mesh.axis_names), list(mesh.devices.shape)
    count, kv = mesh.shape.get("model", 1), config.num_key_value_heads
    if count > kv:
        at = names.index("model")
        names.insert(at + 1, "group")
        sizes[at : at + 1] = kv, count // kv
    types = (AxisType.Auto,) * len(names)
    return Mesh(mesh.devices.reshape(sizes), tuple(names), axis_types=types)


def sharding_of(
    path: str,
    shape: tuple[int, ...],
    config: Config,
    mesh: Mesh,
    rules: Mapping[str, str | None] = RULES,
) -> NamedSharding:
    """Where a parameter of a decoder lies, on the mesh of :func:`by_heads`.

    An axis that does not divide among its devices is copied to all of them.
    """
    mesh = by_heads(mesh, config)
    own = len(shape) - path.startswith(STACKS)  # axes beside that of the layers
    module = path.split(".")[-2] if "." in path else ""
    counts = _MODULES.get(module, (None,) * own)
    counts = counts[-1:] if path.endswith(".bias") else counts
    counts = (("experts",) * (own - len(counts)) + counts)[-own:]
    spec: list[tuple[str, ...] | None] = [None] * (len(shape) - own)
    for size, count in zip(shape[len(spec) :], counts, strict=True):
        axes = _axes(mesh, count, rules)
        devices = along(mesh, axes)
        whole = size
        if count == "kv_heads":
            whole = config.of(path.split(".")[1]).num_key_value_heads
        if count in _LINEAR:
            whole = getattr(config.delta, _LINEAR[count])
        spec.append(axes if devices > 1 and whole % devices == 0 else None)
    return NamedSharding(mesh, PartitionSpec(*spec))


def _axes(
    mesh: Mesh, count: str | None, rules: Mapping[str, str | None]
) -> tuple[str, ...]:
    count = "heads" if count in _LINEAR else count
    axis = None if count is None else rules[count]
    if axis is None or axis not in mesh.axis_names:
        return ()
    grouped = axis == "model" and count != "kv_heads" and "group" in mesh.axis_names
    return ("model", "group") if grouped else (axis,)


def along(mesh: Mesh | AbstractMesh, axes: str | tuple[str, ...] | None) -> int:
    """How many devices an array's axis is shared by that lies along some of a mesh."""
    names = (axes,) if isinstance(axes, str) else axes or ()
    return math.prod(mesh.shape.get(name, 1) for name in names)


def shares(array: Any, rows: int) -> tuple[int, int]:
    """By how many devices so many rows are shared out, and by how many their heads.

    On the mesh that an array lies on, which may be traced.
    """
    mesh = jax.typeof(array).sharding.mesh
    data = along(mesh, "data")
    return data if rows % data == 0 else 1, along(mesh, ("model", "group"))


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh that arrays lie on; None of one device, or of what is traced."""
    for leaf in jax.tree.leaves(tree):
        sharding = None if isinstance(leaf, Tracer) else getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            return sharding.mesh if isinstance(sharding.mesh, Mesh) else None
    return None


def rows_at_once(params: Any) -> int:
    """Of how many rows each is read by devices of its own: what ``data`` counts."""
    mesh = mesh_of(params)
    return 1 if mesh is None else along(mesh, "data")


def spread(tree: Any, params: Any, copies: int = 1) -> Any:
    """Arrays ``[batch ...]`` laid out along ``data`` of the mesh of some parameters.

    As they are without a mesh; copied where runs of ``copies`` rows do not divide.
    """
    mesh = mesh_of(params)
    if mesh is None or any(isinstance(x, Tracer) for x in jax.tree.leaves(tree)):
        return tree
    count = along(mesh, "data")

    def put(leaf: Any) -> Any:
        runs = np.shape(leaf)[0] // copies if np.ndim(leaf) else 0
        spec = ("data",) if runs and count > 1 and runs % count == 0 else ()
        return laid(leaf, NamedSharding(mesh, PartitionSpec(*spec)))

    return jax.tree.map(put, tree)


def laid(value: Any, sharding: NamedSharding | None) -> Any:
    """An array that every process has, as one of which each holds its devices' parts.

    ``jax.device_put`` would send all of it around to see whether all have the same.
    """
    known = isinstance(value, jax.Array) and not value.is_fully_addressable
    if sharding is None or sharding.is_fully_addressable or known:
        return jax.device_put(value, sharding)
    whole = np.asarray(value)
    return jax.make_array_from_callback(whole.shape, sharding, whole.__getitem__)


def here(tree: Any) -> Any:
    """The same arrays, those on devices of several processes whole on each.

    All processes have to ask, in the same order.
    """

    def whole(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return multihost_utils.process_allgather(leaf, tiled=True)
        return leaf

    return jax.tree.map(whole, tree)


def agreed(problems: Sequence[str], mesh: Mesh | AbstractMesh | None) -> list[str]:
    """What is wrong: where another process found something, no process goes on.

    All processes that a mesh is of have to ask.
    """
    if not isinstance(mesh, Mesh) or not mesh.is_multi_process:
        return list(problems)
    counts = multihost_utils.process_allgather(np.int32(len(problems)))
    if problems or not counts.any():
        return list(problems)
    return [f"process {counts.argmax()} cannot read its part, as its own error says"]


def check_one_process(params: Any, what: str) -> None:
    """Raises ValueError where parameters lie on devices of several processes."""
    mesh = mesh_of(params)
    if mesh is not None and mesh.is_multi_process:
        raise ValueError(
            f"{what} is done by one process, and the model lies on devices of several; "
            "load it on those of this one, such as mesh=jaxhal.make_mesh(data=1, "
            f"model={len(jax.local_devices())})"
        )
