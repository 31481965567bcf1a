"""Spans of an answer that its token scores mark, whole words and numbers each."""

import itertools
import unicodedata
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from jaxhal.reporting.report import Span, Token
from jaxhal.texts import whole_words


def find_spans(
    response: str, tokens: Sequence[Token], detector: str, threshold: float
) -> list[Span]:
    """Runs of tokens whose score reaches the threshold, widened to whole words.

    White space around them is left out, and runs that share a word are one span.  A
    run of punctuation alone says nothing and is none.  A character cut into several
    tokens has the highest of their scores.  The confidence of a span is the mean score
    of the tokens that marked it.
    """
    words: list[tuple[int, int]] | None = None
    found: list[tuple[int, int, list[float]]] = []
    scored = _scored(tokens, detector)
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
    """Per character the highest threshold at which a span holds it, -1 for none.

    Runs of tokens only grow as the threshold falls, so each token is added once, the
    highest score first, and what its run holds then is held from there on.
    """
    scored = _scored(tokens, detector)
    size = len(response)
    # From each character on, the first that is no white space; up to it, the end of the
    # last; how many before it say something; and the word that it lies in.
    solid = np.array([not letter.isspace() for letter in response], bool)
    places = np.arange(size)
    first = np.minimum.accumulate(np.where(solid, places, size)[::-1])[::-1]
    last = np.maximum.accumulate(np.where(solid, places + 1, 0))
    says = np.cumsum([0, *map(_says, response)])
    begin, stop = places.copy(), places + 1
    for start, end in whole_words(response):
        begin[start:end], stop[start:end] = start, end
    found = np.full(size, np.nan)
    # Of a run, its other end by either.
    across: dict[int, int] = {}
    for at in sorted(range(len(scored)), key=lambda at: -scored[at][1]):
        left, right = across.get(at - 1, at), across.get(at + 1, at)
        across[at] = at
        across[left], across[right] = right, left
        start, end = scored[left][0][0], scored[right][0][1]
        if says[end] == says[start]:
            continue
        start, end = first[start], last[end - 1]
        held = found[begin[start] : stop[end - 1]]
        held[np.isnan(held)] = scored[at][1]
    return np.nan_to_num(found, nan=-1.0)


def _scored(
    tokens: Sequence[Token], detector: str
) -> list[tuple[tuple[int, int], float]]:
    """Places in the answer, each with the highest score of its tokens."""
    return [
        (place, max(token.scores.get(detector, 0.0) for token in same))
        for place, same in itertools.groupby(tokens, lambda t: (t.start, t.end))
    ]


def _says(letter: str) -> bool:
    return not letter.isspace() and unicodedata.category(letter)[0] != "P"


def _widened(start: int, end: int, words: Sequence[tuple[int, int]]) -> tuple[int, int]:
    cut = [word for word in words if word[0] < end and start < word[1]]
    if not cut:
        return start, end
    return min(start, cut[0][0]), max(end, cut[-1][1])
