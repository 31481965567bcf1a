"""Forest edges and graph statistics, against slow versions and a homology library."""

import functools
import json

import gudhi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxhal
import oracles
import tiny
from jaxhal.features.arrays import reduce
from jaxhal.features.forest import Forest, SinkShare
from jaxhal.features.graphs import Barcode, VertexDegree
from jaxhal.features.topology import MTopDiv, mtop_div
from jaxhal.models.families import from_huggingface
from jaxhal.models.lm import random
from jaxhal.types import Batch

# Few shapes, since each compiles once: (seq, prompt) with R = 1, P = 1 and both.
SHAPES = [(2, 1), (7, 1), (7, 6), (12, 5), (33, 20)]
drawn = {
    "seed": st.integers(0, 2**32 - 1),
    "kind": st.sampled_from(oracles.KINDS),
    "shape": st.sampled_from(SHAPES),
}
forest = functools.partial(reduce, Forest())
quick = settings(max_examples=20, deadline=None, derandomize=True)
# (seq, prompt, left, right)
padded = drawn | {"shape": st.sampled_from([(2, 1, 3, 4), (7, 6, 0, 4), (12, 5, 3, 0)])}


def gudhi_bars(attention, prompt):
    """Finite deaths of the whole graph, less those of edges inside the prompt."""
    distance = oracles.pseudo_distance(attention, prompt)
    rips = gudhi.RipsComplex(distance_matrix=distance)  # type: ignore[attr-defined]
    tree = rips.create_simplex_tree(max_dimension=1)
    tree.compute_persistence(min_persistence=-1.0)
    bars = tree.persistence_intervals_in_dimension(0)[:, 1]
    return np.sort(bars[np.isfinite(bars)])[prompt - 1 :]


def reduced(reducer, matrix, view):
    """As ``oracles.reduce``, for rows that are no single array."""
    masks = view._replace(prompt_length=None)
    return _reduced(reducer, matrix, masks, view.prompt_length)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _reduced(reducer, matrix, masks, prompt_length):
    view = masks._replace(prompt_length=prompt_length)
    real = view.valid[prompt_length:]

    def clear(leaf):
        shape = [len(real), *[1] * (leaf.ndim - 1)]
        return jnp.where(real.reshape(shape), leaf, 0)

    def one(head):
        rows = reducer.rows(head[prompt_length:], view)
        rows = reducer.pack(jax.tree.map(clear, rows), view)
        return reducer.finish(rows, view)

    return jax.vmap(one)(matrix)


@pytest.mark.parametrize("kind", oracles.KINDS)
@pytest.mark.parametrize("seq, prompt", SHAPES)
def test_equals_joining_one_by_one(seq, prompt, kind):
    attention = oracles.causal_attention([seq, prompt], 3, seq, kind=kind)
    parents, weights = forest(attention, prompt)
    assert parents.shape == weights.shape == (3, seq - prompt)
    assert weights.dtype == jnp.float32
    for head in range(3):
        want_parents, want_weights = oracles.forest(attention[head], prompt)
        np.testing.assert_array_equal(parents[head], want_parents)
        np.testing.assert_array_equal(weights[head], want_weights)


@quick
@given(**drawn)
def test_is_a_spanning_forest_of_least_weight(seed, kind, shape):
    seq, prompt = shape
    attention = oracles.causal_attention(seed, seq, kind=kind)
    parents, weights = (np.asarray(part) for part in forest(attention, prompt))
    distance = oracles.pseudo_distance(attention, prompt)
    np.testing.assert_allclose(
        weights, distance[np.arange(prompt, seq), parents], atol=1e-6
    )
    for token in range(prompt, seq):
        steps = 0
        while token >= prompt:
            token, steps = parents[token - prompt], steps + 1
            assert steps <= seq - prompt
    np.testing.assert_allclose(
        np.sort(weights), gudhi_bars(attention, prompt), atol=1e-6
    )
    assert float(mtop_div(attention, prompt)) == pytest.approx(weights.sum(), abs=1e-5)


def test_a_parent_may_come_later():
    # Token 1 sees little of the prompt; token 2 hangs from it and looks back at 1.
    attention = np.array([[1, 0, 0], [0.1, 0.9, 0], [0.6, 0.4, 0]], np.float32)
    parents, weights = forest(attention, 1)
    assert parents.tolist() == [2, 0]
    np.testing.assert_allclose(weights, [0.6, 0.4], rtol=1e-6)


