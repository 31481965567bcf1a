"""What JAX computes on, in words."""

import functools
import os
import platform
import re
from pathlib import Path
from typing import Any

import jax
import psutil


def memory(device: Any = None) -> int:
    """Bytes that a device, the first by default, has left; of a CPU the machine's."""
    known = (device or jax.devices()[0]).memory_stats() or {}
    if "bytes_limit" in known:
        return known["bytes_limit"] - known.get("bytes_in_use", 0)
    return psutil.virtual_memory().available


@functools.cache
def device_name() -> str:
    """The accelerator's kind; of a CPU its name and how many cores there are."""
    kind = jax.devices()[0].device_kind
    if kind != "cpu":
        return kind
    try:
        known = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:  # not Linux
        known = ""
    named = re.search(r"^model name\s*:\s*(.+)$", known, re.MULTILINE)
    name = named[1] if named else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"
