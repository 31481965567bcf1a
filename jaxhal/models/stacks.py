"""Layers that are stacked, and how a pass goes along them.

Parameters of all layers are stacked; mixers of a kind over the layers that have it.  A
loop goes along the layers, or where mixers differ along the periods in which their
kinds come again, whose layers stand written out.  Layers that borrow keys are a second
stack, which a second loop goes along.
"""

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxhal.models import kernels, quantized
from jaxhal.models.config import ATTENTION, Config

MIXERS = (*ATTENTION, "linear_attn")


def split(blocks: Any, config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Definitions of a layer, by its mixer, and weights as they are stacked.

    Those of mixers go by their name where mixers differ, all others by ``""``.
    """
    if config.alike:
        definition, weights = nnx.split(blocks)
        return {"self_attn": definition}, {"": weights}
    definitions, stacked = {}, {}
    for mixer in dict.fromkeys(config.mixers):
        part = nnx.clone(blocks)
        for other in MIXERS:
            if other != mixer:
                setattr(part, other, None)
        definitions[mixer], own, rest = nnx.split(part, nnx.PathContains(mixer), ...)
        stacked |= {mixer: own, "": rest}
    return definitions, stacked


def each_layer(model: Any) -> list[Any]:
    """Every layer by itself."""
    layers = []
    for blocks, config in _parts(model):
        definitions, weights = split(blocks, config)
        every = {name: _each_layer(own) for name, own in weights.items()}
        for number, (mixer, place) in enumerate(_places(config.mixers)):
            own = [every[mixer][place]] if mixer in every else []
            layers.append(nnx.merge(definitions[mixer], every[""][number], *own))
    return layers


def _parts(model: Any) -> Iterable[tuple[Any, Config]]:
    """The blocks of each of a model's parts, with what holds for it."""
    both = model.blocks, model.borrowing_blocks
    there = [blocks for blocks in both if blocks is not None]
    return zip(there, model.config.parts, strict=True)


def _places(mixers: Sequence[str]) -> list[tuple[str, int]]:
    """What each layer mixes by, and how many before it do so too."""
    return [(mixer, mixers[:n].count(mixer)) for n, mixer in enumerate(mixers)]


@jax.jit
def _each_layer(weights: Any) -> list[Any]:
    layers = len(jax.tree.leaves(weights)[0])
    return [layer(weights, at) for at in range(layers)]


def layer(stacked: Any, at: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[at], stacked)


def written_out(model: Any, go, carry, index, befores: Mapping[str, Any], tap, keep):
    """All layers one after another."""
    beside = []
    for number, (mixer, place) in enumerate(_places(model.config.mixers)):
        block, before = model.blocks[number], befores[mixer]
        if before is not None and not block.config.borrows:
            before = tuple(part[place] for part in before)
        append = functools.partial(_append, place)
        carry, own = go(carry, block, layer(index, number), before, append)
        beside.append((mixer, *own))
    together = _stacked if keep else lambda each: tuple(zip(*each, strict=True))
    rows, kept = _together(beside, _stacked, together)
    return carry, (tap.finish(rows), kept)


def _stacked(trees: list) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _together(beside: list, stacked, joined) -> tuple[dict[str, Any], dict[str, Any]]:
    """Row features by their names, stacked, and what is kept by mixers, joined."""
    rows, kept = {}, {}
    for mixer, features, own in beside:
        for name, value in features.items():
            rows.setdefault(name, []).append(value)
        if own is not None:
            kept.setdefault(mixer, []).append(own)
    rows = {name: stacked(each) for name, each in rows.items()}
    return rows, {mixer: joined(each) for mixer, each in kept.items()}


def scanned(model: Any, go, carry, index, befores: Mapping[str, Any], tap, remat):
    """The same as loops over stacked layers, rows finished a group at a time."""
    first, every, kept = 0, [], {}
    for blocks, config in _parts(model):
        stop = first + config.num_hidden_layers
        own = jax.tree.map(lambda x, a=first, b=stop: x[a:b], index)
        some = dict.fromkeys(befores) if config.borrows else befores
        how = go, carry, own, some, tap, remat
        carry, (rows, new) = _scanned(blocks, config, first, *how)
        first = stop
        every.append(rows)
        kept |= new
    rows = jax.tree.map(lambda *parts: jnp.concatenate(parts), *every)
    return carry, (rows, kept)


def _scanned(blocks, config: Config, first: int, go, carry, index, befores, tap, remat):
    """The loop over one part of the layers, which begin with the ``first``."""
    period, mixers = config.period, config.mixers[: config.period]
    steps, counts = config.num_hidden_layers // period, Counter(mixers)
    # Where the steps of all layers make the groups, a part's may not.
    groups = tap.groups if steps % tap.groups == 0 else steps
    size = steps // groups
    definitions, weights = split(blocks, config)
    make = {}
    for name, own in weights.items():
        weights[name], make[name] = quantized.unstacked(own)

    alone, every = period == 1, {"": period, **counts}

    def folded(tree: Any, steps: int = steps) -> Any:  # the layers of each step
        return tree if alone else _reshaped(tree, 1, steps, -1)

    def unfolded(tree: Any) -> Any:
        return tree if alone else _reshaped(tree, 2, -1)

    def one(tree: Any, at: int) -> Any:
        return tree if alone else layer(tree, at)

    def joined(trees: list) -> Any:
        return trees[0] if alone else _stacked(trees)

    def of(mixer: str, places: Mapping[str, int], carry, parts, at, before, place):
        own = []
        for name, number in places.items():
            part = one(parts[name], number)
            number += step_of(at.layer) * every[name]
            own.append(make[name](_of_layer(weights[name], part, number)))
        block = nnx.merge(definitions[mixer], *own)
        return go(carry, block, at, before, functools.partial(_append, place))

    def step_of(layer):  # of this part's loop
        return (layer - first) // period

    def body(carry, scanned):
        parts, (index, befores) = scanned
        beside = []
        for number, (mixer, place) in enumerate(_places(mixers)):
            at = one(index, number)
            places = {"": number} | ({mixer: place} if mixer in parts else {})
            before = one(befores[mixer], place)
            # What a layer takes of its step's weights it takes in here: of what comes
            # from outside and is no step's own a way back would keep every layer's.
            step = functools.partial(of, mixer, places)
            if remat:
                step = jax.checkpoint(step, prevent_cse=False)
            number = at.layer // period * counts[mixer] + place
            carry, own = step(carry, parts, at, before, number)
            beside.append((mixer, *own))
        return carry, _together(beside, joined, joined)

    befores = {mixer: befores[mixer] for mixer in counts}
    along = folded((weights, (index, befores)))
    if groups == 1:
        carry, (rows, kept) = jax.lax.scan(body, carry, along)
        return carry, (tap.finish(unfolded(rows)), unfolded(kept))

    # One loop, not a loop of loops, which would copy a group's weights.
    def waiting(carry, scanned):
        carry, rows, done = carry
        carry, (new, kept) = body(carry, scanned)
        at = step_of(one(scanned[1][0].layer, 0))
        rows = _entered(rows, jax.tree.map(lambda leaf: leaf[None], new), at % size)
        done = jax.lax.cond(
            at % size == size - 1,
            lambda: _entered(done, finished(rows), at - at % size),
            lambda: done,
        )
        return (carry, rows, done), kept

    def finished(rows):  # of the steps of a group
        return folded(tap.finish(unfolded(rows)), size)

    def group(carry, scanned):
        first = jax.tree.map(lambda leaf: leaf[:size], scanned)
        rows = jax.lax.scan(body, carry, first)[1][0]
        return rows, finished(rows)

    rows, done = jax.eval_shape(group, carry, along)
    carry = carry, _zeros(rows, size), _zeros(done, steps)
    (carry, _, done), kept = jax.lax.scan(waiting, carry, along)
    return carry, (unfolded(done), unfolded(kept))


def _of_layer(stacked: Any, part: Any, number: Array) -> Any:
    """What a layer takes of stacked weights: its part.

    On CPU those of bfloat16 are looked up in a way that XLA does not see through.  It
    would make a float32 copy of all of them before the loop.
    """
    leaves, tree = jax.tree.flatten(part)
    pairs = list(zip(jax.tree.leaves(stacked), leaves, strict=True))
    narrow = [pair for pair in pairs if pair[1].dtype == jnp.bfloat16]
    platform = kernels.described(stacked) or jax.default_backend()
    if not narrow or platform != "cpu":
        return part
    own = iter(_looked_up(*map(list, zip(*narrow, strict=True)), number))
    found = [next(own) if leaf.dtype == jnp.bfloat16 else leaf for leaf in leaves]
    return jax.tree.unflatten(tree, found)


@jax.custom_jvp
def _looked_up(stacked: list[Array], parts: list[Array], at: Array) -> list[Array]:
    def unseen(stacked, parts, at):
        stacked, at = jax.lax.optimization_barrier((stacked, at))
        return [layer_at(whole, at) for whole in stacked]

    layer_at = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False)
    return jax.lax.platform_dependent(
        stacked, parts, at, cpu=unseen, default=lambda stacked, parts, at: parts
    )


