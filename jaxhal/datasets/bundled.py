"""The small data set that comes with the package."""

import importlib.resources
import json

from jaxhal.types import Example, Label


def bundled() -> list[Example]:
    """Short question-answering examples over a context, written by hand.

    52 contexts (timetables, recipes, leaflets, contracts, science, history, ...), each
    with one question and two answers: 52 grounded and 52 hallucinated ones, 104 rows.
    The hallucinated answers carry 78 character spans: 48 labelled ``"conflict"``, which
    contradict the context, and 30 labelled ``"baseless"``, which it does not mention.
    Neither the length of an answer nor its share of new words tells the two apart.

    Ids end in ``-grounded`` or ``-hallucinated``; the two rows of a context share what
    comes before, so a split should keep them together.

    >>> examples = bundled()
    >>> len(examples), sum(example.label for example in examples)
    (104, 52)
    >>> examples[1].id
    'tides-hallucinated'
    >>> [examples[1].response[start:end] for start, end, _ in examples[1].labels]
    ['when the Sun and Moon line up at new or full moon']
    """
    path = importlib.resources.files("jaxhal.datasets") / "bundled.jsonl"
    rows = [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]
    return [
        Example(
            id=row["id"],
            context=row["context"],
            question=row["question"],
            response=row["response"],
            labels=tuple(Label(**span) for span in row["labels"]),
        )
        for row in rows
    ]
