"""WikiBio passages that GPT-3 wrote, judged sentence by sentence."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from jaxhal.datasets.jsonl import kind
from jaxhal.datasets.sources import check, require
from jaxhal.io.showing import quoted
from jaxhal.types import Example, Label

_FILE = "selfcheck_wikibio119_nli.json"
_FIELDS = {
    "wiki_bio_test_idx": int,
    "sentences": list,
    "annotations": list,
    "gpt3_text_samples": list,
}
_ACCURATE = "accurate"
_KINDS = (_ACCURATE, "minor_inaccurate", "major_inaccurate")
_PROMPT = "This is a Wikipedia passage"


class Passage(NamedTuple):
    """A passage, and all its sentences by their characters with their kind as label:
    ``accurate``, ``minor_inaccurate`` or ``major_inaccurate``.
    """

    example: Example
    sentences: tuple[Label, ...]


def wikibio(root: str | os.PathLike | None = None) -> list[Example]:
    """119 passages whose inaccurate sentences are labelled, major or minor.

    The passage is its 5 to 13 sentences joined by spaces (one has 3).  All but four
    passages are hallucinated somewhere, so their spans are what can be told apart.
    With each come 20 samples, drawn at temperature 1.

    The file leaves out whom a passage is about.  GPT-3 was told "This is a Wikipedia
    passage about" and the name; the prompt here ends before "about".

    References:
      Manakul et al., `SelfCheckGPT <https://arxiv.org/abs/2303.08896>`_, EMNLP 2023,
      section 6.  CC BY-SA 3.0.
    """
    return [each.example for each in wikibio_passages(root)]


def wikibio_passages(root: str | os.PathLike | None = None) -> list[Passage]:
    """The passages of :func:`wikibio` with the kinds of all their sentences."""
    path = require(root, _FILE)
    try:
        rows = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(rows, list):
        raise ValueError(f"{path}: expected a list of passages, got {kind(rows)}")
    return [_passage(path, at, row) for at, row in enumerate(rows)]


def _passage(path: Path, at: int, row: Any) -> Passage:
    try:
        check(row, _FIELDS)
        texts, kinds, samples = (
            row[name] for name in ("sentences", "annotations", "gpt3_text_samples")
        )
        for text in (*texts, *kinds, *samples):
            check({"text": text}, {"text": str})
        every = tuple(_places(texts, kinds))
        name = str(row["wiki_bio_test_idx"])
        example = Example(
            response=" ".join(texts),
            prompt=_PROMPT,
            id=name,
            labels=tuple(each for each in every if each.label != _ACCURATE),
            source=name,
            samples=tuple(samples),
        )
    except ValueError as error:
        raise ValueError(f"{path}, passage {at}: {error}") from None
    return Passage(example, every)


def _places(texts: list[str], kinds: list[str]) -> list[Label]:
    """Each sentence in the text that they make when joined by spaces."""
    if len(texts) != len(kinds):
        raise ValueError(f"{len(texts)} sentences have {len(kinds)} annotations")
    found, start = [], 0
    for text, name in zip(texts, kinds, strict=True):
        if name not in _KINDS:
            raise ValueError(
                f"annotation is {quoted(name)}; there are: {', '.join(_KINDS)}"
            )
        if not text.strip():
            raise ValueError(f"sentence is {quoted(text)}; it must hold text")
        found.append(Label(start, start + len(text), name))
        start += len(text) + 1
    return found
