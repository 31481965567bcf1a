"""Agents as the watchdog sees them: asked in words, they answer in words.

Nothing else of an agent is looked at, so anything that answers can be watched.
"""

import asyncio
import concurrent.futures
import contextlib
import contextvars
import dataclasses
import functools
import inspect
import math
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from jaxhal.generation import GREEDY, Sampling, generate, requests
from jaxhal.io.files import replacing
from jaxhal.llm.endpoint import Endpoint, content_of, is_cut
from jaxhal.llm.hosts import hidden
from jaxhal.models.encoders.encoding import embed, kept_encoder
from jaxhal.models.lm import LM
from jaxhal.models.registry import private_cache
from jaxhal.reading.keys import digest, fingerprint
from jaxhal.texts import storable
from jaxhal.watchdog.conversation import LENGTHS, Conversation, last_turn
from jaxhal.watchdog.index import Index

#: The prompt of :class:`RagAgent`.
FROM_PASSAGES = """\
{passages}

Answer the question from the passages above, in one or two sentences.

Question: {query}
"""
#: Characters of an answer; a longer one is no answer but a fault.
LONGEST = 100_000
# Of an error that is shown.
_SHOWN = 200
# Seconds that a model waits for more queries before it writes.
_GATHER = 0.005


@dataclasses.dataclass(frozen=True)
class Reply:
    """What an agent made of a query.

    Attributes:
      text: its answer; empty where there is an error.
      context: what it answered from, where it says so.
      error: why there is no answer.
      cut: whether it ended for want of tokens.
    """

    text: str
    context: str = ""
    error: str | None = None
    cut: bool = False


def failed(why: object) -> Reply:
    """A reply that is none.

    Args:
      why: in words, or what was raised.
    """
    text = f"{type(why).__name__}: {why}" if isinstance(why, Exception) else str(why)
    return Reply("", error=storable(text[:_SHOWN]))


def checked(text: Any, cut: bool = False) -> Reply:
    """A reply of a text that came from outside: an error where it is of no use.

    Args:
      text: what came.
      cut: whether it ended for want of tokens.
    """
    if not isinstance(text, str):
        return failed(f"the answer is {type(text).__name__} and not text")
    if not text.strip():
        return failed("the answer is empty")
    if len(text) > LONGEST:
        return failed(f"the answer has {len(text)} characters, over {LONGEST}")
    return Reply(storable(text).strip(), cut=cut)


@runtime_checkable
class Agent(Protocol):
    """Whoever answers; ``name`` is kept with every answer."""

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


@runtime_checkable
class Streaming(Agent, Protocol):
    """An agent whose answer can be had while it is written."""

    def stream(self, query: str, temperature: float = 1.0) -> Pieces:
        """One answer, piece by piece."""
        ...


async def streamed(agent: Agent, query: str, temperature: float = 1.0) -> Pieces:
    """One answer, in one piece by an agent that says it whole."""
    if isinstance(agent, Streaming):
        async for piece in agent.stream(query, temperature):
            yield piece
        return
    ((reply,),) = await agent.respond([query], 1, temperature)
    yield reply


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


def ask(
    agent: Agent, queries: Sequence[str], n: int = 1, temperature: float = 1.0
) -> list[list[Reply]]:
    """:meth:`Agent.respond` for callers that do not wait on others."""
    return asyncio.run(agent.respond(queries, n, temperature))


class _Asked(NamedTuple):
    """A query that waits for a model."""

    query: str
    n: int
    temperature: float
    replies: concurrent.futures.Future[list[Reply]]


