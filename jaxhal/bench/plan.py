"""What reading would take on devices that are not here, by compiling for them.

XLA compiles for a described topology: memory and collectives are those of the real
program, and time is a bound by the devices' data sheets.
"""

import collections
import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxhal.bench.read import random_batch
from jaxhal.capture import forward as capture
from jaxhal.features.base import Reducer
from jaxhal.io.checks import at_least
from jaxhal.models import devices
from jaxhal.models import lm as lm_lib
from jaxhal.models import mesh as mesh_lib
from jaxhal.models.config import Config
from jaxhal.models.lm import LM
from jaxhal.models.weights import paths

# Of a device's memory, what programs and weights may take.
_USABLE = 0.9
_COLLECTIVES = re.compile(
    r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)"
    r"(?:-start)?\("
)


class Shape(NamedTuple):
    """Answers read together, tokens of each, and how many are the response."""

    answers: int
    tokens: int
    response: int

    def __str__(self) -> str:
        return f"{self.answers} x {self.tokens}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What reading some answers takes of each device; bytes and seconds."""

    kind: str  # of the devices
    mesh: Mapping[str, int]
    shape: Shape
    weights: int  # a device, as the following
    temporaries: int
    features: int
    memory: float
    flops: int  # of all devices
    collectives: Mapping[str, int]  # in the program; those of a layer count once
    arithmetic: float  # seconds at the peak
    moving: float  # seconds to read the weights once
    refused: str = ""  # what the compiler said of a program that is too large

    @property
    def fits(self) -> bool:
        """Whether nine tenths of the memory hold it."""
        return not self.refused and self.needed <= _USABLE * self.memory

    @property
    def needed(self) -> int:
        """Bytes of a device."""
        return self.weights + self.temporaries + self.features

    @property
    def seconds(self) -> float:
        """No batch is read in less."""
        return max(self.arithmetic, self.moving)

    @property
    def bound(self) -> str:
        """What takes that time."""
        return "products" if self.arithmetic > self.moving else "reading the weights"

    @property
    def pace(self) -> float:
        """Answers a second, at most."""
        return self.shape.answers / self.seconds


def plan(
    config: Config,
    topology: str,
    shape: Shape,
    reducers: Mapping[str, Reducer],
    *,
    mesh: Mapping[str, int] | None = None,
    dtype: Any = jnp.bfloat16,
) -> Plan:
    """Compiles a reading pass for a topology such as ``"v5e:2x4"``.

    Without a ``mesh`` the one with the fewest devices along ``model`` that shares out
    the answers and fits; if none does, the last that was tried.

    Raises:
      ValueError: on a topology that does not exist, a shape without prompt or answers,
        a mesh that does not divide the heads or is not of all devices.
      RuntimeError: without libtpu.
    """
    at_least(1, answers=shape.answers, response=shape.response)
    if not shape.response < shape.tokens <= config.context_length:
        raise ValueError(
            f"tokens is {shape.tokens}; give more than the {shape.response} of the "
            f"response and at most the model's context of {config.context_length}"
        )
    described = _described(topology)
    capture.check(config, reducers)
    found = None
    for one in _meshes(config, described, shape.answers, mesh):
        found = _planned(config, one, shape, reducers, dtype)
        if found.fits:
            break
    if found is None:
        raise ValueError(
            f"no mesh of {topology} shares {config.num_attention_heads} attention "
            f"heads and {shape.answers} answers; take other numbers of either"
        )
    return found


def flops(config: Config, shape: Shape) -> int:
    """Of all layers of a forward pass; of attention the half that is not masked."""
    answers, seq, _ = shape
    heads = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    mlp = (3 if config.gated else 2) * config.intermediate_size
    weights = config.hidden_size * (2 * heads + 2 * kv + mlp)
    return config.num_hidden_layers * answers * seq * (2 * weights + 2 * seq * heads)


