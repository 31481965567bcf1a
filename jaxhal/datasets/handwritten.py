"""The data sets that come with the package, written by hand."""

import importlib.resources
import json
import re
from typing import Any

import yaml

from jaxhal.types import Example, Label

_MARKED = re.compile(r"\[\[(conflict|baseless)\|(.+?)\]\]")


def bundled() -> list[Example]:
    """Short question-answering examples over a context, hard to tell apart.

    52 contexts (timetables, recipes, leaflets, contracts, science, history, ...), each
    with one question and two answers: 52 grounded and 52 hallucinated ones, 104 rows.
    The hallucinated answers carry 78 character spans: 48 labelled ``"conflict"``, which
    contradict the context, and 30 labelled ``"baseless"``, which it does not mention.
    Neither the length of an answer nor its share of new words tells the two apart.

    >>> examples = bundled()
    >>> len(examples), sum(example.label for example in examples)
    (104, 52)
    >>> [examples[1].response[start:end] for start, end, _ in examples[1].labels]
    ['when the Sun and Moon line up at new or full moon']
    """
    rows = [json.loads(line) for line in _text("bundled.jsonl").split("\n") if line]
    return [
        Example(**row | {"labels": tuple(Label(**span) for span in row["labels"])})
        for row in rows
    ]


def bundled_answers() -> list[Example]:
    """Answers of several sentences, as chat models write them, to longer contexts.

    22 contexts (a notice, a leaflet, a laboratory report, minutes, a bulletin, ...) of
    113 to 154 words, each with three questions of its own: 66 answers, of which 20
    (30 %) are hallucinated.  These carry 32 character spans, 19 ``"conflict"`` and 13
    ``"baseless"`` as in :func:`bundled`; what is not marked is grounded.  Some grounded
    answers decline, because the context does not say.  Answers to one context share it
    as their source.

    >>> examples = bundled_answers()
    >>> len(examples), sum(example.label for example in examples)
    (66, 20)
    >>> [examples[5].response[start:end] for start, end, _ in examples[5].labels]
    ['four years']
    """
    texts = yaml.safe_load(_text("answers.yaml"))
    return [
        Example(
            **_marked(answer["response"]),
            context=text["context"],
            question=answer["question"],
            id=f"{text['id']}-{number}",
            source=text["id"],
        )
        for text in texts
        for number, answer in enumerate(text["answers"], 1)
    ]


def _text(name: str) -> str:
    path = importlib.resources.files("jaxhal.datasets") / name
    return path.read_text("utf-8")


def _marked(text: str) -> dict[str, Any]:
    """The response without its marks, and the spans these stand for.

    >>> _marked("It holds [[conflict|nine]] pears.")
    {'response': 'It holds nine pears.', 'labels': (Label(start=9, end=13, ...),)}
    """
    response, labels, at = "", [], 0
    for mark in _MARKED.finditer(text):
        response += text[at : mark.start()]
        start, at = len(response), mark.end()
        response += mark[2]
        labels.append(Label(start, len(response), mark[1]))
    return {"response": response + text[at:], "labels": tuple(labels)}
