"""Every encoder family against Hugging Face eager, part by part, padding included."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tiny
import tiny_encoders
from jaxhal.models import kernels
from jaxhal.models.encoders import encoder
from jaxhal.models.encoders import layers as encoder_layers
from jaxhal.models.encoders import weights as encoder_weights
from jaxhal.models.encoders.config import (
    encoder_from_huggingface,
    read_encoder_config,
)
from jaxhal.models.feedforward import MLP

VALID = tiny_encoders.VALID


def load(folder, config, shapes, dtype=jnp.float32):
    tiny.write_folder(folder, config, shapes)
    ours = read_encoder_config(folder)
    return nnx.merge(*encoder_weights.load_encoder_weights(folder, ours, dtype))


@jax.jit
def _outputs(graphdef, params, tokens, types, valid):
    model = nnx.merge(graphdef, params)
    embedded = encoder.embed(model, tokens, types, valid)
    hidden = encoder.run(model, embedded, valid)
    # The norm at the end belongs to the last layer: one more shows the sum before it.
    count = model.config.num_hidden_layers
    some = (*range(1, count), count + 1)
    layers = [encoder.run(model, embedded, valid, layer) for layer in some]
    out = {"embeddings": embedded, "layers": jnp.stack(layers), "hidden": hidden}
    if model.head is not None:
        how, read = model.config.head_pooling, hidden
        if model.config.labelled == "texts" and how != "late":
            read = encoder.pool(hidden, valid, how)
        out["pooled"] = model.head.features(read)
        out["logits"] = encoder.logits(model, hidden, valid)
    return out


def outputs(model, tokens=None, types=tiny_encoders.TYPES, valid=VALID):
    if tokens is None:
        pad = 1 if model.config.family == "roberta" else 0
        tokens = tiny_encoders.tokens(pad)
    return _outputs(*nnx.split(model), tokens, types, valid)


def inside(model, monkeypatch):
    """What attention and perceptron of each layer give, before anything is added."""
    seen = {"attention": [], "mlp": []}
    for name, kind in (("attention", encoder_layers.SelfAttention), ("mlp", MLP)):

        def kept(module, *args, real=kind.__call__, rows=seen[name]):
            rows.append(real(module, *args))
            return rows[-1]

        monkeypatch.setattr(kind, "__call__", kept)
    tokens = tiny_encoders.tokens(1 if model.config.family == "roberta" else 0)
    valid = jnp.asarray(VALID)
    embedded = encoder.embed(
        model, jnp.asarray(tokens), jnp.asarray(tiny_encoders.TYPES), valid
    )
    with jax.disable_jit():  # each layer on its own
        encoder.run(model, embedded, valid)
    return {name: np.stack(rows) for name, rows in seen.items()}


def compare(ours: dict, theirs: dict, tolerance: float):
    assert set(ours) - {"hidden"} <= set(theirs)  # which classifiers do not return
    for name in set(ours) & set(theirs):
        got, want = np.asarray(ours[name], np.float32), theirs[name]
        if got.shape[-3:-1] == VALID.shape:
            got, want = got[..., VALID, :], want[..., VALID, :]
        assert got.shape == want.shape
        assert np.abs(got - want).max() < tolerance * np.abs(want).max(), name


@pytest.mark.parametrize("case", tiny_encoders.CASES)
def test_golden(case, tmp_path):
    want = tiny_encoders.golden(case)
    model = load(tmp_path, want["config"], want["shapes"])
    compare(outputs(model), want["outputs"], 1e-5)


@pytest.mark.parametrize("case", tiny_encoders.CASES)
def test_live(case, tmp_path):
    pytest.importorskip(
        "torch", reason="torch is not installed; golden values stand in"
    )
    import make_golden_encoder

    meta, want = make_golden_encoder.run(case)
    model = load(tmp_path, meta["config"], meta["shapes"])
    compare(outputs(model), want, 1e-5)


@pytest.mark.parametrize("case", tiny_encoders.CASES)
def test_attention_and_perceptrons(case, tmp_path, monkeypatch):
    want = tiny_encoders.golden(case)
    model = load(tmp_path, want["config"], want["shapes"])
    compare(inside(model, monkeypatch), want["outputs"], 1e-5)


@pytest.mark.parametrize("case", ["bert", "deberta-conv", "modernbert"])
def test_bfloat16(case, tmp_path):
    # Against float32, root mean square over root mean square: random weights in 8-bit
    # mantissas through all layers.
    want = tiny_encoders.golden(case)
    model = load(tmp_path, want["config"], want["shapes"], jnp.bfloat16)
    ours, theirs = outputs(model), want["outputs"]
    assert ours["hidden"].dtype == jnp.bfloat16
    assert ours["logits"].dtype == jnp.float32
    wrong = np.asarray(ours["logits"]) - theirs["logits"]
    assert np.linalg.norm(wrong) < 0.05 * np.linalg.norm(theirs["logits"])


@pytest.mark.parametrize(
    "case", ["roberta", "deberta-conv", "modernbert-biases", "eurobert", "t5-tokens"]
)
def test_padding_changes_nothing(case, tmp_path):
    want = tiny_encoders.golden(case)
    model = load(tmp_path, want["config"], want["shapes"])
    short = tiny_encoders.LENGTHS[1]
    row = slice(1, 2), slice(0, short)
    tokens = tiny_encoders.tokens(0)
    alone = outputs(model, tokens[row], tiny_encoders.TYPES[row], VALID[row])
    for filler in (0, 7):
        padded = outputs(model, np.where(VALID, tokens, filler))
        wrong = padded["logits"][1][:short] - alone["logits"][0]
        assert np.abs(wrong).max() < 2e-5 * np.abs(alone["logits"]).max()


@pytest.mark.parametrize("case", ["deberta-conv", "t5-tokens"])
def test_blocks_of_rows_change_nothing(case, tmp_path, monkeypatch):
    want = tiny_encoders.golden(case)
    model = load(tmp_path, want["config"], want["shapes"])
    small = dict.fromkeys(("plain", "tapped", "logits", "waiting"), 1)
    monkeypatch.setattr(kernels, "CPU", kernels.CPU._replace(**small))
    _outputs.clear_cache()
    compare(outputs(model), want["outputs"], 1e-5)
    _outputs.clear_cache()


@pytest.mark.parametrize(
    "buckets, longest, columns", [(256, 512, 512), (8, 40, 80), (32, 24, 20)]
)
def test_relative_rows_are_those_of_transformers(buckets, longest, columns):
    pytest.importorskip("torch", reason="torch is not installed")
    import torch
    from transformers.models.deberta_v2 import modeling_deberta_v2 as theirs

    config = encoder_from_huggingface(
        tiny_encoders.golden("deberta-v3")["config"]
        | dict(position_buckets=buckets, max_relative_positions=longest)
    )
    distance = torch.arange(1 - columns, columns)
    want = theirs.make_log_bucket_position(distance, buckets, longest)
    want = (want.long() + buckets).clamp(0, 2 * buckets - 1)
    ours = encoder_layers.relative_rows(config, columns)
    assert (ours == want.numpy()).all()
    assert len(set(ours.tolist())) > 10


@pytest.mark.parametrize(
    "buckets, longest, columns", [(32, 128, 700), (8, 10, 22), (10, 64, 70)]
)
def test_bias_rows_are_those_of_transformers(buckets, longest, columns):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from transformers.models.t5.modeling_t5 import T5Attention

    sizes = {
        "relative_attention_num_buckets": buckets,
        "relative_attention_max_distance": longest,
    }
    raw = tiny_encoders.golden("t5-tokens")["config"]
    config = encoder_from_huggingface(raw | sizes)
    distance = torch.arange(1 - columns, columns)
    want = T5Attention._relative_position_bucket(distance, True, buckets, longest)
    assert encoder_layers.bias_rows(config, columns).tolist() == want.tolist()


def test_relative_rows_by_hand():
    config = encoder_from_huggingface(tiny_encoders.golden("deberta-v3")["config"])
    # 8 buckets on either side, 40 positions: up to distance 4 one row each, then rows
    # 4 + ceil(3 log(d / 4) / log(39 / 4)), from 8 on the left end.
    rows = encoder_layers.relative_rows(config, 13)
    far = [4 + math.ceil(3 * math.log(d / 4) / math.log(39 / 4)) for d in range(5, 13)]
    want = [0, 1, 2, 3, 4, *far]
    assert rows[12:].tolist() == [8 + bucket for bucket in want]
    assert rows[12::-1].tolist() == [8 - bucket for bucket in want]


_T5 = {"model_type": "t5", "feed_forward_proj": "gated-gelu"}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "brt"}, "unknown architecture 'brt'; did you mean 'bert'"),
        ({"hidden_act": "mish"}, "hidden_act is mish; known: silu"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is rel"),
        ({"is_decoder": True}, "is_decoder is True; only is_decoder=False is"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"intermediate_size": None}, "lacks intermediate_size"),
        ({"hidden_size": 30}, "heads is 4; give a divisor of 30, the width"),
        ({"problem_type": "regression"}, "problem_type is regression"),
        ({"id2label": {"0": "score"}}, "num_labels=1 gives no probabilities"),
        ({"model_type": "deberta-v2", "num_attention_heads": 64}, "heads is 64"),
        ({"model_type": "deberta-v2", "pos_att_type": "p2p"}, "pos_att_type="),
        ({"model_type": "deberta-v2", "conv_kernel_size": 4}, "conv_kernel_size=4"),
        ({"model_type": "deberta-v2", "position_buckets": 80}, "position_buckets=80"),
        ({"model_type": "deberta-v2", "embedding_size": 8}, "embedding_size is 8"),
        (
            {"model_type": "deberta-v2", "pooler_hidden_act": "mish"},
            "pooler_hidden_act",
        ),
        ({"model_type": "modernbert", "rope_scaling": {"factor": 2}}, "rope_scaling"),
        ({"model_type": "modernbert", "local_attention": 1}, "local_attention"),
        ({"model_type": "modernbert", "classifier_pooling": "max"}, "classifier_pool"),
        ({"model_type": "eurobert", "clf_pooling": "max"}, "clf_pooling is max"),
        ({"model_type": "eurobert", "num_key_value_heads": 3}, "give a divisor of"),
        (_T5 | {"feed_forward_proj": "relu"}, "proj is relu; known: gated-gelu"),
        (_T5 | {"feed_forward_proj": None}, "lacks feed_forward_proj"),
        (_T5 | {"relative_attention_num_buckets": 2}, "buckets is 2; give a whole"),
        (_T5 | {"relative_attention_max_distance": 2}, "distance is 2; give a whole"),
        (_T5 | {"architectures": ["T5ForSequenceClassification"]}, "decoder is not"),
        (_T5, "lacks num_layers"),
    ],
)
def test_settings_that_are_not_computed(change, message):
    raw = tiny_encoders.golden("bert")["config"] | change
    with pytest.raises(ValueError, match=message):
        encoder_from_huggingface(raw)


@pytest.mark.parametrize("case", ["bert", "roberta", "deberta-conv", "modernbert"])
def test_settings_of_other_families_say_nothing(case):
    raw = tiny_encoders.golden(case)["config"]
    stray = {"head_dim": 6, "num_key_value_heads": 3, "rms_norm_eps": 0.5}
    if case == "modernbert":
        stray["hidden_act"] = "relu6"
    assert encoder_from_huggingface(raw | stray) == encoder_from_huggingface(raw)


def test_labels_and_lengths(tmp_path):
    raw = tiny_encoders.golden("bert")["config"]
    named = {"1": "neutral", "0": "entailment", "2": "contradiction"}
    config = encoder_from_huggingface(raw | {"id2label": named})
    assert config.labels == ("entailment", "neutral", "contradiction")
    assert hash(config) == hash(dataclasses.replace(config))
    roberta = encoder_from_huggingface(tiny_encoders.golden("roberta")["config"])
    assert (roberta.context_length, roberta.position_offset) == (38, 2)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_encoder_config(tmp_path).context_length == 40
    sentence = tmp_path / "sentence_bert_config.json"
    sentence.write_text('{"max_seq_length": 16}')
    assert read_encoder_config(tmp_path).context_length == 16
    sentence.write_text('{"max_seq_length": 99}')
    assert read_encoder_config(tmp_path).context_length == 40
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not valid JSON"):
        read_encoder_config(tmp_path)
    with pytest.raises(FileNotFoundError, match="config.json does not exist"):
        read_encoder_config(tmp_path / "nowhere")


def test_what_a_classifier_labels():
    raw = tiny_encoders.golden("eurobert-tokens")["config"]
    config = encoder_from_huggingface(raw)
    assert (config.labelled, config.labels) == ("tokens", ("LABEL_0", "LABEL_1"))
    # As the code that came with the first checkpoints spells it.
    old = encoder_from_huggingface(
        tiny_encoders.golden("eurobert")["config"] | {"clf_pooling": "bos"}
    )
    assert (old.labelled, old.head_pooling) == ("texts", "cls")


def test_weights_that_do_not_fit(tmp_path):
    want = tiny_encoders.golden("bert")
    shapes = dict(want["shapes"])
    shapes["extra.weight"] = [3]
    shapes["classifier.bias"] = [4]
    del shapes["bert.pooler.dense.bias"]
    with pytest.raises(ValueError) as error:
        load(tmp_path, want["config"], shapes)
    for part in (
        "pooler.dense.bias is missing",
        "classifier.bias has shape [4]",
        "extra.weight is stored but unknown to bert",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "case, lost, name",
    [
        ("modernbert-tokens", "head.norm.weight", "head.norm.weight"),
        ("modernbert-tokens", "model.final_norm.weight", "layers.2.attn_norm.weight"),
        ("eurobert-tokens", "model.norm.weight", "layers.1.input_layernorm.weight"),
        ("eurobert-tokens", "classifier.bias", "classifier.bias"),
        ("deberta-tokens", "classifier.weight", "classifier.weight"),
        ("t5-tokens", "transformer.shared.weight", "shared.weight"),
    ],
)
def test_weights_that_are_missing(case, lost, name, tmp_path):
    want = tiny_encoders.golden(case)
    shapes = {key: shape for key, shape in want["shapes"].items() if key != lost}
    with pytest.raises(ValueError, match=rf"{name} is missing"):
        load(tmp_path, want["config"], shapes)


def test_other_spellings_of_names(tmp_path):
    """Old norms, no prefix, and what another head stored."""
    want = tiny_encoders.golden("bert-headless")
    whole = load(tmp_path / "a", want["config"], want["shapes"])
    from safetensors.numpy import load_file, save_file

    state = load_file(tmp_path / "a" / "model.safetensors")
    old = {
        "bert."
        + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): value
        for name, value in state.items()
    }
    old |= {"cls.predictions.bias": np.zeros(3, np.float32)}
    old |= {"bert.embeddings.position_ids": np.arange(40)[None]}
    save_file(old, tmp_path / "a" / "model.safetensors")
    config = read_encoder_config(tmp_path / "a")
    again = nnx.merge(
        *encoder_weights.load_encoder_weights(tmp_path / "a", config, jnp.float32)
    )
    same = jax.tree.map(
        lambda a, b: bool((a == b).all()), nnx.state(whole), nnx.state(again)
    )
    assert all(jax.tree.leaves(same))
