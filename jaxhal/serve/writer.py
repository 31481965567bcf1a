"""A model that writes many responses at once, each judged while it grows.

One thread owns the model's slots (:mod:`jaxhal.generation.slots`): it reads prompts in
pieces, decodes a few tokens of all rows, and hands out what is new.
"""

import asyncio
import dataclasses
import functools
import threading
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxhal.detectors import Detector
from jaxhal.generation import GREEDY, pieces, requests, slots, stops
from jaxhal.generation.decoding import Decoding, fastest
from jaxhal.generation.pieces import Prompt, doubled
from jaxhal.generation.slots import Size, Slots
from jaxhal.io.checks import at_least
from jaxhal.models.batching import Encoded
from jaxhal.models.lm import LM
from jaxhal.models.mesh import check_one_process
from jaxhal.scoring import verdicts
from jaxhal.scoring.fitting import Fitted
from jaxhal.serve.response import Ended, News, Response, Wish

# Tokens of every row between looks at what was written, and columns of prompts read
# meanwhile, which are as much work.
_STEPS, _COLUMNS = 4, 4 * pieces.PIECE
# Rows and columns for new tokens: of one alone, of a few, of as many as there may be.
_FEW, _NEW = 4, 64
# Responses that wait for a slot.
_WAITING = 256
# Tokens not shown yet where an answer may turn, as guided decoding looks at chunks of
# so many; and how often what was not shown is written.
_HELD, _TRIES = 8, 4


class Busy(RuntimeError):
    """More responses wait than a server should promise."""


class Failed(RuntimeError):
    """A model that could not go on; what was asked may be asked again."""


class _Seen(NamedTuple):
    """What the host looks at after some steps."""

    tokens: Any  # Int[slots new]
    logprob: Any  # Float[slots new]
    written: Any  # Int[slots], tokens that are judged
    live: Any  # Bool[slots]
    scores: Any  # Float[slots], or None
    marks: Any  # Float[slots new], or None


@jax.jit(static_argnames=("how", "judge"))
def _seen(state: Slots, params: Any, how: Decoding, judge: Detector | None) -> _Seen:
    scores = marks = None
    if judge is not None:
        features = slots.features_of(state, how)
        scores = judge.score(params, features)
        marks = judge.tokens and judge.tokens(params, features)
    count = slots.written(state, how)
    return _Seen(state.tokens, state.logprob, count, state.live, scores, marks)


def riding(chosen: Sequence[Fitted]) -> Fitted | None:
    """The best of the detectors that may decide and can judge while a token is
    written.
    """
    return next((o for o in verdicts.ranked(chosen) if _rides(o.detector)), None)


def _rides(detector: Detector) -> bool:
    return detector.reads_rows and all(
        one.rowwise and (one.reads == "logits" or not one.reads_target)
        for one in detector.reducers.values()
    )