class LocalAgent:
    """A model in this process.

    What it says to a query follows from the query, the temperature (rounded to tenths,
    as each compiles a program) and the seed.  Queries that come in while it writes
    wait, and are then answered together.

    Args:
      lm: the model.
      prompt: the user's turn, with ``{query}`` in it.
      max_new_tokens: the most tokens of an answer.
      stop: texts that end an answer.
      batch_size: answers written together.
      seed: of all chance.

    Raises:
      ValueError: when there is no place for the query in the prompt.
    """

    def __init__(
        self,
        lm: LM,
        prompt: str = "{query}",
        *,
        max_new_tokens: int = 128,
        stop: Sequence[str] = (),
        batch_size: int = 16,
        seed: int = 0,
    ):
        if "{query}" not in prompt:
            raise ValueError(f"prompt is {prompt!r}; it must hold {{query}}")
        self.lm, self.prompt, self.stop = lm, prompt, tuple(stop)
        self.max_new_tokens, self.batch_size = max_new_tokens, batch_size
        self._key = jax.random.key(seed)
        self._waiting: list[_Asked] = []
        self._lock, self._busy = threading.Lock(), False

    @property
    def name(self) -> str:
        return self.lm.name

    async def respond(
        self, queries: Sequence[str], n: int = 1, temperature: float = 1.0
    ) -> list[list[Reply]]:
        """See :class:`Agent`.

        Raises:
          ValueError: when ``n`` is below 1 or the temperature below 0.
        """
        if n < 1 or not temperature >= 0:
            raise ValueError(
                f"n is {n} and temperature {temperature}; give at least 1 and 0"
            )
        temperature = round(temperature, 1)
        futures = [concurrent.futures.Future() for _ in queries]
        with self._lock:
            self._waiting += [
                _Asked(query, n, temperature, future)
                for query, future in zip(queries, futures, strict=True)
            ]
            if not self._busy and futures:
                self._busy = True
                threading.Thread(target=self._work, daemon=True).start()
        return await asyncio.gather(*map(asyncio.wrap_future, futures))

    def _work(self) -> None:
        """Answers whatever waits, as much of one kind as fits at a time."""
        while True:
            time.sleep(_GATHER)  # what is asked at the same time comes along
            with self._lock:
                if not self._waiting:
                    self._busy = False
                    return
                _, n, temperature, _ = self._waiting[0]
                most, alike, rest = max(1, 2 * self.batch_size // n), [], []
                for one in self._waiting:
                    fits = (one.n, one.temperature) == (n, temperature)
                    (alike if fits and len(alike) < most else rest).append(one)
                self._waiting = rest
            alike = [one for one in alike if one.replies.set_running_or_notify_cancel()]
            try:
                found = self._respond([one.query for one in alike], n, temperature)
            except BaseException as error:
                for one in alike:
                    one.replies.set_exception(error)
                continue
            for one, replies in zip(alike, found, strict=True):
                one.replies.set_result(replies)

    def _respond(
        self, queries: list[str], n: int, temperature: float
    ) -> list[list[Reply]]:
        sampling = GREEDY if temperature == 0 else Sampling(temperature=temperature)
        prompts = {
            at: self.prompt.replace("{query}", query)
            for at, query in enumerate(queries)
        }
        errors = requests.unanswerable(self.lm, prompts, self.max_new_tokens)
        found = {at: [failed(error)] * n for at, error in errors.items()}
        asked = {at: text for at, text in prompts.items() if at not in errors}
        if asked:
            numbers = [int(digest(one.encode())[:8], 16) for one in asked.values()]
            key = jax.random.fold_in(self._key, round(1000 * temperature))
            keys = jax.vmap(jax.random.fold_in, (None, 0))(
                key, np.array(numbers, np.uint32)
            )
            written = generate(
                self.lm,
                list(asked.values()),
                n=n,
                max_new_tokens=self.max_new_tokens,
                sampling=sampling,
                key=keys,
                stop=self.stop,
                batch_size=max(n, self.batch_size),
                progress=False,
            )
            for at, some in zip(asked, written, strict=True):
                found[at] = [checked(one.text, one.stopped == "length") for one in some]
        return [found[at] for at in range(len(queries))]


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
        if concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}; give at least 1")
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

        return await _each(one, queries, n)


