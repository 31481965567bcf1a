"""Rows of a JSON Lines file to examples and back, one bad row never costing another."""

import functools
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxhal.datasets.fields import (
    NAMES,
    items,
    kind,
    left_out,
    misspelt,
    name_field,
    named,
    near,
    short,
    text_field,
)
from jaxhal.datasets.logprobs import logprobs_of
from jaxhal.io.files import replacing
from jaxhal.types import ROLES, Call, Example, Label, Turn


class Row(NamedTuple):
    """One row of input: either an example, or number and problem in words."""

    line: int  # from 1
    id: str  # its own as text; "line N" or "row N" where none can be read
    example: Example | None
    error: str | None


def read_rows(source: str | os.PathLike | Iterable[bytes]) -> Iterator[Row]:
    """The rows of a JSON Lines file, in order; blank lines are passed over.

    A row is an object with ``response``, ``prompt`` or else ``context`` (text or a list
    of texts) with ``question``, which may go by the other names of
    :mod:`jaxhal.datasets.tables`; or with ``messages``, ``[{"role", "content"}]``, the
    last of which is the answer, in the form of OpenAI's chats, with ``tool_calls``,
    ``tool_call_id`` and ``name`` where there are tools, and beside them ``tools``,
    their definitions.  Optional are ``id`` and
    ``source`` (text or a whole number), ``split``, ``samples`` (a list of texts), and
    ``labels`` (``[{"start", "end", "label"}]``, characters of the response, end
    exclusive) or ``label`` (0 or 1), and ``templated`` (true where the prompt went
    through a chat template already); of the engine that wrote the answer, ``states``
    (the name of a file) and ``logprobs`` (as :func:`logprobs_of` takes them).  ``null``
    and NaN mean left out; other keys are ignored, and ids may repeat.  A bad row comes
    back with its error and never raises.

    Args:
      source: a path, ``"-"`` for standard input, or the lines themselves.

    >>> lines = [b'{"id": "a", "prompt": "Hi", "response": "Hello"}', b'{"id": "b"}']
    >>> for row in read_rows(lines):
    ...     print(row.line, row.id, row.error)
    1 a None
    2 b line 2: 'response' is missing; every row needs one
    """
    lines = numbered_lines(source)
    return (to_row(line, "line", functools.partial(parse, raw)) for line, raw in lines)


