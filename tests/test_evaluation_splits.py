"""Splits against their definitions: who is where, and what is kept together."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxhal.evaluation import (
    grouped_kfold,
    holdout,
    kfold,
    leaky_halves,
    toha_splits,
    unseen_kinds,
)


def partition(parts, n):
    return sorted(np.concatenate(parts)) == list(range(n))


@pytest.mark.parametrize("n", [989, 12])
def test_kfold_is_the_shuffle_cut_in_five(n):
    order = np.arange(n)
    np.random.RandomState(42).shuffle(order)
    found = kfold(n)
    for (train, test), expected in zip(found, np.array_split(order, 5), strict=True):
        assert test.tolist() == sorted(expected)
        assert train.tolist() == sorted(set(range(n)) - set(expected))


def test_kfold_takes_folds():
    assert [len(test) for _, test in kfold(10, folds=3)] == [4, 3, 3]


labelled = st.lists(
    st.tuples(st.booleans(), st.integers(0, 12)), min_size=4, max_size=40
)


@settings(deadline=None)
@given(labelled, st.integers(2, 4), st.integers(0, 3))
def test_grouped_kfold_keeps_groups_and_classes(rows, folds, seed):
    labels, groups = map(np.array, zip(*rows, strict=True))
    try:
        parts = grouped_kfold(labels, groups, folds, seed)
    except ValueError as error:
        # Raised for no other reason than these two.
        assert "too few for" in str(error) or "a fold has no" in str(error)
        return
    assert partition([test for _, test in parts], len(rows))
    for train, test in parts:
        assert partition([train, test], len(rows))
        assert not set(groups[train]) & set(groups[test])
        assert len(set(labels[test])) == len(set(labels[train])) == 2


def test_kinds_are_judged_where_they_were_not_seen():
    kinds = np.array(["", "year", "name", "unit", "", "role"] * 6)
    groups = np.arange(36) // 3
    each = [[kind] if kind else [] for kind in kinds.tolist()]
    parts = unseen_kinds(each, groups, folds=3, seed=1)
    assert len(parts) == 9
    for train, test in parts:
        assert not set(groups[train]) & set(groups[test])
        assert not set(kinds[train]) & set(kinds[test]) - {""}
    judged = np.concatenate([test for _, test in parts])
    times = np.bincount(judged, minlength=36)
    assert (times == np.where(kinds == "", 3, 1)).all()
    learnt = np.bincount(np.concatenate([train for train, _ in parts]), minlength=36)
    assert (learnt == np.where(kinds == "", 6, 4)).all()
    with pytest.raises(ValueError, match="are of 4 kinds, too few for 5 folds"):
        unseen_kinds(each, groups, folds=5)
    # Judged by the first of several, and none of them is learnt from.
    mixed = [[*one, "year"] if one and one != ["year"] else one for one in each]
    for train, test in unseen_kinds(mixed, groups, folds=3, seed=1):
        seen = {kind for row in train for kind in mixed[row]}
        assert not seen & ({mixed[row][0] for row in test if mixed[row]})


@settings(deadline=None)
@given(labelled, st.floats(0.05, 0.95), st.integers(0, 3))
def test_holdout_is_as_near_as_groups_allow(rows, share, seed):
    labels, groups = map(np.array, zip(*rows, strict=True))
    labels = labels.astype(int)
    try:
        rest, part = holdout(labels, groups, share, seed)
    except ValueError as error:
        assert "answer; give another seed" in str(error)
        assume(False)
    assert partition([rest, part], len(rows))
    assert not set(groups[rest]) & set(groups[part])

    def distance(held):
        return sum(
            abs(share * (labels == label).sum() - (labels[held] == label).sum())
            for label in (0, 1)
        )

    for group in set(groups):
        moved = np.setxor1d(part, np.flatnonzero(groups == group))
        assert distance(moved) >= distance(part) - 1e-9


def test_holdout_of_single_answers_is_exact():
    labels = [1] * 40 + [0] * 60
    rest, part = holdout(labels, range(100), 0.25)
    assert np.bincount(np.array(labels)[part]).tolist() == [15, 10]
    again = holdout(labels, range(100), 0.25)
    assert (rest == again[0]).all() and (part == again[1]).all()
    assert set(part) != set(holdout(labels, range(100), 0.25, seed=1)[1])
    assert (np.diff(rest) > 0).all() and (np.diff(part) > 0).all()


def test_holdout_of_uneven_groups():
    rng = np.random.default_rng(1)
    groups = rng.integers(0, 80, 500)
    labels = (rng.random(500) < 0.4).astype(int)
    for seed in range(5):
        _, part = holdout(labels, groups, 0.3, seed)
        assert len(part) == pytest.approx(150, abs=3)
        assert labels[part].sum() == pytest.approx(0.3 * labels.sum(), abs=3)


@pytest.mark.parametrize("n", [10, 839])
def test_toha_splits_are_five_shuffles(n):
    found = toha_splits(n)
    assert len(found) == 5
    for seed, (train, validation, test) in enumerate(found, start=42):
        order = np.random.RandomState(seed).permutation(n)
        tested = -(-n // 4)
        held = int((n - tested) * 0.15)
        assert test.tolist() == order[:tested].tolist()
        assert train.tolist() == order[tested : n - held].tolist()
        assert validation.tolist() == order[n - held :].tolist()


@pytest.mark.parametrize("n", [2, 101])
def test_leaky_halves_are_swapped(n):
    order = np.random.RandomState(42).permutation(n)
    half = -(-n // 2)
    (train, test), swapped = leaky_halves(n)
    assert test.tolist() == order[:half].tolist()
    assert train.tolist() == order[half:].tolist()
    assert (swapped[0] is test) and (swapped[1] is train)


def test_only_grouped_halves_keep_responses_whole():
    responses = np.repeat(np.arange(30), 6)
    labels = np.random.default_rng(2).integers(0, 2, 180)
    (train, test), _ = leaky_halves(180)
    assert set(responses[train]) & set(responses[test])
    (train, test), _ = grouped_kfold(labels, responses, folds=2)
    assert not set(responses[train]) & set(responses[test])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kfold(4), "folds is 5 for 4 answers; give 2 to 4"),
        (lambda: kfold(4, folds=1), "folds is 1"),
        (lambda: grouped_kfold([0, 1], "ab", folds=1), "folds is 1"),
        (lambda: grouped_kfold([0, 1, 1], "abb"), "hallucinated .* from 1 groups"),
        (lambda: grouped_kfold([0, 1, 1], "abc", 2), "grounded .* from 1 groups"),
        (lambda: grouped_kfold([0, 1, 0], "ab", 2), "got 2 groups for 3 rows"),
        (lambda: grouped_kfold([0, 2], "ab", 2), r"labels\[1\] is .*2"),
        (lambda: grouped_kfold([[0], [1]], "ab", 2), r"labels are of shape \(2, 1\)"),
        (lambda: holdout([0, 1], "ab", 0.0), "share is 0.0"),
        (lambda: holdout([0, 1], "ab", 1.0), "share is 1.0"),
        (lambda: holdout([0, 1], "abc", 0.5), "got 3 groups for 2 rows"),
        (lambda: holdout([0, 3], "ab", 0.5), r"labels\[1\] is .*3"),
        (lambda: holdout([0, 1], "aa", 0.4), "what is held out has no hallucinated"),
        (lambda: holdout([0, 1], "aa", 0.6), "what stays has no hallucinated"),
        (lambda: holdout([0, 0, 1], "aab", 0.6), "what stays has no"),
        (lambda: holdout([], [], 0.5), "no hallucinated"),
        (lambda: toha_splits(9), "n is 9; give at least 10"),
        (lambda: leaky_halves(1), "n is 1; give at least 2"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_fold_without_a_class_is_named():
    """Enough groups of each class, and still no even way to deal them out."""
    found = []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        groups = rng.integers(0, 5, 12)
        labels = rng.integers(0, 2, 12)
        try:
            grouped_kfold(labels, groups, folds=3, seed=0)
        except ValueError as error:
            found.append(str(error))
    assert any("a fold has no" in each for each in found)
