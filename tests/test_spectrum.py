"""LapEigvals and SinkProbe: eigenvalues of the attention graph, and what makes them."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxhal
import oracles
from jaxhal.detectors import build
from jaxhal.features.arrays import reduce
from jaxhal.features.spectrum import LaplacianEigenvalues, SinkScores
from jaxhal.types import Example
from tiny_lm import tiny_lm


def laplacian(attention, prompt):
    """Of the graph whose edges response tokens draw, entry by entry."""
    size = len(attention)
    made = np.zeros((size, size))
    for i in range(size):
        seers = [u for u in range(size) if u >= max(i, prompt)]
        made[i, i] += np.mean([attention[u, i] for u in seers])
        for u in seers:
            made[u, i] -= attention[u, i]
    return made


@pytest.mark.parametrize("kind", oracles.KINDS)
@pytest.mark.parametrize("seq, prompt", [(2, 1), (7, 1), (7, 6), (12, 5), (33, 20)])
def test_equals_the_spectrum_of_the_whole_matrix(seq, prompt, kind):
    attention = oracles.causal_attention([seq, prompt], 3, seq, kind=kind)
    for top in (1, 4, 40):
        found = np.asarray(reduce(LaplacianEigenvalues(top), attention, prompt))
        assert found.shape == (3, top)
        for head, ours in zip(attention, found, strict=True):
            values = np.linalg.eigvals(laplacian(head, prompt))
            assert np.abs(values.imag).max() < 1e-6
            wanted = np.sort(values.real)[::-1][:top]
            np.testing.assert_allclose(ours[: len(wanted)], wanted, atol=1e-5)
            assert not ours[len(wanted) :].any()


@pytest.mark.parametrize("seq, prompt", [(2, 1), (7, 6), (33, 20)])
def test_sink_scores_a_token_at_a_time(seq, prompt):
    attention = oracles.causal_attention([seq, prompt], 3, seq)
    found = np.asarray(reduce(SinkScores(5), attention, prompt))
    for head, ours in zip(attention, found, strict=True):
        scores = [
            np.mean([head[u, i] for u in range(max(i, prompt), seq)])
            for i in range(seq)
        ]
        wanted = sorted(scores, reverse=True)[:5]
        np.testing.assert_allclose(ours, wanted + [0.0] * (5 - len(wanted)), atol=1e-6)


def test_a_response_that_sees_all_is_the_published_code():
    """With one token before it, the whole matrix but its first row, as released."""
    attention = oracles.causal_attention(0, 9)
    received, left = attention.sum(0), np.arange(9, 0, -1)
    released = received / left - np.diagonal(attention)
    found = np.asarray(reduce(LaplacianEigenvalues(8), attention, 1))
    wanted = np.sort(np.append(released[1:], attention[1:, 0].mean()))[::-1][:8]
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_by_hand_and_a_bad_count():
    attention = jnp.array([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.2, 0.7, 0.1]])
    found = reduce(LaplacianEigenvalues(3), attention, 1)
    # 0.35 to the prompt; (0.5 + 0.7) / 2 - 0.5; 0.1 / 1 - 0.1.
    np.testing.assert_allclose(found, [0.35, 0.1, 0.0], atol=1e-6)
    with pytest.raises(ValueError, match="top is 0"):
        LaplacianEigenvalues(0)


@pytest.mark.parametrize(
    ("name", "reducer"),
    [("lap_eigvals", LaplacianEigenvalues(10)), ("sink_probe", SinkScores(10))],
)
def test_a_probe_looks_at_all_heads_of_all_layers(name, reducer):
    one = build(name)
    assert [feature for _, feature in one.features] == [reducer]
    lm = tiny_lm()
    examples = [
        Example("It is red.", context="A red box."),
        Example("No.", prompt="So?"),
    ]
    found = jaxhal.read(lm, lm.encode(examples), {"x": reducer})["x"]
    layers, rows, heads, top = found.shape
    want = np.moveaxis(np.asarray(found), 1, 0).reshape(rows, layers * heads * top)
    np.testing.assert_array_equal(one.inputs({one.features[0][0]: found}), want)
    assert top == 10 and (want[0] != want[1]).any()
