"""Qwen3.5: what its settings mean, and where its experts are stored."""

from typing import Any

from jaxhal.models.config import attention_bias, delta_from, sparse
from jaxhal.models.rope_config import rope_of, rotary_dim
from jaxhal.models.settings import VOCABULARY, Settings
from jaxhal.models.tables import experts, origins

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
#: Where those of a layer and its shared one are.
EXPERTS = experts("mlp", "gate_proj", "up_proj", "down_proj") | origins(_SHARED)


def qwen3_5(raw: Settings) -> dict[str, Any]:
    return attention_bias(raw) | {
        "ropes": (rope_of(raw),),
        "rotary_dim": rotary_dim(raw, 0.25),
        "delta": delta_from(raw),
    }


def qwen3_5_moe(raw: Settings) -> dict[str, Any]:
    inner = raw.whole("moe_intermediate_size", most=VOCABULARY)
    return qwen3_5(raw) | sparse(raw) | {"expert_size": inner}
