"""A watchdog that serves and is taught under load, until it is stopped."""

import http.client
import json
import random
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stopped import WATCH, lines, prepare_watch
from stops import SIGNALS, Command, Ended, Running, check, hidden, later

from jaxhal.io.files import lines_of

_CONFIG = {
    **WATCH,
    "agent": {"model": "model", "max_new_tokens": 4},
    "plan": {"samples": 2},
}
_CLIENTS = 3
_POINTS = "runs/mine/points.jsonl"
#: Commands that serve it: the proxy alone, and beside verdicts of a reader.
SERVERS = {
    "watchdog serve": ["watchdog", "serve", "config.yaml"],
    "serve": ["serve", "--watchdog", "config.yaml", "-m", "model", "--detector"]
    + ["token_entropy"],
}

prepare = prepare_watch(_CONFIG)


class Clients:
    """Some that give feedback, each query once, for as long as the block lasts.

    Attributes:
      acknowledged: queries whose feedback the server has said to have.
      points: that it had before, at least.
      errors: what else it said.
    """

    def __init__(self, port: int, points: int):
        self.acknowledged: list[str] = []
        self.errors: list[str] = []
        self.points = points
        self._port, self._over = port, threading.Event()
        self._threads = [
            threading.Thread(target=self._teach, args=(each,))
            for each in range(_CLIENTS)
        ]

    def __enter__(self) -> "Clients":
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._over.set()
        for each in self._threads:
            each.join()

    def _teach(self, client: int) -> None:
        number = 0
        while not self._over.is_set():
            query = f"w{number % 40} v{self.points} {client} {number}"
            try:
                found = teach(self._port, query=query, hallucinated=True)
            except urllib.error.HTTPError as error:
                said = error.read().decode()
                if "the answer is empty" not in said:  # as random weights will have it
                    self.errors.append(f"{error}: {said}")
            except (
                OSError,
                http.client.HTTPException,
            ):  # nobody listens yet, or any more
                time.sleep(0.01)
            else:
                assert found["gained"] == 1 and found["points"] > self.points
                self.acknowledged.append(query)
            number += 1


def teach(port: int, **feedback: Any) -> dict[str, Any]:
    """What the server says to feedback."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/feedback",
        json.dumps(feedback).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def known(folder: Path) -> list[str]:
    """Queries of the bound's points."""
    return [row["query"] for row in lines_of(folder / _POINTS)]


def stop(
    folder: Path,
    number: int,
    after: Callable[[Clients], bool],
    fresh: bool = False,
    server: str = "watchdog serve",
) -> Ended:
    """Serves in a folder, under load, and is stopped as soon as something is true."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [*SERVERS[server], "--port", str(port)]
    command = Command(prepare, arguments, lambda folder: {"": b""}, lines(_POINTS))
    before, killed = known(folder), hidden(folder)
    process = Running(command, folder, fresh)
    with Clients(port, len(before)) as clients:
        while not after(clients) and process.code() is None:
            time.sleep(0.002)
        kept = command.kept(folder)
        process.send(number)
        code, errors = process.ended(120)
    found = Ended(code, errors, True, kept)
    check(command, folder, number, found, killed)
    assert not clients.errors, clients.errors
    now = known(folder)
    assert len(set(now)) == len(now) and now[: len(before)] == before
    assert {*clients.acknowledged} <= {*now[len(before) :]}
    return found


def campaign(root: Path, stops: int, seed: int) -> Iterator[tuple[int, Ended]]:
    """As :func:`stops.campaign` does; each server goes on with the bound of the last.

    Yields:
      Each signal and how the server ended by it.
    """
    draw = random.Random(seed)
    root.mkdir(exist_ok=True)
    prepare(root)
    for _ in range(2):  # the first one compiles what the others find compiled
        begun = time.monotonic()
        stop(root, signal.SIGTERM, lambda clients: len(clients.acknowledged) > 5)
    seconds = 2 * (time.monotonic() - begun)
    for _ in range(stops):
        number, ends = draw.choice(SIGNALS), later(draw.uniform(0, seconds))
        yield number, stop(root, number, lambda clients: ends(), draw.random() < 0.1)  # noqa: B023
