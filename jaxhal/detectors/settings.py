"""How detectors that sample are told to."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxhal.generation import Sampling
from jaxhal.io.showing import shown
from jaxhal.reading.samples import Draw

# Fields of Draw and of its sampling with their values, as configurations write them.
Settings = Draw | Mapping[str, Any] | tuple[tuple[str, Any], ...] | None


def draw_of(settings: Settings, published: Draw) -> Draw:
    """How to sample: as given, field by field, by default as :class:`Draw` does.

    ``{"published": True}`` starts from what the published code does.

    Example:
      >>> draw_of({"n": 5, "temperature": 0.5}, Draw()).sampling.temperature
      0.5
    """
    if isinstance(settings, Draw):
        return settings
    try:
        given = dict(settings or {})
    except (TypeError, ValueError):
        raise ValueError(f"draw is {shown(settings)}; give {{option: value}}") from None
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
