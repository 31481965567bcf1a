from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracles
from jaxhal.features.base import Reducer
from jaxhal.features.hidden import HiddenStates
from jaxhal.features.uncertainty import (
    TokenEntropy,
    TokenLogprob,
    over_tokens,
    token_entropy,
    token_logprob,
)


def logits_and_targets(seed, query=6, vocab=40, scale=3.0):
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(query, vocab)) * scale).astype(np.float32)
    return jnp.asarray(logits), jnp.asarray(rng.integers(vocab, size=query))


@pytest.mark.parametrize("scale", [0.0, 1.0, 10.0, 300.0])
def test_equal_loops_in_float64(scale):
    logits, target = logits_and_targets(0, scale=scale)
    logprob, entropy = token_logprob(logits, target), token_entropy(logits)
    want = oracles.token_logprob(logits, target)
    np.testing.assert_allclose(logprob, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(entropy, oracles.token_entropy(logits), atol=1e-5)
    assert (entropy >= 0).all() and (entropy <= np.log(40) + 1e-5).all()
    # Adding a constant to all logits changes no probability.
    np.testing.assert_allclose(token_entropy(logits + 7), entropy, atol=1e-4)


def test_underflow_gives_no_nan():
    # exp(-200) is 0 in float32, and a masked word has no probability at all.
    logits = jnp.array([[0.0, -200.0, -jnp.inf], [0.0, 0.0, -jnp.inf]])
    target = jnp.array([1, 0])
    np.testing.assert_allclose(token_entropy(logits), [0.0, np.log(2)], atol=1e-6)
    np.testing.assert_allclose(token_logprob(logits, target), [-200.0, -np.log(2)])
    for function in (token_entropy, lambda z: token_logprob(z, target)):
        gradient = jax.grad(lambda z: function(z).sum())(logits)  # noqa: B023
        assert np.isfinite(gradient).all()


def test_half_precision_is_computed_in_float32():
    logits, target = logits_and_targets(1)
    for dtype in (jnp.float16, jnp.bfloat16):
        half = logits.astype(dtype)
        exact = half.astype(jnp.float32)
        assert (
            token_entropy(half).dtype == token_logprob(half, target).dtype == "float32"
        )
        np.testing.assert_array_equal(token_entropy(half), token_entropy(exact))
        np.testing.assert_array_equal(
            token_logprob(half, target), token_logprob(exact, target)
        )


def test_gradient_of_the_log_probability_is_one_hot_minus_softmax():
    logits, target = logits_and_targets(2)
    gradient = jax.grad(lambda z: token_logprob(z, target).sum())(logits)
    want = jax.nn.one_hot(target, 40) - jax.nn.softmax(logits)
    np.testing.assert_allclose(gradient, want, atol=1e-5)


def test_aggregates():
    nats = jnp.array([1.0, 4.0, 1.0, 9.0])
    valid = jnp.array([True, True, True, False])
    assert over_tokens(nats, valid) == 2.0
    assert over_tokens(nats, valid, how="max") == 4.0
    np.testing.assert_array_equal(over_tokens(nats[None], valid[None]), [2.0])


@pytest.mark.parametrize("how", ["mean", "max"])
def test_padding_is_ignored_and_empty_scores_zero(how):
    values = jnp.array([0.5, jnp.nan, jnp.inf])
    assert over_tokens(values, jnp.zeros(3, bool), how) == 0.0
    assert over_tokens(values, jnp.array([True, False, False]), how) == 0.5
    assert over_tokens(values[:0], jnp.zeros(0, bool), how) == 0.0


@pytest.mark.parametrize("left, right", [(0, 0), (2, 3)])
@pytest.mark.parametrize("block", [None, 2])
def test_reducers_read_the_rows_that_predict(left, right, block):
    n, prompt, vocab = 9, 4, 40
    logits, _ = logits_and_targets(3, query=n)
    tokens = np.random.default_rng(4).integers(vocab, size=n)
    matrix = (
        jnp.full((left + n + right, vocab), jnp.nan).at[left : left + n].set(logits)
    )
    view = oracles.padded(np.eye(n), prompt, left=left, right=right)[1]
    padded_tokens = np.pad(tokens, (left, right))
    logprob = oracles.reduce(TokenLogprob(), matrix, view, padded_tokens, block)
    entropy = oracles.reduce(TokenEntropy(), matrix, view, padded_tokens, block)
    want = oracles.token_logprob(logits[prompt - 1 : -1], tokens[prompt:])
    np.testing.assert_allclose(logprob[: n - prompt], want, atol=1e-5)
    want = oracles.token_entropy(logits[prompt - 1 : -1])
    np.testing.assert_allclose(entropy[: n - prompt], want, atol=1e-5)
    assert not logprob[n - prompt :].any() and not entropy[n - prompt :].any()


@pytest.mark.parametrize("left, right", [(0, 0), (2, 3)])
def test_hidden_states(left, right):
    n, prompt, width = 7, 4, 5
    hidden = np.random.default_rng(5).normal(size=(n, width)).astype(np.float32)
    padding = ((left, right), (0, 0))
    matrix = jnp.asarray(np.pad(hidden, padding, constant_values=np.nan))
    view = oracles.padded(np.eye(n), prompt, left=left, right=right)[1]
    every = oracles.reduce(HiddenStates(), matrix, view)
    np.testing.assert_array_equal(every[: n - prompt], hidden[prompt:])
    assert every.shape == (n - prompt + right, width) and not every[3:].any()
    last = oracles.reduce(HiddenStates(tokens="last"), matrix, view)
    np.testing.assert_array_equal(last, hidden[-1])
    mean = oracles.reduce(HiddenStates(tokens="mean"), matrix, view)
    np.testing.assert_allclose(mean, hidden[prompt:].mean(0), rtol=1e-5)
    half = HiddenStates().rows(matrix.astype(jnp.bfloat16), view)
    assert half.dtype == jnp.float32


@pytest.mark.parametrize("tokens", ["last", "mean"])
def test_hidden_states_of_an_empty_response_are_zero(tokens):
    view = oracles.padded(np.eye(4), 4, right=2)[1]
    matrix = jnp.full((6, 3), 7.0)
    got = oracles.reduce(HiddenStates(tokens=tokens), matrix, view)
    np.testing.assert_array_equal(got, [0, 0, 0])


def test_hidden_states_options():
    assert HiddenStates().rowwise
    assert not HiddenStates(tokens="last").rowwise
    assert not HiddenStates(tokens="mean").rowwise
    assert HiddenStates((0, -1)) == HiddenStates((0, -1)) != HiddenStates((0,))
    assert len({HiddenStates((0, -1)), HiddenStates((0, -1))}) == 1
    with pytest.raises(ValueError, match=r"layers is \(\)"):
        HiddenStates(layers=())
    with pytest.raises(ValueError, match="tokens is 'first'"):
        # Past the type checker, which would refuse it first.
        HiddenStates.__post_init__(SimpleNamespace(layers=None, tokens="first"))


def test_reducers_say_what_they_read():
    reducers: list[Reducer] = [TokenLogprob(), TokenEntropy(), HiddenStates()]
    assert [r.reads for r in reducers] == ["logits", "logits", "hidden"]
    assert [r.row for r in reducers] == ["predictor", "predictor", "token"]
    assert all(r.rowwise for r in reducers)
