"""Published data sets of one answer, or question, a row.

``root`` is what :func:`jaxhal.datasets.data_root` takes.  A file that is not there
raises FileNotFoundError, a choice that it does not hold or a row without one of its
fields ValueError.
"""

import ast
import csv
import os
from collections.abc import Collection
from typing import Literal

from jaxhal.datasets.questions import Question
from jaxhal.datasets.sources import chosen, records, require
from jaxhal.io.checks import one_of
from jaxhal.types import Example

Root = str | os.PathLike | None
Choice = str | Collection[str] | None

# What answers a question that the text does not.
REFUSAL = "Unable to answer based on given context"
_TOHA = {
    "coqa": "toha_annotated/coqa_mistral7b_instruct_v0.1.jsonl",
    "squad": "toha_annotated/squad_mistral7b_instruct_v0.1.jsonl",
}
_COLUMNS = (
    *("Category", "Question", "Best Answer"),
    *("Correct Answers", "Incorrect Answers"),
)


def halueval(root: Root = None, file: str = "qa_one-turn_500") -> list[Example]:
    """Two answers to each HotpotQA question, a right one (0) and a made-up one (1).

    The context is ``knowledge``; both answers share it as their source.  Right answers
    are a few words, hallucinated ones sentences, so that length alone nearly separates
    them.

    Args:
      file: in the folder ``halueval``, without its ending: ``"qa_one-turn_500"`` or
        ``"qa_multi-turn_500"``.

    References:
      Li et al., HaluEval, EMNLP 2023.  MIT licence.
    """
    answers = {"right_answer": 0, "hallucinated_answer": 1}
    fields = ("knowledge", "question", *answers)
    rows = records(require(root, f"halueval/{file}.jsonl"), fields)
    return [
        Example(
            response=row[answer],
            context=row["knowledge"],
            question=row["question"],
            id=f"{number}-{answer.removesuffix('_answer')}",
            label=label,
            source=row["knowledge"],
        )
        for number, row in enumerate(rows)
        for answer, label in answers.items()
    ]


def toha(name: Literal["coqa", "squad"], root: Root = None) -> list[Example]:
    """Answers of Mistral-7B-Instruct, 1 where the text does not support them.

    The model was given, and the prompt is, for

    * ``"coqa"``: ``{context} Q: {question} A:`` as bare text, without a chat template;
      the context is a story and the dialogue about it so far, the source the story;
    * ``"squad"``: ``{instruction}Context: {context}``, then on lines of their own
      ``Question: {question}`` and ``Answer:``, as a user turn; the source is the
      paragraph.  Most articles stand in both parts of the split, no paragraph does.

    SQuAD has two instructions, of which the longer one offers the words "Unable to
    answer based on given context".  168 of its 389 grounded answers are such refusals.
    The labels follow the length of the answer closely.

    References:
      Bazarova et al., 2025.  MIT licence; texts of CoQA (2019) and SQuAD (2016).
    """
    one_of(_TOHA, name=name)
    own = "source_id" if name == "coqa" else "prompt"
    texts = ("id", "context", "question", "generated_answer", "split", own)
    found = []
    for row in records(require(root, _TOHA[name]), texts, hallucination=int):
        context, question = row["context"], row["question"]
        if name == "coqa":
            prompt, source = f"{context} Q: {question} A:", row["source_id"]
        else:
            asked = f"Context: {context}\nQuestion: {question}\nAnswer:"
            prompt, source = row["prompt"] + asked, context
        found.append(
            Example(
                response=row["generated_answer"],
                prompt=prompt,
                context=context,
                question=question,
                id=row["id"],
                label=row["hallucination"],
                source=source,
                split=row["split"],
            )
        )
    return found


def toha_questions(
    name: Literal["coqa", "squad"], root: Root = None, *, answered: bool = False
) -> list[Question]:
    """The questions that :func:`toha` holds answers to, with their right answers.

    To 292 of the 700 questions of SQuAD 2.0 the paragraph gives no answer; right is
    then to say so, in the words that its longer instruction offers: :data:`REFUSAL`.

    Args:
      answered: leave out those that the paragraph gives no answer to.
    """
    one_of(_TOHA, name=name)
    fields = ("id", "context", "question", "answers", "split")
    questions = []
    for row in records(require(root, _TOHA[name]), fields):
        # A list as Python writes it, empty where the text gives no answer.
        known = ast.literal_eval(row["answers"])
        if answered and not known:
            continue
        questions.append(
            Question(
                text=row["question"],
                answer=tuple(dict.fromkeys(known or [REFUSAL])),
                domain=name,
                id=row["id"],
                context=row["context"],
                source=row.get("source_id", row["context"]),
                split=row["split"],
            )
        )
    return questions


