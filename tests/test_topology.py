import gudhi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ripser
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.csgraph import minimum_spanning_tree

import oracles
from jaxhal.features.arrays import causal_attention, static_int, to_jax
from jaxhal.features.topology import (
    MaxPromptAttention,
    MTopDiv,
    folded,
    mtop_div,
    spanning_forest,
    unfolded,
)

# Few shapes, since each compiles once: (seq, prompt) with R = 1, P = 1 and both.
SHAPES = [(2, 1), (7, 1), (7, 6), (12, 5), (33, 20)]
drawn = {
    "seed": st.integers(0, 2**32 - 1),
    "kind": st.sampled_from(oracles.KINDS),
    "shape": st.sampled_from(SHAPES),
}
quick = settings(max_examples=30, deadline=None, derandomize=True)
paddings = st.sampled_from([(3, 0), (0, 4), (3, 4)])


def ripser_deaths(distance):
    bars = ripser.ripser(distance, distance_matrix=True, maxdim=0)["dgms"][0]
    return bars[np.isfinite(bars[:, 1]), 1].sum()


def gudhi_deaths(distance):
    rips = gudhi.RipsComplex(distance_matrix=distance)  # type: ignore[attr-defined]
    tree = rips.create_simplex_tree(max_dimension=1)
    tree.compute_persistence(min_persistence=-1.0)
    bars = tree.persistence_intervals_in_dimension(0)
    return bars[np.isfinite(bars[:, 1]), 1].sum()


@pytest.mark.parametrize("kind", oracles.KINDS)
@pytest.mark.parametrize("seq, prompt", [*SHAPES, (150, 40)])
def test_equals_the_literal_algorithm_and_two_homology_libraries(seq, prompt, kind):
    attention = oracles.causal_attention([seq, prompt], 3, seq, kind=kind)
    got = mtop_div(attention, prompt)
    assert got.shape == (3,) and got.dtype == jnp.float32
    for head, score in zip(attention, got, strict=True):
        distance = oracles.pseudo_distance(head, prompt)
        assert score == pytest.approx(oracles.mtop_div(head, prompt), abs=1e-4)
        assert score == pytest.approx(ripser_deaths(distance), abs=1e-4)
        assert score == pytest.approx(gudhi_deaths(distance), abs=1e-4)


def test_equals_them_on_a_long_text():
    attention = oracles.causal_attention(0, 1500, kind="peaked")
    distance = oracles.pseudo_distance(attention, 900)
    got = float(mtop_div(attention, 900))
    assert got == pytest.approx(oracles.mtop_div(attention, 900), abs=1e-4)
    assert got == pytest.approx(ripser_deaths(distance), abs=1e-4)
    assert got == pytest.approx(gudhi_deaths(distance), abs=1e-4)


def test_negative_attention_is_no_attention():
    attention = oracles.causal_attention(2, 9)
    attention[-1] *= -1
    want = oracles.mtop_div(attention, 4)
    assert float(mtop_div(attention, 4)) == pytest.approx(want, abs=1e-5)
    assert want == pytest.approx(oracles.mtop_div(np.maximum(attention, 0), 4))


def test_only_earlier_tokens_count():
    attention = oracles.causal_attention(12, 9)
    similarity = np.c_[oracles.max_prompt(attention, 4), attention[4:, 4:]]
    want = oracles.mtop_div(attention, 4)
    similarity[:, 1:] += np.triu(np.full((5, 5), 0.9))
    _, weights = spanning_forest(jnp.asarray(similarity), jnp.ones(5, bool))
    assert float(weights.sum()) == pytest.approx(want, abs=1e-5)


def test_scipy_needs_its_weights_shifted():
    # A weight of 0 is no edge to SciPy, and the prompt is made of them.
    attention = oracles.causal_attention(1, 24, kind="ties")
    distance = oracles.pseudo_distance(attention, 10)
    shifted = minimum_spanning_tree(distance + 1.0).sum() - 23
    assert float(mtop_div(attention, 10)) == pytest.approx(shifted, abs=1e-5)
    assert abs(minimum_spanning_tree(distance).sum() - shifted) > 0.1


@quick
@given(**drawn)
def test_bounds(seed, kind, shape):
    (seq, prompt), response = shape, shape[0] - shape[1]
    attention = oracles.causal_attention(seed, seq, kind=kind)
    mean = float(mtop_div(attention, prompt)) / response
    earlier = np.tril(attention, -1)[prompt:].max(-1)
    assert -1e-6 <= mean <= 1 - earlier.mean() + 1e-6
    hung_from_prompt = 1 - oracles.max_prompt(attention, prompt).mean()
    assert mean <= hung_from_prompt + 1e-6 <= 1 + 2e-6


