"""The compiled programs behind relevance: pull-backs and pushes of whole batches."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from jaxhal.features.relevance import bin_weights
from jaxhal.lrp.rules import RuleSet
from jaxhal.models import decoder, kernels
from jaxhal.models.lm import LM
from jaxhal.models.mesh import shares
from jaxhal.models.ops import EXACT, Ops, wide
from jaxhal.types import Batch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Means:
    """The two means of ``R*`` over prompt columns, and the seeds; a pytree."""

    prompt: Float[Array, "batch prompt"]  # mean over response tokens (eq. 5)
    response: Float[Array, "batch response"]  # mean over prompt tokens (eq. 6)
    seed: Float[Array, "batch response"]  # the numbers that were explained


def share(mask: Bool[Array, "batch tokens"]) -> Float[Array, "batch tokens"]:
    """One over the count of True for each of them; a row without any gives zeros."""
    return mask / jnp.maximum(mask.sum(-1, keepdims=True), 1)


def bins_of(batch: Batch, shape: tuple[int, int], padding: str) -> tuple[Array, Array]:
    """Weights of response tokens and of prompt tokens in their bins, per row."""
    valid, start = jnp.asarray(batch.valid), batch.prompt_length
    parts = (valid[:, start:], valid[:, :start])
    rows, columns = (
        jax.vmap(lambda v, n=count: bin_weights(v, n, padding))(part)
        for part, count in zip(parts, shape, strict=True)
    )
    return rows, columns


def _seeds(lm: LM, batch: Batch, ops: Ops, seed: str):
    """Embeddings, and the function from them to the seed of each response token."""
    model = nnx.merge(lm.graphdef, lm.params)
    tokens, valid = jnp.asarray(batch.tokens), jnp.asarray(batch.valid)
    start, remat = batch.prompt_length, not _fits(lm, batch)
    x, geo = decoder.begin(model, tokens, valid)
    target, real = tokens[:, start:], valid[:, start:]

    def function(x: Array) -> Float[Array, "batch response"]:
        hidden = decoder.run(model, x, geo, ops=ops, remat=remat)[0][:, start - 1 : -1]
        if seed == "logit":
            out = decoder.unembed_at(model, hidden, target, ops)
        elif seed == "max_logit":
            out = decoder.unembed(model, hidden, ops).max(-1)
        else:
            logprob = jax.nn.log_softmax(decoder.unembed(model, hidden, ops))
            out = jnp.take_along_axis(logprob, target[..., None], -1)[..., 0]
        return jnp.where(real, out, 0.0)

    return x, function


def _over_width(x: Array, slot: Array) -> Array:
    return jnp.sum(x.astype(wide(x.dtype)) * slot, axis=-1)


def block_size(lm: LM, batch: Batch) -> int:
    """Pull-backs that run together on a platform, in rounds of equal size."""
    most = kernels.platform_of(lm.params).pulled
    fits = max(1, most // _bytes(lm, batch, 4, 3))
    response = batch.tokens.shape[1] - batch.prompt_length
    return math.ceil(response / math.ceil(response / fits))


def _fits(lm: LM, batch: Batch) -> bool:
    """Whether a pass may keep all layers for its way back and compute none again."""
    kept = lm.config.num_hidden_layers * _bytes(lm, batch, 8, 4)
    return kept <= kernels.platform_of(lm.params).kept


def _bytes(lm: LM, batch: Batch, hidden: int, inner: int) -> int:
    """What arrays of attention, of the width and of the inner width take in a layer.

    On one device.
    """
    config, (rows, seq) = lm.config, batch.tokens.shape
    data, model = shares(jax.tree.leaves(lm.params)[0], rows)
    attention = 3 * config.num_attention_heads * seq
    shared = (attention + inner * config.inner_size) // model
    return 4 * rows // data * seq * (shared + hidden * config.hidden_size)


def _pulled(
    pull: Callable[[Array], Any], x: Array, cotangents: Array, block: int
) -> Float[Array, "count batch seq"]:
    """Relevance of every token for each cotangent ``[count batch response]``."""
    count = len(cotangents)
    padded = jnp.pad(cotangents, [(0, -count % block), (0, 0), (0, 0)])
    blocks = padded.reshape(-1, block, *cotangents.shape[1:])
    together = jax.vmap(lambda seeded: _over_width(x, pull(seeded)[0]))
    out = jax.lax.map(together, blocks)
    return out.reshape(-1, *out.shape[2:])[:count]


@functools.partial(jax.jit, static_argnames=("rules", "seed"))
def matrix(lm, batch, rules: RuleSet, seed: str):
    x, function = _seeds(lm, batch, rules.ops(), seed)
    out, pull = jax.vjp(function, x)
    each = jnp.eye(out.shape[1], dtype=out.dtype)
    cotangents = jnp.repeat(each[:, None], len(x), 1)
    return jnp.moveaxis(_pulled(pull, x, cotangents, block_size(lm, batch)), 0, 1)


@functools.partial(jax.jit, static_argnames=("rules", "seed"))
def sums(
    lm, batch, weights, rules: RuleSet, seed: str
) -> Float[Array, "batch count seq"]:
    x, function = _seeds(lm, batch, rules.ops(), seed)
    out, pull = jax.vjp(function, x)
    cotangents = jnp.moveaxis(weights, 1, 0).astype(out.dtype)
    block = min(block_size(lm, batch), len(cotangents))
    return jnp.moveaxis(_pulled(pull, x, cotangents, block), 0, 1)


def _in_memory(lm: LM, function: Callable[..., Any], batch: Batch, *rest: Any) -> Any:
    """A function of a batch; a row of each device where all would keep too much."""
    rows = len(batch.tokens)
    data, _ = shares(jax.tree.leaves(lm.params)[0], rows)
    if rows == data or _fits(lm, batch):
        return function(batch, *rest)

    def apart(leaf: Any) -> Array:  # each device's rows are a run of them
        leaf = jnp.asarray(leaf)
        return leaf.reshape(data, -1, *leaf.shape[1:]).swapaxes(0, 1)

    def joined(leaf: Array) -> Array:
        return leaf.swapaxes(0, 1).reshape(rows, *leaf.shape[2:])

    each = jax.tree.map(apart, (batch, *rest))
    return jax.tree.map(joined, jax.lax.map(lambda some: function(*some), each))


@functools.partial(jax.jit, static_argnames=("rules", "seed"))
def means(lm, batch, rules: RuleSet, seed: str) -> Means:
    """One forward pass, and through what it kept one push and one pull back."""

    def some(batch: Batch) -> tuple[Array, ...]:
        valid, start = jnp.asarray(batch.valid), batch.prompt_length
        x, function = _seeds(lm, batch, rules.ops(forward=True), seed)
        out, push = jax.linearize(function, x)
        columns = jnp.pad(share(valid[:, :start]), [(0, 0), (0, x.shape[1] - start)])
        response = push((x * columns[..., None]).astype(x.dtype))
        rows = share(valid[:, start:]).astype(out.dtype)
        (slot,) = jax.linear_transpose(push, x)(rows)
        return _over_width(x, slot)[:, :start], response, out

    return Means(*_in_memory(lm, some, batch))


@functools.partial(jax.jit, static_argnames=("rules", "seed"))
def resampled(
    lm, batch, bins, rules: RuleSet, seed: str
) -> Float[Array, "batch rows columns"]:
    """Pulls back along the response, or pushes forward along the prompt, if fewer."""
    block = block_size(lm, batch)

    def some(batch: Batch, bins: tuple[Array, Array]) -> Array:
        start, (rows, columns) = batch.prompt_length, bins
        if rules.linear and min(columns.shape[1:]) < min(rows.shape[1:]):
            x, function = _seeds(lm, batch, rules.ops(forward=True), seed)
            _, push = jax.linearize(function, x)
            probes, mix = _probes(columns)
            later = x.shape[1] - start
            weights = jnp.pad(probes, [(0, 0), (0, 0), (0, later)])

            def one(weight: Array) -> Array:
                return push((x * weight[..., None]).astype(x.dtype))

            pushed = jax.lax.map(one, weights, batch_size=min(block, len(weights)))
            return _product("kbr,bir,bjk->bij", pushed, rows, mix)
        x, function = _seeds(lm, batch, rules.ops(), seed)
        out, pull = jax.vjp(function, x)
        probes, mix = _probes(rows)
        pulled = _pulled(pull, x, probes.astype(out.dtype), min(block, len(probes)))
        return _product("kbp,bjp,bik->bij", pulled[..., :start], columns, mix)

    return _in_memory(lm, some, batch, bins)


def _probes(
    weights: Float[Array, "batch bins tokens"],
) -> tuple[Float[Array, "passes batch tokens"], Float[Array, "batch bins passes"]]:
    """A pass per bin, or per token where those are fewer, and bins as sums of them."""
    rows, bins, tokens = weights.shape
    each = jnp.broadcast_to(
        jnp.eye(min(bins, tokens)), (rows, *2 * (min(bins, tokens),))
    )
    if bins <= tokens:
        return jnp.moveaxis(weights, 1, 0), each
    return jnp.moveaxis(each, 1, 0), weights


def _product(sums: str, *arrays: Array) -> Array:
    return jnp.einsum(sums, *arrays, precision=EXACT)
