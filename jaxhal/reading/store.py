"""Features on disk: computed once, found again by content, safe to kill at any moment.

A store is a folder of Parquet parts, one folder per model::

    STORE/<model>/model.json     what the model is, for people
    STORE/<model>/parts/<request>-<part>-<sha256>.parquet

Every file holds, or is named by, its checksum, so a damaged one is an error.  A part
holds some answers, one row each: ``key`` (a hash of tokens and masks), ``tokens`` (of
the response) and a flat list per feature, whose column is named after the reducer.  The
shape of one value is in the column's metadata, with -1 for the response's tokens.
"""

import dataclasses
import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxhal.capture.forward import check, plan_reading
from jaxhal.features.base import Reducer
from jaxhal.io import sealing
from jaxhal.io.checks import at_least
from jaxhal.io.progress import progress_bar
from jaxhal.models.batching import Encoded
from jaxhal.models.lm import LM
from jaxhal.models.mesh import check_one_process
from jaxhal.reading.keys import column_name, digest, fingerprint, key_of
from jaxhal.reading.parts import (
    Column,
    ColumnCache,
    Group,
    StorePart,
    check_axes,
    damaged,
    make_table,
    places,
    write_part,
)
from jaxhal.reading.sharing import Share, explained, share_out

# Raised when the same text, model and reducer give other numbers than before.
_REVISION = 1
# Rows that are lost, at most, when a run is killed.
_PART_ROWS = 32


class Store:
    """A folder of features that answers are read into once.

    Args:
      root: the folder; processes that have the same one share what is to be read.
      share: which of them this is, where there are several.
    """

    def __init__(self, root: str | os.PathLike, share: Share | None = None):
        self.root, self.share = Path(root), share or Share()
        with explained(self.root):
            self.root.mkdir(parents=True, exist_ok=True)

    def columns(
        self,
        lm: LM,
        rows: Sequence[Encoded],
        reducers: Mapping[str, Any],
        *,
        batch_size: int = 8,
        progress: bool | None = None,
    ) -> dict[str, Column]:
        """Features of answers, by name; only what the store does not have is computed.

        Each is one array per answer, without padding: the axes of :func:`jaxhal.read`
        without ``batch``.  Answers to one prompt share its reading.  A run that was
        killed goes on where it stopped and ends with the same bits as one that was not;
        of several processes with one and the same request, one computes a part.

        Raises TypeError on what is no reducer, or one whose feature a store cannot
        keep, ValueError on a damaged file, and OSError when the folder cannot be
        written; what was finished stays.

        Args:
          rows: the answers; equal ones are read once.
          reducers: name -> reducer, as :func:`jaxhal.read` takes them.
        """
        at_least(1, batch_size=batch_size)
        if not reducers:
            raise ValueError("no reducers to read; name at least one feature")
        named = check(lm.config, reducers)
        check_one_process(lm.params, "reading into a store")
        columns = {name: column_name(reducer) for name, reducer in named}
        by_column = {columns[name]: reducer for name, reducer in named}
        keys = [key_of(row) for row in rows]
        encoded, folder = dict(zip(keys, rows, strict=True)), self._folder(lm)
        parts = _plan(lm, folder, encoded, by_column, batch_size)
        if parts:
            check_axes(lm, by_column)
            total = sum(len(part.keys) for part in parts.values())
            with progress_bar(total, "reading", "answer", progress) as bar:

                def work(name: str) -> None:
                    count = len(parts[name].keys)
                    if not any(folder.glob(f"parts/{name}-*.parquet")):
                        table = make_table(lm, parts[name], encoded, by_column)
                        with explained(folder):
                            write_part(table, folder / "parts", name)
                        self.share.done["answers read"] += count
                    bar.update(count)

                share_out([*parts], work, folder / "locks", self.share)
        found, cache = places(_parts(folder), by_column), ColumnCache()
        return {
            name: Column(column, [found[column][key] for key in keys], cache)
            for name, column in columns.items()
        }

    def _folder(self, lm: LM) -> Path:
        folder = self.root / f"{fingerprint(lm)}-{_REVISION}"
        about = folder / "model.json"
        if about.is_file():
            try:
                sealing.read(about)
            except ValueError as error:
                raise damaged(str(about), error) from error
        else:
            with explained(folder):
                (folder / "parts").mkdir(parents=True, exist_ok=True)
                config = dataclasses.asdict(lm.config)
                sealing.write(about, {"name": lm.name, "config": config})
        return folder


def _parts(folder: Path) -> list[Path]:
    return sorted((folder / "parts").glob("[!.]*.parquet"))


def _plan(
    lm: LM,
    folder: Path,
    encoded: dict[str, Encoded],
    columns: Mapping[str, Reducer],
    batch_size: int,
) -> dict[str, StorePart]:
    """What is lacking, as it was planned when it was first asked for, by name.

    What this very request has made counts as lacking, so that a run that goes on plans
    the same parts again; empty when nothing is.
    """
    files, names = _parts(folder), sorted(columns)
    if all(some.keys() >= encoded.keys() for some in places(files, names).values()):
        return {}
    request = digest(json.dumps([names, list(encoded), batch_size]))
    while True:
        own = {path for path in files if path.name.startswith(request)}
        have = places([path for path in files if path not in own], names)
        lack = {key: [c for c in names if key not in have[c]] for key in encoded}
        lack = {key: some for key, some in lack.items() if some}
        parts = make_plan(lm, encoded, lack, batch_size)
        planned = {f"{request}-{part.name}": part for part in parts}
        if all(path.name.rpartition("-")[0] in planned for path in own):
            return planned
        # Something that was there when it was planned has been deleted since.
        request = digest(request)


def make_plan(
    lm: LM,
    encoded: dict[str, Encoded],
    lacking: dict[str, list[str]],
    batch_size: int,
) -> list[StorePart]:
    """Parts of about ``_PART_ROWS`` rows; rows that lack the same columns together."""
    alike = defaultdict(list)
    for key, columns in lacking.items():
        alike[tuple(columns)].append(key)
    parts = []
    for columns, keys in alike.items():
        groups: list[Group] = []
        for rows, *how in plan_reading(lm, [encoded[k] for k in keys], batch_size):
            group = Group(tuple(keys[row] for row in rows), *how)
            if groups and sum(len(g.keys) for g in [*groups, group]) > _PART_ROWS:
                parts.append(StorePart(columns, tuple(groups)))
                groups = []
            groups.append(group)
        parts.append(StorePart(columns, tuple(groups)))
    return parts