@quick
@given(**drawn)
def test_equals_the_control_when_the_response_ignores_itself(seed, kind, shape):
    seq, prompt = shape
    attention = oracles.causal_attention(seed, seq, kind=kind)
    attention[prompt:, prompt:] *= np.eye(seq - prompt)
    control = 1 - oracles.max_prompt(attention, prompt).mean()
    mean = mtop_div(attention, prompt) / (seq - prompt)
    np.testing.assert_allclose(mean, control, atol=1e-6)


@quick
@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([1e-3, 1e-1]))
def test_is_continuous(seed, scale):
    attention = oracles.causal_attention(seed, 12, kind="peaked")
    noise = np.random.default_rng(seed).uniform(-scale, scale, attention.shape)
    moved = np.tril(np.maximum(attention + noise, 0)).astype(np.float32)
    change = mtop_div(moved, 5) - mtop_div(attention, 5)
    assert abs(float(change)) <= 7 * scale + 1e-5


@quick
@given(**drawn | {"shape": st.sampled_from(SHAPES[1:4]), "padding": paddings})
def test_padding_anywhere_changes_nothing(seed, kind, shape, padding):
    (seq, prompt), (left, right) = shape, padding
    attention = oracles.causal_attention(seed, 2, seq, kind=kind)
    want = np.asarray(mtop_div(attention, prompt))
    for garbage in (0.0, 1.0, np.nan):
        matrix, view = oracles.padded(
            attention, prompt, left=left, right=right, garbage=garbage
        )
        total = oracles.reduce(MTopDiv(normalize=False), matrix, view)
        np.testing.assert_allclose(total, want, atol=1e-5)
        mean = oracles.reduce(MTopDiv(), matrix, view, block=5)
        np.testing.assert_allclose(mean, want / (seq - prompt), atol=1e-5)
        best = oracles.reduce(MaxPromptAttention(), matrix, view, block=2)
        unpadded = oracles.max_prompt(attention, prompt)
        np.testing.assert_array_equal(best[:, : seq - prompt], unpadded)
        assert not best[:, seq - prompt :].any()


def test_holes_between_tokens_are_no_bridges():
    # Token 1 is invalid and close to both its neighbours, which are far apart.
    similarity = jnp.array(
        [[0.1, 0.0, 0.0, 0.0], [0.9, 0.9, 0.0, 0.0], [0.0, 0.2, 0.9, 0.0]]
    )
    view = oracles.padded(np.eye(4, dtype=np.float32), 1)[1]
    view = view._replace(valid=jnp.array([True, True, False, True]))
    packed = MTopDiv().pack(similarity, view)
    assert MTopDiv().finish(packed, view) == pytest.approx((0.9 + 0.8) / 2)


def test_empty_response_scores_zero():
    matrix, view = oracles.padded(
        oracles.causal_attention(0, 2, 5), 5, right=3, garbage=1.0
    )
    for reducer in (MTopDiv(), MTopDiv(normalize=False)):
        np.testing.assert_array_equal(oracles.reduce(reducer, matrix, view), [0, 0])


def test_leading_dimensions_and_heads():
    attention = oracles.causal_attention(3, 2, 3, 4, 12, kind="sink")
    got = np.asarray(mtop_div(attention, 5))
    assert got.shape == (2, 3, 4)
    for index in np.ndindex(got.shape):
        single = mtop_div(attention[index], 5)
        assert single.shape == ()
        np.testing.assert_allclose(single, got[index], rtol=1e-6)
    order = [2, 0, 3, 1]
    np.testing.assert_array_equal(mtop_div(attention[:, :, order], 5), got[..., order])
    stacked = mtop_div(tuple(attention), np.int64(5))
    np.testing.assert_array_equal(stacked, got)
    assert mtop_div(attention[:0], 5).shape == (0, 3, 4)


def test_jit_and_vmap_equal_eager():
    attention = jnp.asarray(oracles.causal_attention(4, 3, 12, kind="ties"))
    eager = mtop_div(attention, 5)
    jitted = jax.jit(mtop_div, static_argnames="prompt_length")
    np.testing.assert_allclose(jitted(attention, prompt_length=5), eager, rtol=1e-6)
    mapped = jax.vmap(lambda one: mtop_div(one, 5))(attention)
    np.testing.assert_allclose(mapped, eager, rtol=1e-6)
    with jax.disable_jit():
        np.testing.assert_allclose(mtop_div(attention, 5), eager, rtol=1e-6)


def test_gradient_marks_one_edge_for_each_response_token():
    attention = jnp.asarray(oracles.causal_attention(5, 4, 12, kind="peaked"))
    gradient = np.asarray(jax.grad(lambda a: mtop_div(a, 5).sum())(attention))
    np.testing.assert_array_equal(np.unique(gradient), [-1, 0])
    np.testing.assert_array_equal(gradient.sum((-1, -2)), [-7] * 4)
    assert not np.triu(gradient[:, 5:, 5:]).any() and not gradient[:, :5].any()
    # The marked edges are the forest: their weights add up to it.
    weights = np.where(gradient < 0, 1 - attention, 0).sum((-1, -2))
    np.testing.assert_allclose(weights, mtop_div(attention, 5), rtol=1e-5)


