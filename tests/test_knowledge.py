"""ReDeEP's two scores: against Hugging Face with hooks, token by token, and by hand."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.spatial.distance import cosine, jensenshannon
from scipy.special import softmax
from test_parity import load

import jaxhal
import tiny
from jaxhal.features.knowledge import ExternalContext, ParametricKnowledge
from jaxhal.types import Batch, View

PROMPT, CONTEXT = 14, 11  # of 24 tokens
# A plain block, parallel parts, norms around each part, learned positions.
CASES = ("llama-gqa", "falcon-7b", "gemma3-gqa", "gpt2-mha")


def seen(case):
    """Attention, last hidden states, and logits around every feed-forward part."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import make_golden

    model, *_ = make_golden.model_of(case)
    base = model.transformer if hasattr(model, "transformer") else model.model
    layers = base.h if hasattr(base, "h") else base.layers
    norm = base.ln_f if hasattr(base, "ln_f") else base.norm
    after, fed = [], []

    def keep(into):
        def hook(module, inputs, output):
            output = output[0] if isinstance(output, tuple) else output
            into.append(output.clone())  # which may be added to in place

        return hook

    for layer in layers:
        layer.register_forward_hook(keep(after))
        part = getattr(layer, "post_feedforward_layernorm", layer.mlp)
        part.register_forward_hook(keep(fed))
    with torch.no_grad():
        out = model(
            torch.from_numpy(tiny.TOKENS).long(),
            output_attentions=True,
            output_hidden_states=True,
        )
        lens = [
            [model.lm_head(norm(x)).numpy() for x in (whole - part, whole)]
            for whole, part in zip(after, fed, strict=True)
        ]
    attention = np.stack([one.numpy() for one in out.attentions])
    return attention, out.hidden_states[-1].numpy(), lens


@pytest.mark.parametrize("case", CASES)
def test_equals_hugging_face(case, tmp_path):
    attention, hidden, lens = seen(case)
    lm = load(tmp_path, *(tiny.golden(case)[name] for name in ("config", "shapes")))
    yes = np.ones(tiny.TOKENS.shape, bool)
    context = yes & (np.arange(24) < CONTEXT)
    offsets = np.zeros((2, 24 - PROMPT, 2), np.int32)
    batch = Batch(tiny.TOKENS, yes, context, ~yes, ~yes, offsets, PROMPT)
    shares = {0.01: 1, 0.3: 3, 1.0: CONTEXT}
    reducers = {str(share): ExternalContext(share) for share in shares}
    found = jaxhal.read(lm, batch, reducers | {"p": ParametricKnowledge()})
    layers, samples, heads = attention.shape[:3]
    assert found["p"].shape == (layers, samples, 24 - PROMPT)
    for at in np.ndindex(layers, samples, 24 - PROMPT):
        layer, sample, token = at
        row = PROMPT - 1 + token
        p, q = (softmax(one[sample, row].astype(float)) for one in lens[layer])
        wanted = jensenshannon(p, q) ** 2
        np.testing.assert_allclose(found["p"][at], wanted, rtol=1e-3, atol=1e-6)
        for head in range(heads):
            given = attention[layer, sample, head, row, :CONTEXT]
            for share, count in shares.items():
                most = given >= np.sort(given)[-count]  # a window may see none of them
                mean = hidden[sample, :CONTEXT][most].mean(0)
                ours = found[str(share)][layer, sample, head, token]
                theirs = 1 - cosine(mean, hidden[sample, row])
                np.testing.assert_allclose(ours, theirs, atol=2e-4)


def view(context, prompt=4, seq=6):
    key, context = jnp.arange(seq), jnp.asarray(context)
    no, yes = jnp.zeros(seq, bool), jnp.ones(seq, bool)
    rows = key[prompt - 1 : seq - 1]
    return View(rows, rows + 1, yes, context, no, no, jnp.zeros(seq, int), prompt)


def test_by_hand():
    context = [False, True, True, True, False, False]
    attention = jnp.array([[0.9, 0.0, 0.05, 0.05, 0, 0], [0.4, 0.1, 0.3, 0.1, 0.1, 0]])
    hidden = jnp.array([[9, 9], [1, 0], [0, 2], [0, 1], [3, 4], [5, 5]], jnp.float32)
    few, none = ExternalContext(0.4), view(np.zeros(6, bool))
    # The first row attends to the third and fourth alike; token 3 is one of them.
    kept = few.rows(attention, view(context))
    found = few.settle(kept, hidden, view(context))
    np.testing.assert_allclose(found, [1.0, 0.8], atol=1e-6)
    assert not few.settle(few.rows(attention, none), hidden, none).any()
    same = jnp.array([[0.0, 3.0, 1.0]]), jnp.array([[0.0, 3.0, 1.0]])
    apart = jnp.array([[0.0, 90.0, -90.0]]), jnp.array([[90.0, 0.0, -90.0]])
    knows = ParametricKnowledge()
    np.testing.assert_allclose(knows.rows(same, none), 0.0, atol=1e-7)
    np.testing.assert_allclose(knows.rows(apart, none), np.log(2), rtol=1e-6)
    for share in (0.0, 1.1, float("nan")):
        with pytest.raises(ValueError, match=f"share is {share}; give one above 0"):
            ExternalContext(share)
