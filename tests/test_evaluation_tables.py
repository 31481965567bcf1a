"""The comparison of methods with controls, and the summary of reports."""

import dataclasses

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from jaxhal.evaluation import auroc, bootstrap, compare, paired
from jaxhal.evaluation.ranking import WithinParts
from jaxhal.reporting.report import Report, Token
from jaxhal.reporting.summary import source, summarize, verdict
from jaxhal.types import Label


@pytest.fixture(scope="module")
def run():
    """Four scores of 120 answers to 40 sources."""
    rng = np.random.default_rng(0)
    labels, groups = rng.integers(0, 2, 120), np.repeat(np.arange(40), 3)
    length = 0.6 * labels + rng.normal(size=120)
    scores = {
        "length": length,
        "novel": rng.normal(size=120),
        "strong": 3 * labels + rng.normal(size=120),
        "near": length + 0.05 * labels + 0.3 * rng.normal(size=120),
        "weak": -labels + rng.normal(size=120),
    }
    return scores, labels, groups


def test_compare_puts_each_method_beside_the_best_control(run):
    scores, labels, groups = run
    rows = compare(scores, labels, groups, controls={"length", "novel"})
    assert [row["method"] for row in rows] == [
        *("strong", "near", "weak", "length", "novel")
    ]
    for row in rows:
        values = scores[row["method"]]
        assert row["AUROC"] == pytest.approx(roc_auc_score(labels, values))
        assert row["AUPRC"] == pytest.approx(average_precision_score(labels, values))
        assert (row["low"], row["high"]) == bootstrap(values, labels, groups)
        keys = ("difference", "difference low", "difference high", "p")
        if row["control"]:
            assert {row[key] for key in (*keys, "beats controls")} == {None}
        else:
            expected = paired(values, scores["length"], labels, groups)
            assert tuple(row[key] for key in keys) == expected
    assert [row["beats controls"] for row in rows[:3]] == ["yes", "within noise", "no"]


def test_a_small_steady_lead_is_a_lead(run):
    """Its own interval holds the control's AUROC, the interval of the lead not 0."""
    scores, labels, groups = run
    pair = {"length": scores["length"], "steady": scores["length"] + 0.2 * labels}
    steady, length = compare(pair, labels, groups, controls={"length"})
    assert steady["low"] < length["AUROC"] < steady["AUROC"]
    assert steady["beats controls"] == "yes" and steady["p"] < 0.01


def test_few_sources_show_no_lead():
    """Resamples of one source are all alike, so any difference would be sure."""
    scores, labels = {"m": range(6), "c": [0, 1, 3, 2, 4, 5]}, [0, 0, 0, 1, 1, 1]
    for groups in (["a"] * 6, list("abcdab"), None):
        ours, _ = compare(scores, labels, groups, {"c"})
        assert ours["difference"] > 0 and ours["beats controls"] == "within noise"


def test_scores_of_several_fits_compare_within_parts():
    """A score of noise, at another level in each part, with grounded answers again."""
    rng = np.random.default_rng(1)
    parts = np.repeat(np.arange(3), (300, 210, 250))
    labels = np.concatenate([np.arange(n) < n - 200 for n in (300, 210, 250)])
    scores = rng.normal(size=760) + np.array([0.0, 3.0, -2.0])[parts]
    groups = np.where(labels, 1000 + np.arange(760), np.arange(760) % 40)
    won = []
    for part in range(3):
        bad, good = (scores[(parts == part) & (labels == one)] for one in (1, 0))
        won += (bad[:, None] > good).ravel().tolist()
    metric = WithinParts(parts.tolist())
    assert metric(scores, labels) == pytest.approx(np.mean(won))
    (row,) = compare({"noise": scores}, labels, groups, metric=metric)
    assert row["low"] < row["AUROC"] == metric(scores, labels) < row["high"]
    assert row["low"] < 0.5 < row["high"] and auroc(scores, labels) < row["low"]
    # Of one part it is the AUROC; where a draw leaves a part one class, of the others.
    alone = WithinParts([0] * 760)
    assert alone(scores, labels) == pytest.approx(roc_auc_score(labels, scores))
    draws = np.ones((2, 760), int)
    draws[0, (parts == 0) & labels] = 0
    draws[1, ~labels] = 0
    first, none = metric.of_draws(scores, labels)(draws)
    assert first == pytest.approx(np.mean(won[20_000:])) and none == 0.5


