"""What a client of the proxy asks for, in the form of OpenAI's chat completions."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxhal.watchdog.conversation import LENGTHS, Conversation

# Of names that are not known, so many are told, each up to so many characters.
_NAMES, _NAME = 20, 40
# Characters of a query; looking at one takes as long as reading it.
_QUERY = 20_000
# Messages of a request.
_MESSAGES = 1000
# Who may say something; any other word would be text that nobody looks at.
_ROLES = ("system", "developer", "user", "assistant")
# Of an answer in text nothing is left that these could be about.
_NOT_TEXT = ("tools", "functions", "logprobs", "audio")
# What the proxy itself sees to.
_TAKEN = ("model", "messages", "stream", "n", "temperature", *_NOT_TEXT)
# Wishes that are passed on: they change how one answer is written, and not to what.
_HEARD = (
    *LENGTHS,
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"),
    *("top_p", "top_k", "min_p", "seed", "stop", "response_format"),
    *("reasoning_effort", "verbosity", "user"),
)


class Fault(Exception):
    """What is wrong with a request: the response's status, and the error's kind."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error"):
        super().__init__(message)
        self.status, self.kind = status, kind


class Wanted(NamedTuple):
    """What a request wants; ``ignored`` are names of wishes that no agent is told."""

    prompt: Conversation
    stream: bool
    temperature: float | None
    ignored: tuple[str, ...] = ()


def asked(body: Any) -> Wanted:
    """What the body of a chat completion wants; Fault where that cannot be guarded."""
    if not isinstance(body, Mapping):
        raise Fault(400, "the body is not a JSON object")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Fault(400, "'messages' must be a list of at least one message")
    if len(messages) > _MESSAGES:
        raise Fault(400, f"'messages' holds {len(messages)}, over {_MESSAGES}")
    turns = [_turn(number, message) for number, message in enumerate(messages)]
    role, query = turns[-1]
    if role != "user":
        raise Fault(400, f"the last message is of {role!r}; it must be the user's")
    if not query.strip():
        raise Fault(400, "the last message is empty")
    check_text("the last message", query)
    stream, n = body.get("stream") or False, body.get("n")
    if not isinstance(stream, bool):
        raise Fault(400, "'stream' must be true or false")
    if n not in (None, 1) or isinstance(n, bool):
        raise Fault(400, "'n' must be 1: one answer is guarded at a time")
    temperature = body.get("temperature")
    if temperature is not None and (
        type(temperature) not in (int, float) or not 0 <= temperature <= 2
    ):
        raise Fault(400, "'temperature' must be a number from 0 to 2")
    for name in _NOT_TEXT:
        if body.get(name):
            raise Fault(400, f"{name!r} is not passed on: answers in text are guarded")
    given = {name: value for name, value in body.items() if value is not None}
    wishes = {name: value for name, value in given.items() if name in _HEARD}
    for name in LENGTHS:
        if type(wishes.get(name, 1)) is not int or wishes.get(name, 1) < 1:
            raise Fault(400, f"{name!r} must be a whole number of at least 1")
    try:  # what no JSON can hold, such as half of a surrogate pair
        json.dumps(wishes, allow_nan=False, ensure_ascii=False).encode()
    except (RecursionError, ValueError) as error:
        why = f"a setting cannot be passed on: {type(error).__name__}"
        raise Fault(400, why) from error
    others = [name for name in given if name not in _TAKEN and name not in _HEARD]
    # Of a message only who says what is passed on.
    more = {key for one in messages for key, value in one.items() if value is not None}
    others += [f"messages.{key}" for key in sorted(more - {"role", "content"})]
    for name in others:
        _check_letters("the name of a setting", name)
    ignored = tuple(name[:_NAME] for name in others[:_NAMES])
    return Wanted(Conversation(turns, wishes), stream, temperature, ignored)


def check_text(name: str, text: str, most: int = _QUERY) -> None:
    """Makes sure that a text can be looked at."""
    if len(text) > most:
        raise Fault(400, f"{name} has {len(text)} characters, over {most}")
    _check_letters(name, text)


def _check_letters(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        why = f"{name} holds half of a surrogate pair; it is no valid text"
        raise Fault(400, why) from error


def _turn(number: int, message: Any) -> tuple[str, str]:
    where = f"messages[{number}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise Fault(400, f"{where} must be an object with a 'role'")
    role, content = message["role"], message.get("content")
    if role in ("tool", "function") or message.get("tool_calls"):
        raise Fault(400, f"{where} is about tools, which are not passed on")
    if role not in _ROLES:
        raise Fault(400, f"{where} is of {role[:_NAME]!r}, none of {', '.join(_ROLES)}")
    if isinstance(content, list):
        parts = []
        for part in content:
            match part:
                case {"type": "text", "text": str(text)}:
                    parts.append(text)
                case _:
                    raise Fault(400, f"{where} holds something other than text")
        content = "\n".join(parts)
    if content is None and role == "assistant":
        content = ""
    if not isinstance(content, str):
        raise Fault(400, f"{where} has no text in 'content'")
    _check_letters(where, content)
    return role, content
