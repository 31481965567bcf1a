"""Which characters of a text each of its tokens stands for."""

import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int


def tiled(
    offsets: Int[np.ndarray, "tokens 2"], length: int
) -> Int[np.ndarray, "tokens 2"]:
    """Spans by rising start without a gap: what no token has joins the token before.

    What comes before all tokens joins the first.

    >>> tiled(np.array([[1, 2], [2, 3], [5, 6]]), 8).tolist()
    [[0, 2], [2, 5], [5, 8]]
    """
    offsets = offsets.copy()
    starts = offsets[:, 0].copy()
    following = np.searchsorted(starts, starts, side="right")
    reach = np.append(starts, length)[following]
    offsets[:, 1] = np.maximum(offsets[:, 1], reach)
    offsets[starts == starts[:1], 0] = 0
    return offsets


def lacking(spec: dict[str, Any]) -> frozenset[int]:
    """The bytes that a byte-level vocabulary (as JSON) lacks and so passes over.

    The offsets that the tokenizer gives go wrong behind one.
    """
    model = spec["model"]
    cut = json.dumps([spec["pre_tokenizer"], spec["normalizer"]])
    if model["type"] != "BPE" or '"ByteLevel"' not in cut:
        return frozenset()
    if model["unk_token"] is not None or model["byte_fallback"]:
        return frozenset()
    letters = _byte_of_letter()
    return frozenset(b for letter, b in letters.items() if letter not in model["vocab"])


def counted(
    tokens: Sequence[str], text: str, without: frozenset[int]
) -> Int[np.ndarray, "tokens 2"]:
    """Offsets of byte-level tokens in a text, counted byte by byte.

    Raises:
      ValueError: when the tokens, which have none of the bytes ``without``, are not
        its.

    >>> counted(["a", "Ġb"], "a\\x04 b", frozenset({4})).tolist()
    [[0, 1], [2, 4]]
    """
    letters = _byte_of_letter()
    owner = [at for at, letter in enumerate(text) for _ in letter.encode()]
    data = text.encode()
    place, found = 0, []
    for token in tokens:
        start = None
        for letter in token:
            byte = letters.get(letter)
            while place < len(data) and data[place] in without:
                place += 1
            if place == len(data) or data[place] != byte:
                raise ValueError(
                    "the text holds characters that the vocabulary lacks, and what "
                    f"became of it near character {owner[min(place, len(data) - 1)]} "
                    "cannot be followed; leave such characters out"
                )
            start = owner[place] if start is None else start
            place += 1
        found.append((start, owner[place - 1] + 1))
    return np.asarray(found, np.int32).reshape(-1, 2)


@functools.cache
def _byte_of_letter() -> dict[str, int]:
    """The letters that byte-level vocabularies write bytes with."""
    from tokenizers import pre_tokenizers

    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    printable = [byte for byte in range(256) if chr(byte) in alphabet]
    rest = [byte for byte in range(256) if chr(byte) not in alphabet]
    return {chr(b): b for b in printable} | {
        chr(256 + n): b for n, b in enumerate(rest)
    }
