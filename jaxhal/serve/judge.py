"""Verdicts on answers of many clients, read together."""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from jaxhal import lrp
from jaxhal.models.lm import LM
from jaxhal.reporting.attribution import explain
from jaxhal.reporting.report import Report
from jaxhal.scoring import detection
from jaxhal.scoring.fitting import Fitted
from jaxhal.serve.writer import Busy, Failed
from jaxhal.types import Example

# Seconds in which others may come along; answers read at once, and that may wait.
_GATHER, _BATCH, _WAITING = 0.005, 8, 4096


class TooMany(ValueError):
    """More answers are asked of at once than may wait."""


class _Asked(NamedTuple):
    """An answer that waits for its report."""

    example: Example
    relevance: bool
    loop: asyncio.AbstractEventLoop
    report: asyncio.Future[Report]

    def tell(self, found: Report | BaseException) -> None:
        def put() -> None:
            if self.report.done():  # nobody waits for it any more
                return
            if isinstance(found, BaseException):
                self.report.set_exception(Failed(f"the reader failed: {found}"))
            else:
                self.report.set_result(found)

        with contextlib.suppress(RuntimeError):  # the loop ended before this one
            self.loop.call_soon_threadsafe(put)


class Judge:
    """One thread that reads what many ask, batches of them at a time.

    Args:
      lm: the reader.
      chosen: detectors, of :func:`jaxhal.scoring.detection.resolve_for`.
    """

    def __init__(self, lm: LM, chosen: Sequence[Fitted]):
        self.lm, self.chosen = lm, chosen
        self._asked: queue.Queue[_Asked | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Answers that nobody reads yet."""
        return self._asked.qsize()

    def check(self, count: int) -> None:
        """Raises :class:`Busy` where so many more answers would wait too long.

        :class:`TooMany` where so many never could wait.
        """
        if count > _WAITING:
            raise TooMany(
                f"{count} answers are asked of at once, over {_WAITING}; send them in "
                "parts"
            )
        if self.waiting + count > _WAITING:
            raise Busy(
                f"{self.waiting} answers wait, and with {count} more that is over "
                f"{_WAITING}; try again later"
            )

    async def reports(
        self, examples: Sequence[Example], relevance: bool = False
    ) -> AsyncIterator[Report]:
        """Reports on answers, in order, as they are done.

        With ``relevance`` spans have what they rest on, a pass back for each.  One that
        cannot be read has its ``error``.  Raises as :meth:`check`, and :class:`Failed`.
        """
        self.check(len(examples))
        loop = asyncio.get_running_loop()
        asked = [_Asked(one, relevance, loop, loop.create_future()) for one in examples]
        for one in asked:
            self._asked.put(one)
        try:
            for one in asked:
                yield await one.report
        finally:
            for one in asked:
                one.report.cancel()

    def close(self) -> None:
        """Ends the thread when it has read what it reads."""
        self._asked.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (first := self._asked.get()) is not None:
            time.sleep(_GATHER)
            some, ends = [first], False
            while len(some) < _BATCH and not self._asked.empty():
                one = self._asked.get()
                if ends := one is None:
                    break
                some.append(one)
            self._read([one for one in some if not one.report.cancelled()])
            if ends:
                return

    def _read(self, some: list[_Asked]) -> None:
        options: Any = {"batch_size": _BATCH, "progress": False}
        examples = [one.example for one in some]
        later = []  # who did not ask for passes back waits for none
        try:
            batches = detection.score_batches(self.lm, examples, self.chosen, **options)
            for number, report in (pair for batch in batches for pair in batch):
                one = some[number]
                if one.relevance:
                    later.append((one, report))
                else:
                    one.tell(report)
            for one, report in later:
                if not one.report.cancelled():
                    one.tell(self._explained(one.example, report))
        except BaseException as error:
            for one in some:
                one.tell(error)

    def _explained(self, example: Example, report: Report) -> Report | Exception:
        try:
            rests = explain(self.lm, example, report.places, lrp.attnlrp())
        except ValueError as error:
            return detection.empty(self.lm.name, example, [], str(error))
        except Exception as error:  # of this answer alone, such as want of memory
            return error
        return report.resting(rests)
