"""Key tables: which stored tensor a parameter comes from, and how to turn it.

There is an entry for every parameter of :class:`jaxhal.models.decoder.Decoder`.  ``{}``
in a name is the layer number, ``{next}`` the one after it.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxhal.models.config import STACKS, Config

Turn = Callable[[np.ndarray, Config], np.ndarray]
# The same of one of the parts that a tensor is fused of.
Part = Callable[[int, np.ndarray, Config], np.ndarray]


class Origin(NamedTuple):
    """A stored tensor and how it becomes a parameter.

    With ``{expert}`` in its name there is one for each expert.
    """

    name: str
    turn: Turn
    half: int | None = None  # of its last but one axis; no more of it is read
    instead: "Origin | None" = None  # where a checkpoint has that one
    layers: tuple[int, ...] | None = None  # those that have either; None = all


Table = Mapping[str, Origin]


def same(x: np.ndarray, config: Config) -> np.ndarray:
    return x


def transpose(x: np.ndarray, config: Config) -> np.ndarray:
    """Stored linear layers are ``[out, in]``, ours ``[in, out]``; biases stay."""
    return x.T


def transpose_each(x: np.ndarray, config: Config) -> np.ndarray:
    """The linear layers of all experts in one tensor; their biases stay."""
    return x if x.ndim == 2 else x.swapaxes(1, 2)


def split(which: int, x: np.ndarray, config: Config) -> np.ndarray:
    """Query, key or value of a fused tensor that has them in this order."""
    q = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    return np.split(x, [q, q + kv])[which].T


def split_columns(which: int, x: np.ndarray, config: Config) -> np.ndarray:
    """The same of a tensor that is stored as ``[in, out]``."""
    return split(which, x.T, config)


def grouped(which: int, x: np.ndarray, config: Config) -> np.ndarray:
    """Query, key or value of Falcon's fused tensor, ``[kv, group + 2, head, ...]``.

    Plain multi-head Falcon stores ``[heads, 3, head, ...]`` and multi-query Falcon
    ``[heads + 2, head, ...]``; both are cases of the same layout.
    """
    kv, rest = config.num_key_value_heads, x.shape[1:]
    fused = x.reshape(kv, -1, config.head_dim, *rest)
    chosen = (fused[:, :-2], fused[:, -2:-1], fused[:, -1:])[which]
    return chosen.reshape(-1, *rest).T


def halves(which: int, x: np.ndarray, config: Config) -> np.ndarray:
    """The first or the second half of a fused tensor, such as a gate's and what it
    lets through.
    """
    return np.split(x, 2)[which].T


def halves_each(which: int, x: np.ndarray, config: Config) -> np.ndarray:
    """The first or the second half of the linear layers of all experts."""
    return transpose_each(np.split(x, 2, 1)[which], config)


def every_other(which: int, x: np.ndarray, config: Config) -> np.ndarray:
    """Gates, or what they let through, of all experts, which alternate."""
    return x[..., which::2]


def of_heads(which: int, x: np.ndarray, config: Config) -> np.ndarray:
    """The first or the second half of every head's channels."""
    heads = x.reshape(-1, 2, config.head_dim, *x.shape[1:])
    return heads[:, which].reshape(-1, *x.shape[1:]).T


def split_delta(which: int, x: np.ndarray, config: Config) -> np.ndarray:
    """Queries, keys or values of linear attention, of a linear layer or of
    convolutions, ``[channels, 1, columns]``.
    """
    assert config.delta is not None
    keys = config.delta.key_heads * config.delta.key_dim
    return np.split(x, [keys, 2 * keys])[which].reshape(-1, x.shape[-1]).T


