"""Encoded examples into batches: buckets, plans, padding on both sides of the seam."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Bool, Int

from jaxhal.io.checks import at_least
from jaxhal.types import Batch

_SMALLEST_PROMPT, _SMALLEST_RESPONSE = 64, 16


@dataclasses.dataclass(frozen=True, eq=False)
class Encoded:
    """One example as tokens, on the host."""

    prompt_ids: Int[np.ndarray, " prompt"]  # template and any BOS included
    response_ids: Int[np.ndarray, " response"]  # the EOS included
    # Characters in the response, (n, n) for an appended EOS; a character cut into
    # several tokens is in the span of each.
    offsets: Int[np.ndarray, "response 2"]
    # Up to the end of the user's text, never the last token; of the retrieved text or
    # of a bare prompt; of the question.
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
    """Rows to be read together, the ``P`` and ``R`` they share, and the batch's size.

    As many consecutive rows as ``copies`` have the same prompt.
    """

    rows: list[int]
    prompt_length: int
    response_length: int
    size: int
    copies: int = 1


def rows_together(count: int, most: int, ways: int = 1) -> int:
    """Rows of each of as few batches as hold ``count``, a :func:`bucket`.

    So many on each of ``ways`` devices, which share a batch.

    >>> [rows_together(count, 32) for count in (1, 5, 40, 1000)]
    [1, 6, 24, 32]
    >>> [rows_together(count, 32, ways=8) for count in (1, 5, 40, 1000)]
    [8, 8, 48, 256]
    """
    at_least(1, batch_size=most)
    each = -(-count // ways)
    batches = -(-each // most)
    return ways * min(most, bucket(-(-each // batches), 1))


def plan(encoded: Sequence[Encoded], batch_size: int) -> list[Planned]:
    """Batches that share their ``(P, R)`` bucket, so that few programs are compiled.

    Rows that do not fill a batch of their bucket move on to the next larger one that
    has rows.  Smaller buckets come first; order is kept inside a bucket.
    """
    at_least(1, batch_size=batch_size)
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
            Planned(rows[start : start + batch_size], prompt, response, batch_size)
            for start in range(0, len(rows), batch_size)
        ]
    return batches


def plan_shared(
    encoded: Sequence[Encoded], batch_size: int, ways: int = 1
) -> list[Planned]:
    """Batches in which a prompt stands once for several answers to it.

    How many is a power of two.  As each number of copies compiles programs of its own,
    it has to fill a batch, or to take all rows that are left.  Each of ``ways`` devices
    reads up to ``batch_size`` answers of a batch, and a prompt's on one of them.
    """
    at_least(1, batch_size=batch_size)
    by_prompt = collections.defaultdict(list)
    for index, one in enumerate(encoded):
        by_prompt[one.prompt_ids.tobytes()].append(index)
    left = [*by_prompt.values()]
    for rows in left:
        rows.sort(key=lambda row: len(encoded[row].response_ids))
    batches, copies = [], 1 << (batch_size.bit_length() - 1)
    while copies:
        split = [len(rows) - len(rows) % copies for rows in left]
        runs = [
            rows[start : start + copies]
            for rows, end in zip(left, split, strict=True)
            for start in range(0, end, copies)
        ]
        together = batch_size // copies
        all_left = len(runs) * copies == sum(map(len, left)) > 0
        if len(runs) >= ways * together or all_left:
            left = [rows[end:] for rows, end in zip(left, split, strict=True)]
            longest = [encoded[run[-1]] for run in runs]
            for prompt in plan(longest, rows_together(len(runs), together, ways)):
                rows = [row for at in prompt.rows for row in runs[at]]
                size = prompt.size * copies
                batches.append(prompt._replace(rows=rows, size=size, copies=copies))
        copies //= 2
    return batches


def collate(
    encoded: Sequence[Encoded],
    pad_id: int,
    prompt_length: int | None = None,
    response_length: int | None = None,
    batch_size: int | None = None,
) -> Batch:
    """Examples in one batch: prompts end, and responses start, at column ``P``.

    Lengths are the next buckets when left out.  Rows up to ``batch_size`` beyond the
    examples are dummies of one prompt and one response token.

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
    _check_columns("prompt", prompt, [len(one.prompt_ids) for one in encoded])
    _check_columns("response", response, [len(one.response_ids) for one in encoded])
    tokens = np.full((batch_size, prompt + response), pad_id, np.int32)
    valid, context, document, question = np.zeros((4, *tokens.shape), bool)
    offsets = np.zeros((batch_size, response, 2), np.int32)
    for row, one in enumerate(encoded):
        head = slice(prompt - len(one.prompt_ids), prompt)
        tail = slice(prompt, prompt + len(one.response_ids))
        tokens[row, head], tokens[row, tail] = one.prompt_ids, one.response_ids
        valid[row, head.start : tail.stop] = True
        context[row, head], document[row, head] = one.context, one.document
        question[row, head] = one.question
        offsets[row, : len(one.offsets)] = one.offsets
    valid[len(encoded) :, prompt - 1 : prompt + 1] = True
    batch = Batch(tokens, valid, context, document, question, offsets, prompt)
    return jax.device_put(batch)  # jnp.asarray would compile a program for each shape


def _check_columns(name: str, columns: int, needed: list[int]) -> None:
    if columns < max(needed):
        raise ValueError(
            f"{name}_length={columns} is too small for a {name} of {max(needed)} "
            f"tokens; leave it out or give at least {max(needed)}"
        )


def check_length(encoded: Encoded, context_length: int) -> None:
    """Raises ValueError when prompt and response are over the model's context."""
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
    """Raises ValueError when a row of the mask is over the model's context.

    Of ``Bool[batch seq]``; a traced mask passes.
    """
    if isinstance(valid, Tracer):
        return
    longest = int(np.asarray(valid).sum(axis=1).max())
    if longest > context_length:
        raise ValueError(
            f"a row has {longest} tokens, over the model's context of "
            f"{context_length}; shorten it or use a longer-context model"
        )
