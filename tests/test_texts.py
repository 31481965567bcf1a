"""Answers and references in words; sentences and their places."""

import collections
import re
import string

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from jaxhal.datasets import data_root
from jaxhal.texts import (
    Sentence,
    contains,
    declines,
    normalise,
    overlap,
    rouge_l,
    sentences,
    unigram_f1,
)

# Few words, so that texts share some; articles, signs and capitals, which vanish.
WORDS = st.lists(
    st.sampled_from(
        ["cat", "Cat,", "dog", "the", "A", "...", "it's", "42", "an", "Łódź"]
    )
).map(" ".join)


def squad_words(text):
    """SQuAD's steps one by one: lower case, punctuation, articles, white space."""
    text = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


class SquadTokenizer:
    tokenize = staticmethod(squad_words)


@given(st.text() | WORDS)
def test_normalise_as_squad(text):
    assert normalise(text) == " ".join(squad_words(text))


def test_normalise_keeps_what_is_no_article_and_no_ascii_sign():
    assert normalise("Another theory —\u00a0of  The\tANT") == "another theory — of ant"
    assert normalise("well-known, U.S.A.") == "wellknown usa"
    assert normalise(" \n. A the") == ""


@given(WORDS, WORDS)
@example("cat cat dog", "cat dog dog")
def test_unigram_f1_as_squad(a, b):
    words, others = squad_words(a), squad_words(b)
    same = sum((collections.Counter(words) & collections.Counter(others)).values())
    if not words or not others:
        want = float(words == others)
    elif not same:
        want = 0.0
    else:
        precision, recall = same / len(words), same / len(others)
        want = 2 * precision * recall / (precision + recall)
    assert unigram_f1(a, b) == pytest.approx(want)


@settings(deadline=None)
@given(WORDS, WORDS)
@example("cat dog 42 cat", "dog cat 42 dog cat")
def test_rouge_l_as_published(a, b):
    found = rouge_l(a, b)
    assert found == rouge_l(b, a)
    if squad_words(a) or squad_words(b):
        scorer = RougeScorer(["rougeL"], tokenizer=SquadTokenizer())
        assert found == pytest.approx(scorer.score(a, b)["rougeL"].fmeasure)


def test_rouge_l_of_long_texts():
    # More words than a machine integer has bits.
    a = " ".join(f"w{n * 37 % 101}" for n in range(300))
    b = " ".join(f"w{n * 53 % 89}" for n in range(250))
    scorer = RougeScorer(["rougeL"], tokenizer=SquadTokenizer())
    assert rouge_l(a, b) == pytest.approx(scorer.score(a, b)["rougeL"].fmeasure)
    assert rouge_l(a, a) == 1.0


@given(WORDS, WORDS)
def test_bounds_and_what_equals_one(a, b):
    same = squad_words(a) == squad_words(b)
    assert 0 <= rouge_l(a, b) <= unigram_f1(a, b) <= 1
    assert (rouge_l(a, b) == 1) == same


@pytest.mark.parametrize("empty", ["", " \n", "The", "?!"])
def test_texts_without_a_word(empty):
    for measure in (unigram_f1, rouge_l):
        assert measure(empty, "cat") == measure("cat", empty) == 0.0
        assert measure(empty, "a") == 1.0
    assert overlap(empty, ["cat", ""]) == 1.0 and overlap("cat", [empty]) == 0.0
    assert not contains("cat", empty) and not contains(empty, "cat")
    assert contains(empty, "an")


def test_contains():
    assert contains("In the U.S., since 1999.", "us since")
    assert contains("unknown", "no")
    assert not contains("Paris", "in Paris")
    assert contains("He met the Beatles.", "met Beatles")
    assert not contains("unknown", "no", words=True)
    assert not contains("", "no", words=True)
    assert contains("No, he met the Beatles.", "no", words=True)


@pytest.mark.parametrize(
    "text",
    [
        "Unable to answer based on given context.",
        "The passage doesn't explicitly state it.",
        "This cannot be determined.",
        "It\u2019s unclear, and no information is given.",
        "That is not mentioned.",
    ],
)
def test_answers_that_decline(text):
    assert declines(text)


