"""Parts of a work that processes share through a folder: each is done once.

Who does a part holds a lock, a file, which dies with its process; what has been done is
in the folder, so nobody has to be told.
"""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jaxhal.io.files import locked


@dataclasses.dataclass(frozen=True)
class Share:
    """Which of several processes this one is, and what it has done so far.

    Attributes:
      process: its number; with it the place in the work where it begins, so that
        processes rarely meet.
      processes: how many there are, as far as is known.
      done: how many of what, such as answers that were read.
    """

    process: int = 0
    processes: int = 1
    done: Counter[str] = dataclasses.field(default_factory=Counter)


def share_out(
    parts: Sequence[str], work: Callable[[str], None], locks: Path, share: Share
) -> None:
    """Does all parts that nobody else does, and waits until the others are done.

    What a process leaves that dies is taken over.  ``work`` is called with the name of
    a part while its lock is held, also where another process has done it by then.
    """
    with explained(locks):
        locks.mkdir(parents=True, exist_ok=True)
    first = len(parts) * share.process // share.processes
    todo = [*parts[first:], *parts[:first]]
    # What is left after a round is in the hands of other processes.
    for wait in (False, True):
        for name in [*todo]:
            with _claim(locks / f"{name}.lock", wait) as mine:
                if mine:
                    work(name)
                    todo.remove(name)


@contextlib.contextmanager
def _claim(lock: Path, wait: bool) -> Iterator[bool]:
    with contextlib.ExitStack() as held:
        with explained(lock.parent):
            mine = held.enter_context(locked(lock, wait))
        yield mine


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Says what to do when a folder of the feature store cannot be written."""
    try:
        yield
    except OSError as error:
        raise OSError(  # of the subclass that belongs to the number
            error.errno,
            f"cannot write the feature store: {error.strerror}; make room or choose "
            "another folder, then run the same again: finished parts are kept",
            str(path),
        ) from error
