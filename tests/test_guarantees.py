"""Promises hold on answers to come as often as stated, and intervals cover."""

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import binom

from jaxhal.evaluation import (
    adapted,
    aurc,
    coverage_at_precision,
    guarantee,
    guaranteed_highlights,
    highlighted,
    platt,
    prr,
    rate,
)
from jaxhal.evaluation.guarantees import Guarantee, bounded
from jaxhal.evaluation.prevalence import _weight, at_rate

PROMISES = [{"precision": 0.7}, {"recall": 0.8}, {"false_alarms": 0.2}]


def world(rng, count, per_source=1):
    """Scores and labels of answers, those of a source alike."""
    groups = np.arange(count) // per_source
    shared = rng.normal(size=count)[groups] * (per_source > 1)
    labels = (rng.normal(size=count) + shared > (1 + (per_source > 1)) * 0.5).astype(
        int
    )
    return 1.7 * labels + rng.normal(size=count) + shared, labels, groups


def kept(promise, scores, labels, threshold):
    flagged, true = scores >= threshold, labels == 1
    ((kind, level),) = promise.items()
    if kind == "false_alarms":
        return flagged[~true].mean() <= level
    return (true[flagged] if kind == "precision" else flagged[true]).mean() >= level


@pytest.mark.parametrize("per_source", [1, 3])
@pytest.mark.parametrize("promise", PROMISES, ids=lambda p: next(iter(p)))
def test_a_promise_is_broken_no_more_often_than_stated(promise, per_source):
    rng = np.random.default_rng(0)
    scores, labels, _ = world(rng, 60_000, per_source)
    broken = found = 0
    for _ in range(24):
        some, theirs, groups = world(rng, 360, per_source)
        try:
            one = guarantee(some, theirs, promise, groups if per_source > 1 else None)
        except ValueError:
            continue
        found += 1
        broken += not kept(promise, scores, labels, one.threshold)
    assert found >= 12
    assert broken <= 6  # 2.4 of 24 expected at most; more than 6 come in 1 of 100 runs


def test_the_tail_is_that_of_the_binomial():
    """Of 100 hallucinated answers at most 5 may be missed: P(Bin(100, 0.1) <= 5)."""
    labels = [0] * 20 + [1] * 100
    found = guarantee(range(120), labels, {"recall": 0.9}, confidence=0.9)
    missed = int(found.threshold + 0.5) - 20

    def tail(most):
        return sum(
            math.comb(100, k) * 0.1**k * 0.9 ** (100 - k) for k in range(most + 1)
        )

    assert tail(missed) <= 0.1 < tail(missed + 1)
    assert (found.kind, found.level, found.sources) == ("recall", 0.9, 120)


@pytest.mark.parametrize("kind", ["recall", "false_alarms"])
def test_in_expectation_it_is_an_order_statistic(kind):
    """Split-conformal: the k-th of n + 1, by counting."""
    scores, labels = np.arange(99.0), [0] * 49 + [1] * 50
    found = guarantee(scores, labels, {kind: 0.8 if kind == "recall" else 0.2},
                      confidence=None)  # fmt: skip
    if kind == "recall":  # (missed + 1) / 51 <= 0.2
        assert (scores[49:] < found.threshold).sum() == 9
    else:  # (flagged + 1) / 50 <= 0.2
        assert (scores[:49] >= found.threshold).sum() == 9
    assert "on average" in str(found)


def test_a_promise_is_said_as_it_was_made():
    for kind, level, sure, said in (
        ("recall", 0.975, 0.995, "recall at least 97.5% with 99.5% confidence"),
        ("false_alarms", 0.005, None, "false alarms at most 0.5% on average"),
        ("precision", 0.29, 0.9, "precision at least 29% with 90% confidence"),
    ):
        assert str(Guarantee(kind, level, sure, 0.5, 40)) == f"{said} (40 sources)"


