"""The way in for attention that comes from elsewhere: any framework, checked once."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float

from jaxhal.features.base import Reducer
from jaxhal.types import View

# Reading values back costs a copy: beyond this many numbers only shapes are checked.
_INSPECT_AT_MOST = 1 << 22
_CAUSAL_TOLERANCE = 1e-6


def reduce(
    reducer: Reducer, attention: Any, prompt_length: Any, context_length: Any = 1
) -> Any:
    """What a reducer makes of every head's attention, as of a model's own.

    Arguments and errors are those of :func:`jaxhal.lookback_ratio`.
    """
    attention = causal_attention(attention, prompt_length)
    prompt_length = static_int("prompt_length", prompt_length)
    context_length = static_int("context_length", context_length)
    if not 1 <= context_length <= prompt_length:
        raise ValueError(
            f"context_length is {context_length} but the prompt holds {prompt_length} "
            f"tokens; it must lie in 1..{prompt_length}"
        )
    return _reduce(reducer, attention, prompt_length, context_length)


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _reduce(
    reducer: Reducer,
    attention: Float[Array, "*lead seq seq"],
    prompt_length: int,
    context_length: int,
) -> Any:
    *lead, seq, _ = attention.shape
    key, none = jnp.arange(seq), jnp.zeros(seq, bool)
    first = prompt_length - (reducer.row == "predictor")
    query = slice(first, first + seq - prompt_length)
    context = key < context_length
    masks = ~none, context, none, none
    view = View(key[query], key[query], *masks, jnp.zeros_like(key), prompt_length)

    def head(rows: Float[Array, "query key"]) -> Any:
        packed = reducer.pack(reducer.rows(rows, view), view)
        return reducer.finish(packed, view)

    found = jax.vmap(head)(attention.reshape(-1, seq, seq)[:, query])
    return jax.tree.map(lambda leaf: leaf.reshape(*lead, *leaf.shape[1:]), found)


def to_jax(array: Any) -> Array:
    """A JAX array with the values of ``array``, whatever framework holds them.

    NumPy, PyTorch (any device or dtype, with or without gradient), TensorFlow or JAX
    array, tracer, nested list of numbers; a tuple of these is stacked.  TypeError when
    the values are not numbers.
    """
    if isinstance(array, jax.Array):
        return array
    if isinstance(array, tuple) and array:
        return jnp.stack([to_jax(item) for item in array])
    if (detach := getattr(array, "detach", None)) is not None:
        # NumPy knows neither PyTorch's gradients nor its bfloat16.
        array = detach().float().cpu().numpy()
    try:
        if array is None:  # which NumPy takes for NaN
            raise TypeError("no array")
        return jnp.asarray(np.asarray(array).astype(np.float32))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"attention is {str(array)[:60]!r} ({type(array).__name__}); pass an array "
            "of numbers (Hugging Face needs attn_implementation='eager' to return one)"
        ) from error


def causal_attention(attention: Any, prompt_length: Any) -> Float[Array, "... seq seq"]:
    """Causal attention in float32, checked before anything is traced.

    Values are looked at only when they are at hand (not a tracer) and few, and only in
    the rows that predict or are response tokens: rows of padding hold anything.

    Raises:
      TypeError: when ``prompt_length`` is not a static integer.
      ValueError: on attention that is not square, a ``prompt_length`` outside
        ``1..seq-1``, a value that is not finite, a row that attends to a later column.
    """
    attention = to_jax(attention)
    prompt_length = static_int("prompt_length", prompt_length)
    if attention.ndim < 2 or attention.shape[-1] != attention.shape[-2]:
        raise ValueError(
            f"attention has shape {attention.shape}; pass [..., seq, seq] with the "
            "prompt and the response on both axes"
        )
    seq = attention.shape[-1]
    if not 1 <= prompt_length < seq:
        raise ValueError(
            f"prompt_length is {prompt_length} but attention covers {seq} tokens; it "
            f"must lie in 1..{seq - 1}, so that prompt and response hold a token each"
        )
    _inspect(attention, prompt_length - 1)
    return attention.astype(jnp.float32)


def static_int(name: str, value: Any) -> int:
    """``value`` as a Python integer; TypeError when it is traced or no integer."""
    if isinstance(value, Tracer):
        raise TypeError(
            f"{name} is traced; keep it static: jax.jit(..., static_argnames={name!r})"
        )
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; pass an integer") from None


def _inspect(attention: Array, first_row: int) -> None:
    """Raises on values no causal softmax can hold, from row ``first_row`` on."""
    if isinstance(attention, Tracer) or attention.size > _INSPECT_AT_MOST:
        return
    rows = np.asarray(attention[..., first_row:, :], np.float32)
    late = np.tri(*rows.shape[-2:], k=first_row) == 0
    for bad, remedy in (
        (~np.isfinite(rows), "compute the softmax in float32"),
        (late & (np.abs(rows) > _CAUSAL_TOLERANCE), "a row must not see later columns"),
    ):
        if bad.any():
            *lead, row, column = (int(axis) for axis in np.argwhere(bad)[0])
            where = (*lead, row + first_row, column)
            raise ValueError(
                f"attention{list(where)} is {rows[(*lead, row, column)]}; {remedy}, "
                "and rows are queries, columns are keys"
            )
