"""From labelled answers to what detectors decide on, and detectors fitted to a part."""

import dataclasses
import functools
import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Int

from jaxhal.detectors import Detector, Targets, features_of, take
from jaxhal.detectors.series import Ragged, Series, aligned_zeros
from jaxhal.evaluation.checks import group_codes
from jaxhal.evaluation.prevalence import adapted
from jaxhal.features.base import OfText
from jaxhal.features.lookback import WINDOW
from jaxhal.io.progress import Bar, note
from jaxhal.io.showing import quoted
from jaxhal.models.batching import Encoded
from jaxhal.models.config import ATTENTION
from jaxhal.models.lm import LM
from jaxhal.reading.bulk import Measure, OfTokens
from jaxhal.reading.extract import Extraction, extract
from jaxhal.reading.store import Store
from jaxhal.reading.units import Unit
from jaxhal.scoring.fitting import Fitted, fit
from jaxhal.types import Example

if TYPE_CHECKING:
    import pandas as pd


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What detectors decide on, for the examples that could be read.

    Attributes:
      inputs: detector -> pytree, leaves ``[example, ...]``, or without padding
        (:class:`~jaxhal.detectors.series.Ragged`) what has values of every token.
      source: the answers with their features, for what is wanted of a few.
    """

    inputs: dict[str, Any]
    source: Extraction

    @functools.cached_property
    def examples(self) -> list[Example]:
        """Those that could be read, in order, or the parts they were cut into."""
        return [part.example for part in self.source.parts]

    @property
    def errors(self) -> dict[int, str]:
        """Why others could not, by their number in the request."""
        return self.source.errors

    def warn_of_errors(self) -> None:
        """Warns of answers that could not be read, if there are any."""
        if self.errors:
            first, every = next(iter(self.errors.values())), {*self.source.kept}
            warnings.warn(
                f"{len(self.errors)} of {len(every | {*self.errors})} answers could "
                f"not be read and are left out; the first: {first}",
                stacklevel=3,
            )

    @functools.cached_property
    def rows(self) -> list[Encoded]:
        """Per example its whole answer as tokens."""
        return [self.source.rows[part.row] for part in self.source.parts]

    @property
    def marked(self) -> list[np.ndarray]:
        """Per example ``Bool[response]`` of its whole answer: annotated tokens."""
        return self.source.marked

    @property
    def labels(self) -> Int[np.ndarray, " examples"]:
        """1 hallucinated, 0 grounded."""
        return np.array([example.label for example in self.examples])

    @property
    def groups(self) -> Int[np.ndarray, " examples"]:
        """A number per source."""
        return group_codes([one.group for one in self.examples], len(self.examples))


def readable(lm: LM, detectors: Iterable[Detector]) -> list[Detector]:
    """Of detectors that nobody named, those that a reader has something for.

    A reader without attention has no rows of it; what is left out is said.
    """
    chosen = list(detectors)
    if left := _without_rows(lm, chosen):
        named = ", ".join(one.name for one in left)
        note(f"left out, as they read attention, {_LINEAR % lm.name}: {named}")
    return [one for one in chosen if one not in left]


def check_rows(lm: LM, detectors: Iterable[Detector]) -> None:
    """ValueError on named ones that a reader has nothing for, as above."""
    if left := _without_rows(lm, _flat(detectors)):
        named = ", ".join(f"{one.name!r} reads attention" for one in left)
        raise ValueError(
            f"{named}, {_LINEAR % lm.name}; use detectors of hidden states or "
            "probabilities"
        )


_LINEAR = "and all layers of %r have linear attention, which has no rows of it"


def _without_rows(lm: LM, detectors: Iterable[Detector]) -> list[Detector]:
    if lm.config.layers_with(*ATTENTION):
        return []
    return [one for one in detectors if one.attends]


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

    Raises ValueError on an example without a label, on a detector that reads attention
    of a model without any, with another ``unit`` on a feature that is no series of
    tokens, or when no answer can be read, cut, or judged.

    Args:
      store: where features are kept.
      unit: ``"response"``, or the parts of :func:`jaxhal.reading.units.parts_of`.
    """
    options: Any = {"batch_size": batch_size, "progress": progress}
    source = _extracted(lm, examples, detectors, store, unit, options)
    whole, source = source, source.cut(unit)
    if not source.parts:
        first = next(iter(whole.measured[1].values()), None)
        raise ValueError(
            f"none of the {len(whole.parts)} answers "
            + (
                f"has the {WINDOW} tokens of a window; use another unit"
                if first is None
                else f"can be judged: {first}"
            )
        )
    return Inputs(_inputs(detectors, source), source)