@pytest.mark.parametrize("kind", ["ties", "zeros"])
def test_gradients_are_finite_on_ties_and_padding(kind):
    attention = oracles.causal_attention(6, 1, 9, kind=kind)
    matrix, view = oracles.padded(attention, 4, left=2, right=3)

    def score(probs):
        rows = MTopDiv().rows(probs[view.prompt_length :], view)
        return MTopDiv().finish(MTopDiv().pack(rows, view), view)

    gradient = np.asarray(jax.grad(score)(matrix[0]))
    assert np.isfinite(gradient).all() and gradient.sum() == pytest.approx(-1, abs=1e-5)
    assert not gradient[-3:].any()


def test_any_framework():
    torch = pytest.importorskip("torch")
    attention = oracles.causal_attention(7, 2, 12)
    want = np.asarray(mtop_div(attention, 5))
    tensor = torch.tensor(attention, requires_grad=True)
    np.testing.assert_array_equal(mtop_div(tensor, 5), want)
    np.testing.assert_array_equal(mtop_div((tensor, tensor), 5), [want, want])
    half = tensor.to(torch.bfloat16)
    np.testing.assert_array_equal(
        mtop_div(half, 5), mtop_div(half.detach().float().numpy(), 5)
    )
    np.testing.assert_allclose(mtop_div(half, 5), want, atol=7 * 2**-8)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, jnp.bfloat16])
def test_any_dtype(dtype):
    attention = oracles.causal_attention(8, 2, 12)
    rounded = attention.astype(dtype)
    want = mtop_div(rounded.astype(np.float32), 5)
    for same in (rounded, jnp.asarray(rounded), rounded.tolist()):
        got = mtop_div(same, 5)
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(want, mtop_div(attention, 5), atol=7 * 2**-8)


@pytest.mark.parametrize(
    "change, prompt_length, message",
    [
        (lambda a: a[0, 0], 2, r"shape \(6,\)"),
        (lambda a: a[:, :-1], 2, r"shape \(2, 5, 6\)"),
        (lambda a: a, 0, r"prompt_length is 0 .* 1\.\.5"),
        (lambda a: a, 6, "prompt_length is 6"),
        (lambda a: a, -1, "prompt_length is -1"),
        (lambda a: a[:, :1, :1], 1, "prompt_length is 1 .* 1 tokens"),
        (lambda a: a.swapaxes(-1, -2), 2, "later columns"),
        (lambda a: np.where(a == a[1, 4, 2], np.nan, a), 2, r"\[1, 4, 2\] is nan"),
        (lambda a: np.where(a == a[1, 4, 2], np.inf, a), 2, r"\[1, 4, 2\] is inf"),
        (lambda a: a + 1e-5, 2, r"\[0, 1, 2\]"),
    ],
)
def test_bad_values_are_named(change, prompt_length, message):
    attention = oracles.causal_attention(9, 2, 6)
    with pytest.raises(ValueError, match=message):
        mtop_div(change(attention), prompt_length)
    with pytest.raises(ValueError, match=message):
        mtop_div(jnp.asarray(change(attention)), prompt_length)


def test_bad_types_are_named():
    attention = oracles.causal_attention(9, 6)
    with pytest.raises(TypeError, match="prompt_length is traced"):
        jax.jit(mtop_div)(attention, 2)
    with pytest.raises(TypeError, match="prompt_length is 2.5"):
        static_int("prompt_length", 2.5)
    for nothing in (None, (None, None), "text", [[1.0], [0.5, 0.5]]):
        with pytest.raises(TypeError, match="eager"):
            to_jax(nothing)


def test_rows_of_padding_may_hold_anything():
    # Left padding in Hugging Face leaves rows there that no causal mask would allow.
    attention = oracles.causal_attention(10, 8)
    want = mtop_div(attention, 4)
    attention[:2] = np.nan
    assert mtop_div(attention, 4) == want
    assert np.isnan(causal_attention(attention, 4)[0, 0])


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_half_the_memory_holds_all_that_counts(count):
    rows = np.random.default_rng(count).normal(size=(count, 1 + count))
    packed = folded(jnp.asarray(rows, jnp.float32))
    assert packed.shape == ((count + 1) // 2, 1 + count)
    counts = np.tri(count, 1 + count, dtype=bool)
    got = np.asarray(unfolded(packed))
    np.testing.assert_array_equal(got[counts], np.float32(rows)[counts])
