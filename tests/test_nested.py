"""The choice of a setting by folds inside the training part."""

from functools import partial

import jax
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from jaxhal.classifiers.data import weighted_rows
from jaxhal.classifiers.mlp import fit_perceptron, mlp_logits
from jaxhal.classifiers.selection import choose, unseen_scores
from jaxhal.classifiers.svm import fit_svm, svm_logits
from jaxhal.classifiers.trees import fit_forest, forest_logits
from jaxhal.evaluation.splits import SplitError

ROWS = 90
GROUPS = np.arange(ROWS) // 2
LABELS = np.arange(ROWS) % 2
ONES = np.ones(ROWS, np.float32)

# How to fit and decide, what to choose from, and what suits `rounds` best.
METHODS = {
    "svm": (
        partial(fit_svm, standardize=True),
        svm_logits,
        {"C": (1.0,), "gamma": (1e-4, 1.0)},
        {"C": 1.0, "gamma": 1.0},
    ),
    "forest": (
        partial(fit_forest, trees=20),
        forest_logits,
        {"max_depth": (1, 4), "min_samples_leaf": (20, 1)},
        {"max_depth": 4, "min_samples_leaf": 1},
    ),
    "perceptron": (
        partial(fit_perceptron, standardize=True),
        mlp_logits,
        {"alpha": (1e3, 1e-4)},
        {"alpha": 1e-4},
    ),
}


def rounds(seed=0):
    """Class 1 lies on a circle around class 0: no line and no single cut parts them."""
    rng = np.random.default_rng(seed)
    angle = rng.uniform(0, 2 * np.pi, ROWS)
    radius = 1 + 2 * LABELS + rng.normal(0, 0.4, ROWS)
    x = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)
    return (x * [1, 30] + [5, 0]).astype(np.float32)


def column(x, labels, weight, which):
    """A classifier that is one feature, whatever it is fitted to."""
    del x, labels, weight
    return np.int32(which)


def read(params, x):
    return np.asarray(x)[:, params]


def columns(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, 3)).astype(np.float32)
    x[:, 1] += LABELS
    return x


def test_the_planted_setting_wins_with_the_mean_auroc_of_its_folds():
    x, seen = columns(), []

    def fit(x, labels, weight, which):
        seen.append((which, np.asarray(weight)))
        return column(x, labels, weight, which)

    tuned, unseen = choose(fit, read, {"which": [0, 1, 2]}, x, LABELS, GROUPS, ONES)
    assert tuned.params == tuned.setting["which"] == 1
    train = np.stack([weight for which, weight in seen if which == 1][:3])
    expected = [roc_auc_score(LABELS[f == 0], x[f == 0, 1]) for f in train]
    assert float(tuned.auroc) == pytest.approx(np.mean(expected))
    np.testing.assert_array_equal((train == 0).sum(0), 1)  # each left out once
    np.testing.assert_array_equal(train[:, ::2], train[:, 1::2])  # sources are whole
    scores = np.stack([x[:, 1]] * 3)
    np.testing.assert_array_equal(unseen, unseen_scores(scores, train, x[:, 1]))
    assert [which for which, _ in seen] == [0] * 3 + [1] * 3 + [2] * 3 + [1]
    assert (seen[-1][1] == 1).all()


def test_among_equals_the_first_setting_wins():
    x = columns()[:, [0, 1, 1]]
    for order in ([0, 1, 2], [2, 1, 0]):
        grid = {"which": order}
        tuned, _ = choose(column, read, grid, x, LABELS, GROUPS, ONES)
        assert tuned.params == order[1] if order[0] == 0 else order[0]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_finds_what_suits_the_data(name):
    fit, decide, grid, best = METHODS[name]
    tuned, unseen = choose(fit, decide, grid, rounds(), LABELS, GROUPS, ONES)
    assert {k: pytest.approx(float(v)) for k, v in tuned.setting.items()} == best
    assert float(tuned.auroc) > 0.85 and roc_auc_score(LABELS, unseen) > 0.85
    assert roc_auc_score(LABELS, decide(tuned.params, rounds(1))) > 0.85
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tuned))


