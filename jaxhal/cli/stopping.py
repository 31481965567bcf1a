"""How a command ends that is told to: at any moment, cleaned up, in one line."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

# What tells a command to end, as people know it.
_WORDS = {"SIGINT": "Ctrl-C", "SIGTERM": "SIGTERM", "SIGHUP": "SIGHUP"}
# Seconds until what had to wait, or was swallowed, is said again.
_AGAIN = 0.05

_told: signal.Signals | None = None
_begun = False


@contextlib.contextmanager
def orderly() -> Iterator[None]:
    """A command that ends well on Ctrl-C, SIGTERM and SIGHUP.

    They raise KeyboardInterrupt, so what is open is cleaned up.  While a module is
    being imported that waits until it is whole, for a half of one may swallow it; what
    was swallowed is raised again.  Then one line says what happened, and the process
    exits with 128 and the signal's number, past the interpreter's own end, where
    threads that still compute would crash it.
    """
    _listen()
    try:
        yield
    except BaseException as error:
        if _told is not None:
            _end(error)
        raise
    finally:
        _quiet(signal.SIG_DFL)
    if _told is not None:
        _end(None)


def begun() -> None:
    """From now on there may be something to clean up."""
    global _begun
    _begun = True


def _listen() -> None:
    for name in (*_WORDS, "SIGALRM"):
        number = getattr(signal, name, None)  # Windows lacks some
        # What is ignored from the start stays so: nohup, and shells' background.
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _hear)
    sys.unraisablehook = _swallowed


def _swallowed(unraisable: "sys.UnraisableHookArgs") -> None:
    """Is silent about a stop where nothing can be raised: it comes again."""
    if _told is None or unraisable.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(unraisable)


def _hear(number: int, frame: FrameType | None) -> None:
    global _told
    if signal.Signals(number).name in _WORDS:
        _told = _told or signal.Signals(number)
    if not _begun and _importing(frame):
        _end(None)
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, _AGAIN)
        if _importing(frame) or _leaving():
            return
    raise KeyboardInterrupt


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _leaving() -> bool:
    """Whether what cleans up after a KeyboardInterrupt is running."""
    return any(isinstance(one, KeyboardInterrupt) for one in _chain(sys.exception()))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and those that were being handled when it was raised."""
    while error is not None:
        yield error
        error = error.__context__


def notes_of(error: BaseException) -> list[str]:
    """What was noted on an error, in a line; JAX's on its own frames take several."""
    return [note for note in getattr(error, "__notes__", ()) if "\n" not in note]


def _quiet(action: signal.Handlers) -> None:
    """No more handling of signals by this module."""
    for name in (*_WORDS, "SIGALRM"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is _hear:
            signal.signal(number, action)


def _end(error: BaseException | None) -> None:
    assert _told is not None
    _quiet(signal.SIG_IGN)
    notes = [note for one in _chain(error) for note in notes_of(one)]
    line = "; ".join([f"jaxhal: stopped by {_WORDS[_told.name]}", *notes])
    with contextlib.suppress(OSError):  # nobody may be there to read it
        print(line, file=sys.stderr, flush=True)
    os._exit(128 + _told)
