"""Answers that wait for a person, in a file that the person writes to as well."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxhal.datasets.jsonl import numbered_lines, parse, write_rows
from jaxhal.watchdog.plan import Node


class Review:
    """Of an exploration the answers that the evaluator is not sure of.

    Args:
      path: of the file.

    Raises:
      ValueError: on a row without a query, or a label that is not 0, 1 or null.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.labels = {query: row["label"] for query, row in _decided(path).items()}
        self._open: set[str] = set()

    def write(self, nodes: Iterable[Node]) -> None:
        """What waits, beside what a person decided in the meantime, as it stands."""
        decided = _decided(self.path)
        waiting = [
            {
                "query": node.query,
                "answer": node.answer,
                "context": node.context,
                "why": node.why,
                "label": None,
            }
            for node in nodes
            if node.label is None and node.answer and node.query not in decided
        ]
        if {one["query"] for one in waiting} - self._open:
            write_rows(self.path, [*decided.values(), *waiting])
            self._open = {one["query"] for one in waiting}


def _decided(path: str | os.PathLike) -> dict[str, dict[str, Any]]:
    """The rows that have a label, by their query."""
    found = {}
    # What people write need not end in a new line, and is not ours to change.
    for number, line in numbered_lines(path) if Path(path).is_file() else ():
        try:
            row = parse(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if not isinstance(row.get("query"), str):
            raise ValueError(
                f"{path}, line {number}: 'query' is missing; keep the rows"
            )
        label = row.get("label")
        if label not in (0, 1, None) or isinstance(label, bool):
            raise ValueError(
                f"{path}, line {number}: 'label' is {label!r}; use 0, 1 or null"
            )
        if label is not None:
            found[row["query"]] = row
    return found
