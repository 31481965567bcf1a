"""Probes against scikit-learn, slow NumPy forwards and each other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from jaxhal.classifiers import data as data_lib
from jaxhal.classifiers import linear, mlp, pooling, train
from jaxhal.classifiers.data import auroc, balanced, check, moments

STRENGTHS = (1e-3, 1.0, 100.0)
SHAPES = {"tall": (60, 8), "wide": (20, 30)}


def data(seed=0, shape="tall", signal=1.0):
    """Correlated features far from zero, of different spreads."""
    rows, width = SHAPES[shape]
    rng = np.random.default_rng(seed)
    y = np.arange(rows) % 3 // 2  # a third is hallucinated
    x = rng.normal(size=(rows, width)) @ rng.normal(size=(width, width))
    x += signal * y[:, None] * rng.normal(size=width)
    x = x * np.exp(rng.normal(size=width)) + 20 * rng.normal(size=width)
    return x.astype(np.float32), y


def sklearn(x, y, weight=None, C=1.0, standardize=True):
    weight = np.ones(len(y)) if weight is None else np.asarray(weight)
    kept = weight > 0
    scaler = StandardScaler(with_mean=standardize, with_std=standardize)
    probe = LogisticRegression(C=C, tol=1e-10, max_iter=100_000)
    steps = make_pipeline(scaler, probe).fit(
        x[kept].astype(float),
        y[kept],
        logisticregression__sample_weight=weight[kept],
        standardscaler__sample_weight=weight[kept] if standardize else None,
    )
    return steps, probe.coef_[0], probe.intercept_[0]


def cell(grid, *index):
    return jax.tree.map(lambda leaf: leaf[index], grid)


def close(probe, expected, x):
    steps, coef, intercept = expected
    scale = np.abs(coef).max()
    np.testing.assert_allclose(probe.w, coef, rtol=1e-3, atol=1e-3 * scale)
    np.testing.assert_allclose(
        jax.nn.sigmoid(linear.linear_logits(probe, x)),
        steps.predict_proba(x.astype(float))[:, 1],
        rtol=1e-3,
        atol=1e-4,
    )


# Linear ------------------------------------------------------------------------------


def test_many_features_are_looked_at_some_at_a_time(monkeypatch):
    """Moments and products of columns 3 at a time, of which 11 are no multiple."""
    monkeypatch.setattr(data_lib, "_COLUMNS", 3)
    rng, y = np.random.default_rng(4), np.arange(50) % 2
    x = (rng.normal(size=(50, 11)) + y[:, None] + 5).astype(np.float32)
    weight = (np.arange(50) % 5 > 0).astype(np.float32)
    mean, std = moments(jnp.asarray(x), jnp.asarray(weight))
    np.testing.assert_allclose(mean, x[weight > 0].mean(0), rtol=1e-5)
    np.testing.assert_allclose(std, x[weight > 0].std(0), rtol=1e-4)
    close(linear.fit_linear(x, y, weight), sklearn(x, y, weight), x)
    gram = data_lib.over_columns(lambda some: x.T @ some, jnp.asarray(x))
    np.testing.assert_allclose(gram, x.T @ x, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_grid_equals_sklearn(shape):
    x, y = data(shape=shape)
    ones = np.ones(len(y))
    part = np.where(np.arange(len(y)) % 5 == 0, 0.0, 1.0)
    train = np.stack([ones, part, balanced(y, part)])
    grid = linear.fit_grid(x[None], y, train, STRENGTHS)
    for fold, weight in enumerate(train):
        for strength, C in enumerate(STRENGTHS):
            expected = sklearn(x, y, weight, C)
            close(cell(grid, 0, fold, strength), expected, x)


def test_single_fits_equal_the_grid():
    layers = np.stack([data(seed)[0] for seed in range(2)])
    y = data()[1]
    train = np.random.default_rng(0).integers(0, 3, (2, 60)).astype(np.float32)
    grid = linear.fit_grid(layers, y, train, STRENGTHS)
    logits = linear.grid_logits(grid, layers)
    assert logits.shape == (2, 2, 3, 60)
    for layer, fold, strength in np.ndindex(2, 2, 3):
        x, C = layers[layer], STRENGTHS[strength]
        single = linear.fit_linear(x, y, train[fold], C)
        expected = linear.linear_logits(single, x)
        scale = 1e-2 * float(jnp.abs(expected).max())
        np.testing.assert_allclose(
            logits[layer, fold, strength], expected, rtol=1e-3, atol=scale
        )
        own = linear.linear_logits(cell(grid, layer, fold, strength), x)
        np.testing.assert_allclose(
            logits[layer, fold, strength], own, rtol=1e-4, atol=1e-4
        )


def test_a_fold_is_a_fit_on_its_rows_alone():
    x, y = data()
    kept = np.arange(60) % 4 > 0
    masked = linear.fit_linear(x, y, kept, 1.0)
    wild = np.where(kept[:, None], x, 1e3)  # rows without weight may hold anything
    for other in (
        linear.fit_linear(x[kept], y[kept], C=1.0),
        linear.fit_linear(wild, y, kept, 1.0),
    ):
        for leaf, alone in zip(masked, other, strict=True):
            np.testing.assert_allclose(leaf, alone, rtol=2e-3, atol=2e-3)


def test_without_standardisation():
    x, y = data()
    x = x / 20
    probe = linear.fit_linear(x, y, C=1.0, standardize=False)
    close(probe, sklearn(x, y, standardize=False), x)
    assert (probe.std == 1).all()


def test_constant_feature_adds_nothing():
    x, y = data()
    x[:, 2] = 0.1
    half = np.arange(60) < 30
    x[half, 5] = -7.3  # constant in one fold only
    train = np.stack([np.ones(60), half, 0.5 + half])
    grid = linear.fit_grid(x[None], y, train, STRENGTHS)
    assert (grid.w[..., 2] == 0).all() and (grid.w[0, 1, :, 5] == 0).all()
    assert (grid.w[0, 0, :, 5] != 0).all()
    for fold, weight in enumerate(train):
        probe = cell(grid, 0, fold, 1)
        expected = sklearn(x, y, weight)
        np.testing.assert_allclose(probe.w, expected[1], atol=2e-3)
        far = x.copy()
        far[:, 2] = 1e6  # never seen in training
        np.testing.assert_array_equal(
            linear.linear_logits(probe, far), linear.linear_logits(probe, x)
        )


@pytest.mark.parametrize("rows", [60, 5_000])
def test_a_feature_that_rounding_alone_changes_is_constant(rows):
    """A share of all has been 1 and 0.99999994; elsewhere it may be 0.9."""
    x, y = data()
    x, y = np.resize(x, (rows, x.shape[1])), np.resize(y, rows)
    x[:, 2] = np.where(np.arange(rows) % 3, 1, np.nextafter(np.float32(1), 0))
    for sign in (1, -1e-12):  # of any size
        x[:, 2] *= sign
        mean, std = moments(jnp.asarray(x), jnp.ones(rows))
        assert np.isinf(std).tolist() == [n == 2 for n in range(x.shape[1])]
        probe = linear.fit_linear(x, y, C=1.0)
        assert probe.w[2] == 0
        far = x.copy()
        far[:, 2] = 0.9
        np.testing.assert_array_equal(
            linear.linear_logits(probe, far), linear.linear_logits(probe, x)
        )


@pytest.mark.parametrize("C", [1e-6, 1e4, 1e8])
def test_separable_data_stay_finite(C):
    x, y = data()
    x[:, 0] += 1e3 * y
    probe = linear.fit_linear(x, y, C=C)
    logits = np.asarray(linear.linear_logits(probe, x))
    assert all(np.isfinite(leaf).all() for leaf in probe)
    assert roc_auc_score(y, logits) == 1.0
    if C == 1e4:
        close(probe, sklearn(x, y, C=C), x)


def test_large_offsets_cost_no_digits():
    x, y = data()
    x = x / x.std(0)
    near, far = (
        linear.fit_grid((x + s)[None], y, np.ones((1, 60)), [1.0]) for s in (0.0, 512.0)
    )
    np.testing.assert_allclose(
        linear.grid_logits(far, (x + 512.0)[None]),
        linear.grid_logits(near, x[None]),
        atol=5e-3,
    )


def test_jit_and_vmap_equal_eager():
    x, y = data()
    weight = np.arange(60) % 7 > 0
    eager = linear.fit_linear(x, y, weight, 0.5)
    jitted = jax.jit(linear.fit_linear)(x, y, weight, 0.5)
    mapped = jax.vmap(lambda x: linear.fit_linear(x, y, weight, 0.5))(x[None])
    for a, b, c in zip(eager, jitted, mapped, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(a, c[0], rtol=1e-3, atol=1e-4)


# Ranks and moments -------------------------------------------------------------------


@pytest.mark.parametrize("levels", [3, 10**6])
def test_auroc_leaves_out_what_is_neither(levels):
    rng = np.random.default_rng(levels)
    scores = rng.integers(0, levels, 80).astype(np.float32)
    y, kept = rng.integers(0, 2, 80), rng.random(80) < 0.7
    found = jax.jit(auroc)(scores, kept & (y == 1), kept & (y == 0))
    assert float(found) == pytest.approx(roc_auc_score(y[kept], scores[kept]))


def test_auroc_of_many_rows_does_not_overflow():
    high = np.arange(100_000) >= 50_000
    found = auroc(jnp.arange(100_000.0), jnp.asarray(high), jnp.asarray(~high))
    assert float(found) == pytest.approx(1.0)


@pytest.mark.parametrize("rows", [7, 500])
def test_many_equal_values_are_constant(rows):
    """Their sum rounds, so that a mean of them is not what they are."""
    rng = np.random.default_rng(rows)
    weight = rng.choice([0.59, 3.4], rows)
    weight[0] = 0.0
    x = np.tile(rng.normal(size=2_000), (rows, 1)).astype(np.float32)
    x[0] = 5.0  # not looked at
    assert np.isinf(moments(jnp.asarray(x), jnp.asarray(weight))[1]).all()


def test_moments_keep_their_digits_on_an_accelerator():
    traced = str(jax.make_jaxpr(moments)(jnp.ones((4, 3)), jnp.ones(4)))
    assert traced.count("dot_general") == traced.count("=(Precision.HIGHEST") == 2


# Training loop -----------------------------------------------------------------------


def test_fit_keeps_the_best_parameters():
    seen, params = [], np.float32(0.0)
    for _ in range(12):
        params -= np.float32(0.1) * 2 * (params - 4)
        seen.append(params)
    expected = min(seen, key=lambda p: (p - 1.5) ** 2)

    def run(target, patience=3, steps=12):
        return train.fit(
            lambda p: (p - 4) ** 2,
            jnp.zeros(()),
            optax.sgd(0.1),
            steps,
            lambda p: (p - target) ** 2,
            patience,
        )

    assert float(run(1.5)) == pytest.approx(float(expected))
    assert float(run(-1.0)) == 0.0  # every step is worse than the start
    assert float(run(jnp.nan)) == 0.0
    mapped = jax.vmap(run)(jnp.array([1.5, -1.0, 4.0]))
    np.testing.assert_allclose(mapped, [expected, 0.0, seen[-1]], rtol=1e-6)


def test_patience_outlasts_a_bump():
    def validation(p):  # falls to 1, rises to 2, falls for good
        return jnp.where(p < 1, 1 - p, jnp.where(p < 2, p, -p))

    def run(patience):
        climb = functools.partial(train.fit, lambda p: -p, jnp.zeros(()))
        return climb(optax.sgd(0.25), 16, validation, patience)

    assert float(run(4)) == pytest.approx(0.75)
    assert float(run(6)) == pytest.approx(4.0)


# MLP and pooling ---------------------------------------------------------------------


def test_mlp_learns_what_no_hyperplane_separates():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 6)).astype(np.float32)
    y = (x[:, 0] * x[:, 1] > 0).astype(int)
    part = np.arange(300) % 3
    probe = mlp.fit_mlp(jax.random.key(0), x, y, part == 0, part == 1)
    logits = np.asarray(mlp.mlp_logits(probe, x))
    assert roc_auc_score(y[part == 2], logits[part == 2]) > 0.85
    straight = linear.fit_linear(x, y, part == 0)
    straight = np.asarray(linear.linear_logits(straight, x))
    assert roc_auc_score(y[part == 2], straight[part == 2]) < 0.65
    slow = []
    for row in x:
        hidden = ((row - probe.mean) / probe.std) @ probe.w_in + probe.b_in
        slow.append(float(np.maximum(hidden, 0) @ probe.w_out + probe.b_out))
    np.testing.assert_allclose(logits, slow, rtol=1e-3, atol=1e-4)


def tokens(seed=0, rows=240, length=6, width=5):
    """One token of a hallucinated answer, at a random place, gives it away."""
    rng = np.random.default_rng(seed)
    y = np.arange(rows) % 2
    size = rng.integers(2, length + 1, rows)
    hidden = rng.normal(size=(rows, length, width))
    hidden[np.arange(rows), rng.integers(0, size), 0] += 5.0 * y
    hidden = hidden * [1, 9, 1, 1, 1] + [30, 0, 0, 0, -4]
    return hidden.astype(np.float32), np.arange(length) < size[:, None], y


def flat(hidden, valid):
    """The tokens of all rows, and which row each is of."""
    return hidden[valid], np.nonzero(valid)[0]


def test_pooling_finds_the_token():
    hidden, valid, y = tokens()
    hidden[~valid] = np.nan
    part = np.arange(240) // 2 % 3
    probe = pooling.fit_pooling(
        jax.random.key(0), *flat(hidden, valid), y, part == 0, part == 1
    )
    logits = np.asarray(pooling.pooling_logits(probe, hidden, valid))
    test = part == 2
    pooled = np.nanmean(np.where(valid[..., None], hidden, np.nan), 1)
    average = np.asarray(
        linear.linear_logits(linear.fit_linear(pooled, y, part == 0), pooled)
    )
    found = roc_auc_score(y[test], logits[test])
    assert found > 0.9 and found > roc_auc_score(y[test], average[test])
    for row in range(0, 240, 17):
        h = (hidden[row, valid[row]] - probe.mean) / probe.std
        weight = np.exp(h @ probe.query)
        weight /= weight.sum()
        np.testing.assert_allclose(
            logits[row], weight @ h @ probe.w + probe.b, rtol=2e-3, atol=1e-3
        )
    kept = hidden[(part == 0)[:, None] & valid]
    np.testing.assert_allclose(probe.mean, kept.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(probe.std, kept.std(0), rtol=1e-4)


def test_one_token_teaches_attention_nothing():
    """Whatever the query, its share is 1: only the decay of weights moves that."""
    hidden = np.random.default_rng(2).normal(size=(40, 3)).astype(np.float32)
    y, one = np.arange(40) % 2, np.ones(40)
    found = [
        pooling.fit_pooling(jax.random.key(0), x, np.arange(40), y, one, one).query
        for x in (hidden, hidden[:, ::-1].copy())
    ]
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_an_answer_of_padding_is_harmless():
    hidden, valid, y = tokens(rows=12)
    valid[3] = False
    one = np.ones(12)
    probe = pooling.fit_pooling(jax.random.key(1), *flat(hidden, valid), y, one, one)
    assert all(np.isfinite(leaf).all() for leaf in probe)
    logits = pooling.pooling_logits(probe, hidden, valid)
    assert logits[3] == probe.b

    def loss(params, hidden):
        return pooling.pooling_logits(params, hidden, valid).sum()

    gradient = jax.grad(loss, (0, 1))(probe, jnp.asarray(hidden))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    assert (gradient[1][~valid] == 0).all() and (gradient[1][valid] != 0).any()


@pytest.fixture
def few_steps(monkeypatch):
    """What was compiled has the number in it, before as after."""
    monkeypatch.setattr(train, "STEPS", 20)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.usefixtures("few_steps")
def test_trained_probes_map_over_layers_and_jit():
    hidden, valid, y = tokens(rows=12)
    weight, key = np.ones(12, np.float32), jax.random.key(2)

    row = np.nonzero(valid)[0]

    def pool(hidden):
        return pooling.fit_pooling(key, hidden[valid], row, y, weight, weight)

    def perceive(x):
        return mlp.fit_mlp(key, x, y, weight, weight)

    for fit, layers in (
        (pool, np.stack([hidden, 2 - hidden])),
        (perceive, np.stack([hidden[:, 0], 2 - hidden[:, 1]])),
    ):
        mapped = jax.jit(jax.vmap(fit))(layers)
        for layer in range(2):
            single = fit(layers[layer])
            for leaf, alone in zip(mapped, single, strict=True):
                np.testing.assert_allclose(leaf[layer], alone, rtol=1e-3, atol=1e-4)


# Bad input ---------------------------------------------------------------------------


def fits(x, y, weight):
    """Every fit on the same rows."""
    x = np.asarray(x, np.float32)
    key = jax.random.key(0)
    yield lambda: linear.fit_linear(x, y, weight)
    yield lambda: linear.fit_grid(x[None], y, [weight], [1.0])
    yield lambda: mlp.fit_mlp(key, x, y, weight, weight)
    yield lambda: pooling.fit_pooling(key, x, np.arange(len(y)), y, weight, weight)


@pytest.mark.parametrize(
    ("x", "y", "weight", "message"),
    [
        ([[1.0], [2.0]], [0, 1, 1], [1, 1, 1], "do not pair up"),
        ([[1.0], [np.nan]], [0, 1], [1, 1], r"features.*1.*is not finite"),
        ([[1.0], [2.0]], [0, 2], [1, 1], r"labels\[1\] is 2"),
        ([[1.0], [2.0]], [0, 1], [1, 1, 1], r"shape \(.*3.*\) for 2 rows"),
        ([[1.0], [2.0]], [0, 1], [1, -1], r"\[.*1\] is -1.0; use 0 or more"),
        ([[1.0], [2.0]], [0, 1], [1, np.nan], r"\[.*1\] is nan; use 0 or more"),
        ([[1.0], [2.0]], [0, 0], [1, 1], "no hallucinated row"),
        ([[1.0], [2.0]], [0, 1], [0, 1], "no grounded row"),
    ],
)
def test_bad_rows_are_named(x, y, weight, message):
    for fit in fits(x, y, weight):
        with pytest.raises(ValueError, match=message):
            fit()


def test_bad_settings_are_named():
    x, y, one = [[1.0], [2.0]], [0, 1], [1.0, 1.0]
    key = jax.random.key(0)
    for C in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(ValueError, match="every strength must be above 0"):
            linear.fit_linear(x, y, C=C)
    for call, message in (
        (lambda: linear.fit_linear([x], y), r"pass \[rows, width\]"),
        (lambda: linear.fit_grid([x], y, one, [1.0]), r"train \(2,\)"),
        (lambda: linear.fit_grid([x], y, [one], 1.0), "flat list of strengths"),
        (lambda: linear.fit_grid([x], y, [one], []), "flat list of strengths"),
        (lambda: linear.fit_grid([x], y, [one, [0, 1]], [1.0]), r"train\[1\] leaves"),
        (lambda: mlp.fit_mlp(key, [x, x], y, one, one), r"pass \[rows, width\]"),
        (lambda: mlp.fit_mlp(key, x, y, one, [0, 1]), "validation_weight leaves"),
        (lambda: pooling.fit_pooling(key, x, [0], y, one, one), "do not pair up"),
        (lambda: pooling.fit_pooling(key, x, [1, 0], y, one, one), "must rise"),
        (lambda: pooling.fit_pooling(key, x, [0, 2], y, one, one), "below the 2"),
        (
            lambda: pooling.fit_pooling(
                key, [*x, *x], [2] * 4, [*y, *y], [1, 1, 0, 0], [1] * 4
            ),
            "no row to train on",
        ),
        (lambda: balanced([1, 1], one), "no grounded row"),
        (lambda: balanced([0, 1], [1.0]), "one per row"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_balanced_is_sklearns_class_weight():
    x, y = data()
    weight = np.asarray(balanced(y, np.ones(60)))
    assert weight.sum() == pytest.approx(60)
    assert weight[y == 1].sum() == pytest.approx(30)
    plain = LogisticRegression(class_weight="balanced", tol=1e-10, max_iter=100_000)
    scaled = StandardScaler().fit_transform(x)
    expected = plain.fit(scaled, y).coef_[0]
    found = LogisticRegression(tol=1e-10, max_iter=100_000).fit(scaled, y, weight)
    np.testing.assert_allclose(found.coef_[0], expected, rtol=1e-4, atol=1e-6)


def test_check_returns_float32_and_lets_tracers_pass():
    x, y, (weight, none) = check([[1], [2]], [True, False], weight=[2, 1], other=None)
    assert x.dtype == y.dtype == weight.dtype == jnp.float32 and none is None
    jax.jit(lambda y: check([[1.0], [2.0]], y, weight=[1, 1])[1])(jnp.array([0, 0]))
