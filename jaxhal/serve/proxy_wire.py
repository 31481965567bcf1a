"""What a client of the proxy asks for, in the form of OpenAI's chat completions."""

import json
from typing import Any, NamedTuple

from jaxhal.serve.limits import Fault
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


def must(holds: bool, why: str) -> None:
    if not holds:
        raise Fault(400, why)


def bounded(name: str, text: str, most: int = _QUERY) -> None:
    """Makes sure that a text is short enough to be looked at."""
    must(len(text) <= most, f"{name} has {len(text)} characters, over {most}")


class Wanted(NamedTuple):
    """What a request wants; ``ignored`` are names of wishes that no agent is told."""

    prompt: Conversation
    stream: bool
    temperature: float | None
    ignored: tuple[str, ...] = ()


def asked(body: Any) -> Wanted:
    """What the body of a chat completion wants; Fault where that cannot be guarded.

    Its texts are valid ones, as of :func:`jiter.from_json`.
    """
    must(isinstance(body, dict), "the body is not a JSON object")
    messages, stream = body.get("messages"), body.get("stream") or False
    must(
        isinstance(messages, list) and bool(messages),
        "'messages' must be a list of at least one message",
    )
    count = len(messages)
    must(count <= _MESSAGES, f"'messages' holds {count}, over {_MESSAGES}")
    turns = [_turn(number, message) for number, message in enumerate(messages)]
    role, query = turns[-1]
    must(role == "user", f"the last message is of {role!r}; it must be the user's")
    must(bool(query.strip()), "the last message is empty")
    bounded("the last message", query)
    given = {name: value for name, value in body.items() if value is not None}
    n, temperature = given.get("n", 1), given.get("temperature", 0)
    must(isinstance(stream, bool), "'stream' must be true or false")
    must(n == 1 and n is not True, "'n' must be 1: one answer is guarded at a time")
    must(
        type(temperature) in (int, float) and 0 <= temperature <= 2,
        "'temperature' must be a number from 0 to 2",
    )
    for name in _NOT_TEXT:
        why = f"{name!r} is not passed on: answers in text are guarded"
        must(not given.get(name), why)
    wishes = {name: value for name, value in given.items() if name in _HEARD}
    for name in LENGTHS:
        whole = type(wishes.get(name, 1)) is int and wishes.get(name, 1) >= 1
        must(whole, f"{name!r} must be a whole number of at least 1")
    try:
        json.dumps(wishes, allow_nan=False)  # nor endless numbers, or endless digits
    except ValueError as error:
        raise Fault(400, f"a setting cannot be passed on: {error}") from error
    others = [name for name in given if name not in _TAKEN and name not in _HEARD]
    # Of a message only who says what is passed on.
    more = {key for one in messages for key, value in one.items() if value is not None}
    others += [f"messages.{key}" for key in sorted(more - {"role", "content"})]
    ignored = tuple(name[:_NAME] for name in others[:_NAMES])
    return Wanted(
        Conversation(turns, wishes), stream, given.get("temperature"), ignored
    )


def _turn(number: int, message: Any) -> tuple[str, str]:
    where = f"messages[{number}]"
    plain = isinstance(message, dict) and isinstance(message.get("role"), str)
    must(plain, f"{where} must be an object with a 'role'")
    role, content = message["role"], message.get("content")
    tool = role in ("tool", "function") or message.get("tool_calls")
    must(not tool, f"{where} is about tools, which are not passed on")
    known = f"{where} is of {role[:_NAME]!r}, none of {', '.join(_ROLES)}"
    must(role in _ROLES, known)
    match content:
        case None if role == "assistant":
            return role, ""
        case str():
            return role, content
        case list() if all(map(_is_text, content)):
            return role, "\n".join(part["text"] for part in content)
    raise Fault(400, f"{where} holds something other than text in 'content'")


def _is_text(part: Any) -> bool:
    typed = isinstance(part, dict) and part.get("type") == "text"
    return typed and isinstance(part.get("text"), str)
