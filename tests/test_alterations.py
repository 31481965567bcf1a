"""Answers altered by rule: what changes, where it is marked, what is left alone."""

import dataclasses
import re

import pytest
from test_datasets import ragtruth_files

from jaxhal.datasets import alterations, altered, bundled, load_dataset
from jaxhal.datasets.rules import KINDS
from jaxhal.types import Example, Logprob

# Kind -> an answer that its context supports word for word, and what may change.
CASES = {
    "number": ("The tower holds 340 steps in all.", {"340"}),
    "number_word": ("The tower holds seven great bells.", {"seven"}),
    "magnitude": ("The tower draws two million guests.", {"million"}),
    "year": ("The tower was finished in 1871.", {"1871"}),
    "month": ("The tower opened in December.", {"December"}),
    "day": ("The tower opened on 25 December.", {"25"}),
    "weekday": ("The tower rests on Monday.", {"Monday"}),
    "time": ("The tower opens at 07:10 each morning.", {"07"}),
    "unit": ("The tower stands 90 meters tall.", {"meters"}),
    "ordinal": ("The tower was the third built here.", {"third"}),
    "name": ("Then the tower pleased Clara Reed.", {"Clara Reed"}),
    "place": ("The tower looks like one in Norway.", {"Norway"}),
    "swapped_names": (
        "Once in the tower Clara Reed painted Otto Lang.",
        {"Clara Reed", "Otto Lang"},
    ),
    "swapped_numbers": ("The tower has 12 rooms beside 31 windows.", {"12", "31"}),
    "negation_added": ("The tower was repaired with bricks.", {"was"}),
    "negation_removed": ("The tower does not lean westward.", {"does not"}),
    "comparative": ("The tower became taller than planned.", {"taller"}),
    "antonym": ("The tower stays closed all through August.", {"closed"}),
    "frequency": ("The tower always pleases visitors.", {"always"}),
    "quantity": ("The tower took many years.", {"many"}),
}
# Another name, of which the context says something else.
MORE = " Elsewhere people praise Ada Holm."


def grounded(text, **fields):
    return Example(text, context=fields.pop("context", text), label=0, **fields)


def test_what_belongs_to_the_words_of_the_original_stays_with_it():
    text, _ = CASES["year"]
    given = {"samples": ("Other.",), "logprobs": (Logprob(text, -1.0),)}
    (made,) = altered([grounded(text, states="a.safetensors", **given)], "year")
    assert (made.samples, made.states, made.logprobs) == ((), "", None)


def test_there_are_twelve_kinds_and_more():
    assert len(CASES) >= 12 and CASES.keys() == KINDS.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_changes_what_it_says_and_marks_it(kind):
    text, changed = CASES[kind]
    one = grounded(text, context=text + MORE, id="a", source="s", split="train")
    (made,) = altered([one], kind)
    assert (made.id, made.source, made.split) == (f"a#{kind}", "s", "train")
    assert made.label == 1 and {span.label for span in made.labels} == {kind}
    assert made.response != text and made.context == one.context
    # All but the marked characters is the original's, in its order.
    ends = [0, *(at for span in made.labels for at in span[:2]), None]
    kept = [made.response[a:b] for a, b in zip(ends[::2], ends[1::2], strict=True)]
    whole = re.fullmatch(" ?(.*?)".join(re.escape(one.rstrip()) for one in kept), text)
    assert whole
    removed, new = set(whole.groups()), {made.response[a:b] for a, b, _ in made.labels}
    if kind == "negation_added":
        assert (removed, new) == ({""}, {"not"})
    else:
        assert removed == changed
        assert (new == changed) == kind.startswith("swapped")


def test_every_alteration_of_real_answers_is_one_change():
    originals = {one.id: one for one in bundled() if not one.label}
    made = altered([*originals.values()])
    assert len({one.labels[0].label for one in made}) >= 15
    for one in made:
        original = originals[one.id.split("#")[0]]
        first, last = one.labels[0], one.labels[-1]
        head, tail = one.response[: first.start], one.response[last.end :]
        assert original.response.startswith(head) and original.response.endswith(tail)
        assert one.response != original.response and one.group == original.group
        if first.label in ("number", "year", "day", "place"):
            new = one.response[first.start : first.end]
            assert not re.search(rf"\b{re.escape(new)}\b", original.context)


def test_an_alteration_depends_on_its_answer_kind_and_seed_alone():
    some = [one for one in bundled() if not one.label]
    assert altered(some) == altered(some)
    assert altered(some[3:4], ["unit", "number"]) == [
        one
        for one in altered(some)
        if one.id.startswith(some[3].id) and one.id.split("#")[1] in ("unit", "number")
    ]
    assert altered(some) != altered(some, seed=1)


@pytest.mark.parametrize(
    "kind, text, context",
    [
        ("number", "The tower has 7 bells.", "The tower: 1 2 3 4 5 6 7 8 9 bells."),
        ("comparative", "The old tower is taller.", "The new tower is shorter."),
        ("negation_added", "The tower is open.", "The tower is not open on Monday."),
        ("negation_removed", "The tower is not shut.", "No tower is shut. It is not."),
        (
            "swapped_names",
            "The tower saw Clara meet Otto there.",
            "The tower saw Otto meet Clara there. It saw Clara meet Otto.",
        ),
    ],
)
def test_what_the_context_says_is_no_alteration(kind, text, context):
    assert altered([grounded(text)], kind)
    assert not altered([grounded(text, context=context)], kind)


@pytest.mark.parametrize(
    "text",
    [
        "The passages say that it holds 340 steps.",  # where, not what
        "Sheep graze beneath 340 windmills.",  # nothing of the context
        "1. Climb the tower",  # an item of a list
    ],
)
def test_what_says_nothing_of_the_context_stays(text):
    assert not altered([grounded(text, context="The tower holds 340 steps.")], "number")


def test_what_cannot_be_altered_is_an_error():
    with pytest.raises(ValueError, match="unknown kind 'numbr'; did you mean 'number'"):
        altered([grounded("It holds 340 steps.")], "numbr")
    made_up = dataclasses.replace(grounded("It holds 340 steps.", id="a"), label=1)
    with pytest.raises(ValueError, match="example 'a' has label 1; only grounded"):
        altered([made_up])


def test_the_data_set(tmp_path):
    text = "It opened in 1765 in Łódź, before the 340 passages 🎉 were built."
    span = {"start": 0, "end": 2, "text": "It", "label_type": "x"}
    source = {
        "source_id": "1",
        "task_type": "QA",
        "source_info": {"question": "why?", "passages": text},
        "prompt": f"why? {text}",
    }
    root = ragtruth_files(
        tmp_path,
        {"response": text.replace("passages", "stairs")},
        {"id": "11", "response": text.replace("passages", "stairs"), "split": "test"},
        {"id": "12", "response": "It.", "labels": [span]},
        sources=(source,),
    )
    found = load_dataset("alterations", root=root, kinds=["year", "number"])
    ids = [one.id for one in found]
    assert ids == ["10", "10#year", "10#number", "11", "11#year", "11#number"]
    assert {one.group for one in found} == {"1"}
    fewer = alterations(root, kinds=["year", "number"], each=1, split="test")
    assert [one.id for one in fewer] == ids[3:5]