@pytest.mark.parametrize("kind", ["recall", "false_alarms"])
def test_in_expectation_an_answer_is_of_a_new_source(kind):
    """Threshold by threshold, written out."""
    rng = np.random.default_rng(4)
    labels, groups = rng.integers(0, 2, 300), rng.integers(0, 90, 300)
    scores, recall = np.round(rng.normal(size=300) + labels, 1), kind == "recall"
    level = 0.85 if recall else 0.15
    found = guarantee(scores, labels, {kind: level}, groups, confidence=None)
    rows = labels == recall

    def loss(threshold):
        """With one more source, of which all that could be bad is."""
        bad = (scores >= threshold) != recall
        total = 1 - 0.15
        for one in {*groups.tolist()}:
            own = groups == one
            total += (bad & rows)[own].mean() - 0.15 * rows[own].mean()
        return total

    steps = np.unique(scores)
    fine = [step for step in steps if loss(step) <= 1e-9]
    want = max(fine) if recall else min(fine)
    assert ((scores >= found.threshold) == (scores >= want)).all()


def test_in_expectation_a_promise_holds_where_sources_differ():
    """Half of them have one hallucinated answer of ten, which is easy, half ten."""
    rng = np.random.default_rng(0)

    def draw(count):
        bad = np.where(np.arange(count) % 2, 10, 1)
        labels = (np.arange(10) < bad[:, None]).astype(int)
        gain = np.where(bad == 1, 3, 1)[:, None] * labels
        return (rng.normal(size=labels.shape) + gain).ravel(), labels.ravel()

    reached = []
    for _ in range(20):
        groups = np.repeat(np.arange(200), 10).tolist()
        found = guarantee(*draw(200), {"recall": 0.9}, groups, confidence=None)
        scores, labels = draw(2000)
        reached.append((scores >= found.threshold)[labels == 1].mean())
    assert 0.895 < np.mean(reached) < 0.92


def test_a_share_that_is_just_reached_is_kept():
    """One missed of ten, counting the answer to come, is 10 % and not more."""
    scores, labels = [*range(20, 29), *range(10)], [1] * 9 + [0] * 10
    found = guarantee(scores, labels, {"recall": 0.9}, confidence=None)
    assert found.threshold <= 20


def test_a_first_threshold_that_fails_ends_the_search():
    """The highest scores are of grounded answers: what comes after them is no help."""
    labels = [1] * 400 + [0] * 40
    with pytest.raises(ValueError, match="no known threshold keeps precision"):
        guarantee(range(440), labels, {"precision": 0.8})
    found = guarantee(range(440), [0] * 40 + [1] * 400, {"precision": 0.8})
    assert found.threshold < 40


def test_answers_of_one_source_count_as_one():
    rng = np.random.default_rng(3)
    scores, labels, _ = world(rng, 200)
    alone = guarantee(scores, labels, {"false_alarms": 0.2})
    many = guarantee(
        np.repeat(scores, 5), np.repeat(labels, 5), {"false_alarms": 0.2},
        np.repeat(range(200), 5),
    )  # fmt: skip
    assert many.sources == alone.sources == 200
    assert many.threshold >= alone.threshold


@pytest.mark.parametrize(
    ("promise", "confidence", "message"),
    [
        ({"accuracy": 0.9}, 0.9, "give one of precision"),
        ({"precision": 0.9, "recall": 0.9}, 0.9, "give one of precision"),
        ({"recall": 1.0}, 0.9, "recall is 1.0"),
        ({"recall": 0.9}, 1.0, "confidence is 1.0"),
        ({"precision": 0.9}, None, "precision cannot be promised on average"),
        (
            {"precision": 0.99},
            0.9,
            "no known threshold keeps precision 0.99 on 40 answers",
        ),
        ({"false_alarms": 0.01}, 0.9, "promise 0.15, which one keeps, or give more"),
    ],
)
def test_promises_that_cannot_be_made(promise, confidence, message):
    with pytest.raises(ValueError, match=message):
        guarantee(range(40), [0, 1] * 20, promise, confidence=confidence)


