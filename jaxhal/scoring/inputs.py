"""From labelled answers to what detectors decide on: read once, kept for every fit."""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from jaxhal.datasets.spans import token_labels
from jaxhal.detectors import Detector, reads, take, views
from jaxhal.detectors.bulk import Bulk, measured
from jaxhal.features.lookback import WINDOW
from jaxhal.io.showing import quoted
from jaxhal.models.batching import Encoded, bucket
from jaxhal.models.lm import LM
from jaxhal.reading.columns import Column
from jaxhal.reading.parts import response_axes
from jaxhal.reading.store import Store
from jaxhal.reading.units import Part, Unit, has_text, parts_of
from jaxhal.reading.views import read_all
from jaxhal.types import Example, Reducer

# Answers, or parts of answers, whose inputs are computed together.
_CHUNK = 32


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What detectors decide on, for the examples that could be read.

    Attributes:
      examples: those that could be read, in order, or the parts they were cut into.
      errors: why others could not, or why nothing can be said of them, by their number
        in the request.
      rows: the examples as tokens.
      marked: per example ``Bool[response]``, tokens annotated as hallucinated.
      inputs: detector -> pytree, leaves ``[example, ...]``.
      source: where their features are, for what is wanted of a few.
    """

    examples: list[Example]
    errors: dict[int, str]
    rows: list[Encoded]
    marked: list[np.ndarray]
    inputs: dict[str, Any]
    source: "Source"

    @property
    def labels(self) -> Int[np.ndarray, " examples"]:
        """1 hallucinated, 0 grounded."""
        return np.array([example.label for example in self.examples])

    @property
    def groups(self) -> Int[np.ndarray, " examples"]:
        """A number per source."""
        codes: dict[str, int] = {}
        return np.array([codes.setdefault(e.group, len(codes)) for e in self.examples])


def collect(
    lm: LM,
    examples: Sequence[Example],
    detectors: Sequence[Detector],
    store: Store,
    *,
    unit: Unit = "response",
    batch_size: int = 8,
    progress: bool | None = None,
) -> Inputs:
    """Reads answers, or finds them in the store, and makes every detector's inputs.

    With another ``unit`` a row is not an answer but a part of it, and every detector
    that averages over tokens averages over that part.

    Args:
      lm: the model.
      examples: labelled answers.
      detectors: the methods; some need a question beside the context.
      store: where features are kept.
      unit: ``"response"``, or the parts of :func:`jaxhal.reading.units.parts_of`:
        ``"sentence"``, ``"span"`` or ``"window"``.
      batch_size: answers read together.
      progress: show a progress bar; ``None`` shows it on a terminal.

    Raises:
      ValueError: on an example without a label, one that lacks what a method's view of
        it is made of, or with another ``unit`` when a method reads a feature that is no
        series of tokens, or when no answer can be read, cut, or judged.
      TypeError: as :func:`jaxhal.reading.views.viewed`.
    """
    for example in examples:
        if example.label is None:
            raise ValueError(
                f"example {quoted(example.id)} has no label; give 'label' or 'labels'"
            )
    options = {"batch_size": batch_size, "progress": progress}
    if unit != "response":
        _check_cuts(lm, detectors, unit)
    kept, errors, rows, found = read_all(lm, examples, detectors, store, **options)
    if not kept:
        first = next(iter(errors.values()), "there are none")
        raise ValueError(f"none of the {len(examples)} examples can be read: {first}")
    marked = [
        token_labels(row.offsets, examples[n].labels or ())
        for n, row in zip(kept, rows, strict=True)
    ]
    chosen = [examples[n] for n in kept]
    units = [
        Part(number, np.ones(len(row.response_ids), bool), example)
        for number, (example, row) in enumerate(zip(chosen, rows, strict=True))
    ]
    if unit != "response":
        units = [
            part
            for whole, row, known in zip(units, rows, marked, strict=True)
            for part in parts_of(unit, whole, row.offsets, known)
        ]
        if not units:
            raise ValueError(
                f"none of the {len(rows)} answers has the {WINDOW} tokens of a window; "
                "use another unit"
            )
        # A part has its own label; what is marked inside it says nothing more.
        marked = [np.zeros_like(part.tokens) for part in units]
        rows = [rows[part.row] for part in units]
    text = {text for detector in detectors for text in detector.text}
    features = [_Feature(*one) for one in found]
    bulk = Bulk(lm, chosen, store, **options)
    together = measured(detectors, bulk)
    errors = errors | {kept[n]: why for n, why in bulk.errors.items()}
    known = [at for at, part in enumerate(units) if part.row not in bulk.errors]
    if not known:
        first = next(iter(bulk.errors.values()))
        raise ValueError(f"none of the {len(units)} answers can be judged: {first}")
    units = [units[at] for at in known]
    rows, marked = [rows[at] for at in known], [marked[at] for at in known]
    measures = {one for detector in detectors for one in detector.measures}
    together = {one.feature: one.cut(together[one.feature], units) for one in measures}
    source = Source(
        units,
        rows,
        marked,
        features,
        sorted(text, key=lambda one: one[0]),
        together,
    )
    inputs = _inputs(detectors, source)
    chosen = [part.example for part in units]
    return Inputs(chosen, errors, rows, marked, inputs, source)


def _check_cuts(lm: LM, detectors: Sequence[Detector], unit: Unit) -> None:
    """Makes sure that every feature can be cut to the tokens of a part."""
    sets = [reads(detectors), *views(detectors).values()]
    reducers = {name: r for named in sets for name, r in named.items()}
    for name, axes in response_axes(lm, reducers).items():
        if not axes:
            of = [d.name for d in detectors if name in _names(d)]
            raise ValueError(
                f"feature {name!r} belongs to a whole answer and cannot be cut to a "
                f"{unit}; leave out {', '.join(of)}, or use unit 'response'"
            )
    if of := [d.name for d in detectors if not _fits(d, unit)]:
        raise ValueError(
            f"{', '.join(of)} judge a whole answer, which cannot be cut to a {unit}; "
            "leave them out, or use unit 'response'"
        )


def _fits(detector: Detector, unit: Unit) -> bool:
    """Whether what it measures of answers can be cut to the parts of a unit."""
    return all(unit == "sentence" and one.of_sentences for one in detector.measures)


def _names(detector: Detector) -> set[str]:
    """Of everything that a detector reads."""
    pairs = [*detector.reads, *(pair for view in detector.views for pair in view.reads)]
    return {name for name, _ in pairs}


@dataclasses.dataclass(frozen=True)
class _Feature:
    """One feature of every example, as its reducer gives it."""

    name: str
    reducer: Reducer
    column: Column

    def batch(self, parts: Sequence[Part], response: int, size: int) -> np.ndarray:
        """The tokens of some parts padded with zeros, with the axes of `jaxhal.read`.

        A part's tokens stand together whatever lay between them: every detector looks
        at means, sums and extremes over tokens, or at neighbours inside a part.
        """
        values = [self._cut(part) for part in parts]
        first, axes = values[0], self.column.axes
        shape = [response if a in axes else n for a, n in enumerate(first.shape)]
        out = np.zeros([size, *shape], first.dtype)
        for at, value in enumerate(values):
            out[(at, *(slice(n) for n in value.shape))] = value
        return np.moveaxis(out, 0, self.reducer.batch_axis)

    def _cut(self, part: Part) -> np.ndarray:
        value = self.column[part.row]
        if not part.tokens.all():
            for axis in self.column.axes:
                value = np.compress(part.tokens, value, axis)
        return value


@dataclasses.dataclass(frozen=True)
class Source:
    """Features of examples on disk, and how a detector's batches are made of them.

    Attributes:
      parts: the examples, or the parts they were cut into.
      rows: per part, the whole answer as tokens.
      marked: per part, which tokens of the whole response are annotated.
      features: what was read.
      text: numbers computed from an example's text, by feature name.
      measures: what was computed of all answers at once, by feature name, per part.
    """

    parts: Sequence[Part]
    rows: Sequence[Encoded]
    marked: Sequence[np.ndarray]
    features: Sequence[_Feature]
    text: Sequence[tuple[str, Callable[[Example], Any]]]
    measures: Mapping[str, Any]

    def chunks(
        self, numbers: Iterable[int] | None = None
    ) -> Iterator[tuple[list[int], dict[str, np.ndarray]]]:
        """Numbers of parts and their features, ``_CHUNK`` rows, those after them zero.

        Parts of similar length come together, and of these the ones in one file.

        Args:
          numbers: of the parts; all by default.
        """
        alike = defaultdict(list)
        for number in range(len(self.parts)) if numbers is None else numbers:
            alike[bucket(int(self.parts[number].tokens.sum()), 16)].append(number)
        for response, some in sorted(alike.items()):
            if self.features:
                places = self.features[0].column.places
                some.sort(key=lambda n: (places[self.parts[n].row], n))
            for start in range(0, len(some), _CHUNK):
                chunk = some[start : start + _CHUNK]
                yield chunk, self._batch(chunk, response)

    def _batch(self, numbers: Sequence[int], response: int) -> dict[str, np.ndarray]:
        parts = [self.parts[number] for number in numbers]
        batch = {f.name: f.batch(parts, response, _CHUNK) for f in self.features}
        for name in ("valid", "text", "marked"):
            batch[name] = np.zeros((_CHUNK, response), bool)
        for at, (number, part) in enumerate(zip(numbers, parts, strict=True)):
            count, offsets = int(part.tokens.sum()), self.rows[number].offsets
            batch["valid"][at, :count] = True
            batch["text"][at, :count] = has_text(offsets)[part.tokens]
            batch["marked"][at, :count] = self.marked[number][part.tokens]
        for name, function in self.text:
            values = [np.asarray(function(part.example)) for part in parts]
            batch[name] = np.zeros((_CHUNK, *values[0].shape), np.float32)
            batch[name][: len(parts)] = values
        pad = _CHUNK - len(numbers)
        for name, found in self.measures.items():
            batch[name] = jax.tree.map(
                lambda leaf: np.pad(
                    leaf[numbers], [(0, pad)] + [(0, 0)] * (leaf.ndim - 1)
                ),
                found,
            )
        return batch


def _inputs(detectors: Sequence[Detector], source: Source) -> dict[str, Any]:
    """Detector -> inputs; members of an ensemble share theirs with everyone."""
    alone = {d.name: d for d in _flat(detectors)}
    for one in _flat(detectors):
        if alone[one.name] != one:
            raise ValueError(
                f"two detectors are named {one.name!r}; give one another 'name'"
            )
    order, made = [], []
    for numbers, features in source.chunks():
        whole = jax.device_get(_make(tuple(alone.values()), features))
        made.append(take(whole, slice(len(numbers))))
        order += numbers
    known = jax.tree.map(lambda *leaves: _in_order(leaves, order), *made)

    def gathered(detector: Detector) -> Any:
        if not detector.members:
            return known[detector.name]
        return {member.name: gathered(member) for member in detector.members}

    return {detector.name: gathered(detector) for detector in detectors}


def _flat(detectors: Iterable[Detector]) -> Iterator[Detector]:
    """Detectors and members of ensembles, without the ensembles."""
    for detector in detectors:
        if detector.members:
            yield from _flat(detector.members)
        else:
            yield detector


@functools.partial(jax.jit, static_argnums=0)
def _make(detectors: tuple[Detector, ...], features: dict[str, Any]) -> dict[str, Any]:
    return {detector.name: detector.inputs(features) for detector in detectors}


def _in_order(leaves: Sequence[np.ndarray], order: Sequence[int]) -> np.ndarray:
    """Chunks as one array, rows where they belong, short responses padded with 0."""
    shape = np.max([leaf.shape[1:] for leaf in leaves], axis=0).astype(int)
    out = np.zeros((len(order), *shape), leaves[0].dtype)
    start = 0
    for leaf in leaves:
        rows = np.asarray(order[start : start + len(leaf)])
        out[(rows, *(slice(n) for n in leaf.shape[1:]))] = leaf
        start += len(leaf)
    return out
