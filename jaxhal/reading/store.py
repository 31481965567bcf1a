"""Features on disk: computed once, found again by content, safe to kill at any moment.

A store is a folder of Parquet parts, one folder per model::

    STORE/<model>/model.json     what the model is, for people
    STORE/<model>/plans/*.json   which answers are read together, part by part
    STORE/<model>/parts/<plan>-<sha256>.parquet

Every file holds, or is named by, its checksum, so a damaged one is an error.  A part
holds some answers, one row each: ``key`` (a hash of tokens and masks), ``tokens`` (of
the response) and a flat list per feature, whose column is named after the reducer.  The
shape of one value is in the column's metadata, with -1 for the response's tokens.
"""

import contextlib
import dataclasses
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxhal.capture.forward import check, shares_prompts
from jaxhal.features.base import Reducer
from jaxhal.io import sealing
from jaxhal.io.files import locked
from jaxhal.io.progress import progress_bar
from jaxhal.models.batching import Encoded, check_length, plan
from jaxhal.models.config import Config
from jaxhal.models.lm import LM
from jaxhal.reading.keys import column_name, digest, fingerprint, key_of
from jaxhal.reading.parts import (
    Column,
    Group,
    Part,
    check_axes,
    locate,
    make_table,
    missing,
    write_part,
)
from jaxhal.types import Example

# Raised when the same text, model and reducer give other numbers than before.
_REVISION = 1


@dataclasses.dataclass(frozen=True)
class Stored:
    """What a store gives back for some examples.

    Attributes:
      kept: which of the examples could be read, in order.
      errors: why the others could not, by number.
      rows: the kept examples as tokens.
      features: name -> one array per kept example, without padding: the axes of
        :func:`jaxhal.read` without ``batch``. Each is read from disk when indexed.
    """

    kept: list[int]
    errors: dict[int, str]
    rows: list[Encoded]
    features: dict[str, Column]