def test_the_nearest_promise_that_can_be_made_is_named():
    scores, labels, groups = world(np.random.default_rng(0), 300)
    with pytest.raises(ValueError, match="precision 0.97 on ") as stopped:
        guarantee(scores, labels, {"precision": 0.97}, groups)
    could = float(
        re.search(r"promise (0\.\d+), which one keeps", str(stopped.value))[1]
    )
    guarantee(scores, labels, {"precision": could}, groups)
    with pytest.raises(ValueError, match="no known threshold keeps"):
        guarantee(scores, labels, {"precision": could + 0.05}, groups)
    with pytest.raises(ValueError, match="promise less, or give more"):
        guarantee(range(4), [0, 1, 0, 1], {"precision": 0.9}, confidence=1 - 1e-9)


@pytest.mark.parametrize("confidence", [0.9, None])
def test_few_supported_characters_are_highlighted(confidence):
    rng = np.random.default_rng(5)

    def answers(count):
        labels = [(rng.random(30) < 0.2).astype(int) for _ in range(count)]
        scores = [np.clip(0.4 * y + 0.6 * rng.random(30) ** 2, 0, 1) for y in labels]
        return scores, labels, [rng.integers(1, 9, 30) for _ in range(count)]

    found = guaranteed_highlights(highlighted(*answers(150)), 0.1,
                                  confidence=confidence)  # fmt: skip
    shares = [
        length[(y == 0) & (s >= found.threshold)].sum() / length[y == 0].sum()
        for s, y, length in zip(*answers(3000), strict=True)
    ]
    assert 0.02 < np.mean(shares) < 0.11
    assert found.kind == "highlighted"
    with pytest.raises(ValueError, match="no known threshold keeps the share"):
        guaranteed_highlights(highlighted([[1.0]] * 5, [[0]] * 5, [[3]] * 5), 0.1)
    with pytest.raises(ValueError, match="no answer has a supported character"):
        guaranteed_highlights(highlighted([[1.0]], [[1]], [[3]]), 0.1)
    with pytest.raises(ValueError, match="2 scores, 1 labels and 1 lengths"):
        highlighted([[1.0, 0.0]], [[1]], [[3]])
    for score, label in ((np.nan, 0), (0.5, 7)):
        with pytest.raises(ValueError, match="answer 0 has a score that is not finite"):
            highlighted([[score, 0.2]], [[label, 0]], [[3, 3]])


def test_highlights_by_slow_loops():
    """Bets in Python on the share of each answer, until a threshold first fails."""
    rng = np.random.default_rng(2)
    scores, labels = rng.random((40, 12)) ** 3, rng.random((40, 12)) < 0.3
    found = guaranteed_highlights(
        highlighted([*scores], [*labels], [[1] * 12] * 40), 0.2
    )

    def p_value(threshold):
        shares = [
            float(np.mean(s[~y] >= threshold))
            for s, y in zip(scores, labels, strict=True)
        ]
        bets = [number / 65 / (1 - 0.2) for number in range(1, 65)]
        wealth = [
            math.prod(1 - bet * (share - 0.2) for share in shares) for bet in bets
        ]
        return 1 / np.mean(wealth)

    steps = [n / 200 for n in range(201)]
    failed = max(step for step in steps if p_value(step) > 0.1)
    assert found.threshold == pytest.approx(failed + 0.005) and found.sources == 40


@pytest.mark.filterwarnings("error")
def test_many_losses_are_bounded_without_a_warning():
    assert bounded(np.zeros(100_000), 0.05) == 0.0
    assert bounded(np.ones(100_000), 0.05) == 1.0


