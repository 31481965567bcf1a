"""Asking a model whether an answer is hallucinated: the reader, or one far away."""

import dataclasses
import json
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxhal
import oracles
from chat_server import STALL, serving
from jaxhal import detectors
from jaxhal.capture import forward as capture
from jaxhal.detectors import (
    AT_ONCE,
    Targets,
    build,
    closed_book,
    context_gain,
    detection_prompt,
    icl_prompt,
)
from jaxhal.detectors.prompts import (
    ASK,
    SHOTS,
    ListedShare,
    Replied,
    listed_share,
    material,
    with_shots,
)
from jaxhal.features.base import OfRewrite
from jaxhal.features.uncertainty import TextLogprob, TokenLogprob
from jaxhal.io.threads import at_once
from jaxhal.llm.endpoint import (
    Endpoint,
    NoReply,
    Unanswered,
    Useless,
    json_object,
)
from jaxhal.models.batching import lengths
from jaxhal.reading import store as store_module
from jaxhal.reading.bulk import Bulk
from jaxhal.reading.extract import kinds
from jaxhal.reading.store import Store
from jaxhal.scoring import saving
from jaxhal.scoring.fitting import Fitted, fit, untrained
from jaxhal.scoring.inputs import collect
from jaxhal.types import Example, Label
from tiny_lm import tiny_lm

NAME = "detection_prompt"
# Of one length, so that few programs are compiled.
EXAMPLES = [
    Example(
        id=str(number),
        context=f"Box {number // 2} holds red balls.",
        question="What is inside?",
        response=f"Balls, {number:02}.",
        label=number % 2,
    )
    for number in range(12)
]
BARE = Example("It is {red}.", prompt="Which colour is it?", id="bare", label=0)
UNASKED = dataclasses.replace(EXAMPLES[0], question=None, id="unasked")


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return Store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def data(lm, store):
    chosen = [build(NAME), build("context_gain_count"), build("novel_words")]
    return collect(lm, EXAMPLES, chosen, store, batch_size=4)


def shares_of_yes(lm, questions):
    """From the logits of every position after every question and either reply."""
    encode = lm.tokenizer.encode
    rows = [(encode(q), encode(reply)) for q in questions for reply in ("Yes", "No")]
    tokens = np.zeros((len(rows), lm.config.context_length), np.int32)
    for row, (asked, reply) in enumerate(rows):
        tokens[row, : len(asked) + len(reply)] = asked + reply
    logits = np.asarray(lm.forward(tokens), np.float64)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    found = [
        np.exp(sum(logp[row, len(asked) - 1 + at, t] for at, t in enumerate(reply)))
        for row, (asked, reply) in enumerate(rows)
    ]
    yes, no = np.reshape(found, (-1, 2)).T
    return yes / (yes + no)


# The reader ---------------------------------------------------------------------------


@pytest.mark.parametrize("left, right", [(0, 0), (2, 3)])
def test_text_logprob_leaves_out_the_last_token(left, right):
    n, prompt, vocab = 9, 4, 40
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(n, vocab)).astype(np.float32)
    tokens = rng.integers(vocab, size=n)
    padding = ((left, right), (0, 0))
    matrix = jnp.asarray(np.pad(logits, padding, constant_values=np.nan))
    view = oracles.padded(np.eye(n), prompt, left=left, right=right)[1]
    tokens_there = np.pad(tokens, (left, right))
    found = oracles.reduce(TextLogprob(), matrix, view, tokens_there)
    want = oracles.token_logprob(logits[prompt - 1 : -1], tokens[prompt:])
    np.testing.assert_allclose(found, want[:-1].sum(), rtol=1e-5)
    empty = oracles.padded(np.eye(n), n - 1, left=left, right=right)[1]
    assert oracles.reduce(TextLogprob(), matrix, empty, tokens_there) == 0.0


def test_the_question_shows_what_is_known():
    whole = EXAMPLES[1]
    for part in (whole.context, whole.question, whole.response):
        assert part in Replied("No")(whole).prompt
    asked = Replied("Yes")(BARE)
    assert "Source:\nWhich colour is it?\n\nAnswer:\nIt is {red}.\n" in asked.prompt
    assert (asked.response, asked.id, asked.label) == ("Yes", "bare", None)
    assert "Question:" not in Replied("Yes")(UNASKED).prompt
    framed = Example("r", prompt="Now: C, so Q?", context="C", question="Q?")
    assert material(framed) == "Source:\nC\n\nQuestion:\nQ?\n\nAnswer:\nr"


