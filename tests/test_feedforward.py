"""Mixtures of experts against loops over tokens, and the forms they are stored in."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import thorough
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file
from test_parity import batch

import tiny
from jaxhal import lrp
from jaxhal.bench import bounds, topologies
from jaxhal.bench.read import random_batch
from jaxhal.lrp import programs
from jaxhal.models import feedforward, kernels, ops, placement, weights
from jaxhal.models import lm as lms
from jaxhal.models.families import (
    from_huggingface,
    huggingface_table,
    read_config,
)
from jaxhal.models.feedforward import Experts
from jaxhal.models.lm import random
from jaxhal.models.mesh import RULES, make_mesh
from jaxhal.models.safetensors import SafetensorsSource
from jaxhal.tuning import adapters

EXPERTS = 8
CONFIG = from_huggingface(tiny.golden("qwen3moe-gqa")["config"])
# An expert's tensors, as checkpoints of the hub call them: gate, up, down; the router.
HUB = {
    "mixtral-gqa": ("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3moe-gqa": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "qwen3.5moe-gqa": ("mlp", "gate_proj", "up_proj", "down_proj"),
}


@pytest.mark.parametrize("tokens", [1, 5, 100])
@pytest.mark.parametrize("among", [1, 3, EXPERTS])
def test_each_row_has_a_place_of_its_own_in_a_block_of_its_expert(tokens, among):
    draw = np.random.default_rng([tokens, among])
    ranks = [draw.permutation(max(among, 3))[:3] for _ in range(tokens)]
    chosen = jnp.asarray(np.stack(ranks))
    order = jax.jit(feedforward.in_order, static_argnums=1)(chosen, EXPERTS)
    size = order.source.shape[1]
    slot, source = np.asarray(order.slot), np.asarray(order.source).reshape(-1)
    assert len(np.unique(slot)) == slot.size
    for token in range(tokens):
        for place, expert in zip(slot[token], chosen[token], strict=True):
            assert source[place] == token
            assert order.expert[place // size] == expert
    # Of one token its experts alone; of many at most half as many places again.
    assert tokens > 1 or len(order.expert) == 3
    assert tokens < 100 or len(source) <= 1.5 * slot.size + size


@pytest.mark.parametrize("ragged", [False, True])
def test_a_token_is_the_weighed_sum_of_its_experts(ragged):
    part = Experts(CONFIG, jnp.float32, nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(2, 9, CONFIG.hidden_size))
    got = part.mixed((jnp.asarray(x, jnp.float32),), ops.STANDARD, ragged)
    gate, up, down = (
        np.asarray(one.kernel.get_value(), np.float64)
        for one in (part.gate_proj, part.up_proj, part.down_proj)
    )
    want = np.zeros_like(x)
    for at in np.ndindex(2, 9):
        shares = np.exp(x[at] @ np.asarray(part.router.kernel[...]))
        best = np.argsort(-shares)[:3]
        for expert in best:
            inner = x[at] @ gate[expert]
            inner = inner / (1 + np.exp(-inner)) * (x[at] @ up[expert])
            want[at] += shares[expert] / shares[best].sum() * (inner @ down[expert])
    np.testing.assert_allclose(got, want, atol=1e-5)


@thorough.mark
@pytest.mark.parametrize(
    "case, slopes", [("gptoss-gqa", True), ("gemma4-experts", False)]
)
def test_whole_models_compute_the_same_without_blocks(case, slopes, monkeypatch):
    """With biases, limits of gates, and routers that see something else."""
    lm = random(from_huggingface(tiny.golden(case)["config"]), jax.random.key(0))
    params = jax.tree.map(lambda x: x + 0.02, lm.params)  # biases begin at 0
    lm, rows = dataclasses.replace(lm, params=params), jnp.tile(tiny.TOKENS, (1, 2))

    def weighed(params):
        out = dataclasses.replace(lm, params=params).forward(rows)
        return (out[..., :3] ** 2).sum()

    gradient = jax.grad(weighed) if slopes else lambda params: ()
    want, pull = lm.forward(rows), gradient(params)
    # As where a platform's plugin is there, and which it is turns out at lowering.
    ours = {"cpu": kernels.CPU._replace(ragged=True)}
    monkeypatch.setattr(kernels, "installed", lambda: ours)
    jax.clear_caches()
    traced = jax.make_jaxpr(lambda lm, rows: lm.forward(rows))(lm.bare, rows)
    assert "ragged_dot" in str(traced)
    np.testing.assert_allclose(lm.forward(rows), want, atol=1e-4)
    both = map(jax.tree.leaves, (gradient(params), pull))
    for one, other in zip(*both, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-3, rtol=1e-3)
    jax.clear_caches()


def test_experts_are_one_call_on_tpus_alone():
    """But for few rows, few bits, and rules of relevance."""
    if "tpu" not in kernels.installed():
        pytest.skip("no plugin compiles for a TPU")
    mesh = make_mesh(devices=topologies.described("v5e:1x1"))
    place, table = placement.on(mesh, CONFIG, RULES), huggingface_table(CONFIG)
    lm = jax.eval_shape(lambda: random(CONFIG, jax.random.key(0), jnp.bfloat16)).bare

    def calls(tokens, packed="", rules=None):
        params = weights.laid_out(lm.params, None, table, packed, place)
        laid = dataclasses.replace(lm, params=params)
        at = NamedSharding(mesh, PartitionSpec())
        rows = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
            random_batch(60, tokens, 2, 1),
        )
        if rules is None:
            lowered = lms.forward.lower(laid, rows.tokens, rows.valid)
        else:
            lowered = programs.means.lower(laid, rows, lrp.resolve(rules), "logit")
        return lowered.as_text().count('= "chlo.ragged_dot"')

    assert calls(40) == 3  # of all layers, which are alike
    assert calls(4) == 0
    assert calls(40, packed="Q8_0") == 0
    assert calls(40, rules="attnlrp") == 0


def test_the_way_back_keeps_no_kernels_of_blocks():
    part = Experts(CONFIG, jnp.float32, nnx.Rngs(0))
    x = jnp.ones((1, 40, CONFIG.hidden_size))
    _, pull = jax.vjp(lambda x: part(x, ops.STANDARD), x)
    kept = collections.Counter(leaf.size for leaf in jax.tree.leaves(pull))
    whole = part.up_proj.kernel.get_value().size
    assert kept[whole] == 3 and max(kept) == whole


def test_layers_that_are_computed_again_say_the_same(monkeypatch):
    lm, rows = random(CONFIG, jax.random.key(1)), batch(tiny.TOKENS, 15)
    kept = lrp.relevance_means(lm, rows, "attnlrp")
    monkeypatch.setattr(kernels, "CPU", kernels.CPU._replace(kept=0))
    programs.means.clear_cache()
    again = lrp.relevance_means(lm, rows, "attnlrp")
    programs.means.clear_cache()
    for one, other in zip(*map(jax.tree.leaves, (kept, again)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_what_stands_beside_a_token_changes_nothing():
    lm = random(CONFIG, jax.random.key(1))
    valid = np.ones(tiny.TOKENS.shape, bool)
    valid[1, :5] = valid[1, -3:] = False
    together = np.asarray(lm.forward(tiny.TOKENS, valid))
    alone = np.asarray(lm.forward(tiny.TOKENS[1:, 5:-3]))
    np.testing.assert_allclose(together[1, 5:-3], alone[0], atol=1e-5)
    each = jax.vmap(lambda row: lm.forward(row[None])[0])(jnp.asarray(tiny.TOKENS))
    np.testing.assert_allclose(each, lm.forward(tiny.TOKENS), atol=1e-5)


def by_expert(tensors: dict, case: str) -> dict:
    """As the hub has them what transformers writes with experts in one tensor."""
    module, *names = HUB[case]
    made = {}
    for name, value in tensors.items():
        layer, _, part = name.partition(".mlp.")
        if part == "gate.weight":
            made[f"{layer}.{module}.gate.weight"] = value
        elif part.startswith("experts."):
            parts, named = [value], names[2:]
            if part == "experts.gate_up_proj":
                parts, named = np.split(value, 2, axis=1), names[:2]
            for own, called in zip(parts, named, strict=True):
                for expert, kernel in enumerate(own):
                    at = f"{layer}.{module}.experts.{expert}.{called}.weight"
                    made[at] = np.ascontiguousarray(kernel)
        else:
            made[name] = value
    return made


def write_by_expert(folder, case: str) -> dict:
    """A checkpoint folder of the hub's form, and what is known of its case."""
    meta = tiny.golden(case)
    tiny.write_folder(folder, meta["config"], meta["shapes"])
    file = folder / "model.safetensors"
    save_file(by_expert(load_file(file), case), file)
    return meta


