"""Comparing an answer with references, and cutting a text into sentences and words."""

import collections
import functools
import itertools
import re
import string
import unicodedata
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxhal.io.extras import brought_by

_FIELD = re.compile(r"\{(\w+)\}")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
# Characters, and items of lists among them, that are cut into sentences together: the
# segmenter's time can grow with their square, and with the cube of the items.
_WINDOW, _ITEMS = 4000, 50
_ITEM = re.compile(r"(?<![^\W_])(?:[a-z]{1,5}\)|[a-z]\.|\d{1,2}[.)])", re.IGNORECASE)
# White space that the segmenter stumbles over before a digit.
_SEPARATORS = dict.fromkeys(range(0x1C, 0x20), " ")
# Of a text spelled by `_spelled`: a letter that is a word, or letters and digits with
# what joins them inside: hyphens, apostrophes, and between digits what numbers, times
# and dates are written with.
_PIECE = re.compile(
    r"cm*|[wd][wdm]*(?:[-\u2010\u2011'\u2019][wd][wdm]*|(?<=d)[.,:/](?=d)[wd][wdm]*)*"
)
# Scripts that put no space between words.
_UNSPACED = {"CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR"}
_DECLINES = re.compile(
    r"\bunable to (?:answer|determine|find|say|tell)\b"
    r"|\b(?:can ?not|can't|could not|couldn't|not possible to|impossible to) "
    r"(?:be )?(?:answer|answered|determine|determined|find|found|say|tell)\b"
    r"|\b(?:passage|text|context|article|document|source|story)\b[^.]{0,40}?"
    r"\b(?:do|does|did)(?: not|n't) (?:explicitly |directly )?"
    r"(?:provide|mention|state|specify|contain|include|say|give|answer)\b"
    r"|\bnot (?:explicitly |directly )?"
    r"(?:mentioned|stated|specified|provided|answered|clear)\b"
    r"|\bno (?:information|mention|answer)\b|\bunclear\b"
)


def filled(form: str, **parts: str) -> str:
    """A form with a text in place of each ``{name}``; the texts are not looked into.

    >>> filled("{context} {question} {more}", context="{question}", question="Why?")
    '{question} Why? {more}'
    """
    return _FIELD.sub(lambda found: parts.get(found[1], found[0]), form)


def normalise(text: str) -> str:
    """Lower case, without ASCII punctuation and English articles, spaced singly.

    >>> normalise("The  Eiffel Tower's height: 1,083 ft.")
    'eiffel towers height 1083 ft'

    References:
      Rajpurkar et al., `SQuAD <https://arxiv.org/abs/1606.05250>`_, 2016, section 6.1.
    """
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def contains(answer: str, reference: str, words: bool = False) -> bool:
    """Whether the reference stands in the answer, both normalised.

    Characters count, not words: "no" stands in "unknown"; with ``words`` it does not.
    A reference without a word stands only in such an answer.

    >>> contains("It was built in Paris.", "in paris"), contains("In Rome.", "The.")
    (True, False)
    """
    short, whole = normalise(reference), normalise(answer)
    if not short:
        return not whole
    return f" {short} " in f" {whole} " if words else short in whole


def unigram_f1(a: str, b: str) -> float:
    r"""Share of words that two texts have in common, 0 to 1 (SQuAD's F1).

    :math:`2 \sum_w \min(n_a(w), n_b(w)) / (|a| + |b|)` for counts ``n`` of normalised
    words.  Two texts without a word are equal, 1; one without shares nothing, 0.

    >>> unigram_f1("the cat sat", "the cat")
    0.6666666666666666
    """
    words, others = normalise(a).split(), normalise(b).split()
    common = collections.Counter(words) & collections.Counter(others)
    return _f1(common.total(), words, others)


def rouge_l(a: str, b: str) -> float:
    r"""Share of words that two texts have in common and in one order, 0 to 1.

    :math:`2 \, \mathrm{LCS}(a, b) / (|a| + |b|)` for the longest common subsequence of
    normalised words.

    >>> rouge_l("police killed gunman", "gunman killed police")
    0.3333333333333333

    References:
      Lin, `ROUGE <https://aclanthology.org/W04-1013/>`_, 2004, equations 2 to 4.
    """
    words, others = normalise(a).split(), normalise(b).split()
    return _f1(_common_subsequence(words, others), words, others)


def overlap(answer: str, references: Sequence[str]) -> float:
    """Mean of unigram F1 and ROUGE-L with the nearest of some right answers, 0 to 1.

    >>> overlap("in Paris, France", ["Lyon", "Paris"])
    0.5

    References:
      Liu et al., 2025, section 4.1: an answer is hallucinated below 0.5.
    """
    if isinstance(references, str) or not references:
        raise ValueError(
            f"references is {references!r}; give a list of right answers, at least one"
        )
    return max(
        (unigram_f1(answer, each) + rouge_l(answer, each)) / 2 for each in references
    )


