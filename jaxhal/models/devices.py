"""What JAX computes on, in words."""

import functools
import math
import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import psutil


class Peak(NamedTuple):
    """What one device has, and can do in a second, by its data sheet."""

    flops: float  # of dense bfloat16 products
    bytes: float  # between its memory and itself
    memory: float  # bytes
    links: float  # bytes that it sends to its neighbours


# By how `device_kind` begins; the first that fits.
PEAKS = {
    "NVIDIA H200": Peak(989.4e12, 4.8e12, 141e9, 450e9),
    "NVIDIA H100 PCIe": Peak(756e12, 2.0e12, 80e9, 300e9),
    "NVIDIA H100": Peak(989.4e12, 3.35e12, 80e9, 450e9),
    "NVIDIA A100": Peak(312e12, 2.0e12, 80e9, 300e9),
    "NVIDIA L4": Peak(121e12, 0.3e12, 24e9, 32e9),
    "TPU v5 lite": Peak(197e12, 0.819e12, 16e9, 200e9),
    "TPU v5": Peak(459e12, 2.765e12, 95e9, 600e9),
    "TPU v6 lite": Peak(918e12, 1.64e12, 32e9, 448e9),
}


# Where Linux tells a container its limits.
_GROUP = Path("/sys/fs/cgroup")


def peak(kind: str) -> Peak | None:
    """What a device of a kind can do, where that is known."""
    return next((at for name, at in PEAKS.items() if kind.startswith(name)), None)


def memory(device: Any = None) -> int:
    """Bytes that a device, the first by default, has left.

    A CPU has the machine's, or what the limit of a container leaves of them.
    """
    known = (device or jax.local_devices()[0]).memory_stats() or {}
    if "bytes_limit" in known:
        return known["bytes_limit"] - known.get("bytes_in_use", 0)
    return int(min(psutil.virtual_memory().available, _left_in_container()))


def _left_in_container() -> float:
    """Infinite without a limit; what files are cached in is given back when needed."""
    try:
        most, taken, counts = (
            (_GROUP / f"memory.{name}").read_text("utf-8").split()
            for name in ("max", "current", "stat")
        )
    except OSError:  # no control groups of the second version
        return math.inf
    if most == ["max"]:
        return math.inf
    cached = int(counts[counts.index("inactive_file") + 1])
    return float(int(most[0]) - int(taken[0]) + cached)


def memory_of_each(devices: Iterable[Any]) -> float:
    """Bytes that each of some devices has left; CPUs share the machine's equally."""
    every = list(devices)
    shared = sum(device.platform == "cpu" for device in every)
    return min(map(memory, every)) / max(1, shared)


@functools.cache
def device_name() -> str:
    """The accelerator's kind; of a CPU its name and how many cores there are."""
    kind = jax.local_devices()[0].device_kind
    if kind != "cpu":
        return kind
    try:
        known = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:  # not Linux
        known = ""
    named = re.search(r"^model name\s*:\s*(.+)$", known, re.MULTILINE)
    name = named[1] if named else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"
