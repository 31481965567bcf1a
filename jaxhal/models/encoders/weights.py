"""Key tables of the encoders: which stored tensor fills which parameter."""

import re
from pathlib import Path
from typing import Any

from jaxhal.models.encoders.config import EncoderConfig
from jaxhal.models.encoders.encoder import Encoder
from jaxhal.models.safetensors import SafetensorsSource
from jaxhal.models.tables import GATED, QKV, Table, fused, halves, origins, split
from jaxhal.models.weights import fill

_PREFIXES = {
    "bert": "bert.",
    "roberta": "roberta.",
    "deberta-v2": "deberta.",
    "modernbert": "model.",
    "eurobert": "model.",
    "t5": "transformer.",
}
# What other heads store beside an encoder, and buffers.
IGNORED = (
    "*position_ids",
    "embeddings.position_embeddings.weight",  # of a DeBERTa that adds none
    "pooler.dense.*",
    "cls.*",
    "head.*",
    "decoder.*",
    "lm_head.*",
    "lm_predictions.*",
    "mask_predictions.*",
)


def load_encoder_weights(
    folder: Path, config: EncoderConfig, dtype: Any
) -> tuple[Any, Any]:
    """``(graphdef, params)`` of the safetensors in a folder, as ``fill`` reads them."""
    source = SafetensorsSource(folder, rename=lambda name: plain_name(name, config))
    return fill(config, source, encoder_table(config), dtype, Encoder, IGNORED)


def plain_name(stored: str, config: EncoderConfig) -> str:
    """A stored name as the key table has it: without prefix, by today's spelling."""
    if config.family == "t5":  # HHEM's is inside another model
        stored = stored.removeprefix("t5.")
    name = stored.removeprefix(_PREFIXES[config.family])
    name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
    name = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)
    for old, new in _OTHERS.get(config.family, {}).items():
        name = re.sub(rf"^{old}\.", f"{new.format(config.num_hidden_layers)}.", name)
    return name


# Modules and what the tables take them for.  The norm at the end is one more of those
# of the layers; T5's table of tokens is stored under either name, or both.
_OTHERS = {
    "modernbert": {"final_norm": "layers.{}.attn_norm"},
    "eurobert": {"norm": "layers.{}.input_layernorm"},
    "t5": {
        "encoder.final_layer_norm": "encoder.block.{}.layer.0.layer_norm",
        "encoder.embed_tokens": "shared",
    },
}
_SELF = "encoder.layer.{}.attention.self"
_BERT = {
    "embed_tokens": "embeddings.word_embeddings",
    "embed_positions": "embeddings.position_embeddings",
    "embed_types": "embeddings.token_type_embeddings",
    "embed_norm": "embeddings.LayerNorm",
    "embed_relative": "encoder.rel_embeddings",
    "relative_norm": "encoder.LayerNorm",
    "conv": "encoder.conv.conv",
    "conv.norm": "encoder.conv.LayerNorm",
    "blocks.self_attn.q_proj": _SELF + ".query",
    "blocks.self_attn.k_proj": _SELF + ".key",
    "blocks.self_attn.v_proj": _SELF + ".value",
    "blocks.self_attn.relative_k_proj": _SELF + ".pos_key_proj",
    "blocks.self_attn.relative_q_proj": _SELF + ".pos_query_proj",
    "blocks.self_attn.o_proj": "encoder.layer.{}.attention.output.dense",
    "blocks.attention_norm": "encoder.layer.{}.attention.output.LayerNorm",
    "blocks.mlp.up_proj": "encoder.layer.{}.intermediate.dense",
    "blocks.mlp.down_proj": "encoder.layer.{}.output.dense",
    "blocks.output_norm": "encoder.layer.{}.output.LayerNorm",
    "head.dense": "pooler.dense",
    "head.out_proj": "classifier",
}
_ROBERTA = _BERT | {
    "head.dense": "classifier.dense",
    "head.out_proj": "classifier.out_proj",
}
_MODERNBERT = {
    "embed_tokens": "embeddings.tok_embeddings",
    "embed_norm": "embeddings.norm",
    "blocks.self_attn.o_proj": "layers.{}.attn.Wo",
    "blocks.attention_norm": "layers.{}.mlp_norm",
    "blocks.mlp.down_proj": "layers.{}.mlp.Wo",
    "blocks.output_norm": "layers.{next}.attn_norm",
    "head.dense": "head.dense",
    "head.norm": "head.norm",
    "head.out_proj": "classifier",
}
_EUROBERT = {
    "embed_tokens": "embed_tokens",
    "embed_norm": "layers.0.input_layernorm",
    "blocks.attention_norm": "layers.{}.post_attention_layernorm",
    "blocks.output_norm": "layers.{next}.input_layernorm",
    "head.dense": "dense",
    "head.out_proj": "classifier",
} | {
    f"blocks.{name}": f"layers.{{}}.{name}"
    for name in (
        *(f"self_attn.{part}_proj" for part in "qkvo"),
        *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
    )
}
_T5_ATTENTION = "encoder.block.{}.layer.0.SelfAttention"
_T5_MLP = "encoder.block.{}.layer.1.DenseReluDense"
_T5 = {
    "embed_tokens": "shared",
    "embed_norm": "encoder.block.0.layer.0.layer_norm",
    "relative_bias": f"{_T5_ATTENTION.format(0)}.relative_attention_bias",
    **{f"blocks.self_attn.{part}_proj": f"{_T5_ATTENTION}.{part}" for part in "qkvo"},
    "blocks.attention_norm": "encoder.block.{}.layer.1.layer_norm",
    "blocks.mlp.gate_proj": f"{_T5_MLP}.wi_0",
    "blocks.mlp.up_proj": f"{_T5_MLP}.wi_1",
    "blocks.mlp.down_proj": f"{_T5_MLP}.wo",
    "blocks.output_norm": "encoder.block.{next}.layer.0.layer_norm",
    "head.out_proj": "classifier",
}


def encoder_table(config: EncoderConfig) -> Table:
    """The key table of a Hugging Face checkpoint."""
    if config.family == "modernbert":
        return (
            origins(_MODERNBERT)
            | fused("layers.{}.attn.Wqkv", split)
            | fused("layers.{}.mlp.Wi", halves, GATED)
        )
    if config.family == "eurobert":
        return origins(_EUROBERT)
    if config.family == "t5":
        return origins(_T5)
    pooled = config.family == "roberta" and config.labelled == "texts"
    modules = _ROBERTA if pooled else _BERT
    if config.family == "deberta-v2":
        modules = modules | {name: f"{modules[name]}_proj" for name in QKV}
    return origins(modules)
