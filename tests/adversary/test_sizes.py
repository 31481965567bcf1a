"""Text of any size costs time and lines in step with its size."""

import math

import pytest

from jaxhal import texts
from jaxhal.datasets import Question
from jaxhal.datasets.sources import by_name
from jaxhal.detectors.uncertainty import closed_book
from jaxhal.reading import samples
from jaxhal.reading.bulk import Bulk
from jaxhal.reporting.report import Report
from jaxhal.tuning import Tuning, classifier, training
from jaxhal.types import Example, Label
from tiny_lm import tiny_lm

LONG = "x" * 1_000_000
FINE = Example("a", prompt="p", id=LONG)
LONGER = Example("a" * 99, prompt="p", id=LONG)


def refused(bulk):
    bulk.refuse([True], "so")
    raise ValueError(bulk.errors[0])


ERRORS = [
    lambda: Example(" " * len(LONG), prompt="p"),
    lambda: Example("a", id=LONG),
    lambda: Example("a", prompt=" " * len(LONG), id=LONG),
    lambda: Example("a", prompt="p", id=LONG, labels=(Label(0, 9),)),
    lambda: Question(" ", "a", id=LONG),
    lambda: Question(" " * len(LONG), "a"),
    lambda: by_name([{"id": LONG}, {"id": LONG}], "id"),
    lambda: samples._given(FINE, 2),
    lambda: closed_book(FINE),
    lambda: training.fit(tiny_lm(), [FINE], Tuning(), "nowhere"),
    lambda: classifier.encode(tiny_lm(context=16), [LONGER]),
    lambda: refused(Bulk(tiny_lm(), [FINE])),
    lambda: Report(LONG, "m", "a", {"n": math.nan}, [], [], {}, "n").check(),
]


@pytest.mark.parametrize("fail", ERRORS)
def test_errors_are_short_whatever_they_name(fail):
    with pytest.raises(ValueError) as found:
        fail()
    text = str(found.value)
    assert len(text) < 400 and text.isprintable()


ITEMS = ["i. ", "1. 2. ", "a) b) ", "word ", "Yes. ", '" ', "\n", "x"]


@pytest.mark.parametrize("item", ITEMS)
def test_long_texts_are_cut_in_short_windows(monkeypatch, item):
    seen = []

    def starts(text):
        seen.append(len(text))
        assert len(texts._ITEM.findall(text)) <= texts._ITEMS
        return real(text) if len(seen) < 4 else [len(text) // 2]

    real = texts._starts_in
    monkeypatch.setattr(texts, "_starts_in", starts)
    whole = (item * 60_000)[:60_000]
    found = texts.sentences(whole)
    assert max(seen) <= texts._WINDOW and sum(seen) <= 4 * len(whole)
    kept = "".join(one.text for one in found)
    assert "".join(kept.split()) == "".join(whole.split())


def test_many_short_sentences_take_seconds_at_most():
    assert len(texts.sentences("i. " * 20_000)) == 20_000


def test_windows_change_no_sentence(monkeypatch):
    lines = [
        f"Dr. Smith no. {n} said (to J. R. of the U.S. Army): it was {n}.5 m! Why? "
        f"He left at 5 p.m.\n{n % 9 + 1}. A list's item.\n"
        for n in range(30)
    ]
    text = " ".join(lines)
    monkeypatch.setattr(texts, "_WINDOW", len(text))
    monkeypatch.setattr(texts, "_ITEMS", len(text))
    whole = texts.sentences(text)
    monkeypatch.setattr(texts, "_WINDOW", 900)
    assert texts.sentences(text) == whole
