"""Checkpoints of every kind, whole and broken."""

import dataclasses
import json

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

import tiny
from jaxhal.models import registry, rope, weights
from jaxhal.models.families import from_huggingface, read_config
from jaxhal.models.gguf import GGUFSource, gguf_table
from jaxhal.models.gguf_config import config_from_gguf
from jaxhal.models.lm import LM, load
from tiny_lm import tiny_lm


def _tokenizer(folder, size: int = 61):
    vocab = {f"<{i}>": i for i in range(size - 3)} | {"a": 58, "b": 59, "c": 60}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<1>", "eos_token": "<2>", "unk_token": "<0>"}
    text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special})
    (folder / "tokenizer_config.json").write_text(text)


@pytest.fixture
def folder(tmp_path):
    want = tiny.golden("llama-gqa")
    tiny.write_folder(tmp_path / "model", want["config"], want["shapes"])
    _tokenizer(tmp_path / "model")
    return tmp_path / "model"


def _logits(lm) -> np.ndarray:
    return np.asarray(lm.forward(tiny.TOKENS))


def _close(lm, case: str):
    want = tiny.golden(case)["logits"]
    assert np.abs(_logits(lm) - want).max() < 1e-4 * np.abs(want).max()


def test_folder(folder):
    _close(load(folder), "llama-gqa")


