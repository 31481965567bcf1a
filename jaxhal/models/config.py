"""From a checkpoint's own description to one frozen, hashable :class:`Config`."""

import dataclasses
import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position parameters, in the names of the Hugging Face config."""

    theta: float = 10000.0
    kind: Literal["default", "linear", "dynamic", "yarn", "llama3"] = "default"
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    divisors: tuple[float, ...] = ()  # per channel pair, as GGUF stores llama3 scaling


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything static about a decoder; one class for every family.

    Family differences are switches read at trace time; differences between the layers
    of one model (``windows``, ``rope_of_layer``) become arrays that the scan over
    layers carries along.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    context_length: int
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    norm_offset: float = 0.0  # added to the stored scale: 1 for Gemma
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    gated: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    # pre: norm -> part -> add; sandwich: also a norm after each part; parallel:
    # attention and MLP read the same residual, through one norm or two.
    block: Literal["pre", "sandwich", "parallel", "parallel_two_norms"] = "pre"
    positions: Literal["rope", "learned"] = "rope"
    ropes: tuple[Rope, ...] = (Rope(),)
    rope_of_layer: tuple[int, ...] = ()
    windows: tuple[int, ...] = ()  # keys a query may see, itself included; 0 = all
    embedding_scale: float = 1.0
    attention_scale: float | None = None  # None = head_dim ** -0.5
    tie_word_embeddings: bool = False

    @property
    def scale(self) -> float:
        """The factor on ``q k^T``."""
        if self.attention_scale is None:
            return self.head_dim**-0.5
        return self.attention_scale


def read_config(folder: Path) -> Config:
    """Reads ``config.json`` of a Hugging Face folder.

    Raises:
      FileNotFoundError: when the folder has no config.json.
      ValueError: on an unknown architecture or a setting this decoder does not compute.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist; a model folder holds config.json, the tokenizer "
            "files and *.safetensors"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    return from_huggingface(raw)


def from_huggingface(raw: Mapping[str, Any]) -> Config:
    """Builds a :class:`Config` from the dictionary of a Hugging Face config.json."""
    family = raw.get("model_type", "")
    if family == "gemma3" and "text_config" in raw:
        raw = {**raw["text_config"], "model_type": "gemma3_text"}
        family = "gemma3_text"
    check_family(family, _FAMILIES)
    raw = {key: value for key, value in raw.items() if value is not None}
    return _FAMILIES[family](raw)


def check_family(family: str, known: Mapping[str, Any]) -> None:
    """Raises ValueError, with the nearest name, when ``family`` is not known."""
    if family not in known:
        near = difflib.get_close_matches(family, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"unknown architecture {family!r}{hint} (known: {', '.join(known)})"
        )


_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}


def _activation(name: str) -> Any:
    if name not in _ACTIVATIONS:
        raise ValueError(
            f"unknown activation {name!r} (known: {', '.join(_ACTIVATIONS)})"
        )
    return _ACTIVATIONS[name]


def rope_from(raw: Mapping[str, Any], theta: float, length: int) -> Rope:
    """One rotary description; ``raw`` is ``rope_scaling`` or ``rope_parameters``."""
    raw = {key: value for key, value in raw.items() if value is not None}
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind not in ("default", "linear", "dynamic", "yarn", "llama3"):
        raise ValueError(
            f"unknown rope scaling {kind!r}; known: default, linear, dynamic, yarn, "
            "llama3"
        )
    if kind != "default" and "factor" not in raw:
        raise ValueError(f"rope scaling {kind!r} needs a 'factor'; got {dict(raw)}")
    names = {field.name for field in dataclasses.fields(Rope)}
    extra = {key: value for key, value in raw.items() if key in names}
    scaled = kind in ("yarn", "llama3")
    original = raw.get("original_max_position_embeddings", length) if scaled else length
    theta = float(raw.get("rope_theta", theta))
    extra |= {"theta": theta, "kind": kind, "original_length": int(original)}
    return Rope(**extra)


