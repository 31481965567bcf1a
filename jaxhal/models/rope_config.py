"""Rotary positions: how a checkpoint describes them."""

import dataclasses
from typing import Any, Literal, get_args

from jaxhal.models.settings import LENGTH, Settings

_Scaled = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position parameters, in the names of the Hugging Face config."""

    theta: float = 10000.0
    # none: of layers without positions; proportional: the first `pairs` turn alone.
    kind: _Scaled | Literal["proportional", "none"] = "default"
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
    # Per channel pair, as GGUF stores llama3 scaling; under `longrope` of texts up to
    # the original length, and of longer ones.
    divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()
    pairs: int = 0

    @property
    def by_length(self) -> bool:
        """Whether angles depend on the length of the whole text."""
        return self.kind in ("dynamic", "longrope")


def rope_from(raw: Settings, theta: float, length: int) -> Rope:
    """One rotary description; ``raw`` is ``rope_scaling`` or ``rope_parameters``."""
    key = "rope_type" if "rope_type" in raw else "type"
    kind: Any = raw.one_of(key, "default", get_args(_Scaled))
    if kind not in ("default", "longrope") and "factor" not in raw:
        raw.refuse("factor", f"rope scaling {kind!r} needs one")
    original = length
    if kind in ("yarn", "llama3", "longrope"):
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
    if kind == "longrope":
        values.setdefault("factor", length / original)
        values["divisors"] = tuple(raw.numbers("short_factor"))
        values["long_divisors"] = tuple(raw.numbers("long_factor"))
    rope = Rope(**values)
    if kind == "llama3" and rope.low_freq_factor == rope.high_freq_factor:
        raw.refuse("high_freq_factor", "give more than low_freq_factor")
    return rope


def rope_of(raw: Settings, theta: float = 10000.0, length: int | None = None) -> Rope:
    """That of all layers; a ``length`` is used where it says none."""
    theta = raw.number("rope_theta", theta, above=1.0)
    return rope_from(rope_settings(raw), theta, raw.context_length(length))


def ropes_by_kind(
    raw: Settings, seen: tuple[int, ...], theta: float, local_theta: float
) -> dict[str, Any]:
    """Layers that see a window turn otherwise than those that see all keys."""
    length, nested = raw.context_length(2048), raw.inside("rope_parameters")
    whole = nested if "full_attention" in nested else raw
    key = "full_attention" if "full_attention" in nested else "rope_scaling"
    theta = raw.number("rope_theta", theta, above=1.0)
    local_theta = raw.number("rope_local_base_freq", local_theta, above=1.0)
    ropes = (
        rope_from(whole.inside(key), theta, length),
        rope_from(nested.inside("sliding_attention"), local_theta, length),
    )
    return {"ropes": ropes, "rope_of_layer": tuple(int(one > 0) for one in seen)}


def rope_settings(raw: Settings) -> Settings:
    """Of positions, by their new name or the old one."""
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    return raw.inside(key)


def rotary_dim(raw: Settings, default: float) -> int | None:
    """Channels of a head that turn, where not all do."""
    share = raw.number("partial_rotary_factor", default)
    share = rope_settings(raw).number("partial_rotary_factor", share)
    head = raw.head_dim()
    part = int(head * share)
    if part > head or part % 2:
        raw.refuse("partial_rotary_factor", f"give a share of {head} that is even")
    return None if part == head else part
