"""Where an agent begins to hallucinate: queries that it answered wrongly, by vector."""

import base64
import dataclasses
import datetime
import numbers
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from jaxhal.io.files import append, lines_of
from jaxhal.io.showing import shown
from jaxhal.reading.keys import digest
from jaxhal.watchdog.index import Index, checked


@dataclasses.dataclass(frozen=True)
class Point:
    """A query that an agent hallucinated at: a point of its generalization bound.

    Args:
      id: a point added under a known name takes the other's place.
      context: what it had to say it from.
      entropy: semantic entropy of the agent's answers to the query, in nats.
      verdict: why the answer counts as hallucinated.
      time: when it answered, ISO 8601.
    """

    id: str
    query: str
    response: str
    context: str = ""
    entropy: float = 0.0
    verdict: str = ""
    domain: str = ""
    agent: str = ""
    time: str = ""

    def __post_init__(self):
        for name, value in vars(self).items():
            kind = numbers.Real if name == "entropy" else str
            if not isinstance(value, kind) or isinstance(value, bool):
                wanted = "number" if name == "entropy" else "text"
                raise TypeError(f"{name} of a point is {shown(value)}; give a {wanted}")
        if not self.query.strip():
            raise ValueError(f"query of a point is {self.query!r}; give some text")
        if not is_name(self.id):
            raise ValueError(
                f"id of a point is {self.id[:80]!r}; give 1 to 256 bytes, not all of "
                "them blank, without quotes and backslashes, such as a hash"
            )
        if not np.isfinite(self.entropy):
            raise ValueError(
                f"entropy of point {self.id!r} is {self.entropy}; give a finite number"
            )
        # One of NumPy is none that JSON holds.
        object.__setattr__(self, "entropy", float(self.entropy))


class Hit(NamedTuple):
    """A point near a query: the cosine of both, and the point's vector at length 1."""

    point: Point
    similarity: float
    vector: Float[np.ndarray, " width"]


@runtime_checkable
class BoundaryStore(Protocol):
    """Points of an agent's bound, found by their vectors of ``width`` numbers.

    What is added, with a vector each, is kept once ``add`` returns.  ``remove`` says
    how many there were; ``search`` finds up to ``k`` for each vector, the most similar
    first.  ValueError on vectors of another width, not one for each point, or on a
    ``k`` below 1; RuntimeError where a server does not do what it is asked.
    """

    width: int

    def add(self, points: Sequence[Point], vectors: Any, /) -> None: ...
    def remove(self, ids: Sequence[str], /) -> int: ...
    def search(self, vectors: Any, k: int, /) -> list[list[Hit]]: ...
    def highest_entropy(self) -> float | None: ...
    def __contains__(self, id: object, /) -> bool: ...
    def __len__(self) -> int: ...
    def close(self) -> None: ...


class ExactStore:
    """Points in memory, searched whole on the device; in a file too if asked for.

    The file, ``points.jsonl`` of ``folder``, grows by a line for each point, written to
    the disk before :meth:`add` returns; a line that a kill left half is dropped.
    Threads may share it.
    """

    def __init__(self, width: int, folder: str | Path | None = None):
        self.width = width
        self._lock = threading.RLock()
        self._index = Index(np.zeros((0, width), np.float32))
        self._points: list[Point] = []  # in the order of the index
        self._rows: dict[str, int] = {}
        self._path = None if folder is None else Path(folder) / "points.jsonl"
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._load(self._path)

    def __len__(self) -> int:
        return len(self._points)

    def __contains__(self, id: object) -> bool:
        return id in self._rows

    def __iter__(self) -> Iterator[Point]:
        return iter(self._points)

    def add(self, points: Sequence[Point], vectors: Any) -> None:
        block = paired(points, vectors, self.width)
        lines = [
            {**vars(one), "vector": base64.b64encode(vector.astype("<f4")).decode()}
            for one, vector in zip(points, block, strict=True)
        ]
        with self._lock:
            if self._path is not None:
                append(self._path, lines)
            self._take(points, block)

    def remove(self, ids: Sequence[str]) -> int:
        with self._lock:
            known = [name for name in dict.fromkeys(ids) if name in self._rows]
            if self._path is not None:
                append(self._path, [{"removed": name} for name in known])
            for name in known:
                row, last = self._rows.pop(name), self._points.pop()
                self._index.remove(row)  # the last one takes its place
                if last.id != name:
                    self._points[row] = last
                    self._rows[last.id] = row
        return len(known)

    def search(self, vectors: Any, k: int) -> list[list[Hit]]:
        with self._lock:
            cosines, rows = self._index.search(vectors, k)
            kept = self._index[np.maximum(rows, 0)]
            return [
                [
                    Hit(self._points[row], float(cosine), vector)
                    for cosine, row, vector in zip(*each, strict=True)
                    if row >= 0
                ]
                for each in zip(cosines, rows, kept, strict=True)
            ]

    def highest_entropy(self) -> float | None:
        with self._lock:
            return max((one.entropy for one in self), default=None)

    def close(self) -> None:
        """Nothing is open."""

    def _load(self, path: Path) -> None:
        found: dict[str, tuple[Point, np.ndarray]] = {}
        for number, row in enumerate(lines_of(path), start=1):
            try:
                if "removed" in row:
                    found.pop(row["removed"], None)
                    continue
                packed = base64.b64decode(row.pop("vector"), validate=True)
                vector, point = np.frombuffer(packed, "<f4"), Point(**row)
                checked(vector[None], len(vector))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}, line {number}: no point of a bound ({shown(error)}); "
                    "restore the file, or delete the line"
                ) from None
            if len(vector) != self.width:
                raise ValueError(
                    f"{path} holds vectors of {len(vector)} numbers, and {self.width} "
                    "are asked for; use the encoder that made them, or another folder"
                )
            found[point.id] = point, vector
        if found:
            points, vectors = zip(*found.values(), strict=True)
            self._take(points, np.stack(vectors))

    def _take(self, points: Sequence[Point], vectors: np.ndarray) -> None:
        fresh = [at for at, one in enumerate(points) if one.id not in self._rows]
        for point, vector in zip(points, vectors, strict=True):
            if point.id in self._rows:
                row = self._rows[point.id]
                self._index.put(row, vector)
                self._points[row] = point
        self._index.add(vectors[fresh])
        for at in fresh:
            self._rows[points[at].id] = len(self._points)
            self._points.append(points[at])


def paired(
    points: Sequence[Point], vectors: Any, width: int
) -> Float[np.ndarray, "rows {width}"]:
    """Vectors that go with points."""
    block = checked(vectors, width)
    if len(points) != len(block):
        raise ValueError(f"{len(points)} points come with {len(block)} vectors")
    if len({one.id for one in points}) < len(points):
        raise ValueError(f"two of the {len(points)} points share a name")
    return block


def point_id(agent: str, query: str) -> str:
    """Of the point that a query becomes."""
    return digest(f"{agent}\n{query}")


def now() -> str:
    """The time, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def is_name(id: str) -> bool:
    """Whether a point may go by it in every store."""
    few = len(id.encode("utf-8", "replace")) <= 256
    return bool(id.strip()) and few and not set(id) & set("'\"\\")
