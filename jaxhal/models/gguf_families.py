"""What GGUF files of each architecture say, and name, otherwise than a folder."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxhal.models import tables
from jaxhal.models.config import Config
from jaxhal.models.families import FAMILIES
from jaxhal.models.gguf import GGUFSource
from jaxhal.models.settings import LENGTH, VOCABULARY, Settings
from jaxhal.models.tables import GATED, GGUF, QKV, Origin, Table, fused, origins

_KV_HEADS = "num_key_value_heads"


def _falcon(raw: Settings, source: GGUFSource) -> Settings:
    """Whose older forms are cases of the new one."""
    norms = 2 if "blk.0.attn_norm_2.weight" in source.names() else 1
    new = {"new_decoder_architecture": True, "num_ln_in_parallel_attn": norms}
    return raw.over(new)


def _gemma(raw: Settings, large: int) -> Settings:
    """Queries are scaled by head, but by width over heads in the largest model."""
    by_head = raw.head_dim()
    if raw.layer_count() == large:
        by_head = raw.whole("hidden_size") // raw.whole("num_attention_heads")
    return raw.over({"query_pre_attn_scalar": by_head})


def _gemma2(raw: Settings, source: GGUFSource) -> Settings:
    keys = ("attn_logit_softcapping", "final_logit_softcapping")
    given = {key: FAMILIES["gemma2"].defaults[key] for key in keys}
    return _gemma(raw, 46).filled(given | {"sliding_window": 4096})


def _granite(raw: Settings, source: GGUFSource) -> Settings:
    """Dense ones.  A file of hybrid ones counts key-value heads layer by layer."""
    counts = raw.get(_KV_HEADS)
    if isinstance(counts, list) and counts:
        if 0 in counts or counts != counts[:1] * len(counts):
            raw.refuse(_KV_HEADS, "only attention in all layers is computed")
        raw = raw.over({_KV_HEADS: counts[0]})
    raw = raw.filled({"attention_multiplier": raw.head_dim() ** -0.5})
    if raw.flag("rope.scaling.finetuned", True):  # which says whether layers turn
        return raw
    dense = {"num_local_experts": 0, "layer_types": ["attention"] * raw.layer_count()}
    return raw.over({"model_type": "granitemoehybrid", **dense})


def _olmo(raw: Settings, source: GGUFSource) -> Settings:
    """One whose layers see a window is an OLMo 3."""
    return raw.over({"model_type": "olmo3"}) if raw.get("sliding_window") else raw


def _qwen3_moe(raw: Settings, source: GGUFSource) -> Settings:
    """Beside the width of its experts a file has one of perceptrons it is without."""
    inner = raw.whole("moe_intermediate_size", most=VOCABULARY)
    return raw.over({"intermediate_size": inner, "norm_topk_prob": True})


def _gpt_oss(raw: Settings, source: GGUFSource) -> Settings:
    """No file says that the bounds of YaRN are not rounded."""
    scaling = raw.inside("rope_scaling").over({"truncate": False})
    return raw.over({"rope_scaling": scaling})


def _qwen3_5(raw: Settings, source: GGUFSource) -> Settings:
    """Layers at the end that guess further tokens are not loaded."""
    for key in ("conv_kernel_dim", "key_head_dim", "num_key_heads"):
        raw.whole(f"linear_{key}")
    heads, inner = raw.whole("linear_num_value_heads"), raw.whole("ssm.inner_size")
    if inner % heads:
        raw.refuse("ssm.inner_size", f"give a multiple of the {heads} heads")
    layers = raw.layer_count()
    own = layers - raw.whole("nextn_predict_layers", 0, least=0, most=layers - 1)
    kinds = raw.get("layer_types")
    return raw.over(
        {
            "linear_value_head_dim": inner // heads,
            "num_hidden_layers": own,
            "layer_types": kinds and kinds[:own],
            "partial_rotary_factor": 1.0,  # the file counts the channels that turn
        }
    )


def _qwen3_5_moe(raw: Settings, source: GGUFSource) -> Settings:
    """The dense perceptron of a layer is the shared expert."""
    inner = raw.whole("expert_shared_feed_forward_length", most=VOCABULARY)
    return _qwen3_5(raw, source).over({"intermediate_size": inner})


def _gemma4(raw: Settings, source: GGUFSource) -> Settings:
    """Files say what layers of full attention have, and apart from it the others."""
    raw.whole("sliding_window", most=LENGTH)
    raw.number("final_logit_softcapping", least=0.0)
    raw.inside("rope_scaling").only({"rope_type": "none"})
    layers, kinds = raw.layer_count(), raw.get("layer_types", [])
    full = [n for n, kind in enumerate(kinds) if kind == "full_attention"]
    if not full:
        raw.refuse("layer_types", "say which layers see all keys, among them the last")
    rest = [n for n in range(layers) if n not in full] or full
    head, other = raw.whole("head_dim"), raw.whole("attention.key_length_swa")
    turned = "rope.dimension_count"
    for key, size in ((turned, head), (f"{turned}_swa", other)):
        if raw.whole(key, size) != size:
            raw.refuse(key, f"only {size}, the whole head, is computed")
    borrowing = raw.whole("num_kv_shared_layers", 0, least=0, most=layers - 1)
    own = layers - borrowing
    inner = _of(raw, "intermediate_size", range(own))
    last = _of(raw, "intermediate_size", range(own, layers)) if borrowing else inner
    if last not in (inner, 2 * inner):
        raw.refuse("intermediate_size", "give the last layers as many, or twice that")
    values = not source.names().isdisjoint(f"blk.{n}.attn_v.weight" for n in full)
    of_full = {"head_dim": head, _KV_HEADS: _of(raw, _KV_HEADS, full)}
    found = {
        "head_dim": other,
        turned: other,
        _KV_HEADS: _of(raw, _KV_HEADS, rest),
        "per_layer_config": {str(n): of_full for n in full},
        "attention_k_eq_v": not values,
        "intermediate_size": inner,
        "use_double_wide_mlp": last > inner,
        "enable_moe_block": bool(raw.get("num_local_experts")),
        "rope_parameters": {
            "full_attention": {"rope_theta": raw["rope_theta"]},
            "sliding_attention": {"rope_theta": raw.number("rope_local_base_freq")},
        },
    }
    if raw.whole("hidden_size_per_layer_input", 0, least=0):
        found["vocab_size_per_layer_input"] = source.rows("per_layer_token_embd.weight")
    return raw.over(found)


def _of(raw: Settings, key: str, layers: Sequence[int]) -> int:
    """What is said of each of these layers, or once of all there are."""
    if not isinstance(raw.get(key), list):
        return raw.whole(key, most=VOCABULARY)
    each = raw.wholes(key, raw.layer_count(), least=1, most=VOCABULARY)
    if len({each[n] for n in layers}) != 1:
        raw.refuse(key, "only the same in all layers of a kind is computed")
    return each[layers[0]]


class Files(NamedTuple):
    """What the files of an architecture are read as.

    ``left_out`` adds what they leave out or say in another way.  Some have experts in
    files that are ``mixed``; ``listed`` are those that name the kind of every layer.
    """

    family: str
    left_out: Callable[[Settings, GGUFSource], Settings] = lambda raw, source: raw
    mixed: bool = False
    listed: bool = False


ARCHITECTURES = {
    "llama": Files("llama", mixed=True),
    "mistral3": Files("ministral3"),
    "qwen2": Files("qwen2"),
    "qwen3": Files("qwen3"),
    "qwen3moe": Files("qwen3_moe", _qwen3_moe, mixed=True),
    "qwen35": Files("qwen3_5_text", _qwen3_5, listed=True),
    "qwen35moe": Files("qwen3_5_moe_text", _qwen3_5_moe, mixed=True, listed=True),
    "falcon": Files("falcon", _falcon),
    "gpt2": Files("gpt2"),
    "gpt-oss": Files("gpt_oss", _gpt_oss, mixed=True),
    "gemma2": Files("gemma2", _gemma2),
    "gemma3": Files("gemma3_text", lambda raw, source: _gemma(raw, 62)),
    "gemma4": Files("gemma4_text", _gemma4, mixed=True, listed=True),
    "granite": Files("granite", _granite),
    "granitehybrid": Files("granite", _granite),
    "smollm3": Files("smollm3"),
    "olmo2": Files("olmo2", _olmo),
    "phi3": Files("phi3"),
    "glm4": Files("glm4"),
}
#: What is refused by name, and what to do instead.
REFUSED = {
    "clip": "is the part of a model that reads images (mmproj); give the file of the "
    "language model",
}


def _less_one(x: np.ndarray, config: Config) -> np.ndarray:
    """Norms of Gemma 2 and 3 and of Qwen3.5 are stored with their 1 already added."""
    return x - 1.0


def _log_of_less(x: np.ndarray, config: Config) -> np.ndarray:
    """What a state decays by is stored as minus its exponential."""
    with np.errstate(invalid="ignore", divide="ignore"):  # and is then refused
        return np.log(-x)


def _column(x: np.ndarray, config: Config) -> np.ndarray:
    """A single row, which a file may have as a vector."""
    return x.reshape(-1, 1)


_TWO_NORMS = {
    "blocks.input_norm": "blk.{}.attn_norm_2",
    "blocks.mlp_norm": "blk.{}.attn_norm",
}
_QKV = fused("blk.{}.attn_qkv", tables.split)
_GATE_UP = fused("blk.{}.ffn_up", tables.halves, GATED)
# What turns together lies side by side: llama.cpp's converter puts it so, GLM-4 has it
# so in its checkpoint.
_PAIRED = origins({name: GGUF[name] for name in QKV[:2]}, tables.unpaired)
_MIDDLE = origins({"blocks.mlp_norm": "blk.{}.post_attention_norm"})
_QWEN3_5 = _MIDDLE | tables.gated_delta(
    GGUF[QKV[0]], "blk.{}.attn_qkv", "blk.{}.ssm_conv1d.weight"
)
_QWEN3_5["blocks.linear_attn.log_decay"] = Origin("blk.{}.ssm_a", _log_of_less)
_PARTS = (*GATED, "blocks.mlp.down_proj")
_EXPERTS = origins({x: f"{GGUF[x]}_exps" for x in _PARTS}, tables.transpose_each)
_BOTH = fused("blk.{}.ffn_gate_up_exps", tables.halves_each, GATED)  # in newer files
_EXPERTS |= {x: _EXPERTS[x]._replace(instead=both) for x, both in _BOTH.items()}
_SHARED = {x.replace(".mlp.", ".shared.mlp."): f"{GGUF[x]}_shexp" for x in _PARTS}
_SHARED = origins(_SHARED)
_SHARED |= origins({"blocks.shared.gate": "blk.{}.ffn_gate_inp_shexp"}, _column)
# By family, as files of one architecture may be of several.
_LLAMAS = ("llama", "mixtral", "granite", "granitemoehybrid", "smollm3", "ministral3")
_OTHERWISE = dict.fromkeys(_LLAMAS, _PAIRED) | {
    "gpt_oss": _MIDDLE,
    "glm4": _PAIRED | _GATE_UP,
    "phi3": _QKV | _GATE_UP,
    "falcon": _QKV,
    "gpt2": _QKV,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5 | _SHARED,
}


def gguf_table(config: Config) -> Table:
    """The key table of a GGUF file."""
    two = _TWO_NORMS if config.block == "parallel_two_norms" else {}
    table = origins(GGUF | two) | _OTHERWISE.get(config.family, {})
    if config.num_experts:
        table |= _EXPERTS
    if config.norm_offset:
        for path, origin in table.items():
            if path.endswith("norm.scale") and ".linear_attn." not in path:
                table[path] = origin._replace(turn=_less_one)
    return tables.by_layer(table, config)
