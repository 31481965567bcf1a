"""Which answers are read together, fixed before the first is read.

A run that goes on after a kill must read the same answers in the same batches, or its
numbers would differ in the last bits.  So the plan of a request is a file of its own.
"""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxhal.capture.forward import shares_prompts
from jaxhal.io import sealing
from jaxhal.models.batching import Encoded, plan
from jaxhal.models.config import Config
from jaxhal.reading.keys import digest

# Rows that are lost, at most, when a run is killed.
_PART_ROWS = 32


@dataclasses.dataclass(frozen=True)
class Group:
    """Answers read by one call: their keys, padding and how many share a prompt."""

    keys: tuple[str, ...]
    prompt: int
    response: int
    copies: int


@dataclasses.dataclass(frozen=True)
class Part:
    """Groups whose features make one file."""

    columns: tuple[str, ...]
    groups: tuple[Group, ...]

    @property
    def count(self) -> int:
        """How many answers it holds."""
        return sum(len(group.keys) for group in self.groups)

    @property
    def name(self) -> str:
        return digest(json.dumps(dataclasses.asdict(self)))


def make_plan(
    config: Config,
    encoded: dict[str, Encoded],
    missing: dict[str, list[str]],
    batch_size: int,
) -> list[Part]:
    """Parts of about ``_PART_ROWS`` rows; rows that lack the same columns together."""
    alike = defaultdict(list)
    for key, columns in missing.items():
        alike[tuple(columns)].append(key)
    parts = []
    for columns, keys in alike.items():
        groups: list[Group] = []
        for group in _groups(config, {key: encoded[key] for key in keys}, batch_size):
            if groups and sum(len(g.keys) for g in [*groups, group]) > _PART_ROWS:
                parts.append(Part(columns, tuple(groups)))
                groups = []
            groups.append(group)
        parts.append(Part(columns, tuple(groups)))
    return parts


def _groups(
    config: Config, encoded: dict[str, Encoded], batch_size: int
) -> Iterator[Group]:
    """Batches in which runs of ``copies`` rows, a power of two, share a prompt."""
    by_prompt = defaultdict(list)
    for key, row in encoded.items():
        alone = key if not shares_prompts(config) else ""
        by_prompt[row.prompt_ids.tobytes(), alone].append(key)
    runs = defaultdict(list)
    for keys in by_prompt.values():
        keys.sort(key=lambda key: len(encoded[key].response_ids))
        while keys:
            copies = 1 << (min(len(keys), batch_size).bit_length() - 1)
            runs[copies].append(keys[:copies])
            keys = keys[copies:]
    for copies, together in sorted(runs.items()):
        longest = [encoded[run[-1]] for run in together]
        for planned in plan(longest, max(1, batch_size // copies)):
            keys = tuple(key for index in planned.rows for key in together[index])
            yield Group(keys, planned.prompt_length, planned.response_length, copies)


def read_plan(path: Path) -> list[Part] | None:
    """The plan in a file, if there is one.

    Raises:
      ValueError: names the file and the remedy when it is damaged.
    """
    if not path.is_file():
        return None
    parts = unsealed(path)["parts"]
    return [
        Part(
            tuple(part["columns"]),
            tuple(
                Group(tuple(g["keys"]), g["prompt"], g["response"], g["copies"])
                for g in part["groups"]
            ),
        )
        for part in parts
    ]


def write_plan(path: Path, parts: list[Part]) -> None:
    sealing.write(path, {"parts": [dataclasses.asdict(part) for part in parts]})


def unsealed(path: Path) -> dict[str, Any]:
    """What a sealed file of a store says.

    Raises:
      ValueError: names the file and the remedy when it is damaged.
    """
    try:
        return sealing.read(path)
    except ValueError as error:
        raise ValueError(
            f"{path} of the feature store is damaged; delete it and run the same again "
            f"({error})"
        ) from error


def holds(parts: list[Part], missing: dict[str, list[str]]) -> bool:
    """Whether a plan reads everything that rows lack."""
    planned = {
        (key, column)
        for part in parts
        for group in part.groups
        for key in group.keys
        for column in part.columns
    }
    return all((key, c) in planned for key, columns in missing.items() for c in columns)