def prepare(
    lm: LM,
    examples: Sequence[Example],
    detectors: Sequence[Detector],
    store: Store,
    *,
    unit: Unit = "response",
    batch_size: int = 8,
    progress: bool | None = None,
) -> None:
    """Draws and reads into the store what :func:`collect` needs, and asks no judge.

    Arguments and errors are those of :func:`collect`; several processes with one store
    share the work.
    """
    options: Any = {"batch_size": batch_size, "progress": progress}
    _extracted(lm, examples, detectors, store, unit, options).prepare()


def _extracted(
    lm: LM,
    examples: Sequence[Example],
    detectors: Sequence[Detector],
    store: Store,
    unit: Unit,
    options: Any,
) -> Extraction:
    """The answers that can be read, of which nothing has been yet."""
    for example in examples:
        if example.label is None:
            raise ValueError(
                f"example {quoted(example.id)} has no label; give 'label' or 'labels'"
            )
    check_rows(lm, detectors)
    if unit != "response":
        _check_cuts(detectors, unit)
    features = features_of(_flat(detectors), fitting=True)
    source = extract(lm, examples, features, cache=store, **options)
    if not source.kept:
        first = next(iter(source.errors.values()), "there are none")
        raise ValueError(f"none of the {len(examples)} examples can be read: {first}")
    return source


def _check_cuts(detectors: Sequence[Detector], unit: Unit) -> None:
    """Makes sure that every feature can be cut to the tokens of a part."""
    for name, feature in features_of(detectors, fitting=True).items():
        match feature:
            case Measure():
                fits = isinstance(feature, OfTokens) or (
                    unit == "sentence" and feature.of_sentences
                )
            case OfText():
                fits = True
            case _:
                fits = "response" in feature.axes
        if not fits:
            of = [o.name for o in detectors if name in dict(o.features + o.taught)]
            raise ValueError(
                f"feature {name!r} belongs to a whole answer and cannot be cut to a "
                f"{unit}; leave out {', '.join(of)}, or use unit 'response'"
            )


def _inputs(detectors: Sequence[Detector], source: Extraction) -> dict[str, Any]:
    """Detector -> inputs; members of an ensemble share theirs with everyone."""
    alone: dict[str, Detector] = {}
    for one in _flat(detectors):
        if alone.setdefault(one.name, one) != one:
            raise ValueError(
                f"two detectors are named {one.name!r}; give one another 'name'"
            )
    order, made = [], []
    for numbers, features in source.batches():
        whole = jax.device_get(_make(tuple(alone.values()), features))
        some = take(whole, slice(len(numbers)))
        made.append(jax.tree.map(_unpadded, some, is_leaf=_is_series))
        order += numbers
    # One after the other, so that memory holds both forms of one leaf alone.
    kind, each = jax.tree.structure(made[0]), map(jax.tree.leaves, made)
    columns = [list(column) for column in zip(*each, strict=True)][::-1]
    made.clear()
    joined = [_in_order(columns.pop(), order) for _ in range(len(columns))]
    known = jax.tree.unflatten(kind, joined)

    def gathered(detector: Detector) -> Any:
        if not detector.members:
            return known[detector.name]
        return {member.name: gathered(member) for member in detector.members}

    return {detector.name: gathered(detector) for detector in detectors}


def _flat(detectors: Iterable[Detector]) -> Iterator[Detector]:
    """Detectors and members of ensembles, without the ensembles."""
    for one in detectors:
        yield from _flat(one.members) if one.members else [one]


@functools.partial(jax.jit, static_argnums=0)
def _make(detectors: tuple[Detector, ...], features: dict[str, Any]) -> dict[str, Any]:
    return {detector.name: detector.inputs(features) for detector in detectors}


def _is_series(one: Any) -> bool:
    return isinstance(one, Series)


