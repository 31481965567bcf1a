"""Rows of a JSON Lines file to examples and back, one bad row never costing another."""

import functools
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxhal.datasets.fields import Row, kind, to_row
from jaxhal.io.files import replacing


def read_rows(source: str | os.PathLike | Iterable[bytes]) -> Iterator[Row]:
    """The rows of a JSON Lines file, in order; blank lines are passed over.

    A row is an object with ``response``, ``prompt`` or else ``context`` with
    ``question``, optional ``id`` and ``source`` (text or a whole number), ``split``,
    ``samples`` (a list of texts), and ``labels`` (``[{"start", "end", "label"}]``,
    characters of the response, end exclusive) or ``label`` (0 or 1), and ``templated``
    (true where the prompt went through a chat template already).  ``null`` means left
    out; other keys are ignored, and ids may repeat.  A bad row comes back with its
    error and never raises.

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
    lines = numbered_lines(source)
    return (to_row(line, "line", functools.partial(parse, raw)) for line, raw in lines)


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


def numbered_lines(
    source: str | os.PathLike | Iterable[bytes],
) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers from 1.

    Args:
      source: as in :func:`read_rows`, which raises the same errors.

    >>> list(numbered_lines([b"a", b"", b"b"]))
    [(1, b'a'), (3, b'b')]
    """
    if not isinstance(source, (str, os.PathLike)):
        return _full(source)
    if source == "-":
        return _full(sys.stdin.buffer)
    path = Path(source)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give a .jsonl file")
    return _file_lines(path)


def _file_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        yield from _full(file)


def _full(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    for number, raw in enumerate(lines, 1):
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        if raw.strip():
            yield number, raw


def parse(raw: bytes) -> dict[str, Any]:
    """The JSON object on one line.

    Raises:
      ValueError: when the line is not UTF-8, not JSON or not an object.

    >>> parse(b'{"id": "a"}')
    {'id': 'a'}
    """
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
        raise ValueError(f"expected a JSON object, got {kind(row)}")
    return row
