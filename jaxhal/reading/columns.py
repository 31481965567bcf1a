"""One feature of many answers, read from its parts as it is asked for."""

import contextlib
import functools
import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, overload

import numpy as np

from jaxhal.io.sealing import sha256

if TYPE_CHECKING:
    import pyarrow.parquet as pq

# Decoded parts that one request holds at a time.
_CACHE_BYTES = 1 << 30


class Place(NamedTuple):
    """Where a value is: its part, and its row there."""

    path: Path
    row: int


@contextlib.contextmanager
def readable(path: Path) -> Iterator["pq.ParquetFile"]:
    """An open part, proved by the checksum in its name before anything is decoded.

    Raises:
      ValueError: names the part and the remedy when it is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    about = path.stat()
    _prove(path, about.st_size, about.st_mtime_ns)
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    # Arrow has no number for what it could not decode; a disk's own errors have one.
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise _damaged(path, str(error)) from error


@functools.lru_cache(1 << 16)
def _prove(path: Path, size: int, changed: int) -> None:
    """Compares a part with its name, once in a process unless the part is changed."""
    _, _, known = path.stem.rpartition("-")
    if len(known) != 64:
        raise ValueError(
            f"part {path} of the feature store has no checksum in its name: an earlier "
            f"version made it; delete {path.parent.parent} and run the same again, "
            "which reads its answers anew"
        )
    if (found := sha256(path)) != known:
        raise _damaged(path, f"its sha256 is {found}")


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(
        f"part {path} of the feature store is damaged; delete it and run the same "
        f"again, which reads its answers anew ({why})"
    )


class Cache:
    """The columns of parts that were used last."""

    def __init__(self, budget: int = _CACHE_BYTES):
        self._budget = budget
        self._held: OrderedDict[tuple[Path, str], tuple[np.ndarray, np.ndarray]] = (
            OrderedDict()
        )

    def get(self, path: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
        """All values of a part's column in a row, and where each begins and ends."""
        key = (path, name)
        if key not in self._held:
            with readable(path) as file:
                chunk = file.read(columns=[name])[name].combine_chunks()
            flat, ends = chunk.values.to_numpy(), chunk.offsets.to_numpy()
            self._held[key] = flat, ends
            used = sum(flat.nbytes for flat, _ in self._held.values())
            while used > self._budget and len(self._held) > 1:
                used -= self._held.popitem(last=False)[1][0].nbytes
        self._held.move_to_end(key)
        return self._held[key]


class Column(Sequence[np.ndarray]):
    """A feature of some answers, in their order; values are read when indexed.

    Neighbours in ``places`` that share a part cost one reading of it.

    Attributes:
      name: of the column in its parts.
      places: where each value is.
      axes: which axes of a value run along the response's tokens.
    """

    def __init__(self, name: str, places: Sequence[Place], cache: Cache):
        self.places = list(places)
        self.name, self._cache = name, cache
        self._shape = _shape(self.places[0].path, name) if self.places else []
        self.axes = [axis for axis, n in enumerate(self._shape) if n == -1]

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> "Column": ...
    def __getitem__(self, index: int | slice) -> "np.ndarray | Column":
        if isinstance(index, slice):
            return self.only(range(len(self.places))[index])
        place = self.places[index]
        flat, ends = self._cache.get(place.path, self.name)
        value = flat[ends[place.row] : ends[place.row + 1]]
        if len(self.axes) < 2:
            return value.reshape(self._shape)
        size = value.size // int(np.prod([n for n in self._shape if n != -1]))
        length = round(size ** (1 / len(self.axes)))
        return value.reshape([length if n == -1 else n for n in self._shape])

    def only(self, numbers: Sequence[int]) -> "Column":
        """The values of these answers."""
        return Column(self.name, [self.places[n] for n in numbers], self._cache)


def _shape(path: Path, name: str) -> list[int]:
    with readable(path) as file:
        return json.loads(file.schema_arrow.field(name).metadata[b"shape"])