class EndpointAgent:
    """A model or an agent behind an OpenAI-compatible address.

    A request that times out or is answered 429 or 5xx is made again, each time after a
    longer wait, or after as long as the server asks for.  A query that is still without
    its whole answer after ten minutes, or ten times the timeout where that is more, is
    in error, even if something comes in all the time; a rate adds as long as requests
    may have to wait for their turns.  Of a
    :class:`~jaxhal.watchdog.Conversation` it is sent every turn and wish.

    Attributes:
      hears_wishes: true.

    Args:
      endpoint: where it is; its timeout is that of one request.
      retries: requests made after the first.
      concurrency: requests that are open at a time, and as many streams.
      per_second: requests begun in a second, retries among them; ``None`` for as many
        as there are.
      max_tokens: the most tokens of an answer; ``None`` leaves it to the server.
      system: what it is told before every query.

    Raises:
      ValueError: on a number that makes no sense.
    """

    hears_wishes = True

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        retries: int = 4,
        concurrency: int = 8,
        per_second: float | None = None,
        max_tokens: int | None = None,
        system: str = "",
    ):
        for name, value, least in (
            ("retries", retries, 0),
            ("concurrency", concurrency, 1),
            ("max_tokens", max_tokens, 1),
        ):
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}; give at least {least}")
        if per_second is not None and not 0 < per_second < math.inf:
            raise ValueError(f"per_second is {per_second}; give a rate above 0")
        self.endpoint, self.retries, self._gate = endpoint, retries, Gate(concurrency)
        # Streams wait for who listens, who may wait for answers to other queries.
        self._streams = Gate(concurrency)
        self.per_second, self.max_tokens, self.system = per_second, max_tokens, system
        self._longest = endpoint.patience
        if per_second is not None:  # waiting for one's turn is nobody's fault
            self._longest += 2 * concurrency * (retries + 1) / per_second
        self._free = 0.0  # when the next request may begin

    @property
    def name(self) -> str:
        return self.endpoint.model

    async def respond(
        self, queries: Sequence[str], n: int = 1, temperature: float = 1.0
    ) -> list[list[Reply]]:
        """See :class:`Agent`.

        Raises:
          ModuleNotFoundError: without the ``openai`` package.
          RuntimeError: when the endpoint takes no query at all: a wrong key, address or
            model.
        """
        openai = self.endpoint.client_library()
        async with self._client() as client:

            async def one(query: str) -> Reply:
                async with self._gate():
                    try:
                        asked = self._asked(query, temperature)
                        async with asyncio.timeout(self._longest):
                            answer = await client.chat.completions.create(**asked)
                        return checked(*content_of(answer))
                    except TimeoutError:
                        return self._late()
                    # A reply nested too deep for a parser is malformed as well.
                    except (openai.OpenAIError, ValueError, RecursionError) as error:
                        return self._failed(error)

            return await _each(one, queries, n)

    async def stream(self, query: str, temperature: float = 1.0) -> Pieces:
        """See :class:`Streaming`.

        Raises:
          RuntimeError: as :meth:`respond`.
        """
        size = 0
        async with self._streams(), self._client() as client:
            ends = asyncio.get_running_loop().time() + self._longest
            try:
                asked = self._asked(query, temperature)
                async with asyncio.timeout_at(ends):
                    create = client.chat.completions.create
                    pieces = aiter(await create(**asked, stream=True))
                while True:
                    async with asyncio.timeout_at(ends):
                        piece = await anext(pieces, None)
                    if piece is None:
                        break
                    text, cut = _delta(piece)
                    size += len(text)
                    if size > LONGEST:
                        raise ValueError(f"the answer has over {LONGEST} characters")
                    if text or cut:
                        yield Reply(storable(text), cut=cut)
                if not size:
                    raise ValueError("the answer is empty")
            except TimeoutError:
                yield self._late()
            except Exception as error:  # a line that breaks has an error of its own
                yield self._failed(error)

    def _client(self) -> Any:
        openai = self.endpoint.client_library()
        hooks = {"request": [self._turn], "response": [self._bounded]}
        return openai.AsyncOpenAI(
            base_url=self.endpoint.url,
            api_key=self.endpoint.key(),
            timeout=self.endpoint.timeout,
            max_retries=self.retries,
            http_client=openai.DefaultAsyncHttpxClient(
                event_hooks=hooks, **self.endpoint.connecting()
            ),
        )

    async def _bounded(self, response: Any) -> None:
        """Has a response end in an error before it fills the memory."""
        self.endpoint.check_here(response)
        read, gauge = response.aiter_bytes, self.endpoint.gauge()

        async def bounded(chunk_size: int | None = None) -> AsyncGenerator[bytes, None]:
            async for piece in read(chunk_size):
                gauge(piece)
                yield piece

        response.aiter_bytes = bounded

    def _late(self) -> Reply:
        return failed(f"no whole answer in {self._longest:.0f} seconds")

    def _asked(self, query: str, temperature: float) -> dict[str, Any]:
        if not isinstance(query, Conversation):
            query = Conversation([("user", query)])
        turns, wishes = list(query.turns), dict(query.wishes)
        if self.system:
            turns.insert(0, ("system", self.system))
        if self.max_tokens is not None:
            wished = [name for name in LENGTHS if name in wishes]
            for name in wished or ["max_tokens"]:
                wishes[name] = min(wishes.get(name, math.inf), self.max_tokens)
        # The client would look at each message, half a millisecond each time.
        messages = [{"role": role, "content": text} for role, text in turns]
        return {
            "model": self.endpoint.model,
            "messages": [],
            "temperature": temperature,
            "extra_body": {**wishes, "messages": messages},
        }

    def _failed(self, error: Exception) -> Reply:
        """A reply that says what went wrong; raised where all queries would fail."""
        if isinstance(error, self.endpoint.refusals()):
            raise RuntimeError(
                f"{self.endpoint.url} takes no query for {self.endpoint.model!r} "
                f"({hidden(error)}); {self.endpoint.remedy}"
            ) from None
        return failed(f"{type(error).__name__}: {hidden(error)}")

    async def _turn(self, request: Any) -> None:
        """Waits until a request may begin."""
        self.endpoint.bare(request)
        if self.per_second is None:
            return
        now = time.monotonic()
        begin = max(now, self._free)
        self._free = begin + 1 / self.per_second
        await asyncio.sleep(begin - now)


