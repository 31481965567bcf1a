import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracles
from jaxhal.features.lookback import LookbackRatio, _lookback, lookback_ratio

# (seq, context, prompt): one context token, no new token at first, one response token.
SHAPES = [(2, 1, 1), (9, 1, 5), (9, 5, 5), (9, 4, 8), (30, 11, 14)]
quick = settings(max_examples=30, deadline=None, derandomize=True)


@pytest.mark.parametrize("kind", oracles.KINDS)
@pytest.mark.parametrize("seq, context, prompt", SHAPES)
def test_equals_double_loops(seq, context, prompt, kind):
    attention = oracles.causal_attention([seq, context], 3, seq, kind=kind)
    got = lookback_ratio(attention, context, prompt)
    assert got.shape == (3, seq - prompt) and got.dtype == jnp.float32
    want = [oracles.lookback_ratio(head, context, prompt) for head in attention]
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert (got >= 0).all() and (got <= 1).all()


def test_compares_means_not_sums():
    # Uniform attention looks nowhere in particular, however long the context is.
    attention = np.tri(12) / np.arange(1, 13)[:, None]
    np.testing.assert_allclose(lookback_ratio(attention, 7, 8), 0.5, atol=1e-6)


def test_reads_the_row_that_predicts():
    attention = oracles.causal_attention(0, 9)
    attention[-1] = np.nan_to_num(np.nan * attention[-1])  # it predicts nothing here
    attention[4] = [1, 0, 0, 0, 0, 0, 0, 0, 0]
    ratio = lookback_ratio(attention, 2, 5)
    assert ratio[0] == 1.0
    np.testing.assert_allclose(ratio, oracles.lookback_ratio(attention, 2, 5), 1e-5)


@quick
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(oracles.KINDS),
    shape=st.sampled_from(SHAPES[1:4]),
    padding=st.sampled_from([(3, 0), (0, 4), (3, 4)]),
)
def test_padding_anywhere_changes_nothing(seed, kind, shape, padding):
    (seq, context, prompt), (left, right) = shape, padding
    attention = oracles.causal_attention(seed, 2, seq, kind=kind)
    want = lookback_ratio(attention, context, prompt)
    for garbage in (0.0, 1.0, np.nan):
        matrix, view = oracles.padded(
            attention, prompt, left=left, right=right, context=context, garbage=garbage
        )
        # Padding is no context, and not new either, however the mask marks it.
        bare = view._replace(context=view.context & view.valid)
        for masks, block in ((view, None), (bare, 3)):
            got = oracles.reduce(LookbackRatio(), matrix, masks, block=block)
            np.testing.assert_allclose(got[:, : seq - prompt], want, atol=1e-6)
            assert not got[:, seq - prompt :].any()


def test_conventions_for_empty_spans():
    probs = jnp.array([[0.25, 0.75, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    none, first = jnp.zeros(3, bool), jnp.array([True, False, False])
    nothing, second = (
        jnp.zeros((3, 3), bool),
        jnp.zeros((3, 3), bool).at[:, 1].set(True),
    )
    np.testing.assert_allclose(_lookback(probs, first, second), [0.25, 0.0, 0.0])
    np.testing.assert_array_equal(_lookback(probs, first, nothing), [1.0, 1.0, 1.0])
    np.testing.assert_array_equal(_lookback(probs, none, second), [0.0, 0.0, 0.0])
    np.testing.assert_array_equal(_lookback(probs, none, nothing), [0.0, 0.0, 0.0])
    for context in (none, first):
        for new in (nothing, second):
            gradient = jax.grad(lambda p: _lookback(p, context, new).sum())(probs)  # noqa: B023
            assert np.isfinite(gradient).all()


def test_gradient_is_the_quotient_rule():
    attention = jnp.asarray(oracles.causal_attention(1, 9))
    gradient = jax.grad(lambda a: lookback_ratio(a, 3, 5)[1])(attention)
    back, ahead = float(attention[5, :3].mean()), float(attention[5, 3:6].mean())
    want = np.zeros((9, 9))
    want[5, :3] = ahead / (back + ahead) ** 2 / 3
    want[5, 3:6] = -back / (back + ahead) ** 2 / 3
    np.testing.assert_allclose(gradient, want, rtol=1e-4, atol=1e-6)


def test_leading_dimensions_heads_and_jit():
    attention = oracles.causal_attention(2, 2, 3, 4, 9, kind="sink")
    got = np.asarray(lookback_ratio(attention, 3, 5))
    assert got.shape == (2, 3, 4, 4)
    for index in np.ndindex(got.shape[:-1]):
        single = lookback_ratio(attention[index], 3, 5)
        np.testing.assert_allclose(single, got[index], rtol=1e-6)
    order = [2, 0, 3, 1]
    swapped = lookback_ratio(attention[:, :, order], 3, 5)
    np.testing.assert_array_equal(swapped, got[:, :, order])
    jitted = jax.jit(lookback_ratio, static_argnums=(1, 2))
    np.testing.assert_allclose(jitted(attention, 3, 5), got, rtol=1e-6)
    with jax.disable_jit():
        np.testing.assert_allclose(lookback_ratio(attention, 3, 5), got, rtol=1e-6)


def test_torch_equals_numpy():
    torch = pytest.importorskip("torch")
    attention = oracles.causal_attention(3, 2, 9)
    tensor = torch.tensor(attention, requires_grad=True)
    want = lookback_ratio(attention, 3, 5)
    np.testing.assert_array_equal(lookback_ratio(tensor, 3, 5), want)
    half = lookback_ratio(tensor.bfloat16(), 3, 5)
    np.testing.assert_allclose(half, want, atol=1e-2)


@pytest.mark.parametrize(
    "context_length, prompt_length, message",
    [
        (0, 5, r"context_length is 0 .* 1\.\.5"),
        (6, 5, "context_length is 6"),
        (1, 9, "prompt_length is 9"),
        (1, 0, "prompt_length is 0"),
    ],
)
def test_bad_lengths_are_named(context_length, prompt_length, message):
    attention = oracles.causal_attention(4, 9)
    with pytest.raises(ValueError, match=message):
        lookback_ratio(attention, context_length, prompt_length)


def test_bad_arrays_are_named():
    attention = oracles.causal_attention(5, 9)
    with pytest.raises(ValueError, match="shape"):
        lookback_ratio(attention[:-1], 3, 5)
    with pytest.raises(ValueError, match="later columns"):
        lookback_ratio(attention.T, 3, 5)
    with pytest.raises(TypeError, match="context_length is traced"):
        jax.jit(lookback_ratio, static_argnums=2)(attention, 3, 5)
