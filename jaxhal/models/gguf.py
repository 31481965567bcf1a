"""Decoders from GGUF files: metadata to :class:`Config`, quantised blocks to arrays."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxhal.io.showing import shown
from jaxhal.models import blocks, hub
from jaxhal.models.config import (
    Config,
    Rope,
    build,
    check_family,
    layer_count,
    rope_from,
)
from jaxhal.models.families import FAMILIES
from jaxhal.models.quantized import Packed
from jaxhal.models.settings import LENGTH, Settings
from jaxhal.models.tables import QKV, Origin, fused, origins, split, unpaired


class GGUFSource:
    """Metadata and dequantised tensors of one GGUF file, or of all its parts."""

    def __init__(self, path: Path):
        import gguf

        class Reader(gguf.GGUFReader):
            # It takes a slice for each token; of a memmap those are slow.
            data = property(
                lambda self: self._plain,
                lambda self, found: setattr(self, "_plain", np.asarray(found)),
            )

        self.where = str(path)
        self._tensors, self.bytes = {}, 0
        for number, name in enumerate(hub.parts(path.name)):
            part = path.with_name(name)
            if not part.is_file():
                raise FileNotFoundError(f"{part} does not exist")
            try:
                reader = Reader(part)
            except (ValueError, IndexError, OSError, UnicodeDecodeError) as error:
                raise ValueError(
                    f"{part} is not a whole GGUF file ({error}); download it again"
                ) from error
            if not number:
                self.reader = reader
            self._add(part, reader.tensors)
        self.size = sum(int(tensor.n_elements) for tensor in self._tensors.values())

    def _add(self, path: Path, tensors: Sequence[Any]) -> None:
        size = path.stat().st_size
        for tensor in tensors:
            end = tensor.data_offset + tensor.n_bytes
            if end > size:
                raise ValueError(
                    f"{path} is cut short: {tensor.name} ends at byte {end} of {size}; "
                    "download it again"
                )
            self._tensors[tensor.name] = tensor
            self.bytes += int(tensor.n_bytes)

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

    def kind(self, name: str) -> str:
        """The format of a tensor's blocks, ``""`` of numbers.

        Raises:
          ValueError: on a tensor that is missing, or that cannot stay in its format.
        """
        if name not in self._tensors:
            raise ValueError(f"{self.where} has no tensor {name}; download it again")
        kind = self._tensors[name].tensor_type.name
        if kind in ("F32", "F16", "BF16"):
            return ""
        if kind not in blocks.FORMATS:
            raise ValueError(
                f"{self.where}: {name} is stored as {kind}, which cannot stay so; load "
                f"it with weights='dequantised', or use a file of "
                f"{', '.join(blocks.FORMATS)}"
            )
        return kind

    def packed(
        self, name: str, turn: Callable[[np.ndarray], np.ndarray], kind: str
    ) -> Packed:
        """A matrix as it is stored, in blocks of its format.

        ``turn`` puts rows, of bytes here, in the order of the parameter.
        """
        return blocks.pack(kind, turn(self._tensors[name].data))

    def settings(self, prefix: str) -> Settings:
        """The metadata whose keys begin so, without that beginning."""
        found = {}
        for key, field in self.reader.fields.items():
            if key.startswith(prefix):
                try:
                    found[key.removeprefix(prefix)] = field.contents()
                except (ValueError, IndexError) as error:
                    raise ValueError(
                        f"{self.where}: {shown(key)} cannot be read ({error}); "
                        "download it again"
                    ) from error
        return Settings(found, f"{self.where}: {prefix}*")

    def rows(self, name: str) -> int:
        """The length of a stored matrix."""
        shape = self._tensors[name].shape if name in self._tensors else ()
        if len(shape) != 2:
            raise ValueError(
                f"{self.where} has no matrix {name}; convert the checkpoint again"
            )
        return int(shape[1])


# The architectures, and the metadata of one, by the names of a config.json.
_FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "falcon": "falcon",
    "gpt2": "gpt2",
    "gemma3": "gemma3_text",
}
_KEYS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
}
_SCALING = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}


def config_from_gguf(source: GGUFSource) -> Config:
    """A :class:`Config` from GGUF metadata; a ValueError on what is not computed."""
    found = source.settings("general.").get("architecture", "")
    arch = check_family(found, _FAMILIES, source.where)
    family = FAMILIES[_FAMILIES[arch]]
    stored, names = source.settings(f"{arch}."), source.names()
    layer_norm = family.switches.get("norm") == "layer"
    eps = "layer_norm_epsilon" if layer_norm else "layer_norm_rms_epsilon"
    raw = _named(stored, _KEYS | {f"attention.{eps}": "rms_norm_eps"})
    scaled = stored.get("rope.scaling.type", "none") != "none"
    scaling = _named(stored, _SCALING if scaled else {})
    if scaled:
        scaling.one_of("rope_type", None, ("linear", "yarn", "llama3", "dynamic"))
    theta = raw.number("rope_theta", 10000.0, above=1.0)
    length = raw.whole("max_position_embeddings", most=LENGTH)
    raw = raw.over(
        {
            "vocab_size": source.rows("token_embd.weight"),
            "tie_word_embeddings": "output.weight" not in names,
            "hidden_act": family.defaults.get("hidden_act", "silu"),
        }
    )
    # The file says by its tensors which parts a model has, whatever its family.
    switches = {
        **family.switches,
        "norm_eps": raw.number("rms_norm_eps"),
        "ropes": (rope_from(scaling, theta, length),),
        "windows": (_window(raw),) * layer_count(raw),
        "qkv_bias": not names.isdisjoint(("blk.0.attn_q.bias", "blk.0.attn_qkv.bias")),
        "o_bias": "blk.0.attn_output.bias" in names,
        "mlp_bias": "blk.0.ffn_down.bias" in names,
        "qk_norm": "head" if "blk.0.attn_q_norm.weight" in names else None,
    }
    if arch == "falcon":  # whose older forms are cases of the new one
        two = "blk.0.attn_norm_2.weight" in names
        switches["block"] = "parallel_two_norms" if two else "parallel"
    config = build(Config, _FAMILIES[arch], raw, switches)
    if "rope_freqs.weight" in names:
        config = _divided(config, source)
    return _gemma3(config, raw) if arch == "gemma3" else config


def _named(stored: Settings, names: Mapping[str, str]) -> Settings:
    """These keys alone, under the names of a config.json."""
    found = {key: stored[key] for key in names if key in stored}
    return Settings(found, stored.where).named(names)


def _window(raw: Settings) -> int:
    return raw.whole("sliding_window", 0, least=0, most=LENGTH)


def _divided(config: Config, source: GGUFSource) -> Config:
    """With the rotary scaling that is stored as a tensor."""
    divisors = source.get("rope_freqs.weight").ravel()
    if len(divisors) != config.head_dim // 2 or not (divisors > 0).all():
        raise ValueError(
            f"{source.where}: rope_freqs.weight is not {config.head_dim // 2} numbers "
            "above 0; convert the checkpoint again"
        )
    divided = tuple(map(float, divisors))
    rope = dataclasses.replace(config.ropes[0], divisors=divided)
    return dataclasses.replace(config, ropes=(rope,))


def _gemma3(config: Config, raw: Settings) -> Config:
    """With what the file leaves out.

    Every sixth layer is global, local layers turn with base 10,000 unscaled, and the
    27B model (62 layers) scales by width over heads.
    """
    hidden, layers = config.hidden_size, config.num_hidden_layers
    local = tuple(int((layer + 1) % 6 != 0) for layer in range(layers))
    theta = raw.number("rope_local_base_freq", 10000.0, above=1.0)
    original = config.ropes[0].original_length
    large = layers == 62
    width = hidden // config.num_attention_heads if large else config.head_dim
    return dataclasses.replace(
        config,
        ropes=(*config.ropes, Rope(theta=theta, original_length=original)),
        rope_of_layer=local,
        windows=tuple(_window(raw) * slides for slides in local),
        activation="gelu_tanh",
        embedding_scale=hidden**0.5,
        attention_scale=width**-0.5,
    )


def _less_one(x: np.ndarray, config: Config) -> np.ndarray:
    """Gemma norms are stored with their 1 already added."""
    return x - 1.0


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
        table |= fused("blk.{}.attn_qkv", split)
    if config.family == "llama":
        heads = ("num_attention_heads", "num_key_value_heads")
        for name, count in zip(QKV[:2], heads, strict=True):
            table |= origins({name: _TABLE[name]}, unpaired(count))
    if config.norm_offset:
        for path, origin in table.items():
            if path.endswith("norm.scale"):
                table[path] = Origin(origin.name, _less_one)
    return table
