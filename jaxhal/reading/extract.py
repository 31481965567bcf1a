"""From answers to features: encoded once, read once, handed out in padded batches."""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxhal.capture.forward import plan_reading, read
from jaxhal.datasets.spans import token_labels
from jaxhal.features.base import Feature, OfRewrite, OfText, Reducer, Rewrite
from jaxhal.io.checks import at_least
from jaxhal.io.progress import progress_bar
from jaxhal.io.showing import quoted
from jaxhal.models.batching import (
    Encoded,
    Planned,
    bucket,
    check_length,
    collate,
)
from jaxhal.models.lm import LM
from jaxhal.models.mesh import here
from jaxhal.reading.bulk import Bulk, Measure
from jaxhal.reading.keys import column_name
from jaxhal.reading.parts import Column
from jaxhal.reading.store import Store
from jaxhal.reading.units import Part, Unit, has_text, parts_of
from jaxhal.types import Example

# Rows of a batch that is made of what a cache holds.
_CHUNK = 32


class Kinds(NamedTuple):
    """Features by what they are computed from, by name."""

    own: dict[str, Reducer]
    rewrites: dict[Rewrite, dict[str, Reducer]]
    texts: dict[str, OfText]
    measures: dict[str, Measure]

    @property
    def read(self) -> bool:
        """Whether the reader reads the answers, or writes others to their prompts."""
        return bool(self.own) or any(one.reads for one in self.measures.values())


def kinds(features: Mapping[str, Feature]) -> Kinds:
    """Sorts features by what they are computed from."""
    found = Kinds({}, {}, {}, {})
    for name, feature in features.items():
        match feature:
            case Reducer():
                found.own[name] = feature
            case OfRewrite():
                found.rewrites.setdefault(feature.rewrite, {})[name] = feature.reducer
            case OfText():
                found.texts[name] = feature
            case Measure():
                found.measures[name] = feature
            case _:
                raise TypeError(
                    f"feature {name!r} is {feature!r}; give a jaxhal.Reducer, "
                    "OfRewrite, OfText or Measure"
                )
    return found


def extract(
    lm: LM,
    examples: Sequence[Example],
    features: Mapping[str, Feature],
    *,
    cache: Store | None = None,
    batch_size: int = 8,
    progress: bool | None = None,
) -> "Extraction":
    """Encodes answers for some features; each is computed when its batch is asked for.

    Raises TypeError when a feature of a rewrite runs along the tokens of a response and
    the rewrite has another one.

    Args:
      cache: where features are kept, and found again; ``None`` keeps none.
    """
    at_least(1, batch_size=batch_size)
    found = Extraction(lm, kinds(features), cache, batch_size, progress)
    found.enter(examples)
    return found


def _rewritten(of: Rewrite, example: Example, named: Mapping[str, Reducer]) -> Example:
    """The rewrite, made sure that its features fit the answer's own tokens."""
    made = of(example)
    along = [name for name, reducer in named.items() if "response" in reducer.axes]
    if along and made.response != example.response:
        raise TypeError(
            f"feature {along[0]!r} runs along the tokens of a response, but example "
            f"{quoted(example.id)} is read with another response there, "
            f"{quoted(made.response)}; read one number of the whole response instead"
        )
    return made


