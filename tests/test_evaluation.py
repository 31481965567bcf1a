"""AUROC against scikit-learn, and intervals that know about groups."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from jaxhal.evaluation import auroc, bootstrap


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(-3, 3) | st.floats(-1e6, 1e6), st.booleans()), min_size=2
    ).filter(lambda rows: len({label for _, label in rows}) == 2)
)
def test_auroc_equals_sklearn(rows):
    scores, labels = zip(*rows, strict=True)
    assert auroc(scores, labels) == pytest.approx(roc_auc_score(labels, scores))


def test_auroc_is_a_rank_statistic():
    rng = np.random.default_rng(0)
    scores, labels = rng.normal(size=500), rng.integers(0, 2, 500)
    assert auroc(np.exp(scores), labels) == auroc(scores, labels)
    assert auroc(-scores, labels) == pytest.approx(1 - auroc(scores, labels))
    assert auroc(np.zeros(500), labels) == 0.5
    assert auroc(np.float32(labels), labels) == 1.0


@pytest.mark.parametrize(
    ("scores", "labels", "message"),
    [
        ([1.0, 2.0], [1, 1], "one class"),
        ([], [], "one class"),
        ([1.0, np.nan], [0, 1], r"scores\[1\] is nan"),
        ([-np.inf, 1.0], [0, 1], r"scores\[0\] is -inf"),
        ([1.0, 2.0, 3.0], [0, 1], "do not pair up"),
        ([[1.0], [2.0]], [[0], [1]], "do not pair up"),
        ([1.0, 2.0], [0, 2], r"labels\[1\] is .*2.*; use 0 or 1"),
    ],
)
@pytest.mark.parametrize("function", [auroc, bootstrap])
def test_bad_input_is_named(function, scores, labels, message):
    with pytest.raises(ValueError, match=message):
        function(scores, labels)


def test_bootstrap_rejects_bad_arguments():
    with pytest.raises(ValueError, match="got 1 groups for 2 scores"):
        bootstrap([0.0, 1.0], [0, 1], groups=["a"])
    with pytest.raises(ValueError, match="repeats is 0"):
        bootstrap([0.0, 1.0], [0, 1], repeats=0)


def test_bootstrap_interval():
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 2, 300)
    scores = labels + 2 * rng.normal(size=300)
    low, high = bootstrap(scores, labels)
    # DeLong-like standard error of an AUROC of 0.64 with 150 of each class is 0.03.
    assert low < auroc(scores, labels) < high
    assert 0.09 < high - low < 0.16
    assert bootstrap(scores, labels) == (low, high)
    assert bootstrap(scores, labels, seed=1) != (low, high)


def test_bootstrap_equals_resampling_rows_with_sklearn():
    rng = np.random.default_rng(2)
    labels = rng.integers(0, 2, 40)
    scores = np.round(labels + rng.normal(size=40))
    draws, found = np.random.default_rng(0), []
    while len(found) < 50:
        rows = draws.integers(40, size=40)
        if len(set(labels[rows])) == 2:
            found.append(roc_auc_score(labels[rows], scores[rows]))
    expected = tuple(np.percentile(found, [2.5, 97.5]))
    assert bootstrap(scores, labels, repeats=50) == pytest.approx(expected)


def test_groups_are_drawn_whole():
    rng = np.random.default_rng(3)
    labels, scores = rng.integers(0, 2, 30), rng.normal(size=30)
    groups = [f"source {row}" for row in range(30)]
    copied = bootstrap(np.tile(scores, 8), np.tile(labels, 8), groups * 8)
    assert copied == pytest.approx(bootstrap(scores, labels, groups))
    low, high = bootstrap(np.tile(scores, 8), np.tile(labels, 8))
    assert high - low < (copied[1] - copied[0]) / 2


def test_one_class_resamples_are_redrawn():
    assert bootstrap([0.0, 1.0], [0, 1], repeats=20) == (1.0, 1.0)
