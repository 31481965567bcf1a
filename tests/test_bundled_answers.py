"""The bundled answers are well formed, their spans exact, their base rate natural."""

import collections
import importlib.resources
import re

import pytest
import yaml
from test_bundled import auroc, novel_words, words

from jaxhal.datasets import bundled, bundled_answers
from jaxhal.datasets.handwritten import _marked
from jaxhal.types import Label


@pytest.fixture(scope="module")
def examples():
    return bundled_answers()


@pytest.fixture(scope="module")
def written():
    path = importlib.resources.files("jaxhal.datasets") / "answers.yaml"
    return yaml.safe_load(path.read_text("utf-8"))


def test_marks_become_spans():
    made = _marked("[[conflict|No]], [[baseless|é, it]] is.")
    assert made == {
        "response": "No, é, it is.",
        "labels": (Label(0, 2, "conflict"), Label(4, 9, "baseless")),
    }
    assert _marked("A [plain] one.") == {"response": "A [plain] one.", "labels": ()}


def test_spans_lie_at_the_marked_text(examples, written):
    """Reading the file another way gives the same words, and the same text about."""
    answers = [answer["response"] for text in written for answer in text["answers"]]
    assert len(answers) == len(examples)
    for example, marked in zip(examples, answers, strict=True):
        parts = re.split(r"\[\[|\]\]", marked)
        marks = [tuple(part.split("|", 1)) for part in parts[1::2]]
        spans = example.labels
        found = [(kind, example.response[a:b]) for a, b, kind in spans]
        assert found == marks, example.id
        between, at = [], 0
        for start, end, _ in spans:
            between.append(example.response[at:start])
            at = end
        assert [*between, example.response[at:]] == parts[::2], example.id


def test_no_mark_is_left(examples):
    for example in examples:
        assert not re.search(r"\[\[|\]\]|\|", example.response), example.id
        for start, end, kind in example.labels:
            assert kind in ("conflict", "baseless")
            text = example.response[start:end]
            assert text == text.strip() and not text.endswith("."), example.id
            around = example.response[:start][-1:] + example.response[end:][:1]
            assert not any(each.isalnum() for each in around), example.id
            assert text not in example.context, example.id


def test_the_base_rate_is_stated(examples):
    count = sum(example.label for example in examples)
    assert (len(examples), count, round(100 * count / len(examples))) == (66, 20, 30)
    kinds = collections.Counter(s.label for each in examples for s in each.labels)
    assert kinds == {"conflict": 19, "baseless": 13}
    said = " ".join(bundled_answers.__doc__.split())
    for text in ("66 answers", "20 (30 %)", "32 character", "19 ``", "13 ``"):
        assert text in said
    spans = collections.Counter(len(each.labels) for each in examples if each.label)
    assert set(spans) == {1, 2}


def test_a_context_holds_answers_of_both_kinds_or_one(examples):
    """So that which context it is does not say which answer is made up."""
    made_up = collections.Counter()
    for example in examples:
        made_up[example.source] += example.label
    assert set(made_up.values()) == {0, 1, 2}
    places = collections.Counter(each.id[-1] for each in examples if each.label)
    assert set(places) == {"1", "2", "3"}


def test_ids_and_texts_are_apart(examples):
    pairs = bundled()
    every = [*examples, *pairs]
    assert len({each.id for each in every}) == len(every)
    assert len({each.response for each in every}) == len(every)
    assert len({(each.context, each.question) for each in examples}) == len(examples)
    assert len({each.context for each in examples}) == 22
    assert len({(each.context, each.source) for each in examples}) == 22
    assert not {each.context for each in examples} & {each.context for each in pairs}


def test_text_lengths(examples):
    for example in examples:
        assert 80 <= len(example.context.split()) <= 180, example.id
        assert 30 <= len(example.response.split()) <= 80, example.id
        assert example.context == " ".join(example.context.split()), example.id
        sentences = re.findall(r"[.:?](?=\s|$)|\)\n", example.response)
        assert 2 <= len(sentences) <= 7, example.id
    assert any("\n- " in example.response for example in examples)


def test_no_answer_copies_its_context(examples):
    """No sentence of an answer of six words or more stands in the context."""
    for example in examples:
        source = " ".join(words(example.context))
        for sentence in re.split(r"[.:?\n]+(?:\s|$)", example.response):
            copied = " ".join(words(sentence))
            assert len(copied.split()) < 6 or copied not in source, sentence


def test_controls_tell_little(examples):
    assert 0.35 <= auroc(examples, lambda each: len(each.response.split())) <= 0.65
    assert 0.35 <= auroc(examples, novel_words) <= 0.65
