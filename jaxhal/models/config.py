"""From a checkpoint's own description to one frozen, hashable :class:`Config`."""

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

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

    causal: ClassVar[bool] = True
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
    return of_family(Config, FAMILIES, settings)


class Family(NamedTuple):
    """What the settings of a family mean, beside what they mean for Llama."""

    switches: Mapping[str, Any] = {}  # fields that no setting changes
    rule: Callable[[Settings], Mapping[str, Any]] = lambda raw: {}  # those some change
    names: Mapping[str, str] = {}  # of settings, the family's -> Llama's
    defaults: Mapping[str, Any] = {}  # of settings by Llama's names
    only: Mapping[str, Any] = {}  # what settings have to be, if they are there


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


Made = TypeVar("Made", bound=Config)


def of_family(kind: type[Made], families: Mapping[str, Family], raw: Settings) -> Made:
    """A configuration of what a config.json of one of the families says."""
    name = check_family(raw.get("model_type", ""), families, raw.where)
    family = families[name]
    raw = raw.named(family.names)
    raw.only(family.only)
    raw = raw.over({**family.defaults, **raw})
    return build(kind, name, raw, {**family.switches, **family.rule(raw)})


def build(
    kind: type[Made], family: str, raw: Settings, switches: Mapping[str, Any]
) -> Made:
    """A configuration of settings, if their sizes go together, else a ValueError.

    ``switches`` hold fields that have another value than Llama's settings give them.
    """
    layers, hidden = layer_count(raw), raw.whole("hidden_size")
    heads = raw.whole("num_attention_heads")
    length = raw.whole("max_position_embeddings", 2048, most=LENGTH)
    if "head_dim" not in raw and hidden % heads:
        raw.refuse("num_attention_heads", f"give a divisor of {hidden}, the width")
    ropes = switches.get("ropes")
    if ropes is None:
        key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
        theta = raw.number("rope_theta", 10000.0, above=1.0)
        ropes = (rope_from(raw.inside(key), theta, length),)
    rope = ropes[0]
    longest = length
    if rope.kind in ("linear", "dynamic", "yarn"):
        longest = max(length, int(min(rope.factor * rope.original_length, LENGTH)))
    # Those of some families follow from other settings.
    inner, shared = (
        switches.get(name) for name in ("intermediate_size", "num_key_value_heads")
    )
    settings: dict[str, Any] = {
        "vocab_size": raw.whole("vocab_size", most=VOCABULARY),
        "intermediate_size": inner or raw.whole("intermediate_size", most=VOCABULARY),
        "num_key_value_heads": shared or raw.whole("num_key_value_heads", heads),
        "head_dim": raw.whole("head_dim", hidden // heads),
        "context_length": longest,
        "norm_eps": raw.number("rms_norm_eps", 1e-6),
        "activation": activation(raw, "hidden_act", "silu"),
        "ropes": ropes,
        "rope_of_layer": (0,) * layers,
        "windows": (0,) * layers,
        "tie_word_embeddings": raw.flag("tie_word_embeddings"),
    } | dict(switches)
    config = kind(
        family=family,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        **settings,
    )
    if heads % config.num_key_value_heads:
        raw.refuse("num_key_value_heads", f"give a divisor of the {heads} heads")
    if config.positions == "rope" and (config.head_dim % 2 or config.head_dim < 4):
        raise ValueError(
            f"{raw.where}: head_dim is {config.head_dim}; rotary positions turn "
            "channels in pairs, give an even number above 2"
        )
    return config


_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}


def activation(raw: Settings, key: str, default: str) -> str:
    """The name that a decoder knows an activation by."""
    return _ACTIVATIONS[raw.one_of(key, default, _ACTIVATIONS)]


_ROPES = ("default", "linear", "dynamic", "yarn", "llama3")


def rope_from(raw: Settings, theta: float, length: int) -> Rope:
    """One rotary description; ``raw`` is ``rope_scaling`` or ``rope_parameters``."""
    key = "rope_type" if "rope_type" in raw else "type"
    kind: Any = raw.one_of(key, "default", _ROPES)
    if kind != "default" and "factor" not in raw:
        raw.refuse("factor", f"rope scaling {kind!r} needs one")
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


def layer_count(raw: Settings) -> int:
    return raw.whole("num_hidden_layers", most=LAYERS)


def sliding(raw: Settings, default: Sequence[int | bool]) -> tuple[int, ...]:
    """1 for each layer that sees a window alone: by ``layer_types``, else default."""
    if not raw.get("layer_types"):
        return tuple(map(int, default))
    kinds = ("full_attention", "sliding_attention")
    return tuple(map(kinds.index, raw.each("layer_types", kinds, len(default))))


