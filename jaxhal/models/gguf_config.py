"""From the metadata of a GGUF file to a :class:`Config`.

What llama.cpp's converter writes is put under the names of a config.json, for the
families to say what it means.
"""

import dataclasses
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from jaxhal.models.config import Config, build, check_family, layer_count
from jaxhal.models.families import FAMILIES
from jaxhal.models.gguf import GGUFSource
from jaxhal.models.settings import LENGTH, VOCABULARY, Settings

# The architectures, and the metadata of one, by the names of a config.json.
_FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "falcon": "falcon",
    "gpt2": "gpt2",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "granite": "granite",
    "granitehybrid": "granite",
    "smollm3": "smollm3",
    "olmo2": "olmo2",
    "phi3": "phi3",
    "glm4": "glm4",
    "mistral3": "ministral3",
    "qwen3moe": "qwen3_moe",
    "gpt-oss": "gpt_oss",
}
ARCHITECTURES = frozenset(_FAMILIES)
# With experts.
_MIXED = {"llama": "mixtral", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss"}
_MLP_BIASES = ("blk.0.ffn_down.bias", "blk.0.ffn_down_exps.bias")
_KEYS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.scale": "attention_multiplier",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "context_length": "max_position_embeddings",
    "rope.dimension_count": "rotary_dim",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "rope.scaling.finetuned": "finetuned",
}
_SCALING = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
    "attention.temperature_scale": "llama_4_scaling_beta",
}


