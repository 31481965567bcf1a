"""Agents as the watchdog sees them: asked in words, they answer in words."""

import asyncio
import concurrent.futures
import contextvars
import dataclasses
import functools
import inspect
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxhal.io.checks import at_least
from jaxhal.texts import storable

#: Characters of an answer; a longer one is no answer but a fault.
LONGEST = 100_000
# Of an error that is shown.
_SHOWN = 200


@dataclasses.dataclass(frozen=True)
class Reply:
    """What an agent made of a query, or why there is no answer (``error``).

    ``context`` is what it answered from; it is ``cut`` where it ended for want of
    tokens.
    """

    text: str
    context: str = ""
    error: str | None = None
    cut: bool = False


def failed(why: object) -> Reply:
    """A reply that is none, for a reason in words, or what was raised."""
    text = f"{type(why).__name__}: {why}" if isinstance(why, Exception) else str(why)
    return Reply("", error=storable(text[:_SHOWN]))


def checked(text: Any, cut: bool = False) -> Reply:
    """A reply of a text that came from outside: an error where it is of no use."""
    if not isinstance(text, str):
        return failed(f"the answer is {type(text).__name__} and not text")
    if not text.strip():
        return failed("the answer is empty")
    if len(text) > LONGEST:
        return failed(f"the answer has {len(text)} characters, over {LONGEST}")
    return Reply(storable(text).strip(), cut=cut)


@runtime_checkable
class Agent(Protocol):
    """Whoever answers; ``name`` is kept with every answer.

    One whose answer can be had while it is written has a method ``stream`` from a query
    and a temperature to :data:`Pieces`.
    """

    @property
    def name(self) -> str: ...

    async def respond(
        self, queries: Sequence[str], n: int = 1, temperature: float = 1.0
    ) -> list[list[Reply]]:
        """For each query ``n`` replies, drawn independently at a temperature.

        A query that cannot be answered gets replies that say why; what would be said to
        every query is raised.
        """
        ...


#: An answer while it is written; a piece that is an error is the last.
Pieces = AsyncGenerator[Reply, None]


async def streamed(
    agent: Agent, query: str, temperature: float, whole: bool = False
) -> Pieces:
    """One answer, in one piece if it is wanted ``whole`` or the agent says it so."""
    stream = None if whole else getattr(agent, "stream", None)
    if stream is None:
        ((reply,),) = await agent.respond([query], 1, temperature)
        yield reply
        return
    async for piece in stream(query, temperature):
        yield piece


async def ahead(pieces: Pieces) -> Pieces:
    """The same pieces, taken as they are written, however late they are asked for."""
    taken: asyncio.Queue[Reply | None] = asyncio.Queue()

    async def take() -> None:
        try:
            async for piece in pieces:
                taken.put_nowait(piece)
        finally:
            taken.put_nowait(None)

    taking = asyncio.create_task(take())
    try:
        while (piece := await taken.get()) is not None:
            yield piece
        await taking
    finally:
        taking.cancel()


class Gate:
    """Lets so many through at a time, over all calls in one event loop."""

    def __init__(self, most: int):
        self._most, self._of = most, weakref.WeakKeyDictionary()

    def __call__(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        return self._of.setdefault(loop, asyncio.Semaphore(self._most))


class Threads:
    """Calls that may take long, so many at a time, in threads of their own.

    Those that all of asyncio shares are few, and a server's other work waits for them.
    """

    def __init__(self, most: int):
        self._pool = concurrent.futures.ThreadPoolExecutor(most)

    async def __call__(self, call: Callable[..., Any], *args: Any) -> Any:
        there = functools.partial(contextvars.copy_context().run, call, *args)
        return await asyncio.get_running_loop().run_in_executor(self._pool, there)


async def together(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """What all of them return; the first error stops the others, and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except ExceptionGroup as several:
        raise several.exceptions[0] from None
    return [task.result() for task in tasks]


async def each(
    one: Callable[[str], Coroutine[Any, Any, Reply]], queries: Sequence[str], n: int
) -> list[list[Reply]]:
    """``n`` replies to each query, all at once."""
    found = await together(*(one(query) for query in queries for _ in range(n)))
    return [found[at : at + n] for at in range(0, len(found), n)]


def named(function: Callable[..., Any]) -> str:
    """What a function is called, or else its class."""
    return getattr(function, "__name__", type(function).__name__)


class CallableAgent:
    """Any function from a query to an answer, asked once for each answer.

    It takes a query, and a ``temperature`` if it has such an argument, and may be a
    coroutine function.  What it raises is the error of that reply.  ``concurrency``
    queries are answered at a time.
    """

    def __init__(
        self, function: Callable[..., Any], name: str = "", *, concurrency: int = 4
    ):
        at_least(1, concurrency=concurrency)
        self.function, self._gate = function, Gate(concurrency)
        self._threads = Threads(concurrency)
        self.name = name or named(function)
        known = inspect.signature(function).parameters
        self._takes_temperature = "temperature" in known

    async def respond(
        self, queries: Sequence[str], n: int = 1, temperature: float = 1.0
    ) -> list[list[Reply]]:
        options = {"temperature": temperature} if self._takes_temperature else {}

        async def one(query: str) -> Reply:
            async with self._gate():
                try:
                    if inspect.iscoroutinefunction(self.function):
                        return checked(await self.function(query, **options))
                    ask = functools.partial(self.function, query, **options)
                    return checked(await self._threads(ask))
                except Exception as error:  # whatever another's code raises
                    return failed(error)

        return await each(one, queries, n)
