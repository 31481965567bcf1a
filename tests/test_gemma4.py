"""Gemma 4: heads of two sizes, borrowed keys, what each layer gets of a token."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_parity
import test_slots
import test_weights
import thorough
from flax import nnx
from safetensors.numpy import load_file, save_file

import jaxhal
import tiny
from jaxhal.bench import bounds
from jaxhal.generation import GREEDY, pieces, requests, slots
from jaxhal.generation.slots import Size
from jaxhal.models import decoder
from jaxhal.models import lm as lms
from jaxhal.models.families import from_huggingface
from jaxhal.models.weights import paths
from jaxhal.tuning import adapters
from jaxhal.types import Example
from tiny_lm import tiny_lm

BORROWING = tiny.golden("gemma4-borrowing")
PLAIN = tiny.golden("gemma4-plain")["config"]


@pytest.mark.parametrize("case", ["gemma4-plain", "gemma4-uneven", "gemma4-experts"])
def test_attention_rows_of_other_kinds(case, tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    import make_golden

    want = tiny.golden(case)
    lm = test_parity.load(tmp_path, want["config"], want["shapes"])
    reducers = {"row": test_parity.Row()}
    rows = jaxhal.read(lm, test_parity.batch(tiny.TOKENS, 1), reducers)["row"]
    theirs = make_golden.attention(case)[..., 1:, :]
    np.testing.assert_allclose(rows, theirs, atol=1e-4)


def test_settings_as_published_and_as_transformers_writes_them():
    """One names what holds for layers of full attention, the other lists them."""
    published = {k: v for k, v in PLAIN.items() if k != "per_layer_config"}
    published |= {"global_head_dim": 16, "num_global_key_value_heads": 1}
    config = from_huggingface(published)
    assert config == from_huggingface(PLAIN)
    assert config.full is not None
    assert (config.full.head_dim, config.full.num_key_value_heads) == (16, 1)
    own = from_huggingface(published | {"attention_k_eq_v": False}).full
    # What is said counts with it alone.
    assert own is not None and own.num_key_value_heads == 2


def test_a_model_that_sees_and_hears(tmp_path, capsys):
    """Its text part; keys of layers that borrow others' are passed over."""
    shapes = BORROWING["shapes"]
    whole = {"model_type": "gemma4", "text_config": BORROWING["config"]}
    tiny.write_folder(tmp_path, whole | {"vision_config": {}}, shapes)
    test_weights._tokenizer(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {
        name.replace("model.", "model.language_model.", 1): x
        for name, x in load_file(path).items()
    }
    one = np.ones((16, 32), np.float32)
    tensors |= {
        "model.language_model.layers.7.self_attn.k_proj.weight": one,
        "model.vision_tower.a": one,
        "model.embed_audio.b": one,
    }
    save_file(tensors, path)
    lm = jaxhal.load(tmp_path)
    assert test_parity.error(lm.forward(tiny.TOKENS), BORROWING["logits"]) < 1e-4
    said = "not loaded, as text needs none of it: vision_tower (1), embed_audio (1)\n"
    assert capsys.readouterr().err.endswith(said)
    own = "model.language_model.layers.3.self_attn.k_proj.weight"
    save_file({name: x for name, x in tensors.items() if name != own}, path)
    with pytest.raises(ValueError, match=r"layers.3.self_attn.k_proj.weight is miss"):
        jaxhal.load(tmp_path)


@thorough.mark
def test_what_is_written_in_slots_is_as_if_written_alone():
    """Prompts in pieces, one begun with the keys of another."""
    family, settings = tiny.CASES["gemma4-borrowing"]
    sizes = {"vocab_size": 300, "vocab_size_per_layer_input": 300}
    sizes |= {"max_position_embeddings": 512}
    lm = tiny_lm(model_type=family, **(settings | sizes))
    how = requests.decoding_of(lm, GREEDY, test_slots.REDUCERS)
    model, prefixes, new = lm.bare, pieces.Prefixes(), 5
    state = slots.empty(model, Size(2, 8 * pieces.PIECE, 8), how)
    (own, key), reused = test_slots.keys_of(0), 0
    texts = test_slots.LONG, "Beside.", test_slots.LONG + " It stopped."
    for at, text in zip((0, 1, 0), texts, strict=True):
        example = Example("-", prompt=text)
        prompt = test_slots.read(lm, how, example, new, prefixes)
        prefixes.add(prompt)
        reused = prompt.reused
        state = slots.enter(state, at, prompt, limit=new, key=own)
        state = slots.go_on(model, state, jnp.asarray(2 if at else 9), how)
    assert reused > pieces.PIECE
    found = test_slots.of_slot(state, how, 0)
    test_slots.check_alone(lm, example, new, GREEDY, key, found)


def test_pairs_of_every_kind_of_layer(tmp_path):
    """What is added counts as if it were part of the weights, in every stack."""
    lm = test_parity.load(tmp_path, BORROWING["config"], BORROWING["shapes"])
    made = adapters.pairs(lm.params, ["q_proj", "v_proj"], 2, jax.random.key(0))
    kinds = "self_attn", "full_attn"
    stacks = {"q_proj": ("blocks", "borrowing_blocks"), "v_proj": ("blocks",)}
    assert {*made} == {
        f"{stack}.{kind}.{name}.kernel"
        for name, some in stacks.items()
        for stack in some
        for kind in kinds
    }
    rng = np.random.default_rng(0)
    made = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), made)
    added = {name: 0.1 * pair.down @ pair.up for name, pair in made.items()}
    whole = [leaf + added.get(name, 0) for name, leaf in paths(lm.params)]
    whole = jax.tree.unflatten(jax.tree.structure(lm.params), whole)

    def states(params):
        model = nnx.merge(lm.graphdef, params)
        tokens = jnp.asarray(tiny.TOKENS)
        x, geo = decoder.begin(model, tokens, tokens >= 0)
        return decoder.run(model, x, geo, ops=adapters.OPS)[0]

    every = adapters.insert(lm.params, made, 0.1), whole, lm.params
    got, want, before = map(jax.jit(states), every)
    np.testing.assert_allclose(got, want, atol=1e-4)
    assert np.abs(want - before).max() > 0.1


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        *((f"gemma4-{name}", {}) for name in ("borrowing", "plain", "uneven")),
        ("gemma4-experts", {}),
        ("qwen3.5moe-gqa", {"layer_types": ["full_attention"] * 2}),
    ],
)
def test_products_of_all_layers_are_counted(case, changes):
    """Those with weights: each is multiplied by once for a token, or is an expert."""
    config = from_huggingface(tiny.golden(case)["config"] | changes)
    lm, experts = lms.random(config, jax.random.key(0)), max(1, config.num_experts)
    kernels = [
        leaf.size * (config.num_experts_per_tok / experts if leaf.ndim == 4 else 1)
        for path, leaf in paths(lm.params)
        if path.endswith(".kernel") and not path.startswith("lm_head")
    ]
    assert bounds.layers(lm.config, 1, 0, 0) == 2 * sum(kernels)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable_moe_block": True}, "lacks moe_intermediate_size"),
        (
            {"enable_moe_block": True, "moe_intermediate_size": 8, "num_experts": 4}
            | {"top_k_experts": 5},
            "top_k_experts is 5; give a whole number from 1 to 4",
        ),
        ({"use_bidirectional_attention": "all"}, "is all; give null"),
        ({"layer_types": ["sliding_attention"] * 6}, "the last layer full_attention"),
        ({"num_kv_shared_layers": 6}, "leave a layer of each kind before them"),
        ({"num_kv_shared_layers": 7}, "a whole number from 0 to 6"),
        ({"per_layer_config": {"2": {"head_dim": 16}}}, r"attention, \(2, 5\), the s"),
        (
            {"per_layer_config": dict.fromkeys("25", {"hidden_size": 8})},
            "the same head_dim",
        ),
        (
            {"per_layer_config": dict.fromkeys("25", {"num_key_value_heads": 3})},
            "a divisor of the 4 heads",
        ),
        ({"per_layer_config": dict.fromkeys("25", {"head_dim": 15})}, "an even number"),
        (
            {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 60},
            "vocab_size_per_layer_input is 60; give a whole number from 61",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "known: proportional, default",
        ),
        (
            {"rope_parameters": {"full_attention": {"partial_rotary_factor": 2.0}}},
            "partial_rotary_factor is 2.0; give at most 1",
        ),
    ],
)
def test_settings_that_are_not_computed(settings, message):
    with pytest.raises(ValueError, match=message):
        from_huggingface(json.loads(json.dumps(PLAIN | settings)))