def config_from_gguf(source: GGUFSource) -> Config:
    """A :class:`Config` from GGUF metadata; a ValueError on what is not computed."""
    raw, names = _settings(source), source.names()
    window = raw.whole("sliding_window", 0, least=0, most=LENGTH)
    raw = raw.over({"sliding_window": window or None})
    family, turned = FAMILIES[raw["model_type"]], _turned(raw)
    ruled = family.rule(raw)
    slides = ruled.get("windows", (1,) * layer_count(raw))
    qk_norm = family.switches.get("qk_norm", "head")
    # The file says by its tensors which parts a model has, whatever its family.
    switches = {
        **family.switches,
        **ruled,
        "norm_eps": raw.number("rms_norm_eps"),
        "windows": tuple(window * (one > 0) for one in slides),
        "rotary_dim": None if turned == _head_dim(raw) else turned,
        "qkv_bias": not names.isdisjoint(("blk.0.attn_q.bias", "blk.0.attn_qkv.bias")),
        "o_bias": "blk.0.attn_output.bias" in names,
        "mlp_bias": not names.isdisjoint(_MLP_BIASES),
        "qk_norm": qk_norm if "blk.0.attn_q_norm.weight" in names else None,
    }
    config = build(Config, raw["model_type"], raw, switches)
    if "rope_freqs.weight" not in names:
        return config
    divisors = _divisors(source, "rope_freqs.weight", turned // 2)
    rope = dataclasses.replace(config.ropes[0], divisors=divisors)
    return dataclasses.replace(config, ropes=(rope, *config.ropes[1:]))


def _settings(source: GGUFSource) -> Settings:
    """What a config.json would say; ``model_type`` is the family."""
    found = source.settings("general.").get("architecture", "")
    arch = check_family(found, _FAMILIES, source.where)
    stored, name = source.settings(f"{arch}."), _FAMILIES[arch]
    if stored.whole("expert_count", 0, least=0):
        if arch not in _MIXED:
            stored.refuse("expert_count", "only models without experts are computed")
        name = _MIXED[arch]
        if (apart := "blk.0.ffn_gate.0.weight") in source.names():
            raise ValueError(
                f"{source.where} has a tensor for each expert, such as {apart}, as "
                "files had before those of a layer were one; use a newer file, or "
                "convert the checkpoint again"
            )
    family = FAMILIES[name]
    layer_norm = family.switches.get("norm") == "layer"
    eps = "layer_norm_epsilon" if layer_norm else "layer_norm_rms_epsilon"
    raw = _named(stored, _KEYS | {f"attention.{eps}": "rms_norm_eps"})
    raw = raw.over(
        {
            "model_type": name,
            "vocab_size": source.rows("token_embd.weight"),
            "tie_word_embeddings": "output.weight" not in source.names(),
            "hidden_act": family.defaults.get("hidden_act", "silu"),
            "rope_theta": raw.number("rope_theta", 10000.0, above=1.0),
            "rope_scaling": _scaling(stored, source, _turned(raw) // 2),
            "layer_types": _layer_types(stored, layer_count(raw)),
            # Every file has these, for which some families have defaults.
            "max_position_embeddings": raw.whole(
                "max_position_embeddings", most=LENGTH
            ),
            "intermediate_size": raw.whole("intermediate_size", most=VOCABULARY),
        }
    )
    return _LEFT_OUT[arch](raw, source.names()) if arch in _LEFT_OUT else raw


def _named(stored: Settings, names: Mapping[str, str]) -> Settings:
    """These keys alone, under the names of a config.json."""
    found = {key: stored[key] for key in names if key in stored}
    return Settings(found, stored.where).named(names)


def _head_dim(raw: Settings) -> int:
    heads = raw.whole("num_attention_heads")
    return raw.whole("head_dim", raw.whole("hidden_size") // heads)


def _turned(raw: Settings) -> int:
    """Channels of a head that turn."""
    turned = raw.whole("rotary_dim", _head_dim(raw), most=_head_dim(raw))
    if turned % 2 and "rotary_dim" in raw:
        raw.refuse("rotary_dim", "give an even number, channels turn in pairs")
    return turned


def _divisors(source: GGUFSource, name: str, count: int) -> tuple[float, ...]:
    """Of the frequencies of each pair of channels, stored as a tensor."""
    divisors = source.get(name).ravel()
    if len(divisors) != count or not (divisors > 0).all():
        raise ValueError(
            f"{source.where}: {name} is not {count} numbers above 0; convert the "
            "checkpoint again"
        )
    return tuple(map(float, divisors))


def _scaling(stored: Settings, source: GGUFSource, count: int) -> Settings:
    """The ``rope_scaling`` of a config.json."""
    known = ("none", "linear", "yarn", "longrope", "llama3", "dynamic")
    kind = stored.one_of("rope.scaling.type", "none", known)
    lists = ("short", "long")
    names = {f"{which}_factor": f"rope_factors_{which}.weight" for which in lists}
    missing = sorted(set(names.values()) - source.names())
    values: dict[str, Any] = {}
    # Phi-3 files may have the divisors and say no type.
    if kind == "longrope" or len(missing) < len(names):
        if missing:
            raise ValueError(
                f"{source.where}: rope.scaling.type is {kind} and {missing[0]} is "
                "missing; convert the checkpoint again"
            )
        kind = "longrope"
        values = {key: [*_divisors(source, names[key], count)] for key in names}
    found = _named(stored, {} if kind == "none" else _SCALING)
    if "mscale_all_dim" in found:  # beside which llama.cpp takes the other to be 1
        values["mscale"] = 1.0
    return found if kind == "none" else found.over({"rope_type": kind, **values})


def _layer_types(stored: Settings, layers: int) -> list[str] | None:
    """Which layers see a window, if the file says it."""
    key = "attention.sliding_window_pattern"
    slides = stored.get(key)
    if slides is None:
        return None
    if not isinstance(slides, list):  # the last of so many sees all
        period = stored.whole(key)
        slides = [(layer + 1) % period != 0 for layer in range(layers)]
    if len(slides) != layers or not all(type(one) is bool for one in slides):
        stored.refuse(key, f"give true or false for each of the {layers} layers")
    return [("full_attention", "sliding_attention")[one] for one in slides]


def _falcon(raw: Settings, names: AbstractSet[str]) -> Settings:
    """Whose older forms are cases of the new one."""
    norms = 2 if "blk.0.attn_norm_2.weight" in names else 1
    new = {"new_decoder_architecture": True, "num_ln_in_parallel_attn": norms}
    return raw.over(new)


def _gemma(raw: Settings, large: int) -> Settings:
    """Queries are scaled by head, but by width over heads in the largest model."""
    by_head = _head_dim(raw)
    if layer_count(raw) == large:
        by_head = raw.whole("hidden_size") // raw.whole("num_attention_heads")
    return raw.over({"query_pre_attn_scalar": by_head})


def _gemma2(raw: Settings, names: AbstractSet[str]) -> Settings:
    keys = ("attn_logit_softcapping", "final_logit_softcapping")
    given = {key: FAMILIES["gemma2"].defaults[key] for key in keys}
    return _gemma(raw, 46).filled(given | {"sliding_window": 4096})


def _granite(raw: Settings, names: AbstractSet[str]) -> Settings:
    """Dense ones.  A file of hybrid ones counts key-value heads layer by layer."""
    counts = raw.get("num_key_value_heads")
    if isinstance(counts, list) and counts:
        if 0 in counts or counts != counts[:1] * len(counts):
            raw.refuse(
                "num_key_value_heads", "only attention in all layers is computed"
            )
        raw = raw.over({"num_key_value_heads": counts[0]})
    raw = raw.filled({"attention_multiplier": _head_dim(raw) ** -0.5})
    if raw.flag("finetuned", True):  # by which llama.cpp says that layers turn
        return raw
    dense = {"num_local_experts": 0, "layer_types": ["attention"] * layer_count(raw)}
    return raw.over({"model_type": "granitemoehybrid", **dense})


def _olmo(raw: Settings, names: AbstractSet[str]) -> Settings:
    """One whose layers see a window is an OLMo 3."""
    return raw.over({"model_type": "olmo3"}) if raw.get("sliding_window") else raw


def _qwen3_moe(raw: Settings, names: AbstractSet[str]) -> Settings:
    """Beside the width of its experts a file has one of perceptrons it is without."""
    inner = raw.whole("moe_intermediate_size", most=VOCABULARY)
    return raw.over({"intermediate_size": inner, "norm_topk_prob": True})


def _gpt_oss(raw: Settings, names: AbstractSet[str]) -> Settings:
    """No file says that the bounds of YaRN are not rounded."""
    scaling = raw.inside("rope_scaling").over({"truncate": False})
    return raw.over({"rope_scaling": scaling})


# With the settings that the files of an architecture leave out, or say in another way.
_LEFT_OUT: Mapping[str, Callable[[Settings, AbstractSet[str]], Settings]] = {
    "falcon": _falcon,
    "gemma2": _gemma2,
    "gemma3": lambda raw, names: _gemma(raw, 62),
    "granite": _granite,
    "granitehybrid": _granite,
    "olmo2": _olmo,
    "qwen3moe": _qwen3_moe,
    "gpt-oss": _gpt_oss,
}
