"""A process of two whose devices, four each, hold one model together.

It is forked from a server that has imported everything and computed nothing.
"""

import os
import traceback

import jax
import numpy as np
from eight import filled

import jaxhal
from jaxhal.models import mesh as mesh_lib
from jaxhal.models.gguf import GGUFSource
from jaxhal.models.gguf_config import config_from_gguf
from jaxhal.models.gguf_families import gguf_table
from jaxhal.models.safetensors import SafetensorsSource
from jaxhal.scoring.guided import guide

_FLAGS = "--xla_force_host_platform_device_count=4"
# Orders of eight devices, four of each process: `model` goes over both.
MESHES = {(1, 8): range(8), (2, 4): (0, 1, 4, 5, 2, 3, 6, 7)}
DETECTORS = ["lookback_ratio", "token_entropy"]
TOKENS = np.random.default_rng(1).integers(0, 96, (4, 40), np.int32)
WRITTEN = {"max_new_tokens": 6, "sampling": jaxhal.GREEDY, "stop": ["never"]}


def logits(file, mesh):
    """Of a GGUF file, whose blocks stay as they are."""
    source = GGUFSource(file)
    config = config_from_gguf(source)
    return last(filled(config, source, gguf_table(config), mesh, "stored"))


def last(lm):
    """Logits after each row; all of them would fill the line."""
    return np.asarray(mesh_lib.here(lm.forward(TOKENS)))[:, -1]


def run(number, address, folder, broken, file, examples, line):
    """Says of each mesh what was read and scored, then what was written and refused.

    After each mesh's scores come logits with weights of few bits.
    """
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}"
    try:
        jax.distributed.initialize(address, 2, number)
        _run(folder, broken, file, examples, line)
        jax.distributed.shutdown()
    except Exception:
        line.send(traceback.format_exc())
        raise


def _run(folder, broken, file, examples, line):
    lm, read = None, SafetensorsSource.part
    for (data, model), order in MESHES.items():
        bytes_read = 0

        def part(*given):
            nonlocal bytes_read
            found = read(*given)
            bytes_read += found.nbytes
            return found

        SafetensorsSource.part = part
        devices = jax.devices()
        mesh = jaxhal.make_mesh(data, model, [devices[at] for at in order])
        lm = jaxhal.load(folder, mesh=mesh)
        reports = jaxhal.score(lm, examples, DETECTORS, progress=False)
        line.send((bytes_read, [report.scores for report in reports]))
        bytes_read = 0
        few = jaxhal.load(folder, mesh=mesh, weights="int8")
        line.send((bytes_read, (last(few), logits(file, mesh))))
    written = jaxhal.generate(lm, examples[:3], progress=False, **WRITTEN)
    line.send([one.text for (one,) in written])
    errors = []
    for work in (
        lambda: jaxhal.fit(lm, examples, ["linear_probe"], store=folder / "store"),
        lambda: guide(lm, examples, "lookback_ratio", key=jax.random.key(0)),
        lambda: jaxhal.load(broken, mesh=mesh, weights="int8"),
        lambda: jaxhal.load(folder, mesh=jaxhal.make_mesh(1, 4, jax.devices()[:4])),
    ):
        try:
            work()
        except ValueError as error:
            errors.append(str(error))
        else:
            errors.append("done")
    line.send(errors)
