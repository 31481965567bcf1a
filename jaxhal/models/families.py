"""The families of decoders: what their settings mean and where parameters are stored.

A family is a row of :data:`FAMILIES`: in it stands what differs from Llama.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxhal.models import gemma, qwen, tables
from jaxhal.models.config import (
    Config,
    Family,
    attention_bias,
    in_turns,
    of_family,
    sliding,
    sparse,
    wide,
    windowed,
)
from jaxhal.models.rope_config import (
    Rope,
    rope_of,
    rope_settings,
    ropes_by_kind,
    rotary_dim,
)
from jaxhal.models.settings import LENGTH, Settings, read_json
from jaxhal.models.tables import Origin, by_layer, experts, like_llama

#: What :func:`shown` reads.
SHOWN = Path(__file__).with_suffix(".json")


def shown() -> dict[str, dict[str, int]]:
    """By family, what so many tests compare on tiny models of it: they write it down.

    ``states`` of every layer, ``attention`` rows, ``logits`` and ``greedy`` decoding
    with transformers, ``GGUF`` files with folders, ``relevance`` with itself, a
    ``mesh`` with one device, ``blocks`` of few bits with their numbers, and
    ``detectors``, all of the catalogue, with themselves in other company.
    """
    return json.loads(SHOWN.read_text("utf-8"))


def read_config(folder: Path) -> Config:
    """Reads ``config.json`` of a Hugging Face folder.

    Raises:
      FileNotFoundError: when the folder has no config.json.
      ValueError: on an unknown architecture or a setting this decoder does not compute.
    """
    path = Path(folder) / "config.json"
    return from_huggingface(Settings(read_json(path), str(path)), str(path))


def from_huggingface(raw: Mapping[str, Any], where: str = "config.json") -> Config:
    """A :class:`Config` from the dictionary of a Hugging Face config.json."""
    settings = Settings(raw, where)
    family, quantised = raw.get("model_type"), settings.inside("quantization_config")
    if family != "gpt_oss" and "quant_method" in quantised:
        quantised.refuse(
            "quant_method",
            "give the checkpoint in 16 or 32 bits, with weights='int8' or 'int4' if "
            "it is too large",
        )
    return of_family(Config, FAMILIES, _text_part(settings))


def _text_part(raw: Settings) -> Settings:
    """The settings of what computes with text, where they stand in others."""
    if (known := _TEXT_OF.get(str(raw.get("model_type")))) is None:
        return raw
    if "text_config" not in raw:
        raw.refuse("text_config", f"give that of a {' or '.join(known)}")
    text = raw.inside("text_config")
    family = text.one_of("model_type", known[0], known)
    tied = {"tie_word_embeddings": raw.get("tie_word_embeddings")}
    return text.filled(tied).over({"model_type": family})


def huggingface_table(config: Config) -> Mapping[str, Origin]:
    """The key table of a Hugging Face checkpoint."""
    table = FAMILIES[config.family].table or like_llama({})
    return by_layer(table(config), config)


def _llama(raw: Settings) -> dict[str, Any]:
    return attention_bias(raw) | {"mlp_bias": raw.flag("mlp_bias")}


def _mistral(raw: Settings) -> dict[str, Any]:
    """All layers see a window, or none does."""
    return windowed(raw, [1] * raw.layer_count())


def _qwen(raw: Settings) -> dict[str, Any]:
    """The layers above the first few may see a window."""
    slides = [1] * (layers := raw.layer_count())
    if some := raw.flag("use_sliding_window"):
        first = raw.whole("max_window_layers", layers, least=0)
        slides = sliding(raw, [n >= first for n in range(layers)])
    found = windowed(raw, slides)
    return found if some else {}


def _qwen3(raw: Settings) -> dict[str, Any]:
    return attention_bias(raw) | _qwen(raw)


def _mixtral(raw: Settings) -> dict[str, Any]:
    return _mistral(raw) | sparse(raw) | {"norm_topk_prob": True}


def _qwen3_moe(raw: Settings) -> dict[str, Any]:
    """All layers see a window, or none does."""
    windows = _mistral(raw) if raw.flag("use_sliding_window") else {}
    norm = {"norm_topk_prob": raw.flag("norm_topk_prob")}
    return attention_bias(raw) | windows | sparse(raw) | norm


def _gpt_oss(raw: Settings) -> dict[str, Any]:
    raw.inside("quantization_config").one_of("quant_method", "mxfp4", ("mxfp4",))
    limit = {"gate_limit": raw.number("swiglu_limit", 7.0)}
    return attention_bias(raw) | sparse(raw) | in_turns(raw, 2, 128) | limit


def _olmo3(raw: Settings) -> dict[str, Any]:
    """Three layers of four see a window, and turn unscaled."""
    found, theta = in_turns(raw, 4, 4096), raw.number("rope_theta", 5e5, above=1.0)
    by_kind = ropes_by_kind(raw, found["windows"], theta, theta)
    return attention_bias(raw) | found | by_kind


def _smollm3(raw: Settings) -> dict[str, Any]:
    """Every fourth layer is without positions, unless the settings say which."""
    layers = raw.layer_count()
    interval = raw.whole("no_rope_layer_interval", 4)
    bare = [(layer + 1) % interval == 0 for layer in range(layers)]
    if raw.get("no_rope_layers"):
        bare = [not turns for turns in raw.wholes("no_rope_layers", layers, most=1)]
    slides = sliding(raw, bare) if raw.flag("use_sliding_window") else [0] * layers
    return _llama(raw) | {
        **windowed(raw, slides),
        "ropes": (rope_of(raw, 2e6), Rope(kind="none")),
        "rope_of_layer": tuple(map(int, bare)),
    }


def _granite(raw: Settings) -> dict[str, Any]:
    return _llama(raw) | {
        "embedding_scale": raw.number("embedding_multiplier", 1.0),
        "attention_scale": raw.number("attention_multiplier", 1.0),
        "residual_scale": raw.number("residual_multiplier", 1.0),
        "logit_scale": 1 / raw.number("logits_scaling", 1.0),
    }


def _granite4(raw: Settings) -> dict[str, Any]:
    """The dense ones, of attention alone."""
    if raw.whole("num_local_experts", 8, least=0):
        raw.refuse("num_local_experts", "only those without experts are computed")
    raw.each("layer_types", ("attention", "full_attention"), raw.layer_count())
    turned = raw.one_of("position_embedding_type", "nope", ("rope", "nope")) == "rope"
    return _granite(raw) | ({} if turned else {"ropes": (Rope(kind="none"),)})


def _phi3(raw: Settings) -> dict[str, Any]:
    """``su`` and ``yarn`` are what older settings call ``longrope``."""
    nested, length = rope_settings(raw), "original_max_position_embeddings"
    key = "rope_type" if "rope_type" in nested else "type"
    if nested.get(key) in ("su", "yarn"):
        nested = nested.over({key: "longrope"})
    original = raw.whole(length, raw.context_length(4096), most=LENGTH)
    nested = nested.over({length: original, **nested})
    rope = rope_of(raw.over({"rope_parameters": nested}), length=4096)
    return _mistral(raw) | {"ropes": (rope,), "rotary_dim": rotary_dim(raw, 1.0)}


def _glm4(raw: Settings) -> dict[str, Any]:
    return {"qkv_bias": raw.flag("attention_bias"), "rotary_dim": rotary_dim(raw, 0.5)}


def _ministral3(raw: Settings) -> dict[str, Any]:
    if not {"rope_parameters", "rope_scaling"} & raw.keys():
        raw.refuse("rope_parameters", "give them, no checkpoint is without")
    nested = rope_settings(raw)
    beta = nested.number("llama_4_scaling_beta", 0.0, least=0.0)
    original = nested.whole("original_max_position_embeddings", 16384, most=LENGTH)
    return _mistral(raw) | {
        "query_growth": (beta, original) if beta else None,
        # The published length already counts the scaling.
        "context_length": raw.context_length(262144),
    }


def _falcon(raw: Settings) -> dict[str, Any]:
    heads = raw.whole("num_attention_heads")
    if raw.flag("new_decoder_architecture"):
        kv_heads = raw.whole("num_key_value_heads", heads)
        norms = raw.whole("num_ln_in_parallel_attn", 2, most=2)
        block = "parallel_two_norms" if norms == 2 else "parallel"
    else:
        kv_heads = 1 if raw.flag("multi_query", True) else heads
        block = "parallel" if raw.flag("parallel_attn", True) else "pre"
    biases = attention_bias(raw) | {"mlp_bias": raw.flag("attention_bias")}
    return biases | wide(raw) | {"num_key_value_heads": kv_heads, "block": block}


_PLAIN = {"norm": "layer", "gated": False}
_TIED = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}
_OLMO = {"qk_norm": "whole", "block": "post"}
_SINKS = {"sinks": True, "mlp_bias": True}
_GPT_OSS = {"attention_bias": True, "head_dim": 64, "rms_norm_eps": 1e-5}
_GPT_OSS |= {"num_local_experts": 128, "num_experts_per_tok": 4}
_GPT_OSS |= {"max_position_embeddings": 131072, "rope_theta": 150000.0}
_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
_GPT_OSS |= {"rope_scaling": _YARN | {"truncate": False}}
_QWEN = {"sliding_window": 4096, "max_window_layers": 28}
_QWEN |= {"max_position_embeddings": 32768}
FAMILIES = {
    "llama": Family(rule=_llama),
    "mistral": Family(
        rule=_mistral,
        defaults={"sliding_window": 4096, "max_position_embeddings": 131072},
    ),
    "qwen2": Family({"qkv_bias": True}, _qwen, defaults=_QWEN),
    "qwen3": Family({"qk_norm": "head"}, _qwen3, defaults=_QWEN | {"head_dim": 128}),
    "mixtral": Family(
        rule=_mixtral,
        defaults={
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "max_position_embeddings": 131072,
        },
        table=like_llama({}, experts("block_sparse_moe", "w1", "w3", "w2")),
    ),
    "qwen3_moe": Family(
        {"qk_norm": "head"},
        _qwen3_moe,
        names={"moe_intermediate_size": "intermediate_size"},
        defaults={
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "intermediate_size": 768,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
        },
        only={"decoder_sparse_step": 1, "mlp_only_layers": []},
        table=like_llama({}, experts("mlp", "gate_proj", "up_proj", "down_proj")),
    ),
    "gpt_oss": Family(
        _SINKS | {"norm_topk_prob": True, "activation": "quick_gelu"},
        _gpt_oss,
        defaults=_GPT_OSS,
        only={"swiglu_alpha": 1.702},
        table=like_llama({}, tables.GPT_OSS),
    ),
    "falcon": Family(
        _PLAIN,
        _falcon,
        names={
            "ffn_hidden_size": "intermediate_size",
            "num_kv_heads": "num_key_value_heads",
            "activation": "hidden_act",
            "layer_norm_epsilon": "rms_norm_eps",
            "bias": "attention_bias",
        },
        defaults=_TIED | {"hidden_act": "gelu"},
        only={"alibi": False},
        table=tables.falcon_table,
        bare="transformer.",
    ),
    "gpt2": Family(
        _PLAIN
        | {"positions": "learned", "qkv_bias": True, "o_bias": True, "mlp_bias": True},
        wide,
        names={
            "n_embd": "hidden_size",
            "n_inner": "intermediate_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_positions": "max_position_embeddings",
            "activation_function": "hidden_act",
            "layer_norm_epsilon": "rms_norm_eps",
        },
        defaults=_TIED | {"hidden_act": "gelu_new", "max_position_embeddings": 1024},
        only={
            "scale_attn_by_inverse_layer_idx": False,
            "reorder_and_upcast_attn": False,
            "scale_attn_weights": True,
        },
        table=like_llama({}, tables.GPT2),
        bare="transformer.",
    ),
    "gemma2": Family(
        {"norm_offset": 1.0, "block": "sandwich"},
        gemma.gemma2,
        defaults=gemma.DEFAULTS
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
        | {"max_position_embeddings": 8192},
        only={"use_bidirectional_attention": False},
        table=like_llama(gemma.NAMES),
    ),
    "gemma3_text": Family(
        {"qk_norm": "head", "norm_offset": 1.0, "block": "sandwich"},
        gemma.gemma3,
        defaults=gemma.DEFAULTS | gemma.DEFAULTS3,
        only={"use_bidirectional_attention": False},
        table=like_llama(gemma.NAMES),
    ),
    "gemma4_text": Family(
        gemma.SWITCHES4,
        gemma.gemma4,
        names={
            "top_k_experts": "num_experts_per_tok",
            "num_experts": "num_local_experts",
        },
        defaults=gemma.DEFAULTS | gemma.DEFAULTS4,
        table=gemma.table4,
    ),
    "granite": Family(rule=_granite),
    "granitemoehybrid": Family(
        rule=_granite4,
        names={"shared_intermediate_size": "intermediate_size"},
        defaults={"intermediate_size": 1024},
        table=like_llama({}, tables.GRANITE4),
    ),
    "smollm3": Family(
        rule=_smollm3,
        defaults={"tie_word_embeddings": True, "max_position_embeddings": 32768},
    ),
    "olmo2": Family(_OLMO, attention_bias, defaults={"rms_norm_eps": 1e-5}),
    "olmo3": Family(_OLMO, _olmo3, defaults={"rms_norm_eps": 1e-5}),
    "phi3": Family(
        rule=_phi3,
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
        table=like_llama({}, tables.QKV_PROJ, tables.GATE_UP),
    ),
    "glm4": Family(
        {"block": "sandwich"},
        _glm4,
        defaults={"rms_norm_eps": 1.5625e-7, "attention_bias": True}
        | {"head_dim": 128, "max_position_embeddings": 131072},
        table=like_llama(tables.GLM4, tables.GATE_UP, tables.PAIRED),
    ),
    "qwen3_5_text": Family(
        qwen.SWITCHES,
        qwen.qwen3_5,
        defaults=qwen.DEFAULTS,
        table=like_llama({}, tables.QWEN3_5),
    ),
    "qwen3_5_moe_text": Family(
        qwen.SWITCHES_MOE,
        qwen.qwen3_5_moe,
        names={"shared_expert_intermediate_size": "intermediate_size"},
        defaults=qwen.DEFAULTS_MOE,
        table=like_llama({}, tables.QWEN3_5, qwen.EXPERTS),
    ),
    "ministral3": Family(
        rule=_ministral3,
        defaults={
            "rms_norm_eps": 1e-5,
            "head_dim": 128,
            "rope_theta": 1e6,
            "max_position_embeddings": 262144,
        },
    ),
}
# Of models that read more than text, what computes with their text, the usual first.
_TEXT_OF = {x.removesuffix("_text"): (x,) for x in FAMILIES if x.endswith("_text")}
_TEXT_OF |= {"mistral3": ("mistral", "ministral3")}
MODEL_TYPES = frozenset({*FAMILIES, *_TEXT_OF})
