"""The compiled decoding loop: choose a token, read it, keep what reducers say."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Int

from jaxhal.capture.taps import Named
from jaxhal.features.base import Reducer
from jaxhal.generation.sampling import Sampling, choose
from jaxhal.generation.steps import Clip, advance, begin
from jaxhal.models import cache as cache_lib
from jaxhal.models import devices
from jaxhal.models.cache import Cache
from jaxhal.models.decoder import Decoder
from jaxhal.models.lm import LM
from jaxhal.types import Batch

# Share of the memory at hand that weights held a second time, layer by layer, may take.
_APART_SHARE, _APART_SHARE_OF_DEVICE = 0.25, 0.5
# Bytes of weights below which that saves less than compiling each layer costs.
_APART_FROM = 64 << 20
# Where the query axis of a feature stands.
QUERY = {"probs": 3, "hidden": 2, "lens": 2, "logits": 1}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Rows that are being written; a pytree."""

    cache: Cache  # of all tokens but the last chosen one
    count: Any  # Int[], tokens chosen of each row, padding included
    tokens: Any  # Int[batch new], the pad id where none was chosen
    logprob: Any  # Float[batch new], under the model's own distribution
    real: Any  # Bool[batch new], whether a token was chosen
    done: Any  # Bool[batch], rows that go no further
    limit: Any  # Int[batch], the most tokens of each row
    keys: Any  # a random key for each row
    seen: Any  # Bool[batch vocab] or None, for a repetition penalty
    clip: Clip | None  # bounds of the state that logits are made of
    features: dict[str, Any]  # of the reducers, with a query axis of length `new`


@dataclasses.dataclass(frozen=True)
class Decoding:
    """What does not change while decoding, static by value."""

    sampling: Sampling  # of all rows; slots have wishes of their own
    named: Named  # row-wise reducers that ride along
    stop_ids: tuple[int, ...]  # tokens that end a row; they belong to it
    pad_id: int

    @property
    def behind(self) -> bool:
        """Whether a token's features come a step after it, with its own row."""
        return any(reducer.row == "token" for _, reducer in self.named)


@jax.jit(static_argnames=("how", "new_tokens", "copies"))
def start(
    lm: LM,
    batch: Batch,
    limit: Array,
    keys: Array,
    how: Decoding,
    new_tokens: int,
    copies: int,
    clip: Clip | None = None,
) -> State:
    """Reads the prompts, once each, and chooses the first token of every row."""
    model = nnx.merge(lm.graphdef, lm.params)
    rows = len(limit)
    seen = None
    if how.sampling.repetition_penalty != 1.0:
        tokens = jnp.asarray(batch.tokens)[:, : batch.prompt_length]
        valid = jnp.asarray(batch.valid)[:, : batch.prompt_length]
        seen = jnp.zeros((len(tokens), model.config.vocab_size), bool)
        seen = jax.vmap(lambda s, t, v: s.at[t].max(v))(seen, tokens, valid)
        seen = jnp.repeat(seen, copies, axis=0)

    pick = functools.partial(_pick, how, keys, jnp.asarray(0), seen)
    logits, cache, features, first = begin(
        model, batch, new_tokens, how.named, pick, copies, clip, limit[::copies]
    )

    def empty(leaf: Array, reducer: Reducer) -> Array:
        shape = list(leaf.shape)
        shape[QUERY[reducer.reads]] = new_tokens
        return jnp.zeros(shape, leaf.dtype)

    state = State(
        cache=cache,
        count=jnp.asarray(0),
        tokens=jnp.full((rows, new_tokens), how.pad_id, jnp.int32),
        logprob=jnp.zeros((rows, new_tokens), jnp.float32),
        real=jnp.zeros((rows, new_tokens), bool),
        done=jnp.zeros(rows, bool),
        limit=limit,
        keys=keys,
        seen=seen,
        clip=clip,
        features=mapped(empty, how.named, features),
    )
    state = _kept(state, how.named, features, "predictor")
    return _chosen(state, how, first, logits)


def ready(lm: LM, state: State) -> tuple[LM, State]:
    """A model and what it has begun, as :func:`go_on` reads them fastest."""
    state = dataclasses.replace(state, cache=cache_lib.laid(state.cache))
    if (fast := fastest(lm)) is lm:
        return lm, state
    return fast, dataclasses.replace(state, cache=cache_lib.apart(state.cache))


def fastest(lm: LM) -> LM:
    """The model as few tokens are read fastest with it.

    With layers apart, unless the model is tiny, or a second copy of them would take
    over a quarter of the machine's memory at hand, or half of an accelerator's.  Packed
    weights stay together: the numbers of one layer are held at a time, where XLA would
    make those of all layers before the first token and keep them.
    """
    if lm.packed:
        return lm
    leaves = jax.tree.leaves(lm.params)
    if "apart" not in vars(lm):  # which holds it once made
        held = leaves[0].sharding.addressable_devices
        on_cpu = next(iter(held)).platform == "cpu"
        share = _APART_SHARE if on_cpu else _APART_SHARE_OF_DEVICE
        size = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
        if not _APART_FROM <= size <= share * devices.memory_of_each(held):
            return lm
    return lm.apart


