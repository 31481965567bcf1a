"""Answers of Mistral-7B-Instruct to CoQA and SQuAD, labelled by the authors of TOHA."""

import ast
import os
from typing import Any, Literal

from jaxhal.datasets.questions import Question
from jaxhal.datasets.records import records
from jaxhal.datasets.root import require
from jaxhal.types import Example

_FILES = {
    "coqa": "toha_annotated/coqa_mistral7b_instruct_v0.1.jsonl",
    "squad": "toha_annotated/squad_mistral7b_instruct_v0.1.jsonl",
}
# What answers a question that the text does not.
REFUSAL = "Unable to answer based on given context"
_FIELDS = {
    "id": str,
    "context": str,
    "question": str,
    "generated_answer": str,
    "hallucination": int,
    "split": str,
}


def toha(
    name: Literal["coqa", "squad"], root: str | os.PathLike | None = None
) -> list[Example]:
    """One answer to each question about a text, 1 where the text does not support it.

    The model was given, and the prompt is, for

    * ``"coqa"``: ``{context} Q: {question} A:`` as bare text, without a chat template;
      the context is a story and the dialogue about it so far, the source the story;
    * ``"squad"``: ``{instruction}Context: {context}``, then on lines of their own
      ``Question: {question}`` and ``Answer:``, as a user turn; the source is the
      paragraph.  Most articles stand in both parts of the split, no paragraph does.

    SQuAD has two instructions, of which the longer one offers the words "Unable to
    answer based on given context".  168 of its 389 grounded answers are such refusals;
    their words are new to the paragraph but not to the prompt.  The labels follow the
    length of the answer closely.

    Args:
      name: ``"coqa"`` or ``"squad"``.
      root: see :func:`jaxhal.datasets.root.data_root`.

    Raises:
      FileNotFoundError: when the file is not there.
      ValueError: on another name, on an answer without text, or on a label that is
        not 0 or 1.

    References:
      Bazarova et al., Hallucination Detection in LLMs with Topological Divergence on
      Attention Graphs, 2025.  MIT licence; texts of CoQA (Reddy et al., 2019) and SQuAD
      (Rajpurkar et al., 2016).
    """
    if name not in _FILES:
        raise ValueError(f"name is {name!r}; use one of {', '.join(_FILES)}")
    build = _coqa if name == "coqa" else _squad
    own = {"source_id": str} if name == "coqa" else {"prompt": str}
    return [build(row) for row in records(require(root, _FILES[name]), _FIELDS | own)]


def toha_questions(
    name: Literal["coqa", "squad"],
    root: str | os.PathLike | None = None,
    *,
    answered: bool = False,
) -> list[Question]:
    """The questions that :func:`toha` holds answers to, with their right answers.

    To 292 of the 700 questions of SQuAD 2.0 the paragraph gives no answer; right is
    then to say so, in the words that its longer instruction offers: :data:`REFUSAL`.

    Args:
      name: ``"coqa"`` or ``"squad"``.
      root: see :func:`jaxhal.datasets.root.data_root`.
      answered: leave out those that the paragraph gives no answer to.

    Raises:
      FileNotFoundError: when the file is not there.
      ValueError: on another name.
    """
    if name not in _FILES:
        raise ValueError(f"name is {name!r}; use one of {', '.join(_FILES)}")
    fields = {"id": str, "context": str, "question": str, "answers": str, "split": str}
    questions = []
    for row in records(require(root, _FILES[name]), fields):
        # A list as Python writes it, empty where the text gives no answer.
        known = ast.literal_eval(row["answers"])
        if answered and not known:
            continue
        known = known or [REFUSAL]
        questions.append(
            Question(
                text=row["question"],
                answer=tuple(dict.fromkeys(known)),
                domain=name,
                id=row["id"],
                context=row["context"],
                source=row.get("source_id", row["context"]),
                split=row["split"],
            )
        )
    return questions


def _coqa(row: dict[str, Any]) -> Example:
    prompt = f"{row['context']} Q: {row['question']} A:"
    return _example(row, prompt, row["source_id"])


def _squad(row: dict[str, Any]) -> Example:
    asked = f"Context: {row['context']}\nQuestion: {row['question']}\nAnswer:"
    return _example(row, row["prompt"] + asked, row["context"])


def _example(row: dict[str, Any], prompt: str, source: str) -> Example:
    return Example(
        response=row["generated_answer"],
        prompt=prompt,
        context=row["context"],
        question=row["question"],
        id=row["id"],
        label=row["hallucination"],
        source=source,
        split=row["split"],
    )
