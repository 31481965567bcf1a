"""Prefill and decode steps on the seam cache; row-wise reducers ride along."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from jaxhal.capture.forward import check
from jaxhal.capture.taps import Named, Rows, masks_of
from jaxhal.features.base import Reducer
from jaxhal.features.eigenscore import clip_features
from jaxhal.models import cache as cache_lib
from jaxhal.models import decoder
from jaxhal.models.cache import Cache
from jaxhal.models.lm import LM
from jaxhal.models.mesh import spread
from jaxhal.models.ops import STANDARD
from jaxhal.types import Batch


def prefill(
    lm: LM,
    batch: Batch,
    new_tokens: int,
    reducers: Mapping[str, Reducer] | None = None,
    target: Int[Array | np.ndarray, " batch"] | None = None,
) -> tuple[Float[Array, "batch vocab"], Cache, dict[str, Any]]:
    """Reads the prompts of a batch into a cache with room for ``new_tokens`` columns.

    Returns logits of the first response token, the cache, and features of row ``P - 1``
    with a ``query`` axis of length 1.

    Args:
      lm: the model.
      batch: only its prompt columns ``[:, :P]`` are read.
      new_tokens: columns that decoding may write.
      reducers: row-wise reducers to apply to the last prompt token's row.
      target: the token that follows each prompt, for reducers that ask for it.

    Raises:
      ValueError: when ``new_tokens`` is not positive or does not fit the model's
        context, or a reducer is not row-wise.
    """
    named = _with_target(lm, reducers, target)
    if new_tokens < 1:
        raise ValueError(f"new_tokens is {new_tokens}; a cache needs room for one")
    if not isinstance(batch.valid, Tracer):
        prompts = np.asarray(batch.valid)[:, : batch.prompt_length]
        longest = int(prompts.sum(axis=1).max())
        if longest + new_tokens > lm.config.context_length:
            raise ValueError(
                f"a prompt of {longest} tokens and {new_tokens} new ones are over the "
                f"model's context of {lm.config.context_length}; ask for fewer"
            )
    batch = spread(batch, lm.params)
    logits, cache, seen = _prefill(lm.bare, batch, new_tokens, named, target)
    return logits, cache_lib.laid(cache), seen


def step(
    lm: LM,
    cache: Cache,
    tokens: Int[Array | np.ndarray, "batch query"],
    reducers: Mapping[str, Reducer] | None = None,
    *,
    valid: Bool[Array | np.ndarray, "batch query"] | None = None,
    target: Int[Array | np.ndarray, " batch"] | None = None,
) -> tuple[Float[Array, "batch query vocab"], Cache, dict[str, Any]]:
    """Reads the next tokens, one or several a row, against the cache.

    Returns logits after each new token, the longer cache, and features of the new rows:
    ``[layer, batch, heads, query, ...]`` as in :func:`jaxhal.read`.

    Args:
      lm: the model.
      cache: from :func:`prefill` or an earlier step; it is not changed.
      tokens: the next column or columns.
      reducers: row-wise reducers to apply to the new rows.
      valid: False where a row has no more tokens.
      target: the token after the last column, for reducers that ask for it.

    Raises:
      ValueError: when the cache has no room left or a reducer is not row-wise.
    """
    named = _with_target(lm, reducers, target)
    if not isinstance(cache.column, Tracer):
        column = int(cache.column)
        if column + tokens.shape[1] > cache.capacity:
            raise ValueError(
                f"the cache has {cache.capacity} columns, {column} of them written; no "
                f"room for {tokens.shape[1]} more: prefill with more new_tokens"
            )
    if valid is None:
        valid = np.ones(tokens.shape, bool)
    now = (jnp.asarray(tokens), jnp.asarray(valid))
    return _step(lm.bare, cache, *now, named, target)


def rowwise(lm: LM, reducers: Mapping[str, Reducer] | None) -> Named:
    """The reducers as a hashable tuple, each made sure to need one row at a time."""
    named = check(lm.config, reducers or {})
    for name, reducer in named:
        if not reducer.rowwise:
            raise ValueError(
                f"reducer {name!r} needs all response rows at once; read(...) the "
                "finished response instead"
            )
    return named


def _with_target(lm: LM, reducers: Any, target: Any) -> Named:
    named = rowwise(lm, reducers)
    for name, reducer in named:
        if reducer.reads_target and target is None:
            raise ValueError(
                f"reducer {name!r} scores the token that follows a row; pass it as "
                "target"
            )
    return named


# The tokens that follow the rows at hand, or how to choose them by their logits.
Following = Array | Callable[[Float[Array, "batch vocab"]], Int[Array, " batch"]]

# Below and above which a feature of the state that logits are made of is extreme.
Clip = tuple[Float[Array | np.ndarray, " width"], Float[Array | np.ndarray, " width"]]


@jax.jit(static_argnames=("new_tokens", "named"))
def _prefill(lm: LM, batch: Batch, new_tokens: int, named: Named, target):
    model = nnx.merge(lm.graphdef, lm.params)
    following = jnp.zeros(len(batch.tokens), jnp.int32) if target is None else target
    return begin(model, batch, new_tokens, named, jnp.asarray(following))[:3]


@jax.jit(static_argnames=("named",))
def _step(lm: LM, cache: Cache, tokens, valid, named: Named, target):
    model = nnx.merge(lm.graphdef, lm.params)
    following = jnp.zeros(len(tokens), tokens.dtype) if target is None else target
    return advance(model, cache, tokens, valid, named, jnp.asarray(following))[:3]


def begin(
    model: decoder.Decoder,
    batch: Batch,
    new_tokens: int,
    named: Named,
    following: Following,
    copies: int = 1,
    clip: Clip | None = None,
    limit: Int[Array, " batch"] | None = None,
) -> tuple[Array, Cache, dict[str, Any], Array]:
    """:func:`prefill` for as many rows as there are copies, and the tokens that follow.

    Each prompt is read once; a row may go on by its ``limit``, which ``dynamic`` rope
    has to know.
    """
    prompt = batch.prompt_length
    tokens = jnp.asarray(batch.tokens)[:, :prompt]
    valid = jnp.asarray(batch.valid)[:, :prompt]
    known = jnp.zeros(len(tokens), jnp.int32) if callable(following) else following
    target = jnp.roll(tokens, -1, axis=1).at[:, -1].set(known)
    masks = masks_of(batch, target, prompt)
    rows = Rows(masks, prompt, first=prompt - 1, explicit=1, column=prompt - 1)
    reach = new_tokens if limit is None else limit
    x, geo = decoder.begin(model, tokens, valid, reach)
    hidden, attended, state, kept = decoder.run(
        model, x, geo, ops=STANDARD, tap=rows.tap(named, model), keep=True
    )
    cache = cache_lib.start(batch, kept, new_tokens, reach)
    hidden = _clipped(hidden[:, -1:], clip)
    logits = decoder.unembed(model, hidden[:, 0], STANDARD)
    rows = dataclasses.replace(rows, first=0)
    if copies > 1:
        every = jnp.repeat(jnp.arange(len(tokens)), copies)
        attended, state = jax.tree.map(lambda x: x[:, every], (attended, state))
        rows, cache = rows.take(every), cache_lib.take(cache, every)
        hidden, logits = hidden[every], logits[every]
    if callable(following):
        known = following(logits)
        rows = rows.followed(rows.masks[0].at[:, -1].set(known))
    features = rows.features(named, model, hidden, attended, state)
    return logits, cache, features, known


def advance(
    model: decoder.Decoder,
    cache: Cache,
    tokens: Int[Array, "batch query"],
    valid: Bool[Array, "batch query"],
    named: Named,
    following: Following,
    clip: Clip | None = None,
) -> tuple[Array, Cache, dict[str, Any], Array]:
    """:func:`step`, and the token that follows each row's last."""
    column = cache.column
    cache, position = cache_lib.write(cache, tokens, valid)
    geo = decoder.geometry(
        model.config, position, cache.position, cache.valid, cache.rope_length, valid
    )
    known = jnp.zeros(len(tokens), tokens.dtype) if callable(following) else following
    masks = masks_of(cache, _entered(cache, column, tokens, known))
    rows = Rows(masks, cache.prompt_length, 0, tokens.shape[1], column)
    x, geo = decoder.embed(model, tokens, geo)
    hidden, attended, state, (key, value, *states) = decoder.run(
        model,
        x,
        geo,
        ops=STANDARD,
        tap=rows.tap(named, model),
        cache=cache,
    )
    hidden = _clipped(hidden, clip)
    logits = decoder.unembed(model, hidden, STANDARD)
    if callable(following):
        known = following(logits[:, -1])
        rows = rows.followed(_entered(cache, column, tokens, known))
    features = rows.features(named, model, hidden, attended, state)
    cache = dataclasses.replace(cache, key=key, value=value, states=tuple(states))
    return logits, cache, features, known


def _clipped(hidden: Array, clip: Clip | None) -> Array:
    return hidden if clip is None else clip_features(hidden, *clip)


def _entered(cache: Cache, column: Array, tokens: Array, following: Array) -> Array:
    """``Int[batch capacity]``: the token after each of the columns just entered."""
    after = jnp.concatenate([tokens[:, 1:], following[:, None]], axis=1)
    none = jnp.zeros(cache.valid.shape, tokens.dtype)
    return cache_lib.put_columns(none, after, column)
