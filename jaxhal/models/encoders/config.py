"""From an encoder's config.json to one frozen, hashable :class:`EncoderConfig`."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from jaxhal.io.showing import shown
from jaxhal.models.config import Config, Family, attention_bias, of_family, sliding
from jaxhal.models.encoders import hhem
from jaxhal.models.rope_config import Rope, rope_from
from jaxhal.models.settings import LENGTH, Settings, read_json

# By a classifier.
Labelled = Literal["texts", "tokens"]


@dataclasses.dataclass(frozen=True)
class EncoderConfig(Config):
    """Everything static about an encoder; one class for every family.

    ``windows`` count the keys on either side of a query.
    """

    causal: ClassVar[bool] = False
    pre_norm: bool = False  # norms before attention and MLP, not after the sums
    embeds_normed: bool = True  # else only what the first layer's attention reads is
    position_rows: int = 0  # of the table of learned positions; 0 = none
    position_offset: int = 0  # its row of the first token
    token_types: int = 0
    relative: tuple[Literal["c2p", "p2c"], ...] = ()
    relative_span: int = 0  # distances on either side that have an embedding
    relative_buckets: int = 0  # distances beyond half of them share buckets; 0 = none
    relative_longest: int = 0
    relative_norm: bool = False
    relative_shared: bool = False  # the content's projections serve relative positions
    relative_bias: bool = False  # buckets have one number a head, shared by all layers
    conv_size: int = 0  # of the convolution beside the first layer; 0 = none
    conv_groups: int = 1
    conv_activation: str = "tanh"
    labels: tuple[str, ...] = ()  # of the classifier; () = there is none
    labelled: Labelled = "texts"
    head_pooling: Literal["cls", "mean", "late"] = "cls"  # late: the mean of logits
    head_dense: bool = True  # a layer before that of the logits
    head_bias: bool = True
    head_activation: str = "tanh"
    head_norm: bool = False
    template: str = ""  # of premise and hypothesis, where one text is made of a pair
    foundation: str = ""  # on the hub, whose tokenizer this is where it brings none


def read_encoder_config(folder: Path) -> EncoderConfig:
    """Reads ``config.json`` of a folder, and its sentence encoder's ``max_seq_length``.

    Raises:
      FileNotFoundError: when the folder has no config.json.
      ValueError: on an unknown architecture or a setting this encoder does not compute.
    """
    path = Path(folder) / "config.json"
    raw, own = Settings(read_json(path), str(path)), {}
    if raw.get("model_type") in hhem.MODEL_TYPES:
        raw, own = hhem.described(raw, Path(folder))
    config = encoder_from_huggingface(raw, str(path))
    config = dataclasses.replace(config, **own)
    path = path.with_name("sentence_bert_config.json")
    if not path.is_file():
        return config
    sentence = Settings(read_json(path), str(path))
    longest = sentence.whole("max_seq_length", config.context_length, most=LENGTH)
    length = min(config.context_length, longest)
    return dataclasses.replace(config, context_length=length)


def encoder_from_huggingface(
    raw: Mapping[str, Any], where: str = "config.json"
) -> EncoderConfig:
    """An :class:`EncoderConfig` from a Hugging Face config.json; errors as above."""
    settings = Settings(raw, where)
    if settings.get("model_type") != "eurobert":  # of decoders, and what is like them
        for name in ("head_dim", "num_key_value_heads"):
            settings.pop(name, None)
    config = of_family(EncoderConfig, _FAMILIES, settings)
    labelled, labels = _labels(settings)
    if labelled == "tokens" and config.family != "modernbert":
        config = dataclasses.replace(config, head_dense=False)
    return dataclasses.replace(config, labelled=labelled, labels=labels)


_CLASSES = 1 << 16
_CLASSIFIERS: dict[str, Labelled] = {
    "ForSequenceClassification": "texts",
    "ForTokenClassification": "tokens",
}


def _labels(raw: Settings) -> tuple[Labelled, tuple[str, ...]]:
    """What a checkpoint's classifier labels, and its classes: () where it has none."""
    kinds = raw.get("architectures", [])
    if not isinstance(kinds, list):
        raw.refuse("architectures", "give a list of names")
    found: list[Labelled] = [
        labelled
        for kind in kinds
        for ending, labelled in _CLASSIFIERS.items()
        if str(kind).endswith(ending)
    ]
    if not found:
        return "texts", ()
    return found[0], _classes(raw)


