"""What makes a feature the same feature: hashes of text, reducer and model."""

import dataclasses
import hashlib
import inspect

import jax
import numpy as np

from jaxhal.models.batching import Encoded
from jaxhal.models.lm import LM
from jaxhal.types import Reducer


def key_of(row: Encoded) -> str:
    """The content hash of an encoded example: its tokens and masks."""
    parts = (row.prompt_ids, row.response_ids, row.context, row.document, row.question)
    data = b"|".join(str(len(part)).encode() + part.tobytes() for part in parts)
    return digest(data)


def column_name(reducer: Reducer) -> str:
    """Which numbers a reducer computes, as the name of its column.

    Reducers of this package are named by class and fields; any other one also by a hash
    of its source, so that a changed one is computed anew.

    Example:
      >>> from jaxhal import HiddenStates
      >>> column_name(HiddenStates(layers=(20,), tokens="mean"))
      "HiddenStates(layers=(20,), tokens='mean')"
    """
    kind = type(reducer)
    fields = dataclasses.fields(reducer)
    values = ", ".join(f"{f.name}={getattr(reducer, f.name)!r}" for f in fields)
    name = f"{kind.__name__}({values})"
    if kind.__module__.split(".")[0] == "jaxhal":
        return name
    # Of its methods, since a class in a notebook cell has no source of its own.
    bases = [c for c in kind.__mro__ if c.__module__.split(".")[0] != "jaxhal"]
    items = [item for base in bases for item in vars(base).values()]
    methods = [item for item in items if inspect.isfunction(item)]
    try:
        own = [inspect.getsource(m) for m in methods if not m.__name__.startswith("__")]
        source = "\n".join(own)
    except (OSError, TypeError) as error:
        raise TypeError(
            f"reducer {name} has no source that can be read ({error}), so a store "
            "cannot tell it from another of that name; define it in a file or a "
            "notebook cell"
        ) from error
    return f"{kind.__module__}.{name}@{digest(source)[:8]}"


def fingerprint(lm: LM) -> str:
    """A hash of the model's configuration and every one of its weights."""
    digest = hashlib.sha256(repr(lm.config).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(lm.params):
        leaf = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)}{leaf.dtype}{leaf.shape}".encode())
        digest.update(np.ascontiguousarray(leaf).view(np.uint8).data)
    return digest.hexdigest()[:16]


def digest(data: str | bytes) -> str:
    data = data.encode() if isinstance(data, str) else data
    return hashlib.sha256(data).hexdigest()[:32]
