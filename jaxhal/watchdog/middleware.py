"""The watchdog inside AgentScope: looks at what a user asks an agent."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any

from jaxhal.watchdog.agents import CallableAgent
from jaxhal.watchdog.conversation import Conversation
from jaxhal.watchdog.guarding import BLOCKED, Watchdog, verdict

if TYPE_CHECKING:
    from agentscope.agent import Agent
    from agentscope.middleware import MiddlewareBase


def scoped(make: Callable[[float], "Agent"], name: str = "agent") -> CallableAgent:
    """An AgentScope agent as a watchdog asks it.

    ``make`` makes one for answers at a temperature, anew for every query, so that none
    remembers another, and without :func:`middleware`, which would ask without end.
    """
    _library()
    from agentscope.message import UserMsg

    async def asked(query: str, temperature: float) -> Any:
        message = await make(temperature).reply(UserMsg("user", query))
        if message.error is not None:
            raise RuntimeError(message.error.message)
        return message.get_text_content()

    return CallableAgent(asked, name)


def middleware(
    watchdog: Watchdog, *, block: bool = False, blocked: str = BLOCKED
) -> "MiddlewareBase":
    """A middleware that has a watchdog check every query of an AgentScope agent.

    What it says is ``metadata["watchdog"]`` of the reply and of the event that ends it.
    With ``block`` flagged queries are answered with ``blocked``; the agent sees
    neither.
    """
    _library()
    from agentscope.event import ReplyEndEvent
    from agentscope.message import Msg
    from agentscope.middleware import MiddlewareBase

    class Guarding(MiddlewareBase):
        async def on_reply(
            self, agent: Any, input_kwargs: dict, next_handler: Callable[..., Any]
        ) -> AsyncGenerator[Any, None]:
            query = _query(input_kwargs.get("inputs"))
            if query is None:
                async for event in next_handler(**input_kwargs):
                    yield event
                return
            looking = asyncio.create_task(watchdog.check(query))
            try:
                if block and (await looking).flagged:
                    events = _held_back(agent, blocked)
                else:
                    events = next_handler(**input_kwargs)
                async for event in events:
                    if isinstance(event, ReplyEndEvent | Msg):
                        check = await looking
                        held = block and check.flagged
                        mode = "block" if block else "flag"
                        event.metadata["watchdog"] = verdict(check, mode, held)
                    yield event
            finally:
                looking.cancel()

    return Guarding()


def _library() -> None:
    try:
        import agentscope  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "AgentScope is not installed; pip install 'jaxhal[agentscope]'"
        ) from error


def _query(inputs: Any) -> str | None:
    """The texts of the user as turns; ``None`` where nothing new is asked."""
    from agentscope.message import Msg

    messages = inputs if isinstance(inputs, list) else [inputs]
    texts = [
        one.get_text_content()
        for one in messages
        if isinstance(one, Msg) and one.role == "user"
    ]
    turns = [("user", text) for text in texts if text and text.strip()]
    return Conversation(turns) if turns else None


async def _held_back(agent: Any, text: str) -> AsyncGenerator[Any, None]:
    """The events of a reply that the agent was not asked for."""
    from agentscope import event, message

    said = message.AssistantMsg(agent.name, text)
    session, reply = agent.state.session_id, said.id
    block = said.content[0].id
    yield event.ReplyStartEvent(session_id=session, reply_id=reply, name=agent.name)
    yield event.TextBlockStartEvent(reply_id=reply, block_id=block)
    yield event.TextBlockDeltaEvent(reply_id=reply, block_id=block, delta=text)
    yield event.TextBlockEndEvent(reply_id=reply, block_id=block)
    yield event.ReplyEndEvent(session_id=session, reply_id=reply)
    yield said
