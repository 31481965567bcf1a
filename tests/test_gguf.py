"""GGUF files: what their metadata and tensors mean, whole and broken."""

import dataclasses

import gguf
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from gguf_files import write_gguf
from jaxhal.models import registry, rope, weights
from jaxhal.models.families import from_huggingface
from jaxhal.models.gguf import GGUFSource
from jaxhal.models.gguf_config import config_from_gguf
from jaxhal.models.gguf_families import gguf_table
from jaxhal.models.lm import LM, load

# What these cases have in another way than the published models, which alone the files
# can be of.
_LEFT_OUT = {
    "gemma2-gqa": ("windows", "attention_scale"),
    "gemma3-gqa": ("windows", "attention_scale", "rope_of_layer"),
    "smollm3-gqa": ("rope_of_layer",),
    "granite4-dense": ("family",),
    "gptoss-gqa": ("gate_limit",),
}


_MORE = (
    *("llama-gqa", "llama-biases", "llama-llama3", "qwen2-gqa", "qwen3-gqa"),
    *("falcon-40b", "granite4-nope", "olmo3-yarn", "phi3-long"),
    *("gemma4-plain", "gemma4-experts"),
)


def _tables(config) -> np.ndarray:
    """Angles of short and long texts."""
    at, turned = jnp.arange(48)[None] * jnp.ones((2, 1), int), config.rotary_dim
    lengths = jnp.array([8, 60])
    return np.stack(rope.tables(config.ropes, turned or config.head_dim, at, lengths))


@pytest.mark.shows("GGUF")
@pytest.mark.parametrize("case", [*tiny.IN_FILES, *_MORE])
def test_gguf_equals_huggingface(case, tmp_path):
    source = GGUFSource(write_gguf(tmp_path / "tiny.gguf", case))
    config = config_from_gguf(source)
    theirs = from_huggingface(tiny.golden(case)["config"])
    if theirs.delta:
        tiled = dataclasses.replace(theirs.delta, tiled=True)
        theirs = dataclasses.replace(theirs, delta=tiled)
    given = {name: getattr(theirs, name) for name in _LEFT_OUT.get(case, ())}
    config = dataclasses.replace(config, **given)
    for field in dataclasses.fields(config):
        ours, want = getattr(config, field.name), getattr(theirs, field.name)
        if field.name != "ropes":
            assert ours == pytest.approx(want), field.name
    np.testing.assert_allclose(_tables(config), _tables(theirs), atol=1e-5)
    graphdef, params = weights.fill(config, source, gguf_table(config), jnp.float32)
    want = tiny.golden(case)["logits"]
    found = LM(params, graphdef, config).forward(tiny.TOKENS)
    assert np.abs(found - want).max() < 1e-4 * np.abs(want).max()