def test_scores_are_shares_of_yes(lm):
    examples = [*EXAMPLES[:3], BARE, UNASKED]
    before = capture.read_jit._cache_size()
    reports = jaxhal.score(lm, examples, [NAME, "novel_words"], batch_size=4)
    assert [report.error for report in reports] == [None] * 5
    found = [report.scores[NAME] for report in reports]
    questions = [ASK.format(material=material(example)) for example in examples]
    np.testing.assert_allclose(found, shares_of_yes(lm, questions), rtol=1e-4)
    assert len(set(np.round(found, 5))) == 5
    # One program for both replies.
    asked = [lm.tokenizer.encode_example(Replied("No")(one)) for one in examples]
    assert capture.read_jit._cache_size() - before <= len({lengths([a]) for a in asked})


def test_experiments_see_the_same(lm, data, tmp_path, monkeypatch):
    planned, real = [], store_module.make_plan

    def make_plan(*arguments):
        planned.append(real(*arguments))
        return planned[-1]

    monkeypatch.setattr(store_module, "make_plan", make_plan)
    some = [NAME, "context_gain_count"]
    reports = jaxhal.score(lm, EXAMPLES[:4], some, batch_size=4)
    for name in some:
        scores = [report.scores[name] for report in reports]
        np.testing.assert_allclose(data.inputs[name][:4], scores, rtol=1e-4)
    alone = collect(lm, EXAMPLES, [build(NAME)], Store(tmp_path), batch_size=4)
    np.testing.assert_allclose(alone.inputs[NAME], data.inputs[NAME], rtol=1e-5)
    for one, other in zip(alone.rows, data.rows, strict=True):
        np.testing.assert_array_equal(one.response_ids, other.response_ids)
    # Both replies to a question share the reading of it.
    groups = [group for part in planned[0] for group in part.groups]
    assert {group.copies for group in groups} == {2}
    assert sum(len(group.keys) for group in groups) == 24


def test_a_question_over_the_context_is_an_error_of_its_row(lm, data, store):
    long = Example("All red.", context="Red. " * 80, id="long", label=0)
    examples = [long, *EXAMPLES[:4]]
    reports = jaxhal.score(lm, examples, [NAME], batch_size=4)
    assert "over the model's context of 512" in reports[0].error
    assert list(reports[1].scores) == [NAME] and reports[1].error is None
    found = collect(lm, examples, [build(NAME)], store)
    assert [example.id for example in found.examples] == ["0", "1", "2", "3"]
    assert list(found.errors) == [0]
    assert "over the model's context of 512" in found.errors[0]
    np.testing.assert_array_equal(found.inputs[NAME], data.inputs[NAME][:4])


@pytest.mark.parametrize("unit", ["span", "window"])
def test_a_reply_cannot_be_cut(lm, tmp_path, monkeypatch, unit):
    monkeypatch.setattr(
        "jaxhal.reading.store.Store.columns", None
    )  # found out before reading
    marked = [dataclasses.replace(EXAMPLES[1], labels=(Label(0, 5),))]
    chosen = [build("context_gain"), build(NAME)]
    with pytest.raises(
        ValueError, match=f"'yes_logprob' .* cut to a {unit}; leave out {NAME}, or use"
    ):
        collect(lm, marked, chosen, Store(tmp_path), unit=unit)


def test_they_are_read_only_when_asked_for():
    for name in (NAME, "icl_prompt"):
        assert name in detectors.CATALOGUE and name not in AT_ONCE


# Labelled answers first ---------------------------------------------------------------


def test_two_shots_are_right_and_two_are_not():
    asked = with_shots(BARE)
    assert sorted(label for *_, label in SHOTS) == ["No", "No", "Yes", "Yes"]
    blank = "Question:\n{}\n\nAnswer:\n{}\n\nHallucinated:\n"
    for question, answer, label in SHOTS:
        assert f"{blank.format(question, answer)}{label}\n\n" in asked
    assert asked.endswith(blank.format(BARE.prompt, BARE.response))
    assert "Source:" not in asked


