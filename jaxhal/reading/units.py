"""Parts of an answer that are judged one by one."""

import dataclasses
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Int

from jaxhal.features.lookback import WINDOW
from jaxhal.io.showing import quoted
from jaxhal.texts import Sentence, sentences
from jaxhal.types import Example

Unit = Literal["response", "sentence", "span", "window"]


class Part(NamedTuple):
    """Some tokens of an answer, as an example with its own text and label.

    ``row`` is the number of the answer; ``sentence`` that of the sentence the part is.
    """

    row: int
    tokens: Bool[np.ndarray, " response"]
    example: Example
    sentence: int | None = None


def has_text(
    offsets: Int[np.ndarray | Array, "*batch response 2"],
) -> Bool[np.ndarray | Array, "*batch response"]:
    """Which tokens have text: neither padding nor the end of the sequence.

    >>> has_text(np.array([[0, 3], [3, 9], [9, 9], [0, 0]]))
    array([ True,  True, False, False])
    """
    return offsets[..., 0] < offsets[..., 1]


def sentence_numbers(
    text: str, offsets: Int[np.ndarray, "response 2"]
) -> Int[np.ndarray, " response"]:
    """Which sentence of :func:`jaxhal.texts.sentences_of` each token is in.

    White space between two sentences is in neither, -1, and a token that reaches into
    the next one is in that.

    >>> sentence_numbers("A b. C", np.array([[0, 1], [1, 3], [3, 4], [4, 6], [6, 6]]))
    array([ 0,  0,  0,  1, -1])
    """
    inside = sentences(text) or [Sentence(0, len(text), text)]
    starts, ends = np.array([(each.start, each.end) for each in inside]).T
    at = np.searchsorted(starts, offsets[:, 1]) - 1
    return np.where((at >= 0) & (ends[at] > offsets[:, 0]), at, -1)


def parts_of(
    unit: Unit,
    whole: Part,
    offsets: Int[np.ndarray, "response 2"],
    marked: Bool[np.ndarray, " response"],
) -> Iterator[Part]:
    """The parts of an answer, made of its tokens that have text.

    The end of the sequence has none and is never marked: a part that held it would be
    grounded for certain, so no part does.

    ``"span"``: of a hallucinated answer the marked tokens together, those before the
    first marked one, and those after the last; what lies between two marks is unused.
    A grounded answer is one span.  ``"window"``: eight tokens, one token on at a time,
    hallucinated when any token in it is marked; a shorter answer gives none.
    ``"sentence"``: those of :func:`sentence_numbers`, likewise.  Parts of nothing but
    white space are left out.

    References:
      Chuang et al., Lookback Lens, 2024, section 2.2, and its published code.
    """
    example = whole.example
    if example.label and not marked.any():
        raise ValueError(
            f"example {quoted(example.id)} is hallucinated but no token of it is "
            "marked; to be judged in parts it needs 'labels'"
        )
    there = np.flatnonzero(has_text(offsets))
    offsets, known = offsets[there], marked[there]
    if unit == "sentence":
        places = sentence_numbers(example.response, offsets)
        masks = (places == number for number in range(places.max(initial=-1) + 1))
    else:
        masks = _masks(unit, known)
    for number, part in enumerate(masks):
        text = " ".join(example.response[slice(*run)] for run in _runs(part, offsets))
        if text.strip():
            label = int((known & part).any())
            one = dataclasses.replace(
                example,
                response=text,
                labels=None,
                label=label,
                id=f"{example.id}#{number}",
                source=example.group,
            )
            tokens = np.zeros_like(marked)
            tokens[there[part]] = True
            yield Part(whole.row, tokens, one, number if unit == "sentence" else None)


def _masks(unit: Unit, marked: np.ndarray) -> Iterator[np.ndarray]:
    at, where = np.arange(len(marked)), np.flatnonzero(marked)
    if unit == "window":
        for start in range(len(marked) - WINDOW + 1):
            yield (at >= start) & (at < start + WINDOW)
    elif not len(where):
        yield np.ones_like(marked)
    else:
        yield marked
        for part in (at < where[0], at > where[-1]):
            if part.any():
                yield part


def _runs(tokens: np.ndarray, offsets: np.ndarray) -> Iterator[tuple[int, int]]:
    """Characters of each run of neighbouring tokens."""
    edges = np.flatnonzero(np.diff(np.pad(tokens.astype(np.int8), 1)))
    for start, stop in edges.reshape(-1, 2):
        yield int(offsets[start, 0]), int(offsets[stop - 1, 1])