def read(folder, packed=""):
    config = read_config(folder)
    source, table = SafetensorsSource(folder), huggingface_table(config)
    return weights.fill(config, source, table, jnp.float32, packed=packed)[1]


@pytest.mark.parametrize("packed", ["", "Q4_0"])
@pytest.mark.parametrize("case", HUB)
def test_both_forms_of_a_checkpoint_are_read(case, packed, tmp_path):
    meta = write_by_expert(tmp_path / "hub", case)
    tiny.write_folder(tmp_path / "own", meta["config"], meta["shapes"])
    forms = read(tmp_path / "hub", packed), read(tmp_path / "own", packed)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, *forms)))


def test_experts_that_are_missing_or_of_another_shape(tmp_path):
    case, file = "mixtral-gqa", tmp_path / "model.safetensors"

    def refused(changed: dict, match: str):
        save_file(changed, file)
        with pytest.raises(ValueError, match=match):
            read(tmp_path)

    meta = write_by_expert(tmp_path, case)
    apart, lost = load_file(file), "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    del apart[lost]
    refused(apart, r"1\.block_sparse_moe\.experts\.2\.w3\.weight is missing")
    wrong = {lost: np.ones((3, 32), np.float32)}
    refused(apart | wrong, r"experts\.2\.w3\.weight has shape \[3, 32\]")
    tiny.write_folder(tmp_path, meta["config"], meta["shapes"])
    tensors, name = load_file(file), "model.layers.0.mlp.experts.gate_up_proj"
    whole = tensors[name]
    refused(tensors | {name: whole[:, 1:]}, "which has no halves")
    refused(tensors | {name: whole[1:]}, r"\[3, 48, 32\], which does not")


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2; only .*=1 is computed"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]; only"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9; .* from 1 to 8"),
        ({"num_local_experts": 0}, "num_local_experts is 0; give a whole number"),
    ],
)
def test_settings_that_are_not_computed(changed, match):
    with pytest.raises(ValueError, match=match):
        from_huggingface(tiny.golden("qwen3moe-gqa")["config"] | changed)


