"""Experts in blocks are the numbers that they stand for, made of one at a time."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_decoding
import test_quantized
import thorough
from test_decoding import how

import jaxhal
from jaxhal.generation import decoding
from jaxhal.models import lm as lms
from jaxhal.models import quantized, weights
from jaxhal.models.batching import collate
from jaxhal.reading.keys import fingerprint

# Of each layer, as in a Q4_K_M and as in a Q8_0.
KINDS = {
    "attn_q": ("Q4_K", "Q4_K", "Q8_0"),
    "attn_k": ("Q4_K", "Q4_K", "Q8_0"),
    "attn_v": ("Q6_K", "Q4_K", "Q8_0"),
    "attn_output": ("Q4_K", "Q4_K", "Q8_0"),
    "ffn_gate_exps": ("Q4_K", "Q4_K", "Q8_0"),
    "ffn_up_exps": ("Q4_K", "Q4_K", "Q8_0"),
    "ffn_down_exps": ("Q6_K", "Q4_K", "Q8_0"),
}
PARTS = "gate", "up", "down"


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A file, its model in blocks and its model in numbers."""
    path = tmp_path_factory.mktemp("experts") / "tiny.gguf"
    source = test_quantized.write(path, "qwen3moe", kinds=KINDS)
    return source, *(test_quantized.read_in(source, packed) for packed in (True, False))


def test_an_expert_is_its_numbers_to_the_last_bit(mixed):
    source, kept, whole = mixed
    assert fingerprint(kept) == fingerprint(whole)
    leaves = dict(weights.paths(kept.params))
    assert isinstance(leaves["blocks.mlp.router.kernel"], jax.Array)
    pick = jax.jit(lambda *at: quantized.dense(quantized.of_expert(*at)))
    for part in PARTS:
        stored = leaves[f"blocks.mlp.{part}_proj.kernel"]
        for layer, (which, place) in enumerate(stored.places):
            tensor = source.get(f"blk.{layer}.ffn_{part}_exps.weight")
            for expert, rows in enumerate(tensor):
                one = quantized.OfLayer(stored, jnp.array(which), jnp.array(place))
                np.testing.assert_array_equal(pick(one, jnp.array(expert)), rows.T)


@thorough.mark
def test_features_and_relevance(mixed):
    _, *pair = mixed
    batch = collate(test_quantized.rows(), 0)
    reducers = {"entropy": jaxhal.TokenEntropy(), "states": jaxhal.HiddenStates()}
    kept, whole = (jaxhal.read(lm, batch, reducers) for lm in pair)
    assert float(jnp.std(whole["states"])) > 0.1
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), kept, whole)
    kept, whole = (jaxhal.relevance(lm, batch, "attnlrp").matrix for lm in pair)
    np.testing.assert_allclose(kept, whole, atol=1e-3 * float(jnp.abs(whole).max()))


def test_writing(mixed):
    _, *pair = mixed
    prompts = [[5, 9, 31, 77], [8, 50]]
    kept, whole = (test_decoding.write(lm, prompts, 9, how()) for lm in pair)
    assert kept.tokens.tolist() == whole.tokens.tolist()
    np.testing.assert_allclose(kept.logprob, whole.logprob, atol=1e-3)


def test_programs_make_numbers_of_one_expert_at_a_time(tmp_path, monkeypatch):
    """Of 32 experts in a layer, to read and to write."""
    kinds = {name: each[:2] for name, each in KINDS.items()}
    source = test_quantized.write(tmp_path / "tiny.gguf", kinds=kinds, experts=32)
    lm = test_quantized.read_in(source, packed=True)
    rows = jnp.ones((1, 40), jnp.int32), jnp.ones((1, 40), bool)
    programs = [lms.forward.lower(lm.bare, *rows)]
    go_on = decoding.go_on
    monkeypatch.setattr(
        decoding, "go_on", lambda *args: programs.append(go_on.lower(*args))
    )
    test_decoding.write(lm, [[5, 9, 31, 77]], 9, how())
    one = 3 * 4 * test_quantized.WIDTH * test_quantized.INNER
    assert len(programs) == 2
    for program in programs:
        memory: Any = program.compile().memory_analysis()
        assert memory.temp_size_in_bytes < 2 * one