def _delta(piece: Any) -> tuple[str, bool]:
    """The text of a piece, cut or not; ValueError where it is something else."""
    with contextlib.suppress(AttributeError, TypeError):
        text = "".join(choice.delta.content or "" for choice in piece.choices)
        return text, any(map(is_cut, piece.choices))
    raise ValueError("the server sent no piece of a chat completion")


async def together(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """What all of them return; the first error stops the others, and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except ExceptionGroup as several:
        raise several.exceptions[0] from None
    return [task.result() for task in tasks]


async def _each(
    one: Callable[[str], Coroutine[Any, Any, Reply]], queries: Sequence[str], n: int
) -> list[list[Reply]]:
    """``n`` replies to each query, all at once."""
    found = await together(*(one(query) for query in queries for _ in range(n)))
    return [found[at : at + n] for at in range(0, len(found), n)]


class Passages:
    """Texts that are found by likeness of their vectors.

    Args:
      texts: the passages, at least one; their vectors are kept for the next time in
        :func:`~jaxhal.models.registry.cache_dir`.
      encoder: as :func:`jaxhal.models.encoders.load_encoder` takes it.
      progress: show a progress bar; ``None`` shows it on a terminal.

    Raises:
      ValueError: when there is none, or one is empty.
    """

    def __init__(
        self,
        texts: Sequence[str],
        encoder: str = "all-minilm-l6-v2",
        *,
        progress: bool | None = None,
    ):
        self.texts, self.encoder = list(dict.fromkeys(texts)), encoder
        known = kept_encoder(encoder)
        about = [fingerprint(known), str(known.pooling), *map(digest, self.texts)]
        path = private_cache("passages") / f"{digest(' '.join(about))}.npy"
        if path.is_file():
            vectors = np.load(path)
        else:
            vectors = embed(known, self.texts, progress=progress)
            with replacing(path, binary=True, private=True) as file:
                np.save(file, vectors)
        self._index = Index(vectors.shape[1])
        self._index.add(vectors)

    def __len__(self) -> int:
        return len(self.texts)

    def search(self, queries: Sequence[str], k: int) -> list[list[str]]:
        """For each query the ``k`` most similar passages, the nearest first."""
        vectors = embed(kept_encoder(self.encoder), queries, progress=False)
        _, rows = self._index.search(vectors, min(k, len(self)))
        return [[self.texts[row] for row in some] for some in rows]


class RagAgent:
    """An agent that answers from passages of its domain.

    Args:
      agent: what answers.
      passages: where they are found.
      k: passages for a query.
      prompt: with ``{passages}`` and ``{query}`` in it.

    Raises:
      ValueError: when the prompt lacks one of the two, or ``k`` is below 1.
    """

    def __init__(
        self,
        agent: Agent,
        passages: Passages,
        *,
        k: int = 3,
        prompt: str = FROM_PASSAGES,
    ):
        if "{query}" not in prompt or "{passages}" not in prompt:
            raise ValueError(
                f"prompt is {prompt!r}; it must hold {{passages}} and {{query}}"
            )
        if k < 1:
            raise ValueError(f"k is {k}; give at least 1")
        self.agent, self.passages, self.k, self.prompt = agent, passages, k, prompt

    @property
    def hears_wishes(self) -> bool:
        """Whether what answers is told what a conversation wishes."""
        return getattr(self.agent, "hears_wishes", False)

    @property
    def name(self) -> str:
        return f"{self.agent.name} with {len(self.passages)} passages"

    async def respond(
        self, queries: Sequence[str], n: int = 1, temperature: float = 1.0
    ) -> list[list[Reply]]:
        """See :class:`Agent`; the passages come back as the context."""
        contexts, asked = await self._prompts(queries)
        replies = await self.agent.respond(asked, n, temperature)
        return [
            [dataclasses.replace(one, context=context) for one in some]
            for some, context in zip(replies, contexts, strict=True)
        ]

    async def stream(self, query: str, temperature: float = 1.0) -> Pieces:
        """See :class:`Streaming`; in one piece if what answers says it whole."""
        (context,), (asked,) = await self._prompts([query])
        async for piece in streamed(self.agent, asked, temperature):
            yield dataclasses.replace(piece, context=context)

    async def _prompts(self, queries: Sequence[str]) -> tuple[list[str], list[str]]:
        """The passages of each query, and what is asked with them.

        Of a conversation the last turn alone is looked up and put into the prompt.
        """
        last = [*map(last_turn, queries)]
        found = await asyncio.to_thread(self.passages.search, last, self.k)
        contexts = ["\n\n".join(some) for some in found]
        asked = [
            self.prompt.replace("{passages}", context).replace("{query}", query)
            for context, query in zip(contexts, last, strict=True)
        ]
        return contexts, [
            one.asking(prompt) if isinstance(one, Conversation) else prompt
            for one, prompt in zip(queries, asked, strict=True)
        ]
