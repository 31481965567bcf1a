"""From a checkpoint's own description to one frozen, hashable :class:`Config`."""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from jaxhal.io.showing import shown
from jaxhal.models.settings import LAYERS, LENGTH, VOCABULARY, Settings, read_json


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
    """Everything static about a decoder; one class for every family."""

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
    norm_bias: bool = True  # of LayerNorm
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
    # Of each layer; they become arrays that the scan over layers carries along.
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
    return from_huggingface(Settings(read_json(path), str(path)), str(path))


def from_huggingface(raw: Mapping[str, Any], where: str = "config.json") -> Config:
    """A :class:`Config` from the dictionary of a Hugging Face config.json."""
    settings = Settings(raw, where)
    if settings.get("model_type") == "gemma3" and "text_config" in settings:
        settings = settings.inside("text_config").over({"model_type": "gemma3_text"})
    family = check_family(settings.get("model_type", ""), _FAMILIES, where)
    return checked(_FAMILIES[family](settings), where)


def check_family(family: Any, known: Mapping[str, Any], where: str) -> str:
    """Raises ValueError, with the nearest name, when ``family`` is not known."""
    if not isinstance(family, str) or family not in known:
        near = difflib.get_close_matches(str(family), known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"{where}: unknown architecture {shown(repr(family))}{hint} "
            f"(known: {', '.join(known)})"
        )
    return family


Checked = TypeVar("Checked", bound=Config)


def checked(config: Checked, where: str) -> Checked:
    """The configuration, if its sizes go together, else a ValueError."""
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    if heads % shared:
        raise ValueError(
            f"{where}: num_attention_heads {heads} is no multiple of "
            f"num_key_value_heads {shared}; give one that is"
        )
    odd = config.head_dim % 2 or config.head_dim < 4
    if config.positions == "rope" and odd:
        raise ValueError(
            f"{where}: head_dim is {config.head_dim}; rotary positions turn channels "
            "in pairs, give an even number above 2"
        )
    return config


ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}


def _activation(raw: Settings, key: str, default: str) -> Any:
    return ACTIVATIONS[raw.one_of(key, default, ACTIVATIONS)]


_ROPES = ("default", "linear", "dynamic", "yarn", "llama3")


def rope_from(raw: Settings, theta: float, length: int) -> Rope:
    """One rotary description; ``raw`` is ``rope_scaling`` or ``rope_parameters``."""
    key = "rope_type" if "rope_type" in raw else "type"
    kind: Any = raw.one_of(key, "default", _ROPES)
    if kind != "default" and "factor" not in raw:
        raise ValueError(
            f"{raw.where}: rope scaling {kind!r} needs a 'factor'; got {shown(raw)}"
        )
    original = length
    if kind in ("yarn", "llama3"):
        key = "original_max_position_embeddings"
        original = raw.whole(key, length, most=LENGTH)
    values: dict[str, Any] = {
        field.name: raw.number(field.name)
        for field in dataclasses.fields(Rope)
        if field.type in (float, float | None) and field.name in raw
    }
    values |= {
        "theta": raw.number("rope_theta", theta, above=1.0),
        "kind": kind,
        "original_length": original,
        "truncate": raw.flag("truncate", True),
    }
    rope = Rope(**values)
    if kind == "llama3" and rope.low_freq_factor == rope.high_freq_factor:
        raw.refuse("high_freq_factor", "give more than low_freq_factor")
    return rope


def _ropes(raw: Settings, length: int) -> Rope:
    """The rope of a family with one kind of layer, old or new config spelling."""
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    theta = raw.number("rope_theta", 10000.0, above=1.0)
    return rope_from(raw.inside(key), theta, length)


def layer_count(raw: Settings) -> int:
    return raw.whole("num_hidden_layers", most=LAYERS)


def sliding(raw: Settings, default: Sequence[int | bool]) -> tuple[int, ...]:
    """1 for each layer that sees a window alone: by ``layer_types``, else default."""
    if not raw.get("layer_types"):
        return tuple(map(int, default))
    kinds = ("full_attention", "sliding_attention")
    return tuple(map(kinds.index, raw.each("layer_types", kinds, len(default))))


def llama_like(raw: Settings, **switches: Any) -> Config:
    """The settings Llama, Mistral, Qwen and Gemma share; ``switches`` override."""
    layers, hidden = layer_count(raw), raw.whole("hidden_size")
    heads = raw.whole("num_attention_heads")
    length = raw.whole("max_position_embeddings", 2048, most=LENGTH)
    if "head_dim" not in raw and hidden % heads:
        raw.refuse("num_attention_heads", f"give a divisor of hidden_size {hidden}")
    if "ropes" not in switches:
        rope = _ropes(raw, length)
        switches |= {"ropes": (rope,), "rope_of_layer": (0,) * layers}
    rope = switches["ropes"][0]
    longest = length
    if rope.kind in ("linear", "dynamic", "yarn"):
        longest = max(length, int(min(rope.factor * rope.original_length, LENGTH)))
    settings: dict[str, Any] = {
        "family": raw["model_type"],
        "vocab_size": raw.whole("vocab_size", most=VOCABULARY),
        "hidden_size": hidden,
        "intermediate_size": raw.whole("intermediate_size", most=VOCABULARY),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": raw.whole("num_key_value_heads", heads),
        "head_dim": raw.whole("head_dim", hidden // heads),
        "context_length": longest,
        "norm_eps": raw.number("rms_norm_eps", 1e-6),
        "activation": _activation(raw, "hidden_act", "silu"),
        "windows": (0,) * layers,
        "tie_word_embeddings": raw.flag("tie_word_embeddings"),
    }
    return Config(**(settings | switches))


def _biases(bias: bool) -> dict[str, Any]:
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bias}


