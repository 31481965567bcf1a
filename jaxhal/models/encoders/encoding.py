"""Texts to vectors, pairs of texts to probabilities of labels or to likeness.

What is longer than an encoder's context is read in windows.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxhal.features import consistency
from jaxhal.io.progress import progress_bar
from jaxhal.models.batching import bucket
from jaxhal.models.encoders import encoder as encoder_lib
from jaxhal.models.encoders.text_encoder import Pooling as Pooling
from jaxhal.models.encoders.text_encoder import TextEncoder as TextEncoder
from jaxhal.models.encoders.text_encoder import load_encoder as load_encoder

if TYPE_CHECKING:
    import tokenizers

_SMALLEST = 16  # columns of a batch
_ROWS = 32  # of a batch
_CPU_ROWS = 8  # more at once save nothing there, and are padded more
_COMPARED = 4096  # tokens of either side of the pairs that are compared at once


@functools.lru_cache(maxsize=2)
def kept_encoder(source: str) -> TextEncoder:
    """The encoder of a source, loaded once; loaded again, it would compile again."""
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
    found = np.stack(_run(encoder, windows, "pooled", progress=progress))
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

    Raises:
      TypeError, ValueError: on no pairs, naming one that is no pair of texts, and on an
        encoder without classifier, or a pair too long for one without a label
        ``entailment``.
    """
    if not encoder.labels:
        raise ValueError(
            f"encoder {encoder.name!r} has no classifier; load a checkpoint of a "
            "sequence classifier, such as a natural language inference model"
        )
    names = [label.lower() for label in labels or encoder.labels]
    entailment = names.index("entailment") if "entailment" in names else None
    length, cut = encoder.config.context_length, entailment is not None
    _check_pairs(pairs)
    windows = _windows(
        "pair",
        [tuple(pair) for pair in pairs],
        lambda pair: encoder.tokenizer.pair_windows(pair[0], pair[1], length, cut),
    )
    found = np.stack(_run(encoder, windows, "probabilities"))
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
    found = _run(encoder, windows, "states", layer, progress)
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
        groups[bucket(max(len(states[text]) for text in pair), _SMALLEST)].append(pair)
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


@jax.jit(static_argnames=("what", "layer"))
def _read(
    encoder: TextEncoder,
    tokens: Array,
    types: Array,
    valid: Array,
    what: Literal["pooled", "probabilities", "states"],
    layer: int | None,
) -> Array:
    model = nnx.merge(encoder.graphdef, encoder.params)
    embedded = encoder_lib.embed(model, tokens, types, valid)
    hidden = encoder_lib.run(model, embedded, valid, layer)
    if what == "probabilities":
        return jax.nn.softmax(encoder_lib.logits(model, hidden, valid), axis=-1)
    if what == "pooled":
        assert encoder.pooling is not None
        hidden = encoder_lib.pool(hidden, valid, encoder.pooling.how)
    return hidden.astype(jnp.float32)


class Windows(NamedTuple):
    """Windows of the distinct inputs, and where each input finds its own.

    Windows of a pair with the same window of the second text are a group; of texts, all
    windows of one.
    """

    pieces: "list[tokenizers.Encoding]"
    group: Int[np.ndarray, " groups"]  # the first window of each
    first: Int[np.ndarray, " distinct"]  # the first group of each distinct input
    row: Int[np.ndarray, " inputs"]  # the distinct input that equals each input


def _of_texts(encoder: TextEncoder, texts: Sequence[Any]) -> Windows:
    """Windows of texts, each as long as the encoder's context allows."""
    _check_list("texts", texts)
    for at, text in enumerate(texts):
        _check_text(f"text {at}", text)
    length = encoder.config.context_length
    tokenizer = encoder.tokenizer
    return _windows("text", texts, lambda text: [tokenizer.windows(text, length)])


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


def _run(
    encoder: TextEncoder,
    windows: Windows,
    what: Literal["pooled", "probabilities", "states"],
    layer: int | None = None,
    progress: bool | None = False,
) -> list[np.ndarray]:
    """What comes of each window, in order; those of like length are read together."""
    batch_size = _CPU_ROWS if jax.default_backend() == "cpu" else _ROWS
    order = np.argsort([len(piece) for piece in windows.pieces], kind="stable")
    found = {}
    with progress_bar(len(order), "reading texts", "text", progress) as bar:
        for start in range(0, len(order), batch_size):
            part = order[start : start + batch_size].tolist()
            batch = collate(encoder, [windows.pieces[at] for at in part], batch_size)
            # Rows beyond the windows are dummies.
            rows = np.asarray(_read(encoder, *batch, what, layer))
            found |= zip(part, rows, strict=False)
            bar.update(len(part))
    return [found[at] for at in range(len(order))]


def collate(
    encoder: TextEncoder, pieces: "list[tokenizers.Encoding]", batch_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids, token types and which are no padding, in a bucketed shape."""
    longest = max(len(piece) for piece in pieces)
    columns = min(bucket(longest, _SMALLEST), encoder.config.context_length)
    rows = min(bucket(len(pieces), 1), batch_size)
    tokens = np.full((rows, columns), encoder.tokenizer.pad_id, np.int32)
    types, valid = np.zeros_like(tokens), np.zeros((rows, columns), bool)
    valid[:, 0] = True  # rows beyond the windows are dummies of one token
    for row, piece in enumerate(pieces):
        tokens[row, : len(piece)] = piece.ids
        types[row, : len(piece)] = piece.type_ids
        valid[row, : len(piece)] = True
    return tokens, types, valid


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
