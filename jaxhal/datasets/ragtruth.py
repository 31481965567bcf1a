"""RAGTruth: answers of language models to retrieved text, annotated span by span."""

import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from jaxhal.datasets.sources import (
    by_name,
    check,
    chosen,
    data_root,
    records,
    require,
)
from jaxhal.io.showing import quoted
from jaxhal.types import Example, Label

_SOURCE = ("source_id", "task_type", "prompt")
_RESPONSE = ("id", "source_id", "model", "split", "quality", "response")
_SPAN = {"start": int, "end": int, "text": str, "label_type": str}


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
    ``ragtruth`` or else ``ragtruth_qa``.  An example has the whole prompt, in it the
    context (passages, news text, or business record) and, for ``"QA"``, the question;
    ``id`` names the response, ``source`` the row of ``source_info``.  A context that
    does not stand in its prompt word for word is left out: none of the ``"QA"`` rows.

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
      Niu et al., RAGTruth: A Hallucination Corpus for Developing Trustworthy
      Retrieval-Augmented Language Models, ACL 2024.  MIT licence; passages of MS MARCO
      for research use.
    """
    if not isinstance(implicit_true, bool):
        raise ValueError(f"implicit_true is {implicit_true!r}; use true or false")
    folder = data_root(root) / "ragtruth"
    folder = folder if folder.is_dir() else require(root, "ragtruth_qa")
    prompts = folder / "source_info.jsonl", _SOURCE
    sources = by_name(records(*prompts, source_info=str | dict), "source_id")
    answers = records(folder / "response.jsonl", _RESPONSE, labels=list)
    rows = by_name(answers, "id").values()
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