def test_compare_without_controls(run):
    scores, labels, _ = run
    rows = compare(scores, labels)
    best_first = sorted(scores, key=lambda name: -roc_auc_score(labels, scores[name]))
    assert [row["method"] for row in rows] == best_first
    assert all(row["difference"] is row["beats controls"] is None for row in rows)
    assert compare({}, labels) == []


def test_compare_names_what_is_wrong():
    scores = {"good": [0.0, 1.0], "bad": [0.0, np.nan]}
    with pytest.raises(ValueError, match=r"bad: scores\[1\] is nan"):
        compare(scores, [0, 1])
    with pytest.raises(ValueError, match="good: all 2 labels are of one class"):
        compare(scores, [1, 1])
    with pytest.raises(ValueError, match="good: got 1 groups for 2 rows"):
        compare(scores, [0, 1], ["a"])
    with pytest.raises(ValueError, match=r"\['other'\]; got \['good', 'bad'\]"):
        compare(scores, [0, 1], controls={"other"})


def report(number, spans, scores, **given):
    label = int(spans)
    tokens = [
        Token("It", 0, 2, {"token_entropy": 0.2}),
        Token(" is", 2, 5, {"token_entropy": 0.2 + 0.5 * label}),
    ]
    labels = (Label(2, 5),) if label else ()
    given = {"context": f"c{number // 2}", "label": label, "labels": labels} | given
    return Report(
        str(number), "tiny", "It is", scores, tokens, [], {}, "token_entropy", **given
    )


def answers(n=24):
    rng = np.random.default_rng(1)
    return [
        report(
            number,
            number % 2 == 1,
            {
                "response_length": float(rng.normal()),
                "token_entropy": 5 * (number % 2) + float(rng.normal()),
            },
        )
        for number in range(n)
    ]


def test_summary_is_the_comparison_by_source():
    reports = answers()
    rows = summarize(reports)
    table = compare(
        {name: [r.scores[name] for r in reports] for name in reports[0].scores},
        [r.label for r in reports],
        [source(r) for r in reports],
        {"response_length"},
    )
    assert [list(row) for row in rows] == 2 * [
        [
            *("detector", "AUROC", "95 % interval", "token AUROC", "control"),
            "beats controls",
        ]
    ]
    for row, other in zip(rows, table, strict=True):
        assert row["detector"] == other["method"]
        for key in ("AUROC", "control", "beats controls"):
            assert row[key] == other[key]
        assert row["95 % interval"] == f"{other['low']:.2f}–{other['high']:.2f}"
    # 12 tokens of 0.7 inside the spans; 36 of 0.2 outside.
    assert [row["token AUROC"] for row in rows] == [1.0, None]
    assert [row["beats controls"] for row in rows] == ["yes", None]


def test_few_answers_have_no_interval():
    few = [*answers()[:8:2], answers()[1]]
    rows = summarize(few)
    assert len(rows) == 2 and not any(row["95 % interval"] for row in rows)
    assert verdict(rows).startswith("Fewer than five sources of a class")


def test_summary_leaves_out_failures_and_the_unlabelled():
    reports = answers()
    more = [
        *reports,
        report(90, True, {}, error="too long"),
        report(91, False, {}, label=None, labels=None),
    ]
    assert summarize(more) == summarize(reports)
    uneven = dataclasses.replace(
        reports[0], scores=dict(reports[0].scores) | {"x": 1.0}
    )
    with pytest.raises(ValueError, match="only some reports have scores of x; give"):
        summarize([*reports[1:], uneven])
    assert summarize(reports[::2]) == summarize([]) == []


def test_source_is_the_context_or_the_prompt():
    assert source(report(0, False, {})) == "c0"
    assert source(report(0, False, {}, context=None, prompt="p")) == "p"


def test_verdict_says_what_the_table_shows():
    assert verdict([]) == "Answers of one class have no AUROC."
    row = {"detector": "a", "AUROC": 0.8, "control": False, "beats controls": None}
    assert verdict([row]).endswith("rise and fall together.")
    control = row | {"detector": "c", "AUROC": 0.7, "control": True}
    assert "best control is c (0.700); no method was scored." in verdict([control])
    rows = [
        row | {"beats controls": "yes"},
        row | {"detector": "b", "beats controls": "within noise"},
        row | {"detector": "d", "beats controls": "no"},
        row | {"detector": "e", "beats controls": "no"},
        control,
    ]
    assert verdict(rows).endswith(
        "clearly above it: a; above it only within the noise: b; not above it: d, e."
    )
