"""GGUF files of Qwen3.5 and Gemma 4, whose layers have attention of several kinds.

And that blocks of all families stay as a file has them.
"""

import jax.numpy as jnp
import numpy as np
import pytest
import test_parity
import thorough
from test_gguf import header
from test_quantized import check_outline

import tiny
from gguf_files import convert
from jaxhal.models import quantized, weights
from jaxhal.models.config import Delta
from jaxhal.models.gguf import GGUFSource
from jaxhal.models.gguf_config import config_from_gguf
from jaxhal.models.gguf_families import gguf_table
from jaxhal.models.lm import LM
from jaxhal.reading.keys import fingerprint


def four_values_a_key() -> tuple[dict, dict]:
    """Settings and shapes; with as many values as keys orders are told apart less."""
    want = tiny.golden("qwen3.5-gqa")
    sizes = dict(in_proj_qkv=128, conv1d=128, in_proj_z=64)
    sizes |= dict.fromkeys(("in_proj_a", "in_proj_b", "A_log", "dt_bias"), 8)

    def shape(name: str, shape: list[int]) -> list[int]:
        part = name.removesuffix(".weight").split(".")[-1]
        if part == "out_proj":
            return [32, 64]
        return [sizes.get(part, shape[0]), *shape[1:]]

    shapes = {name: shape(name, own) for name, own in want["shapes"].items()}
    return want["config"] | {"linear_num_value_heads": 8}, shapes


def read_in(source: GGUFSource, packed: str = "") -> LM:
    config = config_from_gguf(source)
    table = gguf_table(config)
    graphdef, params = weights.fill(config, source, table, jnp.float32, packed=packed)
    return LM(params, graphdef, config)


def test_value_heads_of_a_file_are_those_of_a_folder(tmp_path):
    raw, shapes = four_values_a_key()
    whole = test_parity.load(tmp_path / "folder", raw, shapes)
    ours = read_in(GGUFSource(convert(tmp_path / "tiny.gguf", raw, shapes)))
    tokens = tiny.TOKENS
    assert test_parity.error(ours.forward(tokens), whole.forward(tokens)) < 1e-5


_MIXERS = [
    ("qwen3.5-gqa", False),
    ("gemma4-borrowing", False),
    ("gemma4-experts", True),
    ("qwen3.5moe-gqa", False),
    ("qwen3.5moe-gqa", True),
]
# What these compute with blocks is shown of folders; a file only has other names.
_OTHERS = [
    *(case for case in tiny.IN_FILES if (case, False) not in _MIXERS),
    *("llama-biases", "qwen2-gqa", "qwen3-gqa", "falcon-40b", "olmo3-yarn"),
]


@pytest.mark.shows("blocks")
@pytest.mark.parametrize(
    ("case", "whole"), [*_MIXERS, *thorough.more(*((case, False) for case in _OTHERS))]
)
def test_blocks_of_a_file_stay(case, whole, tmp_path):
    """Gates of experts, and what they let through, may be one tensor."""
    computed = case not in _OTHERS
    if case == "qwen3.5-gqa":
        raw, shapes = four_values_a_key()
    else:
        want = tiny.golden(case)
        raw, shapes = want["config"], want["shapes"]
    path = convert(tmp_path / "tiny.gguf", raw, shapes, "Q8_0", whole=whole)
    source = GGUFSource(path)
    kept, whole = read_in(source, "stored"), read_in(source)
    check_outline(kept, source, gguf_table(kept.config), "stored")
    matrices, numbers = (".kernel", ".embedding"), ("router.kernel", ".gate.kernel")
    for (name, leaf), (_, want) in zip(
        weights.paths(kept.params), weights.paths(whole.params), strict=True
    ):
        rows = leaf.shape[-2] if name.endswith(".kernel") else leaf.shape[-1]
        matrix = name.endswith(matrices) and not name.endswith(numbers)
        assert quantized.is_stored(leaf) == (matrix and rows % 32 == 0)
        if quantized.is_stored(leaf):
            leaf = np.stack([*leaf.each()]).reshape(leaf.shape)
        np.testing.assert_array_equal(leaf, want)
    tokens = tiny.TOKENS
    if computed:
        assert test_parity.error(kept.forward(tokens), whole.forward(tokens)) < 1e-4


def test_gates_of_the_wrong_shape_are_named(tmp_path):
    want = tiny.golden("qwen3.5moe-gqa")
    raw, shapes = want["config"], want["shapes"]
    source = GGUFSource(convert(tmp_path / "tiny.gguf", raw, shapes, whole=True))
    plain = source.get
    source.get = lambda name: np.ones(4) if "gate_up" in name else plain(name)
    config = config_from_gguf(source)
    message = r"ffn_gate_up_exps.weight has shape \[4\], which does not give blocks.mlp"
    with pytest.raises(ValueError, match=message):
        weights.fill(config, source, gguf_table(config), jnp.float32)


