"""Key tables of the encoders: which stored tensor fills which parameter."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from jaxhal.models.encoders.config import EncoderConfig
from jaxhal.models.encoders.encoder import Encoder
from jaxhal.models.tables import QKV, Table, fused, origins, split
from jaxhal.models.weights import SafetensorsSource, fill

_PREFIXES = {
    "bert": "bert.",
    "roberta": "roberta.",
    "deberta-v2": "deberta.",
    "modernbert": "model.",
    "eurobert": "model.",
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
    name = stored.removeprefix(_PREFIXES[config.family])
    name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
    name = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)
    if config.family in _LAST_NORM:
        last, norm = _LAST_NORM[config.family]
        first = f"layers.{config.num_hidden_layers}.{norm}."
        name = re.sub(rf"^{last}\.", first, name)
    return name


# The norm at the end, and those of the layers, of which it is one more.
_LAST_NORM = {
    "modernbert": ("final_norm", "attn_norm"),
    "eurobert": ("norm", "input_layernorm"),
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


def encoder_table(config: EncoderConfig) -> Table:
    """The key table of a Hugging Face checkpoint."""
    if config.family == "modernbert":
        return (
            origins(_MODERNBERT)
            | fused("layers.{}.attn.Wqkv", split)
            | fused(
                "layers.{}.mlp.Wi",
                lambda which: lambda x, config: np.split(x, 2)[which].T,
                ("blocks.mlp.gate_proj", "blocks.mlp.up_proj"),
            )
        )
    if config.family == "eurobert":
        return origins(_EUROBERT)
    pooled = config.family == "roberta" and config.labelled == "texts"
    modules = _ROBERTA if pooled else _BERT
    if config.family == "deberta-v2":
        modules = modules | {name: f"{modules[name]}_proj" for name in QKV}
    return origins(modules)
