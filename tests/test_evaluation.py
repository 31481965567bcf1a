"""Metrics of answers, tokens and spans against scikit-learn and slow loops."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sklearn

from jaxhal import evaluation
from jaxhal.evaluation import (
    auprc,
    auprc_trapezoid,
    auroc,
    bootstrap,
    brier,
    decided,
    ece,
    ece_by_chance,
    evaluate,
    span_f1,
    token_metrics,
)
from jaxhal.evaluation.metrics import in_bins
from jaxhal.reporting.report import Span
from jaxhal.types import Label

RANKING = [auroc, auprc, auprc_trapezoid]

rows = st.lists(
    st.tuples(st.integers(-3, 3).map(float) | st.floats(-1e6, 1e6), st.booleans()),
    min_size=2,
    max_size=20,
).filter(lambda rows: len({label for _, label in rows}) == 2)


@settings(deadline=None, max_examples=50)
@given(rows)
def test_auroc_equals_sklearn(rows):
    scores, labels = zip(*rows, strict=True)
    assert auroc(scores, labels) == pytest.approx(sklearn.roc_auc_score(labels, scores))


def test_auroc_is_a_rank_statistic():
    rng = np.random.default_rng(0)
    scores, labels = rng.normal(size=500), rng.integers(0, 2, 500)
    assert auroc(np.exp(scores), labels) == auroc(scores, labels)
    assert auroc(-scores, labels) == pytest.approx(1 - auroc(scores, labels))
    assert auroc(np.zeros(500), labels) == 0.5
    assert auroc(np.float32(labels), labels) == 1.0


@settings(deadline=None, max_examples=50)
@given(rows, st.integers(-4, 4).map(float))
def test_splitting_equals_sklearn(rows, threshold):
    scores, labels = zip(*rows, strict=True)
    flagged = [score >= threshold for score in scores]
    expected = {
        "accuracy": sklearn.accuracy_score(labels, flagged),
        "precision": sklearn.precision_score(labels, flagged, zero_division=0),
        "recall": sklearn.recall_score(labels, flagged, zero_division=0),
        "f1": sklearn.f1_score(labels, flagged, zero_division=0),
    }
    assert decided(scores, labels, threshold) == pytest.approx(expected)


def test_a_ratio_of_nothing_is_zero():
    assert decided([0.1, 0.2], [0, 1], threshold=1.0)["precision"] == 0.0
    assert decided([0.1, 0.2], [0, 0], threshold=0.0)["recall"] == 0.0
    assert decided([0.1, 0.2], [0, 0], threshold=1.0) == {
        "accuracy": 1.0,
        "precision": 0.0,
        "recall": 0.0,
        "f1": 0.0,
    }


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1), st.integers(1, 12)
)
def test_calibration_errors_equal_loops(rows, bins):
    probabilities, labels = zip(*rows, strict=True)
    expected = 0.0
    edges = np.linspace(0, 1, bins + 1)
    for number, (low, high) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
        last = number == bins - 1
        inside = [(p, y) for p, y in rows if low <= p < high or (last and p == high)]
        if inside:
            share = np.mean([y for _, y in inside])
            gap = abs(share - np.mean([p for p, _ in inside]))
            expected += len(inside) / len(rows) * gap
    assert ece(probabilities, labels, bins) == pytest.approx(expected)
    squares = [(p - y) ** 2 for p, y in rows]
    assert brier(probabilities, labels) == pytest.approx(np.mean(squares))


def test_calibrated_probabilities_have_no_error():
    probabilities = np.repeat([0.25, 0.75], 4)
    labels = [1, 0, 0, 0, 1, 1, 1, 0]
    assert ece(probabilities, labels) == 0.0
    assert brier(probabilities, labels) == 0.25 * 0.75
    assert ece([1.0, 0.0], [0, 1]) == brier([1.0, 0.0], [0, 1]) == 1.0


def test_evaluate_gives_what_it_is_asked_for():
    rng = np.random.default_rng(4)
    labels, scores = rng.integers(0, 2, 50), rng.normal(size=50)
    probabilities = rng.random(50)
    expected = {each.__name__: each(scores, labels) for each in RANKING}
    assert evaluate(scores, labels) == expected
    expected |= decided(scores, labels, 0.3)
    assert evaluate(scores, labels, threshold=0.3) == expected
    expected |= {each.__name__: each(probabilities, labels) for each in (ece, brier)}
    assert evaluate(scores, labels, 0.3, probabilities) == expected


BAD_ROWS = [
    ([], [], "are empty"),
    ([1.0, np.nan], [0, 1], r"\[1\] is nan"),
    ([-np.inf, 1.0], [0, 1], r"\[0\] is -inf"),
    ([1.0, 2.0, 3.0], [0, 1], "do not pair up"),
    ([[1.0], [2.0]], [[0], [1]], "do not pair up"),
    ([1.0, 0.5], [0, 2], r"labels\[1\] is .*2.*; use 0 or 1"),
]


@pytest.mark.parametrize(
    ("scores", "labels", "message"), [*BAD_ROWS, ([1.0, 2.0], [1, 1], "one class")]
)
@pytest.mark.parametrize("function", [*RANKING, bootstrap, evaluate])
def test_bad_rows_are_named(function, scores, labels, message):
    with pytest.raises(ValueError, match=message):
        function(scores, labels)


@pytest.mark.parametrize(("scores", "labels", "message"), BAD_ROWS)
def test_bad_rows_to_split_are_named(scores, labels, message):
    with pytest.raises(ValueError, match=message):
        decided(scores, labels, 0.5)


@pytest.mark.parametrize(
    ("probabilities", "labels", "message"),
    [
        *BAD_ROWS,
        ([0.5, 1.5], [0, 1], r"probabilities\[1\] is 1.5, outside \[0, 1\]"),
        ([-0.5, 0.5], [0, 1], r"probabilities\[0\] is -0.5, outside \[0, 1\]"),
    ],
)
@pytest.mark.parametrize("function", [ece, brier])
def test_bad_probabilities_are_named(function, probabilities, labels, message):
    with pytest.raises(ValueError, match=message):
        function(probabilities, labels)


@pytest.mark.parametrize("count", [40, 300])
def test_ece_by_chance_is_that_of_labels_drawn_by_the_probabilities(count):
    rng = np.random.default_rng(0)
    probabilities = rng.beta(1, 2, count)
    drawn = rng.random((2000, count)) < probabilities
    expected = np.mean([ece(probabilities, labels.astype(int)) for labels in drawn])
    assert ece_by_chance(probabilities) == pytest.approx(expected, rel=0.03)
    assert ece_by_chance([0.0, 1.0]) == 0.0


def test_bins_are_closed_on_the_left():
    """Edges such as 0.3 are what is written so, not the next number above it."""
    some, labels = [0.3] * 5 + [0.25] * 5, [1, 1, 1, 0, 0] + [0] * 5
    assert ece(some, labels) == pytest.approx((5 * 0.3 + 5 * 0.25) / 10)
    for bins in (10, 20, 100):
        edges = [float(f"{n / bins:.2f}") for n in range(bins)]
        assert in_bins(np.array(edges), bins).tolist() == [*range(bins)]
    assert in_bins(np.array([0.0, 1.0]), 10).tolist() == [0, 9]


def test_ece_needs_bins():
    with pytest.raises(ValueError, match="bins is 0"):
        ece([0.5], [1], bins=0)


def test_token_metrics_are_micro_averages():
    rng = np.random.default_rng(5)
    lengths = [3, 0, 40, 7]
    scores = [rng.normal(size=n) for n in lengths]
    labels = [rng.integers(0, 2, n) for n in lengths]
    flat, truth = np.concatenate(scores), np.concatenate(labels)
    assert token_metrics(scores, labels, threshold=0.2) == pytest.approx(
        {
            "precision": sklearn.precision_score(truth, flat >= 0.2),
            "recall": sklearn.recall_score(truth, flat >= 0.2),
            "f1": sklearn.f1_score(truth, flat >= 0.2),
            "auroc": sklearn.roc_auc_score(truth, flat),
        }
    )


@pytest.mark.parametrize(
    ("scores", "labels", "message"),
    [
        ([], [], "empty; give at least one response"),
        ([[0.1]], [[0], [1]], "token_scores is of 1 responses and token_labels of 2"),
        ([[0.1], [0.2, 0.3]], [[0], [1]], "response 1 has 2 token scores and 1 token"),
        ([[0.1], [np.nan]], [[0], [1]], r"scores\[1\] is nan"),
        ([[0.1], [0.2]], [[0], [3]], r"labels\[1\] is .*3"),
        ([[0.1], [0.2]], [[0.9], [1.9]], r"labels\[0\] is .*0.9"),
        ([[0.1], [0.2]], [[0], [0]], "one class"),
    ],
)
def test_bad_tokens_are_named(scores, labels, message):
    with pytest.raises(ValueError, match=message):
        token_metrics(scores, labels, 0.5)


spans = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 10)).map(
        lambda span: (span[0], span[0] + span[1])
    ),
    max_size=4,
)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(spans, spans), min_size=1, max_size=4))
def test_span_f1_counts_characters(responses):
    predicted, annotated = zip(*responses, strict=True)
    found, truth = np.zeros((2, len(responses), 40), bool)
    for row, (some, others) in enumerate(responses):
        for start, end in some:
            found[row, start:end] = True
        for start, end in others:
            truth[row, start:end] = True
    scores = sklearn.precision_recall_fscore_support(
        truth.ravel(), found.ravel(), average="binary", zero_division=0
    )
    expected = dict(zip(("precision", "recall", "f1"), scores, strict=False))
    assert span_f1(predicted, annotated) == pytest.approx(expected)


def test_span_f1_takes_the_spans_of_reports_and_examples():
    predicted = [(Span(2, 6, "text", 0.5),)]
    found = span_f1(predicted, [(Label(4, 8), Label(4, 6, "conflict"))])
    assert found == {"precision": 0.5, "recall": 0.5, "f1": 0.5}


@pytest.mark.parametrize(
    ("predicted", "annotated", "message"),
    [
        ([], [], "empty; give at least one response"),
        ([[]], [[], []], "predicted is of 1 responses and annotated of 2"),
        ([[], [(3, 3)]], [[], []], r"predicted\[1\] holds the span \[3, 3\)"),
        ([[]], [[(-1, 3)]], r"annotated\[0\] holds the span \[-1, 3\)"),
    ],
)
def test_bad_spans_are_named(predicted, annotated, message):
    with pytest.raises(ValueError, match=message):
        span_f1(predicted, annotated)


def test_inputs_of_other_libraries():
    import jax.numpy as jnp
    import pandas as pd

    scores, labels = [0.1, 0.4, 0.4, 0.9], [0, 0, 1, 1]
    assert auroc(jnp.array(scores), jnp.array(labels)) == 0.875
    frame = pd.DataFrame({"score": scores, "label": labels}, index=[3, 1, 0, 2])
    assert auroc(frame.score, frame.label) == 0.875
    assert bootstrap(frame.score, frame.label, frame.index) == (0.5, 1.0)


def test_public_names_are_no_modules():
    for name in ("evaluate", "interval", "paired", "compare"):
        assert callable(getattr(evaluation, name))
