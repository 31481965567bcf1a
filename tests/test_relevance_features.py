"""Resampling and the threshold rule against the published procedure, written slowly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxhal.features.relevance import (
    bin_weights,
    normalized,
    profile_level,
    resample,
)

LENGTHS = [(1, 1), (1, 7), (5, 5), (7, 3), (3, 7), (110, 47), (47, 110), (235, 412)]


def slow_resample(values, bins, padding):
    """Means of slices, as in the published loop; eq. 7-9 count from 1."""
    out = []
    for i in range(bins):
        start, end = i * len(values) // bins, (i + 1) * len(values) // bins
        if end > start:
            out.append(np.mean(values[start:end]))
        else:
            out.append(values[start] if padding == "last" else 0.0)
    return np.array(out)


@pytest.mark.parametrize(("count", "bins"), LENGTHS)
@pytest.mark.parametrize("padding", ["last", "zeros"])
def test_resample_is_the_published_loop(count, bins, padding):
    values = np.random.default_rng([count, bins]).normal(size=count).astype(np.float32)
    want = slow_resample(values.astype(float), bins, padding)
    np.testing.assert_allclose(resample(values, bins, padding=padding), want, atol=1e-6)


@pytest.mark.parametrize("padding", ["last", "zeros"])
def test_padding_belongs_to_no_bin(padding):
    values = np.arange(1.0, 8.0, dtype=np.float32)
    valid = np.array([False, False, True, True, True, False, False])
    for bins in (2, 3, 5):
        ours = resample(values, bins, valid, padding)
        want = slow_resample(values[valid], bins, padding)
        np.testing.assert_allclose(ours, want, rtol=1e-6)


def test_last_repeats_to_the_end_and_zeros_draw_a_comb():
    assert resample(jnp.array([3.0, 5.0]), 5).tolist() == [3.0, 3.0, 3.0, 5.0, 5.0]
    comb = resample(jnp.array([3.0, 5.0]), 5, padding="zeros")
    assert comb.tolist() == [0.0, 0.0, 3.0, 0.0, 5.0]


def test_nothing_valid_gives_zeros():
    assert (resample(jnp.ones(4), 3, np.zeros(4, bool)) == 0).all()
    assert profile_level(jnp.ones(4), np.zeros(4, bool)) == 0.5


def test_means_are_kept_when_bins_divide():
    values = np.random.default_rng(1).normal(size=60).astype(np.float32)
    assert float(resample(values, 12).mean()) == pytest.approx(values.mean(), abs=1e-6)


def slow_level(values):
    bins = slow_resample(values, 110, "zeros")[5:-5]
    return ((bins - bins.min()) / (bins.max() - bins.min())).mean()


@pytest.mark.parametrize("count", [30, 110, 300])
def test_level_is_the_published_rule(count):
    values = np.random.default_rng(count).normal(size=count).astype(np.float32)
    want = slow_level(values.astype(float))
    assert float(profile_level(values)) == pytest.approx(want, abs=1e-5)
    # Scaled by its own extremes: strength does not count, sign does.
    assert float(profile_level(1000 * values)) == pytest.approx(want, abs=1e-5)


def test_whole_numbers_have_means():
    assert resample(np.array([1, 2, 3, 4]), 2).tolist() == [1.5, 3.5]


def test_a_constant_profile_has_no_shape():
    assert float(profile_level(np.full(200, 3.0, np.float32))) == 0.5


def test_normalized():
    rows = np.array([[3.0, -1.0], [0.0, 0.0]], np.float32)
    np.testing.assert_allclose(normalized(rows, "sum")[0], [0.75, -0.25], atol=1e-6)
    np.testing.assert_allclose(normalized(rows, "max")[0], [1, -1 / 3], atol=1e-6)
    assert (np.asarray(normalized(rows, "max"))[1] == 0).all()


def test_under_jit_and_vmap():
    values = np.random.default_rng(0).normal(size=(4, 11)).astype(np.float32)
    valid = np.arange(11) < np.array([[11], [3], [7], [1]])
    mapped = jax.jit(jax.vmap(lambda x, v: resample(x, 6, v)))(values, valid)
    for row in range(4):
        want = slow_resample(values[row][valid[row]], 6, "last")
        np.testing.assert_allclose(mapped[row], want, atol=1e-6)


def test_bad_input():
    with pytest.raises(ValueError, match="bins is 0"):
        bin_weights(np.ones(3, bool), 0)
    with pytest.raises(ValueError, match="padding is 'edge'"):
        resample(np.ones(3), 2, padding="edge")
    with pytest.raises(ValueError, match="by is 'mean'; use one of sum, max"):
        normalized(np.ones(3), "mean")
