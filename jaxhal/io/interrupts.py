"""What a stop must not leave half done."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C, and other signals that a function handles, wait until the end of this."""
    heard: list[int] = []
    before: dict[int, Any] = {}
    holding = True

    def hear(number: int, frame: FrameType | None) -> None:
        if holding:
            heard.append(number)
        else:  # while the functions of before are being put back
            before[number](number, frame)

    try:
        if threading.current_thread() is threading.main_thread():  # where they come
            for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM"):
                number = getattr(signal, name, None)  # Windows lacks some
                if number is not None and callable(signal.getsignal(number)):
                    before[number] = signal.getsignal(number)
                    signal.signal(number, hear)
        yield
    finally:
        holding = False
        for number, action in before.items():
            signal.signal(number, action)
        if heard:
            signal.raise_signal(heard[0])
