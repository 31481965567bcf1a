"""Rows of tables in common layouts: dicts, Parquet, JSON Lines, Hugging Face data sets.

A field may go by other names, as published data sets have it:

========  =====================================================
field     also read
========  =====================================================
response  ``answer``, ``output``, ``generated_answer``
context   ``contexts``, ``passages``, ``document``, ``knowledge``
question  ``query``
label     ``hallucination``, ``is_hallucination``
source    ``source_id``
========  =====================================================

Other columns are ignored.  Two names of one field in one row are an error, since
nothing says which is meant.
"""

import contextlib
import functools
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxhal.datasets.fields import NAMES, kind, left_out, near, plain
from jaxhal.datasets.jsonl import Row, existing, numbered_lines, parse, to_row
from jaxhal.io.progress import taking
from jaxhal.types import Example

if TYPE_CHECKING:
    import datasets

_ALONE = ("id", "prompt", "messages", "tools", "labels", "split", "samples")
_ALONE += ("templated", "states", "logprobs")
_COLUMNS = {*_ALONE, *itertools.chain(*NAMES.values())}
# What classes of a label may be called, whose numbers follow their order alone.
_CLASSES = {"1": 1, "yes": 1, "true": 1, "hallucinated": 1}
_CLASSES |= {"0": 0, "no": 0, "false": 0, "grounded": 0, "supported": 0}


def from_rows(rows: Iterable[Any], split: str = "") -> Iterator[Row]:
    """Dicts to rows, in order, under the names this module lists.

    ``None`` and NaN mean left out.  A label may be 1, True or ``"yes"`` for
    hallucinated, 0, False or ``"no"`` for grounded; spans may come as a list of
    ``{start, end, label}`` or as a dict of lists.  A bad row comes back with its error
    and never raises; ``"row 1"`` is the first.

    Args:
      split: for rows that name none.

    >>> rows = [{"prompt": "Hi", "answer": "Hello", "is_hallucination": False}, {}]
    >>> for row in from_rows(rows):
    ...     print(row.id, row.example and row.example.label, row.error)
    row 1 0 None
    row 2 None row 2: 'response' is missing; every row needs one
    """
    return _rows(rows, split)


def _rows(rows: Iterable[Any], split: str, structs: bool = False) -> Iterator[Row]:
    for number, row in enumerate(rows, 1):
        yield to_row(number, "row", functools.partial(_fields, row, split, structs))


def from_jsonl(path: str | os.PathLike) -> Iterator[Row]:
    """The rows of a JSON Lines file, as :func:`from_rows` reads them."""
    return (
        to_row(line, "line", lambda raw=raw: _fields(parse(raw)))
        for line, raw in numbered_lines(path)
    )


def from_parquet(path: str | os.PathLike) -> Iterator[Row]:
    """The rows of a Parquet file, as :func:`from_rows` reads them.

    Of one that ``datasets`` wrote, classes of a label count by their names.  Raises
    ValueError when it is no Parquet file, or has none of the columns.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = existing(path, ".parquet")
    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is no Parquet file: {error}") from None
    schema = file.schema_arrow
    said = _features((schema.metadata or {}).get(b"huggingface"))
    # Who changed the columns may have left what was said of them.
    numbers = (one.name for one in schema if pa.types.is_integer(one.type))
    features = {name: said[name] for name in numbers if name in said}
    batches = file.iter_batches(columns=_known(schema.names))
    rows = (row for batch in batches for row in batch.to_pylist())
    return _rows(_named(rows, features), "", structs=True)


def from_dataset(dataset: "datasets.Dataset") -> Iterator[Row]:
    """The rows of a Hugging Face data set, as :func:`from_rows` reads them.

    Rows that name no split are of the data set's own.  Classes of a label count by
    their names.  Raises ValueError on a ``DatasetDict``, of which one split must be
    chosen, on a class of another name than yes, true, hallucinated or 1, and no,
    false, grounded, supported or 0, or when it has none of the columns.
    """
    if isinstance(dataset, Mapping):
        raise ValueError(
            f"got the splits {', '.join(map(str, dataset))}; give one of them, such as "
            f"dataset[{next(iter(dataset), 'train')!r}]"
        )
    columns = _known(dataset.column_names or list(next(iter(dataset), {})))
    known: Any = dataset.with_format(None).select_columns(columns)
    named = _named(known, dataset.features or {})
    return _rows(named, str(dataset.split or ""), structs=True)


def from_hub(id: str, split: str, name: str | None = None) -> Iterator[Row]:
    """The rows of a data set on the Hugging Face hub, as :func:`from_rows` reads them.

    Data only: ``datasets`` refuses one that needs a script of its own to load, and
    nothing here lets it run code.

    Args:
      id: such as ``"owner/name"``, or a folder of data files.
      name: of the configuration, where there are several.
    """
    import datasets
    from huggingface_hub import utils

    with taking(f"{id} from the Hugging Face hub or its cache", datasets, utils):
        found = datasets.load_dataset(id, name, split=split)
    return from_dataset(found)


def examples(rows: Iterable[Row]) -> list[Example]:
    """The examples of rows that are all good; ValueError at the first bad row."""
    found = []
    for row in rows:
        if row.example is None:
            raise ValueError(row.error)
        found.append(row.example)
    return found


def _known(columns: Sequence[str]) -> list[str]:
    """The columns to read: others may be large, or need a decoder.

    What is misspelt is read, to be named where something is missing.
    """
    known = [name for name in columns if name in _COLUMNS]
    if not known:
        raise ValueError(
            f"none of the columns {', '.join(columns)} is known; rename them to "
            f"{', '.join((*NAMES, *_ALONE))}"
        )
    return [name for name in columns if name in known or near(name, _COLUMNS)]


def _features(metadata: bytes | None) -> dict[str, Any]:
    """What ``datasets`` wrote of the columns of a Parquet file, by their names."""
    with contextlib.suppress(ValueError, KeyError, TypeError):  # others wrote it
        return dict(json.loads(metadata or b"{}")["info"]["features"])
    return {}


def _names_of(feature: Any) -> list[str] | None:
    """Of the classes of a column, as ``datasets`` has it or writes it down."""
    if isinstance(feature, Mapping):
        return feature.get("names") if feature.get("_type") == "ClassLabel" else None
    return getattr(feature, "names", None)


def _named(rows: Iterable[Any], features: Mapping[str, Any]) -> Iterator[Any]:
    """The same rows, numbers of classes replaced by the labels of their names."""
    found: dict[str, dict[int, int]] = {}
    for column in NAMES["label"]:
        if (names := _names_of(features.get(column))) is None:
            continue
        if strange := [name for name in names if name.casefold() not in _CLASSES]:
            raise ValueError(
                f"the classes of {column!r} are {', '.join(names)}; rename "
                f"{', '.join(strange)}, so that each is one of {', '.join(_CLASSES)}"
            )
        found[column] = {at: _CLASSES[n.casefold()] for at, n in enumerate(names)}
    return (row | {n: of.get(row[n]) for n, of in found.items()} for row in rows)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


def _fields(row: Any, split: str = "", structs: bool = False) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise ValueError(f"expected a dict of columns, got {kind(row)}")
    own = split if left_out(row.get("split")) else row["split"]
    known = {**row, "split": own}
    try:
        known |= {key: plain(known[key]) for key in _COLUMNS & known.keys()}
        # In a column of structs each has the members of all, null where it had none.
        if structs or isinstance(row.get("tools"), np.ndarray):
            known["tools"] = _without_nulls(known.get("tools"))
    except RecursionError:
        raise ValueError("it is nested too deep; give lists and objects") from None
    return known