def write_rows(path: str | os.PathLike, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes one JSON object a line, to a file all at once, to ``"-"`` as they come.

    The file appears when every row is in it.  Raises ValueError on a number that is not
    finite, which JSON cannot hold.
    """
    lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows)
    if path == "-":
        for line in lines:
            # Bytes, because the console's own encoding need not be UTF-8.
            sys.stdout.flush()
            sys.stdout.buffer.write(f"{line}\n".encode())
            sys.stdout.buffer.flush()
        return
    with replacing(path) as file:
        file.writelines(f"{line}\n" for line in lines)


def numbered_lines(
    source: str | os.PathLike | Iterable[bytes],
) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers from 1."""
    if not isinstance(source, (str, os.PathLike)):
        return _full(source)
    if source == "-":
        return _full(sys.stdin.buffer)
    return _file_lines(existing(source, ".jsonl"))


def existing(source: str | os.PathLike, ending: str) -> Path:
    """The path of a file; FileNotFoundError or IsADirectoryError where it is none."""
    path = Path(source)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give a {ending} file")
    return path


# How files begin that hold no lines; a line of text may begin with the letters alone.
_OTHERS = {
    b"PAR1\x15": "Parquet",
    b"\x1f\x8b": "compressed",
    b"PK\x03\x04": "compressed",
}


def _file_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        start = file.peek(5)
        for known, kind in _OTHERS.items():
            if start.startswith(known):
                raise ValueError(f"{path} is {kind}; give its rows as JSON Lines")
        yield from _full(file)


def _full(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    for number, raw in enumerate(lines, 1):
        if isinstance(raw, str):
            raise ValueError("the lines are text; give bytes, as of open(path, 'rb')")
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        if raw.strip():
            yield number, raw


def parse(raw: bytes) -> dict[str, Any]:
    """The JSON object on one line; ValueError says why there is none."""
    try:
        row = json.loads(raw.rstrip().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not UTF-8: byte 0x{raw[error.start]:02x} at column {error.start + 1} "
            f"({error.reason}); save the file as UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        problem = error.msg.removesuffix(" at")
        raise ValueError(
            f"not JSON at column {error.colno}: {problem}; write an object on each line"
        ) from None
    except (ValueError, RecursionError) as error:  # endless digits, endless brackets
        raise ValueError(f"not usable JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(
            f"expected a JSON object, got {kind(row)}; write an object on each line"
        )
    return row


def to_row(number: int, unit: str, read: Callable[[], Mapping[str, Any]]) -> Row:
    """The row whose fields ``read`` gives; a ValueError of it is the row's error."""
    name = f"{unit} {number}"
    try:
        fields = {k: value for k, value in read().items() if not left_out(value)}
        name = name_field(fields, "id") or name
        return Row(number, name, _example(fields, name), None)
    except ValueError as error:
        return Row(number, name, None, f"{unit} {number}: {error}")


def _example(fields: Mapping[str, Any], name: str) -> Example:
    said = _said(fields)
    key, label = named(fields, "label") or ("label", None)
    label = verdict(label)
    if label is not None and (type(label) is not int or label not in (0, 1)):
        raise ValueError(f"{key!r} is {short(label)}; use 0, 1 or leave it out")
    templated = fields.get("templated")
    if templated is not None and type(templated) is not bool:
        raise ValueError(
            f"'templated' is {short(templated)}; use true for a finished prompt, "
            "false, or leave it out"
        )
    spans = items({"labels": _listed(fields.get("labels"))}, "labels", "spans")
    samples = items(fields, "samples", "texts") or []
    said_of = fields.get("logprobs")
    return Example(
        **said,
        id=name,
        templated=bool(templated),
        labels=None if spans is None else tuple(map(_label, range(len(spans)), spans)),
        label=label,
        source=name_field(fields, "source"),
        samples=tuple(
            text_field(f"samples[{n}]", one) for n, one in enumerate(samples)
        ),
        states=name_field(fields, "states"),
        logprobs=None if said_of is None else logprobs_of(said_of),
    )


_VERDICTS = {1: 1, 0: 0, "yes": 1, "no": 0}  # True and 1.0 are equal to 1


def verdict(label: Any) -> Any:
    """A label as 0 or 1 where it says so, ``None`` where it is left out."""
    if left_out(label):
        return None
    if isinstance(label, np.generic):
        label = label.item()
    known = isinstance(label, (int, float, str))
    return _VERDICTS.get(label, label) if known else label


# Texts by the names that a row may give them; messages stand for them.
_SAID = {
    field: NAMES.get(field, (field,))
    for field in ("response", "prompt", "context", "question")
}


def _said(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The texts of a row, and the turns of a conversation, as an example has them."""
    found: dict[str, Any] = {}
    for field in (*_SAID, "split"):
        if (given := named(fields, field)) is not None:
            read = _joined if field == "context" else text_field
            found[field] = read(*given)
    if (messages := items(fields, "messages", "{role, content}")) is not None:
        for name in itertools.chain(*_SAID.values()):
            if name in fields:
                raise ValueError(
                    f"'messages' and {name!r} are both given; the last message is the "
                    f"answer and the others are the prompt, so leave {name!r} out"
                )
        found |= _conversation(messages)
    given = {"tools": _parsed("tools", fields.get("tools"))}
    if tools := items(given, "tools", "definitions"):
        found["tools"] = tuple(
            _as_json(f"tools[{n}]", _parsed(f"tools[{n}]", tool))
            for n, tool in enumerate(tools)
        )
    _check_spelt(fields, found)
    if "response" not in found:
        raise ValueError("'response' is missing; every row needs one")
    return found


def _check_spelt(fields: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """ValueError on a key that is nearly that of a text which the row does without."""
    pair, needless = {"context", "question"}, {*found}
    if found.keys() & {"prompt", "turns"}:
        needless |= {"prompt", *pair}
    elif found.keys() & pair:
        needless.add("prompt")
    names = [one for field in _SAID if field not in needless for one in _SAID[field]]
    known = {*itertools.chain(*_SAID.values())}
    for key in (key for key in fields if key not in known):
        if (meant := near(key, names)) is not None:
            raise misspelt(key, meant)


def _joined(key: str, value: Any) -> str:
    """A text, or several with a blank line between them."""
    if not isinstance(value, list):
        return text_field(key, value)
    return "\n\n".join(text_field(f"{key}[{n}]", one) for n, one in enumerate(value))


def _conversation(messages: list[Any]) -> dict[str, Any]:
    """The answer, which is the last message, and the turns before it."""
    turns = [to_turn(f"messages[{n}]", one) for n, one in enumerate(messages)]
    if not turns or turns[-1].role != "assistant":
        last = f"the last is by {short(turns[-1].role)}" if turns else "there are none"
        raise ValueError(
            f"'messages' has to end with the answer, of 'assistant', and {last}"
        )
    if len(turns) == 1:
        raise ValueError("'messages' holds nothing but the answer; give what was asked")
    if turns[-1].calls:
        raise ValueError(
            f"'messages[{len(turns) - 1}].tool_calls' is in the answer, of which the "
            "text is judged; leave it out, or end with a message that calls no tool"
        )
    return {"response": turns[-1].content, "turns": tuple(turns[:-1])}


def to_turn(where: str, message: Any) -> Turn:
    """The turn that a message in the manner of OpenAI's chats is.

    A developer's is the system's; ValueError names what is wrong in ``where``.
    """
    if not isinstance(message, dict):
        raise ValueError(f"{where!r} is {kind(message)}; use {{role, content}}")
    role, content = message.get("role"), message.get("content")
    role = "system" if role == "developer" else role
    if role not in ROLES:
        raise ValueError(f"'{where}.role' is {short(role)}; use {', '.join(ROLES)}")
    calls = items(message, "tool_calls", "calls", f"{where}.") or []
    if isinstance(content, list):
        content = "\n".join(
            _part(f"{where}.content[{n}]", one) for n, one in enumerate(content)
        )
    turn = Turn(
        role,
        "" if content is None and calls else text_field(f"{where}.content", content),
        tuple(_call(f"{where}.tool_calls[{n}]", one) for n, one in enumerate(calls)),
    )
    if role != "tool":  # the names of others are shown to no model
        return turn
    given = {"call_id": "tool_call_id", "name": "name"}
    return turn._replace(
        **{
            field: text_field(f"{where}.{key}", message[key])
            for field, key in given.items()
            if message.get(key) is not None
        }
    )


def _call(where: str, call: Any) -> Call:
    """A call of a tool; its arguments are JSON in text, or the object itself."""
    about = call.get("function") if isinstance(call, dict) else None
    if not isinstance(about, dict):
        shape = '{"id", "type": "function", "function": {"name", "arguments"}}'
        raise ValueError(f"{where!r} is no call of a function; use {shape}")
    name = text_field(f"{where}.function.name", about.get("name"))
    arguments, place = about.get("arguments"), f"{where}.function.arguments"
    if isinstance(arguments, dict):
        arguments = _as_json(place, arguments)
    number = call.get("id")
    return Call(
        name,
        text_field(place, arguments),
        "" if number is None else text_field(f"{where}.id", number),
    )


def _parsed(where: str, value: Any) -> Any:
    """What JSON in a text stands for, as columns of tables may have it."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{where!r} is text and no JSON: {error}") from None


def _as_json(where: str, value: Any) -> str:
    if not isinstance(value, dict):
        raise ValueError(f"{where!r} is {kind(value)}; use an object")
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (RecursionError, TypeError) as error:  # endless brackets, what is no JSON
        raise ValueError(f"{where!r} cannot be written as JSON: {error}") from None
    return text_field(where, text)


def _part(where: str, part: Any) -> str:
    """A part of a message in the manner of OpenAI's chats: text, and nothing else."""
    if not isinstance(part, dict) or part.get("type") != "text":
        shape = '{"type": "text", "text": ...}'
        raise ValueError(f"{where!r} is no text; use text, or {shape}")
    return text_field(f"{where}.text", part.get("text"))


def _listed(labels: Any) -> Any:
    """Spans as a list of structs; Hugging Face may have them as a struct of lists."""
    if not isinstance(labels, Mapping):
        return labels
    try:
        spans = list(zip(*labels.values(), strict=True))
    except (TypeError, ValueError):
        raise ValueError("'labels' is a dict; use lists of one length in it") from None
    if not labels:
        raise ValueError("'labels' is an empty dict; use a list of spans")
    return [dict(zip(labels, span, strict=True)) for span in spans]


def _label(index: int, span: Any) -> Label:
    where = f"labels[{index}]"
    if not isinstance(span, dict):
        raise ValueError(f"{where!r} is {kind(span)}; use {{start, end, label}}")
    for key in ("start", "end"):
        if type(span.get(key)) is not int:
            value = short(span.get(key))
            raise ValueError(f"'{where}.{key}' is {value}; use a whole number")
    if (name := span.get("label")) is None:
        return Label(span["start"], span["end"])
    return Label(span["start"], span["end"], text_field(f"{where}.label", name))
