"""What a method has to beat, from the text alone; higher, more likely hallucinated."""

import re

from jaxhal.types import Example


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def response_length(example: Example) -> int:
    r"""Number of words of the response, where a word is a run of ``\w``."""
    return len(_words(example.response))


def novel_words(example: Example) -> int:
    """How many response words, each time they occur, its source text does not hold."""
    source = set(_words(example.source_text))
    return sum(word not in source for word in _words(example.response))


def novel_word_share(example: Example) -> float:
    """Share of response words that its source text does not hold; 0.0 of no words."""
    return novel_words(example) / max(response_length(example), 1)
