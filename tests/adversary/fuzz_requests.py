"""Requests to the proxy that no client would send, as bytes on a socket."""

import collections
import concurrent.futures
import contextlib
import json
import random
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import children
from test_encoding import write, write_pooling
from test_watchdog import KNOWN, send, watchdog

from jaxhal.serve.proxy import Service
from jaxhal.watchdog import Guard

PATHS = ["/v1/chat/completions"] * 30 + [*["/v1/feedback"] * 6, "/v1/models", "/health"]
PATHS += ["/metrics", "/", "/%00", "/v1/chat/completions/", "*", "//", "/?" + "a" * 999]
METHODS = ["POST"] * 40 + ["GET", "PUT", "HEAD", "DELETE", "OPTIONS", "CONNECT", "p\0"]
HEADERS = [
    "Host: evil.example",
    "Content-Type: text/plain",
    "Transfer-Encoding: chunked",
    "Content-Length: 7",
    "Content-Length: -1",
    "Expect: 100-continue",
    "Upgrade: websocket\r\nConnection: Upgrade",
    "Authorization: Bearer \xff",
    "X: " + "y" * 20_000,
    ": empty",
]
VALUES = [None, True, -1, 0, 2, 1e308, 10**400, "", "w1", "\ud800", "\0", "w44", [], {}]
VALUES += [[None], [[]], {"a": {}}, "w17 w3", "\u200b", "x" * 30_000, KNOWN[0]]
ROLES = ["user", "user", "system", "assistant", "tool", "", "developer", "\ud800"]
NAMES = ["stream", "n", "temperature", "max_tokens", "stop", "seed", "tools", "id"]
NAMES += ["hallucinated", "query", "response", "logit_bias", "messages", "model", "é"]


def body(draw: random.Random) -> bytes:
    """A chat completion or feedback, with some of it exchanged, cut or doubled."""
    messages = [
        {
            "role": draw.choice(ROLES),
            "content": draw.choice(["w1 w2", "w3", draw.choice(VALUES)]),
        }
        for _ in range(draw.choice([0, 1, 1, 2, 3]))
    ]
    messages.append({"role": "user", "content": draw.choice(["w5 w6", *KNOWN])})
    whole = {"messages": messages, "stream": draw.random() < 0.2}
    if draw.random() < 0.2:
        whole = {
            "query": "w1 w2",
            "response": "w3",
            "hallucinated": draw.choice([True, False]),
        }
    for _ in range(draw.choice([0, 0, 1, 3])):
        whole[draw.choice(NAMES)] = draw.choice(VALUES)
    raw = bytearray(json.dumps(whole).encode())
    for _ in range(draw.choice([0, 0, 0, 1, 4])):
        at, kind = draw.randrange(len(raw)), draw.randrange(4)
        if kind == 0:
            raw[at] = draw.randrange(256)
        elif kind == 1:
            raw[at : at + draw.randint(1, 9)] = b"x"
        elif kind == 2:
            raw[at:at] = raw[: draw.randint(1, 20)]
        else:
            raw[at:at] = draw.choice([b'"', b"{", b"[" * 5000, b"1e999", b"\\u0000"])
    return bytes(raw)


def request(draw: random.Random) -> bytes:
    """A whole request, or what a client sends before it hangs up."""
    said = body(draw)
    lines = [f"{draw.choice(METHODS)} {draw.choice(PATHS)} HTTP/1.1"]
    lines += ["Host: localhost", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(said)}", "Connection: close"]
    for _ in range(draw.choice([0, 0, 0, 1, 2])):
        lines.insert(draw.randint(0, len(lines)), draw.choice(HEADERS))
    if draw.random() < 0.1:
        lines.pop(draw.randrange(len(lines)))
    raw = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + said
    if draw.random() < 0.1:
        raw = raw[: draw.randrange(len(raw))]
    return raw


def told(port: int, raw: bytes) -> int | None:
    """The status that came back, ``None`` where the server hung up."""
    heard = b""
    with socket.create_connection(("127.0.0.1", port), timeout=0.25) as line:
        with contextlib.suppress(ConnectionError):
            line.sendall(raw)
            try:
                while piece := line.recv(65536):
                    heard += piece
            except TimeoutError:  # it waits for more, and is told that none comes
                line.settimeout(60)
                with contextlib.suppress(OSError):  # it has hung up meanwhile
                    line.shutdown(socket.SHUT_WR)
                while piece := line.recv(65536):
                    heard += piece
    lines = [one.split() for one in heard.split(b"\r\n") if one[:5] == b"HTTP/"]
    return int(lines[-1][1]) if lines else None


def service(folder: Path) -> Service:
    """A proxy in front of a tiny agent, that knows a few points."""
    write_pooling(write(folder), normalize=True, mean=True)
    return Service(watchdog(str(folder), Guard(similarity=0.2)))


def serve(folder: Path, port: int, line: Any) -> None:
    """A proxy in a process of its own, until it is told to end."""
    line.close()
    service(folder).run(port=port)


def watch(port: int, line: Any) -> None:
    """Asks for ``/health`` until it is told to end, and says how long that took."""
    times = []
    while not line.poll(0.02):
        asked = time.perf_counter()
        try:
            assert send(port, "GET", "/health")[0] in (200, 503)
        except ConnectionRefusedError:  # it does not listen yet
            assert not times
            continue
        if not times:
            line.send("listening")
        times.append(time.perf_counter() - asked)
    line.send(times)


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[tuple[int, list[float]]]:
    """The port of a proxy, and at the end how long each ``/health`` took, sorted.

    Server, clients and who asks for ``/health`` are processes apart, so that none waits
    for another's interpreter.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    times: list[float] = []
    started = [children.start(serve, folder, port), children.start(watch, port)]
    (_, _), (_, watcher) = started
    try:
        assert watcher.recv() == "listening"
        yield port, times
        watcher.send(None)
        times += sorted(watcher.recv())
        metrics = send(port, "GET", "/metrics")[1].decode()
        assert 'status="500"' not in metrics, metrics
    finally:
        for process, _ in started:
            process.terminate()
            process.join()


def health(times: list[float]) -> str:
    late = sum(each > 0.1 for each in times)
    return (
        f"/health took {1000 * times[len(times) // 2]:.0f} ms on the median of "
        f"{len(times)} times, {1000 * times[-1]:.0f} at most, over 100 {late} times"
    )


def main(count: int) -> None:
    """Sends so many, and says what came back and how long ``/health`` took."""
    seen, began = collections.Counter(), time.perf_counter()

    def one(number: int) -> int | None:
        status = told(port, raw := request(random.Random(number)))
        assert status != 500, (number, raw)
        return status

    with (
        tempfile.TemporaryDirectory() as folder,
        watched(Path(folder)) as (port, times),
        concurrent.futures.ThreadPoolExecutor(16) as several,
    ):
        seen.update(several.map(one, range(count)))
    seconds = time.perf_counter() - began
    print(f"{count} requests in {seconds:.0f} s: {dict(seen.most_common())}")
    print(health(times))