@pytest.mark.parametrize(
    ("example", "shown"),
    [
        (EXAMPLES[1], "Source:\nBox 0 holds red balls.\n\nQuestion:\nWhat is inside?"),
        (UNASKED, "Source:\nBox 0 holds red balls.\n\nAnswer:\n"),
        (Example("r", prompt="Now: C, so Q?", context="C"), "Source:\nC\n\nAnswer:\nr"),
        (Example("r", prompt="Now: Q?", question="Q?"), "Question:\nNow: Q?\n\nAnswer"),
    ],
)
def test_a_source_is_shown_where_there_is_one(example, shown):
    assert f"Hallucinated:\nNo\n\n{shown}" in with_shots(example)


def test_scores_after_shots_are_shares_of_yes(tmp_path):
    lm = tiny_lm(context=1024)
    examples = [*EXAMPLES[:2], BARE, UNASKED]
    asked = [icl_prompt(), build(NAME)]
    fitted = [untrained(one) for one in asked]
    reports = jaxhal.score(lm, examples, fitted, batch_size=4)
    found = [report.scores["icl_prompt"] for report in reports]
    want = shares_of_yes(lm, map(with_shots, examples))
    np.testing.assert_allclose(found, want, rtol=1e-4)
    assert len(set(np.round(found, 5))) == 4
    other = [report.scores[NAME] for report in reports]
    assert not np.isclose(found, other, rtol=1e-3).any()
    labelled = [dataclasses.replace(one, label=0) for one in examples]
    data = collect(lm, labelled, asked, Store(tmp_path), batch_size=4)
    np.testing.assert_allclose(data.inputs["icl_prompt"], found, rtol=1e-4)


# Views --------------------------------------------------------------------------------


def test_rewrites_are_read_once():
    gain, count, asked = (
        build(name) for name in ("context_gain", "context_gain_count", NAME)
    )
    found = kinds(detectors.features_of([gain, asked, count]))
    assert found.rewrites == {
        closed_book: {"closed_logprob": TokenLogprob()},
        Replied("Yes"): {"yes_logprob": TextLogprob()},
        Replied("No"): {"no_logprob": TextLogprob()},
    }
    assert kinds(detectors.features_of([asked])).own == {}
    more = ("closed_text", OfRewrite(closed_book, TextLogprob()))
    mine = gain._replace(features=(*gain.features, more))
    both = {"closed_logprob": TokenLogprob(), "closed_text": TextLogprob()}
    found = kinds(detectors.features_of([gain, mine]))
    assert found.rewrites == {closed_book: both}


@pytest.mark.parametrize(
    ("name", "feature"),
    [
        ("logprob", OfRewrite(closed_book, TokenLogprob())),
        ("logprob", TextLogprob()),
        ("closed_logprob", OfRewrite(Replied("Yes"), TokenLogprob())),
    ],
)
def test_one_name_is_one_feature(name, feature):
    mine = context_gain()
    mine = mine._replace(name="mine", features=((name, feature),))
    with pytest.raises(ValueError, match=f"'mine' looks at '{name}' as .*, another as"):
        detectors.features_of([context_gain(), mine])


def test_tokens_of_another_response_are_refused(lm, tmp_path):
    feature = OfRewrite(Replied("Yes"), TokenLogprob())
    mine = context_gain()._replace(features=(("asked", feature),))
    message = "'asked' runs along .* example '0' is read with another .* 'Yes'"
    with pytest.raises(TypeError, match=message):
        jaxhal.score(lm, EXAMPLES[:2], [untrained(mine)])
    with pytest.raises(TypeError, match=message):
        collect(lm, EXAMPLES[:2], [mine], Store(tmp_path))


def test_an_ensemble_looks_at_the_features_of_its_members(lm, data, tmp_path):
    members = [NAME, "context_gain_count", "novel_words"]
    spec = {"ensemble": {"members": members}}
    whole = build(spec)
    every = detectors.features_of([build(m) for m in members])
    assert dict(whole.features) == every
    inputs = {name: data.inputs[name] for name in members}
    everyone = np.ones(len(data.labels))
    targets = Targets(data.labels, data.groups, everyone, jax.random.key(0))
    fitted = fit(whole, inputs, targets)
    saving.save(tmp_path / "one", fitted, spec)
    again = saving.load(tmp_path / "one")
    reports = jaxhal.score(lm, EXAMPLES[:4], [again], batch_size=4)
    scores = [report.scores["ensemble"] for report in reports]
    np.testing.assert_allclose(scores, fitted.score(inputs)[:4], rtol=1e-3, atol=1e-5)
    other = {"ensemble": {"members": [*members[1:], members[0]]}}
    with pytest.raises(ValueError, match="makes another 'ensemble'.* its summary is"):
        saving.save(tmp_path / "two", fitted, other)


