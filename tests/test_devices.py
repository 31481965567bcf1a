"""What results call the device that they were computed on."""

import os
import types
from pathlib import Path

import jax
import pytest

from jaxhal.models.devices import device_name


@pytest.mark.parametrize(
    ("kind", "named", "expected"),
    [
        (
            "cpu",
            "model name\t: Some CPU 7\nflags\t: a\nmodel name\t: ?",
            "Some CPU 7, 3",
        ),
        ("cpu", None, "arm64, 3"),
        ("NVIDIA H100", "model name\t: Some CPU", "NVIDIA H100"),
    ],
)
def test_a_cpu_has_its_processors_name(monkeypatch, kind, named, expected):
    def read(path, encoding):
        if named is None:
            raise FileNotFoundError(path)
        return named

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    one = types.SimpleNamespace(device_kind=kind)
    monkeypatch.setattr(jax, "local_devices", lambda: [one])
    device_name.cache_clear()
    try:
        cores = " cores" if kind == "cpu" else ""
        assert device_name() == expected + cores
    finally:
        device_name.cache_clear()
