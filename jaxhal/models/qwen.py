"""Qwen3.5: what its settings mean, and where its experts are stored."""

from typing import Any

from jaxhal.models.config import Config, attention_bias, delta_from, sparse
from jaxhal.models.rope_config import rope_from, rope_settings, rotary_dim
from jaxhal.models.settings import LENGTH, VOCABULARY, Settings
from jaxhal.models.tables import Table, experts, origins, qwen3_5_table

#: What holds for all of Qwen3.5.
SWITCHES = {"qk_norm": "head", "norm_offset": 1.0, "attention_gate": True}
SWITCHES_MOE = SWITCHES | {"shared": "gated", "norm_topk_prob": True}
DEFAULTS = {"head_dim": 256, "max_position_embeddings": 32768}
DEFAULTS_MOE = DEFAULTS | {
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "intermediate_size": 512,  # of the shared one
}
_MLP = "model.layers.{}.mlp"
_SHARED = {"blocks.shared.gate": f"{_MLP}.shared_expert_gate"} | {
    f"blocks.shared.mlp.{part}_proj": f"{_MLP}.shared_expert.{part}_proj"
    for part in ("gate", "up", "down")
}


def qwen3_5(raw: Settings) -> dict[str, Any]:
    length = raw.whole("max_position_embeddings", most=LENGTH)
    nested, theta = rope_settings(raw), raw.number("rope_theta", 1e4, above=1.0)
    return attention_bias(raw) | {
        "ropes": (rope_from(nested, theta, length),),
        "rotary_dim": rotary_dim(raw, nested, 0.25),
        "delta": delta_from(raw),
    }


def qwen3_5_moe(raw: Settings) -> dict[str, Any]:
    inner = raw.whole("moe_intermediate_size", most=VOCABULARY)
    return qwen3_5(raw) | sparse(raw) | {"expert_size": inner}


def table_moe(config: Config) -> Table:
    """Every layer has experts and a shared one."""
    routed = experts("mlp", "gate_proj", "up_proj", "down_proj")
    return {**qwen3_5_table(config), **routed, **origins(_SHARED)}