# An endpoint --------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path, monkeypatch):
    with serving(listing(), tmp_path, monkeypatch) as server:
        yield server


def spec(server, **options):
    return {NAME: {"endpoint": server.url, "model": "judge", **options}}


def share_of(server):
    """What the detector finds of one answer; the error of an answer is raised."""
    (measure,) = build(spec(server)).measures

    def share(example):
        bulk = Bulk(LM, [example])
        (found,) = measure(bulk)
        if bulk.errors:
            raise ValueError(bulk.errors[0])
        return found

    return share


def listing(*parts):
    return json.dumps({"hallucinations": parts})


LM = tiny_lm()  # has no part in it
EXAMPLE = Example("Built in 1932 in Rome.", context="Built in 1832.", id="bridge")


@pytest.mark.parametrize(
    ("parts", "characters"),
    [
        ([], 0),
        (["1932"], 4),
        (["1932", "in Rome"], 11),
        (["1932 in", "in Rome"], 12),  # what two parts share counts once
        (["in"], 2),  # the first place counts
        (["1933", "Rome"], 8),  # nowhere in the answer: its length
        (["1933" * 10], 22),  # at most all of it
        (["Built in 1932 in Rome."], 22),
        ([""], 0),
    ],
)
def test_the_share_listed(server, parts, characters):
    server.replies = [listing(*parts)]
    share = share_of(server)
    assert share(EXAMPLE) == pytest.approx(characters / 22)


def test_a_list_may_be_of_more_than_the_reader_can_read(server):
    server.replies = [listing("1932")]
    long = dataclasses.replace(EXAMPLE, context="Built in 1832. " * 60)
    own = [build(spec(server))]
    (found,) = jaxhal.score(tiny_lm(context=256), [long], own, progress=False)
    assert found.error is None and found.scores[NAME] == pytest.approx(4 / 22)


def test_a_list_in_a_block_of_code(server):
    server.replies = [f"```json\n{listing('1932')}\n```\n"]
    share = share_of(server)
    assert share(EXAMPLE) == pytest.approx(4 / 22)


@given(st.text("ab", min_size=1), st.lists(st.text("ab"), max_size=4))
def test_share_by_hand(response, parts):
    inside = {
        place
        for part in parts
        if part in response
        for place in range(response.index(part), response.index(part) + len(part))
    }
    missing = sum(len(part) for part in parts if part not in response)
    share = (len(inside) + missing) / len(response)
    assert listed_share(response, parts) == pytest.approx(min(share, 1.0))


def test_what_is_asked(server, monkeypatch):
    share = share_of(server)
    share(EXAMPLE)
    ((path, body),) = server.asked
    assert path == "/v1/chat/completions"
    assert body["model"] == "judge" and body["temperature"] == 0
    (message,) = body["messages"]
    assert message["role"] == "user" and material(EXAMPLE) in message["content"]
    assert '{"hallucinations": ["...", "..."]}' in message["content"]
    monkeypatch.setenv("OPENAI_API_KEY", "sk-mine")
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    share_of(server)(dataclasses.replace(EXAMPLE, response="Other."))
    assert server.keys[1] == "Bearer sk-mine" and "mine" not in server.keys[0]