def _llama(raw: Settings) -> Config:
    biases = _biases(raw.flag("attention_bias"))
    return llama_like(raw, **biases | {"mlp_bias": raw.flag("mlp_bias")})


def _mistral(raw: Settings) -> Config:
    window = raw.whole("sliding_window", 0, least=0, most=LENGTH)
    return llama_like(raw, windows=(window,) * layer_count(raw))


def _qwen_windows(raw: Settings) -> tuple[int, ...]:
    layers = layer_count(raw)
    window = raw.whole("sliding_window", 0, least=0, most=LENGTH)
    if not raw.flag("use_sliding_window"):
        return (0,) * layers
    first = raw.whole("max_window_layers", layers, least=0)
    default = [layer >= first for layer in range(layers)]
    return tuple(window * slides for slides in sliding(raw, default))


def _qwen2(raw: Settings) -> Config:
    return llama_like(raw, qkv_bias=True, windows=_qwen_windows(raw))


def _qwen3(raw: Settings) -> Config:
    return llama_like(
        raw.below({"head_dim": 128}),
        **_biases(raw.flag("attention_bias")) | {"mlp_bias": False},
        qk_norm=True,
        windows=_qwen_windows(raw),
    )


def _gemma3(raw: Settings) -> Config:
    if raw.flag("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention is an encoder, not a decoder")
    if raw.get("final_logit_softcapping") or raw.get("attn_logit_softcapping"):
        raise ValueError("logit soft-capping is not computed; Gemma 3 has it off")
    raw = raw.below({"max_position_embeddings": 131072, "head_dim": 256})
    layers = layer_count(raw)
    length = raw.whole("max_position_embeddings", most=LENGTH)
    pattern = raw.whole("sliding_window_pattern", 6)
    local = sliding(raw, [(layer + 1) % pattern != 0 for layer in range(layers)])
    nested = raw.inside("rope_parameters")
    whole = nested if "full_attention" in nested else raw
    key = "full_attention" if "full_attention" in nested else "rope_scaling"
    theta = raw.number("rope_theta", 1e6, above=1.0)
    local_theta = raw.number("rope_local_base_freq", 10000.0, above=1.0)
    full_rope = rope_from(whole.inside(key), theta, length)
    local_rope = rope_from(nested.inside("sliding_attention"), local_theta, length)
    window = raw.whole("sliding_window", 4096, most=LENGTH)
    return llama_like(
        raw,
        ropes=(full_rope, local_rope),
        rope_of_layer=local,
        windows=tuple(window * slides for slides in local),
        # The published length already counts the scaling of the global layers.
        context_length=length,
        norm_offset=1.0,
        activation=_activation(raw, "hidden_activation", "gelu_pytorch_tanh"),
        qk_norm=True,
        **_biases(raw.flag("attention_bias")) | {"mlp_bias": False},
        block="sandwich",
        embedding_scale=raw.whole("hidden_size") ** 0.5,
        attention_scale=raw.number("query_pre_attn_scalar", 256.0) ** -0.5,
        tie_word_embeddings=raw.flag("tie_word_embeddings", True),
    )


def _falcon(raw: Settings) -> Config:
    if raw.flag("alibi"):
        raise ValueError("Falcon with alibi is not supported; rotary Falcon models are")
    heads, hidden = raw.whole("num_attention_heads"), raw.whole("hidden_size")
    new = raw.flag("new_decoder_architecture")
    if new:
        kv_heads = raw.whole("num_kv_heads", heads)
        norms = raw.whole("num_ln_in_parallel_attn", 2, most=2)
        block = "parallel_two_norms" if norms == 2 else "parallel"
    else:
        kv_heads = 1 if raw.flag("multi_query", True) else heads
        block = "parallel" if raw.flag("parallel_attn", True) else "pre"
    inner = raw.whole("ffn_hidden_size", 4 * hidden, most=VOCABULARY)
    renamed = {
        "intermediate_size": inner,
        "num_key_value_heads": kv_heads,
        "hidden_act": raw.one_of("activation", "gelu", ACTIVATIONS),
    }
    return llama_like(
        raw.over(renamed),
        norm="layer",
        norm_eps=raw.number("layer_norm_epsilon", 1e-5),
        gated=False,
        **_biases(raw.flag("bias")),
        block=block,
        tie_word_embeddings=raw.flag("tie_word_embeddings", True),
    )


def _gpt2(raw: Settings) -> Config:
    for switch in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"):
        if raw.flag(switch):
            raise ValueError(f"GPT-2 with {switch}=true is not supported")
    if not raw.flag("scale_attn_weights", True):
        raise ValueError("GPT-2 with scale_attn_weights=false is not supported")
    hidden = raw.whole("n_embd")
    renamed = {
        "num_hidden_layers": raw.whole("n_layer", most=LAYERS),
        "num_attention_heads": raw.whole("n_head"),
        "hidden_size": hidden,
        "intermediate_size": raw.whole("n_inner", 4 * hidden, most=VOCABULARY),
        "max_position_embeddings": raw.whole("n_positions", 1024, most=LENGTH),
        "hidden_act": raw.one_of("activation_function", "gelu_new", ACTIVATIONS),
    }
    return llama_like(
        raw.over(renamed),
        norm="layer",
        norm_eps=raw.number("layer_norm_epsilon", 1e-5),
        gated=False,
        **_biases(True),
        positions="learned",
        tie_word_embeddings=raw.flag("tie_word_embeddings", True),
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
