"""From the metadata of a GGUF file to a :class:`Config`.

What llama.cpp's converter writes is put under the names of a config.json, for the
families to say what it means.
"""

import dataclasses
from typing import Any

import numpy as np

from jaxhal.models.config import Config, build, check_family
from jaxhal.models.families import FAMILIES
from jaxhal.models.gguf import GGUFSource
from jaxhal.models.gguf_families import ARCHITECTURES, REFUSED
from jaxhal.models.settings import LENGTH, VOCABULARY, Settings

# Metadata by the names of a config.json.  Others go by their own names.
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
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    # Of Qwen3.5.
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    # Of Gemma 4.
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "attention.sliding_window_pattern": "layer_types",
}
# A divisor of angles under which none is seen to turn; files have 1e30.
_STILL = 1e20
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
    # Of any layer, as not all have attention.
    parts = {name.split(".", 2)[-1] for name in names if name.startswith("blk.")}
    window = raw.whole("sliding_window", 0, least=0, most=LENGTH)
    raw = raw.over({"sliding_window": window or None})
    family, turned = FAMILIES[raw["model_type"]], _turned(raw)
    ruled = family.rule(raw)
    slides = ruled.get("windows", (1,) * raw.layer_count())
    qk_norm = family.switches.get("qk_norm", "head")
    # The file says by its tensors which parts a model has, whatever its family.
    switches = {
        **family.switches,
        **ruled,
        "norm_eps": raw.number("rms_norm_eps"),
        "windows": tuple(window * (one > 0) for one in slides),
        "rotary_dim": None if turned == raw.head_dim() else turned,
        "qkv_bias": not parts.isdisjoint(("attn_q.bias", "attn_qkv.bias")),
        "o_bias": "attn_output.bias" in parts,
        "mlp_bias": not parts.isdisjoint(("ffn_down.bias", "ffn_down_exps.bias")),
        "qk_norm": qk_norm if "attn_q_norm.weight" in parts else None,
    }
    config, changes = build(Config, raw["model_type"], raw, switches), {}
    if (delta := config.delta) and delta.value_heads > delta.key_heads:
        changes["delta"] = dataclasses.replace(delta, tiled=True)
    if full := config.full:
        pairs = _pairs(source, full.head_dim // 2)
        rope = dataclasses.replace(full.ropes[0], pairs=pairs)
        changes["full"] = dataclasses.replace(full, ropes=(rope,))
    elif "rope_freqs.weight" in names:
        divisors = _divisors(source, "rope_freqs.weight", turned // 2)
        rope = dataclasses.replace(config.ropes[0], divisors=divisors)
        changes["ropes"] = (rope, *config.ropes[1:])
    return dataclasses.replace(config, **changes)


def _settings(source: GGUFSource) -> Settings:
    """What a config.json would say; ``model_type`` is the family."""
    found = source.settings("general.").get("architecture", "")
    if other := REFUSED.get(str(found)):
        raise ValueError(f"{source.where}: {found} {other}")
    arch = check_family(found, ARCHITECTURES, source.where)
    stored, files = source.settings(f"{arch}."), ARCHITECTURES[arch]
    name = files.family
    if stored.whole("expert_count", 0, least=0):
        if not files.mixed:
            stored.refuse("expert_count", "only models without experts are computed")
        name = "mixtral" if arch == "llama" else name
        if (apart := "blk.0.ffn_gate.0.weight") in source.names():
            raise ValueError(
                f"{source.where} has a tensor for each expert, such as {apart}, as "
                "files had before those of a layer were one; use a newer file, or "
                "convert the checkpoint again"
            )
    family = FAMILIES[name]
    layer_norm = family.switches.get("norm") == "layer"
    eps = "layer_norm_epsilon" if layer_norm else "layer_norm_rms_epsilon"
    raw = stored.named(_KEYS | {f"attention.{eps}": "rms_norm_eps"})
    raw = raw.over(
        {
            "model_type": name,
            "vocab_size": source.rows("token_embd.weight"),
            "tie_word_embeddings": "output.weight" not in source.names(),
            "hidden_act": family.defaults.get("hidden_act", "silu"),
            "rope_theta": raw.number("rope_theta", 10000.0, above=1.0),
            "rope_scaling": _scaling(stored, source, _turned(raw) // 2),
            "layer_types": _layer_types(stored, raw.layer_count(), files.listed),
        }
    )
    raw = files.left_out(raw, source)
    # Every file has these, for which some families have defaults.
    raw.whole("max_position_embeddings", most=LENGTH)
    raw.whole("intermediate_size", most=VOCABULARY)
    return raw


def _turned(raw: Settings) -> int:
    """Channels of a head that turn."""
    key, head = "rope.dimension_count", raw.head_dim()
    turned = raw.whole(key, head, most=head)
    if turned % 2 and key in raw:
        raw.refuse(key, "give an even number, channels turn in pairs")
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


def _pairs(source: GGUFSource, count: int) -> int:
    """How many of the first channel pairs turn; the others are divided by much."""
    name = "rope_freqs.weight"
    divisors = source.get(name).ravel() if name in source.names() else np.empty(0)
    pairs = int((divisors == 1).sum())
    ordered = (divisors[:pairs] == 1).all() and (divisors[pairs:] >= _STILL).all()
    if len(divisors) != count or not ordered:
        raise ValueError(
            f"{source.where}: {name} is not {count} numbers, 1 for the first channel "
            "pairs and 1e30 for those that do not turn; convert the checkpoint again"
        )
    return pairs


def _scaling(stored: Settings, source: GGUFSource, count: int) -> Settings:
    """The ``rope_scaling`` of a config.json."""
    known = ("none", "linear", "yarn", "longrope", "llama3", "dynamic")
    kind = stored.one_of("rope.scaling.type", "none", known)
    names = {f"{x}_factor": f"rope_factors_{x}.weight" for x in ("short", "long")}
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
    if kind == "none":
        return Settings({}, stored.where)
    found = stored.named(_SCALING)
    if "mscale_all_dim" in found:  # beside which llama.cpp takes the other to be 1
        values["mscale"] = 1.0
    return found.over({"rope_type": kind, **values})


def _layer_types(stored: Settings, layers: int, listed: bool) -> list[str] | None:
    """Which layers see a window, or have no attention, if the file says it.

    Where not all are ``listed`` there may be a number instead.
    """
    key, other = "attention.sliding_window_pattern", "sliding_attention"
    if "attention.recurrent_layers" in stored:
        key, other = "attention.recurrent_layers", "linear_attention"
    if (others := stored.get(key)) is None:
        return None
    if not isinstance(others, list) and not listed:  # the last of so many sees all
        period = stored.whole(key)
        others = [(layer + 1) % period != 0 for layer in range(layers)]
    flags = isinstance(others, list) and all(type(one) is bool for one in others)
    if not flags or len(others) != layers:
        stored.refuse(key, f"give true or false for each of the {layers} layers")
    return [("full_attention", other)[one] for one in others]