def test_nothing_is_asked_twice(server, tmp_path):
    server.replies = [listing("1932"), listing("Rome.")]
    ask = Endpoint(server.url, "judge").ask
    assert [ask("One?"), ask("One?")] == [listing("1932")] * 2
    assert Endpoint(server.url, "judge").ask("One?") == listing("1932")
    assert len(server.asked) == 1
    assert Endpoint(server.url, "other").ask("One?") == listing("Rome.")
    assert ask("Two?") == listing("Rome.") and len(server.asked) == 3
    files = sorted((tmp_path / "cache" / "replies").iterdir())
    assert len(files) == 3
    kept = json.loads(Endpoint(server.url, "judge").path("Two?").read_text("utf-8"))
    assert kept == {
        "endpoint": server.url,
        "model": "judge",
        "messages": [{"role": "user", "content": "Two?"}],
        "reply": listing("Rome."),
    }
    for damage in ("", "{}", "[]", '{"reply"'):
        files[0].write_text(damage, encoding="utf-8")
        with pytest.raises(Useless, match="holds no reply; delete it to ask again"):
            for url, model, question in (
                (server.url, "judge", "One?"),
                (server.url, "judge", "Two?"),
                (server.url, "other", "One?"),
            ):
                Endpoint(url, model).ask(question)


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "The answer is fine.",
        "[]",
        "{}",
        "null",
        '{"hallucinations": "1932"}',
        '{"hallucinations": [1932]}',
        '{"hallucinations": null}',
        '{"hallucinations": [], "why": ""}',
        '```json\n{"hallucinations": []}',
        'Here: ```json\n{"hallucinations": []}\n```',
        '{"hallucinations": ["1932"]',
        "[" * 100_000,
    ],
)
def test_other_replies_are_asked_for_again(server, reply):
    server.replies = [reply, reply, listing("1932")]
    share = share_of(server)
    for _ in range(2):
        assert share(EXAMPLE) == pytest.approx(4 / 22)
    first, second, third = server.questions
    assert second == third and second.startswith(f"{first}\n\nYour last reply")
    fault = "'hallucinations'" if reply.startswith("{}") else "it "
    assert fault in second.removeprefix(first)
    kept = Endpoint(server.url, "judge").path(first)
    record = json.loads(kept.read_text("utf-8"))
    assert record["reply"] == listing("1932")
    assert record["messages"][0]["content"] == second


@pytest.mark.parametrize("reply", ["", "Sorry, " + "so " * 40])
def test_three_such_replies_are_an_error(server, reply):
    server.replies = [reply]
    share = share_of(server)
    for times in (1, 2):
        with pytest.raises(ValueError, match="'bridge': 'judge' replied") as caught:
            share(EXAMPLE)
        assert repr(reply[:80]) in str(caught.value)
        assert "not one JSON object and nothing else" in str(caught.value)
        # Nothing was kept; what fails among others is asked again alone.
        assert len(server.asked) == 6 * times
    server.replies = [listing()]
    assert share(EXAMPLE) == 0.0


def test_a_kept_reply_that_is_of_no_use_is_replaced(server):
    endpoint = Endpoint(server.url, "judge")
    server.replies = ["Sorry.", listing()]
    assert endpoint.ask("One?") == "Sorry."
    assert endpoint.ask("One?", accept=json_object) == listing()
    assert endpoint.ask("One?") == listing() and len(server.asked) == 2
    # The first question was asked as it was.
    assert server.questions == ["One?", "One?"]


@pytest.mark.parametrize(
    ("bad", "error", "times"),
    [
        ("Sorry.", "'judge' replied 'Sorry.', of no use in 3 attempts: it is not", 3),
        (None, "answered without text from 'judge'", 1),
        (400, "gave no answer from 'judge' (Error code: 400", 1),
        (503, "gave no answer from 'judge' (Error code: 503", 3),
    ],
)
def test_a_reply_of_no_use_costs_no_other_answer(lm, server, bad, error, times):
    examples = EXAMPLES[:3]
    replies = {examples[0].response: listing("Balls"), examples[1].response: bad}

    def said(question):
        return next((replies[one] for one in replies if one in question), listing())

    server.replies = [said]
    detector = build(spec(server))
    reports = jaxhal.score(lm, examples, [untrained(detector), "novel_words"])
    assert reports[0].scores[NAME] == pytest.approx(5 / len(examples[0].response))
    assert reports[1].scores == {} and reports[1].tokens == []
    assert reports[1].error.startswith("example '1': ") and error in reports[1].error
    assert reports[2].scores == {NAME: 0.0, "novel_words": 1}
    # Among the others, then alone; what was answered is not asked again.
    assert len(server.asked) == 2 + 2 * times
    server.replies = [bad]
    one = {"response": "New.", "context": "Old.", "detectors": [untrained(detector)]}
    with pytest.raises(ValueError, match="example 'answer': .*'judge'"):
        jaxhal.detect(lm, **one)


