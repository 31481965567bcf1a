"""Devices that are not here, as XLA is told of them to compile for."""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jax.experimental import topologies
from jax.sharding import Mesh

from jaxhal.io.extras import remedy
from jaxhal.models import devices, kernels
from jaxhal.models import mesh as mesh_lib
from jaxhal.models.config import Config


class Gpu(NamedTuple):
    """What XLA's choices depend on beside a :class:`~jaxhal.models.devices.Peak`."""

    kind: str
    capability: tuple[int, int]
    processors: int
    lanes: int  # of a processor, for float32
    clock: float  # GHz
    cache: int  # MiB, shared by all processors
    shared: int  # KiB of a processor, all but one of which a block may take


GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41, 40, 164),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98, 50, 228),
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 128, 1.98, 50, 228),
}

# Topologies of one TPU, by its kind.
_TPUS = {"TPU v5 lite": "v5e:1x1", "TPU v5": "v5p:1x1x1", "TPU v6 lite": "v6e:1x1"}


def of_one(device: Any) -> str | None:
    """The topology that is one of such devices, where it can be compiled for here."""
    gpus = {gpu.kind: name for name, gpu in GPUS.items()}
    plugin = {"gpu": "cuda"}.get(device.platform, device.platform)
    known = (gpus | _TPUS).get(device.device_kind)
    return known if plugin in kernels.installed() else None


def described(topology: str) -> list[Any]:
    """The devices of a topology: TPUs as ``"v5e:2x4"``, GPUs of a host as ``"h100:8"``.

    One chip is ``"v5e:1x1"``.

    Raises:
      ValueError: on a topology that does not exist.
      RuntimeError: without the plugin that compiles for it.
    """
    found = re.fullmatch(rf"({'|'.join(GPUS)})(?::(.*))?", topology)
    return _tpus(topology) if found is None else _gpus(topology, *found.groups("1"))


def meshes(
    topology: str, config: Config, answers: int, wanted: Mapping[str, int] | None
) -> Iterator[Mesh]:
    """Of all devices: the mesh asked for, or those that share out model and answers.

    The fewest devices along ``model`` come first; errors of :func:`described`, and
    ValueError on a mesh that will not do.
    """
    found = described(topology)
    if wanted is None:
        for mesh in mesh_lib.choices(config, found):
            if answers % mesh.shape["data"] == 0:
                yield mesh
        return
    data, model = wanted.get("data", 1), wanted.get("model", 1)
    if data * model != len(found):
        raise ValueError(
            f"a mesh of data={data} and model={model} is not all of the topology's "
            f"{len(found)} devices; let the two make {len(found)}"
        )
    mesh = mesh_lib.make_mesh(data, model, found)
    mesh_lib.check_mesh(mesh, config)
    yield mesh


def options(device: Any) -> dict[str, Any]:
    """What a compiler is told that has no device to try programs on."""
    return {"xla_gpu_autotune_level": 0} if device.platform == "gpu" else {}


def _gpus(topology: str, name: str, count: str) -> list[Any]:
    if not re.fullmatch(r"[1-9]\d{0,2}", count):
        raise ValueError(
            f"topology is {topology!r}; say how many GPUs a host has, such as {name}:8"
        )
    if "cuda" not in kernels.installed():
        raise RuntimeError(
            f"compiling for {name} needs JAX's CUDA plugin; {remedy('cuda')}"
        )
    found = topologies.get_topology_desc(
        platform="cuda", target_config=_target(GPUS[name]), topology=f"1x1x{count}"
    )
    return list(found.devices)


def _target(gpu: Gpu) -> str:
    """A GpuTargetConfigProto: every field that XLA divides by or decides by."""
    peak, (major, minor) = devices.peak(gpu.kind), gpu.capability
    assert peak is not None
    return f"""
        gpu_device_info {{
          cuda_compute_capability {{ major: {major} minor: {minor} }}
          core_count: {gpu.processors}
          fpus_per_core: {gpu.lanes}
          clock_rate_ghz: {gpu.clock}
          memory_bandwidth: {peak.bytes:.0f}
          device_memory_size: {peak.memory:.0f}
          l2_cache_size: {gpu.cache << 20}
          shared_memory_per_core: {gpu.shared << 10}
          shared_memory_per_block_optin: {gpu.shared - 1 << 10}
          shared_memory_per_block: {48 << 10}
          registers_per_core_limit: {1 << 16}
          registers_per_block_limit: {1 << 16}
          threads_per_core_limit: 2048
          threads_per_block_limit: 1024
          threads_per_warp: 32
          block_dim_limit_x: {(1 << 31) - 1}
          block_dim_limit_y: {(1 << 16) - 1}
          block_dim_limit_z: {(1 << 16) - 1}
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 8 }}
        runtime_version {{ major: 12 minor: 8 }}
        device_description_str: "{gpu.kind}"
    """


def _tpus(topology: str) -> list[Any]:
    if "tpu" not in kernels.installed():
        raise RuntimeError(
            f"topology {topology!r} is of no GPU known ({', '.join(GPUS)}), and to "
            f"compile for TPUs needs libtpu; {remedy('tpu')}"
        )
    # Nothing is asked of this machine, nor taken from a program that uses its TPUs.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    # Hosts have four chips where nothing is said, and one chip has to be on one.
    alone = re.fullmatch(r"\w+:1(x1)+", topology)
    bounds = {"chips_per_host_bounds": (1, 1, 1)} if alone else {}
    try:
        found = topologies.get_topology_desc(topology, "tpu", **bounds)
    except Exception as error:  # of no one type, by what is wrong with the name
        raise ValueError(
            f"topology is {topology!r}, which libtpu does not know "
            f"({str(error).splitlines()[0]}); use one such as v5e:1x1, v5e:2x4 or "
            f"v5p:2x2x2, or a host's GPUs such as h100:8 ({', '.join(GPUS)} are known)"
        ) from error
    return list(found.devices)
