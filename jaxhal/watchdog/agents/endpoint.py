"""Models and agents behind an OpenAI-compatible address, as agents."""

import asyncio
import contextlib
import math
import time
from collections.abc import Sequence
from typing import Any

from jaxhal.io.checks import at_least
from jaxhal.llm.endpoint import Endpoint, content_of, is_cut
from jaxhal.llm.hosts import hidden
from jaxhal.texts import storable
from jaxhal.watchdog import agents
from jaxhal.watchdog.agents import Gate, Pieces, Reply, failed
from jaxhal.watchdog.conversation import LENGTHS, Conversation


class EndpointAgent:
    """A model or an agent behind an OpenAI-compatible address.

    A request that times out or is answered 429 or 5xx is made again, up to ``retries``
    times, after a longer wait each time.  A query that is without its whole answer
    after ten minutes, or ten times the timeout where that is more, is in error.  Of a
    :class:`~jaxhal.watchdog.Conversation` it is sent every turn and wish.

    Args:
      concurrency: requests that are open at a time, and as many streams.
      per_second: requests begun in a second, retries among them.
      max_tokens: the most tokens of an answer; ``None`` leaves it to the server.
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
    ):
        at_least(0, retries=retries)
        at_least(1, concurrency=concurrency, max_tokens=max_tokens)
        if per_second is not None and not 0 < per_second < math.inf:
            raise ValueError(f"per_second is {per_second}; give a rate above 0")
        self.endpoint, self.name = endpoint, endpoint.model
        self.retries, self.per_second = retries, per_second
        self.max_tokens = max_tokens
        self.settings = {"max_tokens": max_tokens}
        # Streams wait for who listens, who may wait for answers to other queries.
        self._gate, self._streams = Gate(concurrency), Gate(concurrency)
        self._longest = endpoint.patience
        if per_second is not None:  # waiting for one's turn is nobody's fault
            self._longest += 2 * concurrency * (retries + 1) / per_second
        self._pace, self._free = Gate(1), 0.0  # when the next request may begin

    async def respond(
        self, queries: Sequence[str], n: int = 1, temperature: float = 1.0
    ) -> list[list[Reply]]:
        # A reply nested too deep for a parser is malformed as well.
        wrong = TimeoutError, ValueError, RecursionError
        known = (*wrong, self.endpoint.client_library().OpenAIError)
        async with self._client() as client:

            async def one(query: str) -> Reply:
                async with self._gate():
                    try:
                        asked = self._asked(query, temperature)
                        async with asyncio.timeout(self._longest):
                            answer = await client.chat.completions.create(**asked)
                        return agents.checked(*content_of(answer))
                    except known as error:
                        return self._failed(error)

            return await agents.each(one, queries, n)

    async def stream(self, query: str, temperature: float = 1.0) -> Pieces:
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
                    if size > agents.LONGEST:
                        raise ValueError(
                            f"the answer has over {agents.LONGEST} characters"
                        )
                    if text or cut:
                        yield Reply(storable(text), cut=cut)
                if not size:
                    raise ValueError("the answer is empty")
            except Exception as error:  # a line that breaks has an error of its own
                yield self._failed(error)

    def _client(self) -> Any:
        return self.endpoint.client(self.retries, self._turn)

    def _asked(self, query: str, temperature: float) -> dict[str, Any]:
        talk = Conversation.of(query)
        wishes = dict(talk.wishes)
        if self.max_tokens is not None:
            wished = [name for name in LENGTHS if name in wishes]
            for name in wished or ["max_tokens"]:
                wishes[name] = min(wishes.get(name, math.inf), self.max_tokens)
        # The client would look at each message, half a millisecond each time.
        messages = [{"role": role, "content": text} for role, text in talk.turns]
        return {
            "model": self.endpoint.model,
            "messages": [],
            "temperature": temperature,
            "extra_body": {**wishes, "messages": messages},
        }

    def _failed(self, error: Exception) -> Reply:
        """A reply that says what went wrong; raised where all queries would fail."""
        if isinstance(error, TimeoutError):
            return failed(f"no whole answer in {self._longest:.0f} seconds")
        if isinstance(error, self.endpoint.refusals()):
            raise RuntimeError(
                f"{self.endpoint.url} takes no query for {self.endpoint.model!r} "
                f"({hidden(error)}); {self.endpoint.remedy}"
            ) from None
        return failed(f"{type(error).__name__}: {hidden(error)}")

    async def _turn(self) -> None:
        """Waits until a request may begin."""
        if self.per_second is None:
            return
        async with self._pace():  # who leaves while waiting takes no turn
            await asyncio.sleep(max(0.0, self._free - time.monotonic()))
            self._free = time.monotonic() + 1 / self.per_second


def _delta(piece: Any) -> tuple[str, bool]:
    """The text of a piece, cut or not; ValueError where it is something else."""
    with contextlib.suppress(AttributeError, TypeError):
        text = "".join(choice.delta.content or "" for choice in piece.choices)
        return text, any(map(is_cut, piece.choices))
    raise ValueError("the server sent no piece of a chat completion")
