"""What scikit-learn fitted and what its arrays decide, on rows neither has seen."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.ensemble import RandomForestClassifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from jaxhal.classifiers import svm, trees
from jaxhal.classifiers.mlp import fit_perceptron, mlp_logits

ROWS, WIDTH = 80, 6
few_trees = functools.partial(trees.fit_forest, trees=20)


def data(seed=0):
    """Features of different spreads, two of which tell the classes apart together."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, WIDTH))
    y = (x[:, 0] * x[:, 1] + rng.normal(0, 0.3, ROWS) > 0).astype(int)
    return (x * [1, 2, 0.1, 1, 5, 1] + [0, 9, 0, 0, 0, 1]).astype(np.float32), y


def some(seed=5):
    """Weights, a quarter of them 0."""
    weight = np.random.default_rng(seed).uniform(0.5, 2.0, ROWS)
    return np.where(np.arange(ROWS) % 4 == 0, 0.0, weight).astype(np.float32)


def kept(weight, *arrays):
    return (array[weight > 0] for array in (*arrays, weight))


FITS = {
    "svm": (functools.partial(svm.fit_svm, C=1.0, gamma=1.0), svm.svm_logits),
    "forest": (few_trees, trees.forest_logits),
    "perceptron": (fit_perceptron, mlp_logits),
}


# Support vectors ---------------------------------------------------------------------


def test_the_published_machine_is_sklearns():
    (x, y), fresh = data(), data(1)[0]
    theirs = SVC(C=30, gamma=1).fit(x, y)
    ours = svm.fit_svm(x, y, np.ones(ROWS))
    for rows in (x, fresh):
        expected = theirs.decision_function(rows)
        np.testing.assert_allclose(svm.svm_logits(ours, rows), expected, atol=1e-5)
    np.testing.assert_array_equal(ours.mean, 0)
    np.testing.assert_array_equal(ours.std, 1)


def test_a_standardised_machine_is_sklearns_with_scaled_gamma():
    (x, y), fresh, weight = data(), data(1)[0], np.float32(some() > 0)
    x[:, 3] = 7.3
    theirs = make_pipeline(StandardScaler(), SVC(C=2.0, gamma="scale"))
    theirs.fit(x[weight > 0].astype(float), y[weight > 0])
    ours = svm.fit_svm(x, y, weight, C=2.0, gamma=1.0, standardize=True)
    assert float(ours.gamma) == pytest.approx(1 / (WIDTH - 1))
    fresh[:, 3] = 7.3
    expected = theirs.decision_function(fresh)
    np.testing.assert_allclose(svm.svm_logits(ours, fresh), expected, atol=1e-5)
    fresh[:, 3] = -1e3  # constant in training, so it says nothing
    again = svm.svm_logits(ours, fresh)
    np.testing.assert_allclose(again, expected, atol=1e-5)


def test_every_fold_has_one_shape_and_holds_its_own_rows_alone():
    (x, y), fresh = data(), data(1)[0]
    weights = [np.ones(ROWS, np.float32), some(), np.float32(some() > 0.9)]
    folds = [svm.fit_svm(x, y, weight, 1.0, 0.1) for weight in weights]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *folds)
    mapped = jax.vmap(svm.svm_logits, (0, None))(stacked, fresh)
    for weight, fold, logits in zip(weights, folds, mapped, strict=True):
        assert fold.vectors.shape == (ROWS, WIDTH) and fold.dual.shape == (ROWS,)
        off = np.asarray(fold.dual) == 0
        assert off[weight == 0].all()
        np.testing.assert_array_equal(fold.vectors, np.where(off[:, None], 0, x))
        theirs = SVC(C=1.0, gamma=0.1).fit(*kept(weight, x, y))
        expected = theirs.decision_function(fresh)
        np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_features_far_from_zero_keep_their_digits():
    (x, y), fresh = data(), data(1)[0]
    one = np.ones(ROWS)
    near = svm.svm_logits(svm.fit_svm(x, y, one, 1.0, 1.0), fresh)
    x, fresh = x + np.float32(512), fresh + np.float32(512)
    theirs = SVC(C=1.0, gamma=1.0).fit(x, y).decision_function(fresh)
    far = svm.svm_logits(svm.fit_svm(x, y, one, 1.0, 1.0), fresh)
    np.testing.assert_allclose(far, theirs, atol=1e-5)
    np.testing.assert_allclose(far, near, atol=1e-3)


# Trees -------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "leaf"), [(1, 1), (3, 1), (5, 5)])
def test_a_forest_is_sklearns(depth, leaf):
    (x, y), fresh, weight = data(), data(1)[0], some()
    theirs = RandomForestClassifier(
        20, max_depth=depth, min_samples_leaf=leaf, random_state=42
    ).fit(*kept(weight, x, y))
    ours = few_trees(x, y, weight, depth, leaf)
    assert ours.feature.shape == (20, 2 ** (depth + 1) - 1)
    for rows in (x, fresh):
        found = jax.nn.sigmoid(trees.forest_logits(ours, rows))
        expected = theirs.predict_proba(rows)[:, 1]
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_the_published_forest():
    (x, y), fresh = data(), data(1)[0]
    theirs = RandomForestClassifier(200, max_depth=3, random_state=42).fit(x, y)
    ours = trees.fit_forest(x, y, np.ones(ROWS))
    found = jax.nn.sigmoid(trees.forest_logits(ours, fresh))
    np.testing.assert_allclose(found, theirs.predict_proba(fresh)[:, 1], atol=1e-5)


