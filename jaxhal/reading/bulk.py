"""What detectors compute of many answers at once, beside reading them.

Samples of the reader's own answers, entailment between texts: numbers that need other
models or other answers, and pay off when everything is asked for together.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
from jaxtyping import Bool, Float

from jaxhal.capture.forward import read_rows
from jaxhal.features.base import Feature, Reducer
from jaxhal.llm.endpoint import NoReply
from jaxhal.models.lm import LM
from jaxhal.reading.samples import Draw, Sample, draw, lacking
from jaxhal.reading.store import Store, encode
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
        """What a judge says of each answer, ``None`` where it can say nothing.

        All at once, for that is cheaper; where an endpoint has no reply of use, or a
        text is too long, answer by answer, so that the error is that of one answer.
        Replies are kept, so only what failed is asked again.

        Args:
          judge: ``what is asked of some answers -> what it says of each``.
          asked: one item an answer.
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
        where = f"example {self.examples[number].id!r}"
        self.errors.setdefault(number, f"{where}: {why}")

    def samples(self, how: Draw) -> list[list[Sample]]:
        """Of each answer's prompt, the same for everyone who asks for the same.

        Those of a prompt that leaves no room for them are empty, and so are those of
        an answer that comes with too few; the answer is in error.
        """
        if how not in self._drawn:
            root: Path | None = None if self.store is None else self.store.root
            fits = self._fits(how)
            drawn = draw(
                self.lm,
                [one for one, fit in zip(self.examples, fits, strict=True) if fit],
                how,
                root,
                # Reading weights costs as much for a few rows as for one.
                batch_size=max(self.batch_size, _PROMPTS * how.n),
                progress=self.progress,
            )
            none, rest = [Sample("", 0.0, 0)] * how.n, iter(drawn)
            self._drawn[how] = [next(rest) if fit else none for fit in fits]
        return self._drawn[how]

    def _fits(self, how: Draw) -> list[bool]:
        """Whether there are, or the context has room for, samples of each answer."""
        if how.given:
            reasons = [lacking(example, how.n) for example in self.examples]
            for number, why in enumerate(reasons):
                if why:
                    self._fail(number, f"it {why}")
            return [not why for why in reasons]
        room = self.lm.config.context_length - how.max_new_tokens
        tokenizer = self.lm.require_tokenizer()
        lengths = [len(tokenizer.encode_prompt(e).prompt_ids) for e in self.examples]
        for number, length in enumerate(lengths):
            if length > room:
                self._fail(
                    number,
                    f"its prompt has {length} tokens, and samples of up to "
                    f"{how.max_new_tokens} are over the reader's context of "
                    f"{self.lm.config.context_length}; lower max_new_tokens",
                )
        return [length <= room for length in lengths]

    def read_samples(
        self, how: Draw, reducer: Reducer, shape: tuple[int, ...]
    ) -> tuple[Float[np.ndarray, "examples samples *feature"], Bool[np.ndarray, "..."]]:
        """A feature of every sample, read as an answer, and which samples there are.

        A sample without a visible character is missing, and so is one that cannot be
        read; their features are zero, of the ``shape`` given.
        """
        asked = [
            (number, at, dataclasses.replace(_bare(example), response=sample.text))
            for number, example in enumerate(self.examples)
            for at, sample in enumerate(self.samples(how)[number])
            if sample.text.strip()
        ]
        found = self._read([one for _, _, one in asked], reducer)
        values = np.zeros((len(self.examples), how.n, *shape), np.float32)
        valid = np.zeros(values.shape[:2], bool)
        for (number, at, _), value in zip(asked, found, strict=True):
            if value is not None:
                values[number, at], valid[number, at] = value, True
        return values, valid

    def _read(
        self, examples: Sequence[Example], reducer: Reducer
    ) -> list[np.ndarray | None]:
        found: list[np.ndarray | None] = [None] * len(examples)
        if self.store is not None:
            how: Any = {"batch_size": self.batch_size, "progress": self.progress}
            stored = self.store.read(self.lm, examples, {"feature": reducer}, **how)
            for place, number in enumerate(stored.kept):
                found[number] = stored.features["feature"][place]
            return found
        # A text may make more tokens than were drawn, too many then.
        kept, _, rows = encode(self.lm, examples)
        values = read_rows(self.lm, rows, reducer, batch_size=self.batch_size)
        for number, value in zip(kept, values, strict=True):
            found[number] = value
        return found


def _bare(example: Example) -> Example:
    """Without what is known of its response, which another one takes the place of."""
    return dataclasses.replace(example, labels=None, label=None, id="")


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
    def feature(self) -> str:
        """Its name among the features."""
        return repr(self)

    def __call__(self, bulk: Bulk) -> Any:
        """A pytree of arrays that lead with ``examples``; see :meth:`Bulk.judged`."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__(bulk)")

    def cut(self, values: Any, parts: Sequence[Part]) -> Any:
        """Of answers, or of parts of them, what was computed of all answers."""
        rows = [part.row for part in parts]
        return jax.tree.map(lambda leaf: leaf[rows], values)
