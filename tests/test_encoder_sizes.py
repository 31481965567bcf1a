"""Published encoders by their shapes alone: sizes, keys, and what each is turned to."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import tiny_encoders
from jaxhal.models import weights
from jaxhal.models.encoders import encoder
from jaxhal.models.encoders import weights as encoder_weights
from jaxhal.models.encoders.config import encoder_from_huggingface
from jaxhal.models.parameter import Parameter

_BIG = {
    "roberta-large-mnli": (
        "roberta",
        tiny_encoders.TEXTS,
        dict(
            vocab_size=50265,
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=24,
            num_attention_heads=16,
            max_position_embeddings=514,
            type_vocab_size=1,
            pad_token_id=1,
            num_labels=3,
        ),
    ),
    "deberta-v2-xlarge-mnli": (
        "deberta-v2",
        tiny_encoders.TEXTS,
        dict(
            vocab_size=128100,
            hidden_size=1536,
            intermediate_size=6144,
            num_hidden_layers=24,
            num_attention_heads=24,
            attention_head_size=64,
            relative_attention=True,
            position_buckets=256,
            norm_rel_ebd="layer_norm",
            share_att_key=True,
            pos_att_type="p2c|c2p",
            position_biased_input=False,
            conv_kernel_size=3,
            conv_act="gelu",
            type_vocab_size=0,
            num_labels=3,
        ),
    ),
    "deberta-v3-large-mnli": (
        "deberta-v2",
        tiny_encoders.TEXTS,
        dict(
            vocab_size=128100,
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=24,
            num_attention_heads=16,
            relative_attention=True,
            position_buckets=256,
            norm_rel_ebd="layer_norm",
            share_att_key=True,
            pos_att_type="p2c|c2p",
            position_biased_input=False,
            type_vocab_size=0,
            num_labels=2,
        ),
    ),
    "m3e-base": (
        "bert",
        tiny_encoders.PLAIN,
        dict(
            vocab_size=21128,
            hidden_size=768,
            intermediate_size=3072,
            num_hidden_layers=12,
            num_attention_heads=12,
            type_vocab_size=2,
        ),
    ),
    "modernbert-large": (
        "modernbert",
        tiny_encoders.TEXTS,
        dict(
            vocab_size=50368,
            hidden_size=1024,
            intermediate_size=2624,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_labels=3,
        ),
    ),
    "lettucedect-base-modernbert-en-v1": (
        "modernbert",
        tiny_encoders.TOKENS,
        dict(
            vocab_size=50368,
            hidden_size=768,
            intermediate_size=1152,
            num_hidden_layers=22,
            num_attention_heads=12,
        ),
    ),
    "lettucedect-210m-eurobert-de-v1": (
        "eurobert",
        tiny_encoders.TOKENS,
        dict(
            vocab_size=128256,
            hidden_size=768,
            intermediate_size=3072,
            num_hidden_layers=12,
            num_attention_heads=12,
        ),
    ),
    "mmbert-base": (
        "modernbert",
        tiny_encoders.TOKENS,
        dict(
            vocab_size=256000,
            hidden_size=768,
            intermediate_size=1152,
            num_hidden_layers=22,
            num_attention_heads=12,
            global_rope_theta=160000,
            local_rope_theta=160000,
        ),
    ),
    "hallucination_evaluation_model": (
        "t5",
        tiny_encoders.TOKENS,
        dict(
            vocab_size=32128,
            d_model=768,
            d_ff=2048,
            num_layers=12,
            num_heads=12,
            feed_forward_proj="gated-gelu",
        ),
    ),
}
# Parameters as transformers counts them; without the pooler that nothing here reads.
_COUNTS = {
    "roberta-large-mnli": 355_362_819,
    "deberta-v2-xlarge-mnli": 886_958_595,
    "deberta-v3-large-mnli": 435_063_810,
    "m3e-base": 101_677_056,
    "modernbert-large": 395_834_371,
    "lettucedect-base-modernbert-en-v1": 149_606_402,
    "lettucedect-210m-eurobert-de-v1": 211_767_554,
    "mmbert-base": 307_531_778,
    "hallucination_evaluation_model": 109_630_082,
}


def _abstract(name):
    family, kind, settings = _BIG[name]
    raw = {"model_type": family, "architectures": [kind], **settings}
    config = encoder_from_huggingface(raw)
    _, shapes = weights.abstract(config, jnp.float32, encoder.Encoder)
    return config, weights.paths(shapes)


@pytest.mark.parametrize("name", _BIG)
def test_size_of_real_models(name):
    total = sum(math.prod(leaf.shape) for _, leaf in _abstract(name)[1])
    assert total == _COUNTS[name]


@pytest.mark.parametrize("name", _BIG)
def test_keys_and_shapes_of_real_models(name):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import make_golden_encoder

    with torch.device("meta"):
        state = make_golden_encoder.build(*_BIG[name]).state_dict()
    config, ours = _abstract(name)
    table = encoder_weights.encoder_table(config)
    stored = {
        encoder_weights.plain_name(name, config): tuple(tensor.shape)
        for name, tensor in state.items()
    }
    used = set()
    for path, leaf in ours:
        one = Parameter(path, leaf, table[path])
        shape = leaf.shape[one.lead :]
        for key in one.names:
            zeros = np.broadcast_to(np.float32(0), stored[key])
            assert table[path].turn(zeros, config).shape == shape, key
            used.add(key)
    unread = (
        {"pooler.dense.weight", "pooler.dense.bias"} if name == "m3e-base" else set()
    )
    assert set(stored) - used == unread
