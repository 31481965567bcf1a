"""An application as a process that serves until it is told to stop."""

import contextlib
import gc
import socket
import sys
from typing import Any

import anyio
import uvicorn

from jaxhal.serve.limits import OPTIONS


def bound(host: str, port: int) -> socket.socket:
    """A socket that has an address and does not listen yet; port 0 is any free one.

    Raises RuntimeError where the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if sys.platform != "win32":  # where it would let two servers have one port
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
    except (OSError, OverflowError, UnicodeError) as error:
        made.close()
        why = getattr(error, "strerror", None) or error
        raise RuntimeError(
            f"no server can be at host {host!r}, port {port} ({why}); give another "
            "port, or an address of this machine"
        ) from error
    return made


def url_of(host: str, at: socket.socket) -> str:
    """Where what is served at a socket can be asked for."""
    return f"http://{f'[{host}]' if ':' in host else host}:{at.getsockname()[1]}"


def run(app: Any, at: socket.socket, drain: int = 30) -> None:
    """Serves; when told to stop, takes no more and ends what is open, ``drain`` seconds
    at most.

    What only the event loop can do, such as saying that the server lives, waits for
    little then: threads of this process take shorter turns from then on, and what was
    imported, which is all, is never looked at again by the garbage collector.
    """
    anyio.run(anyio.sleep, 0)  # imports what it runs on
    sys.setswitchinterval(0.0005)
    gc.collect()
    gc.freeze()
    config = uvicorn.Config(
        app, log_level="warning", timeout_graceful_shutdown=drain, **OPTIONS
    )
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[at])
