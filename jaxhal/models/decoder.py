"""One decoder for every family: stacked blocks, scanned over layers."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxhal.models import ops as ops_lib
from jaxhal.models import quantized, rope, stacks
from jaxhal.models.cache import Cache, by_kind, joined, positions, room
from jaxhal.models.config import ATTENTION, Config
from jaxhal.models.delta import DeltaNet
from jaxhal.models.feedforward import linear
from jaxhal.models.layer_inputs import LayerInputs
from jaxhal.models.layers import Attention, Block, Geometry, LayerIndex, RowTap
from jaxhal.models.norm import Norm
from jaxhal.models.ops import Ops, Turned, wide

# Bytes of the part of a stored vocabulary that is made numbers at once.
VOCABULARY_BYTES = 64 << 20


class Tap(NamedTuple):
    """What a reading forward keeps of each layer."""

    # Shown the attention of the explicit rows; what it returns comes back stacked over
    # layers, in `groups` equal groups of them that `finish` makes features of in turn.
    rows: RowTap | None = None
    # (state, residual [batch query width], layer) -> state, of what enters each layer;
    # the state runs through the scan.
    hidden: Callable[[Any, Array, Array], Any] = lambda state, x, layer: state
    state: Any = ()
    # The residual [batch query width] before and after a layer's feed-forward part ->
    # more row features of that layer, by name.
    lens: Callable[[Array, Array], dict[str, Any]] | None = None
    # Row features of one layer to what of them waits for `finish`.
    pack: Callable[[dict[str, Any]], dict[str, Any]] = lambda rows: rows
    finish: Callable[[Any], Any] = lambda packed: packed
    groups: int = 1


class Decoder(nnx.Module):
    """Parameters and static structure; the functions below are its forward passes.

    ``blocks`` is one :class:`Block` whose arrays are stacked over layers, those of its
    mixers over the layers that have them, or the list of blocks that :func:`apart`
    makes.  ``borrowing_blocks`` is the same of the layers that borrow keys.
    """

    def __init__(self, config: Config, dtype: Any, rngs: nnx.Rngs):
        self.config = config
        width = config.hidden_size

        def table(rows: int) -> nnx.Embed:
            return nnx.Embed(rows, width, param_dtype=dtype, rngs=rngs)

        self.embed_tokens = table(config.vocab_size)
        learned = config.positions == "learned"
        self.embed_positions = table(config.context_length) if learned else None
        self.layer_inputs = config.layer_inputs and LayerInputs(config, dtype, rngs)
        stacked = [_stacked(part, dtype, rngs) for part in config.parts]
        self.blocks: Block | nnx.List = stacked[0]
        self.borrowing_blocks = stacked[1] if config.borrowing else None
        self.norm = Norm(config, width, dtype)
        tied, rows = config.tie_word_embeddings, config.vocab_size
        self.lm_head = None if tied else linear(width, rows, False, dtype, rngs)


def _stacked(config: Config, dtype: Any, rngs: nnx.Rngs) -> Block:
    """The layers of one of the parts."""

    def stacked(part: Callable[..., Any], layers: int) -> Any:
        make = nnx.vmap(lambda keys: part(config, dtype, keys))
        return make(rngs.split(layers))

    blocks = stacked(Block, config.num_hidden_layers)
    for name in () if config.alike else stacks.MIXERS:
        attention = functools.partial(Attention, kind=name)
        if layers := len(config.layers_with(name)):
            mixer = attention if name in ATTENTION else DeltaNet
            setattr(blocks, name, nnx.data(stacked(mixer, layers)))
    return blocks


def apart(model: Decoder, on_cpu: bool) -> Decoder:
    """The same, each layer's weights in arrays of their own; so must a cache be.

    On CPU they also lie as products with few rows go fastest: see :class:`Turned`.
    """
    # A scan over stacked layers copies a layer's weights out before it multiplies by
    # them.  Where a pass reads few tokens that is most of its time on CPU; a program
    # with every layer written out takes seconds longer to compile.
    parts = nnx.clone(model)
    parts.blocks = nnx.List(stacks.each_layer(model))
    parts.borrowing_blocks = None
    table = model.embed_tokens.embedding.get_value()
    if on_cpu and table.dtype.itemsize >= 4:
        for _, part in nnx.iter_modules(parts.blocks):
            if isinstance(part, nnx.Linear):
                turned: Any = Turned(part.kernel.get_value().T)
                part.kernel.set_value(turned)
    elif on_cpu and model.lm_head is None:
        # With 16 bits it is kernels that are not turned.
        vocabulary, width = table.shape
        head = nnx.eval_shape(
            lambda: linear(width, vocabulary, False, table.dtype, nnx.Rngs(0))
        )
        head.kernel.set_value(table.T)
        parts.lm_head = nnx.data(head)
    return parts


def embed(
    model: Decoder, tokens: Int[Array, "batch query"], geo: Geometry
) -> tuple[Float[Array, "batch query width"], Geometry]:
    """Token embeddings, with learned positions where the family has them.

    With them the geometry of the call, which gets what layers get of every token.
    """
    # Not `embedding[...]`: it may be no array.
    table = model.embed_tokens.embedding.get_value()
    x = quantized.rows_of(table, tokens)
    x = x * jnp.asarray(model.config.embedding_scale, table.dtype)
    if model.embed_positions is not None:
        table = model.embed_positions.embedding.get_value()
        x = x + quantized.rows_of(table, geo.query_position)
    if model.layer_inputs is not None:
        geo = geo._replace(layer_inputs=model.layer_inputs(tokens, x))
    return x, geo


def unembed(
    model: Decoder, hidden: Float[Array, "*rows width"], ops: Ops
) -> Float[Array, "*rows vocab"]:
    """Logits, float32 or wider, of hidden states that went through the final norm."""
    return _logits(model.config, _products(model, hidden, ops), ops)


def _logits(config: Config, products: Array, ops: Ops) -> Array:
    return ops_lib.capped(products * config.logit_scale, config.logit_cap, ops)


def _products(model: Decoder, hidden: Array, ops: Ops) -> Array:
    table, dtype = _vocabulary(model), wide(hidden.dtype)
    if not quantized.is_stored(table):
        if model.lm_head is None:
            return Turned(table).linear(hidden, None, ops, dtype)
        return ops.linear(hidden, table, None, dtype)

    def some(rows: quantized.Packed) -> Array:
        numbers = rows.numbers().astype(table.dtype)
        kernel = numbers.reshape(-1, numbers.shape[-1]).T
        logits = ops.linear(hidden, kernel, None, dtype)
        return logits.reshape(*logits.shape[:-1], table.ways, -1)

    # A part of the vocabulary at a time, as all of it may be larger than the file.
    parts = table.packs[0].parts(VOCABULARY_BYTES, table.ways)
    each = jnp.moveaxis(jax.lax.map(some, parts), 0, -2)
    return each.reshape(*hidden.shape[:-1], -1)


def unembed_at(
    model: Decoder,
    hidden: Float[Array, "batch rows width"],
    target: Int[Array, "batch rows"],
    ops: Ops,
) -> Float[Array, "batch rows"]:
    """The logits of one token a row, without those of the others."""
    table = _vocabulary(model)
    if model.lm_head is None or quantized.is_stored(table):
        kernel = quantized.rows_of(table, target)
    else:  # not of its transpose, which would be made for it
        kernel = jnp.moveaxis(table[:, target], 0, -1)

    def one(hidden: Array, kernel: Array) -> Array:
        return ops.linear(hidden, kernel[:, None], None, wide(hidden.dtype))[0]

    return _logits(model.config, jax.vmap(jax.vmap(one))(hidden, kernel), ops)


def _vocabulary(model: Decoder) -> Any:
    """What logits are products with: the embeddings, or a kernel of its own."""
    if model.lm_head is None:
        return model.embed_tokens.embedding.get_value()
    return model.lm_head.kernel.get_value()


def geometry(
    config: Config,
    query_position: Array,
    key_position: Array,
    key_valid: Array,
    length: Int[Array, " batch"],
    query_valid: Array | None = None,
) -> Geometry:
    """Positions, masks and rotary tables of one call; ``length`` as in rope.

    ``query_valid`` is by default that of the last keys.
    """

    def turns(config: Config) -> tuple[Array, ...]:
        turned = config.rotary_dim or config.head_dim
        return rope.tables(config.ropes, turned, query_position, length)

    cos, sin = turns(config) if config.positions == "rope" else (None, None)
    geo = Geometry(query_position, key_position, key_valid, cos, sin)
    if config.full is not None:
        cos, sin = turns(config.of("full_attn"))
        geo = geo._replace(full=(cos[0], sin[0]))
    if config.delta is None:
        return geo
    if query_valid is None:
        query_valid = key_valid[:, -query_position.shape[1] :]
    return geo._replace(query_valid=query_valid)


def begin(
    model: Decoder,
    tokens: Int[Array, "batch seq"],
    valid: Bool[Array, "batch seq"],
    reach: int | Int[Array, " batch"] = 0,
) -> tuple[Float[Array, "batch seq width"], Geometry]:
    """Embeddings and geometry of a pass without a cache before it.

    ``reach`` is what decoding will add to the length ``dynamic`` rope assumes.
    """
    position = positions(valid)
    length = jnp.sum(valid, axis=1, dtype=jnp.int32) + reach
    geo = geometry(model.config, position, position, valid, length)
    return embed(model, tokens, geo)


def run(
    model: Decoder,
    x: Float[Array, "batch query width"],
    geo: Geometry,
    *,
    ops: Ops,
    tap: Tap = Tap(),  # noqa: B008  (an immutable default)
    cache: Cache | None = None,
    prefix: tuple[Any, ...] | None = None,
    keep: bool = False,
    remat: bool = False,
) -> tuple[Float[Array, "batch query width"], Any, Any, Any]:
    """All layers and the final norm.

    Args:
      x: embedded tokens; without a cache the whole sequence, with one the columns just
        entered by :func:`jaxhal.models.cache.write`.
      prefix: keys and values that stand before those of ``x``, as a cache has them, a
        row of it for as many consecutive rows of ``x``; then the states of layers that
        keep one, of every row of ``x``.  A cache brings its own.
      keep: return the keys and values of all layers (a prefill).
      remat: keep only what enters each layer and compute the rest again on the way
        back.

    Returns:
      Normed hidden states, the tap's row features ``[layer, ...]``, the tap's final
      state, and ``(key, value, *states)`` stacked over the layers that have them
      (``None`` unless kept or cached).
    """
    config = model.config
    index = LayerIndex.of(config, geo.layer_inputs)
    stored: Any = {} if cache is None else by_kind(config, cache.key, cache.value)
    prefix = prefix if cache is None else (*cache.prefix, *cache.states)
    column = 0 if cache is None else cache.column - cache.shared - x.shape[1]
    befores: dict[str, Any] = {mixer: None for mixer in stacks.MIXERS}
    if prefix is not None:
        befores |= by_kind(config, *prefix[:2]) | {"linear_attn": prefix[2:]}
    lent = _lent(config, x, stored)
    shared = {k: befores[k] and tuple(part[-1] for part in befores[k]) for k in lent}

    def go(carry, block: Block, at: LayerIndex, before, append):
        x, state, stored, lent = carry
        state = tap.hidden(state, x, at.layer)

        def attend(attention, normed):
            nonlocal stored, lent
            if isinstance(attention, DeltaNet):
                mixed, after = attention.mix(normed, geo, before, ops)
                return mixed, (None, after if keep or cache is not None else None)
            kind, kept, prefix = attention.kind, None, before
            q = attention.queries(normed, geo, at, ops)
            if attention.config.borrows:
                (k, v), prefix = lent[kind], shared[kind]
            else:
                k, v = attention.keys(normed, geo, at, ops)
                kept = (k, v) if keep else None
                if cache is not None:
                    own, (k, v) = append(stored[kind], (k, v), column)
                    stored = stored | {kind: own}
                if kind in lent:
                    lent = lent | {kind: (k, v)}
            mixed, rows = attention.mix(q, k, v, geo, at, tap.rows, ops, prefix)
            return mixed, (rows, kept)

        x, without, (rows, kept) = block(x, attend, ops, at.inputs)
        rows = rows or {}
        if tap.lens is not None:
            rows = rows | tap.lens(without, x)
        return (x, state, stored, lent), (tap.pack(rows), kept)

    carry = x, tap.state, stored, lent
    apart = isinstance(model.blocks, nnx.List)
    along, how = (stacks.written_out, keep) if apart else (stacks.scanned, remat)
    carry, (rows, kept) = along(model, go, carry, index, befores, tap, how)
    x, state, stored, _ = carry
    if keep:
        stored = {kind: kept[kind] for kind in ATTENTION if kind in kept}
        if not stored:  # no layer has keys
            none = room(config, len(x), x.shape[1], x.dtype)
            stored = by_kind(config, none, none)
    after = (*joined(config, stored), *kept.get("linear_attn", ())) if stored else None
    return model.norm(x, ops), rows, state, after


def _lent(config: Config, x: Array, stored: dict[str, Any]) -> dict[str, Any]:
    """Room for the keys and values that layers go on to borrow, by their kind."""
    if not config.borrowing:
        return {}

    def zeros(kind: str) -> Array:
        own = config.of(kind)
        columns = jax.tree.leaves(stored[kind])[0].shape[-2] if stored else x.shape[1]
        shape = len(x), own.num_key_value_heads, columns, own.head_dim
        return jnp.zeros(shape, x.dtype)

    kinds = dict.fromkeys(config.parts[-1].mixers)
    return {kind: (zeros(kind), zeros(kind)) for kind in kinds}