@jax.jit(static_argnames="how", donate_argnames="state")
def go_on(lm: LM, state: State, until: Array, how: Decoding) -> State:
    """Decodes until each row is done or there are ``until`` tokens of it."""
    model = nnx.merge(lm.graphdef, lm.params)

    def unfinished(state: State) -> Array:
        return (state.count < until) & ~state.done.all()

    def body(state: State) -> State:
        state, logits, token = _read(model, state, how)
        return _chosen(state, how, token, logits[:, -1])

    return jax.lax.while_loop(unfinished, body, state)


def read_last(lm: LM, state: State, how: Decoding) -> State:
    """With what the rows of the last tokens say, where a reducer looks at those.

    The state itself goes on as it was, its last tokens not read.
    """
    return _read_last(lm.bare, state, how) if how.behind else state


@jax.jit(static_argnames="how")
def _read_last(lm: LM, state: State, how: Decoding) -> State:
    return _read(nnx.merge(lm.graphdef, lm.params), state, how)[0]


@jax.jit(static_argnames="how")
def column(state: State, at: Array, how: Decoding) -> tuple[Array, Array, Any]:
    """Token, log probability and features of every row at one place."""

    def cut(leaf: Array, axis: int) -> Array:
        return jax.lax.dynamic_slice_in_dim(leaf, at, 1, axis)

    def of(leaf: Array, reducer: Reducer) -> Array:
        return cut(leaf, QUERY[reducer.reads])

    features = mapped(of, how.named, state.features)
    return cut(state.tokens, 1)[:, 0], cut(state.logprob, 1)[:, 0], features


def with_text(
    tokens: Int[Array | np.ndarray, "rows column"],
    real: Bool[Array | np.ndarray, "rows column"],
    stop_ids: tuple[int, ...],
) -> Bool[Array, "rows column"]:
    """Tokens but for an end, which is judged where there is nothing else."""
    words = real & ~jnp.isin(tokens, jnp.asarray(stop_ids, jnp.int32))
    return jnp.where(words.any(1, keepdims=True), words, real)


def check_sampled(reducers: Mapping[str, Reducer]) -> None:
    """Raises ValueError on a reducer of tokens that are not chosen yet."""
    for name, reducer in reducers.items():
        if reducer.reads_target and reducer.reads != "logits":
            raise ValueError(
                f"reducer {name!r} reads {reducer.reads!r} and the token that follows, "
                "which is not chosen yet; read(...) the finished response instead"
            )


def _read(model: Decoder, state: State, how: Decoding) -> tuple[State, Array, Array]:
    """Reads the newest token of every row; features, logits and the token after it."""
    last = state.count - 1
    tokens = jax.lax.dynamic_slice_in_dim(state.tokens, last, 1, axis=1)
    valid = jax.lax.dynamic_slice_in_dim(state.real, last, 1, axis=1)
    pick = functools.partial(_pick, how, state.keys, state.count, state.seen)
    logits, cache, features, token = advance(
        model, state.cache, tokens, valid, how.named, pick, state.clip
    )
    state = dataclasses.replace(state, cache=cache)
    state = _kept(state, how.named, features, "token")
    return _kept(state, how.named, features, "predictor"), logits, token


def _pick(
    how: Decoding, keys: Array, count: Array, seen: Array | None, logits: Array
) -> Array:
    keys = jax.vmap(lambda key: jax.random.fold_in(key, count))(keys)
    return choose(logits, keys, how.sampling, seen)


def _chosen(state: State, how: Decoding, token: Array, logits: Array) -> State:
    """Enters the tokens chosen for rows that go on."""
    count, real = state.count, ~state.done
    token = jnp.where(real, token, how.pad_id)
    logp = jnp.take_along_axis(logits, token[:, None], -1)[:, 0]
    logp = jnp.where(real, logp - jax.nn.logsumexp(logits, axis=-1), 0.0)

    def put(old: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(old, new[:, None], count, axis=1)

    seen = state.seen
    if seen is not None:
        seen = jax.vmap(lambda row, t, r: row.at[t].max(r))(seen, token, real)
    ends = jnp.isin(token, jnp.asarray(how.stop_ids, jnp.int32))
    return dataclasses.replace(
        state,
        count=count + 1,
        tokens=put(state.tokens, token),
        logprob=put(state.logprob, logp),
        real=put(state.real, real),
        done=state.done | ends | (count + 1 >= state.limit),
        seen=seen,
    )


def mapped(function: Callable, named: Named, *features: dict[str, Any]) -> dict:
    """A function of each leaf of features, by name, and of its reducer."""
    return {
        name: jax.tree.map(
            lambda *leaves, r=reducer: function(*leaves, r),
            *(each[name] for each in features),
        )
        for name, reducer in named
    }


def _kept(state: State, named: Named, features: dict[str, Any], row: str) -> State:
    """Enters features: of a token's own row, or of the row that predicts the next."""
    at = state.count - 1 if row == "token" else state.count

    def put(old: Array, new: Array, reducer: Reducer) -> Array:
        axis = QUERY[reducer.reads]
        place = (slice(None),) * axis + (at,)
        return old.at[place].set(jnp.take(new, 0, axis=axis), mode="drop")

    some = tuple((name, reducer) for name, reducer in named if reducer.row == row)
    kept = state.features | mapped(put, some, state.features, features)
    return dataclasses.replace(state, features=kept)
