"""Gemma: what the settings of its generations mean, and where parameters are stored."""

from typing import Any

from jaxhal.models.config import (
    Config,
    Full,
    activation,
    attention_bias,
    in_turns,
    sparse,
)
from jaxhal.models.rope_config import Rope, rope_from, ropes_by_kind
from jaxhal.models.settings import VOCABULARY, Settings
from jaxhal.models.tables import Table, experts_together, like_llama

DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True}
# Published files of images and text leave these out.
DEFAULTS3 = {
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 262208,
}
DEFAULTS4 = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 4,
    "hidden_size_per_layer_input": 256,
}
NAMES = {"blocks.mlp_norm": "model.layers.{}.pre_feedforward_layernorm"}
#: What holds for all of Gemma 4.
SWITCHES4 = {
    "qk_norm": "head",
    "value_norm": True,
    "block": "sandwich",
    "layer_scale": True,
    "attention_scale": 1.0,
}
_NAMES4 = NAMES | {"blocks.mlp.router": "model.layers.{}.router.proj"}


def _rule(raw: Settings) -> dict[str, Any]:
    """0 is a cap that is off."""
    cap = raw.number("final_logit_softcapping", 0.0, least=0.0)
    return attention_bias(raw) | {
        # The published length already counts the scaling of the global layers.
        "context_length": raw.context_length(),
        "activation": activation(raw, "hidden_activation", "gelu_pytorch_tanh"),
        "embedding_scale": raw.whole("hidden_size") ** 0.5,
        "logit_cap": cap or None,
    }


def gemma2(raw: Settings, period: int = 2) -> dict[str, Any]:
    cap = raw.number("attn_logit_softcapping", 0.0, least=0.0)
    return _rule(raw) | {
        **in_turns(raw, period, 4096),
        "attention_scale": raw.number("query_pre_attn_scalar", 256.0) ** -0.5,
        "attention_cap": cap or None,
    }


def gemma3(raw: Settings) -> dict[str, Any]:
    found = gemma2(raw, raw.whole("sliding_window_pattern", 6))
    return found | ropes_by_kind(raw, found["windows"], 1e6, 10000.0)


def gemma4(raw: Settings) -> dict[str, Any]:
    """Layers that see all keys have heads of their own; the last layers may borrow the
    keys of others, and each may get something of every token.
    """
    if raw.get("use_bidirectional_attention", "vision") != "vision":
        raw.refuse("use_bidirectional_attention", "give null; text is read one way")
    found = _rule(raw) | in_turns(raw, 6, 512)
    seen = found["windows"]
    if seen[-1]:
        raw.refuse("layer_types", "give the last layer full_attention")
    nested = raw.inside("rope_parameters").inside("sliding_attention")
    found["ropes"] = (rope_from(nested, 10000.0, raw.context_length()),)
    found["full"] = _full(raw, tuple(n for n, one in enumerate(seen) if not one))
    layers = raw.layer_count()
    borrowing = raw.whole("num_kv_shared_layers", 0, least=0, most=layers)
    if borrowing:
        if {*map(bool, seen[-borrowing:])} - {*map(bool, seen[:-borrowing])}:
            raw.refuse("num_kv_shared_layers", "leave a layer of each kind before them")
        twice = 1 + raw.flag("use_double_wide_mlp")
        inner = twice * raw.whole("intermediate_size", most=VOCABULARY)
        found |= {"borrowing": borrowing, "borrowing_width": inner}
    if width := raw.whole("hidden_size_per_layer_input", 0, least=0):
        least = raw.whole("vocab_size", most=VOCABULARY)
        key = "vocab_size_per_layer_input"
        found["layer_inputs"] = raw.whole(key, 262144, least, VOCABULARY), width
    if raw.flag("enable_moe_block"):
        inner = raw.whole("moe_intermediate_size", most=VOCABULARY)
        found |= sparse(raw) | {"norm_topk_prob": True}
        found |= {"shared": "normed", "expert_size": inner}
    return found


def _full(raw: Settings, layers: tuple[int, ...]) -> Full:
    """Of the layers that see all keys; transformers writes them one by one."""
    heads = raw.whole("num_attention_heads")
    key_heads = raw.whole("num_key_value_heads")
    as_values = raw.flag("attention_k_eq_v")
    if "per_layer_config" in raw:
        each = raw.inside("per_layer_config")
        own = each.inside(str(layers[0]))
        if each != {str(n): own for n in layers} or own.keys() - {*_OF_LAYER}:
            raw.refuse(
                "per_layer_config",
                f"give the layers of full attention, {layers}, the same head_dim and "
                "num_key_value_heads, and others nothing",
            )
        names = {name: own[key] for key, name in _OF_LAYER.items() if key in own}
        raw = raw.over({"global_head_dim": raw.whole("head_dim")} | names)
    elif not as_values:
        raw = raw.over({"num_global_key_value_heads": key_heads})
    head = raw.whole("global_head_dim", 512, least=4)
    key_heads = raw.whole("num_global_key_value_heads", key_heads)
    if head % 2:
        raw.refuse("global_head_dim", "give an even number")
    if heads % key_heads:
        key = "num_global_key_value_heads"
        raw.refuse(key, f"give a divisor of the {heads} heads")
    return Full(layers, head, key_heads, as_values, (_proportional(raw, head),))


_OF_LAYER = {
    "head_dim": "global_head_dim",
    "num_key_value_heads": "num_global_key_value_heads",
}


def _proportional(raw: Settings, head: int) -> Rope:
    """Only the first channel pairs of a head turn, as fast as if all did."""
    nested = raw.inside("rope_parameters")
    whole = nested.inside("full_attention")
    kind = whole.one_of("rope_type", "proportional", ("proportional", "default"))
    share = whole.number("partial_rotary_factor", 1.0 if nested else 0.25)
    if share > 1:
        whole.refuse("partial_rotary_factor", "give at most 1")
    theta = whole.number("rope_theta", 1e6, above=1.0)
    if kind == "default":
        return Rope(theta)
    pairs, factor = int(share * head // 2), whole.number("factor", 1.0)
    return Rope(theta, "proportional", factor, pairs=pairs)


def table4(config: Config) -> Table:
    some = experts_together("model.layers.{}.experts") if config.num_experts else {}
    return like_llama(_NAMES4, some)(config)
