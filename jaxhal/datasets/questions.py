"""Questions with a reference answer, for systems that answer themselves."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from jaxhal.datasets.fields import (
    left_out,
    misspelt,
    name_field,
    near,
    text_field,
)
from jaxhal.datasets.jsonl import numbered_lines, parse
from jaxhal.io.showing import quoted


@dataclasses.dataclass(frozen=True)
class Question:
    """Something to ask, and what a right answer says; neither may be empty.

    Args:
      answer: a reference answer, or several of them, of which any will do.
      domain: the topic it belongs to.
      context: a text it is about, if it is about one.
      source: what it is about, by name, where several questions share it.
    """

    text: str
    answer: str | tuple[str, ...]
    domain: str = ""
    id: str = ""
    context: str | None = None
    source: str = ""
    split: str = ""

    def __post_init__(self):
        where = f"question {quoted(self.id)}: " if self.id else ""
        several = (self.answer,) if isinstance(self.answer, str) else self.answer
        if not self.text.strip():
            raise ValueError(f"{where}text is {quoted(self.text)}; it must hold text")
        if not several or not all(answer.strip() for answer in several):
            raise ValueError(
                f"{where}answer is {quoted(self.answer)}; it must hold text"
            )


_TEXTS = ("question", "answer", "context")


def questions_from(path: str | os.PathLike) -> list[Question]:
    """Questions of one's own, from a JSON Lines file.

    A line has a ``"question"``, its ``"answer"``, a text or a list of texts of which
    any will do, and if there are such a ``"context"``, ``"domain"``, ``"source"`` and
    ``"id"``, by default the line's number.  Raises ValueError, naming the line, where
    one holds no question, or when none does.
    """
    found = []
    for line, raw in numbered_lines(path):
        try:
            row = parse(raw)
            _check_spelt(row)
            answer, context = row.get("answer"), row.get("context")
            several = answer if isinstance(answer, list) else [answer]
            found.append(
                Question(
                    text_field("question", row.get("question")),
                    tuple(text_field("answer", each) for each in several),
                    domain=name_field(row, "domain"),
                    id=name_field(row, "id") or f"line {line}",
                    context=None if context is None else text_field("context", context),
                    source=name_field(row, "source"),
                )
            )
        except ValueError as error:
            raise ValueError(f"{path}, line {line}: {error}") from None
    if not found:
        raise ValueError(f"{path} holds no question; give one a line")
    return found


def _check_spelt(row: Mapping[str, Any]) -> None:
    """ValueError on a key that is nearly that of a text which the row does without."""
    missing = [name for name in _TEXTS if left_out(row.get(name))]
    for key in (key for key in row if key not in _TEXTS):
        if (meant := near(key, missing)) is not None:
            raise misspelt(key, meant)
