"""Boundary points in Milvus: a file on this machine, or a server, by one code."""

import bisect
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxhal.io.checks import at_least
from jaxhal.io.extras import brought_by
from jaxhal.io.showing import quoted
from jaxhal.watchdog.bounds import Hit, Point, is_name, paired
from jaxhal.watchdog.index import checked

# What Milvus takes of one JSON field, and of one request.
_BYTES, _BLOCK = 65536, 1000
_MARK = 48  # bytes that say how much of a text is not stored
_FIELDS = ("vector", "payload")
# Its code for a collection that has to be loaded first.
_NOT_LOADED = 101
# Milvus Lite hangs up on a client that asks whether it is still there; never is:
_QUIET = {
    "grpc.keepalive_time_ms": 2**31 - 1,
    "grpc.keepalive_permit_without_calls": False,
}


class MilvusStore:
    """Points in a collection of Milvus, as :class:`~jaxhal.watchdog.BoundaryStore`.

    Searched whole by cosine, with strong consistency: what was added is found.  ``uri``
    is a file that ends in ``.db``, which embedded Milvus Lite keeps, or the address of
    a server, which may ask for a ``token`` such as ``"user:password"``.  The collection
    is made if it is not there.
    """

    def __init__(
        self, width: int, uri: str | Path, collection: str = "boundary", token: str = ""
    ):
        with brought_by("watchdog"):
            import pymilvus
        self.width, self._name = width, collection
        self._error = pymilvus.MilvusException
        try:
            options = _QUIET if str(uri).endswith(".db") else {}
            self._client = pymilvus.MilvusClient(
                str(uri), token=token, grpc_options=options
            )
            if not self._client.has_collection(collection):
                self._make(pymilvus.DataType)
            self._client.load_collection(collection)
            about: Any = self._client.describe_collection(collection)
        except pymilvus.MilvusException as error:
            raise RuntimeError(
                f"Milvus at {uri} cannot be used ({error}); check the address and the "
                "token, which only a server gets whose host you named, or give a file "
                "that ends in .db and that no other process has open"
            ) from error
        (found,) = [
            one["params"]["dim"] for one in about["fields"] if one["name"] == "vector"
        ]
        if int(found) != width:
            raise ValueError(
                f"collection {collection!r} at {uri} holds vectors of {found} numbers, "
                f"and {width} are asked for; use the encoder that made them, or "
                "another collection"
            )

    def _make(self, kinds: Any) -> None:
        schema = self._client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("id", kinds.VARCHAR, is_primary=True, max_length=256)
        schema.add_field("vector", kinds.FLOAT_VECTOR, dim=self.width)
        schema.add_field("entropy", kinds.DOUBLE)
        schema.add_field("payload", kinds.JSON)
        index = self._client.prepare_index_params()
        index.add_index("vector", index_type="FLAT", metric_type="COSINE")
        self._client.create_collection(
            self._name, schema=schema, index_params=index, consistency_level="Strong"
        )

    def __len__(self) -> int:
        (found,) = self._asked("query", filter="", output_fields=["count(*)"])
        return int(found["count(*)"])

    def __contains__(self, id: object) -> bool:
        return isinstance(id, str) and bool(self._known([id]))

    def add(self, points: Sequence[Point], vectors: Any) -> None:
        """Of a context or response that is too long the beginning is stored."""
        block = paired(points, vectors, self.width)
        rows = [
            {"id": o.id, "vector": v, "entropy": o.entropy, "payload": _payload(o)}
            for o, v in zip(points, block, strict=True)
        ]
        for start in range(0, len(rows), _BLOCK):
            self._asked("upsert", data=rows[start : start + _BLOCK])

    def remove(self, ids: Sequence[str]) -> int:
        if known := self._known(ids):
            self._asked("delete", ids=sorted(known))
        return len(known)

    def _known(self, ids: Sequence[str]) -> set[str]:
        ids = [*filter(is_name, ids)]
        found = self._asked("get", ids=ids, output_fields=["id"]) if ids else []
        return {row["id"] for row in found}

    def search(self, vectors: Any, k: int) -> list[list[Hit]]:
        block = checked(vectors, self.width)
        at_least(1, k=k)
        if not len(block):
            return []
        found = self._asked(
            "search", data=[*block], limit=k, output_fields=["entropy", *_FIELDS]
        )
        return [[_hit(one) for one in hits] for hits in found]

    def highest_entropy(self) -> float | None:
        pages = self._asked(
            "query_iterator", batch_size=_BLOCK, output_fields=["entropy"]
        )
        found = []
        try:
            while page := pages.next():
                found += [row["entropy"] for row in page]
        except self._error as error:
            raise self._failed("query", error) from error
        finally:
            pages.close()
        return max(found, default=None)

    def close(self) -> None:
        self._client.close()

    def _asked(self, method: str, **options: Any) -> Any:
        ask = getattr(self._client, method)
        try:
            try:
                return ask(self._name, **options)
            except self._error as error:
                if error.code != _NOT_LOADED:
                    raise
            # Its server was started again in the meantime.
            self._client.load_collection(self._name)
            return ask(self._name, **options)
        except self._error as error:
            raise self._failed(method, error) from error

    def _failed(self, method: str, error: Exception) -> RuntimeError:
        return RuntimeError(f"Milvus does not {method} in {self._name!r}: {error}")


def _payload(point: Point) -> dict[str, Any]:
    """The texts of a point; of what is too long for Milvus, as much as fits."""
    fields = dataclasses.asdict(point)
    del fields["id"], fields["entropy"]
    for name in ("context", "response"):
        text = fields[name]
        if over := max(0, _size(fields) - _BYTES):
            room = max(0, _size(text) - 2 - over - _MARK)
            # Characters take from 1 to 12 bytes.
            lengths = range(len(text) + 1)
            fit = bisect.bisect(lengths, room, key=lambda n: _size(text[:n]) - 2) - 1
            missing = len(text) - fit
            fields[name] = f"{text[:fit]} [{missing} characters are not stored]"
    if (size := _size(fields)) > _BYTES:
        raise ValueError(
            f"point {quoted(point.id)} has {size} bytes of text beside its context and "
            f"response, and Milvus takes {_BYTES}; use an ExactStore"
        )
    return fields


def _size(value: Any) -> int:
    return len(json.dumps(value))


def _hit(found: Any) -> Hit:
    row = found["entity"]
    vector = np.asarray(row["vector"], np.float32)
    length = float(np.linalg.norm(vector))
    point = Point(id=found["id"], entropy=row["entropy"], **row["payload"])
    return Hit(point, float(found["distance"]), vector / length if length else vector)
