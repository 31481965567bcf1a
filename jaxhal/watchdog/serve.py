"""A proxy in front of an agent that speaks as OpenAI's chat completions do.

What the watchdog says is in the response and its headers.  A stream begins when the
query is judged; pieces of an endpoint's answer are passed on as they come.
"""

import collections
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from jaxhal.io.checks import one_of
from jaxhal.serve.limits import Limits, options
from jaxhal.watchdog.agents import Agent, Pieces, Reply
from jaxhal.watchdog.agents.base import ahead, failed, streamed, together
from jaxhal.watchdog.conversation import Conversation
from jaxhal.watchdog.guarding import BLOCKED, Guarded, Watchdog
from jaxhal.watchdog.wire import Fault, Wanted

if TYPE_CHECKING:
    from starlette.applications import Starlette

# Of the last answers that feedback may name.
_KEPT = 10_000
# And of how many characters, conversations included.
_CHARACTERS = 100_000_000


class Given(NamedTuple):
    """An answer that feedback may name, and the points that its verdict named."""

    query: str
    reply: Reply
    named: list[str]

    @property
    def characters(self) -> int:
        return len(self.query) + len(self.reply.text) + len(self.reply.context)


class Remembered:
    """Answers by name, and how often each text was ``said``; one of them always was."""

    def __init__(self, always: str):
        self.said = collections.Counter([always.strip()])
        self._given: collections.OrderedDict[str, Given] = collections.OrderedDict()
        self._characters = 0

    def __getitem__(self, name: str) -> Given:
        return self._given[name]

    def add(self, name: str, query: str, reply: Reply, named: Sequence[str]) -> None:
        """Keeps an answer, and forgets the oldest ones where there are too many."""
        if isinstance(query, Conversation):
            query = Conversation(query.turns)  # its wishes were the answer's
        self._given[name] = given = Given(query, reply, [*named])
        self._characters += given.characters
        self.said[reply.text.strip()] += 1
        while len(self._given) > _KEPT or self._characters > _CHARACTERS:
            _, old = self._given.popitem(last=False)
            self._characters -= old.characters
            said = old.reply.text.strip()
            self.said[said] -= 1
            if not self.said[said]:
                del self.said[said]


class Service:
    """The proxy.

    Of a conversation every turn is looked at, since the client writes them all, but
    answers that the proxy itself gave.

    Args:
      mode: ``"flag"`` adds the verdict; ``"block"`` holds answers to flagged queries
        back, which the agent is then not asked for.
      token: that a client has to show; ``None`` asks for none, and then answers only by
        its own name, as :class:`jaxhal.serve.limits.Limited` has it.
      teacher: that whoever gives feedback has to show instead; by default the same.
      blocked: what is said in place of an answer that is held back.
    """

    def __init__(
        self,
        watchdog: Watchdog,
        *,
        mode: str = "flag",
        token: str | None = None,
        teacher: str | None = None,
        limits: Limits = Limits(),  # noqa: B008  (an immutable default)
        blocked: str = BLOCKED,
    ):
        try:
            from jaxhal.watchdog.routes import application
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"the proxy needs {error.name}; pip install 'jaxhal[watchdog]'"
            ) from error
        one_of(("flag", "block"), mode=mode)
        for name, one in (("token", token), ("teacher", teacher)):
            if one is not None and not one.strip():
                raise ValueError(f"{name} is empty; give one, or leave it out")
        self.watchdog, self.mode, self.token = watchdog, mode, token
        self.teacher = token if teacher is None else teacher
        self.limits, self.blocked = limits, blocked
        self.remembered = Remembered(blocked)
        self._application = application

    def app(self, host: str = "127.0.0.1") -> "Starlette":
        """The proxy as an ASGI application, for the address that it is served at."""
        return self._application(self, host)

    def run(self, host: str = "127.0.0.1", port: int = 8080) -> None:
        """Serves until it is told to stop; open requests are then answered first."""
        import uvicorn

        uvicorn.run(
            self.app(host),
            host=host,
            port=port,
            log_level="warning",
            timeout_graceful_shutdown=30,
            **options(self.limits),
        )

    async def guarded(self, want: Wanted) -> tuple[Guarded, Pieces]:
        """The answer so far, what is said of it, and what comes still."""
        temperature = want.temperature
        if temperature is None:
            temperature = self.watchdog.answer_temperature
        begin = streamed if want.stream else _whole
        # A client that reads slowly keeps no agent from answering others.
        pieces = ahead(begin(self.watchdog.agent, want.prompt, temperature))

        async def first() -> Reply:
            return await anext(pieces, failed("the answer is empty"))

        look = self.watchdog.check(want.prompt, self.remembered.said)
        try:
            if self.mode == "flag":
                check, reply = await together(look, first())
                return Guarded(reply, check, False), pieces
            check = await look
            if check.flagged:
                return Guarded(Reply(self.blocked), check, True), pieces
            return Guarded(await first(), check, False), pieces
        except RuntimeError as error:
            raise Fault(503, str(error), "unavailable_error") from error

    def remember(self, name: str, want: Wanted, found: Guarded, text: str) -> None:
        """Keeps an answer for feedback on it, or that a query was blocked."""
        reply = Reply("" if found.blocked else text, found.reply.context)
        named = self.watchdog.close(found.check.hits)
        self.remembered.add(name, want.prompt, reply, named)

    def ignored(self, want: Wanted) -> list[str]:
        """Names of what was wished and has no part in the answer."""
        heard = getattr(self.watchdog.agent, "hears_wishes", False)
        return sorted([*want.ignored, *([] if heard else want.prompt.wishes)])


async def _whole(agent: Agent, query: str, temperature: float) -> Pieces:
    """An answer in one piece."""
    ((reply,),) = await agent.respond([query], 1, temperature)
    yield reply