@pytest.mark.parametrize("name", METHODS)
def test_rows_without_weight_are_never_looked_at(name):
    choice = partial(choose, *METHODS[name][:3])
    weight = np.float32(np.arange(ROWS) < 72)
    plain, plain_unseen = choice(rounds(), LABELS, GROUPS, weight)
    off = weight == 0
    x = np.where(off[:, None], np.float32(1e30), rounds())
    labels = np.where(off, 1 - LABELS, LABELS)
    wild, unseen = choice(x, labels, np.where(off, 0, GROUPS), weight)
    np.testing.assert_array_equal(unseen, plain_unseen)
    assert (unseen[off] == 0).all() and (unseen[~off] != 0).all()
    for leaf, other in zip(jax.tree.leaves(plain), jax.tree.leaves(wild), strict=True):
        np.testing.assert_array_equal(leaf, other)


def test_weighted_rows_are_standardised_by_themselves():
    x = np.array([[1, 7, 1], [3, 7, 2], [9, 9, 9], [8, 7, 6]], np.float32)
    rows = weighted_rows(x, [0, 1, 0, 0], [2.0, 1.0, 0.0, 1.0], standardize=True)
    kept, share = x[[0, 1, 3]], np.array([2, 1, 1]) / 4
    mean = share @ kept
    std = np.sqrt(share @ (kept - mean) ** 2)
    np.testing.assert_allclose(rows.mean, mean, rtol=1e-6)
    np.testing.assert_allclose(rows.std, [std[0], np.inf, std[2]], rtol=1e-6)
    expected = np.divide(kept - mean, std, out=np.zeros((3, 3)), where=std > 0)
    np.testing.assert_allclose(rows.x, expected, rtol=1e-5)
    np.testing.assert_array_equal(rows.number, [0, 1, 3])
    assert rows.y.tolist() == [0, 1, 0] and rows.weight.tolist() == [2, 1, 1]


def test_bad_rows_are_named():
    def call(x=None, labels=LABELS, groups=GROUPS, weight=ONES, grid=(0,)):
        x = columns() if x is None else x
        grid = {"which": grid}
        return choose(column, read, grid, x, labels, groups, weight)

    nan = columns()
    nan[3, 1] = np.nan
    for wrong, message in (
        ({"x": columns()[:5]}, r"\(5, 3\) and labels of shape \(90,\) do not pair up"),
        ({"x": nan}, r"features\[3, 1\] is not finite"),
        ({"labels": LABELS * 0}, "no hallucinated row"),
        ({"weight": 1.0 - LABELS}, "no hallucinated row"),
        ({"weight": -ONES}, r"weight\[0\] is -1.0"),
        ({"groups": GROUPS[:5]}, "got 5 groups for 90 rows"),
        ({"grid": ()}, r"grid is {'which': \(\)}; give every setting a value"),
    ):
        with pytest.raises(ValueError, match=message):
            call(**wrong)
    with pytest.raises(SplitError, match="come from 2 groups, too few for 3 folds"):
        call(weight=np.float32(np.arange(ROWS) < 4))
    with pytest.raises(ValueError, match=r"shape \(3,\); pass \[rows, width\]"):
        weighted_rows([1.0, 2.0, 3.0], [0, 1, 1], [1, 1, 1])


def test_each_fold_is_scored_by_what_is_best_in_the_others():
    different = False
    for seed in range(4):
        x = np.random.default_rng(seed).normal(size=(ROWS, 6)).astype(np.float32)
        seen = []

        def fit(x, labels, weight, which, seen=seen):
            seen.append(np.asarray(weight))
            return which

        grid = {"which": [*range(6)]}
        _, unseen = choose(fit, read, grid, x, LABELS, GROUPS, ONES)
        tests = [weight == 0 for weight in seen[:3]]
        area = np.array(
            [[roc_auc_score(LABELS[t], x[t, n]) for t in tests] for n in range(6)]
        )
        final, taken = x[:, int(np.argmax(area.mean(1)))], set()
        for fold, test in enumerate(tests):
            best = int(np.argmax(np.delete(area, fold, 1).mean(1)))
            taken.add(best)
            score = x[:, best]
            apart = (score[test] - score[~test].mean()) / score[~test].std()
            want = apart * final[~test].std() + final[~test].mean()
            np.testing.assert_allclose(unseen[test], want, rtol=1e-4, atol=1e-5)
        different |= len(taken) > 1
    assert different
