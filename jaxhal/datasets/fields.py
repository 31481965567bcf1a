"""The fields of a row to an example, or to what is wrong with them in words."""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxhal.types import Example, Label


class Row(NamedTuple):
    """One row of input: either an example, or what is wrong with it.

    Attributes:
      line: its number in the file or table, from 1.
      id: the row's own id as text, ``"line N"`` or ``"row N"`` where it has none that
        can be read.
      example: the answer to judge, ``None`` when the row is bad.
      error: number and problem in words, ``None`` when the row is good.
    """

    line: int
    id: str
    example: Example | None
    error: str | None


def to_row(number: int, unit: str, read: Callable[[], Mapping[str, Any]]) -> Row:
    """The row whose fields ``read`` gives; a ValueError of it is the row's error.

    Args:
      number: of the row, from 1.
      unit: what is numbered, ``"line"`` or ``"row"``.
      read: gives the fields by their own names.

    >>> to_row(3, "line", lambda: {"prompt": "Hi", "response": 5}).error
    "line 3: 'response' is 5; use text"
    """
    name = f"{unit} {number}"
    try:
        fields = read()
        name = name_field(fields, "id") or name
        return Row(number, name, _example(fields, name), None)
    except ValueError as error:
        return Row(number, name, None, f"{unit} {number}: {error}")


def _example(fields: Mapping[str, Any], name: str) -> Example:
    text = {
        key: text_field(key, fields[key])
        for key in ("response", "prompt", "context", "question", "split")
        if fields.get(key) is not None
    }
    if "response" not in text:
        raise ValueError("'response' is missing; every row needs one")
    label = fields.get("label")
    if label is not None and (type(label) is not int or label not in (0, 1)):
        raise ValueError(f"'label' is {_show(label)}; use 0, 1 or leave it out")
    templated = fields.get("templated")
    if templated is not None and type(templated) is not bool:
        raise ValueError(
            f"'templated' is {_show(templated)}; use true for a finished prompt, "
            "false, or leave it out"
        )
    return Example(
        **text,
        id=name,
        templated=bool(templated),
        labels=_labels(fields.get("labels")),
        label=label,
        source=name_field(fields, "source"),
        samples=_samples(fields.get("samples")),
    )


def name_field(fields: Mapping[str, Any], key: str) -> str:
    """A name among fields, empty where there is none; a number counts as one.

    Raises:
      ValueError: when it is something else, or no valid text.
    """
    name = fields.get(key)
    if name is None:
        return ""
    if isinstance(name, bool) or not isinstance(name, (str, int)):
        raise ValueError(f"{key!r} is {kind(name)}; use text or a whole number")
    return _whole(key, str(name))


def _labels(spans: Any) -> tuple[Label, ...] | None:
    if spans is None:
        return None
    if not isinstance(spans, list):
        raise ValueError(f"'labels' is {kind(spans)}; use a list of spans")
    return tuple(_label(index, span) for index, span in enumerate(spans))


def _label(index: int, span: Any) -> Label:
    where = f"'labels[{index}]"
    if not isinstance(span, dict):
        raise ValueError(f"{where}' is {kind(span)}; use {{start, end, label}}")
    for key in ("start", "end"):
        if type(span.get(key)) is not int:
            raise ValueError(
                f"{where}.{key}' is {_show(span.get(key))}; use a whole number"
            )
    name = span.get("label")
    if name is None:
        return Label(span["start"], span["end"])
    return Label(span["start"], span["end"], text_field(f"labels[{index}].label", name))


def _samples(texts: Any) -> tuple[str, ...]:
    if texts is None:
        return ()
    if not isinstance(texts, list):
        raise ValueError(f"'samples' is {kind(texts)}; use a list of texts")
    return tuple(
        text_field(f"samples[{index}]", text) for index, text in enumerate(texts)
    )


def text_field(key: str, value: Any) -> str:
    """A value that has to be text.

    Raises:
      ValueError: naming the key, when it is none or no valid one.
    """
    if not isinstance(value, str):
        raise ValueError(f"{key!r} is {kind(value)}; use text")
    return _whole(key, value)


def _whole(key: str, text: str) -> str:
    # JSON can escape half of a UTF-16 pair; no tokenizer takes it and no file holds it.
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError(f"{key!r} holds half of a surrogate pair; it is no valid text")
    return text


def kind(value: Any) -> str:
    """What a value is, for an error: ``"a list"``, ``"text"``, or a short value itself.

    >>> kind([1, 2]), kind("word"), kind(1.5)
    ('a list', 'text', '1.5')
    """
    kinds = {dict: "an object", list: "a list", str: "text", type(None): "null"}
    return kinds.get(type(value)) or _show(value)


def _show(value: Any) -> str:
    """The value as JSON has it, short enough for one line."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 40 else f"{text[:37]}..."
