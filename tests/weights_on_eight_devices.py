"""Weights on eight devices: run by ``test_mesh_weights.py`` on eight fake ones."""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_feedforward
import test_gpt_oss
import test_parity
import test_quantized
import test_quantized_experts
import thorough
from eight import EXAMPLES, MESHES, REDUCERS, equal, filled

import jaxhal
import tiny
import tiny_lm
from jaxhal import lrp
from jaxhal.capture import forward as capture
from jaxhal.generation import decoding
from jaxhal.models import devices, kernels, placement, weights
from jaxhal.models import lm as lms
from jaxhal.models import mesh as mesh_lib
from jaxhal.models.families import from_huggingface, huggingface_table
from jaxhal.models.gguf_config import config_from_gguf
from jaxhal.models.gguf_families import gguf_table
from jaxhal.models.parameter import Parameter
from jaxhal.models.parts import cut_of
from jaxhal.models.safetensors import SafetensorsSource
from jaxhal.models.settings import read_json
from jaxhal.reading.keys import fingerprint

pytest_plugins = ["eight"]


def test_each_device_holds_its_part(spread):
    mesh = mesh_lib.mesh_of(spread.params)
    model = mesh.size // mesh.shape["data"]
    up = spread.params["blocks"]["mlp"]["up_proj"]["kernel"].get_value()
    part = up.addressable_shards[0].data.shape
    assert part == (2, 64, 96 // model)
    key = spread.params["blocks"]["self_attn"]["k_proj"]["kernel"].get_value()
    assert key.addressable_shards[0].data.shape == (2, 64, max(1, 2 // model) * 8)


@pytest.mark.parametrize("data, model", MESHES)
def test_a_part_is_read_once_for_all_devices_that_hold_it(
    folder, data, model, monkeypatch
):
    real, parts = SafetensorsSource.part, []

    def part(self, name, index):
        parts.append((name, str(index)))
        return real(self, name, index)

    monkeypatch.setattr(SafetensorsSource, "part", part)
    jaxhal.load(folder, mesh=f"data={data},model={model}")
    assert parts and len(set(parts)) == len(parts)


def test_weights_are_those_of_one_device(spread, alone):
    equal(jax.device_get(spread.params), jax.device_get(alone.params), 0)


@pytest.mark.shows("mesh")
@pytest.mark.parametrize(
    "case", [*tiny.UNLIKE, "gemma4-experts", *thorough.more(*tiny.ALIKE)]
)
def test_every_family(case, tmp_path):
    want, mesh = tiny.golden(case), jaxhal.make_mesh(data=2, model=2)
    lm = test_parity.load(tmp_path, want["config"], want["shapes"], mesh=mesh)
    equal(lm.forward(tiny.TOKENS), want["logits"], 1e-4)


# Sinks and experts; linear attention; fused matrices.
@pytest.mark.parametrize(
    "case", ["gptoss-gqa", *thorough.more("qwen3.5-gqa", "phi3-mha")]
)
def test_families_are_read_and_explained(case, tmp_path):
    want, rows = tiny.golden(case), test_parity.batch(tiny.TOKENS, 15)

    def on(data, model):
        mesh, folder = jaxhal.make_mesh(data=data, model=model), tmp_path / str(data)
        lm = test_parity.load(folder, want["config"], want["shapes"], mesh=mesh)
        return jaxhal.read(lm, rows, REDUCERS), lrp.relevance_means(lm, rows)

    equal(on(2, 2), on(1, 1))


@thorough.mark
def test_heads_of_two_sizes():
    """Fewer key heads than devices, and fewer still where all keys are seen.

    Layers that borrow keys are read, written and explained.
    """
    family, settings = tiny.CASES["gemma4-borrowing"]
    settings = settings | {"vocab_size": 300, "vocab_size_per_layer_input": 300}
    settings |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    settings |= {"max_position_embeddings": 512}
    alone = tiny_lm.tiny_lm(model_type=family, **settings)
    mesh = jaxhal.make_mesh(data=2, model=4)
    place = placement.on(mesh, alone.config, mesh_lib.RULES)
    leaves = [
        jax.device_put(leaf, place(path, leaf.shape))
        for path, leaf in weights.paths(alone.params)
    ]
    params = jax.tree.unflatten(jax.tree.structure(alone.params), leaves)
    lm = dataclasses.replace(alone, params=params)
    batch = alone.encode(EXAMPLES)
    for function in (lambda *rows: jaxhal.read(*rows, REDUCERS), lrp.relevance_means):
        equal(function(lm, batch), function(alone, batch))
    how = dict(max_new_tokens=8, key=jax.random.key(0))
    want, got = (jaxhal.generate(one, EXAMPLES, **how) for one in (alone, lm))
    assert [row[0].text for row in got] == [row[0].text for row in want]


def test_fully_sharded_weights_are_the_same(folder, alone):
    mesh = jaxhal.make_mesh(data=4, model=2)
    lm = jaxhal.load(folder, mesh=mesh, rules=mesh_lib.FULLY_SHARDED)
    up = lm.params["blocks"]["mlp"]["up_proj"]["kernel"].get_value()
    assert up.addressable_shards[0].data.shape == (2, 16, 48)
    tokens = np.random.default_rng(0).integers(3, 250, (8, 40), np.int32)
    equal(lm.forward(tokens), alone.forward(tokens))


@pytest.fixture
def read(monkeypatch):
    """Shares of each tensor that are read, one after another."""
    shares, part = collections.defaultdict(list), SafetensorsSource.part

    def whole(self, name):
        shares[name].append(1.0)
        return part(self, name, (slice(None),) * len(self.shape(name)))

    def some(self, name, index):
        value = part(self, name, index)
        shares[name].append(value.size / np.prod(self.shape(name)))
        return value

    monkeypatch.setattr(SafetensorsSource, "get", whole)
    monkeypatch.setattr(SafetensorsSource, "part", some)
    return shares


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_each_device_rounds_its_part(kind, folder, read):
    """Bit for bit as the whole matrix is rounded on the host."""
    config = from_huggingface(read_json(folder / "config.json"))
    source, table = SafetensorsSource(folder), huggingface_table(config)
    fill = functools.partial(weights.fill, config, source, table, jnp.float32)
    want = fill(packed=kind)[1]
    read.clear()
    mesh = jaxhal.make_mesh(data=4, model=2)
    got = fill(packed=kind, place=placement.on(mesh, config, mesh_lib.RULES))[1]
    equal(jax.device_get(got), jax.device_get(want), 0)
    shares = {name: max(each) for name, each in read.items() if "_proj.w" in name}
    assert len(shares) == 2 * 7
    for name, share in shares.items():  # two devices copy what is of three blocks
        assert share == (1.0 if "down_proj" in name else 0.5), name


def test_rounded_weights(folder, monkeypatch):
    """Blocks of int8; rows of 64 and 96 are two and three of them."""
    alone, lm = (
        jaxhal.load(folder, mesh=mesh, weights="int8")
        for mesh in ("data=1", "data=4,model=2")
    )
    held = dict(weights.paths(lm.params))
    for name, part in {
        "mlp.gate_proj": (2, 48, 2),
        "self_attn.k_proj": (2, 8, 2),
        "self_attn.o_proj": (2, 64, 1),
        "mlp.down_proj": (2, 64, 3),
    }.items():
        (pack,) = held[f"blocks.{name}.kernel"].packs
        assert pack.scale.addressable_shards[0].data.shape == part
    table, mesh = huggingface_table(lm.config), jaxhal.make_mesh(data=4, model=2)
    test_quantized.check_outline(lm, None, table, "Q8_0", mesh)
    batch, reducers = alone.encode(EXAMPLES), {"lookback": jaxhal.LookbackRatio()}
    want, got = (jaxhal.read(one, batch, reducers) for one in (alone, lm))
    equal(got, want)
    rows, named = mesh_lib.spread(batch, lm.params), tuple(reducers.items())
    text = capture.read_jit.lower(lm.bare, rows, named).compile().as_text()
    texts, go_on = [text], decoding.go_on

    def compiled(*args):
        program = go_on.lower(*args).compile()
        texts.append(program.as_text())
        return program(*args[:-1])  # but for what is static

    monkeypatch.setattr(decoding, "go_on", compiled)
    how = dict(max_new_tokens=8, key=jax.random.key(0))
    want, got = (jaxhal.generate(one, EXAMPLES, **how) for one in (alone, lm))
    assert [row[0].text for row in got] == [row[0].text for row in want]
    assert fingerprint(lm) == fingerprint(alone)
    moved = r"= \(?\w+\[([\d,]*)\]\S* (?:all-gather|all-to-all|collective-permute)\("
    for sizes in re.findall(moved, " ".join(texts)):  # weights stay, tokens are chosen
        assert np.prod([int(size) for size in sizes.split(",") if size]) < 512


@pytest.mark.parametrize(
    "case, packed",
    [("mixtral-gqa", ""), ("qwen3moe-gqa", ""), ("qwen3moe-gqa", "Q8_0")],
)
def test_experts(case, packed, tmp_path, monkeypatch):
    """Widths are shared out, and tokens are sorted where they are."""
    meta = test_feedforward.write_by_expert(tmp_path, case)
    config = from_huggingface(meta["config"])
    source, table = SafetensorsSource(tmp_path), huggingface_table(config)
    load = functools.partial(filled, config, source, table, packed=packed)
    alone, lm = load(jaxhal.make_mesh()), load(jaxhal.make_mesh(data=2, model=4))
    up = dict(weights.paths(lm.params))["blocks.mlp.up_proj.kernel"]
    inner, up = config.intermediate_size // 4, up.packs[0].low if packed else up
    part = (inner, 32) if packed else (32, inner)
    shape = up.addressable_shards[0].data.shape
    assert shape == (3, config.num_experts, *part)
    equal(jax.device_get(lm.params), jax.device_get(alone.params), 0)
    tokens = np.random.default_rng(0).integers(3, 60, (4, 20), np.int32)
    equal(lm.forward(tokens), alone.forward(tokens))
    rows = mesh_lib.spread((tokens, np.ones(tokens.shape, bool)), lm.params)
    text = lms.forward.lower(lm.bare, *rows).compile().as_text()
    assert "all-reduce(" in text and "all-gather(" not in text
    if packed:
        return
    monkeypatch.setattr(kernels, "CPU", kernels.CPU._replace(ragged=True))
    lms.forward.clear_cache()
    equal(lm.forward(tokens), alone.forward(tokens))
    traced = lms.forward.trace(lm.bare, *rows)
    assert "ragged_dot" in str(traced.jaxpr)
    text = traced.lower().compile().as_text()
    assert "all-reduce(" in text and "all-gather(" not in text
    lms.forward.clear_cache()


@pytest.mark.parametrize(
    "case, fused",
    [
        ("phi3-mha", "qkv_proj gate_up_proj"),
        ("glm4-gqa", "gate_up_proj"),
        ("falcon-40b", "query_key_value"),
        ("falcon-bias-sequential", "query_key_value"),
        ("qwen3.5-gqa", "q_proj in_proj_qkv conv1d"),
        ("qwen3moe-gqa", "experts.gate_up_proj experts.down_proj"),
        ("gptoss-gqa", "experts.gate_up_proj experts.down_proj"),
        ("gpt2-mha", "c_attn c_fc mlp.c_proj"),
    ],
)
@pytest.mark.parametrize("packed", ["", "Q8_0"])
@pytest.mark.parametrize("model", [2, 4])
def test_of_fused_tensors_each_device_reads_its_rows(
    case, fused, model, packed, read, tmp_path
):
    """All read a tensor once together, but for gates that alternate with others."""
    meta = tiny.golden(case)
    tiny.write_folder(tmp_path, meta["config"], meta["shapes"])
    config = from_huggingface(meta["config"])
    source, table = SafetensorsSource(tmp_path), huggingface_table(config)
    mesh = jaxhal.make_mesh(data=8 // model, model=model)
    place = placement.on(mesh, config, mesh_lib.RULES)
    how = config, source, table, jnp.float32
    params = weights.fill(*how, packed=packed, place=place)[1]
    for name in fused.split():
        ends = name, f"{name}.weight"
        shares = [each for full, each in read.items() if full.endswith(ends)]
        # Blocks that do not divide are copied.
        assert shares and (packed or max(map(max, shares)) <= 0.5)
        most = 2.0 if case == "gptoss-gqa" and name.endswith("gate_up_proj") else 1.0
        assert max(map(sum, shares)) <= most + 1e-6, name
    alone = weights.fill(*how, packed=packed)[1]
    equal(jax.device_get(params), jax.device_get(alone), 0)


@pytest.mark.parametrize("case", tiny.CASES)
def test_a_part_of_every_parameter(case, tmp_path):
    """Of its last axis, as the whole tensor has it."""
    meta = tiny.golden(case)
    tiny.write_folder(tmp_path, meta["config"], meta["shapes"])
    config = from_huggingface(meta["config"])
    source, table = SafetensorsSource(tmp_path), huggingface_table(config)
    present = source.names()
    for path, leaf in weights.paths(weights.abstract(config, jnp.float32)[1]):
        one = Parameter.of(path, leaf, table, present)
        some = slice(leaf.shape[-1] // 4, leaf.shape[-1] // 2 + 1)
        index = *(slice(None),) * (len(leaf.shape) - one.lead - 1), some
        for name in one.names:
            want = one.origin.turn(one.stored(name, source), config)[..., some]
            got = cut_of(one, source, config)(name, index)
            np.testing.assert_array_equal(got, want, path)


@pytest.mark.parametrize("case", ["qwen3.5moe-gqa", "gemma4-experts"])
def test_experts_lie_as_the_perceptron_beside_them(case):
    """Along their widths; norms, routers and gates are copied."""
    config = from_huggingface(tiny.golden(case)["config"])
    mesh = jaxhal.make_mesh(data=2, model=4)
    place = placement.on(mesh, config, mesh_lib.RULES)
    shared = {
        path: tuple(
            np.divide(leaf.shape, place(path, leaf.shape).shard_shape(leaf.shape))
        )
        for path, leaf in weights.paths(weights.abstract(config, jnp.float32)[1])
        if path.startswith(("blocks.mlp.", "blocks.shared."))
    }
    assert {path: ways for path, ways in shared.items() if max(ways) > 1} == {
        f"blocks.{part}_proj.kernel": ways
        for part, ways in {
            "mlp.gate": (1, 1, 1, 4),
            "mlp.up": (1, 1, 1, 4),
            "mlp.down": (1, 1, 4, 1),
            "shared.mlp.gate": (1, 1, 4),
            "shared.mlp.up": (1, 1, 4),
            "shared.mlp.down": (1, 4, 1),
        }.items()
    }


def test_sinks_and_biases_of_experts(tmp_path):
    """Sinks lie along heads; of experts in blocks each device reads its own."""
    test_gpt_oss.write(tmp_path)
    config = from_huggingface(test_gpt_oss.CASE["config"])
    source, table = SafetensorsSource(tmp_path), huggingface_table(config)

    def load(place=None):
        params = weights.fill(config, source, table, jnp.float32, place=place)[1]
        return dict(weights.paths(params))

    mesh = jaxhal.make_mesh(data=2, model=4)
    alone, held = load(), load(placement.on(mesh, config, mesh_lib.FULLY_SHARDED))
    equal(jax.device_get(held), jax.device_get(alone), 0)
    for name, part in {
        "self_attn.sinks": (3, 1),
        "mlp.up_proj.bias": (3, 6, 16),
        "mlp.down_proj.bias": (3, 6, 16),
        "mlp.down_proj.kernel": (3, 6, 16, 16),
    }.items():
        assert held[f"blocks.{name}"].addressable_shards[0].data.shape == part


def test_blocks_of_a_file(tmp_path, monkeypatch):
    """Formats differ by layer; the vocabulary is made numbers a part at a time."""
    monkeypatch.setattr("jaxhal.models.decoder.VOCABULARY_BYTES", 1 << 14)
    source = test_quantized.write(tmp_path / "tiny.gguf", tied=False)
    config, table = config_from_gguf(source), gguf_table(config_from_gguf(source))
    load = functools.partial(filled, config, source, table)
    alone, mesh = load(jaxhal.make_mesh(), "stored"), jaxhal.make_mesh(data=2, model=4)
    tokens = np.random.default_rng(1).integers(0, test_quantized.VOCAB, (4, 40))
    want = alone.forward(tokens)
    for packed in ("stored", ""):
        lm = load(mesh, packed)
        test_quantized.check_outline(lm, source, table, packed, mesh)
        equal(lm.forward(tokens), want)
        assert fingerprint(lm) == fingerprint(alone)
        held = dict(weights.paths(lm.params))
        up = held["blocks.mlp.up_proj.kernel"]
        up = up.packs[0].scale if packed else up
        part = (3, 128, 8) if packed else (3, 256, 128)
        assert up.addressable_shards[0].data.shape == part


@pytest.mark.parametrize("data, model, shares", [(4, 2, (1, 1, 8)), (2, 4, (2, 2, 4))])
def test_experts_of_a_file(data, model, shares, tmp_path):
    """Widths of 512 are two blocks of 256, which four devices copy, or 16 of 32."""
    kinds = test_quantized_experts.KINDS
    source = test_quantized.write(tmp_path / "tiny.gguf", kinds=kinds)
    config = config_from_gguf(source)
    table = gguf_table(config)
    load = functools.partial(filled, config, source, table, packed="stored")
    mesh = jaxhal.make_mesh(data=data, model=model)
    alone, lm = load(jaxhal.make_mesh()), load(mesh)
    test_quantized.check_outline(lm, source, table, "stored", mesh)
    tokens = np.random.default_rng(1).integers(0, test_quantized.VOCAB, (4, 40))
    equal(lm.forward(tokens), alone.forward(tokens))
    down = dict(weights.paths(lm.params))["blocks.mlp.down_proj.kernel"].packs
    held = [pack.scale.addressable_shards[0].data.shape for pack in down]
    assert held == [(1, 4, test_quantized.WIDTH, blocks) for blocks in shares]
    rows = mesh_lib.spread((tokens, np.ones(tokens.shape, bool)), lm.params)
    text = lms.forward.lower(lm.bare, *rows).compile().as_text()
    assert not re.search(r"= \(?(u8|s8|f16)\[\S* all-gather\(", text)


def test_by_default_it_lies_on_as_few_as_it_fits(folder, tmp_path, monkeypatch):
    source = test_quantized.write(tmp_path / "tiny.gguf")
    config = config_from_gguf(source)

    def chosen(room, weights=None, mesh=None):
        monkeypatch.setattr(devices, "memory_of_each", lambda devices: room)
        how = (config, source, jnp.float32, weights, mesh)
        packed, over = placement.choose(*how)
        return packed, tuple(over.shape.values())

    whole, blocks = 4 * source.size, source.bytes
    assert chosen(2.1 * whole) == ("", (8, 1))
    assert chosen(1.9 * whole) == ("", (4, 2))
    assert chosen(0.9 * whole) == ("", (2, 4))
    # Four heads are not for eight devices, and smaller is nothing but blocks.
    assert chosen(2.1 * blocks) == ("stored", (8, 1))
    assert chosen(2.1 * blocks, "dequantised") == ("", (2, 4))
    assert chosen(2.1 * blocks, None, jaxhal.make_mesh(model=2)) == ("stored", (1, 2))
    assert chosen(1.0) == ("stored", (2, 4))
    monkeypatch.undo()
    lm = jaxhal.load(folder)
    assert dict(mesh_lib.mesh_of(lm.params).shape) == {"data": 8, "model": 1}


def test_half_precision(folder):
    lm = jaxhal.load(folder, mesh=jaxhal.make_mesh(model=4), dtype=jnp.bfloat16)
    want = jaxhal.load(folder, mesh="data=1", dtype=jnp.bfloat16)
    equal(jax.device_get(lm.params), jax.device_get(want.params), 0)
