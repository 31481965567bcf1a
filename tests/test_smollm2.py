"""The real small model, from its GGUF file, against transformers and torch eager.

The golden files hold what transformers 5.23 and torch 2.13 gave for the same
dequantised weights in float32: attention and hidden states of the last rows of some
layers.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import thorough

import jaxhal
from jaxhal.generation import GREEDY, decoding
from jaxhal.types import Batch, View

GOLDEN = Path(__file__).parent / "golden"


@dataclasses.dataclass(frozen=True)
class Row(jaxhal.Reducer):
    """The attention row itself."""

    def rows(self, probs, view: View):
        return probs


@pytest.fixture(scope="module", params=["plain", "chat_rag"])
def reference(request):
    with np.load(GOLDEN / f"smollm2_{request.param}.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def read(smollm2, reference):
    tokens = reference["input_ids"].astype(np.int32)[None]
    yes = np.ones(tokens.shape, bool)
    offsets = np.zeros((1, tokens.shape[1] - 1, 2), np.int32)
    sample = Batch(tokens, yes, yes, yes, yes, offsets, 1)
    return jaxhal.read(
        smollm2,
        sample,
        {
            "row": Row(),
            "states": jaxhal.HiddenStates(layers=(0, 1, 15, 30)),
            "logprob": jaxhal.TokenLogprob(),
        },
    )


def test_logits_and_log_probabilities(smollm2, reference, read):
    logits = smollm2.forward(reference["input_ids"].astype(np.int32)[None])
    assert np.abs(logits[0, -1] - reference["last_logits"]).max() < 2e-3
    assert np.abs(read["logprob"][0] - reference["logprobs_all"]).max() < 1e-3


@pytest.mark.parametrize("at, layer", [*enumerate([0, 1, 15, 30])])
def test_hidden_states(reference, read, at, layer):
    theirs = reference[f"hidden_{layer}"]
    ours = np.asarray(read["states"])[at, 0, -len(theirs) :]
    assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()


@pytest.mark.parametrize("layer", [0, 14, 29])
def test_attention(reference, read, layer):
    theirs = reference[f"attn_layer{layer}"]
    ours = np.asarray(read["row"])[layer, 0, :, -theirs.shape[1] :]
    assert np.abs(ours - theirs).max() < 1e-5


@thorough.mark
@pytest.mark.parametrize("reference", ["chat_rag"], indirect=True)
def test_greedy_tokens(smollm2, reference):
    tokens = reference["input_ids"].astype(np.int32)[None]
    yes = np.ones(tokens.shape, bool)
    offsets = np.zeros((1, 0, 2), np.int32)
    prompt = Batch(tokens, yes, yes, yes, yes, offsets, tokens.shape[1])
    logits, cache, _ = jaxhal.prefill(smollm2, prompt, 24)
    written, steps = [], [np.asarray(logits[0])]
    for _ in range(24):
        written.append(int(np.argmax(steps[-1])))
        logits, cache, _ = jaxhal.step(
            smollm2, cache, np.array([[written[-1]]], np.int32)
        )
        steps.append(np.asarray(logits[0, 0]))
    assert written == reference["greedy_ids"].tolist()
    first = np.stack(steps[: len(reference["greedy_max_logit"])]).max(-1)
    assert np.abs(first - reference["greedy_max_logit"]).max() < 2e-3


@pytest.mark.parametrize("reference", ["plain"], indirect=True)
def test_greedy_tokens_of_the_compiled_loop(smollm2, reference):
    tokens = reference["input_ids"].astype(np.int32)[None]
    yes = np.ones(tokens.shape, bool)
    offsets = np.zeros((1, 0, 2), np.int32)
    prompt = Batch(tokens, yes, yes, yes, yes, offsets, tokens.shape[1])
    theirs = reference["greedy_ids"].tolist()
    how = decoding.Decoding(GREEDY, (), stop_ids=(), pad_id=0)
    limit, keys = jnp.full(3, len(theirs)), jax.random.split(jax.random.key(0), 3)
    state = decoding.start(
        smollm2, prompt, limit, keys, how, new_tokens=len(theirs), copies=3
    )
    lm, state = decoding.ready(smollm2, state)
    state = decoding.go_on(lm, state, jnp.asarray(len(theirs)), how)
    assert state.tokens.tolist() == [theirs] * 3
