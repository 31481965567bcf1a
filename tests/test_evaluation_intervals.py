"""Intervals and differences against slow resampling, and their coverage."""

from functools import partial
from math import erf

import numpy as np
import pytest
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    f1_score,
    roc_auc_score,
)

from jaxhal.evaluation import (
    Decided,
    auprc,
    aurc,
    auroc,
    bootstrap,
    decided,
    interval,
    intervals,
    paired,
    prr,
)
from jaxhal.evaluation.selective import CoverageAtPrecision


def f1(scores, labels):
    return decided(scores, labels, 0.5)["f1"]


def mean_risk(scores, labels):
    """Of keeping 1, 2, ... answers; one of equal scores counts as their mean."""
    means = [labels[scores == score].mean() for score in np.sort(scores)]
    return np.mean([np.mean(means[:kept]) for kept in range(1, len(means) + 1)])


def rejection(scores, labels):
    best = mean_risk(labels, labels)
    return (labels.mean() - mean_risk(scores, labels)) / (labels.mean() - best)


def coverage(scores, labels):
    kept = [scores <= score for score in scores]
    return max(some.mean() for some in kept if labels[some].mean() <= 0.7)


def resamples(labels, groups, repeats, seed=0):
    """Row numbers of each resample: whole groups, until both classes are there."""
    rng = np.random.default_rng(seed)
    names = list(dict.fromkeys(groups))
    rows = {name: [at for at, g in enumerate(groups) if g == name] for name in names}
    made = []
    while len(made) < repeats:
        drawn = rng.integers(len(names), size=len(names))
        chosen = [row for at in drawn for row in rows[names[at]]]
        if len({labels[row] for row in chosen}) == 2:
            made.append(chosen)
    return made


