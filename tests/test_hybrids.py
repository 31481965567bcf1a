"""Detectors of heads on a model with attention in every fourth layer."""

import jax.numpy as jnp
import numpy as np
import pytest
import thorough

import jaxhal
import oracles
import tiny
import tiny_lm
from jaxhal.scoring import saving

_ATTEND = [3, 7]
_HEADS = 4


@pytest.fixture(scope="module")
def theirs():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import transformers

    family, settings = tiny.CASES["qwen3.5-gqa"]
    settings = {name: x for name, x in settings.items() if name != "layer_types"}
    settings |= {"vocab_size": 300, "max_position_embeddings": 512}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        family, **settings | {"num_hidden_layers": 8, "initializer_range": 0.3}
    )
    config._attn_implementation = "eager"
    return transformers.AutoModelForCausalLM.from_config(config).eval().float()


@pytest.fixture(scope="module")
def lm(theirs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrid")
    theirs.save_pretrained(folder)
    tiny_lm.tiny_lm().require_tokenizer().save(folder)
    return jaxhal.load(folder, dtype=jnp.float32)


def attention(model, number, tokens):
    """What Hugging Face's layer of this number mixes by, ``[heads query key]``."""
    import torch

    seen = []
    layer = model.model.layers[number].self_attn
    hook = layer.register_forward_hook(lambda *given: seen.append(given[-1][1]))
    with torch.no_grad():
        model(torch.tensor(tokens)[None].long())
    hook.remove()
    return seen[0][0].numpy()


@thorough.mark
def test_heads_belong_to_the_layers_of_their_numbers(lm, theirs, tmp_path):
    rows = tiny_lm.answers(24)
    names = ["toha", "lookback_probe"]
    ready = jaxhal.fit(lm, rows, names, folds=2, progress=False)
    ready.save_pretrained(tmp_path / "detectors")
    again = {name: saving.load(tmp_path / "detectors" / name) for name in names}
    want = jaxhal.score(lm, rows[:4], [ready.fitted[name] for name in names])
    got = jaxhal.score(lm, rows[:4], [*again.values()])
    weights = np.asarray(again["toha"].params.weights).reshape(len(_ATTEND), _HEADS)
    assert (weights > 0).any()
    for one, other, row in zip(want, got, rows[:4], strict=True):
        assert one.scores == other.scores and other.layers == _ATTEND
        batch = lm.encode([row])
        tokens = np.asarray(batch.tokens[0])[np.asarray(batch.valid[0])]
        prompt = int(np.asarray(batch.valid[0, : batch.prompt_length]).sum())
        score = 0.0
        for at, number in enumerate(other.layers):
            found = attention(theirs, number, tokens)
            each = [oracles.mtop_div(one, prompt) for one in found]
            each = np.array(each) / (len(tokens) - prompt)
            np.testing.assert_allclose(other.heads["mtop_div"][at], each, atol=1e-4)
            score += float((weights[at] * each).sum())
        assert other.scores["toha"] == pytest.approx(score, abs=1e-4)
