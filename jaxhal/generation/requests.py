"""Texts in, texts out: prompts to generate from, and what came of them."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray

from jaxhal.features.base import Reducer
from jaxhal.features.eigenscore import clip_features
from jaxhal.generation import decoding, stops
from jaxhal.generation.decoding import Decoding, State
from jaxhal.generation.sampling import Sampling
from jaxhal.generation.steps import Clip, rowwise
from jaxhal.io.progress import progress_bar
from jaxhal.models.batching import Encoded, Planned, collate, plan, rows_together
from jaxhal.models.lm import LM
from jaxhal.models.mesh import here, rows_at_once, spread
from jaxhal.types import Example

# Tokens decoded between looks at the text for stop strings.
_LOOK = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Generated:
    """One response that a model wrote.

    ``features`` are without the batch axis: ``[layer, heads, response, ...]`` of
    attention, ``[layer, response, ...]`` of hidden states, ``[response, ...]`` of
    logits.
    """

    text: str  # without special tokens and without the stop string
    tokens: Int[np.ndarray, " response"]  # the one that ended it included
    logprobs: Float[np.ndarray, " response"]  # the model's own, in nats
    stopped: stops.Stopped  # by a token ("eos"), a string ("stop") or the "length"
    features: dict[str, Any]


class StreamedToken(NamedTuple):
    """One token of a response that is being written.

    ``text`` is what it adds, empty while a character or a possible stop string is
    incomplete; ``features`` are ``[layer, heads, ...]``, ``[layer, ...]`` or a value.
    """

    id: int
    text: str
    logprob: float  # under the model's own distribution, in nats
    features: dict[str, Any]


def generate(
    lm: LM,
    prompts: Sequence[str | Example],
    *,
    n: int = 1,
    max_new_tokens: int | np.integer | Sequence[int] | np.ndarray = 256,
    sampling: Sampling = Sampling(),  # noqa: B008  (an immutable default)
    key: Key[Array, "*prompts"] | None = None,
    stop: Sequence[str] = (),
    reducers: Mapping[str, Reducer] | None = None,
    clip: Clip | None = None,
    batch_size: int = 32,
    progress: bool | None = None,
) -> list[list[Generated]]:
    """Responses to prompts, ``n`` to each; a prompt is read once.

    Args:
      lm: the model.
      prompts: texts of the user's turn, or examples, whose responses are not looked at;
        with an example reducers know its context and question.
      n: responses to each.
      max_new_tokens: the most tokens of a response, of all or of each prompt's.
      sampling: how tokens are chosen; :data:`jaxhal.generation.GREEDY` for the
        likeliest.
      key: what chance comes from, or an array of keys, one for each prompt.  A response
        depends on the key, on the prompt's number where one key serves all, and on its
        own number among the ``n``, not on what is decoded beside it.
      stop: texts that end a response when they come up in it.
      reducers: name -> row-wise reducer, to ride along.
      clip: bounds that the state of each token is kept in before logits are made of it,
        such as :func:`jaxhal.features.eigenscore.clip_thresholds` gives.
      batch_size: rows decoded together, on each device along ``data`` of a mesh; the
        ``n`` of one prompt always are.
      progress: show a progress bar; ``None`` shows it on a terminal.

    Raises:
      ValueError: on an empty prompt or stop string, a number below 1, no key where
        chance is asked for, a prompt that leaves too little of the model's context, a
        reducer that is not row-wise or needs a token that is not chosen yet, or bad
        bounds.
    """
    rows = encoded(lm, prompts)
    limits = _limits(max_new_tokens, len(rows))
    for number, (row, limit) in enumerate(zip(rows, limits, strict=True)):
        check_room(lm, number, row, limit)
    for name, value in (("n", n), ("batch_size", batch_size)):
        _check_count(name, value)
    if clip is not None:
        clip_features(np.zeros(lm.config.hidden_size, np.float32), *clip)
    how = decoding_of(lm, sampling, reducers)
    keys = prompt_keys(sampling, key, len(rows))
    stop = stops.checked(lm.require_tokenizer(), stop)
    ways = rows_at_once(lm.params)
    together = rows_together(len(rows), max(1, batch_size // n), ways)
    found: dict[int, list[Generated]] = {}
    with progress_bar(len(rows) * n, "generating", "response", progress) as bar:
        for group in plan(rows, together):
            ready, state = begun(lm, rows, group, together, limits, keys, how, n, clip)
            state = _decode(ready, state, how, stop)
            count = len(group.rows) * n
            written = ended(ready, state, how, stop, range(count))
            for at, number in enumerate(group.rows):
                found[number] = written[at * n : (at + 1) * n]
            bar.update(count)
    return [found[number] for number in range(len(rows))]


def begun(
    lm: LM,
    rows: Sequence[Encoded],
    group: Planned,
    together: int,
    limits: Sequence[int],
    keys: Array,
    how: Decoding,
    copies: int,
    clip: Clip | None = None,
) -> tuple[LM, State]:
    """The prompts of a group, read, with a first token for each of their copies.

    They go on with the model that comes with them.  Rows that only fill the batch up to
    ``together`` are done before they begin.
    """
    some = [rows[i] for i in group.rows]
    pad_id = lm.require_tokenizer().pad_id
    limit = np.zeros(together, np.int32)
    limit[: len(some)] = [limits[i] for i in group.rows]
    state = decoding.start(
        lm.bare,
        spread(collate(some, pad_id, group.prompt_length, 1, together), lm.params),
        jnp.repeat(limit, copies),
        row_keys(keys[np.resize(group.rows, together)], copies),
        how,
        new_tokens=max(limits),
        copies=copies,
        clip=clip,
    )
    return decoding.ready(lm, state)


def stream(
    lm: LM,
    prompt: str | Example,
    *,
    max_new_tokens: int = 256,
    sampling: Sampling = Sampling(),  # noqa: B008  (an immutable default)
    key: PRNGKeyArray | None = None,
    stop: Sequence[str] = (),
    reducers: Mapping[str, Reducer] | None = None,
) -> Iterator[StreamedToken]:
    """A response token by token, the first of :func:`generate` for the same key.

    With reducers of a token's own row a token comes when it has been read, one step
    later.

    Raises:
      ValueError: as :func:`generate`, before the first token.
    """
    tokenizer, rows = lm.require_tokenizer(), encoded(lm, [prompt])
    limits = _limits(max_new_tokens, 1)
    check_room(lm, 0, rows[0], limits[0])
    how = decoding_of(lm, sampling, reducers)
    keys = prompt_keys(sampling, key, 1)
    ends = stops.checked(tokenizer, stop)

    def tokens() -> Iterator[StreamedToken]:
        (group,) = plan(rows, 1)
        ready, state = begun(lm, rows, group, 1, limits, keys, how, 1)
        said, ids, count = "", [], 1
        while True:
            done = bool(here(state.done)[0])
            if done:
                state = decoding.read_last(ready, state, how)
            for at in range(len(ids), count - (how.behind and not done)):
                read = jax.device_get(here(decoding.column(state, at, how)))
                token, logprob, features = read
                ids.append(int(token[0]))
                text = tokenizer.decode(ids, skip_special=True)
                cut = stops.first(text, ends)
                if cut is not None:
                    text = text[:cut]
                elif not (done and at == count - 1):
                    text = text[: stops.settled(text, ends)]
                added, alone = text[len(said) :], _of_row(how, features, 0, 0)
                yield StreamedToken(ids[-1], added, float(logprob[0]), alone)
                said = max(said, text, key=len)
                if cut is not None:
                    return
            if done:
                return
            count += 1
            state = decoding.go_on(ready.bare, state, jnp.asarray(count), how)

    return tokens()


def encoded(lm: LM, prompts: Sequence[str | Example]) -> list[Encoded]:
    if isinstance(prompts, str) or not prompts:
        raise ValueError(f"prompts is {prompts!r}; give a list with at least one")
    tokenizer, rows = lm.require_tokenizer(), []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            if not prompt.strip():
                raise ValueError(f"prompt {number} is {prompt!r}; it must hold text")
            prompt = Example("-", prompt=prompt)
        rows.append(tokenizer.encode_prompt(prompt))
    return rows


def _limits(
    max_new_tokens: int | np.integer | Sequence[int] | np.ndarray, count: int
) -> list[int]:
    given = np.asarray(max_new_tokens)
    limits = [given.item()] * count if given.ndim == 0 else given.tolist()
    if len(limits) != count:
        raise ValueError(
            f"max_new_tokens holds {len(limits)} numbers for {count} prompts; give one "
            "for each, or one for all"
        )
    for limit in limits:
        _check_count("max_new_tokens", limit)
    return limits


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} is {value}; it must be at least 1, a whole number")


def check_room(lm: LM, number: int, row: Encoded, limit: int) -> None:
    prompt, most = len(row.prompt_ids), lm.config.context_length
    if prompt + limit > most:
        raise ValueError(
            f"prompt {number} has {prompt} tokens, and with {limit} new ones that is "
            f"over the model's context of {most}; shorten the prompt or ask for fewer"
        )


def unanswerable(
    lm: LM, prompts: Mapping[int, str | Example], limit: int
) -> dict[int, str]:
    """Why prompts cannot be answered in so many tokens, of those that cannot."""
    found = {}
    for number, prompt in prompts.items():
        try:
            (row,) = encoded(lm, [prompt])
            check_room(lm, number, row, limit)
        except ValueError as error:
            found[number] = str(error)
    return found


def decoding_of(
    lm: LM, sampling: Sampling, reducers: Mapping[str, Reducer] | None
) -> Decoding:
    named = rowwise(lm, reducers)
    decoding.check_sampled(dict(named))
    tokenizer = lm.require_tokenizer()
    return Decoding(sampling, named, tokenizer.stop_ids, tokenizer.pad_id)


def prompt_keys(
    sampling: Sampling, key: Array | None, prompts: int
) -> Key[Array, " prompts"]:
    """A key for each prompt."""
    if key is None and sampling.temperature > 0:
        raise ValueError(
            "sampling needs a key, such as jax.random.key(0); or pass sampling=GREEDY"
        )
    key = jax.random.key(0) if key is None else key
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise ValueError(
            f"key is an array of {key.dtype}, as jax.random.PRNGKey makes it; give "
            "jax.random.key(seed), or jax.random.wrap_key_data(key)"
        )
    if key.ndim == 0:
        return jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(prompts))
    if key.shape != (prompts,):
        raise ValueError(
            f"key has shape {key.shape} for {prompts} prompts; give one key, or one "
            "for each"
        )
    return key


def row_keys(keys: Key[Array, " prompts"], n: int) -> Key[Array, " rows"]:
    """A key for each of the ``n`` responses to each prompt, by their numbers alone."""
    samples = jnp.tile(jnp.arange(n), len(keys))
    return jax.vmap(jax.random.fold_in)(jnp.repeat(keys, n), samples)


def _decode(lm: LM, state: State, how: Decoding, stop: tuple[str, ...]) -> State:
    """Decodes to the end; with stop strings, a stretch at a time."""
    tokenizer, longest = lm.require_tokenizer(), state.tokens.shape[1]
    for until in range(_LOOK, longest + _LOOK, _LOOK) if stop else (longest,):
        last = jnp.asarray(min(until, longest))
        state = decoding.go_on(lm.bare, state, last, how)
        if not stop:
            break
        seen = here((state.done, state.tokens, state.real))
        done, tokens, real = jax.device_get(seen)
        done = done.copy()
        for row in np.flatnonzero(~done):
            text = tokenizer.decode(tokens[row][real[row]], skip_special=True)
            done[row] = stops.first(text, stop) is not None
        state = dataclasses.replace(state, done=jnp.asarray(done))
        if done.all():
            break
    return state


def ended(
    lm: LM, state: State, how: Decoding, stop: tuple[str, ...], rows: Sequence[int]
) -> list[Generated]:
    """Some rows of a state that goes no further, as responses."""
    tokenizer, state = lm.require_tokenizer(), decoding.read_last(lm, state, how)
    tokens, logprob, real, features = jax.device_get(
        here((state.tokens, state.logprob, state.real, state.features))
    )
    responses = []
    for row in rows:
        text, ids, stopped = stops.cut(tokenizer, stop, tokens[row][real[row]])
        own = slice(0, len(ids))
        of_row = _of_row(how, features, row, own)
        responses.append(Generated(text, ids, logprob[row, own], stopped, of_row))
    return responses


def _of_row(how: Decoding, features: dict[str, Any], row: int, at: Any) -> Any:
    """Features of one row, cut or indexed along its tokens."""
    of_layer = slice(None), row
    before = {"probs": (*of_layer, slice(None)), "hidden": of_layer, "lens": of_layer}

    def cut(leaf: Any, reducer: Reducer) -> np.ndarray:
        return np.asarray(leaf[(*before.get(reducer.reads, (row,)), at)])

    return decoding.mapped(cut, how.named, features)
