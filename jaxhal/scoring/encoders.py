"""The encoders that detectors ask beside the reader."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxhal.detectors import Detector
from jaxhal.llm.entailment import Inference, Similarity
from jaxhal.models.encoders.encoding import kept_encoder
from jaxhal.models.registry import ENTRIES
from jaxhal.reading.bulk import Measure
from jaxhal.reading.keys import fingerprint

# Options that name one, or what decides entailment, which may be one.
_NAMED = ("source", "encoder", "entailment")
_NLI = "nli:"


def sources(measures: Iterable[Measure]) -> list[str]:
    """Folders and ids of the encoders that measures ask, but for those that the package
    knows, of which it has the checksum."""
    found = []
    for measure in measures:
        for field in dataclasses.fields(measure):
            if field.name in _NAMED:
                part = getattr(measure, field.name)
                if isinstance(part, Inference | Similarity):
                    found.append(part.source)
                elif isinstance(part, str) and (
                    field.name != "entailment" or part.startswith(_NLI)
                ):
                    found.append(part.removeprefix(_NLI))
    return [one for one in dict.fromkeys(found) if one not in ENTRIES]


def fingerprints(detector: Detector) -> dict[str, str]:
    """Of each of a detector's encoders the hash of what it is, by its whole source."""
    found = sources(detector.measures)
    return {_whole(one): fingerprint(kept_encoder(one)) for one in found}


def whole(spec: Any) -> Any:
    """A detector's specification with whole paths, that every folder may have.

    >>> import os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     spec = {"pair_grader": os.path.relpath(folder)}
    ...     whole(spec) == {"pair_grader": os.path.realpath(folder)}
    True
    """
    if isinstance(spec, str):
        name, colon, source = spec.partition(":")
        return f"{name}{colon}{_path('source', source)}"
    ((name, options),) = spec.items()
    if isinstance(options, str):
        return {name: _path("source", options)}
    found = dict(options or {})
    if name == "ensemble":
        found["members"] = [*map(whole, found["members"])]
    return {name: {key: _path(key, value) for key, value in found.items()}}


def _path(key: str, value: Any) -> Any:
    if key not in _NAMED or not isinstance(value, str):
        return value
    if key != "entailment":
        return _whole(value)
    kind, colon, source = value.partition(_NLI)
    return value if kind or not colon else f"{_NLI}{_whole(source)}"


def _whole(source: str) -> str:
    path = Path(source)
    return str(path.resolve()) if source and path.is_dir() else source
