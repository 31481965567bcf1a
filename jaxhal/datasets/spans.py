"""Answers whose hallucinated characters are marked, and these as tokens."""

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jaxhal.datasets.fields import kind
from jaxhal.datasets.sources import (
    by_name,
    check,
    chosen,
    data_root,
    downloaded,
    records,
    require,
)
from jaxhal.io.showing import quoted
from jaxhal.types import Example, Label


def token_labels(
    offsets: Int[np.ndarray, "response 2"], labels: Sequence[Label] | None
) -> Bool[np.ndarray, " response"]:
    """Which response tokens share a character with a hallucinated span.

    A token without characters (the end of the sequence, padding) shares none.  Lookback
    Lens begins a span at the first token whose end is at or after its start, which can
    take in the token before it; this function does not.  Raises ValueError when
    ``labels`` is ``None``, that is, when nobody looked for spans.

    Args:
      offsets: the characters ``[start, end)`` of each token.
      labels: the spans of the same response; empty when it is grounded.

    >>> token_labels(np.array([[0, 3], [3, 9], [9, 10], [10, 10]]), [Label(4, 9)])
    array([False,  True, False, False])
    """
    if labels is None:
        raise ValueError("labels is None: the spans are unknown; leave the example out")
    start, end = offsets[:, :1], offsets[:, 1:]
    spans = np.array([(each.start, each.end) for each in labels], int).reshape(-1, 2)
    overlap = (start < spans[:, 1]) & (spans[:, 0] < end) & (start < end)
    return np.any(overlap, axis=1)


_SOURCE = ("source_id", "task_type", "prompt")
_RESPONSE = ("id", "source_id", "model", "split", "quality", "response")
_SPAN = {"start": int, "end": int, "text": str, "label_type": str}
# As its authors published it: the copy on the Hugging Face hub leaves out which source
# an answer rests on, and the numbers of the passages.
_PUBLISHED = (
    "https://raw.githubusercontent.com/ParticleMedia/RAGTruth/"
    "c103204b9ce28d6bbad859304bf30de72b8ed8fe/dataset"
)
_FILES = {
    "response.jsonl": "f9ae5913fb9976684f3e13be3cd3465062db54cc",
    "source_info.jsonl": "119277774009f110aa58596b93f9512f62594a89",
}


def ragtruth(
    root: str | os.PathLike | None = None,
    *,
    task: str | None = "QA",
    model: str | Collection[str] | None = None,
    split: str | None = None,
    quality: str | Collection[str] | None = ("good",),
    implicit_true: bool = True,
) -> list[Example]:
    """Answers of six models under retrieval, with hallucinated character spans.

    Reads ``response.jsonl`` and ``source_info.jsonl`` as published, from the folder
    ``ragtruth`` or else ``ragtruth_qa``; without ``root``, where there is neither, they
    are downloaded once, unless ``JAXHAL_OFFLINE`` is set.  An example has the whole
    prompt, in it the context (passages, news text, or business record) and, for
    ``"QA"``, the question; ``id`` names the response, ``source`` the row of
    ``source_info``.  A context that does not stand in its prompt word for word is left
    out: none of the ``"QA"`` rows.

    A span is what annotators found in conflict with the context (*conflict*) or not
    in it (*baseless info*), each *evident* or *subtle*; an answer with a span counts
    as hallucinated.  Spans marked ``implicit_true`` are true of the world though not in
    the context; published counts include them.

    Raises ValueError on a choice the files do not hold, or rows that do not fit
    together.

    Args:
      root: see :func:`jaxhal.datasets.data_root`.
      task: ``"QA"``, ``"Summary"``, ``"Data2txt"``, or ``None`` for all.
      model: that answered, such as ``"llama-2-7b-chat"``, or several; all by default.
      split: ``"train"`` or ``"test"``, the official one; both by default.
      quality: kept ratings, of ``"good"``, ``"truncated"``, ``"incorrect_refusal"``;
        ``None`` keeps all.
      implicit_true: whether such spans count.

    References:
      Niu et al., RAGTruth, ACL 2024.  MIT licence; MS MARCO's texts for research use.
    """
    if not isinstance(implicit_true, bool):
        raise ValueError(f"implicit_true is {implicit_true!r}; use true or false")
    responses, prompts = _files(root)
    infos = records(prompts, _SOURCE, source_info=str | dict)
    sources = by_name(infos, "source_id")
    rows = by_name(records(responses, _RESPONSE, labels=list), "id").values()
    tasks = chosen("task", task, (row["task_type"] for row in sources.values()))
    models = chosen("model", model, (row["model"] for row in rows))
    splits = chosen("split", split, (row["split"] for row in rows))
    qualities = chosen("quality", quality, (row["quality"] for row in rows))
    return [
        _example(row, source, implicit_true)
        for row in rows
        if (source := _source(row, sources))["task_type"] in tasks
        and row["model"] in models
        and row["split"] in splits
        and row["quality"] in qualities
    ]


def _files(root: str | os.PathLike | None) -> list[Path]:
    """Answers and prompts: of the data root, else as they are published."""
    folders = []
    try:
        place = data_root(root)
        folders = [place / name for name in ("ragtruth", "ragtruth_qa")]
    except FileNotFoundError:
        if root is not None or os.environ.get("JAXHAL_DATA"):
            raise
    for folder in folders:
        if folder.is_dir():
            return [folder / name for name in _FILES]
    if root is not None or os.environ.get("JAXHAL_OFFLINE"):
        require(root, "ragtruth_qa")
    return downloaded(_PUBLISHED, _FILES)


def _source(row: Mapping[str, Any], sources: Mapping[str, Any]) -> Mapping[str, Any]:
    if row["source_id"] not in sources:
        raise ValueError(
            f"response {quoted(row['id'])} rests on source_id "
            f"{quoted(row['source_id'])}, which source_info.jsonl lacks; "
            "take both files of one release"
        )
    return sources[row["source_id"]]


def _example(
    row: Mapping[str, Any], source: Mapping[str, Any], implicit_true: bool
) -> Example:
    prompt = source["prompt"]
    context, question = _parts(source["source_info"])
    return Example(
        response=row["response"],
        prompt=prompt,
        context=context if context in prompt else None,
        question=question if question and question in prompt else None,
        id=row["id"],
        labels=tuple(_labels(row, implicit_true)),
        source=row["source_id"],
        split=row["split"],
    )


def _parts(info: str | Mapping[str, Any]) -> tuple[str, str | None]:
    """Context and question, as the published prompts spell them."""
    if isinstance(info, str):
        return info, None
    if "passages" in info:
        check(info, {"passages": str, "question": str})
        return info["passages"], info["question"]
    return str(info), None  # the prompts hold a record as Python writes it, not as JSON


def _labels(row: Mapping[str, Any], implicit_true: bool) -> Iterator[Label]:
    for span in row["labels"]:
        try:
            check(span, _SPAN)
        except ValueError as error:
            raise ValueError(
                f"response {quoted(row['id'])}, label span: {error}"
            ) from None
        start, end, text = span["start"], span["end"], span["text"]
        if row["response"][start:end] != text:
            raise ValueError(
                f"response {quoted(row['id'])}: characters [{start}, {end}) are "
                f"{quoted(row['response'][start:end])}, but the label span says "
                f"{quoted(text)}; offsets count characters, end is exclusive"
            )
        if implicit_true or not span.get("implicit_true"):
            yield Label(start, end, span["label_type"])


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
    """A passage, and all its sentences by their characters.

    The label of a sentence is ``accurate``, ``minor_inaccurate`` or
    ``major_inaccurate``.
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
