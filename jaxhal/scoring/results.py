"""Rows to results as they are done."""

import base64
import dataclasses
import itertools
from collections.abc import (
    Callable,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxhal
from jaxhal.datasets.jsonl import Row
from jaxhal.detectors import Detector
from jaxhal.evaluation.held_out import Measured
from jaxhal.models.lm import LM
from jaxhal.models.mesh import mesh_of
from jaxhal.models.registry import stamp
from jaxhal.reading.extract import Extraction, extract
from jaxhal.reading.keys import digest, fingerprint
from jaxhal.reporting.attribution import Piece, Sources, SpanRelevance
from jaxhal.reporting.report import Report, Span, Token
from jaxhal.scoring import detection, encoders, verdicts
from jaxhal.scoring.detection import empty
from jaxhal.scoring.fitting import Fitted
from jaxhal.scoring.partial import OtherInput, Partial

# Rows that are sorted by length together: to a file; to where each is waited for; and
# for detectors that ask everything of a part before its first row is done.
_PART, _PART_WAITED_FOR, _PART_MEASURED = 1024, 256, 64


class OutputRow(NamedTuple):
    """The output row of an answer, and its report where that is wanted as well."""

    row: Mapping[str, Any]
    report: Report | None


def settings_of(
    lm: LM,
    chosen: Sequence[Fitted],
    batch_size: int,
    relevance: str | None = None,
    reports: bool = False,
    every: bool = False,
    threshold: Mapping[str, float] | None = None,
    confidence: float | None = 0.9,
) -> dict[str, Any]:
    """All but the input that decides what results say, down to the last digit."""
    tokens = lm.require_tokenizer()
    backend = tokens.hf.backend_tokenizer.to_str()
    text = f"{backend}{tokens.hf.chat_template}{tokens.stop_ids}"
    learnt = [
        (one.params, one.threshold, repr(one.calibration), one.silent, one.measured)
        for one in chosen
    ]
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(learnt)]
    measures = [m for one in chosen for m in one.detector.measures]
    others = encoders.sources(measures)
    return {
        "model": lm.name,
        "weights": fingerprint(lm),
        "tokenizer": digest(text),
        "detectors": [one.detector.name for one in chosen],
        "options": [_options(one.detector) for one in chosen],
        "measures": [m.feature for m in measures],
        "files of other models": digest(repr([*map(stamp, others)])),
        "threshold": threshold,
        "confidence": confidence,
        "parameters": digest(b"|".join(leaf.tobytes() for leaf in leaves)),
        "batch size": batch_size,
        "relevance": relevance,
        "page": reports,
        "all": every,
        "jaxhal": jaxhal.__version__,
        "jax": jax.__version__,
        "mesh": None if (mesh := mesh_of(lm.params)) is None else dict(mesh.shape),
        "device": jax.local_devices()[0].device_kind,
    }


def _options(detector: Detector) -> str:
    """What a detector was made with; of a plain object its kind."""

    def said(value: Any) -> str:
        if isinstance(value, Detector):
            return f"{value.name} {_options(value)}"
        if isinstance(value, tuple):
            return f"({', '.join(map(said, value))})"
        plain = type(value).__repr__ is object.__repr__
        return type(value).__qualname__ if plain else repr(value)

    return said(detector.settings)


def results(
    lm: LM,
    rows: Iterable[Row],
    chosen: Sequence[Fitted],
    *,
    batch_size: int = 8,
    relevance: str | None = None,
    reports: bool = False,
    every: bool = False,
    partial: Partial | None = None,
    reading: Callable[..., Extraction] = extract,
) -> Iterator[OutputRow]:
    """The result of each row, in order, bad rows among them.

    Raises OSError when a result cannot be kept (those before it are), and ValueError as
    :func:`jaxhal.score`, and when ``partial`` holds results of other rows.

    Args:
      rows: what to judge.
      chosen: of :func:`jaxhal.scoring.detection.resolve_for`.
      batch_size, relevance: as :func:`jaxhal.score` takes them.
      reports: give the reports as well.
      every: rows say all, as :meth:`Report.to_dict` has it.
      partial: where results are kept as they are done.  Those that are there are not
        made again; the others come out bit for bit as if they had been made with them.
      reading: as :func:`jaxhal.scoring.detection.score_batches` takes it.
    """
    most = _PART_WAITED_FOR if partial is None else _PART
    if any(one.detector.measures for one in chosen):
        most = _PART_MEASURED
    options = {"batch_size": batch_size, "relevance": relevance, "reading": reading}
    rows = iter(rows)
    saved = itertools.groupby(partial or (), lambda record: record["part"])
    while part := list(itertools.islice(rows, most)):
        name, done = digest(repr(part)), {}
        if (known := next(saved, None)) is not None:
            if known[0] != name:
                raise OtherInput(partial, f"lines {part[0].line} to {part[-1].line}")
            done = {one["at"]: _unpacked(lm, part[one["at"]], one) for one in known[1]}
        first = 0
        for batch in _reports(lm, part, chosen, set(done), options):
            made = {at: _result(part[at], one, reports, every) for at, one in batch}
            if partial is not None and made:
                partial.add(_packed(name, at, one) for at, one in made.items())
            done |= made
            while first in done:
                yield done.pop(first)
                first += 1
    if next(saved, None) is not None:
        raise OtherInput(partial, "the last lines")


