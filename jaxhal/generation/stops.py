"""Where a response ends: stop strings in its text, stop tokens, half characters."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from jaxhal.models.tokenizer import Tokenizer

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"

Stopped = Literal["eos", "stop", "length"]


def checked(tokenizer: Tokenizer, stop: Sequence[str]) -> tuple[str, ...]:
    """Stop strings as given, or an error that says what is wrong with them."""
    if isinstance(stop, str) or not all(stop):
        raise ValueError(f"stop is {stop!r}; give a list of strings that hold text")
    if silent := sorted(set(stop) & set(tokenizer.hf.all_special_tokens)):
        raise ValueError(
            f"stop has {silent[0]!r}, a special token, of which no text is made; leave "
            "it out: a response ends at the tokens that end one"
        )
    return tuple(stop)


def cut(
    tokenizer: Tokenizer, stop: tuple[str, ...], ids: np.ndarray
) -> tuple[str, np.ndarray, Stopped]:
    """Text up to a stop string, the tokens that it takes, and what ended it."""
    text = tokenizer.decode(ids, skip_special=True)
    at = first(text, stop)
    if at is None:
        ended = np.isin(ids[-1:], tokenizer.stop_ids).any()
        return text, ids, "eos" if ended else "length"
    return text[:at], ids[: _covering(tokenizer, ids, text[:at])], "stop"


def first(text: str, stop: tuple[str, ...]) -> int | None:
    """Where the stop string begins that is whole first, whatever comes after it."""
    found = ((at + len(s), at) for s in stop if (at := text.find(s)) >= 0)
    return min(found, default=(0, None))[1]


def _covering(tokenizer: Tokenizer, ids: np.ndarray, text: str) -> int:
    """The fewest tokens whose text begins with this one; half a character is none."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        enough = tokenizer.decode(ids[:middle], skip_special=True).startswith(text)
        low, high = (low, middle) if enough else (middle + 1, high)
    return low


def settled(text: str, stop: tuple[str, ...]) -> int:
    """How many characters stay, whatever comes: no part of one or of a stop string."""
    end = len(text.rstrip(_INCOMPLETE))
    held = (
        size
        for s in stop
        for size in range(min(len(s) - 1, end), 0, -1)
        if text.endswith(s[:size], 0, end)
    )
    return end - max(held, default=0)