def test_rows_on_a_threshold_go_where_sklearn_sends_them():
    """Neighbouring float32 numbers, between which thresholds are no float32."""
    rng = np.random.default_rng(0)
    x = (1 + rng.integers(0, 9, (ROWS, 2)) * 2.0**-23).astype(np.float32)
    y = (rng.random(ROWS) < 0.5).astype(int)
    theirs = RandomForestClassifier(20, max_depth=5, random_state=42).fit(x, y)
    ours = few_trees(x, y, np.ones(ROWS), 5)
    cuts = np.concatenate([t.tree_.threshold for t in theirs.estimators_])
    cuts = cuts[cuts > 0]
    assert (cuts != cuts.astype(np.float32)).any()
    nearest = cuts.astype(np.float32)
    sides = [np.nextafter(nearest, np.float32(s)) for s in (-9, 9)]
    rows = np.unique(np.concatenate([nearest, *sides]))
    rows = np.stack(np.meshgrid(rows, rows), -1).reshape(-1, 2)
    found = jax.nn.sigmoid(trees.forest_logits(ours, rows))
    np.testing.assert_allclose(found, theirs.predict_proba(rows)[:, 1], atol=1e-5)


def test_certain_forests_stay_finite():
    x = np.float32([[0.0], [1.0]] * 30)
    y = np.arange(60) % 2
    forest = few_trees(x, y, np.ones(60))
    logits = np.asarray(trees.forest_logits(forest, x[:2]))
    np.testing.assert_allclose(logits, [-13.86, 13.86], atol=0.01)


# The perceptron ----------------------------------------------------------------------


def test_the_published_perceptron_is_sklearns():
    (x, y), fresh = data(), data(1)[0]
    theirs = MLPClassifier((100,), alpha=1e-4, max_iter=200, random_state=42)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        theirs.fit(x.astype(float), y)
    ours = fit_perceptron(x, y, np.ones(ROWS))
    found = jax.nn.sigmoid(mlp_logits(ours, fresh))
    np.testing.assert_allclose(found, theirs.predict_proba(fresh)[:, 1], atol=1e-5)


def test_only_the_warning_of_convergence_is_silenced(monkeypatch):
    x, y = data()
    real = MLPClassifier.fit

    def fit(self, *rows):
        warnings.warn("something else", UserWarning, stacklevel=1)
        warnings.warn("200 epochs", ConvergenceWarning, stacklevel=1)
        return real(self, *rows)

    monkeypatch.setattr(MLPClassifier, "fit", fit)
    with pytest.warns(UserWarning, match="something else") as caught:
        fit_perceptron(x, y, np.ones(ROWS))
    assert [warning.category for warning in caught] == [UserWarning]


# All three ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", FITS)
def test_rows_without_weight_change_nothing(name):
    fit, logits = FITS[name]
    (x, y), fresh, weight = data(), data(1)[0], some()
    off = weight == 0
    plain = fit(x, y, weight)
    wild = fit(np.where(off[:, None], 1e30, x), np.where(off, 1 - y, y), weight)
    for leaf, other in zip(plain, wild, strict=True):
        np.testing.assert_array_equal(leaf, other)
    alone = fit(*kept(weight, x, y))
    expected = logits(alone, fresh)
    np.testing.assert_allclose(logits(plain, fresh), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FITS)
def test_decisions_take_any_rows_and_jit_and_map(name):
    fit, logits = FITS[name]
    (x, y), fresh = data(), data(1)[0]
    params = fit(x, y, np.ones(ROWS))
    expected = logits(params, fresh)
    assert expected.shape == (ROWS,) and expected.dtype == jnp.float32
    same = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    same(jax.jit(logits)(params, fresh), expected)
    same(jax.vmap(functools.partial(logits, params))(jnp.asarray(fresh)), expected)
    same(logits(params, fresh.reshape(4, 20, -1)).ravel(), expected)
    same(logits(params, fresh[3]), expected[3])


@pytest.mark.parametrize("name", FITS)
def test_bad_rows_are_named(name):
    fit, _ = FITS[name]
    x, y = data()
    one = np.ones(ROWS)
    broken = x.copy()
    broken[2, 1] = np.inf
    for rows, message in (
        ((x, y[:5], one), "do not pair up"),
        ((x[0], y[:WIDTH], one[:WIDTH]), r"shape \(6,\); pass \[rows, width\]"),
        ((broken, y, one), r"features\[2, 1\] is not finite"),
        ((x, y, one[:5]), r"weight has shape \(5,\) for 80 rows"),
        ((x, y * 0, one), "no hallucinated row"),
        ((x, y, 1.0 * y), "no grounded row"),
    ):
        with pytest.raises(ValueError, match=message):
            fit(*rows)


def test_bad_settings_are_named():
    rows = (*data(), np.ones(ROWS))
    for call, message in (
        (lambda: svm.fit_svm(*rows, C=0.0, gamma=1.0), "C is 0.0; give a number above"),
        (lambda: svm.fit_svm(*rows, C=1.0, gamma=np.nan), "gamma is nan"),
        (lambda: trees.fit_forest(*rows, max_depth=11), "max_depth is 11; use 1 to 10"),
        (lambda: trees.fit_forest(*rows, min_samples_leaf=0), "min_samples_leaf is 0"),
        (lambda: trees.fit_forest(*rows, trees=0), "trees is 0; give at least 1"),
        (lambda: fit_perceptron(*rows, alpha=-1.0), "alpha is -1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