def grouped(seed, sources=20):
    """Scores, a baseline, labels and sources of 1 to 4 answers."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(sources), rng.integers(1, 5, sources))
    labels = rng.integers(0, 2, len(groups))
    shift = rng.normal(size=sources)[groups]
    scores = np.round(labels + shift + rng.normal(size=len(groups)), 1)
    baseline = np.round(0.3 * labels + shift + rng.normal(size=len(groups)), 1)
    return scores, baseline, labels, [f"source {group}" for group in groups]


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


@pytest.mark.parametrize(
    ("metric", "oracle"),
    [
        (auroc, lambda s, y: roc_auc_score(y, s)),
        (auprc, lambda s, y: average_precision_score(y, s)),
        (f1, lambda s, y: f1_score(y, s >= 0.5)),
        (Decided("f1"), lambda s, y: f1_score(y, s >= 0.5)),
        (Decided("accuracy", 0.3), lambda s, y: accuracy_score(y, s >= 0.3)),
        (aurc, mean_risk),
        (prr, rejection),
        (CoverageAtPrecision(0.3), coverage),
    ],
)
@pytest.mark.parametrize("by_source", [True, False])
def test_interval_equals_slow_resampling(metric, oracle, by_source, monkeypatch):
    scores, _, labels, groups = grouped(2)
    monkeypatch.setattr(intervals, "_AT_ONCE", 7 * len(labels))
    groups = groups if by_source else None
    chosen = resamples(labels, groups or range(len(labels)), 40)
    found = [oracle(scores[rows], labels[rows]) for rows in chosen]
    expected = tuple(np.percentile(found, [2.5, 97.5]))
    assert interval(metric, scores, labels, groups, 40) == pytest.approx(expected)
    if metric is auroc:
        assert bootstrap(scores, labels, groups, 40) == pytest.approx(expected)


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
    assert paired([0.0, 1.0], [1.0, 0.0], [0, 1], repeats=20)[:3] == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("metric", "oracle"),
    [
        (auroc, lambda s, y: roc_auc_score(y, s)),
        (f1, lambda s, y: f1_score(y, s >= 0.5)),
    ],
)
def test_paired_equals_slow_resampling(metric, oracle):
    scores, baseline, labels, groups = grouped(4)
    found = [
        oracle(scores[rows], labels[rows]) - oracle(baseline[rows], labels[rows])
        for rows in resamples(labels, groups, 60)
    ]
    result = paired(scores, baseline, labels, groups, metric, repeats=60)
    assert result.value == pytest.approx(
        oracle(scores, labels) - oracle(baseline, labels)
    )
    assert result[1:3] == pytest.approx(tuple(np.percentile(found, [2.5, 97.5])))
    tail = min(sum(d <= 0 for d in found), sum(d >= 0 for d in found))
    assert result.p_value == pytest.approx(min(1.0, 2 * (1 + tail) / 61))
    # Neither at the floor nor at the ceiling, else the line above shows nothing.
    assert 2 / 61 < result.p_value < 1


def test_paired_is_antisymmetric():
    scores, baseline, labels, groups = grouped(5)
    ahead, behind = (
        paired(scores, baseline, labels, groups, repeats=200),
        paired(baseline, scores, labels, groups, repeats=200),
    )
    assert ahead.value == -behind.value
    assert (ahead.low, ahead.high) == pytest.approx((-behind.high, -behind.low))
    assert ahead.p_value == behind.p_value
    same = paired(scores, np.exp(scores), labels, groups, repeats=50)
    assert same == (0.0, 0.0, 0.0, 1.0)


def test_shared_luck_cancels():
    scores, _, labels, groups = grouped(6, sources=60)
    nearly = scores + 0.2 * np.random.default_rng(0).normal(size=len(scores))
    found = paired(nearly, scores, labels, groups)
    low, high = bootstrap(scores, labels, groups)
    assert found.high - found.low < (high - low) / 2


def test_coverage_needs_groups():
    """Answers to a source share label and luck: singly drawn, too few intervals hold
    the true AUROC; by source, about 95 % do."""
    rng = np.random.default_rng(7)
    truth = (1 + erf(1 / np.sqrt(2) / np.sqrt(1 + 0.1) / np.sqrt(2))) / 2
    held = np.zeros(2)
    for _ in range(120):
        labels = np.repeat(rng.permutation(np.arange(40) % 2), 5)
        groups = np.repeat(np.arange(40), 5)
        shift = rng.normal(size=40)[groups]
        scores = labels + shift + np.sqrt(0.1) * rng.normal(size=200)
        for at, each in enumerate((groups, None)):
            low, high = bootstrap(scores, labels, each, repeats=150)
            held[at] += low <= truth <= high
    assert 0.89 <= held[0] / 120 <= 0.99
    assert held[1] / 120 < 0.75


def test_paired_rejects_at_its_level():
    """Two equally good scores differ at 5 % in about 5 % of samples."""
    rng = np.random.default_rng(8)
    values = []
    for _ in range(120):
        groups = np.repeat(np.arange(50), 3)
        labels = rng.integers(0, 2, 150)
        common = labels + rng.normal(size=50)[groups]
        scores, baseline = common + rng.normal(size=(2, 150))
        found = paired(scores, baseline, labels, groups, repeats=150)
        values.append(found.p_value)
        # The p-value and the interval tell the same.
        assert (found.p_value < 0.04) <= (found.low > 0 or found.high < 0)
        assert (found.p_value > 0.07) <= (found.low <= 0 <= found.high)
    assert 0.01 <= np.mean(np.array(values) < 0.05) <= 0.11
    assert 0.4 < np.mean(values) < 0.6


def test_bad_arguments_are_named():
    rows = ([0.0, 1.0], [0, 1])
    for call in (
        partial(bootstrap, *rows),
        partial(interval, auprc, *rows),
        partial(paired, rows[0], *rows),
    ):
        with pytest.raises(ValueError, match="got 1 groups for 2 rows"):
            call(groups=["a"])
        with pytest.raises(ValueError, match="repeats is 0"):
            call(repeats=0)
    with pytest.raises(ValueError, match="one class"):
        interval(auprc, [0.0, 1.0], [0, 0])
    with pytest.raises(ValueError, match="one class"):
        paired([0.0, 1.0], [0.0, 1.0], [1, 1])
    with pytest.raises(ValueError, match="do not pair up"):
        paired([0.0, 1.0], [0.0, 1.0, 2.0], [0, 1])
    with pytest.raises(ValueError, match=r"baseline\[1\] is nan"):
        paired([0.0, 1.0], [0.0, np.nan], [0, 1])


@pytest.mark.parametrize(("few", "share"), [(2, 0.66), (5, 0.87), (20, 0.93)])
def test_few_sources_of_a_class_make_intervals_too_narrow(few, share):
    """The coverages that the module states: four answers a source, half of whose luck
    is the source's, beside forty sources of the other class."""
    rng, (sources, each), shift = np.random.default_rng(0), (few + 40, 4), 1.2
    group = np.repeat(np.arange(sources), each)
    labels = (group < few).astype(int)
    true, held = (1 + erf(shift / 2)) / 2, []
    for _ in range(400):
        luck = rng.normal(size=sources)[group] + rng.normal(size=len(group))
        low, high = bootstrap(luck / 2**0.5 + shift * labels, labels, group, 200)
        held.append(low <= true <= high)
    assert np.mean(held) == pytest.approx(share, abs=0.03)
