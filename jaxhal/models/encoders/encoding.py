"""Texts to vectors, pairs of texts to probabilities of labels or to likeness.

What is longer than an encoder's context is read in windows.
"""

import collections
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxhal.features import consistency
from jaxhal.models.batching import bucket
from jaxhal.models.encoders.text_encoder import Framed, TextEncoder, load_encoder
from jaxhal.models.encoders.windows import SMALLEST, Windows, cut_all, run
from jaxhal.models.registry import stamp

_COMPARED = 4096  # tokens of either side of the pairs that are compared at once


def kept_encoder(source: str) -> TextEncoder:
    """The encoder of a source, loaded once; loaded again, it would compile again.

    Its files may change meanwhile: then it is.
    """
    return _kept(source, stamp(source))


@functools.lru_cache(maxsize=2)
def _kept(source: str, files: tuple[Any, ...]) -> TextEncoder:
    del files
    return load_encoder(source)


def embed(
    encoder: TextEncoder,
    texts: Sequence[Any],
    *,
    progress: bool | None = None,
) -> Float[np.ndarray, "texts width"]:
    """One vector a text, float32, in the order of the texts.

    A text longer than the encoder's context is read in windows; its vector is their
    mean, each counting as many times as it has tokens (Reimers and Gurevych 2019,
    `Sentence-BERT <https://arxiv.org/abs/1908.10084>`_, section 3).  Equal texts are
    read once.

    ``progress`` shows a bar, by default on a terminal.

    Raises:
      TypeError, ValueError: on no texts, naming one that is no string or has no visible
        character, and on an encoder without pooling.
    """
    pooling = encoder.pooling
    if pooling is None:
        raise ValueError(
            f"encoder {encoder.name!r} does not say how to pool; load it with "
            "pooling='mean' or pooling='cls'"
        )
    windows = _of_texts(encoder, texts)
    found = np.stack(run(encoder, windows, "pooled", progress=progress))
    weight = np.array([len(piece) for piece in windows.pieces], np.float32)
    mean = np.add.reduceat(found * weight[:, None], windows.group)
    mean /= np.add.reduceat(weight, windows.group)[:, None]
    if pooling.normalize:
        mean /= np.maximum(np.linalg.norm(mean, axis=1, keepdims=True), 1e-12)
    return mean[windows.row]


def classify(
    encoder: TextEncoder,
    pairs: Sequence[Any],
    *,
    labels: Sequence[str] | None = None,
    template: str | None = None,
) -> Float[np.ndarray, "pairs labels"]:
    """Probabilities of an encoder's classes for each pair of texts, in [0, 1], float32.

    Where a pair is longer than the encoder's context, the longer text is read in
    windows that overlap by a quarter; both texts are, where the shorter would leave the
    other less than a quarter of the context.  A window of the hypothesis follows from
    the premise if it follows from one of its windows, and all of them have to follow:
    the row is that of the lowest over the hypothesis's of the highest over the
    premise's probability of ``entailment``.  Equal pairs are read once.

    Args:
      encoder: with a classifier.
      pairs: of premise and hypothesis.
      labels: names of the classes in order; by default ``encoder.labels``.
      template: for classifiers of one text that is made of a pair, which text, with
        ``{premise}`` and ``{hypothesis}`` in it; of long ones the premise is cut.  By
        default the encoder's own, if it has one.

    Raises:
      TypeError, ValueError: on no pairs, naming one that is no pair of texts, and on an
        encoder without a classifier of texts, or a pair too long for one without a
        label ``entailment``.
    """
    if not encoder.labels or encoder.config.labelled != "texts":
        raise ValueError(
            f"encoder {encoder.name!r} has no classifier of texts; load a checkpoint "
            "of a sequence classifier, such as a natural language inference model"
        )
    names = [label.lower() for label in labels or encoder.labels]
    entailment = names.index("entailment") if "entailment" in names else None
    length, cut = encoder.config.context_length, entailment is not None
    template = template or encoder.config.template
    _check_pairs(pairs)

    def cut_one(pair: tuple[str, str]) -> list:
        if not template:
            return encoder.tokenizer.pair_windows(*pair, length, cut)
        framed = Framed.of(template, *pair)
        return [encoder.tokenizer.framed_windows(framed, None, length)]

    windows = cut_all("pair", [tuple(pair) for pair in pairs], cut_one)
    found = np.stack(run(encoder, windows, "probabilities"))
    if entailment is None:
        return found[windows.row]
    support = found[:, entailment]
    best = _extreme(support, windows.group)  # window of the first text
    worst = best[_extreme(-support[best], windows.first)]  # and of the second
    return found[worst][windows.row]