def _f1(common: int, words: Sequence[str], others: Sequence[str]) -> float:
    if not words or not others:
        return float(words == others)
    return 2 * common / (len(words) + len(others))


def _common_subsequence(words: Sequence[str], others: Sequence[str]) -> int:
    # One bit a word (Hyyrö 2004), since a long answer has hundreds of them.
    places: dict[str, int] = collections.defaultdict(int)
    for at, word in enumerate(words):
        places[word] |= 1 << at
    every = row = (1 << len(words)) - 1
    for word in others:
        match = row & places[word]
        row = ((row + match) | (row - match)) & every
    return len(words) - row.bit_count()


class Sentence(NamedTuple):
    """Characters ``[start, end)`` of a text, and what stands there."""

    start: int
    end: int
    text: str


def declines(text: str) -> bool:
    """Whether an answer says that it cannot be given, by the words it does so with.

    >>> declines("The passage does not mention a date."), declines("It cannot fly.")
    (True, False)
    """
    return _DECLINES.search(text.lower().replace("\u2019", "'")) is not None


def storable(text: str) -> str:
    """A text that UTF-8 can hold: halves of surrogate pairs become question marks."""
    return text.encode("utf-8", "replace").decode()


def sentences(text: str) -> list[Sentence]:
    r"""The sentences of an English text in order, without the space around them.

    Together they hold every character that is not space, each once.  A line break ends
    a sentence; a list has one in each item.  A text of nothing but space has none.

    >>> for each in sentences("Dr. Smith left. Why?\n- He was ill"):
    ...     print(each)
    Sentence(start=0, end=15, text='Dr. Smith left.')
    Sentence(start=16, end=20, text='Why?')
    Sentence(start=21, end=33, text='- He was ill')

    References:
      Sadvilkar and Neumann, `PySBD <https://aclanthology.org/2020.nlposs-1.15/>`_
    """
    starts = _starts(text.translate(_SEPARATORS))
    spans = zip(starts, [*starts[1:], len(text)], strict=True)
    found = (_stripped(text, start, end) for start, end in spans)
    return [each for each in found if each.text]


def _starts(text: str) -> list[int]:
    """Where sentences begin, found in one window of the text after the other."""
    starts, at = [0], 0
    while at < len(text):
        end = _window_end(text, at)
        found = [at + each for each in _starts_in(text[at:end])]
        starts += found
        # The last sentence of a window may go on behind it, so the next begins there.
        at = found[-1] if found and end < len(text) else end
    return starts


def _window_end(text: str, at: int) -> int:
    items = _ITEM.finditer(text, at, at + _WINDOW)
    last = next(itertools.islice(items, _ITEMS, None), None)
    return last.start() if last else min(at + _WINDOW, len(text))


def _starts_in(text: str) -> list[int]:
    """Where sentences begin in a short text, but for the first."""
    starts, end = [], 0
    # A processor keeps its text, so each call has one of its own.  The segmenter around
    # it looks for each sentence from the beginning of the text on.
    segmenter = _pysbd().Segmenter(language="en", clean=False)
    for piece in map(str.strip, segmenter.processor(text).process()):
        # A piece that holds a sign the segmenter uses for itself comes back changed, or
        # not at all; such a sentence is joined to the one before it.
        at = text.find(piece, end) if piece else -1
        if at >= 0:
            starts += [at] if text[:at].strip() else []
            end = at + len(piece)
    return starts


def sentences_of(text: str) -> list[str]:
    """The sentences of a text, the whole text where none is found."""
    return [each.text for each in sentences(text)] or [text]


def whole_words(text: str) -> list[tuple[int, int]]:
    """The characters ``[start, end)`` of words and numbers, in order.

    >>> text = "It's the well-known 3,400.5 km, in 2021."
    >>> [text[start:end] for start, end in whole_words(text)]
    ["It's", 'the', 'well-known', '3,400.5', 'km', 'in', '2021']
    """
    return [found.span() for found in _PIECE.finditer(_spelled(text))]


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


def _stripped(text: str, start: int, end: int) -> Sentence:
    inside = text[start:end]
    start += len(inside) - len(inside.lstrip())
    inside = inside.strip()
    return Sentence(start, start + len(inside), inside)


@functools.cache
def _pysbd() -> Any:
    with warnings.catch_warnings():
        # Its own patterns are not raw strings, which Python 3.12 warns of.
        warnings.simplefilter("ignore", SyntaxWarning)
        with brought_by("sentences"):
            import pysbd
    return pysbd
