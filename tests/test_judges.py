"""Judges: rules on references by hand, and a model behind a local endpoint."""

import json

import pytest

from chat_server import STALL, serving
from jaxhal.datasets import Question
from jaxhal.llm.endpoint import Endpoint
from jaxhal.llm.judges import (
    EndpointJudge,
    OverlapRule,
    ReferenceRule,
    Verdict,
    references,
)
from jaxhal.types import Example, Label

RIVER = Question("Where does the Rhine end?", "In the North Sea", context="It ends so.")
SEVERAL = Question("Which?", ("North Sea", "Rotterdam"))


def reply(word, *parts):
    return json.dumps({"hallucinated": word, "parts": parts})


def test_references():
    assert references(RIVER) == ("In the North Sea",)
    assert references(SEVERAL) == ("North Sea", "Rotterdam")


# Reference rules ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "label", "why"),
    [
        ("The north sea!", 0, "is a reference"),
        ("Rotterdam", 0, "is a reference"),
        ("It ends near Rotterdam", None, "a reference stands in"),
        ("At Rotterdam's port", None, "a reference stands in"),  # letters, not words
        # Of 2 + 2 words one is common, of 2 + 5 too: 2/4 and 2/7.
        ("Baltic Sea", None, "0.50, neither 1 nor at most 0.3"),
        ("It ends in Black Sea", 1, "is 0.29"),
        ("It ends in sea north", 1, "is 0.29"),  # one order only
        ("Danube", 1, "is 0.00"),
        ("", 1, "is 0.00"),
    ],
)
def test_reference_rule(answer, label, why):
    found = ReferenceRule()(SEVERAL, answer)
    assert found.label == label and why in found.why
    assert found.spans == (() if label == 0 else None)


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ("It ends near Rotterdam", 0),
        ("At Rotterdam's port", None),
        ("The passage does not mention where", None),
        ("The passage does not mention Rotterdam", None),
        ("Danube", 1),
    ],
)
def test_reference_rule_with_its_options(answer, label):
    judge = ReferenceRule(contained=0, refusals=True)
    assert judge(SEVERAL, answer).label == label


@pytest.mark.parametrize(
    ("answer", "label", "why"),
    [
        ("the North Sea", 0, "is a reference"),
        ("Sea North", None, "unigram F1 with the nearest reference is 1.00"),
        ("It ends in sea north", None, "is 0.57"),  # any order
        ("It ends in Black Sea", 1, "is 0.29"),
        ("Danube", 1, "is 0.00"),
    ],
)
def test_reference_rule_by_unigrams(answer, label, why):
    found = ReferenceRule(nearness="unigram_f1")(SEVERAL, answer)
    assert found.label == label and why in found.why


def test_wrong_nearness():
    with pytest.raises(ValueError, match="nearness is 'bleu'; use one of rouge_l, uni"):
        ReferenceRule(nearness="bleu")


def test_a_refusal_is_right_where_a_reference_declines():
    question = Question("?", "Unable to answer")
    judge = ReferenceRule(refusals=True)
    assert judge(question, "The text does not provide this.").label == 0
    assert judge(question, "It was in 1990, as everyone there says.").label == 1
    asked = Question("?", ("The text does not say", "1990"))
    assert judge(asked, "1990 is not mentioned.").label == 0
    asked = Question("?", "1990 is not mentioned")
    assert judge(asked, "1990 is not mentioned.").why == "the answer is a reference"
    assert ReferenceRule()(question, "The text does not provide this.").label == 1


def test_little_in_common_includes_three_tenths():
    question = Question("?", "a1 a2 a3 a4 a5 a6 a7 a8 a9 a10")
    # 10 + 10 words, 3 in common; then 4.
    some = "a1 a2 a3 b b b b b b b"
    assert ReferenceRule()(question, some).label == 1
    assert ReferenceRule()(question, f"{some[:8]} a4 b b b b b b").label is None


@pytest.mark.parametrize("label", [0, 1, None])
def test_only_candidates_are_confirmed(label):
    asked = []

    def confirm(question, answer):
        asked.append((question, answer))
        return Verdict(label, "I say so", None)

    judge = ReferenceRule(confirm)
    for answer in ("North Sea", "Near Rotterdam", "Baltic Sea"):
        assert judge(SEVERAL, answer) == ReferenceRule()(SEVERAL, answer)
    assert judge(SEVERAL, "Danube") == Verdict(label, "I say so", None)
    assert asked == [(SEVERAL, "Danube")]


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ("to the Rotterdam, NL", 0),  # 1 of 1 + 3 words: exactly 0.5
        ("to Rotterdam in NL", 1),
        ("Sea, North", 0),  # F1 1 and ROUGE-L 0.5
        ("Danube", 1),
    ],
)
def test_overlap_rule(answer, label):
    found = OverlapRule()(SEVERAL, answer)
    assert found.label == label and found.spans == (() if label == 0 else None)
    holds = "Rotterdam" in answer
    assert OverlapRule(contained=True)(SEVERAL, answer).label == (0 if holds else label)
    # What a verdict says is what an example takes.
    Example(answer, context="C", label=found.label, labels=found.spans)


def test_who_declines_is_not_right_for_naming_a_reference():
    rule = OverlapRule(contained=True)
    assert rule(SEVERAL, "It is Rotterdam, as they say in the passage.").label == 0
    assert rule(SEVERAL, "The passage does not mention Rotterdam.").label == 1


# An endpoint --------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path, monkeypatch):
    with serving(reply("no"), tmp_path, monkeypatch) as server:
        yield server


