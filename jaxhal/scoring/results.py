"""Rows to results as they are done, kept in a file beside the one it will become.

A command that was stopped goes on there.
"""

import base64
import contextlib
import dataclasses
import itertools
import json
import os
import stat
from collections.abc import (
    Callable,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import numpy as np

import jaxhal
from jaxhal.datasets.jsonl import Row
from jaxhal.detectors import Detector
from jaxhal.evaluation.held_out import Measured
from jaxhal.io.files import fcntl, whole_lines, write_through
from jaxhal.io.showing import shown
from jaxhal.models.lm import LM
from jaxhal.reading.extract import Extraction, extract
from jaxhal.reading.keys import digest, fingerprint
from jaxhal.reporting.attribution import Piece, Sources, SpanRelevance
from jaxhal.reporting.report import Report, Span, Token
from jaxhal.scoring import detection, verdicts
from jaxhal.scoring.detection import empty
from jaxhal.scoring.fitting import Fitted

# What a report has from the deciding detector, beside its spans.
_KEY = "jaxhal detect"
_MARK = f'{{"{_KEY}": '.encode()  # how the first line begins


def beside(output: str | os.PathLike) -> Path:
    """Where results wait until all of them are there."""
    output = Path(output)
    return output.with_name(f"{output.name}.partial")


class Partial:
    """Records in the order they were added: a line with settings, then a line each."""

    def __init__(self, path: Path, file: IO[bytes]):
        self.path = path
        self._file = file

    def add(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Adds records: all of them or, where the disk is full, none.

        A kill keeps every record whose call has come back, and of others whole ones.
        """
        lines = (json.dumps(record).encode() + b"\n" for record in records)
        write_through(self._file, b"".join(lines))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The records that are there now; ValueError names a damaged one."""
        end, number = self._file.seek(0, os.SEEK_END), 1
        with self.path.open("rb") as file:
            file.readline()
            while file.tell() < end:
                number += 1
                try:
                    yield json.loads(file.readline())
                except (ValueError, RecursionError) as error:
                    raise ValueError(
                        f"{self.path}, line {number}: not JSON ({error}); give --force "
                        "to start over"
                    ) from None

    def _begin(self, settings: Mapping[str, Any], force: bool) -> int:
        """Leaves the settings and whole records; returns where these begin."""
        self._file.seek(0)
        first = self._file.readline()
        if not (first.startswith(_MARK) or _MARK.startswith(first)):
            raise ValueError(
                f"{self.path} is not what jaxhal detect left; move it away, or give "
                "another output"
            )
        if force or not first.endswith(b"\n"):  # a kill may have cut the first line
            self._file.truncate(0)
        else:
            try:
                made = dict(json.loads(first)[_KEY])
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(
                    f"{self.path}, line 1: no settings ({error}); give --force to "
                    "start over"
                ) from None
            _check(made, settings, self.path)
            self._file.truncate(whole_lines(self._file))
            return len(first)
        write_through(self._file, _MARK + json.dumps(settings).encode() + b"}\n")
        return self._file.tell()


class _OtherInput(ValueError):
    """What is done was made of another input, so it does not go on with this one."""

    def __init__(self, partial: "Partial | None", what: str):
        assert partial is not None
        super().__init__(
            f"{partial.path} was made of another input: {what} differ; give that input "
            "to go on, --force to start over, or another output"
        )


@contextlib.contextmanager
def resuming(
    output: str | os.PathLike, settings: Mapping[str, Any], *, force: bool = False
) -> Iterator[Partial]:
    """The records of a result in the making, those of a stopped process among them.

    When the block ends well the file is deleted, so the result has to be in its place
    by then.  Otherwise it stays, unless it holds no record.

    Raises RuntimeError when another process makes the same result, and ValueError when
    the records there were made with other settings, or the file is none of these.

    Args:
      settings: all that decides what the records say; JSON.
      force: start over.
    """
    path = beside(output)
    with _alone(path, output) as file:
        partial = Partial(path, file)
        start = partial._begin(settings, force)
        try:
            yield partial
            path.unlink()
        except BaseException as error:
            if file.seek(0, os.SEEK_END) <= start:
                path.unlink()
            elif not isinstance(error, _OtherInput):
                error.add_note(
                    f"{path} holds what is done, and the same command goes on there"
                )
            raise


@contextlib.contextmanager
def _alone(path: Path, output: str | os.PathLike) -> Iterator[IO[bytes]]:
    """The file, locked; who dies loses the lock.  As private as the result is."""
    output = Path(output)
    mode = stat.S_IMODE(output.stat().st_mode) if output.exists() else 0o666
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, mode)
        with open(handle, "a+b", buffering=0) as file:
            try:
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RuntimeError(
                    f"another process writes {output}; wait for it, or give another "
                    "output"
                ) from None
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                yield file
                return
        # Another process came to its end meanwhile, and deleted the file.


def _check(made: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    wanted = json.loads(json.dumps(wanted))  # as the file has it
    for name in dict.fromkeys([*made, *wanted]):
        before, now = made.get(name), wanted.get(name)
        if before == now:
            continue
        said = f"with {name} {shown(before)}, not {shown(now)}"
        if isinstance(before, list) and isinstance(now, list):
            gone = [one for one in before if one not in now]
            new = [one for one in now if one not in before]
            if gone and new:
                said = f"with {name} {shown(gone)}, not {shown(new)}"
            elif gone or new:
                said = f"{'with' if gone else 'without'} {name} {shown(gone or new)}"
        raise ValueError(
            f"{path} was made {said}; run that again to go on, give --force to start "
            "over, or give another output"
        )


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
    return {
        "model": lm.name,
        "weights": fingerprint(lm),
        "tokenizer": digest(text),
        "detectors": [one.detector.name for one in chosen],
        "options": [_options(one.detector) for one in chosen],
        "measures": [m.feature for one in chosen for m in one.detector.measures],
        "threshold": threshold,
        "confidence": confidence,
        "parameters": digest(b"|".join(leaf.tobytes() for leaf in leaves)),
        "batch size": batch_size,
        "relevance": relevance,
        "page": reports,
        "all": every,
        "jaxhal": jaxhal.__version__,
        "jax": jax.__version__,
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
                raise _OtherInput(partial, f"lines {part[0].line} to {part[-1].line}")
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
        raise _OtherInput(partial, "the last lines")


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
