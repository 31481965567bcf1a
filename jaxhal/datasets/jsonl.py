"""Rows of a JSON Lines file to examples and back, one bad row never costing another."""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxhal.files import replacing
from jaxhal.types import Example, Label


class Row(NamedTuple):
    """One line of input: either an example, or what is wrong with it.

    Attributes:
      line: its number in the file, from 1.
      id: the row's own id as text, ``"line N"`` where it has none that can be read.
      example: the answer to judge, ``None`` when the row is bad.
      error: line and problem in words, ``None`` when the row is good.
    """

    line: int
    id: str
    example: Example | None
    error: str | None


def read_rows(source: str | os.PathLike | Iterable[bytes]) -> Iterator[Row]:
    """The rows of a JSON Lines file, in order; blank lines are passed over.

    A row is an object with ``response``, either ``prompt`` or ``context`` with
    ``question``, an optional ``id`` (text or a whole number), and optional ``labels``
    (``[{"start", "end", "label"}]``, characters of the response, end exclusive) or
    ``label`` (0 or 1).  ``null`` means left out; other keys are ignored, and ids may
    repeat.  A bad row comes back with its error and never raises.

    Args:
      source: a path, ``"-"`` for standard input, or the lines themselves, such as an
        open binary file.

    Raises:
      FileNotFoundError: when the path does not exist.
      IsADirectoryError: when it is a folder.

    >>> import io
    >>> lines = b'{"id": "a", "prompt": "Hi", "response": "Hello"}\\n{"id": "b"}\\n'
    >>> for row in read_rows(io.BytesIO(lines)):
    ...     print(row.line, row.id, row.error)
    1 a None
    2 b line 2: 'response' is missing; every row needs one
    """
    if not isinstance(source, (str, os.PathLike)):
        return _rows(source)
    if source == "-":
        return _rows(sys.stdin.buffer)
    path = Path(source)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give a .jsonl file")
    return _file_rows(path)


def write_rows(path: str | os.PathLike, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes one JSON object a line, to a file all at once, to ``"-"`` as they come.

    The file appears under its name only when every row is in it: an exception or a
    kill leaves what was there before.

    Raises:
      FileNotFoundError: when the folder of ``path`` does not exist.
      ValueError: on a number that is not finite, which JSON cannot hold.
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


def _file_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        yield from _rows(file)


def _rows(lines: Iterable[bytes]) -> Iterator[Row]:
    for number, raw in enumerate(lines, 1):
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        if raw.strip():
            yield _row(number, raw)


def _row(number: int, raw: bytes) -> Row:
    name = f"line {number}"
    try:
        row = _parse(raw)
        name = _name(row) or name
        return Row(number, name, _example(row, name), None)
    except ValueError as error:
        return Row(number, name, None, f"line {number}: {error}")


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        row = json.loads(raw.rstrip().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not UTF-8: byte 0x{raw[error.start]:02x} at column {error.start + 1} "
            f"({error.reason}); save the file as UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        problem = error.msg.removesuffix(" at")
        raise ValueError(f"not JSON at column {error.colno}: {problem}") from None
    except (ValueError, RecursionError) as error:  # endless digits, endless brackets
        raise ValueError(f"not usable JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, got {_kind(row)}")
    return row


def _name(row: dict[str, Any]) -> str:
    name = row.get("id")
    if name is None:
        return ""
    if isinstance(name, bool) or not isinstance(name, (str, int)):
        raise ValueError(f"'id' is {_kind(name)}; use text or a whole number")
    return _whole("id", str(name))


def _example(row: dict[str, Any], name: str) -> Example:
    text = {
        key: _text(key, row[key])
        for key in ("response", "prompt", "context", "question")
        if row.get(key) is not None
    }
    if "response" not in text:
        raise ValueError("'response' is missing; every row needs one")
    label = row.get("label")
    if label is not None and (type(label) is not int or label not in (0, 1)):
        raise ValueError(f"'label' is {_show(label)}; use 0, 1 or leave it out")
    return Example(**text, id=name, labels=_labels(row.get("labels")), label=label)


def _labels(spans: Any) -> tuple[Label, ...] | None:
    if spans is None:
        return None
    if not isinstance(spans, list):
        raise ValueError(f"'labels' is {_kind(spans)}; use a list of spans")
    return tuple(_label(index, span) for index, span in enumerate(spans))


def _label(index: int, span: Any) -> Label:
    where = f"'labels[{index}]"
    if not isinstance(span, dict):
        raise ValueError(f"{where}' is {_kind(span)}; use {{start, end, label}}")
    for key in ("start", "end"):
        if type(span.get(key)) is not int:
            raise ValueError(
                f"{where}.{key}' is {_show(span.get(key))}; use a whole number"
            )
    kind = span.get("label")
    if kind is None:
        return Label(span["start"], span["end"])
    return Label(span["start"], span["end"], _text(f"labels[{index}].label", kind))


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{key!r} is {_kind(value)}; use text")
    return _whole(key, value)


def _whole(key: str, text: str) -> str:
    # JSON can escape half of a UTF-16 pair; no tokenizer takes it and no file holds it.
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError(f"{key!r} holds half of a surrogate pair; it is no valid text")
    return text


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "text", type(None): "null"}
    return kinds.get(type(value)) or _show(value)


def _show(value: Any) -> str:
    """The value as JSON has it, short enough for one line."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