def _attention_bias(raw: Settings) -> dict[str, Any]:
    return dict.fromkeys(("qkv_bias", "o_bias"), raw.flag("attention_bias"))


def _llama(raw: Settings) -> dict[str, Any]:
    return _attention_bias(raw) | {"mlp_bias": raw.flag("mlp_bias")}


def _mistral(raw: Settings) -> dict[str, Any]:
    """All layers see a window, or none does."""
    window = raw.whole("sliding_window", 0, least=0, most=LENGTH)
    return {"windows": (window,) * layer_count(raw)}


def _qwen(raw: Settings) -> dict[str, Any]:
    """The layers above the first few may see a window."""
    layers = layer_count(raw)
    window = raw.whole("sliding_window", 0, least=0, most=LENGTH)
    if not raw.flag("use_sliding_window"):
        return {}
    first = raw.whole("max_window_layers", layers, least=0)
    default = [layer >= first for layer in range(layers)]
    return {"windows": tuple(window * slides for slides in sliding(raw, default))}


def _qwen3(raw: Settings) -> dict[str, Any]:
    return _attention_bias(raw) | _qwen(raw)


def _gemma3(raw: Settings) -> dict[str, Any]:
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        if raw.get(key):  # 0 is off, as none is
            raw.refuse(key, "logits are not capped here; give null")
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
    return _attention_bias(raw) | {
        "ropes": (full_rope, local_rope),
        "rope_of_layer": local,
        "windows": tuple(window * slides for slides in local),
        # The published length already counts the scaling of the global layers.
        "context_length": length,
        "activation": activation(raw, "hidden_activation", "gelu_pytorch_tanh"),
        "embedding_scale": raw.whole("hidden_size") ** 0.5,
        "attention_scale": raw.number("query_pre_attn_scalar", 256.0) ** -0.5,
    }


def _falcon(raw: Settings) -> dict[str, Any]:
    heads = raw.whole("num_attention_heads")
    if raw.flag("new_decoder_architecture"):
        kv_heads = raw.whole("num_key_value_heads", heads)
        norms = raw.whole("num_ln_in_parallel_attn", 2, most=2)
        block = "parallel_two_norms" if norms == 2 else "parallel"
    else:
        kv_heads = 1 if raw.flag("multi_query", True) else heads
        block = "parallel" if raw.flag("parallel_attn", True) else "pre"
    biases = _attention_bias(raw) | {"mlp_bias": raw.flag("attention_bias")}
    return biases | _inner(raw) | {"num_key_value_heads": kv_heads, "block": block}


def _inner(raw: Settings) -> dict[str, Any]:
    """The width of a perceptron that is four times the model's unless it says."""
    inner = raw.whole(
        "intermediate_size", 4 * raw.whole("hidden_size"), most=VOCABULARY
    )
    return {"intermediate_size": inner}


_PLAIN = {"norm": "layer", "gated": False}
_TIED = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}
FAMILIES = {
    "llama": Family(rule=_llama),
    "mistral": Family(rule=_mistral),
    "qwen2": Family({"qkv_bias": True}, _qwen),
    "qwen3": Family({"qk_norm": True}, _qwen3, defaults={"head_dim": 128}),
    "falcon": Family(
        _PLAIN,
        _falcon,
        names={
            "ffn_hidden_size": "intermediate_size",
            "num_kv_heads": "num_key_value_heads",
            "activation": "hidden_act",
            "layer_norm_epsilon": "rms_norm_eps",
            "bias": "attention_bias",
        },
        defaults=_TIED | {"hidden_act": "gelu"},
        only={"alibi": False},
    ),
    "gpt2": Family(
        _PLAIN
        | {"positions": "learned", "qkv_bias": True, "o_bias": True, "mlp_bias": True},
        _inner,
        names={
            "n_embd": "hidden_size",
            "n_inner": "intermediate_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_positions": "max_position_embeddings",
            "activation_function": "hidden_act",
            "layer_norm_epsilon": "rms_norm_eps",
        },
        defaults=_TIED | {"hidden_act": "gelu_new", "max_position_embeddings": 1024},
        only={
            "scale_attn_by_inverse_layer_idx": False,
            "reorder_and_upcast_attn": False,
            "scale_attn_weights": True,
        },
    ),
    "gemma3_text": Family(
        {"qk_norm": True, "norm_offset": 1.0, "block": "sandwich"},
        _gemma3,
        defaults={
            "max_position_embeddings": 131072,
            "head_dim": 256,
            "tie_word_embeddings": True,
        },
        only={"use_bidirectional_attention": False},
    ),
}
