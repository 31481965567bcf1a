"""Whether thresholds keep what they promise, where they were chosen and elsewhere."""

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from jaxhal.detectors import get
from jaxhal.evaluation import guarantee, highlighted
from jaxhal.evaluation.promises import Answers, Highlights, kept, kept_highlights
from jaxhal.experiments import promises
from jaxhal.experiments.config import load_config
from jaxhal.experiments.running import Result
from jaxhal.reporting import results
from jaxhal.reporting.results import Judged

PROMISES = [{"precision": 0.7}, {"recall": 0.8}, {"false_alarms": 0.2}]


def world(rng, count, rate=0.4, gap=2.0, shift=0.0):
    labels = (rng.random(count) < rate).astype(int)
    return Answers(gap * labels + shift + rng.normal(size=count), labels)


def test_sources_weigh_alike_whatever_their_answers():
    """A promise is about an answer of a new source; a few have most of the answers."""
    rng = np.random.default_rng(0)
    groups = np.concatenate([np.repeat(np.arange(20), 60), np.arange(20, 400)])
    often = groups < 20  # whose grounded answers look bad
    labels = np.where(often, 0, rng.integers(0, 2, len(groups)))
    scores = rng.normal(size=len(groups)) + 2 * labels + 3 * often
    found = kept(Answers(scores, labels, groups), {"false_alarms": 0.1})
    threshold = guarantee(scores, labels, {"false_alarms": 0.1}, groups).threshold
    alarms = (scores >= threshold) & (labels == 0)
    size = np.bincount(groups)[groups]
    by_source = (alarms / size).sum() / ((labels == 0) / size).sum()
    assert abs(found["realised"] - by_source) < 0.03
    assert alarms.sum() / (labels == 0).sum() > 3 * by_source


@pytest.mark.parametrize("promise", PROMISES)
def test_a_promise_is_seldom_broken_among_answers_of_its_kind(promise):
    found = kept(world(np.random.default_rng(1), 500), promise, splits=60)
    assert found["made"] > 0.8 and found["broken"] <= 0.1
    ((kind, level),) = promise.items()
    on_average = found["realised"] <= level
    assert on_average if kind == "false_alarms" else found["realised"] >= level


@pytest.mark.parametrize("promise", PROMISES)
def test_elsewhere_it_may_be_broken_and_that_is_said(promise):
    rng = np.random.default_rng(2)
    here = world(rng, 500)
    shift = -1.5 if "recall" in promise else 1.5
    there = world(rng, 400, rate=0.1, gap=0.5, shift=shift)
    found = kept(here, promise, elsewhere=there, splits=20)
    assert found["broken"] == 1.0 and found["kept"] == 0.0


def test_one_split_by_hand():
    answers = world(np.random.default_rng(3), 200)
    groups = np.arange(200) // 2
    found = kept(Answers(*answers[:2], groups), {"recall": 0.8}, splits=1, seed=5)
    half = np.isin(groups, np.random.default_rng(5).permutation(100)[:50])
    scores, labels = (np.asarray(each) for each in answers[:2])
    made = guarantee(scores[half], labels[half], {"recall": 0.8}, groups[half])
    flags, truth = scores[~half] >= made.threshold, labels[~half] == 1
    assert found["realised"] == pytest.approx(flags[truth].mean())
    assert found["flagged"] == pytest.approx(flags.mean())
    assert found["kept"] == float(flags[truth].mean() >= 0.8)


def test_elsewhere_no_source_that_was_chosen_on_is_looked_at():
    """Their twins keep any promise, all others break it."""
    scores, labels = np.tile([0.0, 1.0], 40), np.tile([0, 1], 40)
    names = [f"s{n // 2}" for n in range(80)]
    here = Answers(scores, labels, names)
    there = Answers(
        np.append(scores, np.zeros(20)), np.append(labels, np.ones(20, int)),
        [*names, *(f"t{n}" for n in range(20))],
    )  # fmt: skip
    promise = {"recall": 0.6}
    found = kept(here, promise, elsewhere=there, splits=20)
    # Of 40 sources half are left, of whose two answers one is a hit, beside 20 misses.
    assert found["made"] == 1 and found["realised"] == pytest.approx(10 / 30)
    apart = Answers(*there[:2], [f"{name}'" for name in there.groups])
    found = kept(here, promise, elsewhere=apart, splits=20)
    assert found["realised"] == pytest.approx(20 / 40)
    same = "every answer to be looked at is of a source"
    with pytest.raises(ValueError, match=same):
        one = Highlights(np.zeros((1, 201)), ["s"])
        two = Highlights(np.zeros((2, 201)), ["s", "u"])
        kept_highlights(two, {"highlighted": 0.5}, elsewhere=one, splits=20)


