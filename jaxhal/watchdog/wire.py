"""What a client of the proxy asks for, in the form of OpenAI's chat completions."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxhal.watchdog.conversation import Conversation

# Characters of a query; looking at one takes as long as reading it.
_QUERY = 20_000
# Of an answer in text nothing is left that these could be about.
_NOT_TEXT = ("tools", "functions", "logprobs", "audio")
# What the proxy itself sees to.
_TAKEN = ("model", "messages", "stream", "n", "temperature", *_NOT_TEXT)
# About the pieces of a stream, which are the proxy's own.
_UNHEARD = ("stream_options",)
_LENGTHS = ("max_tokens", "max_completion_tokens")


class Fault(Exception):
    """What is wrong with a request.

    Attributes:
      status: of the response.
      kind: of the error, in OpenAI's words.
    """

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error"):
        super().__init__(message)
        self.status, self.kind = status, kind


class Asked(NamedTuple):
    """What a request wants.

    Attributes:
      query: the last turn of the user.
      prompt: what the agent is asked: all turns, and what else is wished.
      stream: whether the answer is wanted piece by piece.
      temperature: at which it is wanted; ``None`` leaves it to the watchdog.
      ignored: names of wishes that no agent is told.
    """

    query: str
    prompt: Conversation
    stream: bool
    temperature: float | None
    ignored: tuple[str, ...] = ()


def asked(body: Any) -> Asked:
    """What the body of a chat completion wants.

    Raises:
      Fault: where it is none, or wants what cannot be guarded.
    """
    if not isinstance(body, Mapping):
        raise Fault(400, "the body is not a JSON object")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Fault(400, "'messages' must be a list of at least one message")
    turns = [_turn(number, message) for number, message in enumerate(messages)]
    role, query = turns[-1]
    if role != "user":
        raise Fault(400, f"the last message is of {role!r}; it must be the user's")
    if not query.strip():
        raise Fault(400, "the last message is empty")
    if len(query) > _QUERY:
        raise Fault(400, f"the last message has {len(query)} characters, over {_QUERY}")
    stream, n = body.get("stream") or False, body.get("n")
    if not isinstance(stream, bool):
        raise Fault(400, "'stream' must be true or false")
    if n not in (None, 1) or isinstance(n, bool):
        raise Fault(400, "'n' must be 1: one answer is guarded at a time")
    temperature = _number(body, "temperature", 0, 2)
    for name in _NOT_TEXT:
        if body.get(name):
            raise Fault(400, f"{name!r} is not passed on: answers in text are guarded")
    wishes = {
        name: value
        for name, value in body.items()
        if name not in (*_TAKEN, *_UNHEARD) and value is not None
    }
    for name in _LENGTHS:
        if type(wishes.get(name, 1)) is not int or wishes.get(name, 1) < 1:
            raise Fault(400, f"{name!r} must be a whole number of at least 1")
    ignored = tuple(name for name in _UNHEARD if body.get(name) is not None)
    return Asked(query, Conversation(turns, wishes), stream, temperature, ignored)


def _number(body: Mapping[str, Any], name: str, least: int, most: int) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not least <= value <= most:
        raise Fault(400, f"{name!r} must be a number from {least} to {most}")
    return float(value)


def _turn(number: int, message: Any) -> tuple[str, str]:
    where = f"messages[{number}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise Fault(400, f"{where} must be an object with a 'role'")
    role, content = message["role"], message.get("content")
    if role in ("tool", "function") or message.get("tool_calls"):
        raise Fault(400, f"{where} is about tools, which are not passed on")
    if isinstance(content, list):
        parts = [
            part.get("text")
            for part in content
            if isinstance(part, Mapping) and part.get("type") == "text"
        ]
        if len(parts) < len(content) or not all(isinstance(p, str) for p in parts):
            raise Fault(400, f"{where} holds something other than text")
        content = "\n".join(map(str, parts))
    if content is None and role == "assistant":
        content = ""
    if not isinstance(content, str):
        raise Fault(400, f"{where} has no text in 'content'")
    if any("\ud800" <= letter <= "\udfff" for letter in content + role):
        raise Fault(400, f"{where} holds half of a surrogate pair; it is no valid text")
    return role, content