def test_an_endpoint_that_takes_no_question_stops_all(lm, server):
    refused = threading.Event()

    def said(question):
        if len(server.asked) > 1:
            refused.wait(10)
        return 401

    server.replies = [said]
    examples = [dataclasses.replace(EXAMPLE, context=f"{n}.") for n in range(99)]
    threading.Timer(0.5, refused.set).start()
    with pytest.raises(RuntimeError, match="gave no answer from 'judge' .*401"):
        jaxhal.score(lm, examples, [untrained(build(spec(server)))])
    # No more than were asked at that time.
    assert len(server.asked) < 20


def test_a_reply_of_no_use_slows_no_other_answer(lm, server):
    """All others are asked along with it, not one after another later."""
    open_, most, lock = 0, [], threading.Lock()

    def said(question):
        nonlocal open_
        with lock:
            open_ += 1
            most.append(open_)
        time.sleep(0.02)
        with lock:
            open_ -= 1
        return "Sorry." if "<0.>" in question else listing()

    server.replies = [said]
    examples = [dataclasses.replace(EXAMPLE, context=f"<{n}.>") for n in range(24)]
    found = jaxhal.score(lm, examples, [untrained(build(spec(server)))])
    assert [one.error is None for one in found] == [False] + [True] * 23
    assert len(server.asked) == 23 + 2 * 3
    assert sum(one > 1 for one in most[3:]) > 10


def test_the_same_at_one_time_is_asked_once(server):
    server.replies = [lambda question: time.sleep(0.1) or "So."]
    ask = Endpoint(server.url, "judge").ask
    assert [*at_once(ask, ["One?"] * 5)] == ["So."] * 5
    assert len(server.asked) == 1


def test_an_error_behind_a_slow_question_ends_it_at_once():
    asked = []

    def ask(number):
        asked.append(number)
        if number == 0:
            time.sleep(0.5)
        if number == 1:
            raise RuntimeError("no key")

    with pytest.raises(RuntimeError, match="no key"):
        list(at_once(ask, range(99)))
    assert len(asked) < 20


def test_who_interrupts_does_not_wait_for_replies():
    go = threading.Event()

    def ask(number):
        return number == 0 or go.wait(60)

    found = at_once(ask, range(9))
    assert next(found)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        found.throw(KeyboardInterrupt)
    assert time.monotonic() - began < 30
    go.set()


def test_what_is_not_waited_for_is_not_asked():
    asked, go = [], threading.Event()

    def ask(number):
        asked.append(number)
        return number == 0 or go.wait(10)

    found = at_once(ask, range(99))
    assert next(found)
    threading.Timer(0.2, go.set).start()
    found.close()
    assert len(asked) < 20


def test_several_questions_at_a_time(server):
    """Each once, and their replies in order."""
    together = threading.Barrier(4, timeout=30)

    def said(question):
        if question != "0":
            together.wait()
        return f"says {question}"

    server.replies = [said]
    asked = ["0", "1", "2", "0", "3", "4"]
    found = Endpoint(server.url, "judge").ask_all(asked)
    assert found == [f"says {one}" for one in asked] and len(server.asked) == 5


def test_an_endpoint_that_fails(server):
    ask = Endpoint(server.url, "judge").ask
    server.replies = [500, 429, listing()]
    assert ask("Again?") == listing() and len(server.asked) == 3
    for status in (401, 404):
        server.replies = [status]
        with pytest.raises(RuntimeError, match=f"{server.url} gave no ans") as caught:
            ask("Allowed?")
        assert not isinstance(caught.value, NoReply)
    server.replies = [None]
    with pytest.raises(Unanswered, match="answered without text from 'judge'"):
        ask("Silent?")
    server.replies = [" \n"]
    with pytest.raises(Useless, match="of no use in 3 attempts: it is empty"):
        ask("Silent?")
    server.replies = [b'"<html>"']
    with pytest.raises(RuntimeError, match="other than a chat completion.*/v1"):
        ask("Silent?")
    server.replies = [listing()]
    assert ask("Allowed?") == ask("Silent?") == listing()


