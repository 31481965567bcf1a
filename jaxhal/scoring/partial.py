"""Results in the making, kept in a file beside the one they will become.

A command that was stopped goes on there.
"""

import contextlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from jaxhal.io.files import fcntl, whole_lines, write_through
from jaxhal.io.showing import shown

_KEY = "jaxhal detect"
_MARK = f'{{"{_KEY}": '.encode()  # how the first line begins


def beside(output: str | os.PathLike) -> Path:
    """Where results wait until all of them are there."""
    output = Path(output)
    return output.with_name(f"{output.name}.partial")


class Partial:
    """Records in the order they were added: a line with settings, then a line each."""

    def __init__(self, path: Path, file: IO[bytes]):
        self.path = path
        self._file = file

    def add(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Adds records: all of them or, where the disk is full, none.

        A kill keeps every record whose call has come back, and of others whole ones.
        """
        lines = (json.dumps(record).encode() + b"\n" for record in records)
        write_through(self._file, b"".join(lines))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The records that are there now; ValueError names a damaged one."""
        end, number = self._file.seek(0, os.SEEK_END), 1
        with self.path.open("rb") as file:
            file.readline()
            while file.tell() < end:
                number += 1
                try:
                    yield json.loads(file.readline())
                except (ValueError, RecursionError) as error:
                    raise ValueError(
                        f"{self.path}, line {number}: not JSON ({error}); give --force "
                        "to start over"
                    ) from None

    def _begin(self, settings: Mapping[str, Any], force: bool) -> int:
        """Leaves the settings and whole records; returns where these begin."""
        self._file.seek(0)
        first = self._file.readline()
        if not (first.startswith(_MARK) or _MARK.startswith(first)):
            raise ValueError(
                f"{self.path} is not what jaxhal detect left; move it away, or give "
                "another output"
            )
        if force or not first.endswith(b"\n"):  # a kill may have cut the first line
            self._file.truncate(0)
        else:
            try:
                made = dict(json.loads(first)[_KEY])
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(
                    f"{self.path}, line 1: no settings ({error}); give --force to "
                    "start over"
                ) from None
            _check(made, settings, self.path)
            self._file.truncate(whole_lines(self._file))
            return len(first)
        write_through(self._file, _MARK + json.dumps(settings).encode() + b"}\n")
        return self._file.tell()


class OtherInput(ValueError):
    """What is done was made of another input, so it does not go on with this one."""

    def __init__(self, partial: "Partial | None", what: str):
        assert partial is not None
        super().__init__(
            f"{partial.path} was made of another input: {what} differ; give that input "
            "to go on, --force to start over, or another output"
        )


@contextlib.contextmanager
def resuming(
    output: str | os.PathLike, settings: Mapping[str, Any], *, force: bool = False
) -> Iterator[Partial]:
    """The records of a result in the making, those of a stopped process among them.

    When the block ends well the file is deleted, so the result has to be in its place
    by then.  Otherwise it stays, unless it holds no record.

    Raises RuntimeError when another process makes the same result, and ValueError when
    the records there were made with other settings, or the file is none of these.

    Args:
      settings: all that decides what the records say; JSON.
      force: start over.
    """
    path = beside(output)
    with _alone(path, output) as file:
        partial = Partial(path, file)
        start = partial._begin(settings, force)
        try:
            yield partial
            path.unlink()
        except BaseException as error:
            if file.seek(0, os.SEEK_END) <= start:
                path.unlink()
            elif not isinstance(error, OtherInput):
                error.add_note(
                    f"{path} holds what is done, and the same command goes on there"
                )
            raise


@contextlib.contextmanager
def _alone(path: Path, output: str | os.PathLike) -> Iterator[IO[bytes]]:
    """The file, locked; who dies loses the lock.  As private as the result is."""
    output = Path(output)
    mode = stat.S_IMODE(output.stat().st_mode) if output.exists() else 0o666
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, mode)
        with open(handle, "a+b", buffering=0) as file:
            try:
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RuntimeError(
                    f"another process writes {output}; wait for it, or give another "
                    "output"
                ) from None
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                yield file
                return
        # Another process came to its end meanwhile, and deleted the file.


def _check(made: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    wanted = json.loads(json.dumps(wanted))  # as the file has it
    for name in dict.fromkeys([*made, *wanted]):
        before, now = made.get(name), wanted.get(name)
        if before == now:
            continue
        said = f"with {name} {shown(before)}, not {shown(now)}"
        if isinstance(before, list) and isinstance(now, list):
            gone = [one for one in before if one not in now]
            new = [one for one in now if one not in before]
            if gone and new:
                said = f"with {name} {shown(gone)}, not {shown(new)}"
            elif gone or new:
                said = f"{'with' if gone else 'without'} {name} {shown(gone or new)}"
        raise ValueError(
            f"{path} was made {said}; run that again to go on, give --force to start "
            "over, or give another output"
        )
