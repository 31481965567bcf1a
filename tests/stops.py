"""Commands that are stopped at any moment, started again, and lose nothing.

Each command of ``stopped.COMMANDS`` runs in a folder of its own.  What it has kept may
only grow, whatever stops it, and what it ends with is what one that nobody stops ends
with.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import children
import forked

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
ENTRY = "from jaxhal.__main__ import main; main()"
_FRESH = 0.1  # share of stops of a process that was not forked


class Command(NamedTuple):
    """One command.

    Attributes:
      prepare: writes into a folder what the command reads.
      arguments: of the command, which runs in that folder.
      results: name -> bytes of what has to be the same however often it was stopped.
      kept: what a stop at this moment must not lose.
      code: what it exits with when nobody stops it.
    """

    prepare: Callable[[Path], None]
    arguments: list[str]
    results: Callable[[Path], dict[str, bytes]]
    kept: Callable[[Path], set]
    code: int = 0


class Ended(NamedTuple):
    """How a process ended that was stopped, or came to its end before."""

    code: int
    errors: str
    stopped: bool
    kept: set


class Running:
    """A command in a process that hears signals already.

    Args:
      command: to start.
      folder: that it runs in.
      fresh: as a shell starts it; else forked off what has imported everything.
    """

    def __init__(self, command: Command, folder: Path, fresh: bool = False):
        # Closed when it has ended.
        self._said = tempfile.NamedTemporaryFile("w+", prefix="said-")  # noqa: SIM115
        self._process: Any
        if fresh:
            path = os.pathsep.join(filter(None, sys.path))
            self._process = subprocess.Popen(
                [sys.executable, "-c", ENTRY, *command.arguments],
                cwd=folder,
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                env=os.environ | {"PYTHONPATH": path},
            )
        else:
            options = (command.arguments, folder, self._said.name)
            self._process, line = children.start(forked.command, *options)
            line.close()
        while self.code() is None and not _hears(self._process.pid):
            time.sleep(0.001)

    def code(self) -> int | None:
        """What it exited with, ``None`` while it runs."""
        if isinstance(self._process, subprocess.Popen):
            return self._process.poll()
        return self._process.exitcode

    def send(self, number: int) -> None:
        if self.code() is None:
            os.kill(self._process.pid, number)

    def ended(self, seconds: float = 600) -> tuple[int, str]:
        """Waits for its exit code, and what it said on standard error."""
        ends = time.monotonic() + seconds
        with self._said:
            while (code := self.code()) is None:
                assert time.monotonic() < ends, f"it still runs after {seconds} s"
                time.sleep(0.01)
            self._said.seek(0)
            return code, self._said.read()


def _hears(pid: int) -> bool:
    """Whether SIGTERM would no longer simply end the process."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:  # it has ended
        return True
    caught = next(line.split()[1] for line in lines if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def stop(
    command: Command,
    folder: Path,
    number: int,
    after: Callable[[], bool],
    fresh: bool = False,
) -> Ended:
    """Starts the command and stops it as soon as something is true."""
    killed = hidden(folder)  # what a kill left, and a stop soon after may leave there
    process = Running(command, folder, fresh)
    while not after() and process.code() is None:
        time.sleep(0.01)
    kept = command.kept(folder)
    process.send(number)
    code, errors = process.ended(120)
    found = Ended(code, errors, code != command.code, kept)
    check(command, folder, number, found, killed)
    return found


def later(seconds: float) -> Callable[[], bool]:
    """Whether so much time has passed since this call."""
    ends = time.monotonic() + seconds
    return lambda: time.monotonic() > ends


def check(
    command: Command, folder: Path, number: int, found: Ended, before: set[str]
) -> None:
    """That a stop lost nothing, left nothing and was said in one line."""
    about = f"{signal.Signals(number).name}, exit {found.code}: {found.errors}"
    lost = found.kept - command.kept(folder)
    assert not lost or done(command, folder), f"{lost} lost; {about}"
    for word in ("Traceback", "Exception ignored", "Segmentation", "terminate"):
        assert word not in found.errors, about
    if not found.stopped:
        return
    if number == signal.SIGKILL:
        assert found.code == -number, about
        return
    # In its very last moment, when all is in its place, a signal simply ends it.
    if found.code != -number:
        assert found.code == 128 + number, about
        assert found.errors.count("jaxhal: stopped by ") == 1, about
        assert found.errors.splitlines()[-1].startswith("jaxhal: stopped by"), about
    else:
        assert done(command, folder), about
    assert not (left := hidden(folder) - before), f"{left} left; {about}"


def done(command: Command, folder: Path) -> bool:
    return all(command.results(folder).values())


def hidden(folder: Path) -> set[str]:
    """What a command that was asked to stop must not leave; locks may stay."""
    return {
        str(path)
        for path in folder.rglob("*")
        if re.search(r"^\.|\.new$|tmp", path.name) and not path.name.endswith(".lock")
    }


def finish(command: Command, folder: Path) -> float:
    """Lets the command come to its end; seconds that took."""
    begun = time.monotonic()
    code, errors = Running(command, folder).ended()
    assert code == command.code and "Traceback" not in errors, errors
    assert not (left := hidden(folder)), left
    return time.monotonic() - begun


def campaign(
    make: Callable[[], Command], root: Path, stops: int, seed: int
) -> Iterator[tuple[int, Ended]]:
    """Stops a command so often, at random moments, and compares what comes of it.

    Yields:
      Each signal and how the process ended by it.
    """
    command, draw = make(), random.Random(seed)
    # The first one compiles what the others find compiled.
    whole, again = (_prepared(command, root / name) for name in ("whole", "again"))
    finish(command, whole)
    seconds = finish(command, again)
    wanted = command.results(whole)
    assert all(wanted.values()), {name: bool(value) for name, value in wanted.items()}
    assert command.results(again) == wanted
    left = stops
    while left:
        folder = _prepared(command, root / f"stopped {left}")
        for _ in range(min(left, draw.randint(1, 5))):
            number, after = draw.choice(SIGNALS), later(draw.uniform(0, seconds))
            # Some while it imports what it needs.
            found = stop(command, folder, number, after, draw.random() < _FRESH)
            left -= found.stopped
            yield number, found
            if done(command, folder):
                break
        else:
            finish(command, folder)
        results = command.results(folder)
        other = [n for n in wanted | results if wanted.get(n) != results.get(n)]
        assert not other, f"{', '.join(other)} of {folder} differ from {whole}"
        shutil.rmtree(folder)


def _prepared(command: Command, folder: Path) -> Path:
    folder.mkdir(parents=True)
    command.prepare(folder)
    return folder
