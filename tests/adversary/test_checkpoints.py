"""Hostile or broken checkpoints end in one line that names file, key and remedy."""

import json
import os
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxhal
import tiny_encoders
from gguf_files import write_gguf
from jaxhal.models import families, weights
from jaxhal.models.encoders.config import read_encoder_config
from jaxhal.models.gguf import GGUFSource
from jaxhal.models.gguf_config import config_from_gguf
from jaxhal.models.lm import load
from jaxhal.models.tokenizer import Tokenizer
from jaxhal.types import Example
from tiny_lm import write_lm

HUGE = 10**18
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
NO_SIZE = (0, -1, True, "12", 2.5, [2], {"a": 2}, HUGE, -HUGE, 1e308, float("nan"))
NO_NUMBER = (0, -1.0, True, "1e-5", [], float("nan"), float("inf"), 10**400)
BAD = [
    *((name, value) for name in SIZES for value in NO_SIZE),
    *(("rms_norm_eps", value) for value in NO_NUMBER),
    *(("rope_theta", value) for value in (*NO_NUMBER, 1)),
    ("head_dim", 0),
    ("head_dim", 7),
    ("head_dim", HUGE),
    ("num_attention_heads", 5),
    ("num_key_value_heads", 3),
    ("hidden_act", "relu6"),
    ("hidden_act", ["silu"]),
    ("hidden_act", 3),
    ("attention_bias", 1),
    ("mlp_bias", "no"),
    ("tie_word_embeddings", "false"),
    ("rope_scaling", "linear"),
    ("rope_scaling", [2.0]),
    ("rope_scaling", {"rope_type": "linear"}),
    ("rope_scaling", {"rope_type": ["linear"], "factor": 2.0}),
    ("rope_scaling", {"rope_type": "linear", "factor": 0}),
    ("rope_scaling", {"rope_type": "linear", "factor": "two"}),
    ("rope_scaling", {"rope_type": "linear", "factor": float("nan")}),
    ("rope_scaling", {"rope_type": "yarn", "factor": 2.0, "beta_fast": 0}),
    (
        "rope_scaling",
        {
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": HUGE,
        },
    ),
    ("rope_scaling", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0}),
    ("model_type", 3),
    ("model_type", ["llama"]),
    ("model_type", {"llama": 1}),
]


def missing(key):
    return {key: None}


def one_line(caught, *named):
    message = str(caught.value)
    assert "\n" not in message and len(message) < 700, message
    for each in named:
        assert each in message, (each, message)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_lm(tmp_path_factory.mktemp("lm") / "model")


@pytest.fixture
def folder(checkpoint, tmp_path):
    """A copy whose weights are links within, so that nothing large is written."""
    made = tmp_path / "model"
    made.mkdir()
    for path in checkpoint.iterdir():
        (made / path.name).write_bytes(path.read_bytes())
    return made


def change(path: Path, **keys):
    raw = json.loads(path.read_text("utf-8")) | keys
    path.write_text(json.dumps(raw), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("key", "value"), BAD, ids=lambda each: str(each)[:40].replace("/", "")
)
def test_bad_settings(folder, key, value, monkeypatch):
    path = change(folder / "config.json", **{key: value})
    monkeypatch.setattr(weights.np, "empty", None)  # nothing is allocated
    with pytest.raises(ValueError) as caught:
        load(folder)
    named = (key, "architecture") + (tuple(value) if isinstance(value, dict) else ())
    one_line(caught, str(path))
    assert any(each in str(caught.value) for each in named)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_attention_heads"])
def test_missing_settings(folder, key):
    path = change(folder / "config.json", **missing(key))
    with pytest.raises(ValueError) as caught:
        load(folder)
    one_line(caught, f"{path}: lacks {key}; give a whole number")


@pytest.mark.parametrize(
    "text", ["[]", "3", '"a"', "null", "{", "[" * 100_000, '{"a": ' + "9" * 5000 + "}"]
)
def test_what_is_no_object(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError) as caught:
        load(folder)
    one_line(caught, str(folder / "config.json"))
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ValueError) as caught:
        Tokenizer.from_folder(folder)
    one_line(caught, str(folder / "generation_config.json"))


@pytest.mark.parametrize(
    "sizes",
    [
        {"vocab_size": 1 << 24},
        {"hidden_size": 1 << 16, "num_attention_heads": 4},
        {"intermediate_size": 1 << 22},
        {"num_hidden_layers": 4000},
    ],
)
def test_more_than_the_weights_hold_is_refused_before_it_is_taken(
    folder, sizes, monkeypatch
):
    change(folder / "config.json", **sizes)
    monkeypatch.setattr(weights.np, "empty", None)
    with pytest.raises(ValueError) as caught:
        load(folder)
    one_line(caught, str(folder), "numbers and its weights hold", next(iter(sizes)))


