"""Requests that each could keep the proxy from answering anybody else."""

import contextlib
import json
import socket
import tempfile
import time
from pathlib import Path

from fuzz_requests import health, told, watched

CHAT = "/v1/chat/completions"
HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
MANY, LONG = {"role": "user", "content": "a"}, {"role": "user", "content": "w1 w2 "}


def posted(messages: list[dict[str, str]], **more: object) -> bytes:
    body = json.dumps({"messages": messages, **more})
    return f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def named(count: int) -> dict[str, object]:
    return {f"x{number}": number for number in range(count)}


def long(times: int) -> dict[str, str]:
    return LONG | {"content": LONG["content"] * times}


WHOLE = {
    "30,000 messages": posted([MANY] * 30_000),
    "1,000 messages": posted([MANY] * 1000),
    "150,000 words": posted([long(150_000), MANY]),
    "6,000 words": posted([long(3000), MANY]),
    "60,000 names": posted([MANY], **named(60_000)),
    "nested lists": posted([MANY])[:-1] + b', "x": ' + b"[" * 100_000,
    "tiny chunks": (HEAD + "Transfer-Encoding: chunked\r\n\r\n").encode()
    + b"1\r\n[\r\n" * 200_000,
}


def halves(port: int, stack: contextlib.ExitStack) -> None:
    """240 requests that never end."""
    for number in range(240):
        line = socket.create_connection(("127.0.0.1", port), timeout=20)
        stack.enter_context(line)
        line.sendall(
            [HEAD.encode(), b"", f"{HEAD}Content-Length: 9\r\n\r\n{{".encode()][
                number % 3
            ]
        )


def unread(port: int, stack: contextlib.ExitStack) -> None:
    """Eight streams whose answers nobody reads."""
    for _ in range(8):
        line = socket.create_connection(("127.0.0.1", port), timeout=20)
        stack.enter_context(line)
        line.sendall(posted([long(1000)], stream=True))


def main(count: int) -> None:
    """Sends each of them so often, and says how long ``/health`` took meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        for name, raw in WHOLE.items():
            with watched(Path(folder)) as (port, times):
                statuses = {told(port, raw) for _ in range(count)}
            print(f"{name}, {count} times ({statuses}): {health(times)}")
        for send in (halves, unread):
            with (
                watched(Path(folder)) as (port, times),
                contextlib.ExitStack() as stack,
            ):
                send(port, stack)
                time.sleep(15)
            print(f"{send.__doc__} {health(times)}")
