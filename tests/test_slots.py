"""Rows that enter and leave one running decode are written as if they were alone."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxhal.features.hidden import HiddenStates
from jaxhal.features.lookback import LookbackRatio
from jaxhal.features.uncertainty import TokenEntropy, TokenLogprob
from jaxhal.generation import GREEDY, Sampling, pieces, requests, slots
from jaxhal.generation.decoding import QUERY, Decoding
from jaxhal.generation.pieces import PIECE
from jaxhal.generation.slots import Size
from jaxhal.generation.stops import cut
from jaxhal.models.lm import LM
from jaxhal.types import Example
from tiny_lm import tiny_lm

# Of a token's own row and of its predictor's; heads, layers and neither.
REDUCERS = {
    "lookback": LookbackRatio(),
    "hidden": HiddenStates((1,)),
    "logprob": TokenLogprob(),
    "entropy": TokenEntropy(),
}
LONG = "It rained for many days, and the river rose. " * 7
# What is asked, in how many tokens, how it is drawn, and after how many rounds.
ASKED = [
    (Example("-", context="The sky is red.", question="Which colour?"), 9, GREEDY, 0),
    (Example("-", prompt="A"), 4, Sampling(), 0),
    (Example("-", prompt=LONG), 12, Sampling(temperature=0.7, top_p=0.8), 1),
    (Example("-", prompt="Later, and short."), 20, Sampling(top_p=0.5), 3),
    (Example("-", prompt="The last one waits for a slot."), 7, GREEDY, 0),
]


@pytest.fixture(scope="module")
def lm() -> LM:
    return tiny_lm()


@pytest.fixture(scope="module")
def how(lm) -> Decoding:
    return requests.decoding_of(lm, GREEDY, REDUCERS)


def read(lm, how, example, limit, prefixes=None):
    """A prompt, read but for its last token."""
    (row,) = requests.encoded(lm, [example])
    prompt = pieces.begin(lm, row, prefixes or pieces.Prefixes())
    while not prompt.complete:
        prompt = pieces.read_piece(lm, prompt, limit, how.pad_id)
    return prompt


def of_slot(state, how, at):
    """Tokens, log probabilities and features of one slot, as far as they are there."""
    count = int(slots.written(state, how)[at])
    features = slots.features_of(state, how)
    found = {}
    for name, reducer in how.named:
        there = reducer.batch_axis, QUERY[reducer.reads]
        found[name] = np.moveaxis(features[name], there, (0, 1))[at, :count]
    assert (np.asarray(features["valid"][at]).sum()) == count
    return state.tokens[at, :count], state.logprob[at, :count], found


def check_alone(lm, example, limit, sampling, key, found):
    """Compares a slot with the same response, streamed."""
    tokens, logprob, features = found
    alone = requests.stream(
        lm,
        example,
        max_new_tokens=limit,
        sampling=sampling,
        key=key,
        reducers=REDUCERS,
    )
    alone = [*alone]
    assert tokens.tolist() == [token.id for token in alone]
    assert np.allclose(logprob, [token.logprob for token in alone], atol=1e-5)
    for name in REDUCERS:
        want = np.stack([token.features[name] for token in alone])
        assert np.allclose(features[name], want, atol=1e-5), name


def keys_of(number):
    """A key for a slot, and the one that makes a stream draw the same."""
    key = jax.random.key(number)
    return requests.row_keys(requests.prompt_keys(Sampling(), key, 1), 1)[0], key


def test_company_changes_nothing(lm, how):
    model = lm.apart.bare  # as a server writes
    state = slots.empty(model, Size(3, 8 * PIECE, 24), how)
    waiting, places, done, rounds = [*range(len(ASKED))], {}, {}, 0
    while waiting or places:
        live = np.asarray(state.live)
        for at, number in [*places.items()]:
            if not live[at]:
                done[number] = of_slot(state, how, at)
                del places[at]
        for number in [n for n in waiting if ASKED[n][3] <= rounds]:
            if at := [at for at in range(3) if at not in places]:
                example, limit, sampling, _ = ASKED[number]
                state = slots.enter(
                    state,
                    at[0],
                    read(lm, how, example, limit),
                    limit=limit,
                    key=keys_of(number)[0],
                    temperature=sampling.temperature,
                    top_p=1.0 if sampling.top_p is None else sampling.top_p,
                )
                places[at[0]] = number
                waiting.remove(number)
        state = slots.go_on(model, state, jnp.asarray(2), how)
        rounds += 1
    assert sorted(done) == [*range(len(ASKED))]
    for number, found in done.items():
        example, limit, sampling, _ = ASKED[number]
        check_alone(lm, example, limit, sampling, keys_of(number)[1], found)


def test_another_size_changes_nothing(lm, how):
    """Rows move, and columns are added on both sides and taken away again."""
    model, (example, limit, sampling, _) = lm.bare, ASKED[0]
    state = slots.empty(model, Size(2, PIECE, 16), how)
    own = {"limit": limit, "key": keys_of(0)[0]}
    state = slots.enter(state, 1, read(lm, how, example, limit), **own)
    state = slots.go_on(model, state, jnp.asarray(3), how)
    state = slots.resized(state, jnp.array([5, 1, 7, 9]), Size(4, 2 * PIECE, 32), how)
    assert state.live.tolist() == [False, True, False, False]
    state = slots.go_on(model, state, jnp.asarray(2), how)
    state = slots.resized(state, jnp.array([1]), Size(1, PIECE, 16), how)
    state = slots.go_on(model, state, jnp.asarray(99), how)
    found = of_slot(state, how, 0)
    check_alone(lm, example, limit, sampling, keys_of(0)[1], found)


@pytest.mark.parametrize("kept", [0, 3])
def test_going_back(lm, how, kept):
    """What follows the first tokens is as if nothing else had been written."""
    model, (example, limit, _, _) = lm.bare, ASKED[0]
    state = slots.empty(model, Size(2, PIECE, 16), how)
    own = {"limit": limit, "key": keys_of(5)[0], "temperature": 1.0}
    state = slots.enter(state, 0, read(lm, how, example, limit), **own)
    state = slots.go_on(model, state, jnp.asarray(6), how)
    first = np.asarray(state.tokens[0])
    state = slots.rewind(state, 0, kept, keys_of(6)[0])
    state = slots.go_on(model, state, jnp.asarray(99), how)
    tokens, logprob, features = of_slot(state, how, 0)
    assert tokens[:kept].tolist() == first[:kept].tolist()
    assert tokens.tolist() != first[: len(tokens)].tolist()
    text, ids, _ = cut(lm.require_tokenizer(), (), np.asarray(tokens))
    (row,) = requests.encoded(lm, [example])
    whole = jnp.concatenate([row.prompt_ids, ids])[None]
    logits = jax.nn.log_softmax(lm.forward(whole)[0])
    want = [logits[len(row.prompt_ids) - 1 + n, token] for n, token in enumerate(ids)]
    assert np.allclose(logprob, np.asarray(want), atol=1e-5)
    assert np.allclose(features["logprob"], np.asarray(want), atol=1e-5)


def test_going_back_after_others_went_on(lm, how):
    """Steps in which only others wrote are no tokens of the one that was done."""
    model = lm.bare
    state = slots.empty(model, Size(2, PIECE, 32), how)
    for at, (prompt, limit) in enumerate((("A", 6), ("B, and longer.", 30))):
        example = Example("-", prompt=prompt)
        prompt = read(lm, how, example, limit)
        own = {"limit": limit, "key": keys_of(at)[0], "temperature": 1.0}
        state = slots.enter(state, at, prompt, **own)
    state = slots.go_on(model, state, jnp.asarray(12), how)
    state = slots.rewind(state, 0, 2, keys_of(6)[0])
    assert state.cache.length[0] == state.cache.valid[0].sum()
    state = slots.go_on(model, state, jnp.asarray(99), how)
    tokens, logprob, _ = of_slot(state, how, 0)
    (row,) = requests.encoded(lm, [Example("-", prompt="A")])
    whole = jnp.concatenate([row.prompt_ids, tokens])[None]
    logits = jax.nn.log_softmax(lm.forward(whole)[0])
    want = [logits[len(row.prompt_ids) - 1 + n, one] for n, one in enumerate(tokens)]
    assert len(tokens) > 2 and np.allclose(logprob, np.asarray(want), atol=1e-5)


def test_a_slot_that_is_freed_writes_no_more(lm, how):
    model = lm.bare
    state = slots.empty(model, Size(2, PIECE, 16), how)
    own = {"limit": 16, "key": keys_of(0)[0], "temperature": 1.0}
    state = slots.enter(state, 0, read(lm, how, ASKED[0][0], 16), **own)
    state = slots.go_on(model, state, jnp.asarray(3), how)
    state = slots.free(state, 0)
    state = slots.go_on(model, state, jnp.asarray(5), how)
    assert state.count.tolist() == [3, 0] and not state.live.any()


def test_what_was_read_before_is_not_read_again(lm, how):
    """Prompts that begin alike, longer and shorter, are written as if read alone."""
    prefixes = pieces.Prefixes()
    asked = [LONG, LONG + "Then what?", LONG + "And the boats?", LONG[:100], "Other."]
    reused = []
    for text in asked:
        example = Example("-", prompt=text)
        prompt = read(lm, how, example, 6, prefixes)
        reused.append(prompt.reused)
        state = slots.empty(lm.bare, Size(1, 8 * PIECE, 8), how)
        state = slots.enter(state, 0, prompt, limit=6, key=keys_of(0)[0])
        state = slots.go_on(lm.bare, state, jnp.asarray(8), how)
        check_alone(lm, example, 6, GREEDY, keys_of(0)[1], of_slot(state, how, 0))
        prefixes.add(prompt)
    ids = [row.prompt_ids for row in requests.encoded(lm, [*map(_asked, asked)])]
    alike = [0]
    for at in range(1, len(ids)):
        pairs = [zip(ids[at][:-1], one[:-1], strict=False) for one in ids[:at]]
        alike.append(max(_alike(pair) for pair in pairs))
    assert reused == alike and reused[1] > 3 * PIECE > reused[-1]
    again = pieces.begin(lm, requests.encoded(lm, [_asked(asked[0])])[0], prefixes)
    assert again.complete


def _asked(text):
    return Example("-", prompt=text)


def _alike(pairs):
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_prompts_of_no_use_leave(lm, how):
    """Of three that do not fit together, the one that was asked for last stays."""
    one, two, three = (read(lm, how, _asked(text), 2) for text in ("AAA", "BBB", "CCC"))
    size = sum(buffer.nbytes for buffer in one.buffers)
    prefixes = pieces.Prefixes(2 * size)
    prefixes.add(one)
    prefixes.add(two)
    assert prefixes.longest(lm, one.before)[0] == len(one.before)
    prefixes.add(three)
    found = [prefixes.longest(lm, row.before)[0] for row in (one, two, three)]
    assert [count == len(one.before) for count in found] == [True, False, True]


def test_keys_that_depend_on_the_length_are_not_used_again(how):
    lm = tiny_lm(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    )
    prompt, prefixes = read(lm, how, _asked(LONG), 2), pieces.Prefixes()
    prefixes.add(prompt)
    assert prefixes.longest(lm, prompt.before) == (0, None)