def test_sharded_folder_in_bfloat16(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    where = {}
    for shard, held in shards.items():
        part = {name: tensors[name].astype(jnp.bfloat16) for name in held}
        save_file(part, folder / shard)
        where |= dict.fromkeys(held, shard)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    lm = load(folder, dtype=jnp.bfloat16)
    rounded = load(folder)  # float32 parameters that hold the rounded numbers
    want = _logits(rounded)
    assert np.linalg.norm(_logits(lm) - want) < 0.04 * np.linalg.norm(want)
    (folder / "two.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="lacks 1 of 2 weight shards"):
        load(folder)


def test_headless_and_wrapped_names(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({f"language_model.{name}": x for name, x in tensors.items()}, path)
    _close(load(folder), "llama-gqa")
    save_file({name.removeprefix("model."): x for name, x in tensors.items()}, path)
    _close(load(folder), "llama-gqa")


def _broken(folder, change) -> str:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(ValueError) as caught:
        load(folder)
    return str(caught.value)


def test_wrong_tensors_are_listed_together(folder):
    def change(tensors):
        up = "model.layers.1.mlp.up_proj.weight"
        tensors[up] = tensors[up][:-1].copy()
        tensors["model.norm.weight"][3] = np.nan
        del tensors["model.layers.2.self_attn.q_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(32, np.float32)

    message = _broken(folder, change)
    assert "model.layers.1.mlp.up_proj.weight has shape [47, 32]" in message
    assert "model.norm.weight holds NaN" in message
    assert "model.layers.2.self_attn.q_proj.weight is missing" in message
    assert "self_attn.q_proj.bias is stored but unknown to llama" in message


def test_truncated_safetensors(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load(folder)


def test_missing_parts(folder, tmp_path):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match="tokenizer.json"):
        load(folder)
    with pytest.raises(FileNotFoundError, match="config.json"):
        load(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load(tmp_path / "none.gguf")
    (folder / "model.safetensors").unlink()
    _tokenizer(folder)
    with pytest.raises(FileNotFoundError, match="no \\*.safetensors"):
        load(folder)


def test_hub_ids_go_through_huggingface_hub(folder, monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError
    from huggingface_hub.utils import filter_repo_objects

    asked = []

    def download(repo, allow_patterns, ignore_patterns, local_files_only):
        asked.append(repo)
        if repo == "owner/gone":
            raise LocalEntryNotFoundError("offline")
        files = ["model-1.safetensors", "pytorch_model.bin", "original/m.safetensors"]
        rules = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
        assert [*filter_repo_objects(files, **rules)] == files[:1]
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    lm = load("owner/name")
    assert (lm.name, asked) == ("owner/name", ["owner/name"])
    _close(lm, "llama-gqa")
    with pytest.raises(ValueError, match="could not get 'owner/gone'.*offline"):
        load("owner/gone")


def test_unknown_names(folder):
    with pytest.raises(ValueError, match="did you mean 'smollm2-135m'"):
        load("smolm2-135m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "lama"}))
    with pytest.raises(ValueError, match="unknown architecture 'lama'.*'llama'"):
        load(folder)
    (folder / "config.json").write_bytes(b'{"model_type": "\xff"}')
    with pytest.raises(ValueError, match="not valid JSON"):
        load(folder)
    with pytest.raises(ValueError, match="use float32 or bfloat16"):
        load(folder, dtype=jnp.float16)


@pytest.mark.parametrize(
    "extra, message",
    [
        ({"rope_scaling": {"rope_type": "longrope"}}, "lacks short_factor; give a"),
        ({"rope_scaling": {"rope_type": "su"}}, "rope_scaling: rope_type is su; known"),
        ({"rope_scaling": {"rope_type": "linear"}}, "lacks factor; rope sc"),
        ({"hidden_act": "relu6"}, "hidden_act is relu6; known: silu"),
    ],
)
def test_settings_that_cannot_be_computed(extra, message):
    config = tiny.golden("llama-gqa")["config"]
    config = {k: v for k, v in config.items() if k != "rope_parameters"}
    with pytest.raises(ValueError, match=message):
        from_huggingface(config | extra)


@pytest.mark.parametrize("case", tiny.CASES)
def test_old_and_new_config_spellings_agree(case):
    new = tiny.golden(case)["config"]
    old = {k: v for k, v in new.items() if k != "rope_parameters"}
    if new["model_type"] == "gemma3_text":
        del old["layer_types"]
    rope = new.get("rope_parameters") or {}
    if "full_attention" in rope:
        old["rope_theta"] = rope["full_attention"]["rope_theta"]
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        old["sliding_window_pattern"] = 3
        rope = rope["full_attention"]
    elif rope:
        old["rope_theta"] = rope["rope_theta"]
    if rope.get("rope_type", "default") != "default":
        old["rope_scaling"] = {
            ("type" if k == "rope_type" else k): v for k, v in rope.items()
        }
    assert from_huggingface(old) == from_huggingface(new)


@pytest.mark.parametrize(
    "case, stray",
    [
        ("mistral-gqa", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2-gqa", {"attention_bias": True, "head_dim": 8}),
        ("gemma3-gqa", {"final_logit_softcapping": 0.0, "mlp_bias": True}),
        ("falcon-7b", {"intermediate_size": 99, "hidden_act": "relu6"}),
        ("falcon-7b", {"attention_bias": True, "rms_norm_eps": 0.5}),
        ("falcon-7b", {"num_key_value_heads": 4, "num_kv_heads": 3}),
        ("falcon-40b", {"num_key_value_heads": 4}),
        ("gpt2-mha", {"intermediate_size": 99, "hidden_act": "relu6"}),
        ("gpt2-mha", {"hidden_size": 8, "max_position_embeddings": 8}),
    ],
)
def test_settings_of_other_families_say_nothing(case, stray):
    config = tiny.golden(case)["config"]
    assert from_huggingface(config | stray) == from_huggingface(config)


def test_caps_may_be_left_out_turned_off_or_given():
    """Null turns off what a family has where nothing is said."""
    config = tiny.golden("gemma2-gqa")["config"]
    keys = "attn_logit_softcapping", "final_logit_softcapping"
    bare = {key: value for key, value in config.items() if key not in keys}
    for given, want in (
        ({}, (50.0, 30.0)),
        (dict.fromkeys(keys), (None, None)),
        (dict.fromkeys(keys, 0.0), (None, None)),
        ({keys[0]: 2.0}, (2.0, 30.0)),
    ):
        found = from_huggingface(bare | given)
        assert (found.attention_cap, found.logit_cap) == want


@pytest.mark.parametrize(
    "case, extra, message",
    [
        ("granite4-dense", {"num_local_experts": 8}, "num_local_experts is 8; only th"),
        (
            "granite4-dense",
            {"layer_types": ["mamba"] * 3},
            "layer_types is mamba|known",
        ),
        (
            "smollm3-gqa",
            {"no_rope_layers": [1, 2, 1]},
            "give whole numbers from 0 to 1",
        ),
        (
            "smollm3-gqa",
            {"no_rope_layers": [1]},
            "no_rope_layers is .*give a list of 3",
        ),
        ("ministral3-gqa", {}, "lacks rope_parameters; give them"),
        (
            "phi3-mha",
            {
                "rope_scaling": {
                    "type": "longrope",
                    "short_factor": [1.0],
                    "long_factor": [1.0, 2.0, 3.0, 4.0],
                }
            },
            "rope scaling has 1 factors for the 4 channel pairs",
        ),
        ("glm4-gqa", {"partial_rotary_factor": 0.2}, "give a share of 16 that is even"),
        (
            "granite-gqa",
            {"logits_scaling": 0},
            "logits_scaling is 0; give a number abo",
        ),
        ("gemma2-gqa", {"final_logit_softcapping": -1}, "give a number at least 0"),
    ],
)
def test_settings_of_a_family_that_cannot_be_computed(case, extra, message):
    config = tiny.golden(case)["config"]
    config = {k: v for k, v in config.items() if k != "rope_parameters"}
    with pytest.raises(ValueError, match=message):
        from_huggingface(config | extra)


# -- GGUF ---------------------------------------------------------------------------

_ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "granitemoehybrid": "granite",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "olmo3": "olmo2",
    "ministral3": "mistral3",
    "gpt_oss": "gpt-oss",
}


def _permuted(x: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to query and key rows."""
    halves = x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:])
    return halves.swapaxes(1, 2).reshape(x.shape)


def _falcon_fused(x: np.ndarray, kv_heads: int, head_dim: int) -> np.ndarray:
    """What llama.cpp's converter does to Falcon's query_key_value."""
    groups = x.reshape(kv_heads, -1, head_dim, x.shape[-1])
    parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
    return np.concatenate([part.reshape(-1, x.shape[-1]) for part in parts])


def _describe(writer, arch: str, raw: dict, config):
    """The metadata that llama.cpp's converter writes of a config.json."""
    rope_of = raw.get("rope_parameters") or {}
    rope_of = rope_of.get("full_attention", rope_of)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden_size)
    if config.num_experts:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if arch == "qwen3moe":  # beside the width of perceptrons that it has not
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_feed_forward_length(raw["intermediate_size"])
    else:
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if config.norm == "layer":
        writer.add_layer_norm_eps(config.norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.norm_eps)
    if arch not in ("phi3", "granite"):
        writer.add_key_length(config.head_dim)
    if arch != "gemma2":
        writer.add_rope_freq_base(config.ropes[0].theta)
    if arch in ("llama", "granite", "smollm3", "mistral3", "phi3", "glm4"):
        writer.add_rope_dimension_count(config.rotary_dim or config.head_dim)
    slide = ("gemma2", "gemma3", "olmo2", "phi3", "gpt-oss")
    if arch in slide and "sliding_window" in raw:
        writer.add_sliding_window(raw["sliding_window"] or 0)
    if arch == "olmo2" and "sliding_window" in raw:
        slides = [kind == "sliding_attention" for kind in raw["layer_types"]]
        writer.add_sliding_window_pattern(slides)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(raw["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(raw["final_logit_softcapping"])
    if arch == "granite":
        writer.add_attention_scale(raw["attention_multiplier"])
        writer.add_embedding_scale(raw["embedding_multiplier"])
        writer.add_residual_scale(raw["residual_multiplier"])
        writer.add_logit_scale(raw["logits_scaling"])
        turned = raw.get("position_embedding_type", "rope") == "rope"
        writer.add_rope_scaling_finetuned(turned)
    if "original_max_position_embeddings" in {**raw, **rope_of}:
        original = rope_of.get("original_max_position_embeddings")
        writer.add_rope_scaling_orig_ctx_len(original or config.context_length)
    match rope_of.get("rope_type"):
        case "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope_of["factor"])
            if "beta_fast" in rope_of:
                writer.add_rope_scaling_yarn_beta_fast(rope_of["beta_fast"])
                writer.add_rope_scaling_yarn_beta_slow(rope_of["beta_slow"])
        case "longrope":  # of which these files do not say the type
            writer.add_rope_scaling_attn_factors(rope.amplitude(config.ropes[0]))
            for which in ("long", "short"):
                factors = np.float32(rope_of[f"{which}_factor"])
                writer.add_tensor(f"rope_factors_{which}.weight", factors)
        case "llama3":
            plain = rope.Rope(theta=config.ropes[0].theta)
            base, scaled = (
                rope.frequencies(r, config.head_dim, jnp.array([1]))[0]
                for r in (plain, config.ropes[0])
            )
            writer.add_tensor("rope_freqs.weight", np.asarray(base / scaled))
    if arch == "mistral3":
        writer.add_rope_scaling_yarn_log_mul(rope_of["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope_of["llama_4_scaling_beta"])


def write_gguf(path, case: str):
    """One tiny case as a GGUF file, converted by llama.cpp's rules."""
    family = tiny.CASES[case][0]
    arch = _ARCHITECTURES.get(family, family)
    want = tiny.golden(case)
    config = from_huggingface(want["config"])
    writer = gguf.GGUFWriter(path, arch)
    _describe(writer, arch, want["config"], config)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[arch], config.num_hidden_layers)
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    for stored, shape in want["shapes"].items():
        x = tiny.weight(stored, tuple(shape))
        if "shared_mlp" in stored:  # what a Granite 4 calls the dense part
            layer = f"blk.{stored.split('.')[2]}"
            parts = ("gate", "up") if "input" in stored else ("down",)
            for part, each in zip(parts, np.split(x, len(parts)), strict=True):
                writer.add_tensor(f"{layer}.ffn_{part}.weight", each)
            continue
        if "experts" in stored:
            layer = f"blk.{stored.split('.')[2]}"
            parts = ("gate", "up") if "gate_up" in stored else ("down",)
            kind, count = "bias" if stored.endswith("bias") else "weight", len(parts)
            if arch == "gpt-oss":  # as [in, out], gates and the rest in turns
                x = x.swapaxes(1, 2) if kind == "weight" else x
                x = np.concatenate([x[:, at::count] for at in range(count)], 1)
            for part, each in zip(parts, np.split(x, count, 1), strict=True):
                each = np.ascontiguousarray(each)
                writer.add_tensor(f"{layer}.ffn_{part}_exps.{kind}", each)
            continue
        name = names.get_name(stored, try_suffixes=(".weight", ".bias"))
        assert name is not None, stored
        name += ".weight" * name.endswith("sinks")
        part = name.rsplit(".", 2)[-2]
        paired = arch in ("llama", "granite", "smollm3", "mistral3")
        if paired and part in ("attn_q", "attn_k"):
            x = _permuted(x, heads[part[-1]])
        if arch in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            x = x + 1
        if arch == "gpt2" and x.ndim == 2 and "embd" not in name:
            x = x.T
        if part == "attn_qkv" and arch == "falcon":
            x = _falcon_fused(x, config.num_key_value_heads, config.head_dim)
        writer.add_tensor(name, np.ascontiguousarray(x))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# What these cases have in another way than the published models, which alone the files
# can be of.
_LEFT_OUT = {
    "gemma2-gqa": ("windows", "attention_scale"),
    "gemma3-gqa": ("windows", "attention_scale", "rope_of_layer"),
    "smollm3-gqa": ("rope_of_layer",),
    "granite4-dense": ("family",),
    "gptoss-gqa": ("gate_limit",),
}


def _tables(config) -> np.ndarray:
    """Angles of short and long texts."""
    at, turned = jnp.arange(48)[None] * jnp.ones((2, 1), int), config.rotary_dim
    lengths = jnp.array([8, 60])
    return np.stack(rope.tables(config.ropes, turned or config.head_dim, at, lengths))


@pytest.mark.shows("GGUF")
@pytest.mark.parametrize(
    "case",
    [
        "llama-gqa",
        "llama-biases",
        "llama-llama3",
        "qwen2-gqa",
        "qwen3-gqa",
        "gpt2-mha",
        "falcon-7b",
        "falcon-40b",
        "gemma2-gqa",
        "gemma3-gqa",
        "granite-gqa",
        "granite4-dense",
        "granite4-nope",
        "smollm3-gqa",
        "olmo2-gqa",
        "olmo3-yarn",
        "phi3-mha",
        "phi3-long",
        "glm4-gqa",
        "gptoss-gqa",
        "ministral3-gqa",
        "mixtral-gqa",
        "qwen3moe-gqa",
    ],
)
def test_gguf_equals_huggingface(case, tmp_path):
    source = GGUFSource(write_gguf(tmp_path / "tiny.gguf", case))
    config = config_from_gguf(source)
    theirs = from_huggingface(tiny.golden(case)["config"])
    given = {name: getattr(theirs, name) for name in _LEFT_OUT.get(case, ())}
    config = dataclasses.replace(config, **given)
    for field in dataclasses.fields(config):
        ours, want = getattr(config, field.name), getattr(theirs, field.name)
        if field.name != "ropes":
            assert ours == pytest.approx(want), field.name
    np.testing.assert_allclose(_tables(config), _tables(theirs), atol=1e-5)
    graphdef, params = weights.fill(config, source, gguf_table(config), jnp.float32)
    _close(LM(params, graphdef, config), case)


def _header(path, arch: str, changes: dict, tensors=()) -> GGUFSource:
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
    config = config_from_gguf(_header(tmp_path / "h.gguf", arch, metadata, tensors))
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
        config_from_gguf(_header(tmp_path / "h.gguf", arch, metadata, tensors))


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
    got = GGUFSource(tmp_path / "q.gguf").get("x")
    assert got.shape == (3, 512)
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


def test_real_shapes():
    """Published configurations give the published parameter counts."""
    import math

    sizes = {
        ("qwen2", 1536, 8960, 28, 12, 2, 151936, True): 1_543_714_304,
        ("qwen2", 3584, 18944, 28, 28, 4, 152064, False): 7_615_616_512,
        ("llama", 4096, 11008, 32, 32, 32, 32000, False): 6_738_415_616,
        ("mistral", 4096, 14336, 32, 32, 8, 32000, False): 7_241_732_096,
    }
    names = "model_type hidden_size intermediate_size num_hidden_layers".split()
    names += "num_attention_heads num_key_value_heads vocab_size".split()
    names += ["tie_word_embeddings"]
    for values, count in sizes.items():
        config = from_huggingface(dict(zip(names, values, strict=True)))
        _, params = weights.abstract(config, jnp.bfloat16)
        leaves = [leaf for _, leaf in weights.paths(params)]
        assert sum(math.prod(leaf.shape) for leaf in leaves) == count


def test_config_file_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json"):
        read_config(tmp_path)


def test_a_model_is_shown_in_a_line():
    assert (
        repr(tiny_lm()) == "LM('tiny 0', llama, 2 layers, 35,104 parameters, float32)"
    )