def _classes(raw: Settings) -> tuple[str, ...]:
    raw.only({"problem_type": "single_label_classification"})
    named = raw.inside("id2label")
    count = len(named) or raw.whole("num_labels", 2, most=_CLASSES)
    if count < 2:
        raise ValueError(
            f"{raw.where}: a classifier with num_labels=1 gives no probabilities"
        )
    known = [str(label) for label in range(count)]
    if more := [key for key in named if key not in known]:
        named.refuse(more[0], f"give numbers below {count} as keys")
    return tuple(str(named.get(key, f"LABEL_{key}")) for key in known)


def _bert(raw: Settings) -> dict[str, Any]:
    rows = raw.whole("max_position_embeddings", most=LENGTH)
    types = raw.whole("type_vocab_size", 2, least=0)
    return {"position_rows": rows, "token_types": types}


def _roberta(raw: Settings) -> dict[str, Any]:
    rows = raw.whole("max_position_embeddings", least=2, most=LENGTH)
    # The table's first rows are unused.
    offset = raw.whole("pad_token_id", 1, least=0, most=rows - 2) + 1
    return {
        "context_length": rows - offset,
        "position_rows": rows,
        "position_offset": offset,
        "token_types": raw.whole("type_vocab_size", 1, least=0),
    }


def _deberta(raw: Settings) -> dict[str, Any]:
    hidden = raw.whole("hidden_size")
    width = hidden // raw.whole("num_attention_heads", most=hidden)
    sizes = {"embedding_size": hidden, "pooler_hidden_size": hidden}
    raw.only(sizes | {"attention_head_size": width})
    kinds = raw.get("pos_att_type", [])
    kinds = kinds.lower().split("|") if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list):
        raw.refuse("pos_att_type", "give a list of c2p and p2c")
    kinds: Any = tuple(str(kind).strip() for kind in kinds if str(kind).strip())
    if not set(kinds) <= {"c2p", "p2c"} or len(set(kinds)) < len(kinds):
        raise ValueError(
            f"{raw.where}: pos_att_type={shown(repr(kinds))} is not computed; c2p and "
            "p2c are, each once"
        )
    rows = raw.whole("max_position_embeddings", most=LENGTH)
    longest = raw.whole("max_relative_positions", -1, least=-1)
    longest = longest if longest > 0 else rows
    buckets = max(0, raw.whole("position_buckets", -1, least=-1))
    if buckets // 2 >= longest - 1:
        raise ValueError(
            f"{raw.where}: position_buckets={buckets} leave none of {longest} "
            "positions to share one; give fewer"
        )
    relative = raw.flag("relative_attention")
    size = raw.whole("conv_kernel_size", 0, least=0)
    if size > 0 and size % 2 == 0:
        raise ValueError(
            f"{raw.where}: conv_kernel_size={size} is not computed; odd sizes are"
        )
    groups = raw.whole("conv_groups", 1)
    if hidden % groups:
        raw.refuse("conv_groups", f"give a divisor of hidden_size {hidden}")
    return {
        "position_rows": rows if raw.flag("position_biased_input", True) else 0,
        "token_types": raw.whole("type_vocab_size", 0, least=0),
        # The kinds count even where relative attention is off.
        "attention_scale": (width * (1 + len(kinds))) ** -0.5,
        "relative": kinds if relative else (),
        "relative_span": (buckets or longest) if relative else 0,
        "relative_buckets": buckets,
        "relative_longest": longest,
        "relative_norm": "layer_norm" in str(raw.get("norm_rel_ebd", "none")).lower(),
        "relative_shared": raw.flag("share_att_key"),
        "conv_size": size,
        "conv_groups": groups,
        "conv_activation": raw.one_of("conv_act", "tanh", _OUTER),
        "head_activation": raw.one_of("pooler_hidden_act", "gelu", _OUTER),
    }