# --- weights ------------------------------------------------------------------------


def sharded(folder, shard):
    (folder / "model.safetensors").rename(folder.parent / "one.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": shard}}))


@pytest.mark.parametrize(
    "shard", ["../one.safetensors", "{}/one.safetensors", "a/../../one.safetensors", 3]
)
def test_shards_elsewhere(folder, shard):
    sharded(folder, shard.format(folder.parent) if isinstance(shard, str) else shard)
    with pytest.raises(ValueError) as caught:
        load(folder)
    one_line(caught, "index.json: weight_map: lm_head.weight is", "give the name of")


def test_links_to_elsewhere(folder):
    sharded(folder, "one.safetensors")
    (folder / "one.safetensors").symlink_to(folder.parent / "one.safetensors")
    with pytest.raises(ValueError) as caught:
        load(folder)
    one_line(caught, "is one.safetensors; it is a link out of", "put the file itself")


def test_links_of_the_hub(folder):
    """A snapshot holds links into the blobs beside it."""
    blobs, snapshot = folder.parent / "blobs", folder.parent / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for path in list(folder.iterdir()):
        path.rename(blobs / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    stored = load_file(snapshot / "model.safetensors")
    index = {"weight_map": dict.fromkeys(stored, "model.safetensors")}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load(snapshot).config.vocab_size == 258


@pytest.mark.parametrize("index", [[], {"weight_map": []}, {"weight_map": "a"}])
def test_an_index_that_is_none(folder, index):
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError) as caught:
        load(folder)
    one_line(caught, "model.safetensors.index.json", "give a JSON object")


@pytest.mark.parametrize("value", [np.nan, np.inf, 3.4e38])
def test_weights_that_are_no_numbers(folder, value):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][3] = value
    save_file(tensors, path)
    with pytest.raises(ValueError) as caught:
        load(folder, dtype="bfloat16")
    one_line(caught, "model.norm.weight holds NaN or infinite values")


# --- tokenizers ---------------------------------------------------------------------


def test_a_vocabulary_larger_than_the_model(folder):
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text("utf-8"))
    raw["model"]["vocab"]["beyond"] = 258
    path.write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(ValueError) as caught:
        load(folder)
    one_line(caught, str(folder), "a token 258", "below 258", "download both")


@pytest.mark.parametrize(
    ("ends", "message"),
    [(ends, "the model knows those below 258") for ends in (999, -1, [2, 258], HUGE)]
    + [(ends, "eos_token_id is ") for ends in ("a", True, [[1]], {"a": 1}, 2.5)],
)
def test_ends_beyond_the_model(folder, ends, message):
    raw = json.dumps({"eos_token_id": ends})
    (folder / "generation_config.json").write_text(raw)
    with pytest.raises(ValueError) as caught:
        load(folder)
    one_line(caught, str(folder), message)


def test_roles_beyond_the_model(folder):
    change(folder / "tokenizer_config.json", pad_token="<made up>")
    with pytest.raises(ValueError) as caught:
        load(folder)
    one_line(caught, str(folder), "a token 258")


def test_added_tokens_beyond_the_model(folder):
    """Published checkpoints have one, for images; a text with it is an error."""
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text("utf-8"))
    plain = {"single_word": False, "lstrip": False, "rstrip": False}
    raw["added_tokens"].append(
        {"id": 258, "content": "picture", "special": False, "normalized": False} | plain
    )
    path.write_text(json.dumps(raw), encoding="utf-8")
    lm = load(folder)
    finished = Example("yes", prompt="A picture.", templated=True)
    lm.encode([Example("yes", prompt="A pict.")])
    with pytest.raises(ValueError, match="token picture, number 258.*leave it out"):
        lm.encode([finished])


# --- encoders -----------------------------------------------------------------------

