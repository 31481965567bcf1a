"""How detectors that sample are told to, and made once for equal settings."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jaxhal.generation import Sampling
from jaxhal.llm.entailment import resolve
from jaxhal.reading.samples import Draw

# Fields of Draw and of its sampling with their values, as configurations write them.
Settings = Draw | Mapping[str, Any] | tuple[tuple[str, Any], ...] | None


def cached(make: Callable[..., Any]) -> Callable[..., Any]:
    """Gives the same detector for the same settings, so that it compiles once.

    An endpoint in them is made anew each time, for not everyone may name one.
    """
    known, signature = functools.cache(make), inspect.signature(make)

    @functools.wraps(make)
    def call(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options)
        given.apply_defaults()
        return known(**{name: _frozen(it) for name, it in given.arguments.items()})

    return call


def _frozen(value: Any) -> Any:
    """A setting that can be told from others by its hash."""
    if isinstance(value, Mapping):
        return tuple(sorted(value.items()))
    if isinstance(value, str) and value.startswith("endpoint:"):
        return resolve(value)
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"{value!r} has no hash; give a frozen dataclass or a plain object"
        ) from None
    return value


def draw_of(settings: Settings, published: Draw) -> Draw:
    """How to sample: as given, field by field, by default as :class:`Draw` does.

    ``{"published": True}`` starts from what the published code does.

    Example:
      >>> draw_of({"n": 5, "temperature": 0.5}, Draw()).sampling.temperature
      0.5
    """
    if isinstance(settings, Draw):
        return settings
    given = dict(settings or {})
    base = published if given.pop("published", False) else Draw()
    own = {f.name for f in dataclasses.fields(Draw)} - {"sampling"}
    chance = {f.name for f in dataclasses.fields(Sampling)}
    if unknown := set(given) - own - chance:
        raise ValueError(
            f"draw has no {', '.join(sorted(unknown))}; it knows "
            f"{', '.join(sorted(own | chance))} and published"
        )
    sampling = {k: v for k, v in given.items() if k in chance}
    return dataclasses.replace(
        base,
        sampling=dataclasses.replace(base.sampling, **sampling),
        **{k: v for k, v in given.items() if k in own},
    )
