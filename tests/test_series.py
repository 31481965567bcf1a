"""Values of tokens with and without padding are the same values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxhal.classifiers import multimax, pooling
from jaxhal.classifiers.data import moments
from jaxhal.classifiers.train import fit_probe
from jaxhal.detectors.series import Ragged, Series, aligned_zeros, flat

COUNTS, WIDTH, SIZE = np.array([3, 0, 20, 1, 7]), 4, 24


def series(seed=0):
    """Answers with a gap among their tokens; padding holds what must not be seen."""
    rng = np.random.default_rng(seed)
    valid = np.zeros((len(COUNTS), SIZE), bool)
    for row, count in zip(valid, COUNTS, strict=True):
        row[rng.permutation(SIZE)[:count]] = True
    values = np.where(valid[..., None], rng.normal(size=(*valid.shape, WIDTH)), np.nan)
    return Series((np.float32(values), rng.random(valid.shape) < 0.5), valid)


def test_padding_comes_back_after_the_tokens():
    given = series()
    tokens = Ragged.of(given)
    assert len(tokens) == len(COUNTS) and Ragged.of(tokens) is tokens
    np.testing.assert_array_equal(tokens.counts, COUNTS)
    np.testing.assert_array_equal(tokens.rows, np.nonzero(given.valid)[0])
    for rows in (slice(None), slice(1, 4), np.array([4, 2, 2]), np.array([1])):
        (hidden, marked), valid = tokens[rows]
        some = np.arange(len(COUNTS))[rows]
        np.testing.assert_array_equal(valid.sum(1), COUNTS[some])
        assert valid.shape[1] == (24 if 2 in some else 16)
        assert not hidden[~valid].any() and not marked[~valid].any()
        for at, row in enumerate(some):
            own = given.valid[row]
            count = COUNTS[row]
            assert valid[at, :count].all()
            np.testing.assert_array_equal(hidden[at, :count], given.values[0][row, own])
            np.testing.assert_array_equal(marked[at, :count], given.values[1][row, own])


def test_parts_are_joined_in_the_order_of_their_answers():
    whole = Ragged.of(series())
    order = [3, 0, 4, 1, 2]
    parts = [Ragged.of(whole[np.array(some)]) for some in (order[:2], order[2:])]
    joined = Ragged.joined(parts, order)
    np.testing.assert_array_equal(joined.counts, whole.counts)
    for one, other in zip(joined.values, whole.values, strict=True):
        np.testing.assert_array_equal(one, other)
    assert joined.values[0].ctypes.data % 64 == 0


def test_a_device_takes_the_largest_arrays_as_they_are():
    made = aligned_zeros((5, 3), np.dtype(np.float32))
    if jax.devices()[0].platform == "cpu":
        assert jax.device_put(made).unsafe_buffer_pointer() == made.ctypes.data


@pytest.mark.parametrize("of", ["pooling", "1", "3"])
def test_a_fit_without_padding_is_that_with_it(of):
    """Trained through the logits of padded answers instead."""
    rng, rows = np.random.default_rng(0), 24
    y = np.arange(rows) % 2
    counts = rng.integers(0, 9, rows)
    hidden = np.float32(rng.normal(size=(rows, 9, WIDTH)))
    hidden[:, 0, 0] += 3 * y
    padded = Series(hidden, np.arange(9) < counts[:, None])
    train, stop = (np.float32(np.arange(rows) % 3 == part) for part in (0, 1))
    weights = [jnp.asarray(one, jnp.float32) for one in (y, train, stop)]
    key, moment = jax.random.key(1), moments(*flat_weight(padded, train))
    if of == "pooling":
        found = pooling.fit_pooling(key, *flat(padded), y, train, stop)
        query = jax.random.normal(key, (WIDTH,)) / jnp.sqrt(WIDTH)
        start = query, jnp.zeros(WIDTH), jnp.zeros(())

        def logits(params):
            return pooling.pooling_logits(pooling.Pooling(*params, *moment), *padded)

        expected = fit_probe(logits, start, *weights, 1e-2)
    else:
        window = int(of)
        found = multimax.fit_multimax(key, *flat(padded), y, train, stop, window)
        first, query, value = jax.random.split(key, 3)
        start = (
            jax.random.normal(first, (WIDTH, 64)) * jnp.sqrt(2 / WIDTH),
            jnp.zeros(64),
            jax.random.normal(query, (64, 10)) / 64,
            jax.random.normal(value, (64, 10)) / 64,
            jnp.zeros(()),
        )

        def logits(params):
            whole = multimax.MultiMax(*params, *moment)
            return multimax.multimax_logits(whole, *padded, window=window)

        expected = fit_probe(logits, start, *weights)
    for one, other in zip(found, (*expected, *moment), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-4)


def flat_weight(padded, weight):
    values, row = flat(padded)
    return jnp.asarray(values), jnp.asarray(weight[row])