def _modernbert(raw: Settings) -> dict[str, Any]:
    layers = raw.layer_count()
    every = raw.whole("global_attn_every_n_layers", 3)
    local = sliding(raw, [layer % every != 0 for layer in range(layers)])
    window = raw.whole("local_attention", 128, least=2, most=LENGTH) // 2
    length = raw.whole("max_position_embeddings", most=LENGTH)
    nested = raw.inside("rope_parameters")
    full_rope, local_rope = (
        rope_from(nested.inside(kind), raw.number(name, theta, above=1.0), length)
        for kind, name, theta in (
            ("full_attention", "global_rope_theta", 160000.0),
            ("sliding_attention", "local_rope_theta", 10000.0),
        )
    )
    bias = raw.flag("attention_bias")
    return {
        "ropes": (full_rope, local_rope),
        "rope_of_layer": local,
        "windows": tuple(window * slides for slides in local),
        "norm_bias": raw.flag("norm_bias"),
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": raw.flag("mlp_bias"),
        "head_pooling": raw.one_of("classifier_pooling", "cls", ("cls", "mean")),
        "head_bias": raw.flag("classifier_bias"),
        "head_activation": raw.one_of("classifier_activation", "gelu", _OUTER),
    }


def _eurobert(raw: Settings) -> dict[str, Any]:
    # The key of the code that came with its first checkpoints.
    key = "clf_pooling" if "clf_pooling" in raw else "classifier_pooling"
    how = raw.one_of(key, "late", ("late", "mean", "bos"))
    return attention_bias(raw) | {
        "mlp_bias": raw.flag("mlp_bias"),
        "head_pooling": "cls" if how == "bos" else how,
    }


def _t5(raw: Settings) -> dict[str, Any]:
    if raw.get("architectures") == ["T5ForSequenceClassification"]:
        raw.refuse("architectures", "its decoder is not computed; give an encoder's")
    raw.one_of("feed_forward_proj", "relu", ("gated-gelu",))
    buckets = raw.whole("relative_attention_num_buckets", 32, least=4, most=_CLASSES)
    longest = raw.whole(
        "relative_attention_max_distance", 128, least=buckets // 4 + 1, most=LENGTH
    )
    return {"relative_buckets": buckets, "relative_longest": longest}


_OUTER = ("tanh", "gelu")  # activations outside of blocks
_SWITCHES = {
    "norm": "layer",
    "gated": False,
    "qkv_bias": True,
    "o_bias": True,
    "mlp_bias": True,
    "positions": "learned",
    "ropes": (Rope(),),
}
_NAMES = {"layer_norm_eps": "rms_norm_eps"}
_DEFAULTS = {
    "rms_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
}
_ONLY = {"position_embedding_type": "absolute", "is_decoder": False}
_FAMILIES = {
    "bert": Family(
        switches=_SWITCHES, rule=_bert, names=_NAMES, defaults=_DEFAULTS, only=_ONLY
    ),
    "roberta": Family(
        switches=_SWITCHES,
        rule=_roberta,
        names=_NAMES,
        defaults=_DEFAULTS | {"max_position_embeddings": 514},
        only=_ONLY,
    ),
    "deberta-v2": Family(
        switches=_SWITCHES,
        rule=_deberta,
        names=_NAMES,
        defaults=_DEFAULTS | {"rms_norm_eps": 1e-7},
    ),
    "modernbert": Family(
        switches={"norm": "layer", "pre_norm": True, "head_norm": True},
        rule=_modernbert,
        names={"norm_eps": "rms_norm_eps", "hidden_activation": "hidden_act"},
        defaults={
            "rms_norm_eps": 1e-5,
            "hidden_act": "gelu",
            "max_position_embeddings": 8192,
        },
        only={"rope_scaling": None},
    ),
    "eurobert": Family(
        switches={"pre_norm": True, "embeds_normed": False, "head_activation": "gelu"},
        rule=_eurobert,
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 8192},
    ),
    "t5": Family(
        switches={
            "pre_norm": True,
            "embeds_normed": False,
            "positions": "learned",
            "ropes": (Rope(),),
            "activation": "gelu_tanh",
            "attention_scale": 1.0,
            "relative_bias": True,
            "head_dense": False,
            # It knows no longest text; that many tokens are read together.
            "context_length": 4096,
        },
        rule=_t5,
        names={
            "d_model": "hidden_size",
            "d_ff": "intermediate_size",
            "d_kv": "head_dim",
            "num_layers": "num_hidden_layers",
            "num_heads": "num_attention_heads",
            "layer_norm_epsilon": "rms_norm_eps",
        },
        only={"is_decoder": False},
    ),
}
