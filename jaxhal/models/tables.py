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


def third(which: int, turn: Turn = same) -> Turn:
    """One of three equal parts of a fused query-key-value tensor's last axis."""

    def part(x: np.ndarray, config: Config) -> np.ndarray:
        return turn(np.split(x, 3, axis=-1)[which], config)

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


def linear(ours: str, stored: str, turn: Turn = transpose) -> dict[str, Origin]:
    """Kernel and bias of one linear layer; the bias is dropped where we have none."""
    bias = same if turn is transpose else turn
    return {
        f"{ours}.kernel": Origin(f"{stored}.weight", turn),
        f"{ours}.bias": Origin(f"{stored}.bias", bias),
    }


def norm(ours: str, stored: str) -> dict[str, Origin]:
    return {
        f"{ours}.scale": Origin(f"{stored}.weight", same),
        f"{ours}.bias": Origin(f"{stored}.bias", same),
    }


_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def _llama_table() -> dict[str, Origin]:
    table = {
        "embed_tokens.embedding": Origin("model.embed_tokens.weight", same),
        "lm_head.kernel": Origin("lm_head.weight", transpose),
        **norm("norm", "model.norm"),
        **norm("blocks.input_norm", "model.layers.{}.input_layernorm"),
        **norm("blocks.mlp_norm", "model.layers.{}.post_attention_layernorm"),
        **norm("blocks.self_attn.q_norm", "model.layers.{}.self_attn.q_norm"),
        **norm("blocks.self_attn.k_norm", "model.layers.{}.self_attn.k_norm"),
    }
    for name in (*_PROJECTIONS, "o_proj"):
        path = f"self_attn.{name}"
        table |= linear(f"blocks.{path}", f"model.layers.{{}}.{path}")
    for name in ("gate_proj", "up_proj", "down_proj"):
        table |= linear(f"blocks.mlp.{name}", f"model.layers.{{}}.mlp.{name}")
    return table


def _gemma3_table() -> dict[str, Origin]:
    layer = "model.layers.{}"
    return {
        **_llama_table(),
        **norm("blocks.post_attention_norm", f"{layer}.post_attention_layernorm"),
        **norm("blocks.mlp_norm", f"{layer}.pre_feedforward_layernorm"),
        **norm("blocks.post_mlp_norm", f"{layer}.post_feedforward_layernorm"),
    }


def _gpt2_table() -> dict[str, Origin]:
    layer = "transformer.h.{}"
    table = {
        "embed_tokens.embedding": Origin("transformer.wte.weight", same),
        "embed_positions.embedding": Origin("transformer.wpe.weight", same),
        "lm_head.kernel": Origin("lm_head.weight", transpose),
        **norm("norm", "transformer.ln_f"),
        **norm("blocks.input_norm", f"{layer}.ln_1"),
        **norm("blocks.mlp_norm", f"{layer}.ln_2"),
        # GPT-2 stores its layers as [in, out] already.
        **linear("blocks.self_attn.o_proj", f"{layer}.attn.c_proj", same),
        **linear("blocks.mlp.up_proj", f"{layer}.mlp.c_fc", same),
        **linear("blocks.mlp.down_proj", f"{layer}.mlp.c_proj", same),
    }
    for which, name in enumerate(_PROJECTIONS):
        turn = third(which)
        table |= linear(f"blocks.self_attn.{name}", f"{layer}.attn.c_attn", turn)
    return table


def _falcon_table(config: Config) -> dict[str, Origin]:
    layer = "transformer.h.{}"
    two = config.block == "parallel_two_norms"
    second = "ln_mlp" if two else "post_attention_layernorm"
    table = {
        "embed_tokens.embedding": Origin("transformer.word_embeddings.weight", same),
        "lm_head.kernel": Origin("lm_head.weight", transpose),
        **norm("norm", "transformer.ln_f"),
        **norm(
            "blocks.input_norm", f"{layer}.{'ln_attn' if two else 'input_layernorm'}"
        ),
        **norm("blocks.mlp_norm", f"{layer}.{second}"),
        **linear("blocks.self_attn.o_proj", f"{layer}.self_attention.dense"),
        **linear("blocks.mlp.up_proj", f"{layer}.mlp.dense_h_to_4h"),
        **linear("blocks.mlp.down_proj", f"{layer}.mlp.dense_4h_to_h"),
    }
    fused = f"{layer}.self_attention.query_key_value"
    for which, name in enumerate(_PROJECTIONS):
        ours = f"blocks.self_attn.{name}"
        table[f"{ours}.kernel"] = Origin(f"{fused}.weight", grouped(which, transpose))
        table[f"{ours}.bias"] = Origin(f"{fused}.bias", grouped(which, same))
    return table


def huggingface_table(config: Config) -> dict[str, Origin]:
    """The key table of a Hugging Face checkpoint."""
    if config.family == "gpt2":
        return _gpt2_table()
    if config.family == "falcon":
        return _falcon_table(config)
    return _gemma3_table() if config.family == "gemma3_text" else _llama_table()
