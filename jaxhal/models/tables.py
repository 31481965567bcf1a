"""Key tables: which stored tensor a parameter comes from, and how to turn it.

There is an entry for every parameter of :class:`jaxhal.models.decoder.Decoder`.  ``{}``
in a name is the layer number.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from jaxhal.models.config import Config

Turn = Callable[[np.ndarray, Config], np.ndarray]


class Origin(NamedTuple):
    """A stored tensor and how it becomes a parameter."""

    name: str
    turn: Turn


Table = Mapping[str, Origin]


def same(x: np.ndarray, config: Config) -> np.ndarray:
    return x


def transpose(x: np.ndarray, config: Config) -> np.ndarray:
    """Stored linear layers are ``[out, in]``; ours are ``[in, out]``."""
    return x.T


def third(which: int) -> Turn:
    """One of three equal parts of a fused query-key-value tensor's last axis."""

    def part(x: np.ndarray, config: Config) -> np.ndarray:
        return np.split(x, 3, axis=-1)[which]

    return part


def grouped(which: int, turn: Turn) -> Turn:
    """Query, key or value of Falcon's fused tensor, ``[kv, group + 2, head, ...]``.

    Plain multi-head Falcon stores ``[heads, 3, head, ...]`` and multi-query Falcon
    ``[heads + 2, head, ...]``; both are cases of the same layout.
    """

    def part(x: np.ndarray, config: Config) -> np.ndarray:
        kv, rest = config.num_key_value_heads, x.shape[1:]
        fused = x.reshape(kv, -1, config.head_dim, *rest)
        chosen = (fused[:, :-2], fused[:, -2:-1], fused[:, -1:])[which]
        return turn(chosen.reshape(-1, *rest), config)

    return part


def origins(
    modules: Mapping[str, str], kernel: Turn = transpose, bias: Turn = same
) -> dict[str, Origin]:
    """Where all parameters come from that a module may have, ours -> stored."""
    table = {}
    for ours, stored in modules.items():
        table[f"{ours}.kernel"] = Origin(f"{stored}.weight", kernel)
        table[f"{ours}.scale"] = Origin(f"{stored}.weight", same)
        table[f"{ours}.embedding"] = Origin(f"{stored}.weight", same)
        table[f"{ours}.bias"] = Origin(f"{stored}.bias", bias)
    return table


_LLAMA = {
    "embed_tokens": "model.embed_tokens",
    "lm_head": "lm_head",
    "norm": "model.norm",
    "blocks.input_norm": "model.layers.{}.input_layernorm",
    "blocks.self_attn.q_proj": "model.layers.{}.self_attn.q_proj",
    "blocks.self_attn.k_proj": "model.layers.{}.self_attn.k_proj",
    "blocks.self_attn.v_proj": "model.layers.{}.self_attn.v_proj",
    "blocks.self_attn.q_norm": "model.layers.{}.self_attn.q_norm",
    "blocks.self_attn.k_norm": "model.layers.{}.self_attn.k_norm",
    "blocks.self_attn.o_proj": "model.layers.{}.self_attn.o_proj",
    "blocks.mlp_norm": "model.layers.{}.post_attention_layernorm",
    "blocks.mlp.gate_proj": "model.layers.{}.mlp.gate_proj",
    "blocks.mlp.up_proj": "model.layers.{}.mlp.up_proj",
    "blocks.mlp.down_proj": "model.layers.{}.mlp.down_proj",
}
_GEMMA3 = _LLAMA | {
    "blocks.post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "blocks.mlp_norm": "model.layers.{}.pre_feedforward_layernorm",
    "blocks.post_mlp_norm": "model.layers.{}.post_feedforward_layernorm",
}
_GPT2 = {
    "embed_tokens": "transformer.wte",
    "embed_positions": "transformer.wpe",
    "lm_head": "lm_head",
    "norm": "transformer.ln_f",
    "blocks.input_norm": "transformer.h.{}.ln_1",
    "blocks.mlp_norm": "transformer.h.{}.ln_2",
}
_GPT2_LINEAR = {
    "blocks.self_attn.o_proj": "transformer.h.{}.attn.c_proj",
    "blocks.mlp.up_proj": "transformer.h.{}.mlp.c_fc",
    "blocks.mlp.down_proj": "transformer.h.{}.mlp.c_proj",
}
_FALCON = {
    "embed_tokens": "transformer.word_embeddings",
    "lm_head": "lm_head",
    "norm": "transformer.ln_f",
    "blocks.input_norm": "transformer.h.{}.input_layernorm",
    "blocks.mlp_norm": "transformer.h.{}.post_attention_layernorm",
    "blocks.self_attn.o_proj": "transformer.h.{}.self_attention.dense",
    "blocks.mlp.up_proj": "transformer.h.{}.mlp.dense_h_to_4h",
    "blocks.mlp.down_proj": "transformer.h.{}.mlp.dense_4h_to_h",
}
_FALCON_TWO_NORMS = {
    "blocks.input_norm": "transformer.h.{}.ln_attn",
    "blocks.mlp_norm": "transformer.h.{}.ln_mlp",
}
QKV = tuple(f"blocks.self_attn.{name}_proj" for name in "qkv")


def huggingface_table(config: Config) -> dict[str, Origin]:
    """The key table of a Hugging Face checkpoint."""
    if config.family == "gpt2":
        # It stores its layers as [in, out] already.
        table = origins(_GPT2) | origins(_GPT2_LINEAR, same)
        for which, name in enumerate(QKV):
            part, fused = third(which), "transformer.h.{}.attn.c_attn"
            table |= origins({name: fused}, part, part)
        return table
    if config.family == "falcon":
        two = config.block == "parallel_two_norms"
        table = origins(_FALCON | (_FALCON_TWO_NORMS if two else {}))
        for which, name in enumerate(QKV):
            fused = {name: "transformer.h.{}.self_attention.query_key_value"}
            table |= origins(fused, grouped(which, transpose), grouped(which, same))
        return table
    return origins(_GEMMA3 if config.family == "gemma3_text" else _LLAMA)