def test_where_nothing_can_be_promised_nothing_is_kept():
    noise = world(np.random.default_rng(4), 60, gap=0.0)
    found = kept(noise, {"precision": 0.95}, splits=5)
    assert found == {
        "splits": 5,
        "made": 0.0,
        "kept": None,
        "broken": None,
        "realised": None,
        "flagged": None,
    }
    far = Answers(np.asarray(noise.scores) - 99, noise.labels)
    found = kept(
        world(np.random.default_rng(1), 300),
        {"precision": 0.6},
        elsewhere=far,
        splits=3,
    )
    assert found["made"] and found["realised"] is None and found["flagged"] == 0
    with pytest.raises(ValueError, match="promise is .*; give one of precision"):
        kept(noise, {"luck": 0.9})
    with pytest.raises(ValueError, match="splits is 0; give at least 1"):
        kept(noise, {"recall": 0.9}, splits=0)


def test_highlights_keep_a_promise_at_home_and_not_everywhere():
    """A character in ten is scored above 0.6 at home, and three elsewhere."""
    rng = np.random.default_rng(8)

    def spans(count, share):
        scores = [0.6 * rng.random(40) + 0.4 * (rng.random(40) < share)
                  for _ in range(count)]  # fmt: skip
        none, ones = [np.zeros(40)] * count, [np.ones(40)] * count
        return Highlights(highlighted(scores, none, ones), np.arange(count) // 2)

    here, promise = spans(200, 0.1), {"highlighted": 0.15}
    found = kept_highlights(here, promise, splits=30)
    assert found["made"] == 1 and found["kept"] >= 0.8 and found["broken"] <= 0.1
    assert 0.08 < found["realised"] < 0.15 and found["flagged"] is None
    found = kept_highlights(here, promise, elsewhere=spans(60, 0.3), splits=5)
    assert found["kept"] == 0 and found["broken"] == 1 and found["realised"] > 0.2
    # Halves of which one has nothing that could be highlighted promise or show nothing.
    few = np.where(np.arange(40)[:, None] < 3, here.shares[:40], np.nan)
    found = kept_highlights(Highlights(few), promise, confidence=None, splits=20)
    assert found["made"] < 1
    found = kept_highlights(here, {"highlighted": 0.001}, splits=3)
    assert (found["made"], found["kept"], found["realised"]) == (0, None, None)


def test_a_run_says_which_were_kept_at_home_and_elsewhere(monkeypatch):
    monkeypatch.setattr(promises, "SPLITS", 10)
    rng = np.random.default_rng(6)
    methods = get(["mtop_div", "novel_words"])

    def part(train, test, gap):
        scores, labels, _ = world(rng, 300, gap=gap)
        columns = {"row": range(300), "id": range(300), "source": range(300)}
        columns |= {"label": labels, "novel_words": rng.normal(size=300)}
        columns["mtop_div"] = scores
        for one in methods:
            columns[f"{one.name}.probability"] = 1 / (1 + np.exp(-columns[one.name]))
            columns[f"{one.name}.adapted"] = columns[f"{one.name}.probability"]
            columns[f"{one.name}.flagged"] = columns[one.name] > 1
        return Judged(train, test, 0, 0, 0, pd.DataFrame(columns))

    judged = [part(a, b, 2.0 if a == b else 0.1) for a in "ab" for b in "ab"]
    config = load_config(
        {
            "name": "promised",
            "data": [{"name": "a.jsonl"}, {"name": "b.jsonl"}],
            "detectors": ["mtop_div"],
            "promises": [{"recall": 0.8}, {"precision": 0.7}],
        }
    )
    rows = results.transfer(judged, methods)
    monkeypatch.setattr(
        promises, "_sources", lambda found, label, rows: [f"{label}{n}" for n in rows]
    )
    found = Result(config, Path("x"), methods, {}, {}, judged, {}, {}, rows)
    said = promises.rows(found)
    assert [row["data"] for row in said[::2]] == ["a", "a → b", "b → a", "b"]
    assert {row["method"] for row in said} == {"mtop_div"}
    for row in said:
        at_home = row["data"] in "ab"
        assert row["broken"] <= 0.2 if at_home else row["broken"] >= 0.7, row
    text = promises.markdown(said)
    assert "| a → b | mtop_div | recall at least 0.8 | 1.00 | 0.00 | 1.00 |" in text
    weak = [dict(row, **{"beats controls": "no"}) for row in rows]
    assert promises.rows(dataclasses.replace(found, rows=weak)) == []


def test_a_configuration_names_promises_that_can_be_made():
    config = {"name": "a", "data": [{"name": "bundled"}], "detectors": ["toha"]}
    for wrong in ({"luck": 1}, "precision", {"recall": 1.5}, {"recall": "x"}):
        with pytest.raises(ValueError, match="promise is|recall is"):
            load_config(config | {"promises": [wrong]})
