"""Decoders from GGUF files: metadata to :class:`Config`, quantised blocks to arrays."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np

from jaxhal.io.showing import shown
from jaxhal.models.config import Config, check_family, checked, llama_like, rope_from
from jaxhal.models.settings import LAYERS, LENGTH, VOCABULARY, Settings
from jaxhal.models.tables import QKV, Origin, Turn, origins, same, transpose


class GGUFSource:
    """Metadata and dequantised tensors of one GGUF file."""

    def __init__(self, path: Path):
        import gguf

        self.where = str(path)
        try:
            self.reader = gguf.GGUFReader(path)
        except (ValueError, IndexError, OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{path} is not a whole GGUF file ({error}); download it again"
            ) from error
        self._tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        self.size = sum(int(tensor.n_elements) for tensor in self.reader.tensors)
        size = Path(path).stat().st_size
        for tensor in self.reader.tensors:
            if tensor.data_offset + tensor.n_bytes > size:
                raise ValueError(
                    f"{path} is cut short: {tensor.name} ends at byte "
                    f"{tensor.data_offset + tensor.n_bytes} of {size}; download it "
                    "again"
                )

    def names(self) -> set[str]:
        return set(self._tensors)

    def get(self, name: str) -> np.ndarray:
        import gguf

        tensor = self._tensors[name]
        try:
            return gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ValueError(
                f"{self.where}: {name} is stored as {tensor.tensor_type.name}, which "
                "the gguf package cannot dequantise; use another quantisation"
            ) from error

    def value(self, key: str, default: Any = None) -> Any:
        """A metadata value, ``default`` when the file does not have it."""
        field = self.reader.get_field(key)
        return default if field is None else self._contents(field)

    def _contents(self, field: Any) -> Any:
        try:
            return field.contents()
        except (ValueError, IndexError) as error:
            raise ValueError(
                f"{self.where}: {shown(field.name)} cannot be read ({error}); download "
                "it again"
            ) from error

    def settings(self, prefix: str) -> Settings:
        """The metadata whose keys begin so, without that beginning."""
        found = {
            key.removeprefix(prefix): self._contents(field)
            for key, field in self.reader.fields.items()
            if key.startswith(prefix)
        }
        return Settings(found, f"{self.where}: {prefix}*")

    def rows(self, name: str) -> int:
        """The length of a stored matrix."""
        shape = self._tensors[name].shape if name in self._tensors else ()
        if len(shape) != 2:
            raise ValueError(
                f"{self.where} has no matrix {name}; convert the checkpoint again"
            )
        return int(shape[1])


_FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "falcon": "falcon",
    "gpt2": "gpt2",
    "gemma3": "gemma3_text",
}


def config_from_gguf(source: GGUFSource) -> Config:
    """A :class:`Config` from GGUF metadata; a ValueError on what is not computed."""
    found = source.value("general.architecture", "")
    arch = check_family(found, _FAMILIES, source.where)
    stored = source.settings(f"{arch}.")
    layers = stored.whole("block_count", most=LAYERS)
    heads = stored.whole("attention.head_count")
    hidden = stored.whole("embedding_length")
    length = stored.whole("context_length", most=LENGTH)
    if "attention.key_length" not in stored and hidden % heads:
        stored.refuse("attention.head_count", f"it must divide {hidden}, the width")
    head_dim = stored.whole("attention.key_length", hidden // heads)
    names = source.names()
    theta = stored.number("rope.freq_base", 10000.0, above=1.0)
    rope = rope_from(_scaling(stored), theta, length)
    if "rope_freqs.weight" in names:
        divisors = source.get("rope_freqs.weight").ravel()
        if len(divisors) != head_dim // 2 or not (divisors > 0).all():
            raise ValueError(
                f"{source.where}: rope_freqs.weight is not {head_dim // 2} numbers "
                "above 0; convert the checkpoint again"
            )
        rope = dataclasses.replace(rope, divisors=tuple(map(float, divisors)))
    layer_norm = arch in ("gpt2", "falcon")
    eps = "layer_norm_epsilon" if layer_norm else "layer_norm_rms_epsilon"
    raw = Settings(
        {
            "model_type": _FAMILIES[arch],
            "vocab_size": source.rows("token_embd.weight"),
            "hidden_size": hidden,
            "intermediate_size": stored.whole("feed_forward_length", most=VOCABULARY),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": stored.whole("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": length,
            "tie_word_embeddings": "output.weight" not in names,
        },
        source.where,
    )
    window = stored.whole("attention.sliding_window", 0, least=0, most=LENGTH)
    switches: dict[str, Any] = {
        "norm_eps": stored.number(f"attention.{eps}"),
        "qkv_bias": "blk.0.attn_q.bias" in names or "blk.0.attn_qkv.bias" in names,
        "o_bias": "blk.0.attn_output.bias" in names,
        "mlp_bias": "blk.0.ffn_down.bias" in names,
        "qk_norm": "blk.0.attn_q_norm.weight" in names,
        "ropes": (rope,),
        "rope_of_layer": (0,) * layers,
        "windows": (window,) * layers,
    }
    if layer_norm:
        switches |= {"norm": "layer", "gated": False}
        switches["activation"] = "gelu_tanh" if arch == "gpt2" else "gelu"
    if arch == "gpt2":
        switches["positions"] = "learned"
    if arch == "falcon":
        two = "blk.0.attn_norm_2.weight" in names
        switches["block"] = "parallel_two_norms" if two else "parallel"
    if arch == "gemma3":
        switches |= _gemma3(stored, hidden, heads, head_dim, layers, window, rope)
    return checked(llama_like(raw, **switches), source.where)


def _scaling(stored: Settings) -> Settings:
    found = {}
    if stored.get("rope.scaling.type", "none") != "none":
        found = {
            "rope_type": stored["rope.scaling.type"],
            "factor": stored.get("rope.scaling.factor"),
            "original_max_position_embeddings": stored.get(
                "rope.scaling.original_context_length"
            ),
        }
    return Settings(found, stored.where)


def _gemma3(stored, hidden, heads, head_dim, layers, window, rope) -> dict[str, Any]:
    # Facts the file leaves out: every sixth layer is global, local layers turn with
    # base 10,000 unscaled, and the 27B model (62 layers) scales by width over heads.
    local = tuple(int((layer + 1) % 6 != 0) for layer in range(layers))
    base = stored.number("rope.freq_base_swa", 10000.0, above=1.0)
    per_head = hidden // heads if layers == 62 else head_dim
    plain = Settings({}, stored.where)
    return {
        "ropes": (rope, rope_from(plain, base, rope.original_length)),
        "rope_of_layer": local,
        "windows": tuple(window * flag for flag in local),
        "norm_offset": 1.0,
        "activation": "gelu_tanh",
        "block": "sandwich",
        "embedding_scale": float(math.sqrt(hidden)),
        "attention_scale": per_head**-0.5,
    }


def _unpermuted(heads: str, turn: Turn) -> Turn:
    """llama.cpp interleaves the two halves of each rotary head; this undoes it."""

    def restore(x: np.ndarray, config: Config) -> np.ndarray:
        count = getattr(config, heads)
        halves = x.reshape(count, config.head_dim // 2, 2, *x.shape[1:])
        return turn(halves.swapaxes(1, 2).reshape(x.shape), config)

    return restore


def _less_one(x: np.ndarray, config: Config) -> np.ndarray:
    """Gemma norms are stored with their 1 already added."""
    return x - 1.0


def _in_order(which: int, turn: Turn) -> Turn:
    """Fused rows are stored all queries, then all keys, then all values."""

    def part(x: np.ndarray, config: Config) -> np.ndarray:
        q = config.num_attention_heads * config.head_dim
        kv = config.num_key_value_heads * config.head_dim
        return turn(np.split(x, [q, q + kv])[which], config)

    return part


_TABLE = {
    "embed_tokens": "token_embd",
    "embed_positions": "position_embd",
    "lm_head": "output",
    "norm": "output_norm",
    "blocks.input_norm": "blk.{}.attn_norm",
    "blocks.self_attn.q_proj": "blk.{}.attn_q",
    "blocks.self_attn.k_proj": "blk.{}.attn_k",
    "blocks.self_attn.v_proj": "blk.{}.attn_v",
    "blocks.self_attn.q_norm": "blk.{}.attn_q_norm",
    "blocks.self_attn.k_norm": "blk.{}.attn_k_norm",
    "blocks.self_attn.o_proj": "blk.{}.attn_output",
    "blocks.post_attention_norm": "blk.{}.post_attention_norm",
    "blocks.mlp_norm": "blk.{}.ffn_norm",
    "blocks.mlp.gate_proj": "blk.{}.ffn_gate",
    "blocks.mlp.up_proj": "blk.{}.ffn_up",
    "blocks.mlp.down_proj": "blk.{}.ffn_down",
    "blocks.post_mlp_norm": "blk.{}.post_ffw_norm",
}
_TWO_NORMS = {
    "blocks.input_norm": "blk.{}.attn_norm_2",
    "blocks.mlp_norm": "blk.{}.attn_norm",
}


def gguf_table(config: Config) -> dict[str, Origin]:
    """The key table of a GGUF file."""
    two = config.block == "parallel_two_norms"
    table = origins(_TABLE | (_TWO_NORMS if two else {}))
    if config.family in ("falcon", "gpt2"):
        for which, name in enumerate(QKV):
            turns = _in_order(which, transpose), _in_order(which, same)
            table |= origins({name: "blk.{}.attn_qkv"}, *turns)
    if config.family == "llama":
        for name, heads in zip(
            QKV[:2], ("num_attention_heads", "num_key_value_heads"), strict=True
        ):
            turns = _unpermuted(heads, transpose), _unpermuted(heads, same)
            table |= origins({name: _TABLE[name]}, *turns)
    if config.norm_offset:
        for path, origin in table.items():
            if path.endswith("norm.scale"):
                table[path] = Origin(origin.name, _less_one)
    return table
