"""Functions as agents."""

import asyncio
import concurrent.futures
import contextvars
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from jaxhal.io.checks import at_least
from jaxhal.watchdog.agents.base import Gate, Reply, checked, each, failed


def named(function: Callable[..., Any]) -> str:
    """What a function is called, or else its class.

    Example:
      >>> named(len)
      'len'
    """
    return getattr(function, "__name__", type(function).__name__)


class CallableAgent:
    """Any function from a query to an answer, asked once for each answer.

    Args:
      function: takes a query, and a ``temperature`` if it has such an argument; it may
        be a coroutine function.  One that is not runs in threads of its own.  What it
        raises is the error of that reply.
      name: of the agent.
      concurrency: queries that are answered at a time.

    Raises:
      ValueError: when ``concurrency`` is below 1.
    """

    def __init__(
        self, function: Callable[..., Any], name: str = "", *, concurrency: int = 4
    ):
        at_least(1, concurrency=concurrency)
        self.function, self._gate = function, Gate(concurrency)
        # Those that all of asyncio shares are few, and others wait for them.
        self._threads = concurrent.futures.ThreadPoolExecutor(concurrency)
        self._name = name or named(function)
        known = inspect.signature(function).parameters
        self._takes_temperature = "temperature" in known

    @property
    def name(self) -> str:
        return self._name

    async def respond(
        self, queries: Sequence[str], n: int = 1, temperature: float = 1.0
    ) -> list[list[Reply]]:
        """See :class:`Agent`."""
        options = {"temperature": temperature} if self._takes_temperature else {}

        async def one(query: str) -> Reply:
            async with self._gate():
                try:
                    if inspect.iscoroutinefunction(self.function):
                        return checked(await self.function(query, **options))
                    ask = functools.partial(self.function, query, **options)
                    run = contextvars.copy_context().run
                    loop = asyncio.get_running_loop()
                    return checked(await loop.run_in_executor(self._threads, run, ask))
                except Exception as error:  # whatever another's code raises
                    return failed(error)

        return await each(one, queries, n)
