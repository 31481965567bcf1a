"""An application as a process that serves until it is told to stop."""

import gc
import sys
from typing import Any

import anyio
import uvicorn

from jaxhal.serve.limits import OPTIONS


def run(app: Any, host: str, port: int, drain: int = 30) -> None:
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
    uvicorn.run(
        app,
        host=host,
        port=port,
        log_level="warning",
        timeout_graceful_shutdown=drain,
        **OPTIONS,
    )
