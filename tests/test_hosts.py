"""One model on devices of two processes, as on a mesh over two hosts."""

import children
import numpy as np
import pytest
import test_quantized
from hosts_child import DETECTORS, MESHES, WRITTEN, last, logits, run
from safetensors.numpy import load_file, save_file
from test_distributed import VARIABLES, job

import jaxhal
from jaxhal.types import Example
from tiny_lm import write_lm

EXAMPLES = [
    Example(
        f"It was opened in {year}.",
        context=f"Opened in {year - row}. " * 3,
        question="When was it opened?",
        label=row % 2,
    )
    for row, year in enumerate(range(1830, 1834))
]
SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 64}
SHAPE |= {"vocab_size": 264, "intermediate_size": 96}  # which eight devices divide


def test_two_processes_hold_one_model(tmp_path):
    """Each reads its own half of the weights, and both have the scores of all rows."""
    folder = write_lm(tmp_path / "model", **SHAPE)
    file = tmp_path / "tiny.gguf"
    test_quantized.write(file)
    lm = jaxhal.load(folder, mesh="data=1")
    int8 = last(jaxhal.load(folder, mesh="data=1", weights="int8"))
    stored = logits(file, jaxhal.make_mesh())
    reports = jaxhal.score(lm, EXAMPLES, DETECTORS, progress=False)
    written = jaxhal.generate(lm, EXAMPLES[:3], progress=False, **WRITTEN)
    address = job()[0][VARIABLES[0]]
    broken = write_lm(tmp_path / "broken", **SHAPE)
    path, name = broken / "model.safetensors", "model.layers.1.self_attn.q_proj.weight"
    tensors = load_file(path)
    tensors[name][-1, -1] = np.nan  # a part of the second process's
    save_file(tensors, path)
    given = address, folder, broken, file, EXAMPLES
    both = [children.start(run, n, *given) for n in range(2)]
    size = (folder / "model.safetensors").stat().st_size
    for number, (process, line) in enumerate(both):
        for _ in MESHES:
            read, scores = heard(line)
            assert 0.4 * size < read < 0.6 * size
            for one, report in zip(scores, reports, strict=True):
                assert one == pytest.approx(report.scores, abs=1e-5)
            read, few = heard(line)
            assert 0.4 * size < read < 0.7 * size  # few blocks are copied
            for got, want in zip(few, (int8, stored), strict=True):
                np.testing.assert_allclose(got, want, atol=1e-4)
        assert heard(line) == [one.text for (one,) in written]
        store, guided, wrong, part = heard(line)
        assert "reading into a store is done by one process" in store
        assert "guiding is done by one process" in guided
        assert "mesh=jaxhal.make_mesh(data=1, model=4)" in guided
        says = f"{name} holds NaN" if number else "process 1 cannot read its part"
        assert says in wrong
        others = "devices of 1 of 2 processes; take some of each"
        assert others in part if number else part == "done"
        process.join(60)
        assert process.exitcode == 0


def heard(line):
    """What a process says next; its error fails the test."""
    assert line.poll(300)
    said = line.recv()
    assert not isinstance(said, str), said
    return said
