"""Exploring a small world whose bound is known, killing it, and bad agents."""

import collections
import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
import thorough
from test_encoding import write

from explore_world import (
    PLAN,
    SEEDS,
    WIDTH,
    Child,
    answer,
    change,
    evaluate,
    explorer,
    share,
)
from jaxhal.datasets import Question
from jaxhal.datasets.jsonl import write_rows
from jaxhal.io.files import alone, lines_of
from jaxhal.llm.endpoint import Endpoint
from jaxhal.llm.entailment import Similarity
from jaxhal.watchdog import (
    CallableAgent,
    CallableEvaluator,
    EndpointAgent,
    ExactStore,
    Generator,
    Judgement,
    Plan,
    ReferenceEvaluator,
)
from jaxhal.watchdog.journal import Review
from jaxhal.watchdog.policy import TRANSFORMATIONS, probabilities, reward
from jaxhal.watchdog.queries import plain, usable


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A tiny one; all queries are much alike to it."""
    from test_encoding import write_pooling

    folder = write(tmp_path_factory.mktemp("encoder"))
    write_pooling(folder, normalize=True, mean=True)
    return folder


@pytest.fixture(scope="module")
def explored(encoder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("explored")
    store = ExactStore(WIDTH, folder)
    return folder, store, explorer(folder, encoder, store=store).run(progress=False)


def of(nodes):
    """By query, without what time says."""
    # No reward at all, NaN, equals nothing.
    rewards = [-1.0 if math.isnan(n.reward) else n.reward for n in nodes]
    return {
        n.query: dataclasses.replace(n, time="", chances=(), reward=reward)
        for n, reward in zip(nodes, rewards, strict=True)
    }


def test_an_exploration(explored):
    folder, store, found = explored
    nodes = {node.query: node for node in found.nodes}
    assert len(nodes) == len(found.nodes) == found.counts["queries"] == 60
    assert found.stopped == "budget"
    for node in found.nodes:
        assert node.answer == answer(node.query, 0.1)
        if share(f"unsure {node.query}") < 0.1:
            assert node.label is None and math.isnan(node.reward)
        else:
            assert node.label == int("wrong" in node.answer)
        assert node.entropy == 0.0  # three equal samples
        if node.way == "seed":
            assert node.query in SEEDS and node.first == node.query and not node.depth
            assert node.reward == 0.0 or node.label is None  # the entropy it found
        else:
            parent = nodes[node.parent]
            assert parent.label == 1
            assert (node.first, node.depth) == (parent.first, parent.depth + 1)
            mark = dict(zip(TRANSFORMATIONS, "xyz", strict=True))[node.way]
            assert node.query == f"{parent.query[:-1]} {mark}?"
            if node.label is not None:
                want = reward(0.0, 0.0, parent.reward, node.label == 0)
                assert node.reward == pytest.approx(float(want))
    hits = [node for node in found.nodes if node.label == 1]
    known = [node for node in found.nodes if node.label is not None]
    assert found.counts["hallucinated"] == len(hits) == len(store)
    assert found.counts["gamma"] == len(hits) / len(known)
    assert found.counts["unsure"] == 60 - len(known) and not found.counts["failed"]
    assert {point.query for point in store} == {node.query for node in hits}
    (point,) = [one for one in store if one.query == hits[0].query]
    assert (point.response, point.domain, point.agent, point.entropy) == (
        *(hits[0].answer, "things", "agent"),
        0.0,
    )
    assert point.time == hits[0].time and point.verdict == "the evaluator says so"
    rows = lines_of(folder / "queries.jsonl")
    assert [row["query"] for row in rows] == [node.query for node in found.nodes]
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    assert summary["stopped"] == "budget" and summary["queries"] == 60
    # Until a policy is trained every hit is changed in all three ways.
    assert found.policy is not None and len(summary["losses"]) == 3
    tried = [n for n in found.nodes if not n.chances and n.label == 1]
    chosen = [n for n in found.nodes if n.chances]
    assert tried and chosen and found.nodes.index(chosen[0]) > 4
    for node in chosen:
        np.testing.assert_allclose(sum(node.chances), 1, rtol=1e-5)


def test_queries_that_the_policy_chose_are_counted(encoder, tmp_path):
    plan = dataclasses.replace(PLAN, steps=1)
    found = explorer(tmp_path / "a", encoder, plan=plan).run(progress=False)
    chose = {node.query for node in found.nodes if node.chances}
    children = [node for node in found.nodes if node.parent in chose]
    assert found.counts["by the policy"] == len(children) > 0
    plan = dataclasses.replace(PLAN, how="random")
    other = explorer(tmp_path / "b", encoder, plan=plan).run(progress=False)
    assert other.counts["by the policy"] == 0
    assert any(node.chances for node in other.nodes)


def test_the_policy_learns_what_came_of_the_ways(explored, encoder, tmp_path):
    """Its steps are parents whose three ways all were judged."""
    one = explorer(tmp_path, encoder)
    one.run(progress=False)
    nodes = {node.query: node for node in explored[2].nodes}
    assert len(one._chooser.steps) >= PLAN.steps
    for parent, rewards in one._chooser.steps:
        children = {n.way: n for n in nodes.values() if n.parent == parent.query}
        assert rewards == [children[way].reward for way in TRANSFORMATIONS]
        assert np.isfinite(probabilities(rewards)).all()


def test_a_way_that_gives_nothing_new_is_learnt_from(encoder, tmp_path):
    """A small writer often gives no query, or one that was asked before."""

    def say(asked, temperature):
        if "more general" in asked:
            return "I cannot."
        if "alike" in asked:
            return "1. " + asked.split("\n\n")[1]
        return change(asked, temperature)

    one = explorer(tmp_path, encoder)
    one.generator = Generator(CallableAgent(say, "writer"), "things", attempts=1)
    found = one.run(progress=False)
    assert found.policy is not None and len(one._chooser.steps) >= PLAN.steps
    assert {node.way for node in found.nodes} == {"seed", "deduction"}
    for _, (deduction, analogy, induction) in one._chooser.steps:
        assert math.isfinite(deduction) and analogy == induction == 0.0


def test_the_same_again(explored, encoder, tmp_path):
    again = explorer(tmp_path, encoder).run(progress=False)
    assert of(again.nodes) == of(explored[2].nodes)


def test_nothing_is_asked_twice(explored, encoder):
    folder, store, found = explored

    def never(query, temperature):
        raise AssertionError(query)

    again = explorer(folder, encoder, never, store).run(progress=False)
    assert of(again.nodes) == of(found.nodes)
    assert len(store) == found.counts["points"]
    # A larger budget goes on from there.
    asked = []

    def say(query, temperature):
        asked.append(query)
        return answer(query, temperature)

    more = dataclasses.replace(PLAN, budget=66)
    longer = explorer(folder, encoder, say, store, more).run(progress=False)
    assert len(longer.nodes) == 66 and len(set(asked)) == 6
    assert set(of(found.nodes)) < set(of(longer.nodes))


@pytest.mark.parametrize(
    ("plan", "stopped"),
    [
        (Plan(gamma=0.3, least=12, budget=60, starts=4, width=4, samples=2), "gamma"),
        (Plan(gamma=1.0, least=1, budget=7, starts=4, width=4, samples=2), "budget"),
    ],
)
def test_it_stops(encoder, tmp_path, plan, stopped):
    found = explorer(tmp_path, encoder, plan=plan).run(progress=False)
    assert found.stopped == stopped
    if stopped == "gamma":
        assert found.counts["gamma"] >= 0.3 and 12 <= found.counts["queries"] < 60
    else:
        assert found.counts["queries"] == 7


def test_it_stops_where_nothing_is_left_to_ask(encoder, tmp_path):
    def right(query, temperature):
        return "right"

    plan = dataclasses.replace(PLAN, budget=500)
    found = explorer(tmp_path, encoder, right, plan=plan).run(progress=False)
    assert found.stopped == "queries" and len(found.nodes) == len(SEEDS)
    assert not found.counts["hallucinated"] and found.policy is None


def test_random_ways(encoder, tmp_path):
    plan = dataclasses.replace(PLAN, how="random", ways=["deduction", "analogy"])
    found = explorer(tmp_path, encoder, plan=plan).run(progress=False)
    assert found.policy is None
    ways = {node.way for node in found.nodes}
    assert ways == {"seed", "deduction", "analogy"}
    chances = np.array([node.chances for node in found.nodes if node.chances])
    np.testing.assert_allclose(chances.sum(1), 1, rtol=1e-5)
    assert (chances[:, 2] == 0).all() and np.ptp(chances[:, 0]) > 0.3


def test_a_person_decides(encoder, tmp_path):
    first = explorer(tmp_path, encoder).run(progress=False)
    path = tmp_path / "review.jsonl"
    rows = lines_of(path)
    unsure = [node for node in first.nodes if node.label is None]
    assert [row["query"] for row in rows] == [node.query for node in unsure]
    assert all(row["label"] is None and row["why"] for row in rows)
    rows[0]["label"] = 1
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    again = explorer(tmp_path, encoder).run(progress=False)
    (node,) = [one for one in again.nodes if one.query == rows[0]["query"]]
    assert node.label == 1 and node.why.startswith("a person decided")
    assert node.query in {point.query for point in ExactStore(WIDTH, tmp_path)}
    assert Review(path).label_of(node.query, node.answer) == 1
    assert Review(path).label_of(node.query, "another answer") is None
    path.write_text('{"query": "a", "label": 2}\n')
    with pytest.raises(ValueError, match="line 1: 'label' is 2; use 0, 1 or null"):
        Review(path)
    path.write_text('{"label": 1}\n')
    with pytest.raises(ValueError, match="line 1: 'query' is missing"):
        Review(path)


def test_agents_that_fail_now_and_then(encoder, tmp_path):
    """Empty, huge and no answers: survived, counted, reported."""

    def say(query, temperature):
        kind = int(40 * share(f"fail {query} {temperature}"))
        if kind == 0:
            return " "
        if kind == 1:
            return "long " * 30_000
        if kind == 2:
            raise TimeoutError("no answer in 5 s")
        if kind == 3:
            return None
        return answer(query, temperature)

    found = explorer(tmp_path, encoder, say).run(progress=False)
    failed = [node for node in found.nodes if not node.answer]
    assert failed and found.counts["failed"] == len(failed)
    assert all(node.label is None and node.why for node in failed)
    kinds = {node.why.split(" of")[0][:24] for node in failed}
    assert len(kinds) >= 2
    rows = lines_of(tmp_path / "review.jsonl")
    assert not {row["query"] for row in rows} & {node.query for node in failed}


def test_an_agent_that_always_fails(encoder, tmp_path):
    def say(query, temperature):
        raise ConnectionError("refused")

    with pytest.raises(
        RuntimeError, match="none of the last 10 .*ConnectionError: refus"
    ):
        explorer(tmp_path, encoder, say).run(progress=False)
    # However many queries it begins with.
    plan = dataclasses.replace(PLAN, starts=25, budget=40)
    with pytest.raises(RuntimeError, match="none of the last"):
        explorer(tmp_path / "b", encoder, say, plan=plan).run(progress=False)


def test_a_writer_that_always_fails(encoder, tmp_path):
    """Its errors say nothing about the ways."""

    def say(asked, temperature):
        raise ConnectionError("refused")

    one = explorer(tmp_path, encoder)
    one.generator = Generator(CallableAgent(say, "writer"), "things", attempts=2)
    with pytest.raises(
        RuntimeError, match="writer changed none of the last 10 .*ConnectionError: refu"
    ):
        one.run(progress=False)
    assert not one._chooser.steps and one.counts()["useless changes"] == 0
    assert one.counts()["failed changes"] >= 10
    # Later it is asked again.
    found = explorer(tmp_path, encoder).run(progress=False)
    assert found.stopped == "budget" and found.counts["failed changes"] == 0


def test_a_writer_that_fails_at_times(encoder, tmp_path):
    def say(asked, temperature):
        if "alike" in asked:
            raise TimeoutError("slow")
        return change(asked, temperature)

    one = explorer(tmp_path, encoder)
    one.generator = Generator(CallableAgent(say, "writer"), "things", attempts=1)
    found = one.run(progress=False)
    assert found.stopped == "budget" and found.policy is None and not one._chooser.steps
    assert found.counts["failed changes"] > 10
    assert {node.way for node in found.nodes} == {"seed", "deduction", "induction"}


def test_one_failure_at_first_is_no_outage(encoder, tmp_path):
    asked = []

    def say(query, temperature):
        asked.append(query)
        if query == asked[0]:
            raise TimeoutError("slow")
        return answer(query, temperature)

    plan = dataclasses.replace(PLAN, width=1, budget=9)
    found = explorer(tmp_path, encoder, say, plan=plan).run(progress=False)
    assert found.counts["queries"] == 9 and found.counts["failed"] == 1


def test_one_start_that_always_fails_is_no_outage(encoder, tmp_path):
    def say(query, temperature):
        if query == asked[0]:
            raise ValueError("over the context")
        return answer(query, temperature)

    plan = dataclasses.replace(PLAN, starts=1, budget=20)
    asked = [explorer(tmp_path, encoder, plan=plan)._seeds[0]]
    found = explorer(tmp_path, encoder, say, plan=plan).run(progress=False)
    assert found.counts["queries"] == 20 and found.counts["failed"] == 1


def points(store):
    return {point.query for point in store}


def test_what_someone_took_out_stays_out(encoder, tmp_path):
    """Unless the whole bound is gone, which is made anew."""
    found = explorer(tmp_path, encoder).run(progress=False)
    store = ExactStore(WIDTH, tmp_path)
    whole, (first, *_) = points(store), list(store)
    assert store.remove([first.id]) == 1
    explorer(tmp_path, encoder).run(progress=False)
    store = ExactStore(WIDTH, tmp_path)
    assert points(store) == whole - {first.query}
    store.remove([point.id for point in store])
    again = explorer(tmp_path, encoder).run(progress=False)
    assert points(ExactStore(WIDTH, tmp_path)) == whole
    assert again.counts["points"] == found.counts["points"] == len(whole)


def test_the_bound_is_that_of_the_last_run(encoder, tmp_path):
    explorer(tmp_path, encoder).run(progress=False)
    whole = points(ExactStore(WIDTH, tmp_path))
    ours = ExactStore(WIDTH, tmp_path)
    person = dataclasses.replace(next(iter(ours)), id="0" * 32, query="Of a person?")
    ours.add([person], np.ones((1, WIDTH), np.float32))
    few = dataclasses.replace(PLAN, budget=20)
    found = explorer(tmp_path, encoder, plan=few).run(progress=False)
    hits = {node.query for node in found.nodes if node.label == 1}
    assert hits < whole
    assert points(ExactStore(WIDTH, tmp_path)) == hits | {person.query}
    # And back.
    explorer(tmp_path, encoder).run(progress=False)
    assert points(ExactStore(WIDTH, tmp_path)) == whole | {person.query}


def test_a_label_taken_back_takes_its_point_along(encoder, tmp_path):
    plan = dataclasses.replace(PLAN, budget=30)
    explorer(tmp_path, encoder, plan=plan).run(progress=False)
    review = tmp_path / "review.jsonl"
    rows = lines_of(review)
    for label in (1, 0):
        write_rows(review, [{**row, "label": label} for row in rows])
        explorer(tmp_path, encoder, plan=plan).run(progress=False)
        known = points(ExactStore(WIDTH, tmp_path))
        asked = {row["query"] for row in lines_of(tmp_path / "queries.jsonl")}
        decided = {row["query"] for row in rows} & asked
        assert decided and decided & known == (decided if label else set())


def test_too_few_samples_are_a_failure(encoder, tmp_path):
    drawn = collections.Counter()

    def say(query, temperature):
        drawn[query] += temperature > 0.5
        if temperature > 0.5 and drawn[query] > 1 and share(query) < 0.3:
            raise TimeoutError("slow")
        return answer(query, temperature)

    plan = dataclasses.replace(PLAN, samples=4)
    found = explorer(tmp_path, encoder, say, plan=plan).run(progress=False)
    failed = {node.query for node in found.nodes if not node.answer}
    assert failed and failed == {n.query for n in found.nodes if share(n.query) < 0.3}
    assert all("slow" in n.why for n in found.nodes if n.query in failed)


def test_a_label_given_while_it_goes_on_is_kept(encoder, tmp_path):
    path = tmp_path / "review.jsonl"
    given = {}

    def say(query, temperature):
        if path.is_file() and not given:
            row = lines_of(path)[0]
            given.update(row | {"label": 1, "note": "surely"})
            path.write_text(json.dumps(given) + "\n")
        return answer(query, temperature)

    explorer(tmp_path, encoder, say).run(progress=False)
    rows = {row["query"]: row for row in lines_of(path)}
    assert given and rows[given["query"]] == given
    assert len(rows) > 1 and sum(row["label"] == 1 for row in rows.values()) == 1


def test_an_agent_that_goes_out_and_comes_back(encoder, explored, tmp_path):
    """The exploration stops, and later asks for what it did not get."""
    out, asked = [False], []

    def say(query, temperature):
        asked.append(query)
        if out[0] or len(asked) > 60:
            out[0] = True
            raise ConnectionError("refused")
        return answer(query, temperature)

    with pytest.raises(RuntimeError, match="none of the last 10 queries.*asked anew"):
        explorer(tmp_path, encoder, say).run(progress=False)
    before = set(asked[:60])
    found = explorer(tmp_path, encoder).run(progress=False)
    assert of(found.nodes) == of(explored[2].nodes)
    assert found.counts["failed"] == 0 and before <= {n.query for n in found.nodes}


def test_unsure_is_not_hallucinated(encoder, tmp_path):
    """An answer found right by a person is not made wrong by samples nobody judged."""
    plan = dataclasses.replace(PLAN, budget=4)
    unsure = explorer(tmp_path, encoder, plan=plan, judge=lambda q, a: None)
    nodes = unsure.run(progress=False).nodes
    assert all(node.clean and math.isnan(node.reward) for node in nodes)
    rows = [json.dumps({"query": node.query, "label": 0}) for node in nodes]
    # As an editor may leave it: a line between, and no new line at the end.
    (tmp_path / "review.jsonl").write_text("\n\n".join(rows))
    again = explorer(tmp_path, encoder, plan=plan, judge=lambda q, a: None)
    known = again.run(progress=False).nodes
    assert [node.label for node in known] == [0] * 4
    assert all(node.clean and -1 <= node.reward <= 1 for node in known)


@thorough.mark
def test_killed_again_and_again(encoder, explored, tmp_path):
    """Every kill is -9; nothing known is asked again, no point is lost."""
    folder, log = tmp_path / "killed", tmp_path / "asked.jsonl"
    log.touch()

    def asked():
        return log.read_bytes().count(b"\n")

    known, points, kinds = set(), set(), set()
    for kills in range(5):
        before = asked()
        child = Child(folder, encoder, log, 0.02)
        if kills < 4:
            child.kill(after=lambda least=before + 3 * kills: asked() > least)
        else:
            child.process.join()
            assert child.process.exitcode == 0
        fresh = lines_of(log)[before:]
        assert fresh
        assert not known & set(fresh)
        kinds |= {row.split()[0] for row in fresh}
        known = {row["key"] for row in lines_of(folder / "journal.jsonl")}
        before, points = points, {point.query for point in ExactStore(WIDTH, folder)}
        assert before <= points
    assert kinds == {"answer", "samples", "verdict", *TRANSFORMATIONS}
    nodes = {row["query"]: row for row in lines_of(folder / "queries.jsonl")}
    want = of(explored[2].nodes)
    assert set(nodes) == set(want)
    assert {q: row["label"] for q, row in nodes.items()} == {
        q: node.label for q, node in want.items()
    }
    assert points == {q for q, node in want.items() if node.label == 1}


def test_a_journal_that_is_none(encoder, tmp_path):
    (tmp_path / "journal.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(ValueError, match="is no journal .* delete it to begin anew"):
        explorer(tmp_path, encoder).run(progress=False)


def test_a_judge_that_is_out_is_asked_again(encoder, tmp_path):
    down, asked = [True], []

    def judge(query, text):
        if any(down):
            return Judgement(None, "the judge is down", 0.0, failed=True)
        asked.append(query)
        return evaluate(query, text)

    with pytest.raises(RuntimeError, match="judged none; .* the judge is down"):
        explorer(tmp_path, encoder, judge=judge).run(progress=False)
    kinds = [row["key"].split()[0] for row in lines_of(tmp_path / "journal.jsonl")]
    assert "answer" in kinds and "verdict" not in kinds
    assert not (tmp_path / "review.jsonl").exists()
    down.clear()
    found = explorer(tmp_path, encoder, judge=judge).run(progress=False)
    assert found.counts["failed"] == 0 and len(set(asked)) == len(found.nodes)


def test_ways_that_give_the_same_query_count_once(encoder, tmp_path):
    """The others were of no use, and are learnt from as such."""

    def say(asked, temperature):
        return asked.split("\n\n")[1][:-1] + " x?"

    one = explorer(tmp_path, encoder, write=say)
    found = one.run(progress=False)
    assert found.policy is not None and len(one._chooser.steps) >= PLAN.steps
    assert found.counts["useless changes"] > 0
    for _, (_, analogy, induction) in one._chooser.steps:
        assert analogy == induction == 0.0


def test_only_the_ways_of_a_plan_are_taken(encoder, tmp_path):
    plan = dataclasses.replace(PLAN, ways=["induction", "deduction"])
    one = explorer(tmp_path, encoder, plan=plan)
    found = one.run(progress=False)
    assert {node.way for node in found.nodes} == {"seed", "deduction", "induction"}
    assert found.policy is not None and len(one._chooser.steps) >= plan.steps
    chosen = [node.chances for node in found.nodes if node.chances]
    assert chosen and all(one[1] == 0 and sum(one) > 0.999 for one in chosen)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "other"}, "agent is 'agent', and not 'other'"),
        ({"plan": dataclasses.replace(PLAN, samples=2)}, "samples is 3, and not 2"),
        ({"plan": dataclasses.replace(PLAN, temperature=0.5)}, "temperature is 1.0"),
        ({"plan": dataclasses.replace(PLAN, how="random")}, "how is 'reinforced', and"),
        ({"judge": "another"}, "evaluator is 'evaluate', and not 'another'"),
        (
            {"plan": dataclasses.replace(PLAN, ways=["analogy"])},
            "ways is .'deduct.*, and",
        ),
        ({"plan": dataclasses.replace(PLAN, seed=1)}, "seed is 0, and not 1"),
    ],
)
def test_what_another_agent_said_is_not_taken(encoder, tmp_path, change, message):
    plan = dataclasses.replace(PLAN, budget=4)
    explorer(tmp_path, encoder, plan=plan).run(progress=False)
    name, judge = change.pop("name", "agent"), change.pop("judge", "")
    other = explorer(tmp_path, encoder, **{"plan": plan} | change)
    other.evaluator = CallableEvaluator(other.evaluator.function, judge)
    other.agent = CallableAgent(other.agent.function, name)
    with pytest.raises(ValueError, match=f"{message}.*; give another folder"):
        other.run(progress=False)


def test_answers_with_odd_ends_of_lines_wait_for_a_person(encoder, tmp_path):
    def say(query, temperature):
        return "one\u2028two\x85three"

    plan = dataclasses.replace(PLAN, budget=8)

    def judge(query, text):
        return None

    one = explorer(tmp_path, encoder, say, plan=plan, judge=judge)
    assert one.run(progress=False).counts["unsure"] == 8
    rows = lines_of(tmp_path / "review.jsonl")
    assert {row["answer"] for row in rows} == {"one\u2028two\x85three"}


def test_one_process_explores_in_a_folder(encoder, tmp_path):
    with alone(tmp_path), pytest.raises(RuntimeError, match="another process writes"):
        explorer(tmp_path, encoder).run(progress=False)
    assert not (tmp_path / "journal.jsonl").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gamma": 0.0}, "gamma is 0.0; give a share in"),
        ({"budget": 0}, "budget is 0; give at least 1"),
        ({"samples": 0}, "samples is 0"),
        ({"samples": 1}, "samples is 1, which has no entropy; give at least 2"),
        ({"temperature": 0.0}, "temperature is 0.0, and answers drawn at 0 are all"),
        ({"temperature": -3.0}, "temperature is -3.0"),
        ({"answer_temperature": -0.1}, "answer_temperature is -0.1; give 0 or more"),
        ({"how": "greedy"}, "how is 'greedy'; use one of reinforced"),
        ({"ways": ["magic"]}, "ways are magic; use some of deduction"),
        ({"branch": 4}, "branch is 4, and there are 3 ways"),
        ({"shares": "odd"}, "shares is 'odd'; use one of softmax"),
        ({"steps": 0}, "steps is 0; give at least 1"),
    ],
)
def test_bad_plans(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PLAN, **change)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("How is it treated?", "How is it treated?"),
        ("Sure! Here it is:\n\n**How is it treated?**", "How is it treated?"),
        ("2) “How is it treated?”", "How is it treated?"),
        ("Question: how is it treated?\nBecause.", "how is it treated?"),
        ('One asks: "How is it treated?"', "How is it treated?"),
        ('How is "it" treated?', 'How is "it" treated?'),
        ("为什么天空是蓝色的？", "为什么天空是蓝色的？"),
        ("何が起こりますか？\nはい。", "何が起こりますか？"),
        ("こう聞きます：「何が起こりますか？」", "何が起こりますか？"),
        ("ما هي عاصمة فرنسا؟", "ما هي عاصمة فرنسا؟"),
        ("Ποια είναι η πρωτεύουσα;", "Ποια είναι η πρωτεύουσα;"),
        ("« Quelle est la capitale ? »", "Quelle est la capitale ?"),
        ("It goes on;", ""),
        ("What is it?", ""),
        ("It is treated.", ""),
        ("?", ""),
        ("w" * 500 + "?", ""),
        ("", ""),
    ],
)
def test_usable_queries(text, want):
    assert usable(text, "what is it") == want


def test_plain():
    assert plain(" What's  THIS?") == plain("what s this")
    assert plain("A well-known one?") == plain("a well known one")
    assert plain("3+5?") == plain("3 + 5?") and plain("-- ?") == plain("+") == ""
    apart = ["3 + 5?", "3 - 5?", "3 * 5?", "3 / 5?", "-2 squared", "2 squared"]
    apart += ["What is C?", "What is C++?", "What is C#?", "काला", "कील", "5 %", "5 $"]
    assert len({*map(plain, apart)}) == len(apart)


def test_the_settings_of_who_speaks_are_of_an_exploration(encoder, tmp_path):
    """What follows from a prompt or from references is not taken for other ones."""

    def made(**changes):
        folder = tmp_path / "one"
        one = explorer(folder, encoder, plan=dataclasses.replace(PLAN, budget=4))
        given: Any = {"questions": [Question(SEEDS[0], "Rome")], "similarity": 0.1}
        one.evaluator = ReferenceEvaluator(encoder=str(encoder), **given | changes)
        return one

    made().run(progress=False)
    made().run(progress=False)
    for other in (
        {"questions": [Question(SEEDS[0], "Paris")]},
        {"contained": True},
        {"similarity": 0.2},
    ):
        with pytest.raises(ValueError, match="whose settings of the evaluator is"):
            made(**other).run(progress=False)
    last = made()
    last.entailment = Similarity(threshold=0.5)
    with pytest.raises(ValueError, match="entailment"):
        last.run(progress=False)
    shorter = made()
    behind = Endpoint("http://127.0.0.1:9/v1", shorter.agent.name)
    shorter.agent = EndpointAgent(behind, max_tokens=9)
    with pytest.raises(ValueError, match="whose settings of the agent is None"):
        shorter.run(progress=False)
    for least in (-1.5, 90.0):
        with pytest.raises(ValueError, match=f"similarity is {least}; give a cosine"):
            made(similarity=least)


def test_an_exploration_that_broke_off_has_no_end(encoder, tmp_path):
    """Longer than before, until the agent is out: what it found is not all there is."""
    short = dataclasses.replace(PLAN, budget=4)
    explorer(tmp_path, encoder, plan=short).run(progress=False)
    assert (tmp_path / "summary.json").is_file()

    def out(query, temperature):
        raise OSError("out of order")

    with pytest.raises(RuntimeError, match="answered none of the last"):
        long = dataclasses.replace(PLAN, budget=400)
        explorer(tmp_path, encoder, say=out, plan=long).run(progress=False)
    assert not (tmp_path / "summary.json").exists()
    explorer(tmp_path, encoder, plan=short).run(progress=False)
    assert (tmp_path / "summary.json").is_file()


def test_an_evaluator_that_says_nonsense(encoder, tmp_path):
    with pytest.raises(ValueError, match="the evaluator returned 'bad'"):
        explorer(tmp_path / "a", encoder, judge=lambda q, a: "bad").run(progress=False)

    def sure(query, text):
        return Judgement(int("wrong" in text), "by hand", 0.9)

    plan = dataclasses.replace(PLAN, budget=4)
    found = explorer(tmp_path / "b", encoder, plan=plan, judge=sure).run(progress=False)
    assert {(n.why, n.confidence) for n in found.nodes} == {("by hand", 0.9)}


def test_no_seeds(encoder, tmp_path):
    from jaxhal.watchdog import Explorer

    for seeds in ([], ["???", " "]):
        with pytest.raises(ValueError, match="there are no seeds"):
            Explorer(
                CallableAgent(answer),
                CallableEvaluator(evaluate),
                Generator(CallableAgent(change), "things"),
                seeds,
                ExactStore(WIDTH),
                tmp_path,
            )