def header(path, arch: str, changes: dict, tensors=()) -> GGUFSource:
    """A GGUF file whose tensors have but a name; a value of None is left out."""
    layer_norm = arch in ("falcon", "gpt2")
    eps = "layer_norm_epsilon" if layer_norm else "layer_norm_rms_epsilon"
    metadata = {
        "embedding_length": 32,
        "feed_forward_length": 48,
        "block_count": 7,
        "attention.head_count": 4,
        "context_length": 64,
        f"attention.{eps}": 0.5,
    } | changes
    writer = gguf.GGUFWriter(path, arch)
    add = {
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        bool: writer.add_bool,
        list: writer.add_array,
    }
    for key, value in metadata.items():
        if value is not None:
            add[type(value)](f"{arch}.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((61, 32), np.float32))
    for name in tensors:
        writer.add_tensor(name, np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFSource(path)


_BIASES = ("qkv_bias", "o_bias", "mlp_bias")
_WIDE = {"attention.key_length": 16}
_FACTORS = ["rope_factors_long.weight", "rope_factors_short.weight"]


@pytest.mark.parametrize(
    "arch, metadata, tensors, want",
    [
        ("llama", {}, [], dict.fromkeys(_BIASES, False) | {"windows": (0,) * 7}),
        ("llama", {}, ["blk.0.attn_q.bias"], {"qkv_bias": True, "o_bias": False}),
        ("llama", {}, ["blk.0.attn_output.bias"], {"qkv_bias": False, "o_bias": True}),
        (
            "llama",
            {"attention.sliding_window": 0},
            ["blk.0.attn_q.bias"],
            {"family": "llama", "windows": (0,) * 7, "qkv_bias": True},
        ),
        (
            "llama",
            {"attention.sliding_window": 8, "hidden_act": "relu6"},
            ["blk.0.ffn_down.bias"],
            {"windows": (8,) * 7, "mlp_bias": True, "activation": "silu"},
        ),
        ("qwen2", {}, [], {"qkv_bias": False}),
        ("qwen2", {"attention.sliding_window": 8}, [], {"windows": (8,) * 7}),
        ("qwen3", {}, [], {"head_dim": 8, "qk_norm": None}),
        ("qwen3", {}, ["blk.0.attn_q_norm.weight"], {"qk_norm": "head"}),
        (
            "falcon",
            {"attention.sliding_window": 8},
            ["blk.0.attn_norm_2.weight"],
            {"windows": (8,) * 7, "block": "parallel_two_norms", "norm_eps": 0.5},
        ),
        ("gpt2", {}, ["blk.0.attn_qkv.bias"], {"qkv_bias": True, "o_bias": False}),
        (
            "gemma3",
            {},
            [],
            {
                "windows": (0,) * 7,
                "rope_of_layer": (1, 1, 1, 1, 1, 0, 1),
                "ropes": (rope.Rope(original_length=64),) * 2,
                "head_dim": 8,
                "attention_scale": 8**-0.5,
            },
        ),
        ("gemma3", {"attention.sliding_window": 0}, [], {"windows": (0,) * 7}),
        (
            "gemma3",
            {"attention.sliding_window": 8},
            [],
            {"windows": (8, 8, 8, 8, 8, 0, 8)},
        ),
        (
            "gemma3",
            {
                "rope.freq_base": 1e6,
                "rope.scaling.type": "linear",
                "rope.scaling.factor": 8.0,
            },
            [],
            {
                "context_length": 64,
                "ropes": (
                    rope.Rope(1e6, "linear", 8.0, original_length=64),
                    rope.Rope(original_length=64),
                ),
            },
        ),
        ("gemma3", {"block_count": 62, **_WIDE}, [], {"attention_scale": 8**-0.5}),
        (
            "gemma2",
            _WIDE,
            [],
            {
                "windows": (4096, 0, 4096, 0, 4096, 0, 4096),
                "attention_cap": 50.0,
                "logit_cap": 30.0,
                "attention_scale": 16**-0.5,
                "embedding_scale": 32**0.5,
                "activation": "gelu_tanh",
            },
        ),
        ("gemma2", {"block_count": 46, **_WIDE}, [], {"attention_scale": 8**-0.5}),
        (
            "smollm3",
            {"rope.freq_base": 5e6},
            [],
            {
                "rope_of_layer": (0, 0, 0, 1, 0, 0, 0),
                "ropes": (rope.Rope(5e6, original_length=64), rope.Rope(kind="none")),
                "windows": (0,) * 7,
            },
        ),
        ("olmo2", {}, [], {"family": "olmo2", "windows": (0,) * 7}),
        (
            "olmo2",
            {"attention.sliding_window": 8, "rope.freq_base_swa": 1e3},
            [],
            {
                "family": "olmo3",
                "windows": (8, 8, 8, 0, 8, 8, 8),
                "ropes": tuple(rope.Rope(x, original_length=64) for x in (1e4, 1e3)),
            },
        ),
        (
            "olmo2",
            {"attention.sliding_window": 8, "attention.sliding_window_pattern": 2},
            [],
            {"windows": (8, 0, 8, 0, 8, 0, 8)},
        ),
        (
            "olmo2",
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 16,
                "rope.scaling.attn_factor": 1.25,
            },
            [],
            {
                "ropes": (
                    rope.Rope(
                        1e4, "yarn", 4.0, original_length=16, attention_factor=1.25
                    ),
                ),
            },
        ),
        ("granite", {}, [], {"attention_scale": 8**-0.5, "logit_scale": 1.0}),
        (
            "granitehybrid",
            {"attention.head_count_kv": [2] * 7, "expert_count": 0},
            [],
            {"family": "granite", "num_key_value_heads": 2},
        ),
        (
            "phi3",
            {"rope.scaling.original_context_length": 32, "attention.sliding_window": 0},
            [],
            {"ropes": (rope.Rope(original_length=64),), "windows": (0,) * 7},
        ),
        (
            "mistral3",
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.yarn_attn_factor": 1.5,
            },
            [],
            {
                "query_growth": None,
                "context_length": 64,
                "ropes": (
                    rope.Rope(
                        1e4, "yarn", 4.0, original_length=64, attention_factor=1.5
                    ),
                ),
            },
        ),
        ("glm4", {"rope.dimension_count": 4}, [], {"rotary_dim": 4}),
    ],
)
def test_gguf_headers(arch, metadata, tensors, want, tmp_path):
    """What a file leaves out, and which parts its tensors say there are."""
    config = config_from_gguf(header(tmp_path / "h.gguf", arch, metadata, tensors))
    assert {name: getattr(config, name) for name in want} == want


