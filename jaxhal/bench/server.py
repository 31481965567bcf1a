"""A server as a process of its own, for benches that ask one."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx2

MODEL = "smollm2-135m"
OURS = ("jaxhal", "serve", "--model", MODEL)
PATIENCE = 600.0


class Started(NamedTuple):
    """One that answers."""

    url: str
    process: int
    seconds: float  # until it did


@contextlib.contextmanager
def started(*command: str) -> Iterator[Started]:
    """One that is ready, of a module and what it is told.

    Raises:
      RuntimeError: where it ends, or does not answer in ten minutes.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = ["--host", "127.0.0.1", "--port", str(port)]
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    whole = [sys.executable, "-m", *command, *place]
    began = time.monotonic()
    with subprocess.Popen(whole, **quiet) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            while not _lives(url):
                late = time.monotonic() > began + PATIENCE
                if process.poll() is not None or late:
                    raise RuntimeError(f"{' '.join(whole)} did not begin to serve")
                time.sleep(0.05)
            yield Started(url, process.pid, time.monotonic() - began)
        finally:
            process.terminate()


def _lives(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health").status_code == 200
    except httpx2.TransportError:
        return False