@pytest.mark.parametrize(("count", "level"), [(12, 0.3), (40, 0.1), (30, 0.8)])
def test_a_mean_is_bounded_as_often_as_stated(count, level):
    """Of 0 and 1, every number of them by the binomial; and bets as an integral."""
    wrong = 0.0
    for ones in range(count + 1):
        losses = np.repeat([1.0, 0.0], [ones, count - ones])
        value = bounded(losses, level)
        if value <= 0.1:
            wrong += binom.pmf(ones, count, level)
        wealth, _ = quad(
            lambda bet, k=ones: (
                (1 - bet * (1 - level)) ** k * (1 + bet * level) ** (count - k)
            ),
            0,
            1 / (1 - level),
        )
        assert value == pytest.approx(min(1, 1 / (wealth * (1 - level))), rel=0.15)
    assert 0 < wrong <= 0.1


def test_answers_of_few_sources_seldom_seem_of_another_rate():
    """Their scores rise and fall together, at the base rate of the calibration."""
    rng, sources = np.random.default_rng(0), np.repeat(np.arange(20), 10)

    def shared():
        return 0.7 * (rng.normal(size=20)[sources] + rng.normal(size=200))

    changed = np.zeros(2)
    for _ in range(100):
        scores = shared() + (shared() > 0)
        given = 1 / (1 + np.exp(0.5 - scores))
        rates = [adapted(given, 0.5, groups)[1] for groups in (None, sources.tolist())]
        changed += [rate != 0.5 for rate in rates]
    assert changed[0] > 25 and changed[1] < 12
    clear = np.where(np.arange(200) % 20 == 0, 0.9, 0.1)
    assert adapted(clear, 0.5, sources.tolist())[1] < 0.1
    assert adapted(clear, 0.5, ["one"] * 200)[1] == 0.5


