"""MultiMax and the max of rolling means, against loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from jaxhal.classifiers.multimax import MultiMax, fit_multimax, multimax_logits
from jaxhal.detectors import build

ROWS, TOKENS, WIDTH = 60, 7, 5
LENGTHS = np.array([0, 1, 2, 3, 5, 7])


def slow(params, hidden, length, window):
    """The paper's formula, a head and a window at a time."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, float), params)
    y = [np.maximum((x - p.mean) / p.std @ p.w_in + p.b_in, 0) for x in hidden[:length]]
    total = float(p.b)
    for query, value in zip(p.query.T, p.value.T, strict=True):
        w, best = min(window, length), []
        for end in range(w, length + 1) if length else ():
            part = y[end - w : end]
            alpha = np.exp([query @ one for one in part])
            best.append(alpha @ [value @ one for one in part] / alpha.sum())
        total += max(best, default=0.0)
    return total


@pytest.mark.parametrize("window", [1, 3, 10])
def test_logits_are_those_of_the_formula(window):
    rng = np.random.default_rng(window)
    shapes = (WIDTH, 8), (8,), (8, 4), (8, 4), (), (WIDTH,)
    drawn = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    params = MultiMax(*drawn, jnp.asarray(rng.uniform(0.5, 2, WIDTH), jnp.float32))
    hidden = np.float32(rng.normal(size=(len(LENGTHS), TOKENS, WIDTH)))
    valid = np.arange(TOKENS) < LENGTHS[:, None]
    wild = np.where(valid[..., None], hidden, np.float32(1e9))
    wanted = [slow(params, x, n, window) for x, n in zip(hidden, LENGTHS, strict=True)]
    for given in (hidden, wild):
        found = multimax_logits(params, given, valid, window)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    longer = np.pad(hidden, [(0, 0), (0, 4), (0, 0)], constant_values=7)
    found = multimax_logits(params, longer, np.pad(valid, [(0, 0), (0, 4)]), window)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [1, 3])
def test_a_few_tokens_are_found(window):
    """Where a mean over all tokens would drown them: one, or three in a row."""
    rng = np.random.default_rng(0)
    y, valid = np.arange(ROWS) % 2, np.ones((ROWS, TOKENS), bool)
    hidden = np.float32(rng.normal(size=(ROWS, TOKENS, WIDTH)))
    for row, start in enumerate(rng.integers(0, TOKENS - window + 1, ROWS)):
        hidden[row, start : start + window, 0] += 5 * y[row]
    train, stop = np.float32(np.arange(ROWS) < 30), np.float32(np.arange(ROWS) >= 45)
    flat = hidden.reshape(-1, WIDTH), np.repeat(np.arange(ROWS), TOKENS)
    params = fit_multimax(jax.random.key(0), *flat, y, train, stop, window)
    score = np.asarray(multimax_logits(params, hidden, valid, window))
    assert roc_auc_score(y[30:45], score[30:45]) > 0.9
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in params)
    queries = jax.random.split(jax.random.key(0), 3)[1]
    moved = params.query - jax.random.normal(queries, params.query.shape) / 64
    assert (jnp.abs(moved).max() > 1e-3) == (window > 1)


def test_bad_windows_and_what_tells_detectors_apart():
    one, ten = (build({"multimax_probe": {"window": n}}) for n in (1, 10))
    assert one is build("multimax_probe") and one.summary != ten.summary
    zeros = np.zeros((2, 3, 4), np.float32)
    with pytest.raises(ValueError, match="window is 0"):
        y = np.arange(2)
        fit_multimax(jax.random.key(0), zeros[:, 0], y, y, [1, 1], [1, 1], window=0)
