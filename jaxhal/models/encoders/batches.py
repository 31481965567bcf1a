"""Texts and pairs of texts to batches of windows, and what is computed of each."""

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int

from jaxhal.io.progress import progress_bar
from jaxhal.models.batching import bucket
from jaxhal.models.encoders.text_encoder import TextEncoder

if TYPE_CHECKING:
    import tokenizers

SMALLEST = 16  # columns of a batch
_CPU_ROWS = 8  # more at once save nothing there, and are padded more


class Windows(NamedTuple):
    """Windows of the distinct inputs, and where each input finds its own.

    Windows of a pair with the same window of the second text are a group; of texts, all
    windows of one.
    """

    pieces: "list[tokenizers.Encoding]"
    group: Int[np.ndarray, " groups"]  # the first window of each
    first: Int[np.ndarray, " distinct"]  # the first group of each distinct input
    row: Int[np.ndarray, " inputs"]  # the distinct input that equals each input


def of_texts(encoder: TextEncoder, texts: Sequence[Any]) -> Windows:
    """Windows of texts, each as long as the encoder's context allows.

    Raises:
      TypeError: naming the text that is no string.
      ValueError: when there is no text, or a text is empty or no Unicode.
    """
    _check_list("texts", texts)
    for at, text in enumerate(texts):
        _check_text(f"text {at}", text)
    length = encoder.config.context_length
    tokenizer = encoder.tokenizer
    return _windows("text", texts, lambda text: [tokenizer.windows(text, length)])


def of_pairs(encoder: TextEncoder, pairs: Sequence[Any], cut: bool) -> Windows:
    """Windows of pairs, whose texts may be cut with ``cut``.

    Raises:
      TypeError: naming the pair that is no pair of strings.
      ValueError: when there is no pair, a text is empty or no Unicode, or a pair is too
        long.
    """
    check_pairs(pairs)
    length, tokenizer = encoder.config.context_length, encoder.tokenizer
    return _windows(
        "pair",
        [tuple(pair) for pair in pairs],
        lambda pair: tokenizer.pair_windows(pair[0], pair[1], length, cut),
    )


def _windows(what: str, inputs: Sequence[Hashable], cut: Callable) -> Windows:
    distinct: dict[Hashable, int] = {}
    groups, first = [], []
    for at, one in enumerate(inputs):
        if one in distinct:
            continue
        distinct[one] = len(distinct)
        first.append(len(groups))
        try:
            groups += cut(one)
        except ValueError as error:
            raise ValueError(f"{what} {at}: {error}") from error
    row = np.array([distinct[one] for one in inputs])
    starts = np.cumsum([0, *map(len, groups[:-1])])
    return Windows([*itertools.chain(*groups)], starts, np.array(first), row)


def run(
    program: Callable[..., Array],
    encoder: TextEncoder,
    windows: Windows,
    batch_size: int,
    progress: bool | None,
) -> list[np.ndarray]:
    """What comes of each window, in order; those of like length are read together.

    Raises:
      ValueError: when ``batch_size`` is below 1.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; give at least 1")
    if jax.default_backend() == "cpu":
        batch_size = min(batch_size, _CPU_ROWS)
    order = np.argsort([len(piece) for piece in windows.pieces], kind="stable")
    found = {}
    with progress_bar(len(order), "reading texts", "text", progress) as bar:
        for start in range(0, len(order), batch_size):
            part = order[start : start + batch_size].tolist()
            batch = collate(encoder, [windows.pieces[at] for at in part], batch_size)
            # Rows beyond the windows are dummies.
            found |= zip(part, np.asarray(program(encoder, *batch)), strict=False)
            bar.update(len(part))
    return [found[at] for at in range(len(order))]


def collate(
    encoder: TextEncoder, pieces: "list[tokenizers.Encoding]", batch_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids, token types and which are no padding, in a bucketed shape.

    Rows beyond the windows are dummies of one token.
    """
    longest = max(len(piece) for piece in pieces)
    columns = min(bucket(longest, SMALLEST), encoder.config.context_length)
    rows = min(bucket(len(pieces), 1), batch_size)
    tokens = np.full((rows, columns), encoder.tokenizer.pad_id, np.int32)
    types, valid = np.zeros_like(tokens), np.zeros((rows, columns), bool)
    valid[:, 0] = True
    for row, piece in enumerate(pieces):
        tokens[row, : len(piece)] = piece.ids
        types[row, : len(piece)] = piece.type_ids
        valid[row, : len(piece)] = True
    return tokens, types, valid


def check_pairs(pairs: Sequence[Any]) -> None:
    """Makes sure that there are pairs, each of two texts.

    Raises:
      TypeError: naming the pair that is no pair of strings.
      ValueError: when there is no pair, or a text is empty.
    """
    _check_list("pairs", pairs)
    for at, pair in enumerate(pairs):
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise TypeError(f"pair {at} is {pair!r:.80}; give two texts")
        for which, text in zip(("first", "second"), pair, strict=True):
            _check_text(f"the {which} text of pair {at}", text)


def _check_list(name: str, values: Any) -> None:
    if isinstance(values, str):
        raise TypeError(f"{name} is the string {values!r:.80}; give a list")
    if not len(values):
        raise ValueError(f"{name} is empty; give at least one")


def _check_text(what: str, text: Any) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{what} is {text!r:.80}, a {type(text).__name__}, no string")
    if not text.strip():
        raise ValueError(f"{what} is {text!r}; give one with a visible character")