def test_projections_of_experts_get_no_additions():
    lm, key = random(CONFIG, jax.random.key(0)), jax.random.key(1)
    with pytest.raises(
        ValueError, match="gate_proj .* those of experts; use some of k"
    ):
        adapters.pairs(lm.params, ("q_proj", "gate_proj"), 2, key)
    made = adapters.pairs(lm.params, ("q_proj", "router"), 2, key)
    assert made["blocks.mlp.router.kernel"].up.shape == (3, 2, EXPERTS)


def test_products_are_those_of_the_parameters_a_token_goes_through():
    """The 12.9 billion of `Mixtral <https://arxiv.org/abs/2401.04088>`_ 8x7B."""
    config = from_huggingface(
        dict(
            model_type="mixtral",
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
        )
    )
    tables = 2 * config.vocab_size * config.hidden_size
    active = bounds.layers(config, 1, 0, 0) / 2 + tables
    assert active == pytest.approx(12.9e9, rel=0.002)
    assert bounds.experts_read(config, 1) == 2 / 8
    # Of three tokens, and every way to choose two experts: the mean of what is read.
    sets = [{a, b} for a in range(8) for b in range(a)]
    every = [len(x | y | z) for x in sets for y in sets for z in sets]
    assert bounds.experts_read(config, 3) == pytest.approx(np.mean(every) / 8)
