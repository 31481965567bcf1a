"""Weights over several devices: each reads its own, and they are those of one."""

import os
import subprocess
import sys

import eight
import pytest

import tiny_lm


def test_eight_devices_hold_what_one_does(pytestconfig):
    eight.passes("weights_on_eight_devices.py", pytestconfig.option.markexpr)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read off /proc")
def test_loading_takes_little_more_than_what_devices_hold(tmp_path):
    """In a process of its own, as memory given back is taken again without a trace."""
    narrow = dict(num_attention_heads=8, num_key_value_heads=8, head_dim=8)
    first = tiny_lm.write_lm(tmp_path / "first", **narrow)
    # An eighth of either table of a vocabulary is little, and a table is much.
    wide = dict(hidden_size=512, intermediate_size=4096, vocab_size=16384)
    folder = tiny_lm.write_lm(tmp_path / "wide", **narrow, **wide)
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "LD_PRELOAD": "",
        "MALLOC_MMAP_THRESHOLD_": "65536",  # what is freed is given back
    }
    command = [sys.executable, "-c", _LOADS, str(first), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    taken, held = map(int, done.stdout.split())
    assert held > 90e6
    assert held < taken < 1.2 * held


_LOADS = """
import sys
import jax, jaxhal
from jaxhal.bench.memory import Peak

first, folder = sys.argv[1:]
jaxhal.load(first, mesh="model=8")
with Peak() as peak:
    lm = jaxhal.load(folder, mesh="model=8")
leaves = jax.tree.leaves(lm.params)
held = [shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards]
print(peak.bytes, sum(held))
"""