@pytest.mark.parametrize(
    ("case", "beside"),
    [
        ("qwen3.5-gqa", ["blk.6.nextn.eh_proj.weight", "blk.6.attn_q.weight"]),
        (
            "gemma4-borrowing",
            [f"blk.7.{one}.weight" for one in ("attn_k", "attn_k_norm", "attn_v")],
        ),
    ],
)
def test_what_is_not_computed_with_is_left_out(case, beside, tmp_path, capsys):
    """Layers that guess further tokens, and keys of layers that borrow others."""
    want = tiny.golden(case)
    raw, shapes = want["config"], want["shapes"]
    found = [
        read_in(GGUFSource(convert(tmp_path / f"{at}.gguf", raw, shapes, beside=more)))
        for at, more in enumerate(([], beside))
    ]
    assert found[0].config == found[1].config
    assert fingerprint(found[0]) == fingerprint(found[1])
    guesses = "not loaded, as it guesses further tokens: blk.6"
    assert (guesses in capsys.readouterr().err) == (case == "qwen3.5-gqa")


# Of seven layers.
_QWEN = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 8,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 32,
}
_MOE = {
    "expert_count": 8,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
    "expert_shared_feed_forward_length": 32,
}
_GEMMA = {
    "attention.head_count_kv": 2,
    "attention.key_length": 8,
    "attention.key_length_swa": 4,
    "attention.sliding_window": 8,
    "attention.sliding_window_pattern": [True, True, False] * 2 + [False],
    "final_logit_softcapping": 30.0,
    "rope.freq_base_swa": 1e4,
}


@pytest.mark.parametrize(
    ("metadata", "want"),
    [
        ({}, (0, 1, 2, 4, 5, 6)),
        ({"full_attention_interval": 2}, (0, 2, 4, 6)),
        ({"full_attention_interval": 2, "nextn_predict_layers": 1}, (0, 2, 4)),
        ({"attention.recurrent_layers": [False] * 5 + [True] * 2}, (5, 6)),
        (
            {
                "attention.recurrent_layers": [True] * 2 + [False] * 5,
                "nextn_predict_layers": 1,
            },
            (0, 1),
        ),
    ],
)
def test_layers_with_the_delta_rule(metadata, want, tmp_path):
    config = config_from_gguf(header(tmp_path / "h.gguf", "qwen35", _QWEN | metadata))
    assert config.delta == Delta(want, 2, 4, 8, 8, 4, tiled=True)
    assert config.num_hidden_layers == 7 - metadata.get("nextn_predict_layers", 0)


def test_as_many_values_as_keys_are_in_no_other_order(tmp_path):
    changes = _QWEN | {"ssm.group_count": 4, "rope.dimension_count": 2}
    config = config_from_gguf(header(tmp_path / "h.gguf", "qwen35", changes))
    assert config.delta and not config.delta.tiled and config.rotary_dim == 2


@pytest.mark.parametrize(
    ("arch", "changes", "message"),
    [
        *(
            ("qwen35", {key: None}, f"lacks {key}; give a whole number")
            for key in _QWEN
        ),
        (
            "qwen35",
            {"ssm.inner_size": 33},
            "size is 33; give a multiple of the 4 heads",
        ),
        ("qwen35", {"ssm.group_count": 3}, "rank is 4; give a multiple of the 3 keys"),
        ("qwen35", {"nextn_predict_layers": 7}, "layers is 7; .* from 0 to 6"),
        (
            "qwen35",
            {"attention.recurrent_layers": [True]},
            "recurrent_layers is .*; give true or false for each of the 7 layers",
        ),
        ("qwen35", {"expert_count": 8}, "expert_count is 8; only models without exp"),
        *(("qwen35moe", {key: None}, f"lacks {key}; give a whole") for key in _MOE),
        ("clip", {}, r"clip is the part of a model that reads images \(mmproj\); give"),
        ("gemma4", {"expert_count": 8}, "lacks expert_feed_forward_length; give a"),
        *(("gemma4", {key: None}, f"lacks {key}; ") for key in _GEMMA),
        ("gemma4", {"attention.sliding_window_pattern": 3}, "is 3; give true or false"),
        (
            "gemma4",
            {"attention.sliding_window_pattern": [False] * 6 + [True]},
            "sliding_window_pattern is .*; give the last layer full_attention",
        ),
        (
            "gemma4",
            {"rope.dimension_count_swa": 2},
            "dimension_count_swa is 2; only 4, the whole head, is computed",
        ),
        (
            "gemma4",
            {"attention.head_count_kv": [2, 1, 2, 2, 2, 2, 2]},
            "head_count_kv is .*; only the same in all layers of a kind",
        ),
        (
            "gemma4",
            {
                "attention.shared_kv_layers": 2,
                "feed_forward_length": [48] * 5 + [60] * 2,
            },
            "feed_forward_length is .*; give the last layers as many, or twice that",
        ),
        (
            "gemma4",
            {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
            "rope.scaling.type is linear; only",
        ),
        ("gemma4", {}, "rope_freqs.weight is not 4 numbers, 1 for the first"),
        (
            "gemma4",
            {"embedding_length_per_layer_input": 4},
            "has no matrix per_layer_token_embd.weight",
        ),
    ],
)
def test_what_is_refused_is_named(arch, changes, message, tmp_path):
    said = {"qwen35": _QWEN, "qwen35moe": _QWEN | _MOE, "gemma4": _GEMMA}.get(arch, {})
    with pytest.raises(ValueError, match=message):
        config_from_gguf(header(tmp_path / "h.gguf", arch, said | changes))