def test_an_endpoint_that_is_slow(server):
    server.replies = [STALL, listing()]
    patient = Endpoint(server.url, "judge", timeout=1.0)
    assert patient.ask("Again?") == listing() and len(server.asked) == 2
    # How long one waits makes no other question.
    assert Endpoint(server.url, "judge").ask("Again?") == listing()
    assert len(server.asked) == 2
    server.replies = [STALL]
    hasty = Endpoint(server.url, "judge", timeout=0.1)
    with pytest.raises(Unanswered, match="gave no answer from 'judge' .*timed out"):
        hasty.ask("Still?")
    assert not hasty.path("Still?").exists()


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_timeouts(timeout):
    with pytest.raises(ValueError, match="timeout is .*; give seconds, more than 0"):
        Endpoint("http://h/v1", "m", timeout=timeout)


def test_a_key_is_needed_at_openai(server):
    ask = Endpoint("https://api.openai.com/v1", "judge").ask
    with pytest.raises(RuntimeError, match=r"\$OPENAI_API_KEY is not set, which"):
        ask("Anyone?")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "m"}, "endpoint is None and model is 'm'; give both"),
        ({"endpoint": "http://h/v1"}, "model is None; give both"),
        ({"endpoint": "localhost:8000", "model": "m"}, "endpoint is 'localhost:8000'"),
        ({"endpoint": "file:///v1", "model": "m"}, "endpoint is 'file:///v1'"),
        ({"endpoint": "http://[::1]/v1", "model": ""}, "model is ''; give its name"),
        ({"prompt": "Is it?"}, "unexpected keyword argument 'prompt'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        build({NAME: options})


def test_equal_options_are_one_detector():
    options = {"endpoint": "http://localhost/v1", "model": "m"}
    assert build({NAME: options}) is build({NAME: dict(options)})
    assert build({NAME: {"endpoint": None}}) is build(NAME) is detection_prompt()
    one, other = (ListedShare(Endpoint("http://h/v1", "m")) for _ in range(2))
    assert one == other and hash(one) == hash(other)
    assert one != ListedShare(Endpoint("http://h/v1", "n"))


def test_other_words(lm, server):
    other = "{material}\n\nIs {that} right? Yes or No."
    own = build({NAME: {"ask": other, "name": "own"}})
    examples = EXAMPLES[:2]
    found = jaxhal.score(lm, examples, [untrained(own), NAME], progress=False)
    asked = [other.replace("{material}", material(example)) for example in examples]
    scores = [report.scores["own"] for report in found]
    np.testing.assert_allclose(scores, shares_of_yes(lm, asked), rtol=1e-4)
    assert all(report.scores[NAME] != report.scores["own"] for report in found)
    assert "in words given" in own.summary
    server.replies = [listing("B")]
    options = dict(spec(server)[NAME]) | {"ask": "List: {material}", "name": "there"}
    jaxhal.score(lm, examples[:1], [untrained(build({NAME: options}))])
    assert server.questions == [f"List: {material(examples[0])}"]
    with pytest.raises(ValueError, match=r"ask is 'Is it\?'; it must hold {material}"):
        build({NAME: {"ask": "Is it?"}})


def test_two_endpoints_in_one_run(lm, server):
    both = [build(spec(server)), build(spec(server, model="other", name="second"))]
    server.replies = [listing("B"), listing("Ba")]
    (found,) = jaxhal.score(lm, EXAMPLES[:1], [untrained(one) for one in both])
    length = len(EXAMPLES[0].response)
    shares = sorted(found.scores[name] * length for name in (NAME, "second"))
    assert list(found.scores) == [NAME, "second"]
    assert shares == pytest.approx([1, 2])


def test_saving_names_the_endpoint(server, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXHAL_ENDPOINTS", "127.0.0.1")
    nothing = np.zeros(0, np.float32)
    platt = jaxhal.evaluation.calibration.Platt(1.0, 0.0)
    fitted = Fitted(build(spec(server)), (), platt, 0.5, nothing)
    with pytest.raises(ValueError, match=f"makes another '{NAME}'.*: its summary is"):
        saving.save(tmp_path / "one", fitted, spec(server, model="other"))
    with pytest.raises(ValueError, match=f"makes another '{NAME}'.*: its summary is"):
        saving.save(tmp_path / "one", fitted, NAME)
    saving.save(tmp_path / "one", fitted, spec(server))
    again = saving.load(tmp_path / "one")
    assert again.detector is fitted.detector and again.params == ()
