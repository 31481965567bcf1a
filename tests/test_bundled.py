"""The bundled examples are well formed and no trivial rule solves them."""

import collections
import importlib.resources
import itertools
import json
import re
import statistics

import pytest

from jaxhal.datasets import bundled
from jaxhal.types import Label


@pytest.fixture(scope="module")
def examples():
    return bundled()


def words(text):
    return re.findall(r"\w+", text.lower())


def auroc(examples, score):
    """Share of (hallucinated, grounded) pairs ranked right; ties count one half."""
    high = [score(example) for example in examples if example.label == 1]
    low = [score(example) for example in examples if example.label == 0]
    wins = sum((a > b) + 0.5 * (a == b) for a, b in itertools.product(high, low))
    return wins / (len(high) * len(low))


def novel_words(example):
    source = set(words(f"{example.context} {example.question}"))
    return sum(word not in source for word in words(example.response))


def test_auroc_counts_pairs(examples):
    assert auroc(examples, lambda example: example.label) == 1.0
    assert auroc(examples, lambda example: -example.label) == 0.0
    assert auroc(examples, lambda example: 7) == 0.5


def test_file_format():
    path = importlib.resources.files("jaxhal.datasets") / "bundled.jsonl"
    text = path.read_bytes().decode("utf-8")
    assert text.endswith("\n") and "\r" not in text
    for line in text.removesuffix("\n").split("\n"):
        row = json.loads(line)
        assert list(row) == ["id", "context", "question", "response", "labels"]
        assert all(list(span) == ["start", "end", "label"] for span in row["labels"])


def test_contexts_have_both_answers(examples):
    ids = [example.id for example in examples]
    assert len(set(ids)) == len(ids)
    answers = collections.defaultdict(dict)
    for example in examples:
        name, kind = example.id.rsplit("-", 1)
        assert kind == ("hallucinated" if example.label else "grounded")
        answers[name][kind] = example
    assert len(answers) >= 40
    for pair in answers.values():
        assert set(pair) == {"grounded", "hallucinated"}
        assert len({(each.context, each.question) for each in pair.values()}) == 1
        assert len({each.response for each in pair.values()}) == 2
    assert len({example.context for example in examples}) == len(answers)


def test_labels_are_balanced(examples):
    assert collections.Counter(example.label for example in examples) == {
        0: len(examples) // 2,
        1: len(examples) // 2,
    }


def test_spans(examples):
    for example in examples:
        end = 0
        for span in example.labels:
            assert isinstance(span, Label)
            assert span.label in ("conflict", "baseless")
            assert end <= span.start < span.end <= len(example.response), example.id
            text = example.response[span.start : span.end]
            assert text == text.strip(), example.id
            before = example.response[: span.start][-1:]
            after = example.response[span.end :][:1]
            assert not before.isalnum() and not after.isalnum(), example.id
            end = span.end


def test_span_kinds(examples):
    kinds = [span.label for example in examples for span in example.labels]
    assert 0.5 <= kinds.count("conflict") / len(kinds) <= 0.7
    assert any(len(example.labels) == 2 for example in examples)
    assert any(len(example.labels) == 1 for example in examples)


def test_text_lengths(examples):
    for example in examples:
        assert 40 <= len(example.context.split()) <= 110, example.id
        assert 12 <= len(example.response.split()) <= 45, example.id
        assert example.question.endswith("?"), example.id


def test_offsets_count_characters(examples):
    assert any(
        not example.response[: example.labels[0].start].isascii()
        for example in examples
        if example.labels
    )


def test_length_tells_nothing(examples):
    mean = [
        statistics.mean(
            len(each.response.split()) for each in examples if each.label == y
        )
        for y in (0, 1)
    ]
    assert mean[1] == pytest.approx(mean[0], rel=0.05)
    assert 0.45 <= auroc(examples, lambda each: len(each.response.split())) <= 0.55


def test_novel_words_tell_little(examples):
    assert 0.35 <= auroc(examples, novel_words) <= 0.65
