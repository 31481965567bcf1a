"""A prompt as one text, and where its parts are."""

import re
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jaxhal.models.control import Places

#: What may open an answer behind a template's own marker: tags and a word beside each,
#: such as those of a channel or of a thought.
OPENING = re.compile(r"\s*(<[^<>]*>\w*\s*)*")


class Prompt(NamedTuple):
    """A whole prompt text and the ``(start, end)`` characters of its parts."""

    text: str
    user: tuple[int, int]  # what the user wrote, all turns of a conversation
    document: Places  # of a conversation, each turn in their order; (0, 0) without text
    question: tuple[int, int]
    # Where control tokens are recognised: what the template wrote, or all of a finished
    # prompt but the context and the question.
    control: Places


def around(spans: Places, length: int) -> Places:
    """What spans leave of a text.

    >>> around([(5, 8), (2, 4), (3, 4)], 9)
    [(0, 2), (4, 5), (8, 9)]
    """
    left, last = [], 0
    for start, end in sorted(spans):
        if last < start:
            left.append((last, start))
        last = max(last, end)
    return [*left, (last, length)] if last < length else left


def find_question(text: str, question: str, context: str) -> int:
    """Where the question stands: its last place that is not inside the context."""
    start = text.index(context)
    before, after = text[:start], text[start + len(context) :]
    if question in after:
        return start + len(context) + after.rindex(question)
    return (before if question in before else text).rindex(question)


def overlap(
    spans: Int[np.ndarray, "tokens 2"], places: Places
) -> Bool[np.ndarray, " tokens"]:
    """Tokens that share a character with one of the places."""
    found = np.zeros(len(spans), bool)
    for start, end in places:
        found |= (spans[:, 0] < end) & (spans[:, 1] > start) & (start < end)
    return found
