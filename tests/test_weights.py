"""Checkpoints of every kind, whole and broken."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

import tiny
from jaxhal.models import weights
from jaxhal.models.families import from_huggingface, read_config
from jaxhal.models.lm import load
from jaxhal.models.settings import Settings
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


def test_other_weights_beside_the_model(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {"layers.0.attention.wq.weight": tensors["model.norm.weight"]},
        folder / "consolidated.safetensors",
    )
    other = {name: 2 * x for name, x in tensors.items()}
    save_file(other, folder / "model_old.safetensors")
    _close(load(folder), "llama-gqa")
    (folder / "model.safetensors").rename(folder / "mine.safetensors")
    with pytest.raises(ValueError, match="model_old.* holds .*, and so does another"):
        load(folder)


def test_headless_and_wrapped_names(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({f"language_model.{name}": x for name, x in tensors.items()}, path)
    _close(load(folder), "llama-gqa")
    save_file({name.removeprefix("model."): x for name, x in tensors.items()}, path)
    _close(load(folder), "llama-gqa")


def test_what_text_does_not_need_is_named(folder, capsys):
    tensors = load_file(folder / "model.safetensors")
    parts = "model.vision_tower.a", "model.vision_tower.b", "mtp.norm"
    save_file(tensors | dict.fromkeys(parts, np.ones(3)), folder / "model.safetensors")
    _close(load(folder), "llama-gqa")
    said = "not loaded, as text needs none of it: vision_tower (2), mtp (1)\n"
    assert capsys.readouterr().err.endswith(said)


def test_code_of_a_model_is_never_run(folder):
    about = json.loads((folder / "config.json").read_text())
    about |= {"model_type": "mine", "auto_map": {"AutoConfig": "own.Config"}}
    (folder / "config.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match="'mine'.*code that comes with .* never run"):
        load(folder)


def test_a_quantised_folder_is_refused_before_its_weights(folder):
    about = json.loads((folder / "config.json").read_text())
    about |= {"quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps(about))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="quant_method is fp8; give .* 16 or 32 bits"):
        load(folder)


@pytest.mark.parametrize("weights", ["dequantised", "int8"])
def test_numbers_of_eight_bits_are_refused(folder, weights):
    """Whether or not the settings say that there are any."""
    path, name = folder / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    about = json.loads(data[8:begin])
    rows, columns = about[name]["shape"]
    about[name] |= {"dtype": "F8_E4M3", "shape": [rows, 4 * columns]}
    text = json.dumps(about).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[begin:])
    with pytest.raises(ValueError, match=f"{name} is stored as F8_E4M3; give .* 16 or"):
        load(folder, weights=weights)


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
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope["partial_rotary_factor"]
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


def test_caps_may_be_left_out_turned_off_or_given(tmp_path):
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
        (tmp_path / "config.json").write_text(json.dumps(bare | given))
        assert read_config(tmp_path) == found


def test_a_copy_of_settings_knows_what_is_null():
    """Configurations of encoders, too, are read through copies."""
    copied = Settings(Settings({"cap": None, "size": 2}, "a"), "b")
    assert copied.filled({"cap": 3.0, "size": 3, "width": 4}) == {"size": 2, "width": 4}


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


_NAMES = "model_type hidden_size intermediate_size num_hidden_layers"
_NAMES += " num_attention_heads num_key_value_heads vocab_size tie_word_embeddings"
_SPARSE = {"head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128}


@pytest.mark.parametrize(
    ("settings", "more", "count"),
    [
        (("qwen2", 1536, 8960, 28, 12, 2, 151936, True), {}, 1_543_714_304),
        (("qwen2", 3584, 18944, 28, 28, 4, 152064, False), {}, 7_615_616_512),
        (("llama", 4096, 11008, 32, 32, 32, 32000, False), {}, 6_738_415_616),
        (("mistral", 4096, 14336, 32, 32, 8, 32000, False), {}, 7_241_732_096),
        (("gemma2", 2304, 9216, 26, 8, 4, 256000, True), {}, 2_614_341_888),
        (("phi3", 5120, 17920, 40, 40, 10, 100352, False), {}, 14_659_507_200),
        (("smollm3", 2048, 11008, 36, 16, 4, 128256, True), {}, 3_075_098_624),
        (("olmo2", 4096, 11008, 32, 32, 32, 100352, False), {}, 7_298_617_344),
        (("glm4", 4096, 13696, 40, 32, 2, 151552, False), {}, 9_400_279_040),
        (("granite", 4096, 12800, 40, 32, 8, 49155, True), {}, 8_170_848_256),
        (("mixtral", 4096, 14336, 32, 32, 8, 32000, False), {}, 46_702_792_704),
        (("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, False), _SPARSE, 30_532_122_624),
    ],
)
def test_real_shapes(settings, more, count):
    """Published configurations give the published parameter counts."""
    config = from_huggingface(dict(zip(_NAMES.split(), settings, strict=True)) | more)
    _, params = weights.abstract(config, jnp.bfloat16)
    assert sum(math.prod(leaf.shape) for _, leaf in weights.paths(params)) == count


def test_config_file_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json"):
        read_config(tmp_path)


def test_a_model_is_shown_in_a_line():
    assert (
        repr(tiny_lm()) == "LM('tiny 0', llama, 2 layers, 35,104 parameters, float32)"
    )
