"""Fields of a row, checked: an error names the field and what it holds."""

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxhal.io.showing import cut, quoted

#: Fields that go by other names too, as published data sets have them.
NAMES = {
    "response": ("response", "answer", "output", "generated_answer"),
    "context": ("context", "contexts", "passages", "document", "knowledge"),
    "question": ("question", "query"),
    "label": ("label", "hallucination", "is_hallucination"),
    "source": ("source", "source_id"),
}

# How much of a key has to be that of another, by difflib, for it to be meant.
_NEAR = 0.85


def named(fields: Mapping[str, Any], field: str) -> tuple[str, Any] | None:
    """The name by which a row has a field, and its value; ``None`` where it has none.

    Raises ValueError where several names stand for it, since nothing says which is
    meant.
    """
    names = NAMES.get(field, (field,))
    given = [name for name in names if not left_out(fields.get(name))]
    if len(given) > 1:
        raise ValueError(
            f"{' and '.join(map(repr, given))} both stand for the {field}; drop or "
            "rename all but one"
        )
    return (given[0], fields[given[0]]) if given else None


def plain(value: Any) -> Any:
    """A value as JSON has it: NumPy's numbers and arrays, and tuples, are others."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    return value


def left_out(value: Any) -> bool:
    """Whether a value says nothing, as null or as pandas has it."""
    if isinstance(value, (float, np.floating)):
        return math.isnan(value)
    return value is None or type(value).__name__ == "NAType"


def near(key: Any, names: Iterable[str]) -> str | None:
    """Which of some names a key is nearly, if it is text, and is none of them."""
    if not isinstance(key, str) or key in names:
        return None
    found = difflib.get_close_matches(key.lower(), [*names], 1, _NEAR)
    return found[0] if found else None


def misspelt(key: Any, name: str) -> ValueError:
    """What is wrong with a key that is nearly another, where that is missing."""
    return ValueError(
        f"{quoted(key)} is not read; write {name!r}, or call it otherwise"
    )


def items(
    fields: Mapping[str, Any], key: str, of: str, where: str = ""
) -> list[Any] | None:
    """The list of a field, where there is one; ValueError says what it has to hold."""
    found = fields.get(key)
    if found is not None and not isinstance(found, list):
        raise ValueError(f"'{where}{key}' is {kind(found)}; use a list of {of}")
    return found


def name_field(fields: Mapping[str, Any], field: str) -> str:
    """A name among fields, empty where there is none; a number counts as one."""
    if (given := named(fields, field)) is None:
        return ""
    key, name = given
    if isinstance(name, float) and name.is_integer():  # as pandas has it beside none
        name = int(name)
    if isinstance(name, bool) or not isinstance(name, (str, int)):
        raise ValueError(f"{key!r} is {kind(name)}; use text or a whole number")
    return text_field(key, str(name))


def text_field(key: str, value: Any) -> str:
    """A value that has to be text; ValueError names the key."""
    if not isinstance(value, str):
        raise ValueError(f"{key!r} is {kind(value)}; use text")
    # JSON can escape half of a UTF-16 pair; no tokenizer takes it and no file holds it.
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ValueError(f"{key!r} holds half of a surrogate pair; it is no valid text")
    return value


def kind(value: Any) -> str:
    """What a value is, for an error: ``"a list"``, ``"text"``, or a short value itself.

    >>> kind([1, 2]), kind("word"), kind(1.5)
    ('a list', 'text', '1.5')
    """
    kinds = {dict: "an object", list: "a list", str: "text", type(None): "null"}
    return kinds.get(type(value)) or short(value)


def short(value: Any) -> str:
    """The value as JSON has it, short enough for one line."""
    try:
        text = json.dumps(value, default=repr)
    except (RecursionError, TypeError, ValueError):  # as of keys that are no text
        text = quoted(value)
    return cut(text, 40)
