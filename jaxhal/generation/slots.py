"""Continuous batching: rows that enter and leave one running decode.

Every slot has columns of its own.  A prompt but for its last token is read in pieces
beside the decode and put into a slot, flush with the seam; its last token is the first
that the slot reads.  So a row is laid out, drawn and judged as if it were alone,
whoever is written beside it.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key

from jaxhal.generation.decoding import QUERY, Decoding, mapped, with_text
from jaxhal.generation.pieces import Prompt
from jaxhal.generation.sampling import choose_each
from jaxhal.generation.steps import advance
from jaxhal.models import decoder, delta
from jaxhal.models.cache import OWN, Cache, room, turned
from jaxhal.models.lm import LM
from jaxhal.models.mesh import along, mesh_of


class Size(NamedTuple):
    """What a program is compiled for: rows, and their columns before and after."""

    slots: int
    prompt: int
    new: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """Rows that are being written, each at a place of its own; a pytree.

    A slot is free, ``live``, or live and ``done``: then its last token is chosen, and
    read in the next step, which frees the slot.
    """

    cache: Cache  # of all tokens but the newest; `column` is one of each slot
    newest: Int[Array, " slots"]  # the token to be read next
    count: Int[Array, " slots"]  # tokens chosen
    limit: Int[Array, " slots"]  # the most of them
    live: Bool[Array, " slots"]
    done: Bool[Array, " slots"]
    keys: Key[Array, " slots"]
    temperature: Float[Array, " slots"]  # 0 for the likeliest token
    top_p: Float[Array, " slots"]
    tokens: Int[Array, "slots new"]
    logprob: Float[Array, "slots new"]  # under the model's own distribution
    features: dict[str, Any]  # of the reducers, with a query axis of length `new`

    @property
    def size(self) -> Size:
        """How many slots there are, and columns of each."""
        return Size(len(self.live), self.cache.shared, self.tokens.shape[1])


@functools.partial(jax.jit, static_argnames=("size", "how"))
def empty(lm: LM, size: Size, how: Decoding) -> Slots:
    """Slots that are free, for a model whose layers are stacked or apart."""
    model, config = nnx.merge(lm.graphdef, lm.params), lm.config
    rows, prompt, new = size
    dtype = model.embed_tokens.embedding.get_value().dtype

    def apart(stacked: Array) -> Any:
        if isinstance(model.blocks, nnx.List) and len(stacked):
            return tuple(stacked)
        return stacked

    none, columns = jnp.zeros(rows, jnp.int32), (rows, prompt + 1 + new)
    no = jnp.zeros(rows, bool)
    ids, flags = jnp.zeros(columns, jnp.int32), jnp.zeros(columns, bool)
    before, own = (room(config, rows, n, dtype) for n in (prompt, 1 + new))
    parts = {
        "prefix": (turned(before), before),
        "key": own,
        "value": own,
        "states": delta.states(config, rows, dtype),
    }
    cache = Cache(
        **jax.tree.map(apart, parts),
        position=ids,
        valid=flags,
        context=flags,
        document=flags,
        question=flags,
        tokens=ids,
        length=none,
        rope_length=none,
        column=none,
        prompt_length=prompt + 1,
    )

    def read() -> Any:
        at = jnp.zeros((rows, 1), jnp.int32)
        return advance(model, cache, at, at > 0, how.named, none)[2]

    def features(leaf: Any, reducer: Any) -> Array:
        shape = list(leaf.shape)
        shape[QUERY[reducer.reads]] = new
        return jnp.zeros(shape, leaf.dtype)

    return Slots(
        cache=cache,
        newest=none,
        count=none,
        limit=none,
        live=no,
        done=no,
        keys=jax.random.split(jax.random.key(0), rows),
        temperature=jnp.zeros(rows, jnp.float32),
        top_p=jnp.ones(rows, jnp.float32),
        tokens=jnp.full((rows, new), how.pad_id, jnp.int32),
        logprob=jnp.zeros((rows, new), jnp.float32),
        features=mapped(features, how.named, jax.eval_shape(read)),
    )


def laid(lm: LM, slots: Slots, how: Decoding) -> Slots:
    """The same where the model lies on a mesh, as decoding leaves them there.

    Each device along ``data`` has rows of its own, and the others share out the heads,
    as far as they divide.
    """
    if (mesh := mesh_of(lm.params)) is None:
        return slots
    reducers = dict(how.named)
    others = tuple(name for name in mesh.axis_names if name != "data")

    def fitting(names: tuple[str, ...], size: int) -> tuple[str, ...]:
        ways = along(mesh, names)
        return names if ways > 1 and size % ways == 0 else ()

    def put(path: Any, leaf: Array) -> Array:
        axis, heads = 0, ()
        if path[0].name == "features":
            reducer = reducers[path[1].key]
            axis = reducer.batch_axis
            heads = others if reducer.reads == "probs" else ()
        elif leaf.ndim > 2:  # keys and values
            axis, heads = leaf.ndim - 4, ("model",)
        spec = map(fitting, [*[()] * axis, ("data",), heads], leaf.shape)
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*spec)))

    return jax.tree_util.tree_map_with_path(put, slots)


def enter(
    slots: Slots,
    at: int,
    prompt: Prompt,
    *,
    limit: int,
    key: Key[Array, ""],
    temperature: float = 0.0,
    top_p: float = 1.0,
) -> Slots:
    """The slots with a prompt, read but for its last token, in one that is free."""
    row, (_, width, new) = prompt.row, slots.size
    assert prompt.complete and prompt.width <= width
    before = len(row.prompt_ids) - 1
    there = slice(width - before, width + 1)

    def columns(values: np.ndarray) -> np.ndarray:
        whole = np.zeros(width + 1 + new, values.dtype)
        whole[there] = values
        return whole

    read = np.arange(before + 1) < before  # the last token is entered when it is read
    cache = {
        "position": columns(np.arange(before + 1, dtype=np.int32) * read),
        "valid": columns(read),
        "context": columns(row.context),
        "document": columns(row.document),
        "question": columns(row.question),
        "tokens": columns(row.prompt_ids.astype(np.int32)),
        "length": np.int32(before),
        "rope_length": np.int32(before + 1 + limit),
        "column": np.int32(width),
    }
    own = {
        "newest": np.int32(row.prompt_ids[-1]),
        "count": np.int32(0),
        "limit": np.int32(limit),
        "live": np.bool_(True),
        "done": np.bool_(False),
        "keys": key,
        "temperature": np.float32(temperature),
        "top_p": np.float32(top_p),
    }
    return _enter(slots, at, prompt.buffers, cache, own)


@functools.partial(jax.jit, donate_argnames="slots")
def _enter(slots: Slots, at, buffers, cache: dict, own: dict) -> Slots:
    def put(rows: Any, one: Any, axis: int) -> Any:
        if isinstance(rows, dict):
            return {kind: put(rows[kind], one[kind], axis) for kind in rows}
        if isinstance(rows, tuple):
            return tuple(put(*pair, axis) for pair in zip(rows, one, strict=True))
        start = [0] * rows.ndim
        start[axis] = rows.shape[axis] - one.shape[axis]
        start[rows.ndim - 4] = at
        return jax.lax.dynamic_update_slice(rows, one, start)

    (keys, values), (k, v, *states) = slots.cache.prefix, buffers
    changed: dict[str, Any] = {
        name: getattr(slots.cache, name).at[at].set(value)
        for name, value in cache.items()
    }
    changed["prefix"] = put(keys, k, -1), put(values, v, -2)
    both = zip(slots.cache.states, states, strict=True)
    changed["states"] = tuple(put(rows, one, -1) for rows, one in both)
    changed = {"cache": dataclasses.replace(slots.cache, **changed)}
    changed |= {name: getattr(slots, name).at[at].set(it) for name, it in own.items()}
    return dataclasses.replace(slots, **changed)


@functools.partial(jax.jit, static_argnames="how", donate_argnames="slots")
def go_on(lm: LM, slots: Slots, steps: Int[Array, ""], how: Decoding) -> Slots:
    """Decodes some steps, or until every slot is free."""
    model = nnx.merge(lm.graphdef, lm.params)

    def unfinished(carry: tuple[Array, Slots]) -> Array:
        return (carry[0] < steps) & carry[1].live.any()

    def body(carry: tuple[Array, Slots]) -> tuple[Array, Slots]:
        return carry[0] + 1, _step(model, carry[1], how)

    return jax.lax.while_loop(unfinished, body, (jnp.asarray(0), slots))[1]


def _step(model: decoder.Decoder, slots: Slots, how: Decoding) -> Slots:
    """Reads the newest token of every live slot and chooses the next one."""
    goes, count = slots.live & ~slots.done, slots.count

    def pick(logits: Array) -> Array:
        keys = jax.vmap(jax.random.fold_in)(slots.keys, count)
        return choose_each(logits, keys, slots.temperature, slots.top_p)

    logits, cache, features, token = advance(
        model,
        slots.cache,
        slots.newest[:, None],
        slots.live[:, None],
        how.named,
        pick,
    )
    logits = logits[:, -1]
    logprob = jnp.take_along_axis(logits, token[:, None], -1)[:, 0]
    logprob = logprob - jax.nn.logsumexp(logits, axis=-1)
    row, nowhere = jnp.arange(len(count)), slots.tokens.shape[1]
    next_ = jnp.where(goes, count, nowhere)
    # The newest token's own row; the last token of a prompt has none.
    own = jnp.where(slots.live & (count > 0), count - 1, nowhere)

    def kept(old: Array, new: Array, reducer: Any) -> Array:
        at = own if reducer.row == "token" else next_
        there = reducer.batch_axis, QUERY[reducer.reads]
        old, new = (jnp.moveaxis(x, there, (0, 1)) for x in (old, new))
        old = old.at[row, at].set(new[:, 0], mode="drop")
        return jnp.moveaxis(old, (0, 1), there)

    count = count + goes
    ends = jnp.isin(token, jnp.asarray(how.stop_ids, jnp.int32))
    return dataclasses.replace(
        slots,
        cache=cache,
        newest=jnp.where(goes, token, slots.newest),
        count=count,
        live=goes,
        done=goes & (ends | (count >= slots.limit)),
        tokens=slots.tokens.at[row, next_].set(token, mode="drop"),
        logprob=slots.logprob.at[row, next_].set(logprob, mode="drop"),
        features=mapped(kept, how.named, slots.features, features),
    )


def written(slots: Slots, how: Decoding) -> Int[Array, " slots"]:
    """Tokens of each slot whose features are all there."""
    waits = slots.live & (slots.count > 0) if how.behind else jnp.zeros_like(slots.live)
    return slots.count - waits


def features_of(slots: Slots, how: Decoding) -> dict[str, Any]:
    """Features of what is written, as :meth:`Extraction.batches` has them."""
    new = jnp.arange(slots.tokens.shape[1])
    real = new < written(slots, how)[:, None]
    text = with_text(slots.tokens, real, how.stop_ids)
    features = {"valid": real, "text": text, "marked": jnp.zeros_like(real)}

    def of(leaf: Array, reducer: Any) -> Array:
        shape = [1] * leaf.ndim
        shape[reducer.batch_axis], shape[QUERY[reducer.reads]] = real.shape
        return jnp.where(real.reshape(shape), leaf, 0)

    return features | mapped(of, how.named, slots.features)


@functools.partial(jax.jit, donate_argnames="slots")
def free(slots: Slots, at: Int[Array, ""]) -> Slots:
    """The slots with one of them free."""
    live, done = slots.live.at[at].set(False), slots.done.at[at].set(False)
    return dataclasses.replace(slots, live=live, done=done)


@functools.partial(jax.jit, donate_argnames="slots")
def rewind(
    slots: Slots, at: Int[Array, ""], count: Int[Array, ""], key: Key[Array, ""]
) -> Slots:
    """The slots with one of them back at its first tokens, with chances of its own.

    Not of a model whose layers keep a state, which does not go back.
    """
    cache, width = slots.cache, slots.cache.shared
    column = width + count
    newest = jnp.where(count > 0, slots.tokens[at, count - 1], cache.tokens[at, width])
    # A row that was done has columns of the steps in which others went on, too.
    valid = cache.valid[at] & (jnp.arange(cache.capacity) < column)
    cache = dataclasses.replace(
        cache,
        valid=cache.valid.at[at].set(valid),
        length=cache.length.at[at].set(valid.sum(dtype=cache.length.dtype)),
        column=cache.column.at[at].set(column),
    )
    return dataclasses.replace(
        slots,
        cache=cache,
        newest=slots.newest.at[at].set(newest),
        count=slots.count.at[at].set(count),
        live=slots.live.at[at].set(True),
        done=slots.done.at[at].set(False),
        keys=slots.keys.at[at].set(key),
    )


@functools.partial(jax.jit, static_argnames=("size", "how"))
def resized(
    slots: Slots, rows: Int[Array, " slots"], size: Size, how: Decoding
) -> Slots:
    """Slots of another size; each is what the one of its number in ``rows`` was.

    A number outside stands for a free one.
    """
    old = slots.size
    before, after = size.prompt - old.prompt, size.new - old.new
    there = rows < old.slots
    rows = jnp.where(there, rows, 0)

    def fit(x: Array, axis: int = 0, low: int = 0, high: int = 0, batch: int = 0):
        x = jnp.take(x, rows, axis=batch)
        edges = [(0, 0, 0)] * x.ndim
        edges[axis] = low, high, 0
        return jax.lax.pad(x, jnp.zeros((), x.dtype), edges)

    def fit_all(tree: Any, axis: int, low: int, high: int) -> Any:
        return jax.tree.map(
            lambda x: fit(x, x.ndim + axis, low, high, x.ndim - 4), tree
        )

    cache = slots.cache
    changed: dict[str, Any] = {name: getattr(cache, name) for name in OWN}
    for name, x in changed.items():
        changed[name] = fit(x, 1, before, after) if x.ndim > 1 else fit(x)
    keys, values = cache.prefix
    cache = dataclasses.replace(
        cache,
        prefix=(fit_all(keys, -1, before, 0), fit_all(values, -2, before, 0)),
        key=fit_all(cache.key, -2, 0, after),
        value=fit_all(cache.value, -2, 0, after),
        states=fit_all(cache.states, -1, 0, 0),
        column=fit(cache.column) + before,
        prompt_length=size.prompt + 1,
        **changed,
    )

    def features(leaf: Array, reducer: Any) -> Array:
        return fit(leaf, QUERY[reducer.reads], 0, after, reducer.batch_axis)

    each = ("newest", "count", "limit", "done", "temperature", "top_p")
    own: dict[str, Any] = {name: fit(getattr(slots, name)) for name in each}
    return dataclasses.replace(
        slots,
        cache=cache,
        live=fit(slots.live) & there,
        keys=jnp.take(slots.keys, rows, axis=0),
        tokens=fit(slots.tokens, 1, 0, after),
        logprob=fit(slots.logprob, 1, 0, after),
        features=mapped(features, how.named, slots.features),
        **own,
    )
