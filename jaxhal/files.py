"""Files that appear whole or not at all."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO


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
