"""Memory that a process takes beyond the pages of files, on Linux."""

import os
import threading
from pathlib import Path
from types import TracebackType


def own() -> int:
    """Bytes that it has now; what no file holds is its own."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """The most that is taken while a block runs, beyond what there was: ``bytes``."""

    def __enter__(self) -> "Peak":
        self.bytes, self._before = 0, own()
        self._over = threading.Event()
        self._watching = threading.Thread(target=self._watch)
        self._watching.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(1e-3):
            self.bytes = max(self.bytes, own() - self._before)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._watching.join()
