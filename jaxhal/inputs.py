"""From labelled answers to what detectors decide on: read once, kept for every fit."""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from jaxhal.datasets.spans import token_labels
from jaxhal.detectors import Detector, reads, take
from jaxhal.models.batching import Encoded, bucket
from jaxhal.models.lm import LM
from jaxhal.spans import Part, Unit, parts_of
from jaxhal.store import Store, Stored
from jaxhal.types import Example, Reducer

# Answers whose inputs are computed together.
_CHUNK = 32


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What detectors decide on, for the examples that could be read.

    Attributes:
      examples: those that could be read, in order, or the parts they were cut into.
      errors: why others could not, by their number in the request.
      rows: the examples as tokens.
      marked: per example ``Bool[response]``, tokens annotated as hallucinated.
      inputs: detector -> pytree, leaves ``[example, ...]``.
    """

    examples: list[Example]
    errors: dict[int, str]
    rows: list[Encoded]
    marked: list[np.ndarray]
    inputs: dict[str, Any]

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
      detectors: the methods; those that read after the question alone need one.
      store: where features are kept.
      unit: ``"response"``, or the parts of :func:`jaxhal.spans.parts_of`: ``"span"`` or
        ``"window"``.
      batch_size: answers read together.
      progress: show a progress bar; ``None`` shows it on a terminal.

    Raises:
      ValueError: on an example without a label, or one that a method needs a question
        of and that has none.
    """
    for example in examples:
        if example.label is None:
            raise ValueError(
                f"example {example.id!r} has no label; give 'label' or 'labels'"
            )
    options = {"batch_size": batch_size, "progress": progress}
    opened, closed = reads(detectors), reads(detectors, closed_book=True)
    parts: list[tuple[Stored, dict[str, Reducer]]] = []
    if opened:
        parts.append((store.read(lm, examples, opened, **options), opened))
    if closed:
        asked = [closed_book(example) for example in examples]
        parts.append((store.read(lm, asked, closed, **options), closed))
    if not parts:
        raise ValueError("none of the detectors reads the model; name one that does")
    errors = {k: v for stored, _ in parts for k, v in stored.errors.items()}
    kept = [n for n in range(len(examples)) if n not in errors]
    encoded = dict(zip(parts[0][0].kept, parts[0][0].rows, strict=True))
    rows = [encoded[n] for n in kept]
    marked = [
        token_labels(row.offsets, examples[n].labels or ())
        for n, row in zip(kept, rows, strict=True)
    ]
    columns = []
    for stored, reducers in parts:
        at = {n: index for index, n in enumerate(stored.kept)}
        columns += [
            _Column(
                name,
                reducer,
                stored.axes[name],
                [stored.features[name][at[n]] for n in kept],
            )
            for name, reducer in reducers.items()
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
        # A part has its own label; what is marked inside it says nothing more.
        marked = [np.zeros_like(part.tokens) for part in units]
        rows = [rows[part.row] for part in units]
    inputs = _inputs(tuple(detectors), units, marked, columns)
    return Inputs([part.example for part in units], errors, rows, marked, inputs)


def closed_book(example: Example) -> Example:
    """The same response after its question alone, or after a prompt without context.

    Raises:
      ValueError: when nothing but the context was given.
    """
    prompt = example.question
    if not prompt and example.prompt is not None and example.context:
        prompt = example.prompt.replace(example.context, "")
    if not prompt or not prompt.strip():
        raise ValueError(
            f"example {example.id!r} has no question apart from its context, which the "
            "context gain compares with; give 'question'"
        )
    return Example(example.response, prompt=prompt, id=example.id)


@dataclasses.dataclass(frozen=True)
class _Column:
    """One feature of every example, and which of its axes run along the response."""

    name: str
    reducer: Reducer
    axes: list[int]
    values: list[np.ndarray]

    def batch(self, rows: Sequence[int], response: int, size: int) -> np.ndarray:
        """Some examples padded with zeros, with the axis of ``jaxhal.read``."""
        first = self.values[rows[0]]
        shape = [response if a in self.axes else n for a, n in enumerate(first.shape)]
        out = np.zeros([size, *shape], first.dtype)
        for at, row in enumerate(rows):
            value = self.values[row]
            out[(at, *(slice(n) for n in value.shape))] = value
        return np.moveaxis(out, 0, 0 if self.reducer.reads == "logits" else 1)


def _inputs(
    detectors: tuple[Detector, ...],
    units: Sequence[Part],
    marked: Sequence[np.ndarray],
    columns: Sequence[_Column],
) -> dict[str, Any]:
    texts = {
        name: np.stack([np.asarray(function(u.example), np.float32) for u in units])
        for name, function in {text for d in detectors for text in d.text}
    }
    alike = defaultdict(list)
    for number, part in enumerate(units):
        alike[bucket(len(part.tokens), 16)].append(number)
    order, chunks = [], []
    for response, numbers in sorted(alike.items()):
        for start in range(0, len(numbers), _CHUNK):
            some = numbers[start : start + _CHUNK]
            of = [units[number].row for number in some]
            features = {c.name: c.batch(of, response, _CHUNK) for c in columns}
            features["valid"] = np.zeros((_CHUNK, response), bool)
            features["marked"] = np.zeros((_CHUNK, response), bool)
            for at, number in enumerate(some):
                tokens = units[number].tokens
                features["valid"][at, : len(tokens)] = tokens
                features["marked"][at, : len(marked[number])] = marked[number]
            for name, values in texts.items():
                whole = np.zeros((_CHUNK, *values.shape[1:]), np.float32)
                whole[: len(some)] = values[some]
                features[name] = whole
            made = jax.device_get(_make(detectors, features))
            chunks.append(take(made, slice(len(some))))
            order += some
    back = np.argsort(order)
    return jax.tree.map(lambda *leaves: _join(leaves)[back], *chunks)


@functools.partial(jax.jit, static_argnums=0)
def _make(detectors: tuple[Detector, ...], features: dict[str, Any]) -> dict[str, Any]:
    return {detector.name: detector.inputs(features) for detector in detectors}


def _join(leaves: Sequence[np.ndarray]) -> np.ndarray:
    """Chunks one below the other, the shorter responses padded with zeros."""
    shape = np.max([leaf.shape[1:] for leaf in leaves], axis=0)
    padded = [
        np.pad(
            leaf,
            [(0, 0), *((0, n - m) for n, m in zip(shape, leaf.shape[1:], strict=True))],
        )
        for leaf in leaves
    ]
    return np.concatenate(padded)
