"""Whole prompts, and where in them the parts of an example are."""

from collections.abc import Callable
from typing import NamedTuple

from jaxhal.models.control import Places
from jaxhal.types import Example


class Rendered(NamedTuple):
    """A user's text inside the chat template; joined, the pieces are the prompt."""

    prefix: str
    text: str
    suffix: str


class Prompt(NamedTuple):
    """A whole prompt text and the ``(start, end)`` characters of its parts.

    Attributes:
      text: the prompt.
      user: what the user wrote.
      document, question: the context, and what is asked.
      control: where control tokens are recognised: what the template wrote, or all of a
        finished prompt but the context and the question.
    """

    text: str
    user: tuple[int, int]
    document: tuple[int, int]
    question: tuple[int, int]
    control: Places


def prompt_of(example: Example, render: Callable[[str], Rendered]) -> Prompt:
    """See :meth:`jaxhal.models.tokenizer.Tokenizer.prompt`."""
    text = example.source_text
    if example.templated:
        prefix, middle, suffix = "", text, ""
    else:
        prefix, middle, suffix = render(text)
    start, end = len(prefix), len(prefix) + len(middle)
    shift = start - text.index(middle)  # below start where the template strips

    def span(first: int, last: int) -> tuple[int, int]:
        return max(first + shift, start), min(last + shift, end)

    document, question = (start, end), (end, end)
    quoted = []
    if example.context is not None:
        first = text.index(example.context)
        document = span(first, first + len(example.context))
        quoted.append(document)
    if example.question:
        first = _find_question(text, example.question, example.context or "")
        question = span(first, first + len(example.question))
        quoted.append(question)
    whole = prefix + middle + suffix
    if not example.templated:
        quoted = [(start, end)]
    places = _around(quoted, len(whole))
    return Prompt(whole, (start, end), document, question, places)


def _around(spans: Places, length: int) -> Places:
    """What spans leave of a text.

    >>> _around([(5, 8), (2, 4), (3, 4)], 9)
    [(0, 2), (4, 5), (8, 9)]
    """
    left, last = [], 0
    for start, end in sorted(spans):
        if last < start:
            left.append((last, start))
        last = max(last, end)
    return [*left, (last, length)] if last < length else left


def _find_question(text: str, question: str, context: str) -> int:
    """Where the question stands: its last place that is not inside the context."""
    start = text.index(context)
    before, after = text[:start], text[start + len(context) :]
    if question in after:
        return start + len(context) + after.rindex(question)
    return (before if question in before else text).rindex(question)
