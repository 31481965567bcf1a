"""Plans for devices that are not here, by what this machine can compile for."""

import importlib.util
import json
import os
import subprocess
import sys

import jax
import pytest
from typer.testing import CliRunner

import jaxhal
import tiny_lm
from jaxhal.bench import plan as plans
from jaxhal.bench.plan import Shape
from jaxhal.cli.app import app
from jaxhal.models import devices

REDUCERS = {"lookback": jaxhal.LookbackRatio(), "states": jaxhal.HiddenStates()}
SHAPE = Shape(2, 64, 16)


@pytest.fixture
def here(monkeypatch):
    """One device of this machine in the place of a topology."""
    monkeypatch.setattr(plans, "_described", lambda topology: jax.devices()[:1])
    monkeypatch.setitem(devices.PEAKS, "cpu", devices.Peak(1e12, 1e11, 1e9))
    return tiny_lm.tiny_lm().config


def test_a_plan_is_what_the_program_takes(here):
    lm, batch = tiny_lm.tiny_lm(), plans.random_batch(here.vocab_size, 64, 16, 2)
    found = plans.plan(here, "-", SHAPE, REDUCERS, dtype="float32")
    features = jaxhal.read(lm, batch, REDUCERS)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(features))
    assert size <= found.features <= size + 64  # and where each of them is
    assert found.weights == sum(leaf.nbytes for leaf in jax.tree.leaves(lm.params))
    assert (
        found.temporaries > 0 and found.fits and found.mesh == {"data": 1, "model": 1}
    )
    assert found.arithmetic == pytest.approx(plans.flops(here, SHAPE) / 1e12)
    assert found.pace == pytest.approx(2 / max(found.arithmetic, found.moving))
    assert found.collectives == {}


def test_what_does_not_fit(here, monkeypatch):
    small = devices.Peak(1e12, 1e11, 1e3)
    monkeypatch.setitem(devices.PEAKS, "cpu", small)
    found = plans.plan(here, "-", SHAPE, REDUCERS)
    assert not found.fits and "weights alone" in found.refused


@pytest.mark.parametrize(
    "shape, mesh, message",
    [
        (Shape(0, 64, 16), None, "answers is 0"),
        (Shape(2, 16, 16), None, "tokens is 16; give more than the 16"),
        (Shape(2, 9999, 16), None, "at most the model's context of 512"),
        (SHAPE, {"data": 2, "model": 1}, "is not all of the topology's 1 devices"),
    ],
)
def test_what_cannot_be_planned(here, shape, mesh, message):
    with pytest.raises(ValueError, match=message):
        plans.plan(here, "-", shape, REDUCERS, mesh=mesh)


def test_the_command(here, tmp_path, monkeypatch):
    path = tiny_lm.write_lm(tmp_path) / "config.json"
    command = ["plan", str(path), "--topology", "-", "--tokens", "64", "--batch", "2"]
    command += ["--response", "16", "--price", "3.6"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    for text in ("1 x cpu", "2 of 64 tokens", "seconds, at least", "dollars a million"):
        assert text in done.output
    monkeypatch.setitem(devices.PEAKS, "cpu", devices.Peak(1e12, 1e11, 1e3))
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1 and "does not fit" in done.output


def test_without_libtpu_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"pip install 'jaxhal\[tpu\]'"):
        plans._described("v5e:2x4")


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)
def test_attention_stays_on_its_device_of_a_tpu(tmp_path):
    small = dict(hidden_size=256, head_dim=32, num_attention_heads=8)
    tiny_lm.write_lm(tmp_path, **small, num_key_value_heads=4)
    code = (
        "import json, sys; from jaxhal.bench import plan; import jaxhal;"
        "from jaxhal.models.config import read_config;"
        f"found = plan.plan(read_config({str(tmp_path)!r}), 'v5e:2x2',"
        "plan.Shape(4, 256, 64), {'lookback': jaxhal.LookbackRatio()},"
        "mesh={'data': 2, 'model': 2});"
        "print(json.dumps(dict(found.collectives)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert set(json.loads(ran.stdout.splitlines()[-1])) == {"all-reduce"}