def _described(topology: str) -> list[Any]:
    """The devices of a topology."""
    if importlib.util.find_spec("libtpu") is None:
        raise RuntimeError(
            "compiling for a TPU needs libtpu; pip install 'jaxhal[tpu]'"
        )
    from jax.experimental import topologies

    # Nothing is to be asked of a machine that has none.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    except Exception as error:  # of no one type, by what is wrong with the name
        raise ValueError(
            f"topology is {topology!r}, which libtpu does not know "
            f"({str(error).splitlines()[0]}); use one such as v5e:2x4, v5p:2x2x2 or "
            "v6e:2x2"
        ) from error
    return list(found.devices)


def _meshes(
    config: Config,
    described: list[Any],
    answers: int,
    wanted: Mapping[str, int] | None,
) -> Iterator[Mesh]:
    """The mesh asked for, or those that model and answers can be spread over."""
    count, axes = len(described), (AxisType.Auto,) * 2
    sides = range(1, count + 1) if wanted is None else [wanted.get("model", 1)]
    for model in sides:
        data = count // model if wanted is None else wanted.get("data", 1)
        if wanted is None and (data * model != count or answers % data):
            continue
        if data * model != count:
            raise ValueError(
                f"a mesh of data={data} and model={model} is not all of the topology's "
                f"{count} devices; let the two make {count}"
            )
        mesh = Mesh(
            np.array(described).reshape(data, model), mesh_lib.AXES, axis_types=axes
        )
        try:
            mesh_lib.check_mesh(mesh, config)
        except ValueError:
            if wanted is not None:
                raise
            continue
        yield mesh


def _planned(
    config: Config,
    mesh: Mesh,
    shape: Shape,
    reducers: Mapping[str, Reducer],
    dtype: Any,
) -> Plan:
    kind = mesh.devices.flat[0].device_kind
    peak = devices.peak(mesh.devices.flat[0])
    if peak is None:
        raise ValueError(
            f"the peak of {kind!r} is not known; known are {', '.join(devices.PEAKS)}"
        )
    lm, batch = abstract(config, mesh, shape, dtype)
    weights = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(lm.params)
    )
    done = flops(config, shape)
    # Rows that cannot be shared are read by every row of devices.
    shared = (
        mesh.size if shape.answers % mesh.shape["data"] == 0 else mesh.shape["model"]
    )
    made = Plan(
        kind=kind,
        mesh=dict(mesh.shape),
        shape=shape,
        weights=weights,
        temporaries=0,
        features=0,
        memory=peak.memory,
        flops=done,
        collectives={},
        arithmetic=done / shared / peak.flops,
        moving=weights / peak.bytes,
    )
    if weights > peak.memory:
        return dataclasses.replace(made, refused="the weights alone are too large")
    lowered = capture.read_jit.lower(lm, batch, tuple(reducers.items()))
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return dataclasses.replace(made, refused=str(error).splitlines()[0])
    memory: Any = program.memory_analysis()  # which this compiler gives
    return dataclasses.replace(
        made,
        temporaries=memory.temp_size_in_bytes,
        features=memory.output_size_in_bytes,
        collectives=collections.Counter(_COLLECTIVES.findall(program.as_text() or "")),
    )


def abstract(config: Config, mesh: Mesh, shape: Shape, dtype: Any) -> tuple[LM, Any]:
    """A model and a batch by shape, type and place alone."""
    lm = jax.eval_shape(lambda: lm_lib.random(config, jax.random.key(0), dtype))
    leaves = [
        jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=mesh_lib.sharding_of(path, leaf.shape, config, mesh),
        )
        for path, leaf in paths(lm.params)
    ]
    params = jax.tree.unflatten(jax.tree.structure(lm.params), leaves)
    along = shape.answers % mesh.shape["data"] == 0
    rows = NamedSharding(mesh, PartitionSpec("data") if along else PartitionSpec())
    batch = random_batch(config.vocab_size, shape.tokens, shape.response, shape.answers)
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), batch
    )
    return dataclasses.replace(lm.bare, params=params), batch