@_looked_up.defjvp
def _looked_up_jvp(primals, tangents):
    return _looked_up(*primals), tangents[1]


def _reshaped(tree: Any, axes: int, *sizes: int) -> Any:
    """Arrays whose first axes have other sizes."""
    return jax.tree.map(lambda x: x.reshape(*sizes, *x.shape[axes:]), tree)


def _zeros(shapes: Any, length: int) -> Any:
    """Arrays of such shapes but for the length."""
    return jax.tree.map(lambda x: jnp.zeros((length, *x.shape[1:]), x.dtype), shapes)


def _entered(whole: Any, part: Any, at: Any) -> Any:
    put = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
    return jax.tree.map(lambda a, b: put(a, b, at), whole, part)


def _append(layer, stored, new, column):
    """Writes one layer's new keys and values in place and returns its whole buffers.

    Each layer may have buffers of its own.
    """

    def put(buffer, part):
        if isinstance(buffer, tuple):
            own = _put(buffer[layer], (), part, column)
            return (*buffer[:layer], own, *buffer[layer + 1 :]), own
        buffer = _put(buffer, (layer,), part, column)
        return buffer, jax.lax.dynamic_index_in_dim(buffer, layer, keepdims=False)

    return tuple(zip(*map(put, stored, new), strict=True))


def _put(buffer, layer: tuple, part: Array, column: Array) -> Array:
    """Keys or values ``[batch kv_heads new head]`` from a column on.

    Where each row has its own, what lies outside is dropped.
    """
    if not column.ndim:
        start = [jnp.asarray(at, column.dtype) for at in (*layer, 0, 0, column, 0)]
        part = part[None] if layer else part
        return jax.lax.dynamic_update_slice(buffer, part, start)
    row = jnp.arange(len(part))[:, None]
    at = (*layer, row, slice(None), column[:, None] + jnp.arange(part.shape[2]))
    return buffer.at[at].set(part.swapaxes(1, 2), mode="drop")
