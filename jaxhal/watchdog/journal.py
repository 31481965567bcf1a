"""What an exploration has found out, kept as it comes."""

import asyncio
import dataclasses
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxhal.io.files import append, lines_of
from jaxhal.reading.keys import digest
from jaxhal.watchdog.agents.base import Agent, Reply

# Of an agent's answers to one query, how many may be missing.
_MISSING = 2


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

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: str) -> bool:
        return key in self._known

    async def once(
        self,
        key: str,
        make: Callable[[], Awaitable[Any]],
        keep: Callable[[Any], bool] = lambda value: True,
    ) -> Any:
        """What is known under a key, or what ``make`` finds out now, as JSON has it.

        What is not worth keeping is asked for again next time.
        """
        if key not in self._known:
            value = await make()
            if not keep(value):
                return value
            append(self.path, [{"key": key, "value": value}])
            self._known[key] = value
        return self._known[key]


def enough(asked: int) -> int:
    """How many of an agent's answers to one query must have come."""
    return max(min(asked, 2), asked - _MISSING)


def answered(replies: Sequence[Mapping[str, Any]]) -> bool:
    """Whether enough replies came; an agent that is out may answer another time."""
    return sum(not reply["error"] for reply in replies) >= enough(len(replies))


class Recorded:
    """An agent whose every reply is kept, so that nothing is asked twice."""

    def __init__(self, agent: Agent, journal: Journal):
        self.agent, self.journal = agent, journal

    @property
    def name(self) -> str:
        return self.agent.name

    async def respond(
        self, queries: Sequence[str], n: int = 1, temperature: float = 1.0
    ) -> list[list[Reply]]:
        async def one(query: str) -> list[Reply]:
            async def ask() -> list[dict[str, Any]]:
                (replies,) = await self.agent.respond([query], n, temperature)
                return [dataclasses.asdict(reply) for reply in replies]

            key = f"{n} at {temperature} {digest(query)}"
            replies = await self.journal.once(key, ask, answered)
            return [Reply(**reply) for reply in replies]

        return await asyncio.gather(*map(one, queries))