def truthfulqa(
    root: Root = None,
    categories: Choice = None,
    answers: Literal["best", "all"] = "best",
) -> list[Example]:
    """True (0) and false (1) answers to 817 questions, without any context.

    People wrote the answers; the prompt is the question, which is also the source.  An
    answer that is listed twice counts once, and one that is listed as both true and
    false ("Unknown", to two questions) is left out.

    Args:
      categories: such as ``"Health"``, of 38; all by default.
      answers: ``"best"`` gives the best answer and the first false one, ``"all"``
        every answer.

    References:
      Lin et al., TruthfulQA, ACL 2022.  Apache-2.0.
    """
    if answers not in ("best", "all"):
        raise ValueError(f"answers is {answers!r}; use 'best' or 'all'")
    found = []
    for row in _truthfulqa(root, categories):
        true, false = _listed(row)
        if answers == "best":
            true, false = [row["Best Answer"]], false[:1]
        for label, (name, some) in enumerate((("true", true), ("false", false))):
            for index, answer in enumerate(some):
                found.append(
                    Example(
                        response=answer,
                        prompt=row["Question"],
                        question=row["Question"],
                        id=f"{row['number']}-{name}-{index}",
                        label=label,
                        source=row["Question"],
                    )
                )
    return found


def truthfulqa_questions(
    root: Root = None, categories: Choice = None
) -> list[Question]:
    """The questions with their right answers, best first, by category."""
    return [
        Question(
            row["Question"],
            tuple(dict.fromkeys([row["Best Answer"], *_listed(row)[0]])),
            row["Category"],
            row["number"],
        )
        for row in _truthfulqa(root, categories)
    ]


def _truthfulqa(root: Root, categories: Choice) -> list[dict[str, str]]:
    path = require(root, "truthfulqa/TruthfulQA.csv")
    with path.open(encoding="utf-8-sig", newline="") as file:
        table = csv.DictReader(file)
        missing = [name for name in _COLUMNS if name not in (table.fieldnames or ())]
        if missing:
            raise ValueError(f"{path}: no column {missing[0]!r}; take the original CSV")
        rows = [
            {name: (row[name] or "").strip() for name in _COLUMNS}
            | {"number": str(number)}
            for number, row in enumerate(table)
        ]
    keep = chosen("category", categories, (row["Category"] for row in rows))
    return [row for row in rows if row["Category"] in keep]


def _listed(row: dict[str, str]) -> list[list[str]]:
    """True answers and false ones, each once and none that is both."""
    both = [
        dict.fromkeys(filter(None, map(str.strip, row[f"{kind} Answers"].split(";"))))
        for kind in ("Correct", "Incorrect")
    ]
    return [
        [one for one in some if one not in both[0].keys() & both[1]] for some in both
    ]


def medquad(root: Root = None, qtypes: Choice = None) -> list[Question]:
    """Medical questions of the US health institutes; the domain is the question type.

    Reads every ``.jsonl`` file in the folder ``medquad``.  Ids join the name of the
    page's file and the question's, because the latter repeats.  Some answers repeat as
    well, so a split should keep equal answers together.

    Args:
      qtypes: such as ``"treatment"``; all by default.

    References:
      Ben Abacha and Demner-Fushman, BMC Bioinformatics 2019.  CC BY 4.0.
    """
    folder = require(root, "medquad")
    paths = sorted(folder.glob("*.jsonl"))
    if not paths:
        raise FileNotFoundError(f"{folder} holds no .jsonl file; put some there")
    fields = ("qid", "file", "qtype", "question", "answer")
    rows = [row for path in paths for row in records(path, fields)]
    keep = chosen("qtype", qtypes, (row["qtype"] for row in rows))
    return [
        Question(
            row["question"], row["answer"], row["qtype"], f"{row['file']}:{row['qid']}"
        )
        for row in rows
        if row["qtype"] in keep
    ]


def xsum_inputs(root: Root = None) -> list[Question]:
    """Requests to sum up a news text, with the sentence that the BBC wrote.

    The 1000 texts on which Lookback Lens guides decoding; nobody's answers come with
    them.  The text is the ``context`` of each; the request is worded here.

    References:
      Narayan et al., EMNLP 2018, from Chuang et al., 2024.  BBC, for research use.
    """
    fields = ("document", "summary", "id")
    return [
        Question(
            text="Summarize the text in one sentence.",
            answer=row["summary"],
            domain="news",
            id=row["id"],
            context=row["document"],
        )
        for row in records(require(root, "lookback_lens/xsum-1000.jsonl"), fields)
    ]