def test_ties_prefer_the_prompt_and_its_first_column():
    attention = np.tri(6, dtype=np.float32) * 0.25
    assert forest(attention, 3).parents.tolist() == [0, 0, 0]
    # No attention at all, or less than none, counts as a tie too.
    attention[3:] = np.tri(6, k=-1)[3:] * [-0.5, -0.25, 0, 0, 0, 0]
    parents, weights = forest(attention, 3)
    assert parents.tolist() == [0, 0, 0] and weights.tolist() == [1, 1, 1]
    # Between two tokens that have joined, the one that joined first: 4 before 3.
    attention[3, 0], attention[4, 1], attention[5, 3:5] = 0.25, 0.75, 0.5
    parents, weights = forest(attention, 3)
    assert parents.tolist() == [5, 1, 4] and weights.tolist() == [0.5, 0.25, 0.5]


@quick
@given(**padded)
def test_padding_moves_columns_and_nothing_else(seed, kind, shape):
    seq, prompt, left, right = shape
    attention = oracles.causal_attention(seed, 2, seq, kind=kind)
    parents, weights = (np.asarray(part) for part in forest(attention, prompt))
    share = (parents == 0).mean(-1)
    for garbage in (0.0, 1.0, np.nan):
        matrix, view = oracles.padded(
            attention, prompt, left=left, right=right, garbage=garbage
        )
        got = reduced(Forest(), matrix, view)
        np.testing.assert_array_equal(got.parents[:, : seq - prompt], left + parents)
        np.testing.assert_array_equal(got.weights[:, : seq - prompt], weights)
        assert (got.parents[:, seq - prompt :] == -1).all()
        assert not got.weights[:, seq - prompt :].any()
        np.testing.assert_allclose(reduced(SinkShare(), matrix, view), share, atol=1e-6)


def test_sink_share_counts_the_first_valid_column():
    attention = oracles.causal_attention(3, 4, 20, kind="sink")
    attention[0, 8:, 0] = 0.0
    want = [(oracles.forest(head, 8)[0] == 0).mean() for head in attention]
    assert want[0] == 0 and min(want[1:]) > 0.5
    matrix, view = oracles.padded(attention, 8, left=5, right=2, garbage=1.0)
    np.testing.assert_allclose(reduced(SinkShare(), matrix, view), want, rtol=1e-6)


@quick
@given(**padded)
def test_barcode_equals_a_homology_library(seed, kind, shape):
    seq, prompt, left, right = shape
    attention = oracles.causal_attention(seed, 2, seq, kind=kind)
    reducer = Barcode()
    want = [
        oracles.bar_statistics(gudhi_bars(head, prompt), reducer.thresholds)
        for head in attention
    ]
    for garbage in (0.0, np.nan):
        matrix, view = oracles.padded(
            attention, prompt, left=left, right=right, garbage=garbage
        )
        got = oracles.reduce(reducer, matrix, view, block=5)
        np.testing.assert_allclose(got, want, atol=2e-5)


@quick
@given(**padded)
def test_degrees_equal_counting(seed, kind, shape):
    seq, prompt, left, right = shape
    attention = oracles.causal_attention(seed, 2, seq, kind=kind)
    reducer = VertexDegree(thresholds=(0.05, 0.25, 0.5))
    want = [
        oracles.degree_statistics(head, prompt, reducer.thresholds)
        for head in attention
    ]
    for garbage in (0.0, 1.0, np.nan):
        matrix, view = oracles.padded(
            attention, prompt, left=left, right=right, garbage=garbage
        )
        got = oracles.reduce(reducer, matrix, view, block=5)
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_what_stands_where():
    attention = np.array([[[1, 0, 0], [0.5, 0.5, 0], [0.25, 0.75, 0]]], np.float32)
    matrix, view = oracles.padded(attention, 1)
    bars = Barcode(thresholds=(0.5,))  # 0.5 to the prompt, 0.25 to the other token
    total, mean, variance, longest, entropy, above = oracles.reduce(bars, matrix, view)[
        0
    ]
    assert total == 0.75 and mean == 0.375 and longest == 0.5
    assert variance == 0.125**2 and above == 1
    assert entropy == pytest.approx(np.log(3) - np.log(4) / 3, abs=1e-6)
    graph = VertexDegree(thresholds=(0.25, 0.5))
    got = oracles.reduce(graph, matrix, view)[0]
    assert got.tolist() == [3, 2, 2, 2, 1.5, 2]