def unpaired(x: np.ndarray, config: Config) -> np.ndarray:
    """Rotary channels of a head that lie side by side in pairs, as two halves."""
    turned, rest = config.rotary_dim or config.head_dim, x.shape[1:]
    x = x.reshape(-1, config.head_dim, *rest)
    pairs = x[:, :turned].reshape(len(x), turned // 2, 2, *rest)
    first = pairs.swapaxes(1, 2).reshape(len(x), turned, *rest)
    return np.concatenate([first, x[:, turned:]], 1).reshape(-1, *rest).T


# Those that take rows of matrices and transpose them, or take numbers of one axis, and
# how many axes the matrices of a layer have; and those that take columns.
_OF_ROWS = dict.fromkeys((transpose, split, grouped, halves, of_heads, unpaired), 2)
_OF_ROWS |= {split_delta: 2, transpose_each: 3}
_OF_COLUMNS = (split_columns, every_other)


def taken(
    origin: Origin, shape: Sequence[int], config: Config
) -> tuple[int, np.ndarray] | None:
    """Along which axis a parameter takes parts of a stored tensor, and which of them.

    They are along the parameter's last axis, so that it is transposed where they are
    rows.  None where it is made in another way.  ValueError where they cannot be split.
    """
    turn: Any = getattr(origin.turn, "func", origin.turn)
    axes = len(shape)
    if turn in _OF_COLUMNS:
        return -1, origin.turn(np.arange(shape[-1])[None], config).ravel()
    convolution = turn is split_delta and axes == 3 and shape[1] == 1
    if turn not in _OF_ROWS or not (axes in (1, _OF_ROWS[turn]) or convolution):
        return None
    axis = -3 if convolution else max(-2, -axes)
    rows = np.arange(shape[axis])
    if origin.half is not None:
        rows = np.split(rows, 2)[origin.half]
    return axis, origin.turn(rows[:, None], config).ravel()


def origins(modules: Mapping[str, str], turn: Turn = transpose) -> dict[str, Origin]:
    """Where all parameters come from that a module may have, ours -> stored.

    Or where a parameter does that is a tensor by itself.
    """
    table = {}
    for ours, stored in modules.items():
        table[ours] = Origin(stored, turn)
        table[f"{ours}.kernel"] = Origin(f"{stored}.weight", turn)
        table[f"{ours}.scale"] = Origin(f"{stored}.weight", same)
        table[f"{ours}.embedding"] = Origin(f"{stored}.weight", same)
        table[f"{ours}.bias"] = Origin(f"{stored}.bias", turn)
    return table


QKV = tuple(f"blocks.self_attn.{name}_proj" for name in "qkv")
GATED = "blocks.mlp.gate_proj", "blocks.mlp.up_proj"


def fused(stored: str, part: Part, modules: Sequence[str] = QKV) -> dict[str, Origin]:
    """Where modules come from that are stored as one tensor."""
    table = {}
    for which, name in enumerate(modules):
        table |= origins({name: stored}, functools.partial(part, which))
    return table


def experts(module: str, gate: str, up: str, down: str) -> dict[str, Origin]:
    """Where experts come from that are stored one by one, as checkpoints of the hub
    have them, or all those of a layer together, as transformers writes them.
    """
    layer = "model.layers.{}"
    router = Origin(f"{layer}.mlp.gate.weight", transpose)
    together = {"blocks.mlp.router.kernel": router}
    together |= experts_together(f"{layer}.mlp.experts")
    names = "gate", *(f"experts.{{expert}}.{name}" for name in (gate, up, down))
    return {
        ours: Origin(f"{layer}.{module}.{name}.weight", transpose, instead=whole)
        for (ours, whole), name in zip(together.items(), names, strict=True)
    }


def experts_together(stored: str) -> dict[str, Origin]:
    """Where the projections of a layer's experts are, stored together."""
    table = {}
    for half, ours in enumerate(GATED):
        table[f"{ours}.kernel"] = Origin(f"{stored}.gate_up_proj", transpose_each, half)
    down = Origin(f"{stored}.down_proj", transpose_each)
    return table | {"blocks.mlp.down_proj.kernel": down}


# Modules, what checkpoints of Llama call them, or of the first family that has them,
# and what GGUF files do.
_MODULES = {
    "embed_tokens": ("model.embed_tokens", "token_embd"),
    "embed_positions": ("transformer.wpe", "position_embd"),
    "lm_head": ("lm_head", "output"),
    "norm": ("model.norm", "output_norm"),
    "layer_inputs.embed_layers": (
        "model.embed_tokens_per_layer",
        "per_layer_token_embd",
    ),
    "layer_inputs.proj": ("model.per_layer_model_projection", "per_layer_model_proj"),
    "layer_inputs.norm": ("model.per_layer_projection_norm", "per_layer_proj_norm"),
}
# The same of every layer.
_OF_LAYERS = {
    "input_norm": ("input_layernorm", "attn_norm"),
    "self_attn.q_proj": ("self_attn.q_proj", "attn_q"),
    "self_attn.k_proj": ("self_attn.k_proj", "attn_k"),
    "self_attn.v_proj": ("self_attn.v_proj", "attn_v"),
    "self_attn.q_norm": ("self_attn.q_norm", "attn_q_norm"),
    "self_attn.k_norm": ("self_attn.k_norm", "attn_k_norm"),
    "self_attn.o_proj": ("self_attn.o_proj", "attn_output"),
    "linear_attn.in_proj_z": ("linear_attn.in_proj_z", "attn_gate"),
    "linear_attn.in_proj_a": ("linear_attn.in_proj_a", "ssm_alpha"),
    "linear_attn.in_proj_b": ("linear_attn.in_proj_b", "ssm_beta"),
    "linear_attn.norm": ("linear_attn.norm", "ssm_norm"),
    "linear_attn.out_proj": ("linear_attn.out_proj", "ssm_out"),
    "post_attention_norm": ("post_attention_layernorm", "post_attention_norm"),
    "mlp_norm": ("post_attention_layernorm", "ffn_norm"),
    "mlp.router": ("mlp.router", "ffn_gate_inp"),
    "mlp.gate_proj": ("mlp.gate_proj", "ffn_gate"),
    "mlp.up_proj": ("mlp.up_proj", "ffn_up"),
    "mlp.down_proj": ("mlp.down_proj", "ffn_down"),
    "post_mlp_norm": ("post_feedforward_layernorm", "post_ffw_norm"),
    "shared.norm": ("pre_feedforward_layernorm", "ffn_norm"),
    "shared.mlp.gate_proj": ("mlp.gate_proj", "ffn_gate"),
    "shared.mlp.up_proj": ("mlp.up_proj", "ffn_up"),
    "shared.mlp.down_proj": ("mlp.down_proj", "ffn_down"),
    "shared.post_norm": ("post_feedforward_layernorm_1", "post_ffw_norm_1"),
    "shared.experts_norm": ("pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
    "shared.post_experts_norm": ("post_feedforward_layernorm_2", "post_ffw_norm_2"),
    "input_gate": ("per_layer_input_gate", "inp_gate"),
    "input_proj": ("per_layer_projection", "proj"),
    "post_input_norm": ("post_per_layer_input_norm", "post_norm"),
    # Parameters that are tensors by themselves.
    "scale": ("layer_scalar", "layer_output_scale.weight"),
    "self_attn.sinks": ("self_attn.sinks", "attn_sinks.weight"),
    "linear_attn.log_decay": ("linear_attn.A_log", "ssm_a"),
    "linear_attn.decay_bias": ("linear_attn.dt_bias", "ssm_dt.bias"),
    "mlp.scale": ("router.per_expert_scale", "ffn_down_exps.scale"),
    "shared.router_norm.scale": ("router.scale", "ffn_gate_inp.scale"),
}


def _named(which: int, layer: str) -> dict[str, str]:
    modules = {ours: names[which] for ours, names in _MODULES.items()}
    for ours, names in _OF_LAYERS.items():
        modules[f"blocks.{ours}"] = f"{layer}.{names[which]}"
    return modules


#: Modules of checkpoints like Llama's, and of GGUF files, ours -> stored.
LLAMA = _named(0, "model.layers.{}")
GGUF = _named(1, "blk.{}")
GLM4 = {
    "blocks.post_attention_norm": "model.layers.{}.post_self_attn_layernorm",
    "blocks.post_mlp_norm": "model.layers.{}.post_mlp_layernorm",
}
_GPT2 = {
    "embed_tokens": "transformer.wte",
    "norm": "transformer.ln_f",
    "blocks.input_norm": "transformer.h.{}.ln_1",
    "blocks.mlp_norm": "transformer.h.{}.ln_2",
    "blocks.self_attn.o_proj": "transformer.h.{}.attn.c_proj",
    "blocks.mlp.up_proj": "transformer.h.{}.mlp.c_fc",
    "blocks.mlp.down_proj": "transformer.h.{}.mlp.c_proj",
}
_FALCON = {
    "embed_tokens": "transformer.word_embeddings",
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
GPT_OSS = {}  # whose experts are stored as [experts, in, out]
_EXPERTS = "model.layers.{}.mlp.experts"
for _kind, _end in {"kernel": "", "bias": "_bias"}.items():
    _gated = [f"{_name}.{_kind}" for _name in GATED]
    GPT_OSS |= fused(f"{_EXPERTS}.gate_up_proj{_end}", every_other, _gated)
    _down = {f"blocks.mlp.down_proj.{_kind}": f"{_EXPERTS}.down_proj{_end}"}
    GPT_OSS |= origins(_down, same)
_SHARED = "model.layers.{}.shared_mlp"
GRANITE4 = fused(f"{_SHARED}.input_linear", halves, GATED)
GRANITE4 |= origins({"blocks.mlp.down_proj": f"{_SHARED}.output_linear"})
GATE_UP = fused("model.layers.{}.mlp.gate_up_proj", halves, GATED)
QKV_PROJ = fused("model.layers.{}.self_attn.qkv_proj", split)
GPT2 = origins(_GPT2, same) | fused("transformer.h.{}.attn.c_attn", split_columns)
PAIRED = origins({name: LLAMA[name] for name in QKV[:2]}, unpaired)


def gated_delta(q: str, qkv: str, conv: str) -> dict[str, Origin]:
    """Where queries come from that are stored with their gates, and those of linear
    attention with keys and values; so are convolutions.
    """
    names = (QKV[0], "blocks.self_attn.output_gate")
    linear = [f"blocks.linear_attn.in_proj_{part}" for part in "qkv"]
    convs = [f"blocks.linear_attn.conv_{part}" for part in "qkv"]
    table = fused(qkv, split_delta, linear) | fused(conv, split_delta, convs)
    return fused(q, of_heads, names) | table


_LINEAR = "model.layers.{}.linear_attn"
QWEN3_5 = gated_delta(
    LLAMA[QKV[0]], f"{_LINEAR}.in_proj_qkv", f"{_LINEAR}.conv1d.weight"
)


def like_llama(
    names: Mapping[str, str], *more: Mapping[str, Origin]
) -> Callable[[Config], Table]:
    """A table of names like Llama's but for these."""
    table = origins({**LLAMA, **names})
    for part in more:
        table |= part
    return lambda config: table


def falcon_table(config: Config) -> Table:
    two = _FALCON_TWO_NORMS if config.block == "parallel_two_norms" else {}
    stored = "transformer.h.{}.self_attention.query_key_value"
    return like_llama(_FALCON | two, fused(stored, grouped))(config)


def by_layer(table: Table, config: Config) -> Table:
    """The table with the layers that each parameter is of: those of a part of them, and
    of these the ones that have its kind of mixer.

    Attention of both kinds is stored under one name, and layers that borrow keys like
    others.
    """
    mixers, own = config.mixers, config.num_hidden_layers - config.borrowing
    full = {p.replace(".self_attn.", ".full_attn."): o for p, o in table.items()}
    table = {**table, **full}
    table |= {f"borrowing_{p}": o for p, o in table.items() if p.startswith("blocks.")}

    def of(path: str, origin: Origin) -> Origin:
        if not path.startswith(STACKS):
            return origin
        stack, mixer, *_ = path.split(".")
        every = range(own) if stack == "blocks" else range(own, len(mixers))
        if mixer.endswith("_attn"):
            every = [n for n in every if mixers[n] == mixer]
        return origin._replace(layers=tuple(every))

    return {path: of(path, origin) for path, origin in table.items()}
