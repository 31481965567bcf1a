"""Features of some answers as a Parquet file: written whole, read column by column."""

import contextlib
import functools
import hashlib
import json
from collections import defaultdict
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


class Group(NamedTuple):
    """Answers read by one call: their keys, and as :class:`Planned` has them."""

    keys: tuple[str, ...]
    prompt_length: int
    response_length: int
    size: int
    copies: int


class StorePart(NamedTuple):
    """Groups whose features make one file."""

    columns: tuple[str, ...]
    groups: tuple[Group, ...]

    @property
    def keys(self) -> list[str]:
        return [key for group in self.groups for key in group.keys]

    @property
    def name(self) -> str:
        return digest(json.dumps(self))


class Place(NamedTuple):
    """Where a value is: its part, and its row there."""

    path: Path
    row: int


def places(
    paths: Iterable[Path], columns: Iterable[str]
) -> dict[str, dict[str, Place]]:
    """Where the features of answers are, by column and key; the first one counts."""
    found: dict[str, dict[str, Place]] = {column: {} for column in columns}
    for path in paths:
        with readable(path) as file:
            names = found.keys() & set(file.schema_arrow.names)
            keys = file.read(columns=["key"])["key"].to_pylist() if names else []
        for name in names:
            for row, key in enumerate(keys):
                found[name].setdefault(key, Place(path, row))
    return found


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
        raise damaged(f"part {path}", error) from error


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
        raise damaged(f"part {path}", f"its sha256 is {found}")


def damaged(what: str, why: object) -> ValueError:
    return ValueError(
        f"{what} of the feature store is damaged; delete it and run the same again, "
        f"which makes it anew ({why})"
    )


class Values(NamedTuple):
    """A column of a part: all values in a row, where each ends, and their tokens."""

    flat: np.ndarray
    ends: np.ndarray
    tokens: np.ndarray


class ColumnCache(dict[tuple[Path, str], Values]):
    """Columns of parts, read when asked for; the oldest make room for others."""

    def __init__(self, budget: int = 1 << 30):
        super().__init__()
        self._budget = budget

    def __missing__(self, key: tuple[Path, str]) -> Values:
        path, name = key
        with readable(path) as file:
            table = file.read(columns=["tokens", name]).combine_chunks()
        chunk = table[name].chunk(0)
        arrays = chunk.values, chunk.offsets, table["tokens"].chunk(0)
        found = Values(*(array.to_numpy() for array in arrays))
        used = sum(one.flat.nbytes for one in (*self.values(), found))
        while self and used > self._budget:
            used -= self.pop(next(iter(self))).flat.nbytes
        self[key] = found
        return found


class Column(Sequence[np.ndarray]):
    """A feature of some answers, in their order; values are read when indexed.

    Neighbours in ``places`` that share a part cost one reading of it.  ``axes`` of a
    value run along the response's tokens.
    """

    def __init__(self, name: str, places: Sequence[Place], cache: ColumnCache):
        self.name, self.places, self._cache = name, list(places), cache
        self._shape: list[int] = []
        if places:
            with readable(places[0].path) as file:
                about = file.schema_arrow.field(name).metadata
            self._shape = json.loads(about[b"shape"])
        self.axes = [axis for axis, n in enumerate(self._shape) if n == -1]

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> "Column": ...
    def __getitem__(self, index: int | slice) -> "np.ndarray | Column":
        if isinstance(index, slice):
            return Column(self.name, self.places[index], self._cache)
        path, row = self.places[index]
        flat, ends, tokens = self._cache[path, self.name]
        shape = [tokens[row] if n == -1 else n for n in self._shape]
        return flat[ends[row] : ends[row + 1]].reshape(shape)


# What a part can hold and NumPy reads back without a copy.
_DTYPES = ("float32", "float16", "int32")
# Padded tokens of a prompt and a response, of a batch that is never computed.
_PROMPT, _RESPONSE = 1009, 503
# What has been found fit: a reducer, and the structure of the model that it reads.
_fit: set[tuple[Reducer, Any]] = set()


