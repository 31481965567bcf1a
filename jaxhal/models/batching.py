"""Encoded examples into batches: buckets, plans, padding on both sides of the seam."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Bool, Int

from jaxhal.types import Batch

_SMALLEST_PROMPT, _SMALLEST_RESPONSE = 64, 16


@dataclasses.dataclass(frozen=True, eq=False)
class Encoded:
    """One example as tokens, on the host.

    Attributes:
      prompt_ids: the prompt's tokens, template and any BOS included.
      response_ids: the response's tokens, the EOS included.
      offsets: character span of each response token in the response; ``(n, n)`` for an
        appended EOS.  A character cut into several tokens is in the span of each.
      context: prompt tokens up to the end of the user's text, never the last token.
      document: prompt tokens of the retrieved text, or of a bare prompt.
      question: prompt tokens of the question.
    """

    prompt_ids: Int[np.ndarray, " prompt"]
    response_ids: Int[np.ndarray, " response"]
    offsets: Int[np.ndarray, "response 2"]
    context: Bool[np.ndarray, " prompt"]
    document: Bool[np.ndarray, " prompt"]
    question: Bool[np.ndarray, " prompt"]


def bucket(n: int, smallest: int) -> int:
    """The smallest of ``s, 3s/2, 2s, 3s, 4s, 6s, ...`` that holds ``n``.

    >>> [bucket(n, 64) for n in (1, 65, 97, 1025)]
    [64, 96, 128, 1536]
    """
    while n > smallest:
        if n <= smallest * 3 // 2:
            return smallest * 3 // 2
        smallest *= 2
    return smallest


def lengths(encoded: Sequence[Encoded]) -> tuple[int, int]:
    """The bucketed ``(P, R)`` that hold every one of some examples."""
    prompt = max(len(one.prompt_ids) for one in encoded)
    response = max(len(one.response_ids) for one in encoded)
    return bucket(prompt, _SMALLEST_PROMPT), bucket(response, _SMALLEST_RESPONSE)


class Planned(NamedTuple):
    """Rows to be read together and the ``P`` and ``R`` they share."""

    rows: list[int]
    prompt_length: int
    response_length: int


def rows_together(count: int, most: int) -> int:
    """Rows of each of as few batches as hold ``count``, so that few rows hold nothing.

    A :func:`bucket`, so that not every count has a program of its own.

    Raises:
      ValueError: when ``most`` is below 1.

    >>> [rows_together(count, 32) for count in (1, 5, 40, 1000)]
    [1, 6, 24, 32]
    """
    if most < 1:
        raise ValueError(f"batch_size is {most}; give at least 1")
    batches = -(-count // most)
    return min(most, bucket(-(-count // batches), 1))


def plan(encoded: Sequence[Encoded], batch_size: int) -> list[Planned]:
    """Batches that share their ``(P, R)`` bucket, so that few programs are compiled.

    Rows that do not fill a batch of their bucket move on to the next larger one that
    has rows, where they cost a little padding instead of a compilation.  With
    ``collate(..., batch_size=batch_size)`` there is at most one program per bucket.
    Smaller buckets come first; order is kept inside a bucket.

    Raises:
      ValueError: when ``batch_size`` is below 1.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; give at least 1")
    groups = collections.defaultdict(list)
    for index, one in enumerate(encoded):
        groups[lengths([one])].append(index)
    batches = []
    buckets = sorted(groups)
    for at, (prompt, response) in enumerate(buckets):
        rows = sorted(groups[prompt, response])
        larger = next((b for b in buckets[at + 1 :] if b[1] >= response), None)
        if larger is not None:
            whole = len(rows) - len(rows) % batch_size
            groups[larger] += rows[whole:]
            rows = rows[:whole]
        batches += [
            Planned(rows[start : start + batch_size], prompt, response)
            for start in range(0, len(rows), batch_size)
        ]
    return batches


def collate(
    encoded: Sequence[Encoded],
    pad_id: int,
    prompt_length: int | None = None,
    response_length: int | None = None,
    batch_size: int | None = None,
) -> Batch:
    """Examples in one batch: prompts end, and responses start, at column ``P``.

    Args:
      encoded: at least one example.
      pad_id: the token that fills the padding.
      prompt_length: ``P``; the next bucket when left out.
      response_length: ``R``; the next bucket when left out.
      batch_size: number of rows.  Rows beyond the examples are dummies of one prompt
        and one response token, there to keep the shape: drop what comes out of them.

    Raises:
      ValueError: when the examples do not fit the rows or columns asked for.
    """
    if not encoded:
        raise ValueError("there is no example to collate; give at least one")
    batch_size = len(encoded) if batch_size is None else batch_size
    if batch_size < len(encoded):
        raise ValueError(
            f"{len(encoded)} examples do not fit batch_size={batch_size}; see plan()"
        )
    prompt, response = lengths(encoded)
    prompt = prompt if prompt_length is None else prompt_length
    response = response if response_length is None else response_length
    for name, columns, needed in (
        ("prompt", prompt, max(len(one.prompt_ids) for one in encoded)),
        ("response", response, max(len(one.response_ids) for one in encoded)),
    ):
        if columns < needed:
            raise ValueError(
                f"{name}_length={columns} is too small for a {name} of {needed} "
                f"tokens; leave it out or give at least {needed}"
            )
    tokens = np.full((batch_size, prompt + response), pad_id, np.int32)
    valid, context, document, question = np.zeros((4, *tokens.shape), bool)
    offsets = np.zeros((batch_size, response, 2), np.int32)
    for row, one in enumerate(encoded):
        head = slice(prompt - len(one.prompt_ids), prompt)
        tail = slice(prompt, prompt + len(one.response_ids))
        tokens[row, head], tokens[row, tail] = one.prompt_ids, one.response_ids
        valid[row, head.start : tail.stop] = True
        context[row, head] = one.context
        document[row, head] = one.document
        question[row, head] = one.question
        offsets[row, : len(one.offsets)] = one.offsets
    valid[len(encoded) :, prompt - 1 : prompt + 1] = True
    batch = Batch(tokens, valid, context, document, question, offsets, prompt)
    return jax.tree.map(jnp.asarray, batch)


def check_length(encoded: Encoded, context_length: int) -> None:
    """Makes sure that an example fits the model's context.

    Args:
      encoded: the example, with its EOS if it has one.
      context_length: the most tokens the model can see.

    Raises:
      ValueError: when prompt and response, or the response alone, are longer; nothing
        is ever cut off.
    """
    prompt, response = len(encoded.prompt_ids), len(encoded.response_ids)
    if prompt + response <= context_length:
        return
    remedy = (
        "shorten the context" if response < context_length else "split the response"
    )
    raise ValueError(
        f"{prompt} prompt tokens and {response} response tokens are "
        f"{prompt + response}, over the model's context of {context_length}; {remedy} "
        "or choose a model with a longer one"
    )


def check_rows(valid: Any, context_length: int) -> None:
    """Makes sure that every row of ``Bool[batch seq]`` fits; a traced mask passes.

    Raises:
      ValueError: when a row has more tokens than the model's context.
    """
    if isinstance(valid, Tracer):
        return
    longest = int(np.asarray(valid).sum(axis=1).max())
    if longest > context_length:
        raise ValueError(
            f"a row has {longest} tokens, over the model's context of "
            f"{context_length}; shorten it or use a longer-context model"
        )
