"""What detectors compute of many answers at once, beside reading them."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from jaxhal.capture.forward import read_rows
from jaxhal.features.base import Feature, Reducer
from jaxhal.io.showing import quoted
from jaxhal.llm.endpoint import NoReply
from jaxhal.models.batching import check_length
from jaxhal.models.lm import LM
from jaxhal.reading.samples import Draw, Sample, TooFew, draw, lacking
from jaxhal.reading.store import Store
from jaxhal.reading.units import Part
from jaxhal.types import Example

# Whose samples are written together.
_PROMPTS = 4


@dataclasses.dataclass(eq=False)
class Bulk:
    """Answers whose measures are wanted, and what has been found out for them so far.

    Attributes:
      store: where samples and features are kept; ``None`` keeps nothing.
      errors: why some answers cannot be judged, by number.
    """

    lm: LM
    examples: Sequence[Example]
    store: Store | None = None
    batch_size: int = 8
    progress: bool | None = None
    errors: dict[int, str] = dataclasses.field(default_factory=dict)
    _drawn: dict[Draw, list[list[Sample]]] = dataclasses.field(default_factory=dict)

    def judged(
        self,
        judge: Callable[[Sequence[Any]], Sequence[Any]],
        asked: Sequence[Any],
    ) -> list[Any]:
        """What a judge says of one item an answer, ``None`` where it can say nothing.

        All at once, for that is cheaper; where an endpoint has no reply of use, or a
        text is too long, answer by answer, so that the error is that of one answer.
        Replies are kept, so only what failed is asked again.
        """
        try:
            return list(judge(asked))
        except (NoReply, ValueError):
            pass
        found: list[Any] = []
        for number, one in enumerate(asked):
            try:
                found += judge([one])
            except (NoReply, ValueError) as error:
                self._fail(number, error)
                found.append(None)
        return found

    def refuse(self, which: Iterable[bool], why: str) -> None:
        """Answers that cannot be judged, and why."""
        for number, refused in enumerate(which):
            if refused:
                self._fail(number, why)

    def _fail(self, number: int, why: object) -> None:
        where = f"example {quoted(self.examples[number].id)}"
        self.errors.setdefault(number, f"{where}: {why}")

    def samples(self, how: Draw) -> list[list[Sample]]:
        """Of each answer's prompt, the same for everyone who asks for the same.

        Those of a prompt that leaves no room for them are empty, and so are those of
        an answer that comes with too few, and all where these answers are too few to
        clip them by; the answer is in error.
        """
        if how not in self._drawn:
            unfit = [self._unfit(example, how) for example in self.examples]
            try:
                drawn = draw(
                    self.lm,
                    [e for e, why in zip(self.examples, unfit, strict=True) if not why],
                    how,
                    self.store and self.store.root,
                    share=self.store and self.store.share,
                    # Reading weights costs as much for a few rows as for one.
                    batch_size=max(self.batch_size, _PROMPTS * how.n),
                    progress=self.progress,
                )
            except TooFew as error:
                unfit, drawn = [why or str(error) for why in unfit], []
            for number, why in enumerate(unfit):
                if why:
                    self._fail(number, why)
            none, rest = [Sample("", 0.0, 0)] * how.n, iter(drawn)
            self._drawn[how] = [none if why else next(rest) for why in unfit]
        return self._drawn[how]

    def _unfit(self, example: Example, how: Draw) -> str:
        """Why an answer has no samples; empty where it has, or there is room for."""
        if how.given:
            why = lacking(example, how.n)
            return f"it {why}" if why else ""
        most = self.lm.config.context_length
        row = self.lm.require_tokenizer().encode_prompt(example)
        if len(row.prompt_ids) + how.max_new_tokens <= most:
            return ""
        return (
            f"its prompt has {len(row.prompt_ids)} tokens, and samples of up to "
            f"{how.max_new_tokens} are over the reader's context of {most}; lower "
            "max_new_tokens"
        )

    def read_samples(
        self, how: Draw, reducer: Reducer, shape: tuple[int, ...]
    ) -> tuple[Float[np.ndarray, "examples samples *feature"], Bool[np.ndarray, "..."]]:
        """A feature of every sample, read as an answer, and which samples there are.

        A sample without a visible character is missing, and so is one that cannot be
        read; their features are zero, of the ``shape`` given.
        """
        tokenizer, rows, places = self.lm.require_tokenizer(), [], []
        unknown: Any = {"labels": None, "label": None, "id": ""}
        for number, some in enumerate(self.samples(how)):
            for at, sample in enumerate(some):
                if not sample.text.strip():
                    continue
                one = self.examples[number]
                one = dataclasses.replace(one, response=sample.text, **unknown)
                # A text may make more tokens than were drawn, too many then.
                with contextlib.suppress(ValueError):
                    row = tokenizer.encode_example(one)
                    check_length(row, self.lm.config.context_length)
                    rows.append(row)
                    places.append((number, at))
        options: Any = {"batch_size": self.batch_size, "progress": self.progress}
        if self.store is None:
            found = read_rows(self.lm, rows, reducer, batch_size=self.batch_size)
        else:
            found = self.store.columns(self.lm, rows, {"it": reducer}, **options)["it"]
        values = np.zeros((len(self.examples), how.n, *shape), np.float32)
        valid = np.zeros(values.shape[:2], bool)
        for place, value in zip(places, found, strict=True):
            values[place], valid[place] = value, True
        return values, valid


@dataclasses.dataclass(frozen=True)
class Measure(Feature):
    """A number, or arrays of numbers, for each of many answers; subclass it.

    A measure is a frozen dataclass: equal ones are computed once, and the feature is
    named after it.
    """

    #: Whether it can be cut to one sentence of an answer.
    of_sentences: ClassVar[bool] = False

    @property
    def by(self) -> str:
        """What else than the reader decides, in words, where that can be chosen."""
        return ""

    @property
    def reads(self) -> bool:
        """Whether the reader reads or writes for it, so that answers have to fit it."""
        return True

    @property
    def feature(self) -> str:
        """Its name among the features."""
        return repr(self)

    def __call__(self, bulk: Bulk) -> Any:
        """A pytree of arrays that lead with ``examples``; see :meth:`Bulk.judged`."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__(bulk)")

    def prepare(self, bulk: Bulk) -> None:
        """Puts into the store what it looks at, and asks no judge: its ``draw``."""
        how = getattr(self, "draw", None)
        if how is not None:
            bulk.samples(how)

    def cut(self, values: Any, parts: Sequence[Part]) -> Any:
        """Of answers, or of parts of them, what was computed of all answers."""
        rows = [part.row for part in parts]
        return jax.tree.map(lambda leaf: leaf[rows], values)


class OfTokens(Measure):
    """A number for each token of each answer, ``[examples response]``."""

    #: Of the numbers, and which stands where an answer has no more tokens.
    dtype: ClassVar[Any] = np.float32
    beyond: ClassVar[int] = 0

    @property
    def axes(self) -> tuple[str, ...]:
        return ("response",)

    def cut(self, values: Any, parts: Sequence[Part]) -> np.ndarray:
        of_parts = []
        for part in parts:
            where = np.flatnonzero(part.tokens)
            of_parts.append(values[part.row, where[where < values.shape[1]]])
        return self.padded(of_parts, values.shape[1])

    def padded(self, rows: Sequence[np.ndarray], length: int) -> np.ndarray:
        """Values of some answers, each with as many as it has tokens."""
        found = np.full((len(rows), length), self.beyond, self.dtype)
        for row, some in zip(found, rows, strict=True):
            row[: len(some)] = some
        return found

    def along(self, features: Mapping[str, Any]) -> Any:
        """Its values in a batch: all are as long as the longest, a batch as its own."""
        values, length = features[self.feature], features["valid"].shape[1]
        values = values[:, :length]
        missing = [(0, 0), (0, length - values.shape[1])]
        return jnp.pad(values, missing, constant_values=self.beyond)
