"""Calibration and thresholds against definitions, a minimiser and exhaustive loops."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, f1_score

from jaxhal.evaluation import (
    Isotonic,
    Platt,
    best_accuracy_threshold,
    best_f1_threshold,
    brier,
    decided,
    ece,
    isotonic,
    platt,
    precision_threshold,
)

rows = st.lists(
    st.tuples(
        # Rounded, since scikit-learn takes scores within 1e-15 for the same.
        st.integers(-3, 3).map(float)
        | st.floats(-1e3, 1e3).map(lambda score: round(score, 6)),
        st.integers(0, 1),
    ),
    min_size=2,
    max_size=20,
).filter(lambda rows: len({label for _, label in rows}) == 2)


def smoothed(labels):
    hits, misses = sum(labels), len(labels) - sum(labels)
    return np.where(labels, (hits + 1) / (hits + 2), 1 / (misses + 2))


@settings(deadline=None, max_examples=50)
@given(rows)
def test_platt_is_stationary_and_increasing(rows):
    scores, labels = map(np.array, zip(*rows, strict=True))
    found = platt(scores, labels)
    error = found(scores) - smoothed(labels)
    pull = error @ ((scores - scores.mean()) / (np.ptp(scores) or 1.0))
    assert error.sum() == pytest.approx(0, abs=1e-5)
    if found.slope > 0:
        assert pull == pytest.approx(0, abs=1e-5)
    else:  # the likelihood may still rise, but towards negative slopes
        assert found.slope == 0 and pull >= -1e-8


def test_platt_of_separated_useless_and_shifted_scores():
    labels = [0, 0, 0, 1, 1]
    found = platt([0.0, 1.0, 2.0, 3.0, 4.0], labels)
    assert 0 < found.slope < 10
    assert found([1e6, -1e6]).tolist() == [1.0, 0.0]
    constant = smoothed(labels).mean()
    for useless in ([4.0, 3.0, 2.0, 1.0, 0.0], [7.0] * 5):
        found = platt(useless, labels)
        assert found.slope == 0.0 and found([3.0]) == pytest.approx([constant])
    scores = np.array([0.3, 0.1, 0.5, 0.4, 0.7])
    moved = platt(1e6 * scores - 1e8, labels)(1e6 * scores - 1e8)
    assert moved == pytest.approx(platt(scores, labels)(scores), abs=1e-6)


def test_isotonic_is_a_line_between_knots():
    found = Isotonic((0.0, 2.0), (0.25, 0.75))
    assert found([-1.0, 0.5, 1.0, 3.0]).tolist() == [0.25, 0.375, 0.5, 0.75]


@pytest.mark.parametrize("fit", [platt, isotonic])
def test_calibration_helps_on_other_answers(fit):
    rng = np.random.default_rng(3)
    labels = rng.integers(0, 2, 2000)
    scores = labels + rng.normal(size=2000)
    found = fit(scores[:1000], labels[:1000])(scores[1000:])
    raw = 1 / (1 + np.exp(-3 * scores[1000:]))
    assert ece(found, labels[1000:]) < 0.06 < ece(raw, labels[1000:])
    assert brier(found, labels[1000:]) < brier(raw, labels[1000:])


@pytest.mark.parametrize("fit", [platt, isotonic])
def test_calibrations_survive_json(fit):
    found = fit([0.1, 0.7, 0.4, 0.9], [0, 0, 1, 1])
    fields = json.loads(json.dumps(dataclasses.asdict(found)))
    if fit is isotonic:
        fields = {name: tuple(values) for name, values in fields.items()}
    assert type(found)(**fields) == found
    assert isinstance(found, (Platt, Isotonic)) and hash(found) is not None


@pytest.mark.parametrize(
    ("find", "metric", "reference"),
    [
        (best_f1_threshold, "f1", f1_score),
        (best_accuracy_threshold, "accuracy", accuracy_score),
    ],
)
@settings(deadline=None, max_examples=50)
@given(rows)
def test_the_best_threshold_is_best_of_all(find, metric, reference, rows):
    scores, labels = map(np.array, zip(*rows, strict=True))
    threshold = find(scores, labels)
    every = {value: reference(labels, scores >= value) for value in set(scores)}
    best = max(every.values())
    assert decided(scores, labels, threshold)[metric] == pytest.approx(best)
    # The highest among equals flags as few as any, and lies between two scores.
    equal = [value for value in every if every[value] == pytest.approx(best)]
    assert (scores >= threshold).sum() == min((scores >= v).sum() for v in equal)
    between(threshold, scores)


@settings(deadline=None, max_examples=50)
@given(rows, st.floats(0.01, 1.0))
def test_precision_threshold_has_most_recall(rows, target):
    scores, labels = map(np.array, zip(*rows, strict=True))
    found = {value: decided(scores, labels, value) for value in sorted(set(scores))}
    good = {v: each for v, each in found.items() if each["precision"] >= target}
    if not good:
        best = max(each["precision"] for each in found.values())
        with pytest.raises(ValueError, match=f"best is {best:.3f}, so give a target"):
            precision_threshold(scores, labels, target)
        return
    threshold = precision_threshold(scores, labels, target)
    most = max(each["recall"] for each in good.values())
    chosen = decided(scores, labels, threshold)
    assert chosen["precision"] >= target and chosen["recall"] == most
    fewest = min((scores >= v).sum() for v in good if good[v]["recall"] == most)
    assert (scores >= threshold).sum() == fewest
    between(threshold, scores)


def between(threshold, scores):
    """Half-way between the lowest flagged score and the next one below."""
    flagged, others = scores[scores >= threshold], scores[scores < threshold]
    if len(others):
        assert threshold == pytest.approx((flagged.min() + others.max()) / 2)
    else:
        assert threshold == scores.min()


def test_thresholds_of_neighbouring_floats():
    above = np.nextafter(1.0, 2.0)
    assert best_f1_threshold([1.0, above], [0, 1]) == above
    assert best_f1_threshold([0.0, 5e-324], [0, 1]) == 5e-324
    assert best_f1_threshold([-1.7e308, 1.7e308], [0, 1]) == 0.0


@pytest.mark.parametrize(
    ("scores", "labels", "message"),
    [
        ([], [], "empty"),
        ([1.0, 2.0], [0, 0], "one class"),
        ([1.0, np.inf], [0, 1], r"scores\[1\] is inf"),
        ([1.0], [0, 1], "do not pair up"),
        ([1.0, 2.0], [0, -1], r"labels\[1\] is .*-1"),
    ],
)
@pytest.mark.parametrize(
    "function",
    [
        platt,
        isotonic,
        best_f1_threshold,
        best_accuracy_threshold,
        lambda scores, labels: precision_threshold(scores, labels, 0.5),
    ],
)
def test_bad_rows_are_named(function, scores, labels, message):
    with pytest.raises(ValueError, match=message):
        function(scores, labels)


@pytest.mark.parametrize("target", [0.0, 1.5])
def test_a_target_is_a_precision(target):
    with pytest.raises(ValueError, match=f"target is {target}"):
        precision_threshold([0.0, 1.0], [0, 1], target)
