"""The decoding loop on bare tokens: greedy choices, and what is drawn by chance."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import thorough
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from test_parity import load

import jaxhal
import tiny
from jaxhal.generation import GREEDY, Sampling, decoding
from jaxhal.generation.sampling import choose, choose_each, warp
from jaxhal.models.batching import Encoded, collate
from jaxhal.models.families import from_huggingface
from jaxhal.models.lm import hidden_states, random


def prompts(rows: list[list[int]]):
    """A batch of prompts alone, the shorter ones padded."""
    return collate(
        [
            Encoded(
                prompt_ids=np.asarray(row, np.int32),
                response_ids=np.zeros(0, np.int32),
                offsets=np.zeros((0, 2), np.int32),
                context=np.ones(len(row), bool),
                document=np.ones(len(row), bool),
                question=np.zeros(len(row), bool),
            )
            for row in rows
        ],
        pad_id=0,
        prompt_length=max(map(len, rows)) + 2,
        response_length=1,
    )


def write(lm, rows, new, how, copies=1, keys=None, limit=None):
    """The final state after decoding all rows."""
    count = len(rows) * copies
    keys = jax.random.split(jax.random.key(0), count) if keys is None else keys
    limit = jnp.full(count, new) if limit is None else jnp.asarray(limit)
    batch = prompts(rows)
    state = decoding.start(lm, batch, limit, keys, how, new_tokens=new, copies=copies)
    lm, state = decoding.ready(lm, state)
    return decoding.go_on(lm, state, jnp.asarray(new), how)


def how(sampling=GREEDY, stop_ids=(), **named):
    return decoding.Decoding(sampling, tuple(named.items()), stop_ids, pad_id=0)


# A model whose 'dynamic' rope turns its keys by the length it reached is decoded here
# with the length it will reach, so that decoding equals reading the finished text.
HALF_THERE = "llama-dynamic"
# And the ropes, windows and wirings; parity of all cases is that of single passes.
OTHERS = [
    *("llama-yarn", "qwen2-window", "falcon-40b", "gemma3-scaled", "granite4-nope"),
    *("smollm3-window", "olmo3-yarn", "phi3-short", "qwen3moe-plain"),
    *("gemma4-plain", "gemma4-uneven", "gemma4-experts"),
]


@pytest.mark.shows("greedy")
@pytest.mark.parametrize("case", [*tiny.UNLIKE, *thorough.more(*tiny.ALIKE, *OTHERS)])
def test_greedy_equals_hugging_face(case, tmp_path):
    want = json.loads((tiny.GOLDEN / "greedy.json").read_text("utf-8"))[case]
    meta = tiny.golden(case)
    lm = load(tmp_path, meta["config"], meta["shapes"])
    state = write(lm, tiny.PROMPTS, tiny.NEW, how())
    assert state.tokens.tolist() == want


@pytest.mark.parametrize("case", ["llama-gqa", HALF_THERE])
def test_greedy_takes_the_likeliest_of_a_whole_forward(case, tmp_path):
    meta = tiny.golden(case)
    lm = load(tmp_path, meta["config"], meta["shapes"])
    state = write(lm, tiny.PROMPTS[:1], tiny.NEW, how())
    whole = np.concatenate([tiny.PROMPTS[0], state.tokens[0]])
    logits = np.asarray(lm.forward(whole[None]))[0, len(tiny.PROMPTS[0]) - 1 : -1]
    assert (logits.argmax(-1) == np.asarray(state.tokens[0])).all()
    logp = jax.nn.log_softmax(logits)[np.arange(tiny.NEW), state.tokens[0]]
    np.testing.assert_allclose(state.logprob[0], logp, atol=1e-4)


@pytest.mark.parametrize("case", ["llama-gqa", "gpt2-mha"])
def test_live(case):
    pytest.importorskip("torch", reason="torch is not installed; golden ids stand in")
    import make_golden

    want = json.loads((tiny.GOLDEN / "greedy.json").read_text("utf-8"))[case]
    assert make_golden.greedy(case) == want


@pytest.fixture(autouse=True)
def _as_larger_models(monkeypatch):
    monkeypatch.setattr(decoding, "_APART_FROM", 0)


@pytest.fixture(scope="module")
def lm():
    settings = {"vocab_size": 300, "num_hidden_layers": 2, "rms_norm_eps": 1e-5}
    config = {
        "model_type": "llama",
        "rope_theta": 10000.0,
        **tiny.CASES["llama-gqa"][1],
    }
    return random(from_huggingface(config | settings), jax.random.key(3))


ROWS = [[5, 9, 200, 31, 77], [8, 250, 3]]
WARM = Sampling(temperature=1.5)


def test_copies_share_a_prompt_and_draw_on_their_own(lm):
    keys = jax.random.split(jax.random.key(1), 6)
    together = write(lm, ROWS, 9, how(WARM), copies=3, keys=keys)
    for row in range(6):
        alone = write(lm, [ROWS[row // 3]], 9, how(WARM), keys=keys[row : row + 1])
        assert alone.tokens[0].tolist() == together.tokens[row].tolist()
        np.testing.assert_allclose(
            alone.logprob[0], together.logprob[row], atol=1e-4, rtol=1e-4
        )
    assert len(np.unique(together.tokens, axis=0)) == 6


def test_limits_and_stop_tokens_end_rows_alone(lm):
    free = write(lm, ROWS, 8, how())
    stop = int(free.tokens[0, 3])
    first = free.tokens[0].tolist().index(stop)
    assert stop not in free.tokens[1].tolist()
    state = write(lm, ROWS, 8, how(stop_ids=(stop,)), limit=[8, 5])
    assert state.real.sum(1).tolist() == [first + 1, 5]
    assert state.tokens[0, : first + 1].tolist() == free.tokens[0, : first + 1].tolist()
    assert (state.tokens[0, first + 1 :] == 0).all()
    assert (state.logprob[0, first + 1 :] == 0).all()
    assert state.tokens[1, :5].tolist() == free.tokens[1, :5].tolist()
    assert int(state.count) == max(first + 1, 5)
    assert state.done.all()


def test_a_row_without_room_for_a_token_is_done_at_once(lm):
    state = write(lm, ROWS, 4, how(), limit=[0, 4])
    assert state.done.all() and int(state.real[1].sum()) == 4


def test_states_are_clipped_before_a_token_is_chosen(lm):
    row, new, width = ROWS[0], 6, lm.config.hidden_size
    whole = jnp.asarray([row])
    states = jax.jit(lambda lm, *of: hidden_states(lm, *of)[1])
    free = np.asarray(states(lm.bare, whole, jnp.ones(whole.shape, bool)))[0]
    low, high = np.quantile(free, 0.2, axis=0), np.quantile(free, 0.8, axis=0)
    want, head = list(row), np.asarray(unembedding(nnx.merge(lm.graphdef, lm.params)))
    for at in range(len(row), len(row) + new):
        tokens = jnp.asarray([want + [0] * (len(row) + new - at)])
        valid = jnp.arange(tokens.shape[1])[None] < at
        cut = np.clip(states(lm.bare, tokens, valid)[0, at - 1], low, high)
        want.append(int(np.argmax(cut @ head)))
    assert want[len(row) :] != write(lm, [row], new, how()).tokens[0].tolist()
    batch, keys = prompts([row]), jax.random.split(jax.random.key(0), 1)

    def written(clip):
        options = {"new_tokens": new, "copies": 1, "clip": clip}
        state = decoding.start(lm, batch, jnp.asarray([new]), keys, how(), **options)
        model, state = decoding.ready(lm, state)
        return decoding.go_on(model, state, jnp.asarray(new), how()).tokens[0].tolist()

    assert written((jnp.asarray(low), jnp.asarray(high))) == want[len(row) :]
    wide = jnp.full(width, jnp.inf)
    assert written((-wide, wide)) == write(lm, [row], new, how()).tokens[0].tolist()


def unembedding(model):
    head = model.lm_head
    return model.embed_tokens.embedding[...].T if head is None else head.kernel[...]


FEATURES = {
    "lookback": jaxhal.LookbackRatio(),
    "entropy": jaxhal.TokenEntropy(),
    "logprob": jaxhal.TokenLogprob(),
    "states": jaxhal.HiddenStates(layers=(1, 2)),
}


def test_layers_apart_and_stacked_say_the_same(lm, monkeypatch):
    lm = dataclasses.replace(lm)  # has not been taken apart yet
    decode, keys = how(WARM, **FEATURES), jax.random.split(jax.random.key(6), 4)
    with monkeypatch.context() as patch:
        patch.setattr(decoding.devices, "memory", lambda device: 0)
        stacked = write(lm, ROWS, 7, decode, copies=2, keys=keys)
        assert isinstance(stacked.cache.key, jax.Array)
    apart = write(lm, ROWS, 7, decode, copies=2, keys=keys)
    assert len(apart.cache.key) == lm.config.num_hidden_layers
    # What is held already is used, however little is left.
    monkeypatch.setattr(decoding.devices, "memory", lambda device: 0)
    again = write(lm, ROWS, 7, decode, copies=2, keys=keys)
    assert again.tokens.tolist() == apart.tokens.tolist()
    assert len(again.cache.key) == lm.config.num_hidden_layers
    assert apart.tokens.tolist() == stacked.tokens.tolist()
    for name in FEATURES:
        one, two = apart.features[name], stacked.features[name]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), one, two)


@pytest.mark.parametrize(
    ("dtype", "tied"), [(jnp.float32, True), (jnp.bfloat16, False)]
)
def test_where_weights_lie_changes_no_number(lm, dtype, tied):
    """Of few tokens and of many, alone and together; with biases."""
    settings = {"tie_word_embeddings": tied, "qkv_bias": True}
    config = dataclasses.replace(lm.config, **settings)
    one = random(config, jax.random.key(1), dtype)
    moved = jax.tree.map(
        lambda x: x + jnp.linspace(0, 0.1, x.shape[-1], dtype=x.dtype), one.params
    )
    one = dataclasses.replace(one, params=moved)
    for shape in ((1, 1), (3, 5), (3, 30)):
        tokens = jax.random.randint(jax.random.key(3), shape, 0, config.vocab_size)
        want, got = (np.asarray(model.forward(tokens)) for model in (one, one.apart))
        exact = 1e-5 if dtype == jnp.float32 else 0.02
        np.testing.assert_allclose(got, want, atol=exact * np.abs(want).max())


def test_features_are_those_of_reading_what_was_written(lm):
    new, copies = 6, 2
    keys = jax.random.split(jax.random.key(4), 2 * copies)
    decode = how(WARM, **FEATURES)
    state = write(lm, ROWS, new, decode, copies=copies, keys=keys)
    state = decoding.read_last(lm.apart, state, decode)
    batch = jax.tree.map(lambda x: jnp.repeat(x, copies, axis=0), prompts(ROWS))
    grow = [(0, 0), (0, new - 1)]

    def mask(name, fill):
        whole = jnp.pad(getattr(batch, name), grow)
        return whole.at[:, batch.prompt_length :].set(fill)

    whole = type(batch)(
        tokens=mask("tokens", state.tokens),
        valid=mask("valid", True),
        context=mask("context", False),
        document=mask("document", False),
        question=mask("question", False),
        offsets=np.zeros((2 * copies, new, 2), np.int32),
        prompt_length=batch.prompt_length,
    )
    want = jaxhal.read(lm, whole, FEATURES)
    for name in FEATURES:
        np.testing.assert_allclose(
            state.features[name], want[name], atol=2e-4, err_msg=name
        )
    np.testing.assert_allclose(state.logprob, want["logprob"], atol=1e-4)


def test_a_repetition_penalty_counts_prompt_and_response(lm):
    heavy = Sampling(repetition_penalty=1e6, temperature=0.0)
    state = write(lm, ROWS, 12, how(heavy), copies=1)
    for prompt, tokens in zip(ROWS, state.tokens.tolist(), strict=True):
        assert len({*prompt, *tokens}) == len(prompt) + len(tokens)


def _published(logits, sampling, seen):
    """The warpers of Hugging Face transformers, by sorting, for one row."""
    x = logits.astype(np.float64)
    by = sampling.repetition_penalty
    x = np.where(seen, np.where(x > 0, x / by, x * by), x) / sampling.temperature
    if sampling.top_k:
        x[x < np.sort(x)[::-1][: sampling.top_k][-1]] = -np.inf
    if sampling.top_p and sampling.top_p < 1:
        order = np.argsort(-x, kind="stable")
        p = np.exp(x - x.max())[order]
        before = np.cumsum(p / p.sum()) - p / p.sum()
        x[order[before >= sampling.top_p]] = -np.inf
    if sampling.min_p:
        p = np.exp(x - x.max())
        x[p < sampling.min_p] = -np.inf
    return x


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.none() | st.integers(1, 70),
    top_p=st.none() | st.sampled_from([0.05, 0.33, 0.9, 1.0]),
    min_p=st.none() | st.sampled_from([0.01, 0.3, 1.0]),
    penalty=st.sampled_from([1.0, 1.3, 0.7]),
)
def test_warping_equals_sorting(seed, temperature, top_k, top_p, min_p, penalty):
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(2, 61)) * 4).astype(np.float32)
    seen = rng.random((2, 61)) < 0.2
    sampling = Sampling(penalty, temperature, top_k, top_p, min_p)
    got = np.asarray(warp(jnp.asarray(logits), sampling, jnp.asarray(seen)))
    for row in range(2):
        want = _published(logits[row], sampling, seen[row])
        assert (np.isfinite(got[row]) == np.isfinite(want)).all()
        kept = np.isfinite(want)
        want = want - want.max()
        np.testing.assert_allclose(got[row][kept], want[kept], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-45])
def test_the_lowest_temperatures_take_the_likeliest(temperature):
    logits = jax.random.normal(jax.random.key(0), (3, 61))
    keys, want = jax.random.split(jax.random.key(1), 3), logits.argmax(-1).tolist()
    assert choose(logits, keys, Sampling(temperature=temperature)).tolist() == want
    each = jnp.full(3, temperature), jnp.ones(3)
    assert choose_each(logits, keys, *each).tolist() == want


def test_ties_at_the_edge_stay():
    logits = jnp.log(jnp.array([[0.4, 0.2, 0.2, 0.2]]))
    assert jnp.isfinite(warp(logits, Sampling(top_k=2))).tolist() == [[True] * 4]
    assert jnp.isfinite(warp(logits, Sampling(top_p=0.5))).tolist() == [[True] * 4]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(top_p=0.7, temperature=0.8),
        Sampling(top_k=7),
        Sampling(min_p=0.05),
    ],
)
def test_draws_follow_the_distribution(sampling):
    from scipy.stats import chisquare

    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(1, 300)) * 1.5, jnp.float32)
    p = np.asarray(jax.nn.softmax(warp(logits, sampling)), np.float64)[0]
    count = 40_000
    keys = jax.random.split(jax.random.key(7), count)
    drawn = choose(jnp.broadcast_to(logits, (count, 300)), keys, sampling)
    seen = np.bincount(drawn, minlength=300)
    assert (seen[p == 0] == 0).all()
    common = p * count >= 5
    rare = [p[~common].sum() * count], [seen[~common].sum()]
    keep = [1] if rare[0][0] >= 5 else []
    expected = np.concatenate([p[common] * count, *[rare[0]] * len(keep)])
    got = np.concatenate([seen[common], *[rare[1]] * len(keep)])
    assert chisquare(got, expected * got.sum() / expected.sum()).pvalue > 1e-3


def test_no_draw_has_probability_zero():
    """Rounding of sums, at both ends of the unit interval, and lone tokens."""
    from jaxhal.generation.sampling import _inverse

    rng = np.random.default_rng(1)
    p = rng.random((64, 700)) * (rng.random((64, 700)) < 0.02)
    p[:, 0] = p[:, -1] = 0
    p[np.arange(64), rng.integers(1, 699, 64)] += 1e-6
    p = jnp.asarray(p / p.sum(1, keepdims=True), jnp.float32)
    for u in (0.0, 1e-9, 0.5, 1 - 2.0**-24, 1 - 2.0**-23):
        token = _inverse(p, jnp.full(64, u, jnp.float32))
        assert (p[jnp.arange(64), token] > 0).all()


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(temperature=-0.1), "temperature is -0.1; give a number at least 0"),
        (dict(temperature=float("nan")), "temperature is nan"),
        (dict(top_k=0), "top_k is 0; give at least 1"),
        (dict(top_p=0.0), "top_p is 0.0; give a number above 0 and at most 1"),
        (dict(top_p=1.2), "top_p is 1.2"),
        (dict(min_p=0.0), "min_p is 0.0"),
        (dict(repetition_penalty=0.0), "repetition_penalty is 0.0; give a number"),
        (dict(temperature=float("inf")), "temperature is inf"),
    ],
)
def test_wrong_sampling(wrong, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**wrong)
