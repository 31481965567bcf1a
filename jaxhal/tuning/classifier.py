"""The reader as a classifier: a linear head on the last token's hidden state."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxhal.io.showing import quoted
from jaxhal.models import decoder
from jaxhal.models.batching import bucket, check_length
from jaxhal.models.lm import LM
from jaxhal.models.ops import wide
from jaxhal.models.weights import paths
from jaxhal.tuning import adapters
from jaxhal.tuning.settings import Tuning
from jaxhal.types import Example

# Of the first weights of the head, as for classifiers in transformers.
_SPREAD = 0.02


class Head(NamedTuple):
    """Log odds of a hallucination from a hidden state: ``h w + b``."""

    w: Float[Array, " width"]
    b: Float[Array, ""]


class Learned(NamedTuple):
    """Everything that fine-tuning changes: the head and, by name of the model's
    parameter, a pair to add or, when every weight is learned, an array to put there."""

    head: Head
    weights: dict[str, Any]


class TokenRows(NamedTuple):
    """Whole sequences, prompt and response, that end in the last column."""

    tokens: Int[Array, "batch seq"]
    valid: Bool[Array, "batch seq"]


def start(lm: LM, tuning: Tuning, key: Array) -> Learned:
    """Where fine-tuning begins: the model as it is under a small random head.

    Weights are kept in float32 however the model holds them, because a step of AdamW is
    often too small for bfloat16.
    """
    key_head, key_pairs = jax.random.split(key)
    names = dict(paths(lm.params))
    if tuning.method == "lora":
        weights = adapters.pairs(lm.params, tuning.targets, tuning.rank, key_pairs)
    else:
        if lm.packed:
            raise ValueError(
                f"model {lm.name!r} has packed weights, and method 'full' learns every "
                "weight; load it with weights='dequantised', or give method 'lora'"
            )
        weights = {
            name: leaf.astype(wide(leaf.dtype))
            for name, leaf in names.items()
            if not name.startswith("lm_head.")  # it makes no hidden state
        }
    dtype = wide(names["norm.scale"].dtype)
    w = _SPREAD * jax.random.normal(key_head, (lm.config.hidden_size,), dtype)
    return Learned(Head(w, jnp.zeros((), dtype)), weights)


def log_odds(
    learned: Learned, lm: LM, rows: TokenRows, scale: Any, remat: bool = False
) -> Float[Array, " batch"]:
    """Log odds of a hallucination, from the last token's state after the final norm.

    Rows have at least one real token; ``scale`` is ``alpha / rank`` of pairs; ``remat``
    computes layers again on the way back instead of keeping all of them.
    """
    params = adapters.insert(lm.params, learned.weights, scale)
    model = nnx.merge(lm.graphdef, params)
    x, geo = decoder.begin(model, rows.tokens, rows.valid)
    hidden, *_ = decoder.run(model, x, geo, ops=adapters.OPS, remat=remat)
    last = hidden[:, -1].astype(learned.head.w.dtype)
    return last @ learned.head.w + learned.head.b


def log_loss(
    learned: Learned,
    lm: LM,
    rows: TokenRows,
    labels: Float[Array, " batch"],
    weight: Float[Array, " batch"],
    scale: Any,
    remat: bool = False,
) -> Float[Array, ""]:
    """Weighted sum of the binary cross-entropy, in nats."""
    found = log_odds(learned, lm, rows, scale, remat)
    return weight @ optax.sigmoid_binary_cross_entropy(found, labels)


def encode(lm: LM, examples: Sequence[Example]) -> list[Int[np.ndarray, " seq"]]:
    """Prompt and response of each answer as one sequence, its end-of-sequence included.

    Raises:
      ValueError: when there are none, the model has no tokenizer, or naming the answer
        that is over the model's context.
    """
    if not examples:
        raise ValueError("there are no examples; give at least one")
    tokenizer = lm.require_tokenizer()
    found = []
    for number, example in enumerate(examples):
        row = tokenizer.encode_example(example)
        try:
            check_length(row, lm.config.context_length)
        except ValueError as error:
            raise ValueError(
                f"example {quoted(example.id or number)}: {error}"
            ) from error
        found.append(np.concatenate([row.prompt_ids, row.response_ids]))
    return found


def batches(
    sequences: Sequence[np.ndarray], numbers: Iterable[int], size: int, pad_id: int
) -> Iterator[tuple[list[int], TokenRows]]:
    """Numbers of sequences and their rows, the shortest first, ``size`` rows each.

    Rows are padded on the left to a bucket.  Those beyond the sequences are dummies of
    one token, there to keep the shape.
    """
    order = sorted(numbers, key=lambda number: (len(sequences[number]), number))
    for at in range(0, len(order), size):
        some = order[at : at + size]
        columns = bucket(len(sequences[some[-1]]), 64)
        tokens = np.full((size, columns), pad_id, np.int32)
        valid = np.zeros((size, columns), bool)
        valid[:, -1] = True
        for row, number in enumerate(some):
            count = len(sequences[number])
            tokens[row, -count:], valid[row, -count:] = sequences[number], True
        yield some, TokenRows(*jax.device_put((tokens, valid)))