class Store:
    """A folder of features that answers are read into once."""

    def __init__(self, root: str | os.PathLike):
        self.root = Path(root)
        with _explained(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
        self._fingerprints: dict[int, tuple[Any, str]] = {}

    def read(
        self,
        lm: LM,
        examples: Sequence[Example],
        reducers: Mapping[str, Any],
        *,
        batch_size: int = 8,
        progress: bool | None = None,
    ) -> Stored:
        """Features of all examples; only what the store does not have is computed.

        Answers to one prompt share its reading.  A run that was killed goes on where it
        stopped and ends with the same bits as one that was not; what several processes
        ask for at once is computed by one of them.

        Raises TypeError on what is no reducer, or one whose feature a store cannot
        keep, ValueError on a damaged file, and OSError when the folder cannot be
        written; what was finished stays.

        Args:
          examples: the answers; equal ones are read once.
          reducers: name -> reducer, as :func:`jaxhal.read` takes them.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
        if not reducers:
            raise ValueError("no reducers to read; name at least one feature")
        named = dict(check(lm.config, reducers))
        kept, errors, rows = encode(lm, examples)
        options: Any = {"batch_size": batch_size, "progress": progress}
        return Stored(kept, errors, rows, self.columns(lm, rows, named, **options))

    def columns(
        self,
        lm: LM,
        rows: Sequence[Encoded],
        reducers: Mapping[str, Any],
        *,
        batch_size: int = 8,
        progress: bool | None = None,
    ) -> dict[str, Column]:
        """The same of answers as tokens, by the names of the reducers."""
        named = dict(check(lm.config, reducers))
        columns = {name: column_name(reducer) for name, reducer in named.items()}
        by_column = {columns[name]: reducer for name, reducer in named.items()}
        wanted = [key_of(row) for row in rows]
        encoded = dict(zip(wanted, rows, strict=True))
        folder = self._folder(lm)
        if encoded:
            self._compute(lm, folder, encoded, by_column, batch_size, progress)
        found = locate(folder, wanted, by_column)
        return {name: found[column] for name, column in columns.items()}

    def _folder(self, lm: LM) -> Path:
        known = self._fingerprints.get(id(lm.params))
        if known is None:
            known = (lm.params, fingerprint(lm))  # held, so that its id stays its own
            self._fingerprints[id(lm.params)] = known
        folder = self.root / f"{known[1]}-{_REVISION}"
        if (folder / "model.json").is_file():
            unsealed(folder / "model.json")
        else:
            with _explained(folder):
                for name in ("plans", "parts", "locks"):
                    (folder / name).mkdir(parents=True, exist_ok=True)
                about = {"name": lm.name, "config": dataclasses.asdict(lm.config)}
                sealing.write(folder / "model.json", about)
        return folder

    def _compute(
        self,
        lm: LM,
        folder: Path,
        encoded: dict[str, Encoded],
        reducers: dict[str, Reducer],
        batch_size: int,
        progress: bool | None,
    ) -> None:
        lacking = missing(folder, encoded, reducers)
        if not lacking:
            return
        check_axes(lm, reducers)
        parts = _plan(lm, folder, encoded, reducers, lacking, batch_size)
        total = sum(part.count for part in parts)
        with progress_bar(total, "reading", "answer", progress) as bar:
            # What is left after the first round is in the hands of other processes.
            for wait in (False, True):
                busy = []
                for part in parts:
                    with _claim(folder, part.name, wait) as mine:
                        if not mine:
                            busy.append(part)
                            continue
                        if not any(folder.glob(f"parts/{part.name}-*.parquet")):
                            asked = {c: reducers[c] for c in part.columns}
                            table = make_table(lm, part, encoded, asked, batch_size)
                            with _explained(folder):
                                write_part(table, folder, part.name)
                    bar.update(part.count)
                parts = busy


def encode(
    lm: LM, examples: Sequence[Example]
) -> tuple[list[int], dict[int, str], list[Encoded]]:
    """Numbers of the examples that fit the model, why others do not, and the rows."""
    tokenizer = lm.require_tokenizer()
    kept, errors, rows = [], {}, []
    for number, example in enumerate(examples):
        try:
            row = tokenizer.encode_example(example)
            check_length(row, lm.config.context_length)
        except ValueError as error:
            errors[number] = str(error)
            continue
        kept.append(number)
        rows.append(row)
    return kept, errors, rows


def _plan(
    lm: LM,
    folder: Path,
    encoded: dict[str, Encoded],
    reducers: Mapping[str, Reducer],
    lacking: dict[str, list[str]],
    batch_size: int,
) -> list[Part]:
    """The plan that was made when this was first asked for, by whichever process."""
    name = digest(json.dumps([sorted(reducers), list(encoded), batch_size]))
    while True:
        path = folder / "plans" / f"{name}.json"
        with _claim(folder, name, wait=True):
            if path.is_file():
                parts = [_part(**part) for part in unsealed(path)["parts"]]
            else:
                parts = make_plan(lm.config, encoded, lacking, batch_size)
                with _explained(path):
                    made = [dataclasses.asdict(part) for part in parts]
                    sealing.write(path, {"parts": made})
        planned = {
            (key, column)
            for part in parts
            for group in part.groups
            for key in group.keys
            for column in part.columns
        }
        if all((k, c) in planned for k, columns in lacking.items() for c in columns):
            return parts
        # Something that was there when it was made has been deleted since.
        name = digest(name)


@contextlib.contextmanager
def _claim(folder: Path, name: str, wait: bool) -> Iterator[bool]:
    """Whether this process may compute a part; a lock that dies with its process."""
    with contextlib.ExitStack() as held:
        with _explained(folder):
            mine = held.enter_context(locked(folder / f"locks/{name}.lock", wait))
        yield mine


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Says what to do when the folder cannot be written."""
    try:
        yield
    except OSError as error:
        raise OSError(  # of the subclass that belongs to the number
            error.errno,
            f"cannot write the feature store: {error.strerror}; make room or choose "
            "another folder, then run the same again: finished parts are kept",
            str(path),
        ) from error


# Rows that are lost, at most, when a run is killed.
_PART_ROWS = 32


def make_plan(
    config: Config,
    encoded: dict[str, Encoded],
    missing: dict[str, list[str]],
    batch_size: int,
) -> list[Part]:
    """Parts of about ``_PART_ROWS`` rows; rows that lack the same columns together."""
    alike = defaultdict(list)
    for key, columns in missing.items():
        alike[tuple(columns)].append(key)
    parts = []
    for columns, keys in alike.items():
        groups: list[Group] = []
        for group in _groups(config, {key: encoded[key] for key in keys}, batch_size):
            if groups and sum(len(g.keys) for g in [*groups, group]) > _PART_ROWS:
                parts.append(Part(columns, tuple(groups)))
                groups = []
            groups.append(group)
        parts.append(Part(columns, tuple(groups)))
    return parts


def _groups(
    config: Config, encoded: dict[str, Encoded], batch_size: int
) -> Iterator[Group]:
    """Batches in which runs of ``copies`` rows, a power of two, share a prompt."""
    by_prompt = defaultdict(list)
    for key, row in encoded.items():
        alone = key if not shares_prompts(config) else ""
        by_prompt[row.prompt_ids.tobytes(), alone].append(key)
    runs = defaultdict(list)
    for keys in by_prompt.values():
        keys.sort(key=lambda key: len(encoded[key].response_ids))
        while keys:
            copies = 1 << (min(len(keys), batch_size).bit_length() - 1)
            runs[copies].append(keys[:copies])
            keys = keys[copies:]
    for copies, together in sorted(runs.items()):
        longest = [encoded[run[-1]] for run in together]
        for planned in plan(longest, max(1, batch_size // copies)):
            keys = tuple(key for index in planned.rows for key in together[index])
            yield Group(keys, planned.prompt_length, planned.response_length, copies)


def _part(columns: Sequence[str], groups: Sequence[Mapping[str, Any]]) -> Part:
    """A part of a plan that was kept as JSON."""
    made = (Group(**{**group, "keys": tuple(group["keys"])}) for group in groups)
    return Part(tuple(columns), tuple(made))


def unsealed(path: Path) -> dict[str, Any]:
    """What a sealed file of a store says; ValueError when it is damaged."""
    try:
        return sealing.read(path)
    except ValueError as error:
        raise ValueError(
            f"{path} of the feature store is damaged; delete it and run the same again "
            f"({error})"
        ) from error