def _extreme(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Where the highest value of each group is, whose groups begin at ``starts``."""
    group = np.zeros(len(values), int)
    group[starts[1:]] = 1
    order = np.lexsort((values, np.cumsum(group)))
    return order[np.append(starts[1:], len(values)) - 1]


def token_probabilities(
    encoder: TextEncoder,
    asked: Sequence[tuple[Framed, str]],
    *,
    progress: bool | None = None,
) -> list[Float[np.ndarray, " tokens"]]:
    """Of each token of a text, the probability of class 1, read after another text.

    Where both are longer than the encoder's context, the first is read in windows, each
    with all of the second.  One window is evidence enough that a token is not of class
    1: it has the lowest of their probabilities.  Equal ones are read once.

    Raises:
      ValueError: on an encoder without a classifier of tokens into two classes, and
        where a text leaves no room for the one before it.
    """
    if encoder.config.labelled != "tokens" or len(encoder.labels) != 2:
        raise ValueError(
            f"encoder {encoder.name!r} has no classifier of tokens into two classes; "
            "load one of a token classifier, such as LettuceDetect's"
        )
    length = encoder.config.context_length

    def cut_one(one: tuple[Framed, str]) -> list:
        return [encoder.tokenizer.framed_windows(one[0], one[1], length)]

    windows = cut_all("answer", asked, cut_one)
    found = run(encoder, windows, "probabilities", progress=progress)
    of_second = [
        row[: len(piece), 1][np.array(piece.sequence_ids) == 1]
        for row, piece in zip(found, windows.pieces, strict=True)
    ]
    bounds = itertools.pairwise([*windows.group, None])
    lowest = [np.min(of_second[start:end], axis=0) for start, end in bounds]
    return [lowest[row] for row in windows.row]


def token_states(
    encoder: TextEncoder,
    texts: Sequence[Any],
    *,
    layer: int | None = None,
    progress: bool | None = None,
) -> list[Float[np.ndarray, "tokens width"]]:
    """Hidden states of each text's tokens, float32, without special tokens.

    The tokens of a text longer than the encoder's context are those of its windows, and
    each knows of its own window alone.  Equal texts are read once and share an array.

    They are those after a ``layer``, 0 for the embeddings, by default the last with its
    final norm.

    Raises:
      TypeError, ValueError: as :func:`embed`, and on a layer that there is not.
    """
    most = encoder.config.num_hidden_layers
    if layer is not None and not 0 <= layer <= most:
        raise ValueError(
            f"layer is {layer}; encoder {encoder.name!r} has 0, its embeddings, to "
            f"{most}"
        )
    windows = _of_texts(encoder, texts)
    found = run(encoder, windows, "states", layer, progress)
    parts = [
        row[: len(piece)][np.array(piece.special_tokens_mask) == 0]
        for row, piece in zip(found, windows.pieces, strict=True)
    ]
    bounds = itertools.pairwise([*windows.group, None])
    joined = [np.concatenate(parts[start:end]) for start, end in bounds]
    return [joined[row] for row in windows.row]


def bertscores(
    encoder: TextEncoder,
    pairs: Sequence[Any],
    *,
    layer: int | None = None,
    progress: bool | None = None,
) -> Float[np.ndarray, "pairs 3"]:
    """Precision, recall and F1 of each pair of texts by tokens, in [-1, 1], float32.

    Candidate and reference of :func:`jaxhal.features.consistency.bertscore` (Zhang et
    al. 2020, `BERTScore <https://arxiv.org/abs/1904.09675>`_, section 3), without
    special tokens; the published code lets a token be nearest to one.  ``layer`` and
    errors as for :func:`token_states`; layer 17 is published for RoBERTa large.
    """
    _check_pairs(pairs)
    pairs = [tuple(pair) for pair in pairs]
    row = {pair: at for at, pair in enumerate(dict.fromkeys(pairs))}
    texts = list(dict.fromkeys(text for pair in row for text in pair))
    # After a space, so that a byte-level tokenizer reads the first word like any other.
    spaced = [f" {text}" for text in texts]
    read = token_states(encoder, spaced, layer=layer, progress=progress)
    states = dict(zip(texts, read, strict=True))
    groups = collections.defaultdict(list)
    for pair in row:
        groups[bucket(max(len(states[text]) for text in pair), SMALLEST)].append(pair)
    found = np.zeros((len(row), 3), np.float32)
    for columns, group in groups.items():
        size = max(1, _COMPARED // columns)
        for start in range(0, len(group), size):
            part = group[start : start + size]
            first, second = (
                _padded([states[pair[side]] for pair in part], size, columns)
                for side in (0, 1)
            )
            scores = np.asarray(_compared(*first, *second))[: len(part)]
            found[[row[pair] for pair in part]] = scores
    return found[[row[pair] for pair in pairs]]


def _padded(
    states: Sequence[np.ndarray], rows: int, columns: int
) -> tuple[Float[np.ndarray, "rows columns width"], Bool[np.ndarray, "rows columns"]]:
    values = np.zeros((rows, columns, states[0].shape[1]), np.float32)
    valid = np.zeros((rows, columns), bool)
    for row, some in enumerate(states):
        values[row, : len(some)], valid[row, : len(some)] = some, True
    return values, valid


@jax.jit
def _compared(first: Array, first_valid: Array, second: Array, second_valid: Array):
    scores = jax.vmap(consistency.bertscore)(first, second, first_valid, second_valid)
    return jnp.stack(scores, axis=-1)


def _of_texts(encoder: TextEncoder, texts: Sequence[Any]) -> Windows:
    """Windows of texts, each as long as the encoder's context allows."""
    _check_list("texts", texts)
    for at, text in enumerate(texts):
        _check_text(f"text {at}", text)
    length = encoder.config.context_length
    tokenizer = encoder.tokenizer
    return cut_all("text", texts, lambda text: [tokenizer.windows(text, length)])


def _check_pairs(pairs: Sequence[Any]) -> None:
    """Raises TypeError or ValueError unless there are pairs, each of two texts."""
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
