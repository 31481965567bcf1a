"""The one place that opens files for writing: whole or not at all, or line by line."""

import contextlib
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows: nothing is locked, nor what a kill left deleted
    fcntl = None

_LOCK = ".lock"


@contextlib.contextmanager
def replacing(
    path: str | os.PathLike, *, binary: bool = False, private: bool = False
) -> Iterator[IO]:
    """A file that takes its name only when the block ends well; text is UTF-8.

    Until then it lies under another name in the same folder, so nobody ever sees half
    of it, and a kill leaves what was there before.  What a killed writer of the same
    file left is deleted.  Of a ``private`` file only the owner may read.
    """
    mode = "b" if binary else ""
    encoding, newline = (None, None) if binary else ("utf-8", "\n")
    path = Path(path)
    if path.exists() and not path.is_file():  # a pipe or /dev/null: nothing to replace
        with path.open(f"w{mode}", encoding=encoding, newline=newline) as file:
            yield file
        return
    path = path.resolve()  # a link stays a link, its target is replaced
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent}: no such folder; make it first")
    _sweep(path)
    with (
        _scratch(path, 0o600 if private else 0o666) as (handle, scratch),
        open(
            handle, f"w{mode}", encoding=encoding, newline=newline, closefd=False
        ) as file,
    ):
        yield file
        file.flush()
        os.fsync(handle)
        if not private and path.exists():
            os.chmod(scratch, stat.S_IMODE(path.stat().st_mode))
        os.replace(scratch, path)


@contextlib.contextmanager
def staged(
    path: str | os.PathLike, own: Callable[[Path], Iterable[str]] = os.listdir
) -> Iterator[Path]:
    """A new folder that takes its name only when the block ends well.

    Until then the folder that has the name stays as it is, and a kill leaves it so.
    What a killed maker left is deleted.

    Args:
      path: the name; the folder that has it makes way.
      own: which entries of that folder go with it.  Every other one moves into the new
        folder, unless that has an entry of this name; by default none does.
    """
    path = Path(path).resolve()
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent}: no such folder; make it first")
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISDIR(path.stat().st_mode):
            raise NotADirectoryError(f"{path} is no folder; give another name")
    if _beside(path, ".old") or _beside(path, ".new") or _lock_of(path).exists():
        with _alone_at(path):
            _settle(path, own)
    with _scratch(path, None) as (_, scratch):
        yield scratch
        with _alone_at(path):
            try:
                (scratch / _LOCK).unlink()
                if path.exists():
                    path.rename(_unused(path, ".old"))
                scratch.rename(path)
                _settle(path, own)
            except BaseException:  # Ctrl-C may come between any two of these
                _settle(path, own)
                raise


def _lock_of(path: Path) -> Path:
    return path.with_name(f".{path.name}{_LOCK}")


@contextlib.contextmanager
def _alone_at(path: Path) -> Iterator[None]:
    """Nobody else moves folders to or from a name meanwhile."""
    lock = _lock_of(path)
    while fcntl is not None:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if _locked(handle, lock):
                try:
                    yield
                    lock.unlink()
                except BaseException:
                    lock.unlink(missing_ok=True)
                    raise
                return
        finally:
            os.close(handle)
    yield


def _settle(path: Path, own: Callable[[Path], Iterable[str]]) -> None:
    """Ends what a kill may have cut short while one folder made way for another."""
    for old in _beside(path, ".old"):
        if not path.exists():
            old.rename(path)
            continue
        gone = set(own(old))
        for entry in list(old.iterdir()):
            if entry.name not in gone and not (path / entry.name).exists():
                entry.rename(path / entry.name)
        # Of half a folder nobody could tell what in it is to be kept.
        shutil.rmtree(old.rename(old.with_suffix(".new")))
    _sweep(path)


