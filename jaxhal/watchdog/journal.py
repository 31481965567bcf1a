"""What an exploration has found out, kept as it comes."""

import asyncio
import dataclasses
import os
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxhal.datasets.jsonl import numbered_lines, parse, write_rows
from jaxhal.io.files import append, lines_of
from jaxhal.reading.keys import digest
from jaxhal.watchdog.agents import Agent, Reply, together
from jaxhal.watchdog.plan import Node

# Of an agent's answers to one query, how many may be missing.
_MISSING = 2
# What a key of the journal begins with that names a point of the bound.
_POINT = "point "


class Journal:
    """A file of answers to questions that need asking only once.

    Each is on the disk before it is used, so a run that was killed at any moment asks
    only what it was asking then.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        try:
            self._known = {row["key"]: row["value"] for row in lines_of(self.path)}
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{self.path} is no journal ({error!r}); delete it to begin anew"
            ) from error
        self.kept = {
            key.removeprefix(_POINT): value
            for key, value in self._known.items()
            if key.startswith(_POINT)
        }
        # One asks at a time what is asked twice at once.
        self._asking: weakref.WeakValueDictionary[str, asyncio.Lock]
        self._asking = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._known)

    async def once(
        self,
        key: str,
        make: Callable[[], Awaitable[Any]],
        keep: Callable[[Any], bool] = lambda value: True,
    ) -> Any:
        """What is known under a key, or what ``make`` finds out now, as JSON has it.

        What is not worth keeping is asked for again next time.
        """
        lock = self._asking.setdefault(key, asyncio.Lock())
        async with lock:
            if key not in self._known:
                value = await make()
                if not keep(value):
                    return value
                append(self.path, [{"key": key, "value": value}])
                self._known[key] = value
        return self._known[key]

    def keep(self, name: str, ours: bool) -> None:
        """Notes whether a point of the bound is the exploration's own."""
        if self.kept.get(name, False) != ours:
            append(self.path, [{"key": _POINT + name, "value": ours}])
            self.kept[name] = ours


def enough(asked: int) -> int:
    """How many of an agent's answers to one query must have come."""
    return max(min(asked, 2), asked - _MISSING)


def answered(replies: Sequence[Mapping[str, Any]]) -> bool:
    """Whether enough replies came; an agent that is out may answer another time."""
    return sum(not reply["error"] for reply in replies) >= enough(len(replies))


class Recorded:
    """An agent whose every reply is kept, so that nothing is asked twice."""

    def __init__(self, agent: Agent, journal: Journal):
        self.agent, self.name, self.journal = agent, agent.name, journal

    async def respond(
        self, queries: Sequence[str], n: int = 1, temperature: float = 1.0
    ) -> list[list[Reply]]:
        async def one(query: str) -> list[Reply]:
            async def ask() -> list[dict[str, Any]]:
                (replies,) = await self.agent.respond([query], n, temperature)
                return [*map(dataclasses.asdict, replies)]

            key = f"{n} at {temperature} {digest(query)}"
            replies = await self.journal.once(key, ask, answered)
            return [Reply(**reply) for reply in replies]

        return await together(*map(one, queries))


class Review:
    """Of an exploration the answers that the evaluator is not sure of."""

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self._labels = {said: row["label"] for said, row in self._decided().items()}
        self._open: set[str] = set()

    def label_of(self, query: str, answer: str) -> int | None:
        """What a person decided of an answer to a query.

        A row without its answer is of whatever is answered.
        """
        found = self._labels.get((query, answer))
        return self._labels.get((query, None)) if found is None else found

    def write(self, nodes: Iterable[Node]) -> None:
        """What waits, beside what a person decided in the meantime, as it stands."""
        decided = self._decided()
        shown = ("query", "answer", "context", "why", "label")
        waiting = {
            node.query: {name: getattr(node, name) for name in shown}
            for node in nodes
            if node.label is None
            and node.answer
            and not {(node.query, node.answer), (node.query, None)} & decided.keys()
        }
        if {*waiting} - self._open:
            write_rows(self.path, [*decided.values(), *waiting.values()])
            self._open = {*waiting}

    def _decided(self) -> dict[tuple[str, str | None], dict[str, Any]]:
        """The rows that have a label, by their query and answer."""
        found = {}
        # What people write need not end in a new line, and is not ours to change.
        for number, line in numbered_lines(self.path) if self.path.is_file() else ():
            try:
                row = parse(line)
                query, label = row.get("query"), row.get("label")
                answer = row.get("answer")
                if not isinstance(query, str):
                    raise ValueError("'query' is missing; keep the rows")
                if label not in (0, 1, None) or isinstance(label, bool):
                    raise ValueError(f"'label' is {label!r}; use 0, 1 or null")
            except ValueError as error:
                raise ValueError(f"{self.path}, line {number}: {error}") from error
            if label is not None:
                found[query, answer if isinstance(answer, str) else None] = row
        return found