@pytest.mark.parametrize(
    "text",
    ["", "It was not given to him.", "She did not say it.", "He cannot fly.", "No."],
)
def test_answers_that_say_something(text):
    assert not declines(text)


def test_overlap_is_with_the_nearest_reference():
    # Words {b, c} of {b, c, d}: F1 4/5; in the other order, so LCS 1: 2/5.
    assert overlap("c b", ["x y", "b c d", "z"]) == pytest.approx((4 / 5 + 2 / 5) / 2)
    assert overlap("c b", ("b", "c b")) == 1.0


@pytest.mark.parametrize("references", [[], (), "Paris"])
def test_references_are_needed(references):
    with pytest.raises(
        ValueError, match=f"references is {re.escape(repr(references))}"
    ):
        overlap("Paris", references)


# Sentences ----------------------------------------------------------------------------

SEPARATORS = ["\n", "\r\n", "\u2028", "\u00a0", "\t", " ", ". ", "? ", "!", "。", ") "]
# Signs that the segmenter writes into the text for its own use.
INTERNAL = ["∯", "ȸ", "♨", "☝", "ƪ", "&ᓰ&", "&✂&", "∮", "☏", "\x00", "♝"]
PIECES = [
    *("Dr. Who", "e.g. this", "3.14", "U.S.", '"Stop. Now."', "(see Fig. 2)", "1. Mix"),
    *(
        "- item",
        "• item",
        "a) one",
        "ok…",
        "...",
        "日本",
        "é",
        "Hello",
        "x",
        "i.",
        "🎉",
    ),
]
TEXTS = st.lists(st.sampled_from(SEPARATORS + INTERNAL + PIECES) | st.text(max_size=3))


@settings(max_examples=300, deadline=None)
@given(st.text() | TEXTS.map("".join))
@example("∯ a. b")
@example("See &ᓰ& it. Ok.")
@example(" \n a. \r\n b? c ")
@example("No. No. No.")
def test_sentences_cover_the_text_once(text):
    found = sentences(text)
    end = 0
    for each in found:
        assert end <= each.start < each.end <= len(text)
        assert each.text == text[each.start : each.end] == each.text.strip() != ""
        assert not text[end : each.start].strip()
        end = each.end
    assert not text[end:].strip()


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("", []),
        (" \n\t", []),
        ("no stop at all", ["no stop at all"]),
        ("  One. ", ["One."]),
        ("Same. Same. Same.", ["Same.", "Same.", "Same."]),
        (
            "Mr. J. Smith of the U.S. Army paid $3.50 at 5 p.m. on Monday. Why?",
            ["Mr. J. Smith of the U.S. Army paid $3.50 at 5 p.m. on Monday.", "Why?"],
        ),
        (
            "Steps:\n1. Mix it. Wait.\n2. Bake.\n\n* one\n* two",
            ["Steps:", "1. Mix it.", "Wait.", "2. Bake.", "* one", "* two"],
        ),
        ("“Hi there.” She left… Then?!", ["“Hi there.”", "She left… Then?!"]),
        ("你好。再见。", ["你好。", "再见。"]),
        ("Broken ∯ here. Fine.", ["Broken ∯ here.", "Fine."]),
        ("\x1f0. ", ["0."]),
    ],
)
def test_sentences(text, want):
    assert [each.text for each in sentences(text)] == want


def test_sentences_have_places():
    assert sentences(" A b. \nC") == [Sentence(1, 5, "A b."), Sentence(7, 8, "C")]


def test_sentences_agree_with_those_of_another_program():
    """959 sentences that spaCy cut, of which some are wrong."""
    from jaxhal.datasets.spans import wikibio_passages

    try:
        rows = wikibio_passages(data_root())
    except FileNotFoundError as error:
        pytest.skip(str(error))
    cut = {
        (row.example.id, start, end) for row in rows for start, end, _ in row.sentences
    }
    found = {
        (row.example.id, each.start, each.end)
        for row in rows
        for each in sentences(row.example.response)
    }
    assert len(cut) == 959
    assert len(cut & found) > 0.97 * 959 and len(found - cut) < 0.02 * 959