ENCODERS = [
    *(
        ("bert", name, value)
        for name in (*SIZES[:5], SIZES[6])
        for value in (0, "12", True, HUGE, float("nan"), [1])
    ),
    ("bert", "type_vocab_size", -1),
    ("bert", "layer_norm_eps", "small"),
    ("bert", "hidden_act", ["gelu"]),
    ("bert", "architectures", "BertForSequenceClassification"),
    ("roberta", "pad_token_id", -2),
    ("roberta", "pad_token_id", 10**6),
    ("roberta", "max_position_embeddings", 1),
    ("deberta-v3", "pos_att_type", 3),
    ("deberta-v3", "pos_att_type", ["c2p", ["p2c"]]),
    ("deberta-v3", "pos_att_type", ["c2p", "c2p"]),
    ("deberta-v3", "max_relative_positions", "many"),
    ("deberta-v3", "position_buckets", float("nan")),
    ("deberta-v3", "conv_kernel_size", -3),
    ("deberta-v3", "relative_attention", "yes"),
    ("modernbert", "global_attn_every_n_layers", 0),
    ("modernbert", "layer_types", ["full_attention"]),
    ("modernbert", "layer_types", "full_attention"),
    ("modernbert", "local_attention", 1),
    ("modernbert", "rope_parameters", {"full_attention": 3}),
    ("modernbert", "classifier_pooling", ["cls"]),
    ("modernbert", "norm_eps", -1),
    ("modernbert", "model_type", {}),
    ("t5-tokens", "feed_forward_proj", ["gated-gelu"]),
    ("t5-tokens", "relative_attention_num_buckets", HUGE),
    ("t5-tokens", "relative_attention_max_distance", 0),
    ("t5-tokens", "d_kv", "64"),
    ("t5-tokens", "architectures", 3),
]


@pytest.mark.parametrize(
    ("case", "key", "value"), ENCODERS, ids=lambda each: str(each)[:40]
)
def test_bad_settings_of_encoders(tmp_path, case, key, value):
    raw = {**tiny_encoders.golden(case)["config"], key: value}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(ValueError) as caught:
        read_encoder_config(tmp_path)
    one_line(caught, str(path))


@pytest.mark.parametrize(
    "keys",
    [
        {"num_labels": HUGE},
        {"id2label": ["a", "b"]},
        {"id2label": {"zero": "a", "one": "b"}},
        {"id2label": {"0": "a", "7": "b"}},
    ],
)
def test_bad_labels(tmp_path, keys):
    raw = tiny_encoders.golden("bert")["config"]
    raw = raw | {"architectures": ["BertForSequenceClassification"], "id2label": None}
    (tmp_path / "config.json").write_text(json.dumps(raw | keys))
    with pytest.raises(ValueError) as caught:
        read_encoder_config(tmp_path)
    one_line(caught, str(tmp_path / "config.json"))


@pytest.mark.parametrize("length", [0, -3, "many", HUGE, True])
def test_bad_lengths_of_sentence_encoders(tmp_path, length):
    raw = tiny_encoders.golden("bert")["config"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    path = tmp_path / "sentence_bert_config.json"
    path.write_text(json.dumps({"max_seq_length": length}))
    with pytest.raises(ValueError) as caught:
        read_encoder_config(tmp_path)
    one_line(caught, f"{path}: max_seq_length is")


# --- GGUF ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", "llama-gqa")


@pytest.mark.parametrize("value", [0, 3, (1 << 32) - 1, 0x7FC00000])
@pytest.mark.parametrize(
    "key",
    [
        "block_count",
        "embedding_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "feed_forward_length",
        "attention.layer_norm_rms_epsilon",
        "rope.freq_base",
    ],
)
def test_absurd_metadata(tiny_gguf, tmp_path, key, value, monkeypatch):
    """Other bits in the place of a number: none, three, most, and not a number."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(tiny_gguf.read_bytes())
    reader = gguf.GGUFReader(path, "r+")
    field = reader.get_field(f"llama.{key}")
    assert field is not None
    before = field.parts[field.data[0]].view(np.uint32)[0]
    field.parts[field.data[0]].view(np.uint32)[0] = value
    reader.data.flush()
    if before == value:
        pytest.skip("it is that number")
    monkeypatch.setenv("JAXHAL_CACHE", str(tmp_path / "cache"))
    source = GGUFSource(path)
    with pytest.raises(ValueError) as caught:
        config = config_from_gguf(source)
        weights.fill(config, source, families.huggingface_table(config), np.float32)
    one_line(caught, str(path))


def test_random_bytes_in_the_metadata(tiny_gguf, tmp_path):
    """Whatever the bytes, a configuration or a ValueError; ROUNDS=1500 takes longer."""
    whole = tiny_gguf.read_bytes()
    draw = np.random.default_rng(0)
    path = tmp_path / "bad.gguf"
    for _ in range(int(os.environ.get("ROUNDS", "60"))):
        data = bytearray(whole)
        for _ in range(draw.integers(1, 4)):
            data[draw.integers(0, 1500)] = draw.integers(0, 256)
        path.write_bytes(data)
        try:
            config_from_gguf(GGUFSource(path))
        except ValueError as error:
            assert str(path) in str(error) or "GGUF" in str(error), error


def test_the_public_load_names_it_too(folder):
    change(folder / "config.json", vocab_size="many")
    with pytest.raises(ValueError, match="config.json: vocab_size is many; give a wh"):
        jaxhal.load(folder)
