"""One response that a server writes: its tokens, its text, and what is said of it."""

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Key

from jaxhal.generation import stops
from jaxhal.models.batching import Encoded
from jaxhal.models.lm import LM
from jaxhal.reporting.report import Report
from jaxhal.scoring import detection
from jaxhal.scoring.detection import BatchScores
from jaxhal.scoring.fitting import Fitted
from jaxhal.types import Example


@dataclasses.dataclass(frozen=True)
class Wish:
    """What is to be written, and how.

    Attributes:
      prompt: an example whose response is not looked at.
      limit: the most tokens.
      temperature, top_p: as :class:`jaxhal.generation.Sampling` has them.
      seed: of chance; ``None`` draws one.
      stop: texts that end the response.
      most: the probability of a hallucination with which a response goes no further;
        its last tokens are shown later then.
      anew: what was not shown is then written again, up to three times.
    """

    prompt: Example
    limit: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    most: float | None = None
    anew: bool = False


class Written(NamedTuple):
    """A token: what it adds to the text, and how suspicious it is."""

    id: int
    text: str
    logprob: float  # under the model's own distribution, in nats
    score: float | None  # in [0, 1], where the detector scores tokens


class News(NamedTuple):
    """What is new of a response: tokens, and the probability with all so far."""

    tokens: list[Written]
    probability: float | None


class Ended(NamedTuple):
    """Why a response ends, what it took, and the report on it where one can be made."""

    why: str  # "eos", "stop", "length", or "probability" where it may not go on
    prompt_tokens: int
    reused: int  # of them, which were read with another prompt
    tokens: int
    probability: float | None  # of a hallucination, of what was written, shown or not
    report: Report | None


class Response:
    """A response in the making, of which ``shown`` tokens were told."""

    def __init__(
        self,
        wish: Wish,
        encoded: Encoded,
        lm: LM,
        detector: Fitted | None,
        loop: asyncio.AbstractEventLoop,
    ):
        self.wish, self.encoded = wish, encoded
        self.news: asyncio.Queue[Any] = asyncio.Queue()
        self.left = False  # nobody waits for it any more
        self.reused = 0  # tokens of the prompt that were read with another
        self.shown, self.tries, self.score = 0, 0, 0.0
        self._lm, self._detector, self._loop = lm, detector, loop
        self._tokenizer = lm.require_tokenizer()
        self._seed = secrets.randbits(32) if wish.seed is None else wish.seed
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._marks: list[float] | None = None
        self._said = ""
        self._ends: list[int] = []  # characters up to the end of each shown token

    @property
    def count(self) -> int:
        """Tokens that were added."""
        return len(self._ids)

    def key(self) -> Key[Array, ""]:
        """Of chance, another one for each try; the first is that which the first
        response to the first prompt of :func:`jaxhal.generate` has.
        """
        key = jax.random.key(self._seed)
        for number in (0, 0, self.tries)[: 2 + bool(self.tries)]:
            key = jax.random.fold_in(key, number)
        return key

    @property
    def probability(self) -> float | None:
        """Of a hallucination, with all tokens so far."""
        if self._detector is None or not self._ids:
            return None
        return float(self._detector.probabilities([self.score])[0])

    @property
    def ending(self) -> stops.Stopped:
        """What ended the tokens."""
        ended = self._ids and self._ids[-1] in self._tokenizer.stop_ids
        return "eos" if ended else "length"

    def add(
        self, ids: np.ndarray, logprobs: np.ndarray, marks: np.ndarray | None
    ) -> None:
        """Takes the next tokens."""
        self._ids += ids.tolist()
        self._logprobs += logprobs.tolist()
        if marks is not None:
            self._marks = [*(self._marks or ()), *marks.tolist()]

    def forget(self) -> None:
        """Leaves out the tokens that were not shown."""
        del self._ids[self.shown :], self._logprobs[self.shown :]
        if self._marks is not None:
            del self._marks[self.shown :]

    def show(
        self, upto: int, last: bool, rescored: Callable[[int], float | None]
    ) -> bool:
        """Tells the tokens up to a number; whether a stop string came up in them.

        Args:
          last: no token follows the last one.
          rescored: the score of so many tokens alone, where a stop string leaves out
            some that were judged.
        """
        tokens, stopped = [], False
        for at in range(self.shown, upto):
            text = self._tokenizer.decode(self._ids[: at + 1], skip_special=True)
            cut = stops.first(text, self.wish.stop)
            if stopped := cut is not None:
                text = text[:cut]
            elif not (last and at == self.count - 1):
                text = text[: stops.settled(text, self.wish.stop)]
            added = text[len(self._said) :]
            self._said = max(self._said, text, key=len)
            self._ends.append(len(self._said))
            mark = None if self._marks is None else self._marks[at]
            tokens.append(Written(self._ids[at], added, self._logprobs[at], mark))
            if stopped:
                break
        self.shown += len(tokens)
        if stopped and self.shown < self.count:
            self.score = rescored(self.shown)
        if tokens:
            self.tell(News(tokens, self.probability))
        return stopped

    def report(self) -> Report | None:
        """What is said of the text that was told; of blank text nothing."""
        one = self._detector
        if one is None or not self._said.strip():
            return None
        name, example = one.detector.name, self.wish.prompt
        example = dataclasses.replace(example, response=self._said)
        row = dataclasses.replace(
            self.encoded,
            response_ids=np.asarray(self._ids[: self.shown], np.int32),
            offsets=offsets_of(self._ends),
        )
        marks = {} if self._marks is None else {name: np.asarray([self._marks])}
        judged = BatchScores({name: np.asarray([self.score])}, marks, {})
        return detection.report([one], self._lm, example, row, judged, 0).checked()

    def tell(self, news: News | Ended | BaseException) -> None:
        """Hands something to whoever waits, from another thread."""
        with contextlib.suppress(RuntimeError):  # the loop ended before this one
            self._loop.call_soon_threadsafe(self.news.put_nowait, news)


def offsets_of(ends: Sequence[int]) -> np.ndarray:
    """``Int[tokens 2]``: characters of each token, by the ends of what each settles.

    Tokens that settle none are in the span of the next that does.

    >>> offsets_of([2, 2, 5, 5]).tolist()
    [[0, 2], [2, 5], [2, 5], [5, 5]]
    """
    starts = [0, *ends[:-1]]
    found = np.array([starts, ends], np.int32).T.reshape(-1, 2)
    for at in range(len(found) - 2, -1, -1):
        start, end = found[at]
        if start == end:
            found[at, 1] = found[at + 1, 1]
    return found
