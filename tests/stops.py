"""Commands that are stopped at any moment, started again, and lose nothing.

Each command of ``COMMANDS`` runs in a folder of its own.  What it has kept may only
grow, whatever stops it, and what it ends with is what one that nobody stops ends with.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tiny_lm import write_lm

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
ENTRY = "from jaxhal.__main__ import main; main()"


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


def start(command: Command, folder: Path) -> subprocess.Popen:
    """The command as a process that hears signals already."""
    process = subprocess.Popen(
        [sys.executable, "-c", ENTRY, *command.arguments],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    while not _hears(process.pid) and process.poll() is None:
        time.sleep(0.001)
    return process


def _hears(pid: int) -> bool:
    """Whether SIGTERM would no longer simply end the process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next(line.split()[1] for line in lines if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def stop(
    command: Command, folder: Path, number: int, after: Callable[[], bool]
) -> Ended:
    """Starts the command and stops it as soon as something is true."""
    process = start(command, folder)
    with process:
        while not after() and process.poll() is None:
            time.sleep(0.002)
        kept = command.kept(folder)
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
    found = Ended(process.returncode, errors, process.returncode != command.code, kept)
    check(command, folder, number, found)
    return found


def later(seconds: float) -> Callable[[], bool]:
    """Whether so much time has passed since this call."""
    ends = time.monotonic() + seconds
    return lambda: time.monotonic() > ends


def check(command: Command, folder: Path, number: int, found: Ended) -> None:
    """That a stop lost nothing and was said in one line."""
    about = f"{signal.Signals(number).name}, exit {found.code}: {found.errors}"
    assert found.kept <= command.kept(folder) or done(command, folder), about
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
    assert not hidden(folder), about


def done(command: Command, folder: Path) -> bool:
    return all(command.results(folder).values())


def hidden(folder: Path) -> list[str]:
    """What a command that was asked to stop must not leave."""
    names = (path for path in folder.rglob("*") if path.name != ".lock")
    return [
        str(path)
        for path in names
        if path.name.startswith(".") or path.suffix in (".new", ".tmp")
    ]


def finish(command: Command, folder: Path) -> float:
    """Lets the command come to its end; seconds that took."""
    begun = time.monotonic()
    process = start(command, folder)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == command.code and "Traceback" not in errors, errors
    assert not hidden(folder), hidden(folder)
    return time.monotonic() - begun


def campaign(
    command: Command, root: Path, stops: int, seed: int
) -> Iterator[tuple[int, Ended]]:
    """Stops a command so often, at random moments, and compares what comes of it.

    Yields:
      Each signal and how the process ended by it.
    """
    draw = random.Random(seed)
    whole = _prepared(command, root / "whole")
    seconds = finish(command, whole)
    wanted = command.results(whole)
    assert all(wanted.values()), {name: bool(value) for name, value in wanted.items()}
    left = stops
    while left:
        folder = _prepared(command, root / f"stopped {left}")
        for _ in range(draw.randint(1, 5)):
            if not left:
                break
            number, after = draw.choice(SIGNALS), later(draw.uniform(0, seconds))
            found = stop(command, folder, number, after)
            left -= found.stopped
            yield number, found
        if not done(command, folder):
            finish(command, folder)
        results = command.results(folder)
        for name, value in wanted.items():
            assert results[name] == value, (
                f"{folder / name} differs from {whole / name}"
            )
        shutil.rmtree(folder)


def _prepared(command: Command, folder: Path) -> Path:
    folder.mkdir(parents=True)
    command.prepare(folder)
    return folder


def content(*names: str) -> Callable[[Path], dict[str, bytes]]:
    """What some files of a folder hold; nothing where they are not there."""

    def results(folder: Path) -> dict[str, bytes]:
        paths = {name: folder / name for name in names}
        return {
            name: path.read_bytes() if path.is_file() else b""
            for name, path in paths.items()
        }

    return results


def lines(name: str) -> Callable[[Path], set]:
    """The whole lines of a file that is written line by line."""

    def kept(folder: Path) -> set:
        path = folder / name
        if not path.is_file():
            return set()
        return set(path.read_bytes().split(b"\n")[:-1])

    return kept


# --- detect -------------------------------------------------------------------------


def rows(count: int) -> list[dict]:
    """Short answers of several lengths, every seventh of them bad."""
    return [
        {
            "id": f"row {at}",
            "context": f"The box holds {'many ' * (at % 5)}red balls.",
            "question": "What is inside?",
            "response": f"Balls{' and more' * (at % 4)}, {at}." if at % 7 else " ",
            "label": at % 2,
        }
        for at in range(count)
    ]


def _answers(count: int) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        write_lm(folder / "model")
        text = "".join(f"{json.dumps(row)}\n" for row in rows(count))
        (folder / "in.jsonl").write_text(text, "utf-8")

    return prepare


def detect(count: int) -> Command:
    names = ["-d", "lookback_ratio", "-d", "predictive_probability"]
    files = ["-i", "in.jsonl", "-o", "out.jsonl", "--html", "out.html"]
    return Command(
        _answers(count),
        ["detect", "-m", "model", *files, *names, "--batch-size", "4"],
        content("out.jsonl", "out.html"),
        lines("out.jsonl.partial"),
        code=1,
    )


COMMANDS: dict[str, Callable[[], Command]] = {"detect": lambda: detect(1500)}