def test_holes_between_tokens_join_nothing():
    view = oracles.padded(np.eye(4, dtype=np.float32), 1)[1]
    view = view._replace(valid=jnp.array([True, True, False, True]))
    # Edges to the prompt, then the attention of tokens 1, 2 (a hole) and 3.
    rows = jnp.array([[1, 0.0, 0, 0], [0, 0.9, 0, 0], [1, 0.9, 0.9, 0]])
    got = VertexDegree(thresholds=(0.5,)).finish(rows, view)
    np.testing.assert_allclose(got, [3, 2, 2])


def test_empty_response_is_zero_everywhere():
    matrix, view = oracles.padded(
        oracles.causal_attention(0, 2, 5), 5, right=3, garbage=1.0
    )
    for reducer in (Barcode(), VertexDegree(), SinkShare()):
        assert not np.asarray(reduced(reducer, matrix, view)).any()
    got = reduced(Forest(), matrix, view)
    assert (got.parents == -1).all() and not got.weights.any()


@pytest.mark.parametrize("root", [0.0, 1.0])
def test_gradients_are_finite_without_attention_and_without_bars(root):
    view = oracles.padded(np.eye(6, dtype=np.float32), 2)[1]
    rows = jnp.zeros((4, 5)).at[:, 0].set(root)
    bars = lambda rows: Barcode().finish(Barcode().pack(rows, view), view)  # noqa: E731
    gradient = jax.jit(jax.jacobian(bars))(rows)
    assert np.isfinite(gradient).all()


def test_leading_dimensions_frameworks_and_jit():
    attention = oracles.causal_attention(3, 2, 3, 12, kind="sink")
    parents, weights = forest(attention, 5)
    assert parents.shape == (2, 3, 7)
    jitted = jax.jit(forest, static_argnames="prompt_length")
    stacked = forest(tuple(attention), np.int64(5))
    for other in (jitted(attention, prompt_length=5), stacked):
        np.testing.assert_array_equal(other.parents, parents)
        np.testing.assert_array_equal(other.weights, weights)
    for index in np.ndindex(2, 3):
        np.testing.assert_array_equal(
            forest(attention[index], 5).parents, parents[index]
        )


def test_bad_input_is_named():
    attention = oracles.causal_attention(9, 6)
    with pytest.raises(ValueError, match=r"prompt_length is 6 .* 1\.\.5"):
        forest(attention, 6)
    with pytest.raises(ValueError, match="later columns"):
        forest(attention.T, 2)
    with pytest.raises(TypeError, match="eager"):
        forest(None, 2)
    for reducer in (Barcode, VertexDegree):
        for thresholds in ((), (0.0,), (0.5, 1.5), (float("nan"),)):
            with pytest.raises(ValueError, match="at least one, each above 0"):
                reducer(thresholds=thresholds)
        with pytest.raises(ValueError, match="twice"):
            reducer(thresholds=(0.5, 0.5))


@pytest.fixture(scope="module")
def lm():
    meta = json.loads((tiny.GOLDEN / "parity.json").read_text("utf-8"))
    config = from_huggingface(meta["llama-gqa"]["config"])
    return random(config, jax.random.key(0))


def test_rides_along_in_a_pass_of_the_model(lm):
    lengths, prompt, response = [(9, 5), (4, 1), (13, 8)], 16, 8
    tokens = np.random.default_rng(0).integers(3, 61, (3, 24)).astype(np.int32)
    column = np.arange(24)
    valid = np.array([(column >= 16 - p) & (column < 16 + r) for p, r in lengths])
    batch = Batch(
        np.where(valid, tokens, 0),
        valid,
        valid,
        valid,
        valid & False,
        np.zeros((3, response, 2), np.int32),
        prompt,
    )
    reducers = {
        "forest": Forest(),
        "sink": SinkShare(),
        "bars": Barcode(),
        "degrees": VertexDegree(),
        "total": MTopDiv(normalize=False),
    }
    got = jaxhal.read(lm, batch, reducers)
    layers, heads = lm.config.num_hidden_layers, lm.config.num_attention_heads
    parents, weights = got["forest"]
    assert parents.shape == weights.shape == (layers, 3, heads, response)
    np.testing.assert_allclose(weights.sum(-1), got["total"], rtol=1e-5)
    np.testing.assert_allclose(got["bars"][..., 0], got["total"], rtol=1e-5)
    assert got["degrees"].shape == (layers, 3, heads, 18)
    for row, (p, r) in enumerate(lengths):
        first, real = prompt - p, parents[:, row, :, :r]
        assert (real >= first).all() and (real < prompt + r).all()
        assert (parents[:, row, :, r:] == -1).all()
        share = (np.asarray(real) == first).mean(-1)
        np.testing.assert_allclose(got["sink"][:, row], share, rtol=1e-6)
