"""Progress of long work: bars on a terminal, a line elsewhere, all alike."""

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm as Bar


def progress_bar(
    total: int, desc: str, unit: str, progress: bool | None, initial: int = 0
) -> Bar:
    """A bar on standard error; ``progress=None`` shows it on a terminal."""
    disable = None if progress is None else not progress
    return Bar(total=total, desc=desc, unit=unit, initial=initial, disable=disable)


@contextlib.contextmanager
def taking(what: str, *libraries: Any) -> Iterator[None]:
    """What libraries download, or find: bars on a terminal, once a line elsewhere.

    ``libraries`` are ``datasets`` and ``huggingface_hub.utils``, or one of these.
    """
    loud = [one for one in libraries if not one.are_progress_bars_disabled()]
    if sys.stderr.isatty():
        loud = []
    else:
        note(f"jaxhal: taking {what}")
    for one in loud:
        one.disable_progress_bars()
    try:
        yield
    finally:
        for one in loud:
            one.enable_progress_bars()


@functools.cache
def note(line: str) -> None:
    """Says it on standard error, the first time."""
    print(line, file=sys.stderr, flush=True)