def check_axes(lm: LM, reducers: Mapping[str, Reducer]) -> None:
    """Raises TypeError on a feature that a store cannot keep, before any is computed.

    It has to be one array of float32, float16 or int32, with the axes that are
    declared.
    """
    leaves, tree = jax.tree.flatten(lm.bare)
    model = tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    new = {n: r for n, r in reducers.items() if (r, model) not in _fit}
    if not new:
        return
    named, length = tuple(new.items()), _PROMPT + _RESPONSE
    mask = jax.ShapeDtypeStruct((1, length), jnp.bool_)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    offsets = jax.ShapeDtypeStruct((1, _RESPONSE, 2), jnp.int32)
    batch = Batch(ids, mask, mask, mask, mask, offsets, _PROMPT)
    shapes = jax.eval_shape(lambda lm, b: read_jit(lm, b, named), lm.bare, batch)
    for name, reducer in new.items():
        if why := _unfit(reducer, shapes[name]):
            raise TypeError(f"reducer {name} {why}")
        _fit.add((reducer, model))


def _unfit(reducer: Reducer, value: Any) -> str:
    if not isinstance(value, jax.ShapeDtypeStruct):
        return (
            f"gives a {type(value).__name__}; a store keeps single arrays: split it "
            "into one reducer per array"
        )
    if str(value.dtype) not in _DTYPES:
        return (
            f"gives {value.dtype}; a store keeps {', '.join(_DTYPES)}: end it with "
            ".astype(jnp.float32)"
        )
    shape = list(value.shape)
    del shape[reducer.batch_axis]
    sizes = [*zip(shape, reducer.axes, strict=False)]
    if len(shape) != len(reducer.axes) or any(
        axis == "response" and size != _RESPONSE for size, axis in sizes
    ):
        return (
            f"declares the axes {', '.join(reducer.axes)} and gives {shape} for a "
            f"response of {_RESPONSE} tokens; declare its 'values'"
        )
    if {_PROMPT + _RESPONSE, _PROMPT, _PROMPT + 1} & set(shape):
        return (
            f"gives {shape} for a prompt of {_PROMPT} tokens and a response of "
            f"{_RESPONSE}; a store keeps axes of fixed length or as long as the "
            "response: sum over this one, or cut it to the response"
        )
    return ""


def make_table(
    lm: LM,
    part: StorePart,
    encoded: Mapping[str, Encoded],
    reducers: Mapping[str, Reducer],
) -> "pa.Table":
    """Reads a part's answers and lays their features out as a table."""
    import pyarrow as pa

    pad_id = lm.require_tokenizer().pad_id
    asked = {column: reducers[column] for column in part.columns}
    values: dict[str, list[np.ndarray]] = defaultdict(list)
    tokens = [len(encoded[key].response_ids) for key in part.keys]
    for keys, prompt, response, size, copies in part.groups:
        rows = [encoded[key] for key in keys]
        batch = collate(rows, pad_id, prompt, response, size)
        features = jax.device_get(read(lm, batch, asked, copies=copies))
        for at, row in enumerate(rows):
            count = len(row.response_ids)
            for column, reducer in asked.items():
                value = np.take(features[column], at, axis=reducer.batch_axis)
                ends = [count if a == "response" else None for a in reducer.axes]
                values[column].append(value[tuple(map(slice, ends))])
    table: dict[str, Any] = {"key": part.keys, "tokens": pa.array(tokens, pa.int32())}
    fields = [pa.field("key", pa.string()), pa.field("tokens", pa.int32())]
    for column, reducer in asked.items():
        flat = np.concatenate([value.ravel() for value in values[column]])
        ends = np.cumsum([0, *(value.size for value in values[column])])
        table[column] = pa.LargeListArray.from_arrays(pa.array(ends), pa.array(flat))
        sizes = zip(reducer.axes, values[column][0].shape, strict=True)
        shape = [-1 if axis == "response" else size for axis, size in sizes]
        about = {"shape": json.dumps(shape)}
        fields.append(pa.field(column, table[column].type, metadata=about))
    return pa.table(table, schema=pa.schema(fields))


def write_part(table: "pa.Table", folder: Path, name: str) -> None:
    """Writes a part under its name and the checksum of its bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    data = memoryview(sink.getvalue())
    path = folder / f"{name}-{hashlib.sha256(data).hexdigest()}.parquet"
    with replacing(path, binary=True) as file:
        file.write(data)
