"""Spans are whole words and numbers, and characters are counted as Python does."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxhal.reporting.report import Token
from jaxhal.scoring.spans import find_spans, span_levels
from jaxhal.texts import whole_words


def cut(text, *pieces):
    """Tokens of a text: each of the pieces, in order, with its score."""
    tokens, at = [], 0
    for piece, score in pieces:
        start = text.index(piece, at)
        at = start + len(piece)
        tokens.append(Token(piece, start, at, {"d": score}))
    return tokens


def texts_of(text, *pieces):
    spans = find_spans(text, cut(text, *pieces), "d", 0.5)
    assert all(text[span.start : span.end] == span.text for span in spans)
    return [span.text for span in spans]


def test_find_spans():
    text = "a  bb ccc d"
    pieces = [(0, 1, 0.9), (1, 5, 1.0), (5, 9, 0.2), (9, 11, 0.95)]
    tokens = [Token(text[s:e], s, e, {"d": v}) for s, e, v in pieces]
    spans = find_spans(text, tokens, "d", 0.9)
    assert [(s.start, s.end, s.text) for s in spans] == [(0, 5, "a  bb"), (10, 11, "d")]
    assert spans[0].confidence == pytest.approx(0.95)
    assert find_spans(text, tokens, "d", 1.1) == []
    assert find_spans(text, tokens, "other", 0.5) == []


def test_a_character_of_several_tokens_is_one():
    """Its tokens have one place; only some of them are suspicious."""
    text = "a🙂b"
    pieces = [(0, 1, 0.1), (1, 2, 0.9), (1, 2, 0.2), (1, 2, 0.8), (2, 3, 0.7)]
    tokens = [Token(text[s:e], s, e, {"d": v}) for s, e, v in pieces]
    (span,) = find_spans(text, tokens, "d", 0.8)
    assert (span.start, span.end, span.text) == (1, 2, "🙂")
    assert span.confidence == pytest.approx(0.9)
    (span,) = find_spans(text, tokens, "d", 0.5)
    assert span.text == "🙂b" and span.confidence == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("text", "suspicious", "whole"),
    [
        ("in 2021, so", "2", "2021"),
        ("in 2021.", "21", "2021"),
        ("some 3,400.5 km", "400", "3,400.5"),
        ("at 10:30 h", "30", "10:30"),
        ("a well-known man", "known", "well-known"),
        ("she didn't go", "'t", "didn't"),
        ("she didn’t go", "n", "didn’t"),
        ("in the 21st", "st", "21st"),
        ("the cafe\u0301s closed", "cafe", "cafe\u0301s"),
        ("Größe: groß", "öß", "Größe"),
        ("हिन्दी में", "हि", "हिन्दी"),
        ("١٢٣ نعم", "٢", "١٢٣"),
        ("漢字です", "字", "字"),  # no space parts its words
        ("one.Two", "Two", "Two"),
        ("1. two", "1", "1"),
        ("🙂 yes", "🙂", "🙂"),
        ("snake_case x", "case", "snake_case"),
        ("Smith's 40", "Smith", "Smith's"),
        ("a 'quoted' word", "quoted", "quoted"),
    ],
)
def test_a_span_is_whole_words(text, suspicious, whole):
    assert texts_of(text, (suspicious, 0.9)) == [whole]


@pytest.mark.parametrize("alone", [".", ",", " …", "?!", "(", "”"])
def test_punctuation_alone_is_no_span(alone):
    text = f"Two thirds{alone} Yes"
    assert texts_of(text, (alone, 0.9)) == []
    assert texts_of(text, ("thirds", 0.9), (alone, 0.9)) == [f"thirds{alone}"]


def test_runs_that_share_a_word_are_one_span():
    tokens = ("2", 0.9), ("0", 0.1), ("2", 0.7), ("1", 0.2), ("or", 0.1), ("3", 0.8)
    text = "in 2021 or 3"
    spans = find_spans(text, cut(text, *tokens), "d", 0.5)
    assert [(s.start, s.end, s.text) for s in spans] == [(3, 7, "2021"), (11, 12, "3")]
    assert [s.confidence for s in spans] == pytest.approx([0.8, 0.8])


LETTERS = st.text("ab1,.-' \u0301é漢🙂\u200d\n", max_size=12)


@given(LETTERS, st.data())
def test_spans_hold_what_is_marked_and_end_where_words_do(text, data):
    count = len(text)
    scores = data.draw(
        st.lists(st.sampled_from([0.1, 0.9]), min_size=count, max_size=count)
    )
    tokens = [Token(text[n], n, n + 1, {"d": scores[n]}) for n in range(count)]
    spans = find_spans(text, tokens, "d", 0.5)
    held = np.zeros(count + 1, bool)
    for span in spans:
        assert span.text == text[span.start : span.end] == span.text.strip() != ""
        assert not set(span.text) <= set(" \n.,-'")
        assert not held[span.start : span.end].any()  # apart, and in order below
        held[span.start : span.end] = True
    assert spans == sorted(spans)
    for n, letter in enumerate(text):
        assert held[n] or scores[n] < 0.5 or letter in " \n.,-'"
    for start, end in whole_words(text):
        assert len(set(held[start:end])) == 1


@given(LETTERS, st.data())
def test_a_level_is_the_highest_threshold_of_a_span_that_holds_it(text, data):
    ends = st.lists(st.integers(0, len(text)), max_size=8)
    edges = sorted({0, len(text), *data.draw(ends)})
    places = [*itertools.pairwise(edges)]
    # A character may be of several tokens, and some tokens be without a score.
    if places:
        places = sorted([*places, *data.draw(st.lists(st.sampled_from(places)))])
    some = st.sampled_from([None, 0.0, 0.1, 0.4, 0.4, 0.8, 1.0])
    tokens = [
        Token(text[a:b], a, b, {} if (s := data.draw(some)) is None else {"d": s})
        for a, b in places
    ]
    expected = np.full(len(text), -1.0)
    for level in (0.0, 0.1, 0.4, 0.8, 1.0):
        for span in find_spans(text, tokens, "d", level):
            expected[span.start : span.end] = level
    np.testing.assert_array_equal(span_levels(text, tokens, "d"), expected)
