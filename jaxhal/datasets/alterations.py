"""Grounded answers with one thing changed, so that their context contradicts them.

English only: the rules of :mod:`jaxhal.datasets.rules` are words and spellings.
"""

import dataclasses
import functools
import itertools
import os
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxhal.datasets.rules import KINDS, Change
from jaxhal.datasets.sources import chosen
from jaxhal.datasets.spans import ragtruth
from jaxhal.io.checks import at_least
from jaxhal.io.extras import need
from jaxhal.io.showing import quoted
from jaxhal.texts import sentences
from jaxhal.types import Example, Label

# Share of its longer words that a sentence has in common with another about the same.
_ALIKE = 1 / 3


def altered(
    examples: Sequence[Example],
    kinds: str | Collection[str] | None = None,
    seed: int = 0,
    each: int | None = None,
) -> list[Example]:
    """Of each grounded answer one altered one a kind, as far as it can be so altered.

    It differs from its original in the marked characters alone, an exchange in two
    places, and a negation that was dropped in the verb it stood at.  ``id`` is the
    original's and the kind, ``source`` the original's group, so that both stay on one
    side of a split.  What an answer becomes depends on it, the kind and the seed, not
    on its company.

    New words never stand in the context where they would make the answer right: a
    number, date or place nowhere in it, most words not in a sentence that has a third
    of the words of the answer's own, exchanged ones not between the same two.  A rule
    cannot see a paraphrase, so some alterations may be true all the same.

    Raises ValueError on an unknown kind, and on an example that is not grounded or has
    no context or prompt to contradict.

    Args:
      kinds: of :data:`jaxhal.datasets.rules.KINDS`; all by default.
      each: of an answer at most so many, the first kinds in the order of that table.

    >>> lamp = Example("Its lamp was lit in 1871.", context="Lit in 1871.", label=0)
    >>> [one] = altered([lamp], "year")
    >>> one.response, one.labels
    ('Its lamp was lit in 1869.', (Label(start=20, end=24, label='year'),))
    """
    at_least(1, each=each)
    wanted = [kind for kind in KINDS if kind in chosen("kind", kinds, KINDS)]
    return [
        made
        for one in examples
        for made in itertools.islice(_altered(one, wanted, seed), each)
    ]


def alterations(
    root: str | os.PathLike | None = None,
    *,
    task: str | None = "QA",
    model: str | Collection[str] | None = None,
    split: str | None = None,
    kinds: str | Collection[str] | None = None,
    seed: int = 0,
    each: int | None = None,
) -> list[Example]:
    """Grounded answers of RAGTruth as they are, each before its :func:`altered` ones.

    Args:
      root, task, model, split: of :func:`jaxhal.datasets.ragtruth`.
      kinds, seed, each: of :func:`altered`.
    """
    need("sentences")
    options: Any = {"task": task, "model": model, "split": split}
    answers = [one for one in ragtruth(root, **options) if not one.label]
    return [
        made for one in answers for made in (one, *altered([one], kinds, seed, each))
    ]


def _altered(example: Example, kinds: Sequence[str], seed: int) -> Iterator[Example]:
    if example.label != 0:
        raise ValueError(
            f"example {quoted(example.id)} has label {example.label}; only grounded "
            "answers, label 0, can be altered into contradictions"
        )
    context = example.context or example.source_text
    about = [s for s in _sentences(example.response) if _of_context(s, context)]
    for kind in kinds:
        find, foreign = KINDS[kind]
        changes = [
            (change, own)
            for change in find(example.response, context)
            for own in about
            if own.start <= change[0].start <= own.end
        ]
        drawn = np.random.default_rng([seed, *f"{kind} {example.response}".encode()])
        for at in drawn.permutation(len(changes)):
            change, own = changes[at]
            made = _changed(example, change, kind)
            if not any(_stands(made, one, own, foreign) for one in made.labels or ()):
                yield made
                break


def _changed(example: Example, change: Change, kind: str) -> Example:
    text, labels, shift = example.response, [], 0
    for start, end, new in change:
        start, end = start + shift, end + shift
        text = text[:start] + new + text[end:]
        last = start + len(new)
        labels.append(Label(last - len(new.lstrip()), last, kind))
        shift += last - end
    return dataclasses.replace(
        example,
        response=text,
        labels=tuple(labels),
        label=1,
        id=f"{example.id}#{kind}",
        source=example.group,
        # What whoever wrote the original gave beside it.
        samples=(),
        states="",
        logprobs=None,
    )


def _stands(made: Example, span: Label, own: "_Sentence", foreign: str) -> bool:
    """Whether the source has the new words where they would make the answer right."""
    text, source = made.response, made.source_text
    new = _plain(text[span.start : span.end])
    if foreign == "source":
        return new in _plain(source)
    if foreign == "place":
        before = _plain(text[: span.start]).split()[-1:]
        after = _plain(text[span.end :]).split()[:1]
        return " ".join(["", *before, *new.split(), *after, ""]) in _plain(source)
    return any(new in each.text and _alike(own, each) for each in _sentences(source))


def _of_context(own: "_Sentence", context: str) -> bool:
    """Whether a sentence says what the context may, and not where it was found."""
    if re.search(r" (?:passages?|context|documents?|texts?|answer) ", own.text):
        return False
    return any(_alike(own, other) for other in _sentences(context))


def _alike(own: "_Sentence", other: "_Sentence") -> bool:
    return len(own.words & other.words) >= max(_ALIKE * len(own.words), 1)


def _plain(text: str) -> str:
    """Its words in lower case, one space before, between and after them."""
    return " ".join(["", *re.findall(r"[^\W_]+", text.lower()), ""])


class _Sentence(NamedTuple):
    start: int
    end: int
    text: str  # plain
    words: frozenset[str]  # those of four letters or more


@functools.lru_cache(64)
def _sentences(text: str) -> list[_Sentence]:
    return [
        _Sentence(s.start, s.end, _plain(s.text), _long(s.text))
        for s in sentences(text)
    ]


def _long(text: str) -> frozenset[str]:
    return frozenset(word for word in _plain(text).split() if len(word) > 3)
