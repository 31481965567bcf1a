"""Spans of an answer that its token scores mark, whole words and numbers each."""

import itertools
import re
import unicodedata
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from jaxhal.reporting.report import Span, Token

# Of a text spelled by `_spelled`: a letter that is a word, or letters and digits with
# what joins them inside: hyphens, apostrophes, and between digits what numbers, times
# and dates are written with.
_PIECE = re.compile(
    r"cm*|[wd][wdm]*(?:[-\u2010\u2011'\u2019][wd][wdm]*|(?<=d)[.,:/](?=d)[wd][wdm]*)*"
)
# Scripts that put no space between words.
_UNSPACED = {"CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR"}


def find_spans(
    response: str, tokens: Sequence[Token], detector: str, threshold: float
) -> list[Span]:
    """Runs of tokens whose score reaches the threshold, widened to whole words.

    White space around them is left out, and runs that share a word are one span.  A
    run of punctuation alone says nothing and is none.  A character cut into several
    tokens has the highest of their scores.  The confidence of a span is the mean score
    of the tokens that marked it.
    """
    scored = [
        (place, max(token.scores.get(detector, 0.0) for token in same))
        for place, same in itertools.groupby(tokens, lambda t: (t.start, t.end))
    ]
    words: list[tuple[int, int]] | None = None
    found: list[tuple[int, int, list[float]]] = []
    for high, run in itertools.groupby(scored, lambda one: one[1] >= threshold):
        if not high:
            continue
        places, scores = zip(*run, strict=True)
        start, end = places[0][0], places[-1][1]
        text = response[start:end]
        start += len(text) - len(text.lstrip())
        end -= len(text) - len(text.rstrip())
        if not any(map(_says, response[start:end])):
            continue
        words = whole_words(response) if words is None else words
        start, end = _widened(start, end, words)
        if found and start < found[-1][1]:
            start, _, before = found.pop()
            scores = (*before, *scores)
        found.append((start, end, [*scores]))
    return [Span(a, b, response[a:b], float(np.mean(some))) for a, b, some in found]


def span_levels(
    response: str, tokens: Sequence[Token], detector: str
) -> Float[np.ndarray, " characters"]:
    """Per character the highest threshold at which a span holds it, -1 for none."""
    found = np.full(len(response), -1.0)
    for level in sorted({token.scores.get(detector, 0.0) for token in tokens}):
        for span in find_spans(response, tokens, detector, level):
            found[span.start : span.end] = level
    return found


def whole_words(text: str) -> list[tuple[int, int]]:
    """The characters ``[start, end)`` of words and numbers, in order.

    >>> text = "It's the well-known 3,400.5 km, in 2021."
    >>> [text[start:end] for start, end in whole_words(text)]
    ["It's", 'the', 'well-known', '3,400.5', 'km', 'in', '2021']
    """
    return [found.span() for found in _PIECE.finditer(_spelled(text))]


def _says(letter: str) -> bool:
    return not letter.isspace() and unicodedata.category(letter)[0] != "P"


def _spelled(text: str) -> str:
    """A letter for the kind of each character, and what is of none as it is."""
    return "".join(map(_kind, text))


def _kind(letter: str) -> str:
    if letter.isdecimal():
        return "d"
    if unicodedata.category(letter)[0] == "M" or letter in "\u200c\u200d":
        return "m"
    if not letter.isalnum() and letter != "_":
        return letter
    return "c" if unicodedata.name(letter, "").split(" ")[0] in _UNSPACED else "w"


def _widened(start: int, end: int, words: Sequence[tuple[int, int]]) -> tuple[int, int]:
    cut = [word for word in words if word[0] < end and start < word[1]]
    if not cut:
        return start, end
    return min(start, cut[0][0]), max(end, cut[-1][1])