@pytest.fixture
def judge(server):
    return EndpointJudge(Endpoint(server.url, "referee", timeout=1.0))


ANSWER = "It ends in the Baltic Sea, in the far {north}."


@pytest.mark.parametrize(
    ("said", "label", "spans"),
    [
        (reply("no"), 0, ()),
        (reply("unsure"), None, None),
        (reply("yes", "Baltic"), 1, (Label(15, 21),)),
        # In the order of the answer; one that is listed again stands further on.
        (
            reply("yes", "{north}", "in the", "in the"),
            1,
            (Label(8, 14), Label(27, 33), Label(38, 45)),
        ),
        (f"```json\n{reply('yes', ANSWER)}\n```", 1, (Label(0, len(ANSWER)),)),
    ],
)
def test_endpoint_judge(server, judge, said, label, spans):
    server.replies = [said]
    found = judge(RIVER, ANSWER)
    assert (found.label, found.spans) == (label, spans)
    assert "referee was asked" in found.why
    assert judge(RIVER, ANSWER) == found and len(server.asked) == 1
    Example(ANSWER, context="C", label=found.label, labels=found.spans)


def test_a_part_that_is_listed_twice_is_found_twice(server, judge):
    server.replies = [reply("yes", "1990", "1990", "1990")]
    found = judge(RIVER, "Born 1990, died 1990.")
    assert found.spans == (Label(5, 9), Label(16, 20))


def test_what_a_judge_is_shown(server, judge):
    judge(RIVER, ANSWER)
    judge(SEVERAL, ANSWER)
    with_context, without = server.questions
    shown = (
        "\n\nSource:\nIt ends so.\n\nQuestion:\nWhere does the Rhine end?\n\nAnswer:"
    )
    assert f"{shown}\n{ANSWER}\n\n" in with_context
    assert RIVER.answer not in with_context
    shown = "Source:\nA right answer is: North Sea\nA right answer is: Rotterdam\n\nQ"
    assert shown in without
    for text in (reply("yes", "Yes, it ends in the Baltic Sea."), reply("no")):
        assert text in with_context


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        ("", "it is not one JSON object and nothing else"),
        ("Yes.", "it is not one JSON object"),
        (reply("no") + " Right?", "it is not one JSON object"),
        ("[" + reply("no") + "]", "it is not one JSON object"),
        ("{}", "it does not hold the keys 'hallucinated'"),
        ('{"hallucinated": "no"}', "it does not hold the keys"),
        ('{"hallucinated": "no", "parts": [], "why": ""}', "it does not hold the keys"),
        ('{"hallucinated": false, "parts": []}', "it does not hold the keys"),
        (reply("No"), "it does not hold the keys"),
        ('{"hallucinated": "yes", "parts": "Baltic"}', "it does not hold the keys"),
        (reply("yes", "baltic"), "the part 'baltic' does not stand in the answer"),
        (reply("yes", ""), "the part '' does not stand"),
        (reply("yes", 5), "the part 5 does not stand"),
        (reply("yes"), "'hallucinated' is 'yes' but 0 parts are listed"),
        (reply("no", "Baltic"), "'hallucinated' is 'no' but 1 parts are listed"),
        (reply("unsure", "Baltic"), "'hallucinated' is 'unsure' but 1 parts"),
    ],
)
def test_a_reply_of_no_use_is_asked_for_again(server, judge, bad, fault):
    server.replies = [bad, reply("yes", "Baltic")]
    assert judge(RIVER, ANSWER).label == 1
    first, second = server.questions
    assert second.startswith(first) and fault in second[len(first) :]
    assert judge(RIVER, ANSWER).label == 1 and len(server.asked) == 2


def test_three_replies_of_no_use_are_an_error_of_this_row_only(server, judge):
    server.replies = ["Hm.", "{}", reply("yes", "Black Sea"), reply("no")]
    wrong = r"question 'Where does the Rhine end\?': 'referee' replied '{\"hall.*Black"
    with pytest.raises(ValueError, match=wrong):
        judge(RIVER, ANSWER)
    # Each is told of its own fault, and nothing is kept.
    _, second, third = server.questions
    assert "not one JSON" in second and "not one JSON" not in third
    assert judge(SEVERAL, ANSWER).label == 0
    assert judge(RIVER, ANSWER).label == 0 and len(server.asked) == 5


def test_an_endpoint_in_trouble_is_tried_again(server, judge):
    server.replies = [429, 500, "", STALL, reply("yes", "Baltic")]
    assert judge(RIVER, ANSWER).label == 1 and len(server.asked) == 5
    server.replies = [503]
    with pytest.raises(RuntimeError, match="gave no answer from 'referee'"):
        judge(SEVERAL, ANSWER)
    assert len(server.asked) == 8


def test_an_answer_to_judge_holds_text(server, judge):
    with pytest.raises(ValueError, match="Rhine end.': answer is ' '; it must hold"):
        judge(RIVER, " ")
    assert not server.asked


def test_the_rule_with_a_model(server, judge):
    server.replies = [reply("yes", "Danube")]
    whole = ReferenceRule(judge)
    assert whole(SEVERAL, "Danube").spans == (Label(0, 6),)
    assert whole(SEVERAL, "Rotterdam").label == 0 and len(server.asked) == 1
    assert whole == ReferenceRule(EndpointJudge(judge.endpoint))
    assert hash(whole) == hash(ReferenceRule(EndpointJudge(judge.endpoint)))