@pytest.mark.parametrize(
    "arch, metadata, tensors, message",
    [
        ("gpt2", {"embedding_length": None}, [], "lacks embedding_length"),
        ("falcon", {"feed_forward_length": None}, [], "lacks feed_forward_length"),
        ("phi3", {"context_length": None}, [], "lacks context_length"),
        (
            "falcon",
            {"attention.head_count_kv": 3},
            [],
            "head_count_kv is 3; give a div",
        ),
        (
            "llama",
            {"attention.layer_norm_rms_epsilon": None},
            [],
            "lacks attention.layer_norm_rms_epsilon",
        ),
        (
            "gpt2",
            {"attention.layer_norm_epsilon": None},
            [],
            "lacks attention.layer_norm_epsilon",
        ),
        ("qwen2", {"expert_count": 8}, [], "expert_count is 8; only models without"),
        ("llama", {"expert_count": 8}, [], "lacks expert_used_count; give a whole"),
        (
            "llama",
            {"expert_count": 8, "expert_used_count": 9},
            [],
            "expert_used_count is 9; .* from 1 to 8",
        ),
        ("qwen3moe", {"expert_count": 8}, [], "lacks expert_feed_forward_length"),
        ("qwen3moe", {"expert_feed_forward_length": 8}, [], "lacks expert_count"),
        (
            "llama",
            {"expert_count": 8, "expert_used_count": 2},
            ["blk.0.ffn_gate.0.weight"],
            r"a tensor for each expert, such as blk\.0\.ffn_gate\.0\.weight",
        ),
        ("llama", {"rope.scaling.type": "linear"}, [], "lacks rope.scaling.factor"),
        (
            "llama",
            {"rope.scaling.type": "su"},
            [],
            "rope.scaling.type is su; known: none, linear, yarn, longrope",
        ),
        (
            "phi3",
            {"rope.scaling.type": "longrope"},
            [],
            "type is longrope and rope_factors_long.weight is missing; convert",
        ),
        ("phi3", {}, _FACTORS[:1], "none and rope_factors_short.weight is missing"),
        ("phi3", {}, _FACTORS, "rope_factors_short.weight is not 4 numbers above 0"),
        ("llama", {}, ["rope_freqs.weight"], "rope_freqs.weight is not 4 numbers"),
        ("glm4", {"rope.dimension_count": 3}, [], "count is 3; give an even number"),
        ("glm4", {"rope.dimension_count": 9}, [], "count is 9; .* from 1 to 8"),
        (
            "olmo2",
            {"attention.sliding_window_pattern": [True]},
            [],
            "pattern is .*; give true or false for each of the 7 layers",
        ),
        (
            "granitehybrid",
            {"attention.head_count_kv": [0, 0, 0, 2, 0, 0, 0]},
            [],
            "head_count_kv is .*; only attention in all layers",
        ),
    ],
)
def test_gguf_errors_name_keys_of_the_file(arch, metadata, tensors, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        config_from_gguf(header(tmp_path / "h.gguf", arch, metadata, tensors))


_KINDS = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q5_K Q6_K MXFP4".split()


@pytest.mark.parametrize("name", _KINDS)
def test_gguf_quantisations(name, tmp_path):
    kind = gguf.GGMLQuantizationType[name]
    size = gguf.GGML_QUANT_SIZES[kind][1] * 512 // gguf.GGML_QUANT_SIZES[kind][0]
    raw = np.random.default_rng(0).integers(0, 60, (3, size), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_tensor("x", raw, raw_shape=raw.shape, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = GGUFSource(tmp_path / "q.gguf")
    got = source.get("x")
    assert got.shape == (3, 512) and source.stays == (name != "MXFP4")
    np.testing.assert_array_equal(got, gguf.quants.dequantize(raw, kind))


def test_broken_gguf(tmp_path, smollm2_gguf, monkeypatch):
    monkeypatch.setenv("JAXHAL_CACHE", str(tmp_path / "cache"))
    data = smollm2_gguf.read_bytes()
    for name, cut in (("head", 10), ("metadata", 100_000), ("tensors", len(data) // 2)):
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(data[:cut])
        with pytest.raises(ValueError, match="not a whole GGUF file|cut short"):
            load(path)
    text = tmp_path / "text.gguf"
    text.write_text("not a model at all, but long enough to be read as a header")
    with pytest.raises(ValueError, match="not a whole GGUF file"):
        load(text)
    assert not list(registry.cache_dir().glob("gguf/[!.]*"))


def test_unknown_gguf_architecture(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match="unknown architecture 'mamba'"):
        config_from_gguf(GGUFSource(tmp_path / "m.gguf"))