@dataclasses.dataclass
class Extraction:
    """Answers, or parts of them, that features are computed of.

    Attributes:
      kept: numbers of the examples that can be read, in order.
      errors: why the others cannot, by number.
      rows: the kept examples as tokens.
      rewritten: their rewrites as tokens.
      numbers: what is computed of their texts.
      parts: what is judged: the kept examples, or parts of them.
      marked: per part ``Bool[response]`` of its whole answer, annotated tokens.
    """

    lm: LM
    kinds: Kinds
    cache: Store | None
    batch_size: int
    progress: bool | None
    kept: list[int] = dataclasses.field(default_factory=list)
    errors: dict[int, str] = dataclasses.field(default_factory=dict)
    rows: list[Encoded] = dataclasses.field(default_factory=list)
    rewritten: list[dict[Rewrite, Encoded]] = dataclasses.field(default_factory=list)
    numbers: list[dict[str, np.ndarray]] = dataclasses.field(default_factory=list)
    parts: list[Part] = dataclasses.field(default_factory=list)
    marked: list[np.ndarray] = dataclasses.field(default_factory=list)

    def enter(self, examples: Sequence[Example]) -> None:
        """Encodes examples, and computes what is of their texts."""
        tokenizer = self.lm.require_tokenizer()
        for number, example in enumerate(examples):
            if not isinstance(example, Example):
                raise TypeError(
                    f"example {number} is a {type(example).__name__}; give a "
                    "jaxhal.types.Example, as jaxhal.datasets.examples makes of rows"
                )
            try:
                row = self.encode(number, example)
                others = {
                    of: tokenizer.encode_example(_rewritten(of, example, named))
                    for of, named in self.kinds.rewrites.items()
                }
                read = [row] if self.kinds.read else []
                for one in (*read, *others.values()):
                    check_length(one, self.lm.config.context_length)
                numbers = {
                    name: np.asarray(of.function(example), np.float32)
                    for name, of in self.kinds.texts.items()
                }
            except ValueError as error:
                self.errors[number] = str(error)
                continue
            whole = np.ones(len(row.response_ids), bool)
            self.parts.append(Part(len(self.rows), whole, example))
            self.marked.append(token_labels(row.offsets, example.labels or ()))
            self.kept.append(number)
            self.rows.append(row)
            self.rewritten.append(others)
            self.numbers.append(numbers)

    def encode(self, number: int, example: Example) -> Encoded:
        """The tokens of an example; ValueError where it cannot be read."""
        del number
        return self.lm.require_tokenizer().encode_example(example)

    @functools.cached_property
    def measured(self) -> tuple[dict[str, Any], dict[int, str]]:
        """What is computed of all kept examples at once, and of which that failed."""
        bulk = self._bulk()
        return {n: one(bulk) for n, one in self.kinds.measures.items()}, bulk.errors

    def prepare(self) -> None:
        """Puts into the cache what is drawn and read, and asks no judge."""
        bulk = self._bulk()
        for measure in self.kinds.measures.values():
            measure.prepare(bulk)
        self.columns  # noqa: B018

    def _bulk(self) -> Bulk:
        examples = [part.example for part in self.parts]
        return Bulk(self.lm, examples, self.cache, self.batch_size, self.progress)

    def cut(self, unit: Unit) -> "Extraction":
        """The same answers in parts; without those that a measure failed of.

        Parts are made of what a cache holds; every feature has to run along tokens, or
        be a measure of sentences.
        """
        values, failed = self.measured
        pairs = [*zip(self.parts, self.marked, strict=True)]
        if unit != "response":
            # A part has its own label; what is marked inside it says nothing more.
            pairs = [
                (part, np.zeros_like(part.tokens))
                for whole, known in pairs
                for part in parts_of(unit, whole, self.rows[whole.row].offsets, known)
            ]
        good = [pair for pair in pairs if pair[0].row not in failed]
        made = dataclasses.replace(
            self,
            errors=self.errors | {self.kept[at]: why for at, why in failed.items()},
            parts=[part for part, _ in good],
            marked=[marked for _, marked in good],
        )
        measures = self.kinds.measures.items()
        made.measured = {n: m.cut(values[n], made.parts) for n, m in measures}, {}
        return made

    def batches(
        self, wanted: Container[int] | None = None
    ) -> Iterator[tuple[list[int], dict[str, Any]]]:
        """Numbers of parts and their features, padded together, as they are computed.

        Features have the axes of :func:`jaxhal.read`.  Beside them stand, as
        ``Bool[batch response]``, ``"valid"``, real tokens; ``"text"``, those of them
        that have text, which the end of the sequence has not; and ``"marked"``,
        annotated ones.  Rows after those of the parts are zero.

        Args:
          wanted: numbers of parts; batches of none of them are passed over.  What is
            read together does not depend on it, so neither do the last digits.
        """
        wanted = range(len(self.parts)) if wanted is None else wanted
        groups = self._read(wanted) if self.cache is None else self._kept(wanted)
        for numbers, response, size, features in groups:
            masks = np.zeros((3, size, response), bool)
            features |= zip(("valid", "text", "marked"), masks, strict=True)
            parts = [self.parts[number] for number in numbers]
            for at, (number, part) in enumerate(zip(numbers, parts, strict=True)):
                text = has_text(self.rows[part.row].offsets)
                own = np.stack([part.tokens, text, self.marked[number]])
                masks[:, at, : part.tokens.sum()] = own[:, part.tokens]
            for name in self.kinds.texts:
                values = np.stack([self._number(name, part) for part in parts])
                features[name] = _filled(values, size)
            for name, found in self.measured[0].items():
                features[name] = jax.tree.map(
                    lambda leaf, some=numbers, n=size: _filled(leaf[some], n), found
                )
            yield numbers, features

    def _number(self, name: str, part: Part) -> np.ndarray:
        if part.tokens.all():
            return self.numbers[part.row][name]
        return np.asarray(self.kinds.texts[name].function(part.example), np.float32)

    # --- without a cache ------------------------------------------------------------

    def _read(
        self, wanted: Container[int]
    ) -> Iterator[tuple[list[int], int, int, Any]]:
        planned = plan_reading(self.lm, self.rows, self.batch_size)
        todo = [group for group in planned if any(at in wanted for at in group.rows)]
        if todo:
            self.measured  # noqa: B018  (before the bar of what is read)
        total = sum(len(group.rows) for group in todo)
        with progress_bar(total, "scoring", "answer", self.progress) as bar:
            for group in todo:
                features = self._read_group(group)
                yield group.rows, group.response_length, group.size, features
                bar.update(len(group.rows))

    def _read_group(self, group: Planned) -> dict[str, Any]:
        features: dict[str, Any] = {}
        if self.kinds.own:
            features |= self._read_rows(
                [self.rows[at] for at in group.rows],
                self.kinds.own,
                group,
                (group.prompt_length, group.response_length),
            )
        for of, named in self.kinds.rewrites.items():
            some = [self.rewritten[at][of] for at in group.rows]
            along = any("response" in reducer.axes for reducer in named.values())
            # Under names of their own, so that rewrites which differ in these alone
            # compile once.
            own_names = {column_name(r): r for r in named.values()}
            columns = None, group.response_length if along else None
            seen = self._read_rows(some, own_names, group, columns)
            features |= {name: seen[column_name(r)] for name, r in named.items()}
        return features

    def _read_rows(
        self,
        rows: list[Encoded],
        reducers: dict[str, Reducer],
        group: Planned,
        columns: tuple[int | None, int | None],
    ) -> dict[str, Any]:
        pad_id, copies = self.lm.require_tokenizer().pad_id, group.copies
        prompts = [row.prompt_ids.tobytes() for row in rows]
        if prompts != [one for one in prompts[::copies] for _ in range(copies)]:
            copies = 1
        batch = collate(rows, pad_id, *columns, group.size)
        return here(read(self.lm, batch, reducers, copies=copies))

    # --- from a cache ---------------------------------------------------------------

    @functools.cached_property
    def columns(self) -> dict[str, tuple[Reducer, Column]]:
        """Every reducer's feature of the kept examples, in a cache."""
        assert self.cache is not None
        options: Any = {"batch_size": self.batch_size, "progress": self.progress}
        found: dict[str, tuple[Reducer, Column]] = {}
        if not self.rows:
            return found
        if self.kinds.own:
            own = self.cache.columns(self.lm, self.rows, self.kinds.own, **options)
            found |= {name: (r, own[name]) for name, r in self.kinds.own.items()}
        # Rewrites of which the same is read are read together: they may share prompts.
        alike: dict[tuple[str, ...], list[Rewrite]] = defaultdict(list)
        for of, named in self.kinds.rewrites.items():
            alike[tuple(sorted({column_name(r) for r in named.values()}))].append(of)
        for together in alike.values():
            rows = [others[of] for of in together for others in self.rewritten]
            first = self.kinds.rewrites[together[0]].values()
            reducers = {column_name(r): r for r in first}
            seen = self.cache.columns(self.lm, rows, reducers, **options)
            for at, of in enumerate(together):
                own_rows = slice(at * len(self.rows), (at + 1) * len(self.rows))
                for name, reducer in self.kinds.rewrites[of].items():
                    column = seen[column_name(reducer)][own_rows]
                    found[name] = reducer, column
        return found

    def _kept(
        self, wanted: Container[int]
    ) -> Iterator[tuple[list[int], int, int, Any]]:
        """Parts of similar length together, and of these the ones in one file."""
        alike = defaultdict(list)
        for number, part in enumerate(self.parts):
            if number in wanted:
                alike[bucket(int(part.tokens.sum()), 16)].append(number)
        places = [column.places for _, column in self.columns.values()][:1]
        for response, some in sorted(alike.items()):
            for place in places:
                some.sort(key=lambda n, at=place: (at[self.parts[n].row], n))
            for start in range(0, len(some), _CHUNK):
                numbers = some[start : start + _CHUNK]
                features = {
                    name: self._padded(reducer, column, numbers, response)
                    for name, (reducer, column) in self.columns.items()
                }
                yield numbers, response, _CHUNK, features

    def _padded(
        self, reducer: Reducer, column: Column, numbers: Sequence[int], response: int
    ) -> np.ndarray:
        """The tokens of some parts padded with zeros, with the axes of `jaxhal.read`.

        A part's tokens stand together whatever lay between them: every detector looks
        at means, sums and extremes over tokens, or at neighbours inside a part.
        """
        values = [_cut(column, self.parts[number]) for number in numbers]
        first, axes = values[0], column.axes
        shape = [response if a in axes else n for a, n in enumerate(first.shape)]
        out = np.zeros([_CHUNK, *shape], first.dtype)
        for at, value in enumerate(values):
            out[(at, *(slice(n) for n in value.shape))] = value
        return np.moveaxis(out, 0, reducer.batch_axis)


def _cut(column: Column, part: Part) -> np.ndarray:
    value = column[part.row]
    if not part.tokens.all():
        for axis in column.axes:
            value = np.compress(part.tokens, value, axis)
    return value


def _filled(values: np.ndarray, rows: int) -> np.ndarray:
    """With rows of zeros behind, which only fill a batch."""
    pad = [(0, rows - len(values)), *[(0, 0)] * (values.ndim - 1)]
    return np.pad(values, pad)
