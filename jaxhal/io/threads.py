"""What waits for others, several at a time."""

import concurrent.futures
import threading
from collections.abc import Callable, Generator, Iterable
from typing import Any

# Those that a server has at a time.
_AT_ONCE = 8


def at_once(
    ask: Callable[[Any], Any], items: Iterable[Any]
) -> Generator[Any, None, None]:
    """``map`` for what asks endpoints: some items at a time, the results in order.

    After an error, and where it is left or interrupted, nothing more begins to be
    asked, and nobody waits for what has.
    """
    threads, over = concurrent.futures.ThreadPoolExecutor(_AT_ONCE), threading.Event()

    def tried(item: Any) -> Any:
        if over.is_set():  # one before it failed, whose error comes first
            raise concurrent.futures.CancelledError
        try:
            return ask(item)
        except BaseException:
            over.set()
            raise

    try:
        yield from threads.map(tried, items)
    finally:
        over.set()
        threads.shutdown(wait=False, cancel_futures=True)