def _unpadded(one: Any) -> Any:
    return Ragged.of(one) if _is_series(one) else one


def _in_order(leaves: Sequence[Any], order: Sequence[int]) -> Any:
    """Chunks as one, rows where they belong, arrays of other sizes padded with 0."""
    if isinstance(leaves[0], Ragged):
        return Ragged.joined(leaves, order)
    sizes = [leaf.shape[1:] for leaf in leaves]
    shape = np.max(sizes, axis=0).astype(int).tolist()
    out, start = aligned_zeros((len(order), *shape), leaves[0].dtype), 0
    for leaf in leaves:
        rows = np.asarray(order[start : start + len(leaf)])
        out[(rows, *(slice(n) for n in leaf.shape[1:]))] = leaf
        start += len(leaf)
    return out


def fit_part(
    detectors: Sequence[Detector],
    data: Inputs,
    train: Int[np.ndarray, " train"],
    key: jax.Array,
    *,
    bar: Bar | None = None,
    **options: Any,
) -> dict[str, Fitted]:
    """Every detector, fitted to some of the answers with options of ``fit``.

    The key is of the networks' first weights; the bar moves by one for each detector.
    """
    everything = Targets(data.labels, data.groups, np.ones(len(data.labels)), key)
    targets, layers = everything.only(train), data.source.lm.config.num_hidden_layers
    fitted: dict[str, Fitted] = {}
    # Ensembles last: their members need not be fitted again.
    for detector in sorted(detectors, key=lambda one: bool(one.members)):
        fitted[detector.name] = fit(
            detector,
            data.inputs[detector.name],
            targets,
            known=fitted,
            layers=layers,
            **options,
        )
        if bar is not None:
            bar.update()
    return {detector.name: fitted[detector.name] for detector in detectors}


def frame_of(
    data: Inputs, rows: Int[np.ndarray, " rows"], fitted: Mapping[str, Fitted]
) -> "pd.DataFrame":
    """What was fitted says of some answers, as ``jaxhal.reporting.results.Judged``."""
    import pandas as pd

    columns: dict[str, Any] = {
        "row": rows,
        "id": [data.examples[row].id for row in rows],
        "source": data.groups[rows],
        "label": data.labels[rows],
    }
    for name, one in fitted.items():
        score = one.score(data.inputs[name])[rows]
        columns |= columns_of(name, one, score, data.groups[rows])
    return pd.DataFrame(columns)


def check_marked(detectors: Iterable[Detector], examples: Iterable[Example]) -> None:
    """ValueError on one that learns from spans where none is annotated."""
    spanned = any(one.labels for one in examples)
    for one in detectors:
        check_marked(one.members, examples)
        if one.marked and not spanned:
            raise ValueError(
                f"detector {one.name!r} learns from annotated spans, and no answer has "
                "any; give 'labels', token_probe with whole: true, which learns "
                "hallucinated answers as one span each, or linear_probe"
            )


def columns_of(
    name: str, one: Fitted, score: np.ndarray, sources: np.ndarray
) -> dict[str, np.ndarray]:
    """Scores of a detector, their probabilities, and which reach its threshold.

    Probabilities also as adapted to the base rate that these answers seem to have.
    """
    assert (kept := one.calibrated_on) is not None
    found = one.probabilities(score)
    new, _ = adapted(
        found,
        kept.labels.mean(),
        sources.tolist(),
        known=one.probabilities(kept.scores),
        known_groups=kept.sources.tolist(),
    )
    return {
        name: score,
        f"{name}.probability": found,
        f"{name}.adapted": new,
        f"{name}.flagged": one.reaches(score),
    }


def about_answers(lm: LM, data: str, examples: Sequence[Example]) -> dict[str, Any]:
    """What cards say of a reader and of the answers that were fitted to."""
    texts = [(one.id, one.response) for one in examples]
    return {
        "model": lm.name,
        "family": lm.config.family,
        "parameters": lm.size,
        "depth": lm.config.num_hidden_layers,
        "data": {
            "name": data,
            "answers": len(examples),
            "hallucinated": sum(one.label == 1 for one in examples),
            "sources": len({one.group for one in examples}),
            "sha256": hashlib.sha256(json.dumps(texts).encode()).hexdigest(),
        },
    }
