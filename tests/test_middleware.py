"""The watchdog inside AgentScope's own agents."""

import asyncio

import agentscope.agent
import pytest
from agentscope.credential import CredentialBase
from agentscope.event import ReplyEndEvent, TextBlockDeltaEvent, UserInterruptEvent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import TextBlock, UserMsg
from agentscope.model import ChatModelBase, ChatResponse
from test_watchdog import FAR, KNOWN, encoder, watchdog  # noqa: F401  (a fixture)

from jaxhal.watchdog import Guard
from jaxhal.watchdog.guarding import BLOCKED
from jaxhal.watchdog.middleware import middleware, scoped

NEAR = Guard(similarity=0.2)


class Model(ChatModelBase):
    """Says back what it was asked last; fails on ``w44``."""

    def __init__(self, temperature=0.1):
        super().__init__(CredentialBase(), "echo", ChatModelBase.Parameters())
        self.temperature, self.asked = temperature, []
        self.formatter = OpenAIChatFormatter()

    async def _call_api(self, model_name, messages, **kwargs):
        query = messages[-1].get_text_content()
        self.asked.append(query)
        if "w44" in query:
            raise TimeoutError("too slow")
        text = TextBlock(text=f"{query} at {self.temperature}")
        return ChatResponse(content=[text], is_last=True)


def agent(model, *middlewares):
    quiet = agentscope.agent.InjectionConfig(inject_runtime_state=False)
    return agentscope.agent.Agent(
        "agent",
        "Answer.",
        model,
        middlewares=[*middlewares],
        injection_config=quiet,
    )


async def events_of(one, inputs):
    return [event async for event in one.reply_stream(inputs, yield_final_msg=True)]


def test_a_flagged_query_is_answered_all_the_same(encoder):  # noqa: F811
    model = Model()
    one = agent(model, middleware(watchdog(encoder, NEAR)))
    *events, said = asyncio.run(events_of(one, UserMsg("user", KNOWN[4])))
    assert said.get_text_content() == f"{KNOWN[4]} at 0.1"
    found = said.metadata["watchdog"]
    assert found["flagged"] and found["near"] and not found["blocked"]
    assert found["nearest"][0]["query"] == KNOWN[4]
    (end,) = [event for event in events if isinstance(event, ReplyEndEvent)]
    assert end.metadata["watchdog"] == found


def test_a_flagged_query_is_held_back(encoder):  # noqa: F811
    model = Model()
    one = agent(model, middleware(watchdog(encoder, NEAR), block=True))
    *events, said = asyncio.run(events_of(one, UserMsg("user", KNOWN[4])))
    assert said.get_text_content() == BLOCKED and not model.asked
    assert said.metadata["watchdog"]["blocked"] and not one.state.context
    pieces = [event.delta for event in events if isinstance(event, TextBlockDeltaEvent)]
    assert "".join(pieces) == BLOCKED
    # The next one is answered, from the queries before it that were.
    sure = agent(model, middleware(watchdog(encoder), block=True))
    fine = asyncio.run(sure.reply([UserMsg("user", KNOWN[4]), UserMsg("user", "w1")]))
    assert model.asked == ["w1"] and not fine.metadata["watchdog"]["blocked"]


@pytest.mark.parametrize(
    "texts",
    [["w0 w1 w2?", "w40."], ["w40.", "w0 w1 w2?"], ["w40 w41. w0 w1 w2? w42 w43."]],
)
def test_a_query_is_held_back_wherever_it_stands(texts, encoder):  # noqa: F811
    guard = Guard(similarity=0.99, gate=False, entropy=None)
    model = Model()
    guarding = watchdog(encoder, guard, ["w0 w1 w2?"])
    one = agent(model, middleware(guarding, block=True))
    said = asyncio.run(one.reply([UserMsg("user", text) for text in texts]))
    assert said.metadata["watchdog"]["blocked"] and not model.asked


def test_what_is_no_query_passes(encoder):  # noqa: F811
    model = Model()
    one = agent(model, middleware(watchdog(encoder, NEAR), block=True))
    asyncio.run(one.observe(UserMsg("user", KNOWN[4])))
    said = asyncio.run(one.reply(None))
    assert said.get_text_content() == f"{KNOWN[4]} at 0.1"
    assert "watchdog" not in said.metadata
    assert asyncio.run(events_of(one, UserInterruptEvent(reply_id="r"))) == []


def test_a_watchdog_asks_an_agent_of_agentscope(encoder):  # noqa: F811
    made = []

    def make(temperature):
        made.append(temperature)
        return agent(Model(temperature))

    known = scoped(make, "echo")
    found = asyncio.run(known.respond(["w1", "w44"], 2, 0.7))
    ((warm, _), (failing, _)) = found
    assert (known.name, warm.text) == ("echo", "w1 at 0.7") and made == [0.7] * 4
    assert failing.error is not None and not failing.text
    dog = watchdog(encoder, say=lambda query, temperature: "")
    dog.agent = known
    check = asyncio.run(dog.check(FAR))
    assert check.entropy == 0.0 and not check.flagged


def test_a_bound_that_does_not_answer_is_no_silence(encoder):  # noqa: F811
    dog = watchdog(encoder, NEAR)

    def broken(vectors, k):
        raise RuntimeError("the store is gone")

    dog.store.search = broken
    one = agent(Model(), middleware(dog))
    with pytest.raises(RuntimeError, match="store is gone"):
        asyncio.run(one.reply(UserMsg("user", KNOWN[0])))
