"""A recurrent classifier on a rule of order, against a slow NumPy network."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from jaxhal.classifiers.lstm import Cell, _batches, fit_lstm, lstm_logits

ROWS, TIME, WIDTH, HIDDEN = 120, 11, 3, 8
KEY = jax.random.key(0)
quick = functools.partial(fit_lstm, hidden=HIDDEN, learning_rate=2e-2, batch=16)


def pulses(seed=0, rows=ROWS):
    """One pulse a series: early where it is grounded, late where hallucinated."""
    rng = np.random.default_rng(seed)
    y = np.arange(rows) % 2
    size = rng.integers(4, 9, rows)
    at = rng.integers(0, size // 2) + y * (size // 2)
    series = rng.normal(0, 0.3, (rows, TIME, WIDTH))
    series[np.arange(rows), at, 0] += 3.0
    series = series * [1, 9, 1] + [30, 0, 0]
    return series.astype(np.float32), np.arange(TIME) < size[:, None], y


def parts():
    """Training rows, those to stop by, and a third that is neither."""
    part = np.arange(ROWS) // 2 % 4
    return np.float32(part < 2), np.float32(part == 2)


@functools.cache
def learnt():
    return quick(KEY, *pulses(), *parts())


def close(params, others, **tolerance):
    for leaf, other in zip(
        jax.tree.leaves(params), jax.tree.leaves(others), strict=True
    ):
        np.testing.assert_allclose(leaf, other, **tolerance)


def alike(logits, expected):
    """But for rounding, which training makes larger."""
    expected = np.asarray(expected)
    np.testing.assert_allclose(logits, expected, atol=0.02 * expected.std())


def slow_logits(params, series, valid):
    """One row, one step, one layer at a time, in float64."""

    def sigmoid(z):
        return 1 / (1 + np.exp(-z))

    params = jax.tree.map(lambda leaf: np.asarray(leaf, float), params)
    logits = []
    for row, there in zip(series.astype(float), valid, strict=True):
        inputs = [(x - params.mean) / params.std for x in row[there]]
        h = np.zeros(len(params.w))
        for name in ("layer0", "layer1"):
            cell = params.cells[name]
            h, c, outputs = np.zeros(len(params.w)), np.zeros(len(params.w)), []
            for x in inputs:
                i, f, g, o = np.split(x @ cell.w_in + h @ cell.w_hidden + cell.b, 4)
                c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
                h = sigmoid(o) * np.tanh(c)
                outputs.append(h)
            inputs = outputs
        logits.append(h @ params.w + params.b)
    return np.array(logits)


def test_it_learns_when_a_pulse_comes():
    series, valid, y = pulses(1)
    logits = np.asarray(lstm_logits(learnt(), series, valid))
    assert roc_auc_score(y, logits) > 0.9


def test_it_is_the_slow_network():
    series, valid, _ = pulses(1, 12)
    valid[3] = False
    params = learnt()._replace(b=jnp.float32(0.7))
    found = lstm_logits(params, series, valid)
    np.testing.assert_allclose(found, slow_logits(params, series, valid), atol=1e-5)
    assert found[3] == params.b
    alone = lstm_logits(params, series[0], valid[0])
    np.testing.assert_allclose(alone, found[0], rtol=1e-6)


def test_padding_changes_nothing():
    series, valid, y = pulses()
    expected = lstm_logits(learnt(), series, valid)
    found = lstm_logits(learnt(), series[:, :9], valid[:, :9])
    np.testing.assert_allclose(found, expected, atol=1e-6)
    # Steps with gaps before and between them, which hold anything.
    place = [1, 2, 4, 5, 6, 8, 9, 10, 0, 3, 7]
    series[~valid] = np.nan
    series[:, place], valid[:, place] = series.copy(), valid.copy()
    found = lstm_logits(learnt(), series, valid)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    gradient = jax.grad(lambda params: lstm_logits(params, series, valid).sum())
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient(learnt())))
    padded = quick(KEY, series, valid, y, *parts())
    series, valid, _ = pulses(1)
    alike(lstm_logits(padded, series, valid), lstm_logits(learnt(), series, valid))


def test_inputs_are_standardised_by_the_valid_steps_of_training_rows():
    series, valid, _ = pulses()
    rows = series[(parts()[0] > 0)[:, None] & valid]
    np.testing.assert_allclose(learnt().mean, rows.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(learnt().std, rows.std(0), rtol=1e-4)


def test_the_key_decides():
    close(quick(KEY, *pulses(), *parts()), learnt(), rtol=0)
    other = quick(jax.random.key(1), *pulses(), *parts())
    assert not np.allclose(other.cells["layer0"].w_in, learnt().cells["layer0"].w_in)


def test_rows_without_weight_change_nothing():
    series, valid, y = pulses()
    train, stop = parts()
    off = train + stop == 0
    series[off], valid[off], y[off] = 1e9, True, 1 - y[off]
    close(quick(KEY, series, valid, y, train, stop), learnt(), rtol=0)


def test_folds_fitted_at_once_are_those_fitted_alone():
    train, stop = parts()
    trains = np.stack([train, np.where(np.arange(ROWS) < 40, 0, train)])
    stops = np.stack([stop, np.where(np.arange(ROWS) > 90, 0, stop)])
    rows = pulses()

    def fold(train, stop):
        return quick(KEY, *rows, train, stop)

    mapped = jax.vmap(fold)(trains, stops)
    series, valid, _ = pulses(1)
    logits = jax.vmap(lstm_logits, (0, None, None))(mapped, series, valid)
    for number in range(2):
        alone = fold(trains[number], stops[number])
        alike(logits[number], lstm_logits(alone, series, valid))


def test_the_best_epoch_is_kept_even_the_start():
    """Rows to stop by that say the opposite end at the start."""
    series, valid, y = pulses()
    train, stop = parts()
    y = np.where(stop > 0, 1 - y, y)
    params = quick(KEY, series, valid, y, train, stop)
    assert (params.w == 0).all() and params.b == 0


def test_classes_count_the_same_however_rare():
    series, valid, _ = pulses()
    y = (np.arange(ROWS) % 8 == 0).astype(int)
    series = np.ones_like(series)  # nothing to learn but how rare a class is
    params = quick(KEY, series, valid, y, np.ones(ROWS), np.ones(ROWS))
    assert abs(float(params.b)) < 0.05
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params.cells))


def test_batches_hold_every_row_with_weight_once():
    weight = jnp.array([0.0, 2.0, 0.0, 1.0, 3.0, 0.0, 4.0])
    order = jax.random.uniform(KEY, (7,))
    rows, weights, count = _batches(order, weight, 3)
    assert rows.shape == weights.shape == (3, 3) and count == 2
    there = np.asarray(weights) > 0
    assert sorted(np.asarray(rows)[there]) == [1, 3, 4, 6]
    np.testing.assert_array_equal(weights[there], weight[rows[there]])
    assert there[:2].any(1).all() and not there[2:].any()
    assert list(rows[there]) == sorted([1, 3, 4, 6], key=lambda row: float(order[row]))


def test_bad_input_is_named():
    series, valid, y = pulses()
    train, stop = parts()
    broken = series.copy()
    broken[2, 0, 1] = np.nan
    for rows, message in (
        ((series[0], valid, y, train, stop), r"have shape \(11, 3\)"),
        (
            (series, valid[:, :2], y, train, stop),
            r"valid \(120, 2\); pass \[rows",
        ),
        ((series, valid, y[:5], train, stop), "do not pair up"),
        ((broken, valid, y, train, stop), r"features\[2, 0, 1\] is not finite"),
        ((series, valid, y, train, stop[:5]), r"stop has shape \(5,\) for 120 rows"),
        ((series, valid, y, train, -stop), r"stop\[4\] is -1.0"),
        ((series, valid, y, train * y, stop), "train leaves no grounded row"),
        ((series, valid, y, train, stop * 0), "stop leaves no hallucinated row"),
        ((series, valid & False, y, train, stop), "valid marks no step"),
    ):
        with pytest.raises(ValueError, match=message):
            quick(KEY, *rows)
    for name in ("hidden", "batch"):
        with pytest.raises(ValueError, match=f"{name} is 0; give at least 1"):
            fit_lstm(KEY, *pulses(), train, stop, **{name: 0})


def test_cells_hold_what_flax_initialises():
    params = learnt()
    assert list(params.cells) == ["layer0", "layer1"]
    first, second = params.cells.values()
    assert isinstance(first, Cell) and first.w_in.shape == (WIDTH, 4 * HIDDEN)
    assert second.w_in.shape == second.w_hidden.shape == (HIDDEN, 4 * HIDDEN)