def _ropes(raw: Mapping[str, Any], length: int) -> Rope:
    """The rope of a family with one kind of layer, old or new config spelling."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    return rope_from(scaling, float(raw.get("rope_theta", 10000.0)), length)


def context_length(rope: Rope, length: int) -> int:
    """Tokens a model with this rope can take, given its max_position_embeddings."""
    if rope.kind in ("linear", "dynamic", "yarn"):
        return max(length, int(rope.factor * rope.original_length))
    return length


def llama_like(raw: Mapping[str, Any], **switches: Any) -> Config:
    """The settings Llama, Mistral, Qwen and Gemma share; ``switches`` override."""
    layers = int(raw["num_hidden_layers"])
    heads = int(raw["num_attention_heads"])
    length = int(raw.get("max_position_embeddings", 2048))
    hidden = int(raw["hidden_size"])
    if "ropes" not in switches:
        rope = _ropes(raw, length)
        switches |= {"ropes": (rope,), "rope_of_layer": (0,) * layers}
    settings: dict[str, Any] = {
        "family": raw["model_type"],
        "vocab_size": int(raw["vocab_size"]),
        "hidden_size": hidden,
        "intermediate_size": int(raw["intermediate_size"]),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": int(raw.get("num_key_value_heads", heads)),
        "head_dim": int(raw.get("head_dim", hidden // heads)),
        "context_length": context_length(switches["ropes"][0], length),
        "norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "activation": _activation(raw.get("hidden_act", "silu")),
        "windows": (0,) * layers,
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
    }
    return Config(**(settings | switches))


def _llama(raw: Mapping[str, Any]) -> Config:
    bias = bool(raw.get("attention_bias", False))
    mlp_bias = bool(raw.get("mlp_bias", False))
    return llama_like(raw, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)


def _mistral(raw: Mapping[str, Any]) -> Config:
    window = int(raw.get("sliding_window", 0))
    return llama_like(raw, windows=(window,) * int(raw["num_hidden_layers"]))


def _qwen_windows(raw: Mapping[str, Any]) -> tuple[int, ...]:
    layers = int(raw["num_hidden_layers"])
    window = int(raw.get("sliding_window", 0))
    if not raw.get("use_sliding_window", False):
        return (0,) * layers
    if "layer_types" in raw:
        return tuple(
            window if kind == "sliding_attention" else 0 for kind in raw["layer_types"]
        )
    first = int(raw.get("max_window_layers", layers))
    return tuple(window if layer >= first else 0 for layer in range(layers))


def _qwen2(raw: Mapping[str, Any]) -> Config:
    return llama_like(raw, qkv_bias=True, windows=_qwen_windows(raw))


def _qwen3(raw: Mapping[str, Any]) -> Config:
    bias = bool(raw.get("attention_bias", False))
    return llama_like(
        {"head_dim": 128, **raw},
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        windows=_qwen_windows(raw),
    )


def _gemma3(raw: Mapping[str, Any]) -> Config:
    if raw.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention is an encoder, not a decoder")
    if raw.get("final_logit_softcapping") or raw.get("attn_logit_softcapping"):
        raise ValueError("logit soft-capping is not computed; Gemma 3 has it off")
    raw = {"max_position_embeddings": 131072, "head_dim": 256, **raw}
    layers, length = int(raw["num_hidden_layers"]), int(raw["max_position_embeddings"])
    pattern = int(raw.get("sliding_window_pattern", 6))
    kinds = raw.get("layer_types") or [
        "full_attention" if (layer + 1) % pattern == 0 else "sliding_attention"
        for layer in range(layers)
    ]
    nested = raw.get("rope_parameters", {})
    whole = nested.get("full_attention", raw.get("rope_scaling", {})) or {}
    local = nested.get("sliding_attention", {}) or {}
    local_theta = float(raw.get("rope_local_base_freq", 10000.0))
    full_rope = rope_from(whole, float(raw.get("rope_theta", 1e6)), length)
    window = int(raw.get("sliding_window", 4096))
    return llama_like(
        raw,
        ropes=(full_rope, rope_from(local, local_theta, length)),
        rope_of_layer=tuple(int(kind == "sliding_attention") for kind in kinds),
        windows=tuple(window if k == "sliding_attention" else 0 for k in kinds),
        # The published length already counts the scaling of the global layers.
        context_length=length,
        norm_offset=1.0,
        activation=_activation(raw.get("hidden_activation", "gelu_pytorch_tanh")),
        qk_norm=True,
        qkv_bias=bool(raw.get("attention_bias", False)),
        o_bias=bool(raw.get("attention_bias", False)),
        block="sandwich",
        embedding_scale=float(raw["hidden_size"]) ** 0.5,
        attention_scale=float(raw.get("query_pre_attn_scalar", 256)) ** -0.5,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", True)),
    )


def _falcon(raw: Mapping[str, Any]) -> Config:
    if raw.get("alibi", False):
        raise ValueError("Falcon with alibi is not supported; rotary Falcon models are")
    heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    new = bool(raw.get("new_decoder_architecture", False))
    if new:
        kv_heads = int(raw.get("num_kv_heads", heads))
        norms = int(raw.get("num_ln_in_parallel_attn", 2))
        block = "parallel_two_norms" if norms == 2 else "parallel"
    else:
        kv_heads = 1 if raw.get("multi_query", True) else heads
        block = "parallel" if raw.get("parallel_attn", True) else "pre"
    bias = bool(raw.get("bias", False))
    return llama_like(
        {
            **raw,
            "intermediate_size": raw.get("ffn_hidden_size", 4 * hidden),
            "num_key_value_heads": kv_heads,
            "hidden_act": raw.get("activation", "gelu"),
        },
        norm="layer",
        norm_eps=float(raw.get("layer_norm_epsilon", 1e-5)),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        block=block,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", True)),
    )


def _gpt2(raw: Mapping[str, Any]) -> Config:
    for switch in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"):
        if raw.get(switch, False):
            raise ValueError(f"GPT-2 with {switch}=true is not supported")
    if not raw.get("scale_attn_weights", True):
        raise ValueError("GPT-2 with scale_attn_weights=false is not supported")
    hidden = int(raw["n_embd"])
    return llama_like(
        {
            **raw,
            "num_hidden_layers": raw["n_layer"],
            "num_attention_heads": raw["n_head"],
            "hidden_size": hidden,
            "intermediate_size": raw.get("n_inner", 4 * hidden),
            "max_position_embeddings": raw.get("n_positions", 1024),
            "hidden_act": raw.get("activation_function", "gelu_new"),
        },
        norm="layer",
        norm_eps=float(raw.get("layer_norm_epsilon", 1e-5)),
        gated=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        positions="learned",
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", True)),
    )


_FAMILIES = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "falcon": _falcon,
    "gpt2": _gpt2,
    "gemma3_text": _gemma3,
}
