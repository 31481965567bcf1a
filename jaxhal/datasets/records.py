"""Reading the files of published data sets, where a bad row is an error at once."""

import difflib
import types
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxhal.datasets.fields import kind
from jaxhal.datasets.jsonl import numbered_lines, parse
from jaxhal.io.showing import quoted

Kind = type | types.UnionType


def records(path: Path, fields: Mapping[str, Kind]) -> list[dict[str, Any]]:
    """The rows of a JSON Lines file, each of which holds ``fields`` of these types.

    Raises:
      FileNotFoundError: when the file does not exist.
      ValueError: when a line is not JSON or lacks a field; it names file and line.
    """
    rows = []
    for line, raw in numbered_lines(path):
        try:
            row = parse(raw)
            check(row, fields)
        except ValueError as error:
            raise ValueError(f"{path}, line {line}: {error}") from None
        rows.append(row)
    return rows


def check(row: Any, fields: Mapping[str, Kind]) -> None:
    """Raises ValueError unless ``row`` is an object with ``fields`` of these types.

    >>> check({"id": "a"}, {"id": str, "label": int})
    Traceback (most recent call last):
    ValueError: 'label' is null; this data set has int there
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"expected an object, got {kind(row)}")
    for name, wanted in fields.items():
        if not isinstance(row.get(name), wanted):
            raise ValueError(
                f"{name!r} is {kind(row.get(name))}; this data set has "
                f"{getattr(wanted, '__name__', wanted)} there"
            )


def by_name(rows: Iterable[dict[str, Any]], field: str) -> dict[str, dict[str, Any]]:
    """Rows by a field that must tell them apart, in their order.

    Raises:
      ValueError: when two rows share it.

    >>> by_name([{"id": "a"}, {"id": "b"}], "id")["b"]
    {'id': 'b'}
    """
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row[field] in found:
            raise ValueError(
                f"{field} {quoted(row[field])} comes twice; keep one of them"
            )
        found[row[field]] = row
    return found


def chosen(
    what: str, wanted: str | Collection[str] | None, present: Iterable[str]
) -> set[str]:
    """The values to keep of those present: one, several, or all when ``None``.

    Raises:
      ValueError: on a value that is not present; it lists those that are.

    >>> sorted(chosen("split", None, ["train", "test", "train"]))
    ['test', 'train']
    >>> chosen("split", "test", ["train", "test"])
    {'test'}
    """
    known = set(present)
    if wanted is None:
        return known
    keep = {wanted} if isinstance(wanted, str) else set(wanted)
    for name in sorted(keep - known):
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"unknown {what} {quoted(name)}; {hint}there are: "
            f"{', '.join(sorted(known))}"
        )
    return keep
