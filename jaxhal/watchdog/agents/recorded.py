"""Agents whose replies are kept."""

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxhal.reading.keys import digest
from jaxhal.watchdog.agents.base import Agent, Reply
from jaxhal.watchdog.journal import Journal, answered


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
        """See :class:`jaxhal.watchdog.Agent`."""

        async def one(query: str) -> list[Reply]:
            async def ask() -> list[dict[str, Any]]:
                (replies,) = await self.agent.respond([query], n, temperature)
                return [dataclasses.asdict(reply) for reply in replies]

            key = f"{n} at {temperature} {digest(query)}"
            replies = await self.journal.once(key, ask, answered)
            return [Reply(**reply) for reply in replies]

        return await asyncio.gather(*map(one, queries))