def _unused(path: Path, ending: str) -> Path:
    """A name for what is on its way to or from a file or folder."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}{ending}")


def _beside(path: Path, ending: str) -> list[Path]:
    """What this module left beside a file or folder on its way there."""
    names = re.compile(re.escape(f".{path.name}.") + "[0-9a-f]{32}" + re.escape(ending))
    return [path.with_name(n) for n in os.listdir(path.parent) if names.fullmatch(n)]


@contextlib.contextmanager
def _scratch(path: Path, permissions: int | None) -> Iterator[tuple[int, Path]]:
    """An open, locked file beside ``path``, or a folder that holds the lock.

    It is deleted in the end, if it goes by that name still; who dies loses the lock.
    """
    while True:
        scratch, handle = _unused(path, ".new"), None
        # A folder itself is locked on this machine alone.
        lock = scratch / _LOCK if permissions is None else scratch
        try:  # Ctrl-C may come as soon as it is there
            if permissions is None:
                scratch.mkdir()
                with contextlib.suppress(FileNotFoundError):  # swept away already
                    handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
            else:
                handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL, permissions)
            if handle is not None and _locked(handle, lock):
                yield handle, scratch
                return
        finally:
            _delete(path, scratch, handle)


def _delete(path: Path, scratch: Path, handle: int | None) -> None:
    """Deletes what was on its way to ``path``, if it is there, and unlocks it.

    A folder under another name, so that nobody locks it anew, and its lock first: of
    files that are open network file systems keep something.
    """
    try:
        gone = scratch.rename(_unused(path, ".new")) if scratch.is_dir() else None
        (gone / _LOCK if gone else scratch).unlink(missing_ok=True)
    finally:
        if handle is not None:
            os.close(handle)
    if gone:
        with contextlib.suppress(FileNotFoundError):  # somebody sweeps it away
            shutil.rmtree(gone)


def _locked(handle: int, lock: Path) -> bool:
    """Locks a file; whether nobody has deleted it before that."""
    if fcntl is None:
        return True
    fcntl.flock(handle, fcntl.LOCK_EX)
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), os.stat(lock))
    return False


def _sweep(path: Path) -> None:
    """Deletes what writers of ``path`` left that did not live to delete it."""
    if fcntl is None:
        return
    for left in _beside(path, ".new"):
        # Somebody else is faster, or it is another user's.
        with contextlib.suppress(FileNotFoundError, PermissionError):
            # Network file systems lock only what can be written.
            handle = (
                os.open(left / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
                if left.is_dir()
                else os.open(left, os.O_RDWR)
            )
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
            else:
                _delete(path, left, handle)


def check_replaceable(path: str | os.PathLike) -> None:
    """OSError where :func:`replacing` could not make a file; nothing is left there."""
    path = Path(path).resolve()
    try:
        with _scratch(path, 0o666):
            pass
    except OSError as error:
        raise OSError(
            f"{path}: no file can be made there ({error.strerror}); give another "
            "folder or a shorter name"
        ) from error


def check_apart(
    inputs: Mapping[str, str | os.PathLike | None],
    outputs: Mapping[str, str | os.PathLike | None],
) -> None:
    """Nothing may be written over what is read, nor two results into one file.

    Args:
      inputs: what is read, by the name the caller knows it by, such as ``--input``.
      outputs: what will be written, in the same way; None and ``-`` are no files.
    """
    seen: list[tuple[str, Path]] = [
        (name, Path(path))
        for name, path in inputs.items()
        if path is not None and is_file(path)
    ]
    for name, given in outputs.items():
        if given is None or not is_file(given):
            continue
        path = Path(given)
        for other, there in seen:
            if path.resolve() == there.resolve() or (
                path.exists() and there.exists() and path.samefile(there)
            ):
                raise ValueError(
                    f"{name} {path} is the file of {other}; give another name, or "
                    "what it holds would be lost"
                )
        seen.append((name, path))


def is_file(path: str | os.PathLike) -> bool:
    """Whether writing to this path could lose anything: not to a pipe or device."""
    return path != "-" and (Path(path).is_file() or not Path(path).exists())


@contextlib.contextmanager
def alone(folder: str | os.PathLike) -> Iterator[None]:
    """A folder that nobody else writes to meanwhile, or RuntimeError."""
    with locked(Path(folder) / ".lock", wait=False) as mine:
        if not mine:
            raise RuntimeError(
                f"another process writes to {folder}; wait for it, or give this one "
                "another 'name'"
            )
        yield


def stamps(files: Iterable[Path]) -> tuple[tuple[str, int, int], ...]:
    """Of each file what is another when it is written again: its size and time."""
    about = [(one, one.stat()) for one in sorted(files) if one.is_file()]
    return tuple((str(one.resolve()), s.st_size, s.st_mtime_ns) for one, s in about)


@contextlib.contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Whether this process has a lock, a file, which dies with its process."""
    import filelock

    lock = filelock.FileLock(path)
    with contextlib.suppress(filelock.Timeout):
        lock.acquire(timeout=-1 if wait else 0)
    try:
        yield lock.is_locked
    finally:
        lock.release()


def lines_of(path: str | os.PathLike) -> list[Any]:
    """The rows of a file that :func:`append` writes, a torn last line left out.

    Raises ValueError with file and line when a whole line is not JSON.
    """
    return lines_after(path, 0)[0]


def lines_after(path: str | os.PathLike, start: int) -> tuple[list[Any], int]:
    """The same from a byte on, where a row begins, and the byte after the last row."""
    path = Path(path)
    if not path.is_file():
        return [], start
    with path.open("rb") as file:
        file.seek(start)
        raw = file.read()
    whole = raw[: raw.rfind(b"\n") + 1]
    rows = []
    for line in whole.split(b"\n")[:-1]:
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            number = path.read_bytes()[:start].count(b"\n") + len(rows) + 1
            raise ValueError(
                f"{path}, line {number}: not JSON ({error}); restore the file or "
                "delete it"
            ) from None
    return rows, start + len(whole)


def append(path: str | os.PathLike, rows: Iterable[Any]) -> None:
    """Adds rows to a file, a line of JSON each, and waits until the disk has them.

    All of them or none where the disk is full; what a stop or a kill cuts short keeps
    its whole rows, and the rest is cut off next time.  Several processes may add to a
    file.
    """
    lines = [json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows]
    path = Path(path)
    lock = path.with_name(f".{path.name}.lock")
    with locked(lock), open(path, "a+b", buffering=0) as file:
        file.truncate(whole_lines(file))
        write_through(file, b"".join(lines))


def write_through(file: IO[bytes], data: bytes) -> None:
    """Adds to an unbuffered file all or nothing, and waits until the disk has it."""
    end, left = file.seek(0, os.SEEK_END), memoryview(data)
    try:
        while left:
            left = left[file.write(left) :]
        os.fsync(file.fileno())
    except OSError:  # a full disk
        file.truncate(end)
        raise


def whole_lines(file: IO[bytes]) -> int:
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