class Writer:
    """Writes what is asked of one model, in slots of one decode.

    Args:
      lm: the model.
      detector: judges responses while they grow, such as :func:`riding` finds.
      most: responses written at once.
    """

    def __init__(self, lm: LM, detector: Fitted | None = None, *, most: int = 16):
        at_least(1, most=most)
        check_one_process(lm.params, "serving")
        self.lm, self.detector, self.most = lm, detector, most
        judge = None if detector is None else detector.detector
        self._how = requests.decoding_of(lm, GREEDY, judge and judge.reducers)
        self._model = fastest(lm).bare
        self._slots: Slots | None = None
        self._prefixes = pieces.Prefixes()
        self._waiting: deque[Response] = deque()
        self._checking = 0  # of those to come, whose prompts are looked at
        self._read: tuple[Response, Prompt | None] | None = None
        self._rows: dict[int, Response] = {}
        self._changed, self._closing = threading.Condition(), False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    @property
    def load(self) -> tuple[int, int]:
        """How many responses are being written, and how many wait."""
        return len(self._rows), len(self._waiting) + (self._read is not None)

    def check(self, wish: Wish) -> Encoded:
        """The prompt as tokens; ValueError where the wish cannot be fulfilled."""
        at_least(1, max_tokens=wish.limit)
        stops.checked(self.lm.require_tokenizer(), wish.stop)
        if wish.most is not None and self.detector is None:
            raise ValueError(
                f"no detector judges what {self.lm.name!r} writes, so nothing can stop "
                "at a probability; leave 'stop_on' out"
            )
        if wish.anew and not wish.temperature:
            raise ValueError(
                "what is likeliest is the same each time, so nothing can be written "
                "anew; give a temperature above 0"
            )
        if wish.anew and self.lm.config.delta is not None:
            raise ValueError(
                f"{self.lm.name!r} has layers of linear attention, whose state does "
                "not go back, so nothing can be written anew; stop instead"
            )
        (row,) = requests.encoded(self.lm, [wish.prompt])
        requests.check_room(self.lm, 0, row, wish.limit)
        return row

    async def write(self, wish: Wish) -> AsyncIterator[News | Ended]:
        """A response as it grows; the last of it is how it ended.

        It is begun when the first of it is asked for, and who leaves early frees the
        slot.  Raises ValueError as :meth:`check`, and :class:`Busy`; later
        :class:`Failed`.
        """
        if self._closing:
            raise Busy("the server is stopping")
        if len(self._waiting) + self._checking >= _WAITING:
            raise Busy(f"{_WAITING} responses wait already; try again later")
        self._checking += 1
        try:
            encoded = await asyncio.to_thread(self.check, wish)
        finally:
            self._checking -= 1
        loop = asyncio.get_running_loop()
        return self._told(Response(wish, encoded, self.lm, self.detector, loop))

    async def _told(self, row: Response) -> AsyncIterator[News | Ended]:
        with self._changed:
            if self._closing:
                raise Failed("the server is stopping")
            self._waiting.append(row)
            self._changed.notify()
        try:
            while True:
                news = await row.news.get()
                if isinstance(news, BaseException):
                    raise Failed(f"the model failed: {news}") from news
                yield news
                if isinstance(news, Ended):
                    return
        finally:
            row.left = True
            with self._changed:
                if row in self._waiting:
                    self._waiting.remove(row)

    def close(self) -> None:
        """Ends the thread; what is being written fails."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    # --- the thread -----------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._closing or self._waiting or self._read or self._rows):
                    self._slots = None  # and its memory
                    self._changed.wait()
                if self._closing:
                    break
            try:
                self._round()
            except BaseException as error:
                self._fail(error)
        self._fail(RuntimeError("the server is stopping"))

    def _fail(self, error: BaseException) -> None:
        """Tells everyone, and begins anew."""
        reading = [self._read[0]] if self._read else []
        with self._changed:  # whoever comes now waits for what is begun anew
            told = [*self._rows.values(), *reading, *self._waiting]
            self._waiting.clear()
        self._rows.clear()
        self._read = self._slots = None
        for row in told:
            row.tell(error)

    def _round(self) -> None:
        """A few pieces of prompts, and a few tokens of every row."""
        for at, row in [*self._rows.items()]:
            if row.left:
                self._free(at)
        left = _COLUMNS
        while left > 0 and (read := self._read_on()) is not None:
            left -= read
        if self._rows:
            self._decode()

    def _read_on(self) -> int | None:
        """Reads a piece of the prompt that has waited longest, if a slot is free.

        Returns the columns read, or None where there is nothing to read.
        """
        if self._read is None and len(self._rows) < self.most:
            with self._changed:  # who leaves is taken out meanwhile
                if self._waiting:
                    self._read = self._waiting.popleft(), None
        if self._read is None:
            return None
        row, prompt = self._read
        if prompt is None:
            prompt = pieces.begin(self._model, row.encoded, self._prefixes)
        before = prompt.read
        if not (row.left or prompt.complete):
            limit, pad = row.wish.limit, self._how.pad_id
            prompt = pieces.read_piece(self._model, prompt, limit, pad)
        self._read = row, prompt
        if prompt.complete and not row.left:
            self._prefixes.add(prompt)
            self._enter(row, prompt)
        if row.left or prompt.complete:
            self._read = None
        return prompt.read - before

    def _enter(self, row: Response, prompt: Prompt) -> None:
        state = self._sized(len(self._rows) + 1, prompt.width)
        at = next(at for at in range(state.size.slots) if at not in self._rows)
        wish = row.wish
        self._slots = slots.enter(
            state,
            at,
            prompt,
            limit=wish.limit,
            key=row.key(),
            temperature=wish.temperature,
            top_p=wish.top_p,
        )
        self._rows[at], row.reused = row, prompt.reused

    def _sized(self, rows: int, prompt: int = 0) -> Slots:
        """The slots, with room for so many rows, a prompt, and everyone's next tokens.

        They grow to sizes of which there are few, as each compiles programs of its own.
        """
        counts = [row.count for row in self._rows.values()]
        new = doubled(_NEW, max(counts, default=0) + _STEPS + 1)
        few = min(_FEW, self.most)
        rows = next(n for n in sorted({1, few, self.most}) if n >= rows)
        size = Size(rows, doubled(pieces.PIECE, prompt), new)
        state = self._slots
        if state is None:
            state = slots.empty(self._model, size, self._how)
        elif (size := Size(*map(max, state.size, size))) == state.size:
            return state
        else:
            state = slots.resized(state, jnp.arange(size.slots), size, self._how)
        return slots.laid(self._model, state, self._how)

    def _decode(self) -> None:
        state = self._sized(len(self._rows))
        state = slots.go_on(self._model, state, jnp.asarray(_STEPS), self._how)
        self._slots, one = state, self.detector
        judge, params = (None, None) if one is None else (one.detector, one.params)
        seen = jax.device_get(_seen(state, params, self._how, judge))
        for at, row in [*self._rows.items()]:
            self._look(at, row, seen)

    def _look(self, at: int, row: Response, seen: _Seen) -> None:
        """Tells what is new of a row, and decides what becomes of it."""
        new = slice(row.count, int(seen.written[at]))
        marks = None if seen.marks is None else seen.marks[at, new]
        row.add(seen.tokens[at, new], seen.logprob[at, new], marks)
        if seen.scores is not None and row.count:
            row.score = float(seen.scores[at])
        live, most = bool(seen.live[at]), row.wish.most
        if most is not None and (row.probability or 0.0) >= most:
            row.tries += 1
            if not row.wish.anew or row.tries == _TRIES:
                self._end(at, row, "probability")
                return
            shown = jnp.asarray(row.shown)
            assert self._slots is not None
            self._slots = slots.rewind(self._slots, jnp.asarray(at), shown, row.key())
            row.forget()
            return
        held = _HELD if live and most is not None else 0
        rescored = functools.partial(self._score_of, at)
        if row.show(row.count - held, last=not live, rescored=rescored):
            self._end(at, row, "stop")
        elif not live:
            self._end(at, row, row.ending)

    def _score_of(self, at: int, count: int) -> float | None:
        """The score of a row's first tokens, whose others are left out."""
        state, one = self._slots, self.detector
        if state is None or one is None:
            return None
        ends = {"count": state.count.at[at].set(count)}
        state = dataclasses.replace(state, live=state.live.at[at].set(False), **ends)
        seen = _seen(state, one.params, self._how, one.detector)
        return float(seen.scores[at])

    def _end(self, at: int, row: Response, why: str) -> None:
        prompt = len(row.encoded.prompt_ids)
        said = row.probability, row.report()
        row.tell(Ended(why, prompt, row.reused, row.shown, *said))
        self._free(at)

    def _free(self, at: int) -> None:
        del self._rows[at]
        assert self._slots is not None
        self._slots = slots.free(self._slots, jnp.asarray(at))
