"""Features of some answers as a Parquet file: written whole, read column by column."""

import contextlib
import dataclasses
import functools
import hashlib
import json
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np

from jaxhal.capture.forward import read, read_jit
from jaxhal.features.base import Reducer
from jaxhal.io.files import replacing
from jaxhal.io.sealing import sha256
from jaxhal.models.batching import Encoded, collate
from jaxhal.models.lm import LM
from jaxhal.reading.keys import digest
from jaxhal.types import Batch

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

# Decoded parts that one request holds at a time.
_CACHE_BYTES = 1 << 30


class Place(NamedTuple):
    """Where a value is: its part, and its row there."""

    path: Path
    row: int


@contextlib.contextmanager
def readable(path: Path) -> Iterator["pq.ParquetFile"]:
    """An open part, proved by the checksum in its name before anything is decoded."""
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

    Neighbours in ``places`` that share a part cost one reading of it.  ``axes`` of a
    value run along the response's tokens.
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


# What a part can hold and NumPy reads back without a copy.
_DTYPES = ("float32", "float16", "int32")
# Padded tokens of a prompt and a response, of a batch that is never computed.
_PROMPT, _RESPONSE = 1009, 503


@dataclasses.dataclass(frozen=True)
class Group:
    """Answers read by one call: their keys, padding and how many share a prompt."""

    keys: tuple[str, ...]
    prompt: int
    response: int
    copies: int


@dataclasses.dataclass(frozen=True)
class Part:
    """Groups whose features make one file."""

    columns: tuple[str, ...]
    groups: tuple[Group, ...]

    @property
    def count(self) -> int:
        """How many answers it holds."""
        return sum(len(group.keys) for group in self.groups)

    @property
    def name(self) -> str:
        return digest(json.dumps(dataclasses.asdict(self)))


def check_axes(lm: LM, reducers: Mapping[str, Reducer]) -> None:
    """Raises TypeError on a feature that a store cannot keep, before any is computed.

    It has to be one array of float32, float16 or int32, with the axes that are
    declared.
    """
    named, length = tuple(reducers.items()), _PROMPT + _RESPONSE
    mask = jax.ShapeDtypeStruct((1, length), jnp.bool_)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    offsets = jax.ShapeDtypeStruct((1, _RESPONSE, 2), jnp.int32)
    batch = Batch(ids, mask, mask, mask, mask, offsets, _PROMPT)
    shapes = jax.eval_shape(lambda lm, b: read_jit(lm, b, named), lm, batch)
    for name, reducer in reducers.items():
        value = shapes[name]
        if not isinstance(value, jax.ShapeDtypeStruct):
            raise TypeError(
                f"reducer {name} gives a {type(value).__name__}; a store keeps single "
                "arrays: split it into one reducer per array"
            )
        if str(value.dtype) not in _DTYPES:
            raise TypeError(
                f"reducer {name} gives {value.dtype}; a store keeps "
                f"{', '.join(_DTYPES)}: end it with .astype(jnp.float32)"
            )
        shape = list(value.shape)
        del shape[reducer.batch_axis]
        along = [at for at, axis in enumerate(reducer.axes) if axis == "response"]
        if len(shape) != len(reducer.axes) or any(
            shape[at] != _RESPONSE for at in along
        ):
            raise TypeError(
                f"reducer {name} declares the axes {', '.join(reducer.axes)} and gives "
                f"{shape} for a response of {_RESPONSE} tokens; declare its 'values'"
            )
        other = {size for at, size in enumerate(shape) if at not in along}
        if other & {length, _PROMPT, _PROMPT + 1}:
            raise TypeError(
                f"reducer {name} gives {shape} for a prompt of {_PROMPT} tokens and a "
                f"response of {_RESPONSE}; a store keeps axes of fixed length or as "
                "long as the response: sum over this one, or cut it to the response"
            )


def make_table(
    lm: LM,
    part: Part,
    encoded: Mapping[str, Encoded],
    reducers: Mapping[str, Reducer],
    batch_size: int,
) -> "pa.Table":
    """Reads a part's answers and lays their features out as a table."""
    import pyarrow as pa

    pad_id = lm.require_tokenizer().pad_id
    values: dict[str, list[np.ndarray]] = defaultdict(list)
    keys, tokens = [], []
    for group in part.groups:
        rows = [encoded[key] for key in group.keys]
        size = max(1, batch_size // group.copies) * group.copies
        batch = collate(rows, pad_id, group.prompt, group.response, size)
        features = jax.device_get(read(lm, batch, reducers, copies=group.copies))
        for at, (key, row) in enumerate(zip(group.keys, rows, strict=True)):
            keys.append(key)
            tokens.append(len(row.response_ids))
            for column, reducer in reducers.items():
                value = np.take(features[column], at, axis=reducer.batch_axis)
                ends = [tokens[-1] if a == "response" else None for a in reducer.axes]
                values[column].append(value[tuple(map(slice, ends))])
    table = {"key": pa.array(keys), "tokens": pa.array(tokens, pa.int32())}
    fields = [pa.field("key", pa.string()), pa.field("tokens", pa.int32())]
    for column, reducer in reducers.items():
        flat = np.concatenate([value.ravel() for value in values[column]])
        ends = np.cumsum([0, *(value.size for value in values[column])])
        table[column] = pa.LargeListArray.from_arrays(pa.array(ends), pa.array(flat))
        sizes = zip(reducer.axes, values[column][0].shape, strict=True)
        shape = [-1 if axis == "response" else size for axis, size in sizes]
        about = {"shape": json.dumps(shape)}
        fields.append(pa.field(column, table[column].type, metadata=about))
    return pa.table(table, schema=pa.schema(fields))


def write_part(table: "pa.Table", folder: Path, name: str) -> None:
    """Writes a part under its name in the plan and the checksum of its bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    data = memoryview(sink.getvalue())
    path = folder / "parts" / f"{name}-{hashlib.sha256(data).hexdigest()}.parquet"
    with replacing(path, binary=True) as file:
        file.write(data)


def _parts(folder: Path) -> list[Path]:
    return sorted((folder / "parts").glob("[!.]*.parquet"))


def _contents(path: Path) -> tuple[set[str], list[str]]:
    """Feature columns of a part, and the keys of its rows."""
    with readable(path) as file:
        names = set(file.schema_arrow.names) - {"key", "tokens"}
        return names, file.read(columns=["key"])["key"].to_pylist()


def locate(
    folder: Path, keys: Sequence[str], columns: Iterable[str]
) -> dict[str, Column]:
    """The features of some answers, by column; all of them must have been computed."""
    wanted = set(keys)
    found: dict[str, dict[str, Place]] = {column: {} for column in columns}
    for path in _parts(folder):
        names, inside = _contents(path)
        for name in names & set(found):
            for at, key in enumerate(inside):
                if key in wanted:
                    found[name].setdefault(key, Place(path, at))
    cache = Cache()
    return {
        name: Column(name, [places[key] for key in keys], cache)
        for name, places in found.items()
    }


def missing(
    folder: Path, encoded: Mapping[str, Encoded], columns: Mapping[str, Any]
) -> dict[str, list[str]]:
    """The columns that each row still lacks, for the rows that lack any."""
    have: dict[str, set[str]] = defaultdict(set)
    for path in _parts(folder):
        names, keys = _contents(path)
        for column in names & set(columns):
            have[column].update(keys)
    lack = {key: [c for c in sorted(columns) if key not in have[c]] for key in encoded}
    return {key: names for key, names in lack.items() if names}
