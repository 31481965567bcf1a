"""From a checkpoint's own description to one frozen, hashable :class:`Config`."""

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from jaxhal.io.showing import shown
from jaxhal.models.rope_config import Rope, rope_of
from jaxhal.models.settings import LENGTH, VOCABULARY, Settings

# What parameters that are stacked over layers begin with.
STACKS = ("blocks.", "borrowing_blocks.")
# Layers of attention, as a block names them.
ATTENTION = ("self_attn", "full_attn")


@dataclasses.dataclass(frozen=True)
class Delta:
    """Layers that mix by the gated delta rule: which they are, and their sizes."""

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int  # a multiple: a key serves some in a row, or so far apart if tiled
    key_dim: int
    value_dim: int
    kernel: int  # columns that a convolution sees, the token's own included
    tiled: bool = False


@dataclasses.dataclass(frozen=True)
class Full:
    """Layers that see all keys, where their heads are others than those of windows.

    Beside which layers these are, what they have in place of the fields of that name.
    """

    layers: tuple[int, ...]
    head_dim: int
    num_key_value_heads: int
    keys_as_values: bool
    ropes: tuple[Rope, ...]


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything static about a decoder; fingerprints leave out defaults, for good."""

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
    activation: Literal["silu", "gelu", "gelu_tanh", "quick_gelu"] = "silu"
    gated: bool = True
    # Of experts: gates are at most that, what they let through is within it, plus 1.
    gate_limit: float | None = None
    # Perceptrons of `intermediate_size` in each layer, of which every token goes
    # through a few; 0 is a single one for all.
    num_experts: int = 0
    num_experts_per_tok: int = 1
    norm_topk_prob: bool = False  # the weights of those few add up to 1
    # A perceptron of `intermediate_size` for every token beside experts, which are of
    # `expert_size`: weighed by a gate, or they and it between norms of their own.
    shared: Literal["gated", "normed"] | None = None
    expert_size: int = 0
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False  # of experts and their router, too
    sinks: bool = False  # a learnt score of each head takes a share of every row
    # Of queries and keys: of each head, or of all heads as one.
    qk_norm: Literal["head", "whole"] | None = None
    # pre: norm -> part -> add; sandwich: also a norm after each part; post: only that;
    # parallel: attention and MLP read the same residual, through one norm or two.
    block: Literal["pre", "post", "sandwich", "parallel", "parallel_two_norms"] = "pre"
    positions: Literal["rope", "learned"] = "rope"
    # Of each layer; they become arrays that the scan over layers carries along.
    ropes: tuple[Rope, ...] = (Rope(),)
    rope_of_layer: tuple[int, ...] = ()
    windows: tuple[int, ...] = ()  # keys a query may see, itself included; 0 = all
    rotary_dim: int | None = None  # channels of a head that turn; None = all
    # (b, n): queries grow as 1 + b log(1 + position // n).
    query_growth: tuple[float, int] | None = None
    embedding_scale: float = 1.0
    attention_scale: float | None = None  # None = head_dim ** -0.5
    attention_gate: bool = False  # a sigmoid of each channel that attention gives
    residual_scale: float = 1.0  # of what attention and MLP add
    logit_scale: float = 1.0
    # Scores of attention, and logits, are c tanh(x / c).
    attention_cap: float | None = None
    logit_cap: float | None = None
    tie_word_embeddings: bool = False
    delta: Delta | None = None  # without, all layers have attention
    full: Full | None = None  # without, all attention has the same heads
    keys_as_values: bool = False  # one projection gives both
    value_norm: bool = False  # of each head, without a scale
    layer_scale: bool = False  # a learnt factor of what leaves a layer
    # Vocabulary and width of what each layer gets of a token beside the residual.
    layer_inputs: tuple[int, int] | None = None
    # So many of the last layers take the keys and values of the last layer of their
    # kind before them, and have perceptrons of that width.
    borrowing: int = 0
    borrowing_width: int = 0
    borrows: bool = False  # of the `parts`: the one of those

    @property
    def mixers(self) -> tuple[str, ...]:
        """What each layer mixes by, as a block names it."""
        kinds = {"linear_attn": self.delta, "full_attn": self.full}
        other = {n: kind for kind, own in kinds.items() if own for n in own.layers}
        return tuple(other.get(n, "self_attn") for n in range(self.num_hidden_layers))

    @property
    def alike(self) -> bool:
        """Whether all layers may be stacked together, mixers and all."""
        return self.delta is None and self.full is None

    @property
    def parts(self) -> tuple["Config", ...]:
        """Of the layers with keys of their own, and of those that borrow them."""
        if not self.borrowing:
            return (self,)
        own = self.num_hidden_layers - self.borrowing
        other = dict(intermediate_size=self.borrowing_width, borrows=True)
        return self._part(0, own), self._part(own, self.num_hidden_layers, **other)

    def _part(self, start: int, stop: int, **changes: Any) -> "Config":
        full = self.full
        if full is not None:
            layers = (n - start for n in full.layers if start <= n < stop)
            full = dataclasses.replace(full, layers=tuple(layers))
        return dataclasses.replace(
            self,
            num_hidden_layers=stop - start,
            windows=self.windows[start:stop],
            rope_of_layer=self.rope_of_layer[start:stop],
            full=full,
            borrowing=0,
            **changes,
        )

    def of(self, mixer: str) -> "Config":
        """What holds for layers of one kind of attention."""
        if (full := self.full) is None:
            return self
        windows = tuple(self.windows[n] for n in self.layers_with(mixer))
        theirs = vars(full) if mixer == "full_attn" else {}
        theirs = {name: x for name, x in theirs.items() if name != "layers"}
        return dataclasses.replace(self, full=None, windows=windows, **theirs)

    @property
    def period(self) -> int:
        """After how many layers their mixers begin again."""
        mixers, layers = self.mixers, self.num_hidden_layers
        every = range(1, layers + 1)
        return next(n for n in every if mixers == mixers[:n] * (layers // n))

    def layers_with(self, *mixers: str) -> tuple[int, ...]:
        """The numbers of the layers that have one of these mixers."""
        return tuple(n for n, own in enumerate(self.mixers) if own in mixers)

    @property
    def scale(self) -> float:
        """The factor on ``q k^T``."""
        if self.attention_scale is None:
            return self.head_dim**-0.5
        return self.attention_scale

    @property
    def inner_size(self) -> int:
        """Channels of the feed-forward part that a token goes through."""
        each = self.num_experts_per_tok
        shared = self.intermediate_size + self.expert_size * each
        return shared if self.shared else self.intermediate_size * each


class Family(NamedTuple):
    """What the settings of a family mean, beside what they mean for Llama, and where
    its checkpoints have the parameters.
    """

    switches: Mapping[str, Any] = {}  # fields that no setting changes
    rule: Callable[[Settings], Mapping[str, Any]] = lambda raw: {}  # those some change
    names: Mapping[str, str] = {}  # of settings, the family's -> Llama's
    defaults: Mapping[str, Any] = {}  # of settings by Llama's names
    only: Mapping[str, Any] = {}  # what settings have to be, if they are there
    table: Callable[["Config"], Any] | None = None  # see jaxhal.models.tables
    bare: str = "model."  # what names begin with that leave it out of a bare decoder


def check_family(
    family: Any, known: Mapping[str, Any], where: str, code: bool = False
) -> str:
    """Raises ValueError, with the nearest name, when ``family`` is not known.

    ``code`` says that a repository brings its own for it.
    """
    if not isinstance(family, str) or family not in known:
        near = difflib.get_close_matches(str(family), known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"{where}: unknown architecture {shown(repr(family))}{hint} "
            f"(known: {', '.join(known)})"
            + ("; code that comes with a model is never run" if code else "")
        )
    return family


Made = TypeVar("Made", bound=Config)


def of_family(kind: type[Made], families: Mapping[str, Family], raw: Settings) -> Made:
    """A configuration of what a config.json of one of the families says."""
    code = "auto_map" in raw
    name = check_family(raw.get("model_type", ""), families, raw.where, code)
    family = families[name]
    raw = raw.named(family.names)
    raw.only(family.only)
    raw = raw.filled(family.defaults)
    return build(kind, name, raw, {**family.switches, **family.rule(raw)})


def build(
    kind: type[Made], family: str, raw: Settings, switches: Mapping[str, Any]
) -> Made:
    """A configuration of settings, if their sizes go together, else a ValueError.

    ``switches`` hold fields that have another value than Llama's settings give them.
    """
    layers, hidden = raw.layer_count(), raw.whole("hidden_size")
    heads, longest = raw.whole("num_attention_heads"), raw.context_length(2048)
    if "head_dim" not in raw and hidden % heads:
        raw.refuse("num_attention_heads", f"give a divisor of {hidden}, the width")
    ropes = switches.get("ropes") or (rope_of(raw, length=2048),)
    rope = ropes[0]
    if rope.kind in ("linear", "dynamic", "yarn"):
        longest = max(longest, int(min(rope.factor * rope.original_length, LENGTH)))
    inner = switches.get("intermediate_size")  # where it follows from other settings
    settings: dict[str, Any] = {
        "family": family,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": raw.whole("vocab_size", most=VOCABULARY),
        "intermediate_size": inner or raw.whole("intermediate_size", most=VOCABULARY),
        "num_key_value_heads": raw.whole("num_key_value_heads", heads),
        "head_dim": raw.head_dim(),
        "context_length": longest,
        "norm_eps": raw.number("rms_norm_eps", 1e-6),
        "activation": activation(raw, "hidden_act", "silu"),
        "ropes": ropes,
        "rope_of_layer": (0,) * layers,
        "windows": (0,) * layers,
        "tie_word_embeddings": raw.flag("tie_word_embeddings"),
    }
    config = kind(**{**settings, **switches})
    if heads % config.num_key_value_heads:
        raw.refuse("num_key_value_heads", f"give a divisor of the {heads} heads")
    half = (config.rotary_dim or config.head_dim) // 2
    for divisors in (d for r in config.ropes for d in (r.divisors, r.long_divisors)):
        if divisors and len(divisors) != half:
            raise ValueError(
                f"{raw.where}: rope scaling has {len(divisors)} factors for the {half} "
                "channel pairs that turn; give as many"
            )
    if config.positions == "rope" and (config.head_dim % 2 or config.head_dim < 4):
        raise ValueError(
            f"{raw.where}: head_dim is {config.head_dim}; rotary positions turn "
            "channels in pairs, give an even number above 2"
        )
    return config


_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu"}
_ACTIVATIONS |= dict.fromkeys(_TANH, "gelu_tanh")


def activation(raw: Settings, key: str, default: str) -> str:
    """The name that a decoder knows an activation by."""
    return _ACTIVATIONS[raw.one_of(key, default, _ACTIVATIONS)]


def attention_bias(raw: Settings) -> dict[str, Any]:
    return dict.fromkeys(("qkv_bias", "o_bias"), raw.flag("attention_bias"))


def sliding(
    raw: Settings, default: Sequence[int | bool], other: str = "sliding_attention"
) -> tuple[int, ...]:
    """1 for each layer of the other kind, by ``layer_types``, else by default."""
    if not raw.get("layer_types"):
        return tuple(map(int, default))
    kinds = ("full_attention", other)
    return tuple(map(kinds.index, raw.each("layer_types", kinds, len(default))))


def windowed(
    raw: Settings, slides: Sequence[int | bool], default: int = 0
) -> dict[str, Any]:
    """Those of the layers that see one; 0 is none where that is the default."""
    window = raw.whole("sliding_window", default, least=min(default, 1), most=LENGTH)
    return {"windows": tuple(window * one for one in slides)}


def in_turns(raw: Settings, period: int, default: int) -> dict[str, Any]:
    """Of every ``period`` layers all but the last see a window, unless it says."""
    every = range(1, raw.layer_count() + 1)
    slides = sliding(raw, [number % period != 0 for number in every])
    return windowed(raw, slides, default)


def sparse(raw: Settings) -> dict[str, Any]:
    """How many experts a layer has, and a token takes."""
    count = raw.whole("num_experts" if "num_experts" in raw else "num_local_experts")
    each = raw.whole("num_experts_per_tok", most=count)
    return {"num_experts": count, "num_experts_per_tok": each}


def wide(raw: Settings) -> dict[str, Any]:
    """The width of a perceptron that is four times the model's unless it says."""
    key, usual = "intermediate_size", 4 * raw.whole("hidden_size")
    return {key: raw.whole(key, usual, most=VOCABULARY)}


def delta_from(raw: Settings) -> Delta | None:
    """All layers but every fourth have it, unless the settings say which."""
    layers, interval = raw.layer_count(), raw.whole("full_attention_interval", 4)
    usual = [(layer + 1) % interval != 0 for layer in range(layers)]
    linear = sliding(raw, usual, "linear_attention")
    key_heads = raw.whole("linear_num_key_heads", 16)
    value_heads = raw.whole("linear_num_value_heads", 32)
    if value_heads % key_heads:
        raw.refuse("linear_num_value_heads", f"give a multiple of the {key_heads} keys")
    delta = Delta(
        tuple(layer for layer, one in enumerate(linear) if one),
        key_heads,
        value_heads,
        raw.whole("linear_key_head_dim", 128),
        raw.whole("linear_value_head_dim", 128),
        raw.whole("linear_conv_kernel_dim", 4, least=2),
    )
    return delta if delta.layers else None