@pytest.mark.parametrize(
    ("known", "new", "each"), [(100, 100, 1), (200, 2000, 1), (500, 500, 5)]
)
def test_a_calibration_is_a_sample_too(known, new, each):
    """Off by chance itself: to many new answers that would be another rate."""
    rng, changed = np.random.default_rng(5), np.zeros(2)

    def drawn(size, rate=0.3):
        labels = (rng.random(size // each) < rate).repeat(each)
        return labels, rng.normal(size=size) + 1.5 * labels

    groups = np.arange(new) // each
    for _ in range(100):
        labels, seen = drawn(known)
        prior, right = labels.mean(), platt(seen, labels)
        sample = dict(known=right(seen), known_groups=np.arange(known) // each)
        given = right(drawn(new)[1])
        rates = [adapted(given, prior, groups, **some)[1] for some in ({}, sample)]
        changed += [rate != prior for rate in rates]
    assert changed[0] > 10 and changed[1] < 10
    assert adapted(right(drawn(new, 0.8)[1]), prior, groups, **sample)[1] > 0.6


def test_prior_correction_finds_the_new_base_rate():
    """Of two normal distributions, whose calibrated probabilities are known."""
    rng = np.random.default_rng(7)
    labels = rng.random(20_000) < 0.1
    scores = 2 * labels + rng.normal(size=20_000)
    odds = np.exp(2 * scores - 2)  # likelihood ratio, at a base rate of a half
    found, share = adapted(odds / (1 + odds), 0.5)
    assert share == pytest.approx(0.1, abs=0.01)
    new = odds * 0.1 / 0.9
    np.testing.assert_allclose(found, new / (1 + new), atol=0.02)
    some, prior = rng.random(40), 0.8
    slow = prior
    for _ in range(5000):  # expectation maximisation
        true, false = some * slow / prior, (1 - some) * (1 - slow) / (1 - prior)
        slow = np.mean(true / (true + false))
    found, share = adapted(some, prior)
    assert share == pytest.approx(slow, abs=1e-6)
    np.testing.assert_allclose(found, true / (true + false), atol=1e-5)
    same, share = adapted([0.4, 0.4], 0.3)  # a detector that says nothing
    assert same.tolist() == [0.4, 0.4] and share == 0.3
    few, share = adapted([0.1, 0.2], 0.3)  # less likely than before, or by chance
    assert few.tolist() == [0.1, 0.2] and share == 0.3
    assert adapted([0.1, 0.2] * 20, 0.3)[1] == 1 / 42
    assert adapted([0.1, 0.2] * 20, 0.3, np.arange(40) // 4)[1] == 1 / 12
    found, share = adapted([1.0, 0.9, 0.9, 0.9], 0.3)
    assert share == 5 / 6 and found[0] == 1 and (found[1:] < 1).all()
    found, share = adapted([0.9] + [0.12] * 19, 0.4)  # evidence of one's own counts
    assert found[0] == pytest.approx(1 / (1 + 21 * 0.1 / 0.9 * 0.4 / 0.6))
    assert found[1] < 0.02
    assert at_rate(np.array([0.25, 1.0]), 0.5, 0.0).tolist() == [0.0, 1.0]
    assert at_rate(np.array([0.0, 0.25]), 0.5, 1.0).tolist() == [0.0, 1.0]
    with pytest.raises(ValueError, match=r"probabilities\[0\] is 2"):
        adapted([2.0], 0.5)
    with pytest.raises(ValueError, match="prior is 0"):
        adapted([0.5], 0.0)


def test_the_old_base_rate_is_kept_unless_another_is_clearly_likelier():
    rng = np.random.default_rng(3)
    changed = []
    for _ in range(400):
        odds = np.exp(2 * (2 * (rng.random(60) < 0.5) + rng.normal(size=60)) - 2)
        given = odds / (1 + odds)
        found, share = adapted(given, 0.5)
        changed.append(share != 0.5)
        assert changed[-1] or found.tolist() == given.tolist()
    assert 0.02 < np.mean(changed) < 0.08


@pytest.mark.parametrize("shifted", [True, False])
def test_the_interval_of_a_share_covers_it(shifted):
    rng = np.random.default_rng(11)
    covered = []
    for _ in range(60):
        truth = 0.5 if not shifted else 0.2
        known = (rng.random(150) < 0.5).astype(int)
        new = rng.random(600) < truth
        seen, score = (
            1 / (1 + np.exp(1 - 2 * y - rng.normal(size=len(y)))) for y in (known, new)
        )
        found = rate(score, seen, known, shifted=shifted, repeats=300)
        assert found.low <= found.value <= found.high
        covered.append(found.low <= truth <= found.high)
    assert np.mean(covered) >= 0.85


def test_the_detectors_word_weighs_what_makes_the_variance_least():
    """PPI++, section 5: of lambda m + mean(y - lambda f), by trying every lambda."""
    rng = np.random.default_rng(13)
    for slope in (0.5, 3.0, -1.0):  # less than its word, more, and never the reverse
        labels = rng.integers(0, 2, 80)
        seen, score = (
            1 / (1 + np.exp(-slope * (2 * y - 1) - rng.normal(size=len(y))))
            for y in (labels, rng.integers(0, 2, 300))
        )
        spread = np.var([*seen, *score])
        both = np.mean(seen * labels) - seen.mean() * labels.mean()
        tried = np.linspace(0, 1, 2001)
        variance = tried**2 * spread / 300
        variance += (np.var(labels) - 2 * tried * both + tried**2 * spread) / 80
        weight = tried[np.argmin(variance)]
        found = rate(score, seen, labels, shifted=False, repeats=10)
        want = weight * score.mean() + np.mean(labels - weight * seen)
        assert found.value == pytest.approx(want, abs=2e-4)
        assert (weight == 0) == (slope < 0)


def test_a_source_on_both_sides_is_drawn_for_both_at_once():
    """Against a bootstrap that goes through the sources one by one."""
    rng = np.random.default_rng(19)
    source = np.repeat(np.arange(40), 6)
    label = (rng.random(40) < 0.4)[source].astype(int)
    score = 1 / (1 + np.exp(1 - 2 * label - rng.normal(size=240)))
    known = rng.random(240) < 0.5
    sides = score[~known], score[known], label[known], source[known], source[~known]
    found = rate(*sides, shifted=False, repeats=4000)
    weight = _weight(score[~known], score[known], label[known] == 1)
    drawn = []
    for _ in range(4000):
        rows = np.concatenate(
            [np.flatnonzero(source == one) for one in rng.integers(40, size=40)]
        )
        new, old = rows[~known[rows]], rows[known[rows]]
        drawn.append(
            weight * score[new].mean() + (label[old] - weight * score[old]).mean()
        )
    want = np.percentile(drawn, [2.5, 97.5])
    assert [found.low, found.high] == pytest.approx(want, abs=0.01)
    apart = rate(*sides, shifted=False, repeats=4000, seed=1)
    assert apart == pytest.approx(found, abs=0.01)
    # Names are of one list: of sources that differ, each side is drawn by itself.
    others = *sides[:3], source[known] + 100, source[~known]
    assert abs(rate(*others, shifted=False, repeats=4000).low - found.low) > 0.02


@pytest.mark.filterwarnings("ignore:number of sources")
def test_a_share_by_its_formulas():
    seen, labels = np.array([0.9, 0.7, 0.3, 0.1]), [1, 1, 0, 0]
    found = rate([0.5, 0.3], seen, labels, repeats=10)
    assert found.value == pytest.approx((0.4 - 0.2) / (0.8 - 0.2))
    # A detector that says nothing leaves the labels alone.
    found = rate([0.5] * 9, [0.5] * 4, labels, shifted=False, repeats=200)
    assert found.value == 0.5 and found.low < 0.25 and found.high > 0.75
    with pytest.raises(ValueError, match="no higher probability"):
        rate([0.5], seen, [0, 0, 1, 1])


def test_few_sources_are_named():
    many, labels = [0.2, 0.9] * 10, [0, 1] * 10
    for groups, known, message in (
        ([1] * 20, None, "sources of the answers: 1, so"),
        (np.ones(20, int), None, "sources of the answers: 1, so"),
        (None, [0, 1] * 10, "sources of the labelled answers: 2, so"),
    ):
        with pytest.warns(UserWarning, match=message):
            rate(many, many, labels, known, groups, repeats=10)
    rate(many, many, labels, repeats=10)


rows = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 1)), min_size=4, max_size=30
).filter(lambda some: len({label for _, label in some}) == 2)


@given(rows)
@settings(max_examples=50, deadline=None)
def test_selective_metrics_by_trying_orders(some):
    """Means over many orders of equal scores, by the slow definition."""
    scores, labels = map(np.array, zip(*some, strict=True))
    rng = np.random.default_rng(0)

    def slow(values):
        areas = []
        for _ in range(300):
            order = np.lexsort((rng.random(len(values)), values))
            areas.append(
                np.mean(np.cumsum(labels[order]) / np.arange(1, len(order) + 1))
            )
        return np.mean(areas)

    area = aurc(scores, labels)
    assert area == pytest.approx(slow(scores), abs=0.06)
    best = slow(labels)
    assert prr(scores, labels) == pytest.approx(
        (labels.mean() - area) / (labels.mean() - best), abs=1e-9
    )
    wanted = max(
        [
            (scores <= t).mean()
            for t in set(scores.tolist())
            if 1 - labels[scores <= t].mean() >= 0.7
        ],
        default=0.0,
    )
    assert coverage_at_precision(scores, labels, 0.7) == pytest.approx(wanted)


def test_perfect_and_useless_selection():
    labels = [0, 0, 1, 1]
    assert prr([1, 2, 3, 4], labels) == 1 and prr([1, 1, 1, 1], labels) == 0
    assert prr([4, 3, 2, 1], labels) == pytest.approx(-1)
    with pytest.raises(ValueError, match="precision is 0"):
        coverage_at_precision([1, 2, 3, 4], labels, 0.0)
