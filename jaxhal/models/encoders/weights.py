"""Key tables of the encoders: which stored tensor fills which parameter."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from jaxhal.models.config import Config
from jaxhal.models.encoders.config import EncoderConfig
from jaxhal.models.encoders.encoder import Encoder
from jaxhal.models.tables import Origin, Table, Turn, linear, norm, same, transpose
from jaxhal.models.weights import SafetensorsSource, fill

_PREFIXES = {
    "bert": "bert.",
    "roberta": "roberta.",
    "deberta-v2": "deberta.",
    "modernbert": "model.",
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
    """``(graphdef, params)`` of the safetensors in a folder.

    Raises:
      FileNotFoundError: when there are none.
      ValueError: when they do not fit ``config``, see
        :func:`jaxhal.models.weights.fill`.
    """
    source = SafetensorsSource(folder, rename=lambda name: plain_name(name, config))
    return fill(config, source, encoder_table(config), dtype, Encoder, IGNORED)


def plain_name(stored: str, config: EncoderConfig) -> str:
    """A stored name as the key table has it: without prefix, by today's spelling.

    A ModernBERT norm counts for the layer that it follows.
    """
    name = stored.removeprefix(_PREFIXES[config.family])
    name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
    name = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)
    if config.family == "modernbert":
        last = config.num_hidden_layers
        name = re.sub(r"^final_norm\.", f"layers.{last}.attn_norm.", name)
        name = re.sub(
            r"^layers\.(\d+)\.attn_norm\.",
            lambda found: f"layers.{int(found[1]) - 1}.next_norm.",
            name,
        )
    return name


def encoder_table(config: EncoderConfig) -> Table:
    """The key table of a Hugging Face checkpoint."""
    if config.family == "modernbert":
        return _modernbert_table()
    suffix = "_proj" if config.family == "deberta-v2" else ""
    return {
        **_embedding_table(),
        **_layer_table(suffix),
        **_head_table(own_pooler=config.family == "roberta"),
    }


def _embedding_table() -> dict[str, Origin]:
    def rows(ours: str, stored: str) -> dict[str, Origin]:
        return {f"{ours}.embedding": Origin(f"{stored}.weight", same)}

    return {
        **rows("embed_tokens", "embeddings.word_embeddings"),
        **rows("embed_positions", "embeddings.position_embeddings"),
        **rows("embed_types", "embeddings.token_type_embeddings"),
        **norm("embed_norm", "embeddings.LayerNorm"),
        **rows("embed_relative", "encoder.rel_embeddings"),
        **norm("relative_norm", "encoder.LayerNorm"),
        "conv.kernel": Origin("encoder.conv.conv.weight", transpose),
        "conv.bias": Origin("encoder.conv.conv.bias", same),
        **norm("conv.norm", "encoder.conv.LayerNorm"),
    }


def _layer_table(suffix: str) -> dict[str, Origin]:
    layer, ours = "encoder.layer.{}", "blocks.self_attn"
    attention = f"{layer}.attention.self"
    return {
        **linear(f"{ours}.q_proj", f"{attention}.query{suffix}"),
        **linear(f"{ours}.k_proj", f"{attention}.key{suffix}"),
        **linear(f"{ours}.v_proj", f"{attention}.value{suffix}"),
        **linear(f"{ours}.relative_k_proj", f"{attention}.pos_key_proj"),
        **linear(f"{ours}.relative_q_proj", f"{attention}.pos_query_proj"),
        **linear(f"{ours}.o_proj", f"{layer}.attention.output.dense"),
        **norm("blocks.attention_norm", f"{layer}.attention.output.LayerNorm"),
        **linear("blocks.mlp.up_proj", f"{layer}.intermediate.dense"),
        **linear("blocks.mlp.down_proj", f"{layer}.output.dense"),
        **norm("blocks.output_norm", f"{layer}.output.LayerNorm"),
    }


def _head_table(own_pooler: bool) -> dict[str, Origin]:
    dense, last = "pooler.dense", "classifier"
    if own_pooler:
        dense, last = "classifier.dense", "classifier.out_proj"
    return {**linear("head.dense", dense), **linear("head.out_proj", last)}


def _modernbert_table() -> dict[str, Origin]:
    layer = "layers.{}"
    tokens = Origin("embeddings.tok_embeddings.weight", same)
    table = {
        "embed_tokens.embedding": tokens,
        **norm("embed_norm", "embeddings.norm"),
        **linear("blocks.self_attn.o_proj", f"{layer}.attn.Wo"),
        **norm("blocks.attention_norm", f"{layer}.mlp_norm"),
        **linear("blocks.mlp.down_proj", f"{layer}.mlp.Wo"),
        **norm("blocks.output_norm", f"{layer}.next_norm"),
        **linear("head.dense", "head.dense"),
        **norm("head.norm", "head.norm"),
        **linear("head.out_proj", "classifier"),
    }
    for which, name in enumerate(("q_proj", "k_proj", "v_proj")):
        ours = f"blocks.self_attn.{name}"
        table |= linear(ours, f"{layer}.attn.Wqkv", _part(which, 3))
    for which, name in enumerate(("gate_proj", "up_proj")):
        table |= linear(f"blocks.mlp.{name}", f"{layer}.mlp.Wi", _part(which, 2))
    return table


def _part(which: int, count: int) -> Turn:
    """One of the equal parts of a fused linear layer, kernel or bias."""

    def part(x: np.ndarray, config: Config) -> np.ndarray:
        return np.split(x, count)[which].T

    return part
