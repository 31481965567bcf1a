"""Files that appear whole or not at all, and files that grow line by line."""

import contextlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def replacing(path: str | os.PathLike, *, binary: bool = False) -> Iterator[IO]:
    """A file that takes its name only when the block ends well; text is UTF-8.

    Until then it lies under another name in the same folder, so nobody ever sees half
    of it, and a kill leaves what was there before.

    Raises:
      FileNotFoundError: when the folder of ``path`` does not exist.
    """
    mode = "b" if binary else ""
    encoding, newline = (None, None) if binary else ("utf-8", "\n")
    path = Path(path).resolve()  # a link stays a link, its target is replaced
    if path.exists() and not path.is_file():  # a pipe or /dev/null: nothing to replace
        with path.open(f"w{mode}", encoding=encoding, newline=newline) as file:
            yield file
        return
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent}: no such folder; make it first")
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with scratch.open(f"x{mode}", encoding=encoding, newline=newline) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


@contextlib.contextmanager
def alone(folder: str | os.PathLike) -> Iterator[None]:
    """A folder that nobody else writes to meanwhile; the lock dies with its process.

    Raises:
      RuntimeError: when somebody does.
    """
    import filelock

    lock = filelock.FileLock(Path(folder) / ".lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise RuntimeError(
            f"another process writes to {folder}; wait for it, or give this one "
            "another 'name'"
        ) from None
    try:
        yield
    finally:
        lock.release()


def lines_of(path: str | os.PathLike) -> list[Any]:
    """The rows of a file that :func:`append` writes, a torn last line left out.

    Raises:
      ValueError: when a whole line is not JSON.
    """
    path = Path(path)
    if not path.is_file():
        return []
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.splitlines()]


def append(path: str | os.PathLike, rows: Iterable[Any]) -> None:
    """Adds rows to a file, a line of JSON each, and waits until the disk has them.

    All of them or none: what a full disk cuts short is taken back, and what a kill did
    is cut off next time.  Several processes may add to a file.
    """
    import filelock

    lines = [json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows]
    path = Path(path)
    lock = filelock.FileLock(path.with_name(f".{path.name}.lock"))
    with lock, open(path, "a+b", buffering=0) as file:
        end = _whole_lines(file)
        if end < file.seek(0, os.SEEK_END):
            file.truncate(end)
        try:
            left = memoryview(b"".join(lines))
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        except BaseException:
            file.truncate(end)
            raise


def _whole_lines(file: IO[bytes]) -> int:
    """Bytes of a file up to the end of its last whole line."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - (1 << 16))
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
