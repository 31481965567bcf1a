"""Texts to vectors, pairs of texts to probabilities of labels or to likeness."""

import collections
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float

from jaxhal.features import consistency
from jaxhal.models.batching import bucket
from jaxhal.models.encoders import encoder as encoder_lib
from jaxhal.models.encoders.batches import (
    SMALLEST,
    check_pairs,
    of_pairs,
    of_texts,
    run,
)
from jaxhal.models.encoders.text_encoder import Pooling as Pooling
from jaxhal.models.encoders.text_encoder import TextEncoder as TextEncoder
from jaxhal.models.encoders.text_encoder import load_encoder as load_encoder

_COMPARED = 4096  # tokens of either side of the pairs that are compared at once


@functools.lru_cache(maxsize=2)
def kept_encoder(source: str) -> TextEncoder:
    """The encoder of a source, loaded once; loaded again, it would compile again.

    Raises:
      ValueError: as :func:`load_encoder`.
      FileNotFoundError: likewise.
    """
    return load_encoder(source)


def embed(
    encoder: TextEncoder,
    texts: Sequence[Any],
    *,
    batch_size: int = 32,
    progress: bool | None = None,
) -> Float[np.ndarray, "texts width"]:
    """One vector a text, float32, in the order of the texts.

    A text longer than the encoder's context is read in windows; its vector is their
    mean, each counting as many times as it has tokens.  Equal texts are read once.

    Args:
      encoder: with a pooling.
      texts: strings, each with at least one visible character.
      batch_size: windows read at once, at most 8 of them on a CPU.
      progress: show a progress bar; ``None`` shows it on a terminal.

    Raises:
      TypeError: naming the text that is no string.
      ValueError: when there is no text, a text is empty or no Unicode, or the encoder
        has no pooling.

    References:
      Reimers and Gurevych, `Sentence-BERT <https://arxiv.org/abs/1908.10084>`_, 2019,
      section 3.
    """
    pooling = encoder.pooling
    if pooling is None:
        raise ValueError(
            f"encoder {encoder.name!r} does not say how to pool; load it with "
            "pooling='mean' or pooling='cls'"
        )
    windows = of_texts(encoder, texts)
    found = np.stack(run(_pooled, encoder, windows, batch_size, progress))
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
    batch_size: int = 32,
    progress: bool | None = None,
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
      pairs: of two strings each; of a natural language inference model (premise,
        hypothesis).
      labels: names of the classes in order; by default ``encoder.labels``.
      batch_size: windows read at once, at most 8 of them on a CPU.
      progress: show a progress bar; ``None`` shows it on a terminal.

    Raises:
      TypeError: naming the pair that is no pair of strings.
      ValueError: when there is no pair, a text is empty or no Unicode, the encoder has
        no classifier, or a pair is too long for one without a label ``entailment``.
    """
    if not encoder.labels:
        raise ValueError(
            f"encoder {encoder.name!r} has no classifier; load a checkpoint of a "
            "sequence classifier, such as a natural language inference model"
        )
    names = [label.lower() for label in labels or encoder.labels]
    entailment = names.index("entailment") if "entailment" in names else None
    windows = of_pairs(encoder, pairs, cut=entailment is not None)
    found = np.stack(run(_probabilities, encoder, windows, batch_size, progress))
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


def token_states(
    encoder: TextEncoder,
    texts: Sequence[Any],
    *,
    layer: int | None = None,
    batch_size: int = 32,
    progress: bool | None = None,
) -> list[Float[np.ndarray, "tokens width"]]:
    """Hidden states of each text's tokens, float32, without special tokens.

    The tokens of a text longer than the encoder's context are those of its windows, one
    after the other, and each knows of its own window alone.  Equal texts are read once
    and share an array; a text of which the tokenizer leaves nothing has no row.

    Args:
      encoder: of any kind.
      texts: strings, each with at least one visible character.
      layer: after which the states are taken, 0 for the embeddings; the last when left
        out, its final norm included.
      batch_size: windows read at once, at most 8 of them on a CPU.
      progress: show a progress bar; ``None`` shows it on a terminal.

    Raises:
      TypeError: naming the text that is no string.
      ValueError: when there is no text, a text is empty or no Unicode, or the encoder
        has no such layer.
    """
    most = encoder.config.num_hidden_layers
    if layer is not None and not 0 <= layer <= most:
        raise ValueError(
            f"layer is {layer}; encoder {encoder.name!r} has 0, its embeddings, to "
            f"{most}"
        )
    windows = of_texts(encoder, texts)
    states = functools.partial(_states, layer=layer)
    found = run(states, encoder, windows, batch_size, progress)
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
    batch_size: int = 32,
    progress: bool | None = None,
) -> Float[np.ndarray, "pairs 3"]:
    """Precision, recall and F1 of each pair of texts by tokens, in [-1, 1], float32.

    The first text is the candidate, the second the reference, of
    :func:`jaxhal.features.consistency.bertscore`.  Equal texts are read once, equal
    pairs compared once.  Special tokens are left out; the published code lets a token
    be nearest to one.

    Args:
      encoder: of any kind.
      pairs: of two strings each.
      layer: as :func:`token_states` takes it; 17 is published for RoBERTa large.
      batch_size: windows read at once, at most 8 of them on a CPU.
      progress: show a progress bar; ``None`` shows it on a terminal.

    Raises:
      TypeError: naming the pair that is no pair of strings.
      ValueError: when there is no pair, a text is empty or no Unicode, or the encoder
        has no such layer.

    References:
      Zhang et al., `BERTScore <https://arxiv.org/abs/1904.09675>`_, 2020, section 3.
    """
    check_pairs(pairs)
    pairs = [tuple(pair) for pair in pairs]
    row = {pair: at for at, pair in enumerate(dict.fromkeys(pairs))}
    texts = list(dict.fromkeys(text for pair in row for text in pair))
    # After a space, so that a byte-level tokenizer reads the first word like any other.
    spaced = [f" {text}" for text in texts]
    options: Any = dict(layer=layer, batch_size=batch_size, progress=progress)
    states = dict(zip(texts, token_states(encoder, spaced, **options), strict=True))
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


@jax.jit
def _pooled(encoder: TextEncoder, tokens: Array, types: Array, valid: Array) -> Array:
    assert encoder.pooling is not None
    _, hidden = _hidden(encoder, tokens, types, valid)
    return encoder_lib.pool(hidden, valid, encoder.pooling.how).astype(jnp.float32)


@jax.jit
def _probabilities(
    encoder: TextEncoder, tokens: Array, types: Array, valid: Array
) -> Array:
    model, hidden = _hidden(encoder, tokens, types, valid)
    return jax.nn.softmax(encoder_lib.logits(model, hidden, valid), axis=-1)


@jax.jit(static_argnames="layer")
def _states(
    encoder: TextEncoder, tokens: Array, types: Array, valid: Array, layer: int | None
) -> Array:
    return _hidden(encoder, tokens, types, valid, layer)[1].astype(jnp.float32)


def _hidden(
    encoder: TextEncoder,
    tokens: Array,
    types: Array,
    valid: Array,
    layer: int | None = None,
):
    model = nnx.merge(encoder.graphdef, encoder.params)
    embedded = encoder_lib.embed(model, tokens, types, valid)
    return model, encoder_lib.run(model, embedded, valid, layers=layer)[0]
