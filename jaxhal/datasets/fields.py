"""Fields of a row, checked: an error names the field and what it holds."""

import json
from collections.abc import Mapping
from typing import Any

from jaxhal.io.showing import cut, quoted


def items(
    fields: Mapping[str, Any], key: str, of: str, where: str = ""
) -> list[Any] | None:
    """The list of a field, where there is one; ValueError says what it has to hold."""
    found = fields.get(key)
    if found is not None and not isinstance(found, list):
        raise ValueError(f"'{where}{key}' is {kind(found)}; use a list of {of}")
    return found


def name_field(fields: Mapping[str, Any], key: str) -> str:
    """A name among fields, empty where there is none; a number counts as one."""
    name = fields.get(key)
    if name is None:
        return ""
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
