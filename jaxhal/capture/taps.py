"""How the rows of a pass reach reducers: which rows, which masks, mapped over what."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxhal.features.base import Reducer
from jaxhal.features.hidden import state_number
from jaxhal.models import decoder, kernels
from jaxhal.models.config import ATTENTION, Config
from jaxhal.models.layers import RowTap, in_blocks
from jaxhal.models.ops import STANDARD
from jaxhal.types import Batch, View

Named = tuple[tuple[str, Reducer], ...]


def layer_indices(reducer: Reducer, config: Config) -> tuple[int, ...]:
    """Which hidden states (0 = embeddings, L = after the final norm) one asks for."""
    depth = config.num_hidden_layers
    wanted = getattr(reducer, "layers", None)
    wanted = range(depth + 1) if wanted is None else wanted
    numbers = tuple(state_number(layer, depth) for layer in wanted)
    if len(set(numbers)) < len(numbers):
        raise ValueError(
            f"layers {tuple(wanted)} name one hidden state twice in a reader of "
            f"{depth} layers; name it once"
        )
    return numbers


def at_depth(reducer: Reducer, config: Config) -> Reducer:
    """The reducer with numbers of hidden states instead of shares of the layers."""
    numbers = layer_indices(reducer, config)
    wanted = getattr(reducer, "layers", None)
    if wanted is None or not any(isinstance(layer, float) for layer in wanted):
        return reducer
    return dataclasses.replace(reducer, **{"layers": numbers})


# Of a batch or a cache, what a View is cut from beside the next tokens.
_MASKS = ("valid", "context", "document", "question", "tokens")


@dataclasses.dataclass(frozen=True)
class Rows:
    """The explicit rows of a pass and the masks a :class:`View` is cut from.

    ``aligned`` says that the rows are P-1 .. P+R-1, of which a reducer gets either the
    last R (tokens' own) or the first R (their predictors).
    """

    masks: tuple[Array, ...]  # [batch seq] each: the next column's token, then _MASKS
    prompt_length: int
    first: int  # explicit row among those computed
    explicit: int  # rows
    column: Any  # the first explicit row stands in, of all samples or of each
    aligned: bool = False

    @property
    def valid(self) -> Array:
        return self.masks[1]

    @classmethod
    def of_batch(cls, batch: Batch) -> "Rows":
        """Those that a reading pass shows: of the response and the prompt's last."""
        tokens, before = jnp.asarray(batch.tokens), batch.prompt_length - 1
        masks = masks_of(batch, jnp.roll(tokens, -1, axis=1))
        explicit = tokens.shape[1] - before
        return cls(masks, batch.prompt_length, before, explicit, before, aligned=True)

    def take(self, samples: Array) -> "Rows":
        """The rows of chosen samples."""
        return dataclasses.replace(self, masks=tuple(m[samples] for m in self.masks))

    def followed(self, target: Array) -> "Rows":
        """The rows with other next tokens."""
        return dataclasses.replace(self, masks=(target, *self.masks[1:]))

    def tap(self, named: Named, model: decoder.Decoder) -> decoder.Tap:
        """What the decoder has to show and keep for these reducers."""
        config, dtype = model.config, model.embed_tokens.embedding.get_value().dtype
        attention = [(n, r) for n, r in named if r.reads == "probs"]
        hidden = [(n, r) for n, r in named if r.reads == "hidden"]
        lensed = tuple((n, r) for n, r in named if r.reads == "lens")
        state, slots = {}, {}
        batch, count = self.valid.shape[0], config.num_hidden_layers

        def show(x: Array) -> dict[str, Any]:
            x = x[:, self.first :]
            return {name: self._made(r, self._rows(r, x)) for name, r in hidden}

        shape = (batch, self.first + self.explicit, config.hidden_size)
        shapes = jax.eval_shape(show, jax.ShapeDtypeStruct(shape, dtype))
        for name, reducer in hidden:
            wanted = layer_indices(reducer, config)
            table = np.full(count + 1, len(wanted), np.int32)
            table[list(wanted)] = np.arange(len(wanted))
            slots[name] = jnp.asarray(table)
            state[name] = jax.tree.map(
                lambda s, w=wanted: jnp.zeros((len(w), *s.shape), s.dtype), shapes[name]
            )

        def keep(state: dict, x: Array, layer: Array) -> dict:
            # A slot past the end drops the write: that layer was not asked for.
            return {
                name: _put(state[name], part, slots[name][layer])
                for name, part in show(x).items()
            }

        def reduce(probs: Array, rows: Array) -> dict[str, Any]:
            column = self._columns(rows - self.first)
            return {n: self._mapped(r.rows, probs, column, True) for n, r in attention}

        def lens(before: Array, after: Array) -> dict[str, Any]:
            streams = (model.norm(x[:, self.first :]) for x in (before, after))
            return self._of_logits(lensed, model, *streams)

        def pack(rows: dict[str, Any]) -> dict[str, Any]:
            named = (*attention, *lensed)  # of which a layer may have none
            return {n: self._pack(r, rows[n]) for n, r in named if n in rows}

        def finish(stacked: dict[str, Any]) -> dict[str, Any]:
            return {  # of all layers
                name: jax.vmap(functools.partial(self._finish, reducer))(stacked[name])
                for name, reducer in (*attention, *lensed)
            }

        rows = RowTap(self.first, reduce) if attention else None
        waiting = [r for _, r in attention if not r.rowwise]
        groups = self._groups(waiting, model) if waiting else 1
        seen = lens if lensed else None
        return decoder.Tap(rows, keep, state, seen, pack, finish, groups)

    def features(
        self,
        named: Named,
        model: decoder.Decoder,
        hidden: Array,
        attended: Any,
        state: Any,
        before: Array | None = None,
    ) -> dict[str, Any]:
        """Collects what the scan kept, adds the last hidden state and the logits.

        ``before`` are the last hidden states of a prompt that was read for several.
        """
        last = model.config.num_hidden_layers
        explicit = hidden[:, self.first :]
        out = dict(attended or {})
        for name, reducer in named:
            if reducer.reads == "hidden":
                wanted = layer_indices(reducer, model.config)
                out[name] = state[name]
                if last in wanted:
                    final = self._made(reducer, self._rows(reducer, explicit))
                    out[name] = _put(state[name], final, wanted.index(last))
        out |= self._logits(named, model, explicit)
        if later := [(n, r) for n, r in named if r.settles]:
            whole = hidden if before is None else jnp.concatenate([before, hidden], 1)
            out |= {name: self._settled(r, out[name], whole) for name, r in later}
        return {name: out[name] for name, _ in named}

    def of_states(
        self, named: Named, model: decoder.Decoder, states: Mapping[int, Array]
    ) -> dict[str, Any]:
        """Features of the explicit rows of hidden states, by their numbers.

        The last of all has gone through the final norm.
        """
        out = {}
        for name, reducer in named:
            if reducer.reads == "hidden":
                wanted = layer_indices(reducer, model.config)

                def one(x: Array, reducer: Reducer = reducer) -> Any:
                    return self._made(reducer, self._rows(reducer, x))

                out[name] = jax.vmap(one)(jnp.stack([states[n] for n in wanted]))
        last = states.get(model.config.num_hidden_layers)
        return out if last is None else out | self._logits(named, model, last)

    def _logits(
        self, named: Named, model: decoder.Decoder, explicit: Array
    ) -> dict[str, Any]:
        """Features of the logits that normed rows of the last hidden state make."""
        logits = tuple((n, r) for n, r in named if r.reads == "logits")
        if not logits:
            return {}
        seen = self._of_logits(logits, model, explicit)
        return {name: self._made(r, seen[name]) for name, r in logits}

    def _mapped(self, function: Any, x: Any, column: Array, heads: bool = False) -> Any:
        """``function(x, view)`` of every sample, and of every head where there are."""

        def sample(x, column, target, *rest):
            length = self.prompt_length
            view = View(column, target[column], *rest, prompt_length=length)
            if heads:
                return jax.vmap(lambda head: function(head, view))(x)
            return function(x, view)

        along = 0, None if column.ndim == 1 else 0, *(0 for _ in self.masks)
        return jax.vmap(sample, along)(x, column, *self.masks)

    def _columns(self, row: Array) -> Array:
        """``[query]`` of explicit rows, or ``[batch query]`` where samples differ."""
        return jnp.asarray(self.column)[..., None] + row

    def _rows(self, reducer: Reducer, x: Array) -> Any:
        """``rows`` of every sample, for what has no heads: ``[batch query ...]``."""
        column = self._columns(jnp.arange(x.shape[1]))
        return self._mapped(reducer.rows, x, column)

    def _made(self, reducer: Reducer, rows: Any) -> Any:
        return self._finish(reducer, self._pack(reducer, rows))

    def _pack(self, reducer: Reducer, rows: Any) -> Any:
        """Cuts rows to the response's, clears padding, and applies ``pack``."""
        if not self.aligned:
            return rows
        heads = reducer.reads == "probs"
        axis = 1 + heads
        own = reducer.row == "token"
        real = self.valid[:, self.prompt_length :]

        def cut(leaf: Array) -> Array:
            count = leaf.shape[axis] - 1
            leaf = jax.lax.slice_in_dim(leaf, int(own), count + int(own), axis=axis)
            shape = [real.shape[0], *(1,) * heads, real.shape[1]]
            shape += [1] * (leaf.ndim - len(shape))
            return jnp.where(real.reshape(shape), leaf, 0)

        rows = jax.tree.map(cut, rows)
        return self._of_response(reducer, reducer.pack, rows)

    def _finish(self, reducer: Reducer, packed: Any) -> Any:
        return self._of_response(reducer, reducer.finish, packed)

    def _of_response(self, reducer: Reducer, function: Any, x: Any) -> Any:
        """``function(x, view)`` of all response rows, where a reducer looks at them."""
        if reducer.rowwise or not self.aligned:
            return x
        first = self.prompt_length - int(reducer.row == "predictor")
        column = first + jnp.arange(self.explicit - 1)
        return self._mapped(function, x, column, reducer.reads == "probs")

    def _groups(self, waiting: list, model: decoder.Decoder) -> int:
        """The fewest equal groups of layers whose packed rows may wait together."""
        config = model.config
        platform = kernels.platform_of(model.embed_tokens.embedding.get_value())
        batch, keys = self.valid.shape
        column = jnp.arange(self.explicit)
        shapes = jax.eval_shape(
            lambda probs: [
                self._pack(r, self._mapped(r.rows, probs, column, True))
                for r in waiting
            ],
            jax.ShapeDtypeStruct(
                (batch, config.num_attention_heads, self.explicit, keys), jnp.float32
            ),
        )
        size = sum(
            math.prod(leaf.shape) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(shapes)
        )
        # Layers go along in periods, each of so many with attention.
        steps = config.num_hidden_layers // config.period
        size *= len(config.layers_with(*ATTENTION)) // steps
        fits = max(1, platform.waiting // size)
        return next(
            g for g in range(1, steps + 1) if steps % g == 0 and steps // g <= fits
        )

    def _settled(self, reducer: Reducer, kept: Any, hidden: Array) -> Any:
        """``settle`` of every sample, a layer and a head at a time."""
        count = self.valid.shape[1] - self.prompt_length
        first = self.prompt_length - int(reducer.row == "predictor")

        def head(kept: Any) -> Any:
            def sample(both: Any, view: View) -> Any:
                one, states = both
                return reducer.settle(one, states, view)

            return self._mapped(sample, (kept, hidden), first + jnp.arange(count))

        def layer(kept: Any) -> Any:
            return jax.lax.map(head, kept)

        def swapped(tree: Any) -> Any:
            return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 1, 2), tree)

        return swapped(jax.lax.map(layer, swapped(kept)))

    def _of_logits(
        self, named: Named, model: decoder.Decoder, *streams: Array
    ) -> dict[str, Any]:
        """Rows of what logits of normed residual streams say.

        A block of rows at a time, so that few logits live at once.
        """
        batch, rows, _ = streams[0].shape
        wide = 4 * len(streams) * batch * model.config.vocab_size

        def block(column: Array, *streams: Array) -> tuple[dict[str, Any]]:
            logits: Any = tuple(decoder.unembed(model, x, STANDARD) for x in streams)
            logits = logits if len(logits) > 1 else logits[0]
            return ({n: self._mapped(r.rows, logits, column) for n, r in named},)

        def blocks(platform: kernels.Platform, *arrays: Array) -> dict[str, Any]:
            size = max(1, platform.logits // wide)
            axes = column.ndim - 1, *(1 for _ in streams)
            return in_blocks(block, arrays, axes, (1,), size)[0]

        column = self._columns(jnp.arange(rows))
        return kernels.by_platform(blocks, column, *streams)


def masks_of(
    source: Any, target: Array, columns: int | None = None
) -> tuple[Array, ...]:
    """Masks of the first columns of a batch or a cache, after their next tokens."""
    masks = (jnp.asarray(getattr(source, name))[:, :columns] for name in _MASKS)
    return (target, *masks)


def _put(buffers: Any, part: Any, at: Any) -> Any:
    """Writes one layer's part; a slot past the end drops it."""
    return jax.tree.map(lambda b, x: b.at[at].set(x, mode="drop"), buffers, part)
