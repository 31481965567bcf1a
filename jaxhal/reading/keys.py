"""What makes a feature the same feature: hashes of text, reducer and model."""

import dataclasses
import functools
import hashlib
import inspect
import re
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxhal.features.base import Reducer
from jaxhal.models.batching import Encoded
from jaxhal.models.encoders.text_encoder import TextEncoder
from jaxhal.models.lm import LM
from jaxhal.models.mesh import here
from jaxhal.models.quantized import is_stored
from jaxhal.models.weights import is_outline


def key_of(row: Encoded) -> str:
    """The content hash of an encoded example: its tokens and masks."""
    parts = (row.prompt_ids, row.response_ids, row.context, row.document, row.question)
    data = b"|".join(str(len(part)).encode() + part.tobytes() for part in parts)
    return digest(data)


def column_name(reducer: Reducer) -> str:
    """Which numbers a reducer computes, as the name of its column.

    Reducers of this package are named by class and fields; any other one also by a hash
    of what its class holds (methods by their source, constants by their value) so that
    a changed one is computed anew.  A function outside the class that a method calls is
    not seen: give the reducer a field that says which version it is.  Raises TypeError
    when the source of a method cannot be read, or a value has no text of its own.
    """
    kind = type(reducer)
    fields = dataclasses.fields(reducer)
    values = ", ".join(f"{f.name}={getattr(reducer, f.name)!r}" for f in fields)
    name = f"{kind.__name__}({values})"
    if kind.__module__.split(".")[0] == "jaxhal":
        return name
    own = [c for c in kind.__mro__ if c.__module__.split(".")[0] != "jaxhal"]
    known = {field.name for field in fields}
    try:
        # Item by item, since a class in a notebook cell has no source of its own.
        held = [
            f"{key}={_text(item)}"
            for base in own
            for key, item in vars(base).items()
            if key not in known and (key in _USED or not key.startswith(_MADE))
        ]
    except OSError as error:
        raise TypeError(
            f"reducer {name} has no source that can be read ({error}), so a store "
            "cannot tell it from another of that name; define it in a file or a "
            "notebook cell"
        ) from error
    source = "\n".join([*(c.__qualname__ for c in kind.__mro__), *held])
    if nameless := re.search(r"<.+? at 0x[0-9a-f]+>", name + source):
        raise TypeError(
            f"reducer {name} holds {nameless[0]}, which is another text in every "
            "process, so a store cannot find its feature again; use numbers, strings, "
            "tuples or frozen dataclasses of these"
        )
    return f"{kind.__module__}.{name}@{digest(source)[:8]}"


# What Python puts into a class says nothing about its numbers, but for what it calls.
_MADE = ("__", "_abc_")
_USED = ("__post_init__", "__call__")


def _text(item: Any) -> str:
    """What an attribute of a class does, as text: the source of a function."""
    if isinstance(item, property | functools.cached_property):
        item = item.fget if isinstance(item, property) else item.func
    item = inspect.unwrap(item)  # of jax.jit, staticmethod and the like
    if inspect.isfunction(item):
        return inspect.getsource(item)
    if isinstance(item, np.ndarray | jax.Array):  # whose text leaves values out
        return digest(np.asarray(item).tobytes()) + str((item.shape, item.dtype))
    return repr(item)


# Bytes of a weight that are brought here together where processes hold parts of it.
_RUN = 64 << 20
# A model's configuration and the names its weights have in memory -> its weights, as
# long as somebody has them, and their hash.
_Named = tuple[str | int, ...]
_KNOWN: dict[_Named, tuple[list[weakref.ref], str]] = {}


def fingerprint(model: LM | TextEncoder) -> str:
    """A hash of the model's configuration and every one of its weights that is there.

    That of weights which have been read before, and are the same arrays, is known.
    """
    leaves = [leaf for leaf in jax.tree.leaves(model.params) if not is_outline(leaf)]
    named = (repr(model.config), *map(id, leaves))
    weights, known = _KNOWN.get(named, ([], ""))
    if known and all(ref() is leaf for ref, leaf in zip(weights, leaves, strict=True)):
        return known
    for key, (weights, _) in list(_KNOWN.items()):
        if not all(ref() is not None for ref in weights):
            _KNOWN.pop(key, None)  # another thread may have been first
    found = _fingerprint(model)
    _KNOWN[named] = [weakref.ref(leaf) for leaf in leaves], found
    return found


def _said(item: Any) -> str:
    """What a configuration says beyond its defaults, in alphabetical order.

    So a field that a later version adds leaves the fingerprints of older models alone.
    """
    if isinstance(item, tuple):
        return f"({', '.join(map(_said, item))})"
    if not dataclasses.is_dataclass(item):
        return repr(item)
    said = []
    for field in dataclasses.fields(item):
        value = getattr(item, field.name)
        if value != field.default:
            said.append(f"{field.name}={_said(value)}")
    return f"{type(item).__name__}({', '.join(sorted(said))})"


def _fingerprint(model: LM | TextEncoder) -> str:
    digest = hashlib.sha256(_said(model.config).encode())
    leaves = jax.tree_util.tree_leaves_with_path(model.params, is_leaf=is_stored)
    for path, leaf in leaves:
        digest.update(f"{jax.tree_util.keystr(path)}{leaf.dtype}{leaf.shape}".encode())
        if is_outline(leaf):
            continue
        # Weights that are kept as they are stored are the numbers that they stand for.
        for part in leaf.each() if is_stored(leaf) else [leaf]:
            for some in _runs(part):
                digest.update(np.ascontiguousarray(some).view(np.uint8).data)
    return digest.hexdigest()[:16]


def _runs(array: Any) -> Iterator[Any]:
    """An array in order, a run at a time where processes hold parts of it."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        yield array
        return
    step = max(1, _RUN * len(array) // max(1, array.nbytes))
    for start in range(0, len(array), step):
        yield here(array[start : start + step])


def digest(data: str | bytes) -> str:
    data = data.encode() if isinstance(data, str) else data
    return hashlib.sha256(data).hexdigest()[:32]
