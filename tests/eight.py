"""A model on eight fake devices, and what to compare it with."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import thorough

import jaxhal
import tiny_lm
from jaxhal.detectors import Ragged
from jaxhal.models import mesh as mesh_lib
from jaxhal.models import placement, weights
from jaxhal.models.lm import LM
from jaxhal.types import Example

# The last two with fewer heads of keys than devices.
MESHES = ROWS, CROSSED, HEADS = (8, 1), (2, 4), (1, 8)
REDUCERS = {
    "lookback": jaxhal.LookbackRatio(),
    "mtop_div": jaxhal.MTopDiv(),
    "max_prompt": jaxhal.MaxPromptAttention(),
    "states": jaxhal.HiddenStates(),
    "logprob": jaxhal.TokenLogprob(),
    "entropy": jaxhal.TokenEntropy(),
}
EXAMPLES = [
    Example(
        f"It was opened in {year}.",
        context=f"Opened in {year - row}. " * 3,
        question="When was it opened?",
    )
    for row, year in enumerate(range(1830, 1838))
]
# Eight heads, two of keys: fewer than devices, so some of those share one.
SHAPE = dict(num_attention_heads=8, num_key_value_heads=2, hidden_size=64, head_dim=8)
SHAPE |= dict(vocab_size=264, intermediate_size=96, context=4096)


def passes(tests, marked):
    """Runs the tests of a file on eight fake devices, all of which must pass.

    Args:
      tests: the file.
      marked: which of them, as ``-m`` has it.
    """
    here = Path(__file__).parent
    flags = os.environ.get("XLA_FLAGS", "")
    environment = os.environ | {
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # nobody else has eight devices
        "PYTEST_ADDOPTS": "",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n=0", "--no-header"]
    command += ["-m", marked]
    done = subprocess.run(
        [*command, str(here / tests)],
        env=environment,
        capture_output=True,
        text=True,
        cwd=here.parent,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    assert jax.device_count() == 8
    return tiny_lm.write_lm(tmp_path_factory.mktemp("lm"), **SHAPE)


@pytest.fixture(scope="module")
def alone(folder):
    return jaxhal.load(folder, mesh="data=1")


def _name(sides):
    return "x".join(map(str, sides))


@pytest.fixture(
    scope="module", params=[ROWS, CROSSED, *thorough.more((HEADS,))], ids=_name
)
def spread(request, folder):
    data, model = request.param
    return jaxhal.load(folder, mesh=jaxhal.make_mesh(data=data, model=model))


@pytest.fixture(scope="module")
def crossed(folder):
    return jaxhal.load(folder, mesh=jaxhal.make_mesh(data=2, model=4))


def filled(config, source, table, mesh, packed=""):
    """A model without a tokenizer, its weights in float32 or in blocks."""
    place = placement.on(mesh, config, mesh_lib.RULES)
    how = dict(packed=packed, place=place)
    graphdef, params = weights.fill(config, source, table, jnp.float32, **how)
    return LM(params, graphdef, config)


def equal(got, want, most=1e-5):
    """Leaf by leaf, within a share of the largest number."""
    got, want = map(_leaves, (got, want))
    for one, other in zip(got, want, strict=True):
        scale = max(1.0, np.abs(np.asarray(other, np.float32)).max())
        np.testing.assert_allclose(one, other, atol=most * scale, rtol=0)


def _leaves(tree):
    whole = jax.tree.map(lambda x: vars(x) if isinstance(x, Ragged) else x, tree)
    return jax.tree.leaves(whole)
