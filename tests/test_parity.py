"""Every family against Hugging Face eager: hidden states of all layers and logits."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
import shown
import thorough

import jaxhal
import tiny
from jaxhal.models import families, placement, weights
from jaxhal.models.families import from_huggingface
from jaxhal.models.lm import LM
from jaxhal.models.mesh import RULES
from jaxhal.models.safetensors import SafetensorsSource
from jaxhal.types import Batch


def load(folder, config, shapes, dtype=jnp.float32, mesh=None) -> LM:
    tiny.write_folder(folder, config, shapes)
    ours = from_huggingface(config)
    source = SafetensorsSource(folder, families.FAMILIES[ours.family].bare)
    table = families.huggingface_table(ours)
    place = mesh and placement.on(mesh, ours, RULES)
    graphdef, params = weights.fill(ours, source, table, dtype, place=place)
    return LM(params, graphdef, ours)


def batch(tokens: np.ndarray, prompt: int) -> Batch:
    yes, no = np.ones(tokens.shape, bool), np.zeros(tokens.shape, bool)
    offsets = np.zeros((len(tokens), tokens.shape[1] - prompt, 2), np.int32)
    return Batch(tokens, yes, no, no, no, offsets, prompt)


def error(ours, theirs) -> float:
    """Largest difference relative to the largest value."""
    return float(np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max())


def compare(lm: LM, hidden: np.ndarray, logits: np.ndarray, tolerance: float):
    assert error(lm.forward(tiny.TOKENS), logits) < tolerance
    states = {"states": jaxhal.HiddenStates()}
    read = jaxhal.read(lm, batch(tiny.TOKENS, 1), states)["states"]
    for layer, (ours, theirs) in enumerate(zip(read, hidden, strict=True)):
        assert error(ours, theirs[:, 1:]) < tolerance, f"hidden state {layer}"


EVERY = [*tiny.ONE_EACH, *thorough.more(*tiny.THE_OTHERS)]


@pytest.mark.shows("states", "logits")
@pytest.mark.parametrize("case", EVERY)
def test_golden(case, tmp_path):
    want = tiny.golden(case)
    lm = load(tmp_path, want["config"], want["shapes"])
    compare(lm, want["hidden"], want["logits"], 1e-4)


@pytest.mark.parametrize("case", EVERY)
def test_golden_values_are_those_of_hugging_face(case):
    pytest.importorskip(
        "torch", reason="torch is not installed; golden values stand in"
    )
    import make_golden

    meta, live = make_golden.run(case)
    want = tiny.golden(case)
    assert {name: want["config"].get(name) for name in tiny.CASES[case][1]} == {
        name: meta["config"].get(name) for name in tiny.CASES[case][1]
    }
    for name in ("hidden", "logits"):
        assert error(live[name], want[name]) < 1e-5


@dataclasses.dataclass(frozen=True)
class Row(jaxhal.Reducer):
    """The attention row itself."""

    def rows(self, probs, view):
        return probs


@pytest.mark.shows("attention")
@pytest.mark.parametrize("case", tiny.ONE_EACH)
def test_attention_rows_are_those_of_hugging_face(case, tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    import make_golden

    want = tiny.golden(case)
    lm = load(tmp_path, want["config"], want["shapes"])
    rows = jaxhal.read(lm, batch(tiny.TOKENS, 1), {"row": Row()})["row"]
    theirs = make_golden.attention(case)[..., 1:, :]
    # Processors sum in different orders, which layers of a state carry on.
    np.testing.assert_allclose(rows, theirs, atol=2e-5)


@pytest.mark.parametrize(
    "case", ["llama-gqa", "gemma3-gqa", "gemma4-borrowing", "falcon-7b", "gpt2-mha"]
)
def test_bfloat16(case, tmp_path):
    # Against float32, root mean square over root mean square: three layers of random
    # weights in 8-bit mantissas.
    want = tiny.golden(case)
    lm = load(tmp_path, want["config"], want["shapes"], jnp.bfloat16)
    logits = np.asarray(lm.forward(tiny.TOKENS))
    assert np.linalg.norm(logits - want["logits"]) < 0.04 * np.linalg.norm(
        want["logits"]
    )


def test_the_table_of_the_site_has_every_family():
    table = json.loads(shown.TABLE.read_text("utf-8"))
    assert table.keys() == families.FAMILIES.keys()
    for name, what in table.items():
        assert {"states", "logits", "greedy", "detectors"} <= {*what}, name


def test_what_the_table_shows_all_tests_of_it_showed():
    """A new test of a family, or a detector, asks for a new recording."""
    table, there = json.loads(shown.TABLE.read_text("utf-8")), shown.claimed()
    wrong = {
        f"{what} of {family}: {table.get(family, {}).get(what, 0)} of {number} tests"
        for family, of in there.items()
        for what, number in of.items()
        if table.get(family, {}).get(what) != number
    }
    gone = {
        f"{what} of {family}: no test"
        for family, of in table.items()
        for what in of.keys() - there.get(family, {}).keys()
    }
    assert not wrong | gone, (
        "JAXHAL_RECORD=1 pytest -m '' writes the table, of files that are given, or "
        "with -k of cases, what it has all tests of; it does not have\n"
        + "\n".join(sorted(wrong | gone))
    )
