"""The watchdog inside AgentScope: looks at what a user asks an agent."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any

from jaxhal.io.extras import brought_by
from jaxhal.watchdog.agents import CallableAgent
from jaxhal.watchdog.conversation import Conversation
from jaxhal.watchdog.guarding import BLOCKED, Watchdog, verdict

with brought_by("agentscope"):
    from agentscope import event as events
    from agentscope.message import AssistantMsg, Msg, UserMsg
    from agentscope.middleware import MiddlewareBase

if TYPE_CHECKING:
    from agentscope.agent import Agent


def scoped(make: Callable[[float], "Agent"], name: str = "agent") -> CallableAgent:
    """An AgentScope agent as a watchdog asks it.

    ``make`` makes one for answers at a temperature, anew for every query, so that none
    remembers another, and without :func:`middleware`, which would ask without end.
    """

    async def asked(query: str, temperature: float) -> Any:
        message = await make(temperature).reply(UserMsg("user", query))
        if message.error is not None:
            raise RuntimeError(message.error.message)
        return message.get_text_content()

    return CallableAgent(asked, name)


def middleware(watchdog: Watchdog, *, block: bool = False) -> MiddlewareBase:
    """A middleware that has a watchdog check every query of an AgentScope agent.

    What it says is ``metadata["watchdog"]`` of the reply and of the event that ends it.
    With ``block`` flagged queries are answered for the agent, which does not see them.
    """

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
                    said = _held_back(agent)
                else:
                    said = next_handler(**input_kwargs)
                async for event in said:
                    if isinstance(event, events.ReplyEndEvent | Msg):
                        event.metadata["watchdog"] = verdict(await looking, block)
                    yield event
            finally:
                looking.cancel()

    return Guarding()


def _query(inputs: Any) -> str | None:
    """The texts of the user as turns; ``None`` where nothing new is asked."""
    messages = inputs if isinstance(inputs, list) else [inputs]
    texts = [
        one.get_text_content()
        for one in messages
        if isinstance(one, Msg) and one.role == "user"
    ]
    turns = [("user", text) for text in texts if text and text.strip()]
    return Conversation(turns) if turns else None


async def _held_back(agent: Any) -> AsyncGenerator[Any, None]:
    """The events of a reply that the agent was not asked for."""
    said = AssistantMsg(agent.name, BLOCKED)
    reply: Any = {"session_id": agent.state.session_id, "reply_id": said.id}
    block: Any = {"reply_id": said.id, "block_id": said.content[0].id}
    yield events.ReplyStartEvent(**reply, name=agent.name)
    yield events.TextBlockStartEvent(**block)
    yield events.TextBlockDeltaEvent(**block, delta=BLOCKED)
    yield events.TextBlockEndEvent(**block)
    yield events.ReplyEndEvent(**reply)
    yield said