def adapted(
    made: Iterable[OutputRow], chosen: Sequence[Fitted], every: bool
) -> Iterator[OutputRow]:
    """Results, which hold reports, as :func:`jaxhal.scoring.verdicts.adapted` has them.

    The first comes when all are made.
    """
    reports: Any = [one.report for one in made]
    for report in verdicts.adapted(reports, chosen):
        yield OutputRow(report.to_dict(every), report)


def rows_of(partial: Partial) -> Iterator[Mapping[str, Any]]:
    """The output rows of what is done, in the order of the input."""
    for _, records in itertools.groupby(partial, lambda record: record["part"]):
        for record in sorted(records, key=lambda record: record["at"]):
            yield record["row"]


def _reports(
    lm: LM,
    part: Sequence[Row],
    chosen: Sequence[Fitted],
    known: Container[int],
    options: Mapping[str, Any],
) -> Iterator[list[tuple[int, Report]]]:
    """Reports as they are done, with the rows' numbers in the part; first bad rows."""
    good = [at for at, row in enumerate(part) if row.example is not None]
    examples = [row.example for row in part if row.example is not None]
    bad = [(at, _bad(lm, row)) for at, row in enumerate(part) if row.example is None]
    yield [pair for pair in bad if pair[0] not in known]
    there = {number for number, at in enumerate(good) if at in known}
    for batch in detection.score_batches(lm, examples, chosen, known=there, **options):
        yield [(good[number], report) for number, report in batch]


def _bad(lm: LM, row: Row) -> Report:
    return Report(row.id, lm.name, "", {}, [], [], {}, "", error=row.error)


def _result(row: Row, report: Report, reports: bool, every: bool) -> OutputRow:
    if row.example is not None and report.error is not None:
        report = dataclasses.replace(report, error=f"line {row.line}: {report.error}")
    return OutputRow(report.to_dict(every), report if reports else None)


def _packed(part: str, at: int, result: OutputRow) -> dict[str, Any]:
    """A result as JSON."""
    record = {"part": part, "at": at, "row": result.row}
    if result.report is None:
        return record
    report = {
        field.name: getattr(result.report, field.name)
        for field in dataclasses.fields(Report)
        if field.name not in detection.GIVEN
    }
    heads = report["heads"].items()
    report["heads"] = {name: _array_packed(values) for name, values in heads}
    if (sources := report["relevance"]) is not None:
        matrix = _array_packed(sources.matrix)
        report["relevance"] = [sources.prompt, matrix, sources.rules]
    return record | {"report": report}


def _unpacked(lm: LM, row: Row, record: Mapping[str, Any]) -> OutputRow:
    if "report" not in record:
        return OutputRow(record["row"], None)
    kept = dict(record["report"])
    kept["tokens"] = [Token(*token) for token in kept["tokens"]]
    kept["spans"] = [_span(*span) for span in kept["spans"]]
    if (basis := kept["basis"]) is not None:
        kept["basis"] = Measured(*basis)
    heads = kept["heads"].items()
    kept["heads"] = {name: _array_unpacked(values) for name, values in heads}
    if (sources := kept["relevance"]) is not None:
        prompt, matrix, rules = sources
        kept["relevance"] = Sources(prompt, _array_unpacked(matrix), rules)
    blank = _bad(lm, row) if row.example is None else empty(lm.name, row.example, [])
    return OutputRow(record["row"], dataclasses.replace(blank, **kept))


def _span(start: int, end: int, text: str, confidence: float, rests: Any) -> Span:
    if rests is not None:
        rules, *pieces = rests
        found = ([Piece(*piece) for piece in some] for some in pieces)
        rests = SpanRelevance(rules, *found)
    return Span(start, end, text, confidence, rests)


def _array_packed(values: np.ndarray) -> list[Any]:
    data = base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()
    return [values.dtype.str, values.shape, data]


def _array_unpacked(packed: Sequence[Any]) -> np.ndarray:
    kind, shape, data = packed
    return np.frombuffer(base64.b64decode(data), kind).reshape(shape)
