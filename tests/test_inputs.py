"""What detectors decide on: cut to parts that do not give their labels away."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import jaxhal
from jaxhal.detectors import build, closed_book, features_of
from jaxhal.detectors.lookback_lens import lookback_spans
from jaxhal.reading.extract import extract
from jaxhal.reading.store import Store
from jaxhal.reading.units import Part, has_text, parts_of
from jaxhal.scoring.inputs import collect
from jaxhal.types import Example, Label
from tiny_lm import answers, tiny_lm


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


def labelled(count=4):
    """The answers with their first word made up in every other one."""
    return [
        dataclasses.replace(e, labels=(Label(0, 5),) if e.label else ())
        for e in answers(count)
    ]


@pytest.mark.parametrize("unit", ["span", "window"])
def test_no_part_holds_a_token_without_text(unit):
    """The end of the sequence is in no hallucinated part, so it may be in none."""
    offsets = np.array([*([n, n + 1] for n in range(9)), [9, 9]])
    for labels in ((), (Label(2, 4),)):
        example = Example("abcdefghi", context="C", labels=labels)
        marked = np.isin(np.arange(10), [2, 3]) & bool(labels)
        whole = Part(0, np.ones(10, bool), example)
        parts = list(parts_of(unit, whole, offsets, marked))
        assert parts and not any(part.tokens[9] for part in parts)
        texts = [part.example.response for part in parts]
        if unit == "window":
            assert texts == ["abcdefgh", "bcdefghi"]
            assert all(part.tokens.sum() == 8 for part in parts)
        else:
            assert texts == (["cd", "ab", "efghi"] if labels else ["abcdefghi"])


def test_parts_close_up_over_a_token_without_text():
    offsets = np.array([[0, 1], [1, 1], [1, 2], [2, 2]])
    whole = Part(0, np.ones(4, bool), Example("ab", context="C", label=0))
    (part,) = parts_of("span", whole, offsets, np.zeros(4, bool))
    assert part.example.response == "ab"
    assert part.tokens.tolist() == [True, False, True, False]


def test_spans_of_lookback_lens_leave_out_the_end_of_the_sequence():
    ratio = np.arange(5, dtype=np.float32).reshape(1, 1, 1, 5)
    features = {
        "lookback": ratio,
        "valid": np.ones((1, 5), bool),
        "text": np.array([[True, True, True, True, False]]),
        "marked": np.array([[False, True, False, False, False]]),
    }
    spans = lookback_spans(jax.tree.map(jnp.asarray, features))
    assert np.ravel(spans.parts).tolist() == [1.0, 0.0, 2.5]
    assert spans.whole.item() == 1.5
    features["marked"] = np.array([[False, False, False, True, False]])
    spans = lookback_spans(jax.tree.map(jnp.asarray, features))
    assert spans.there.tolist() == [[True, True, False]]


def test_every_batch_says_which_tokens_have_text(lm, tmp_path):
    detectors = [build("lookback_probe")]
    for unit in ("response", "span"):
        source = collect(lm, labelled(), detectors, Store(tmp_path), unit=unit).source
        for numbers, features in source.batches():
            textless = (features["valid"] & ~features["text"]).sum(1)
            assert (features["text"] <= features["valid"]).all()
            expected = [int(unit == "response")] * len(numbers)
            assert textless[: len(numbers)].tolist() == expected
    rows = [lm.tokenizer.encode_example(example) for example in labelled(2)]
    found = extract(lm, labelled(2), features_of(detectors), progress=False)
    ((numbers, features),) = found.batches()
    for at, number in enumerate(numbers):
        count = len(rows[number].offsets)
        text = np.asarray(features["text"])[at]
        assert text[:count].tolist() == has_text(rows[number].offsets).tolist()
        assert not text[count - 1 :].any()


def test_features_of_whole_answers_are_not_cut(lm, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxhal.reading.store.Store.columns", None)  # before reading
    chosen = [build(name) for name in ("toha", "mtop_div", "lookback_probe")]
    with pytest.raises(
        ValueError, match="'mtop_div' belongs to a whole.*leave out toha, mtop_div"
    ):
        collect(lm, labelled(), chosen, Store(tmp_path), unit="span")


def test_answers_too_short_for_any_window(lm, tmp_path):
    short = [
        Example("No.", context="C", label=0),
        Example("Yes.", context="C", label=0),
    ]
    with pytest.raises(ValueError, match="none of the 2 answers has the 8 tokens"):
        collect(lm, short, [build("lookback_probe")], Store(tmp_path), unit="window")


@pytest.mark.parametrize("prompt", ["Why is it red?", "Why is it red?\n"])
def test_context_gain_needs_a_context(prompt):
    example = Example("So.", prompt=prompt, question="Why is it red?", id="x")
    with pytest.raises(ValueError, match="'x' has no context apart from its question"):
        closed_book(example)
    framed = dataclasses.replace(example, prompt="Answer in French: " + prompt)
    assert closed_book(framed).prompt == "Why is it red?"


def test_examples_in_any_order_of_pandas(lm):
    """Rows go by their places, whatever their index."""
    some = [dataclasses.replace(e, id=str(n)) for n, e in enumerate(answers(3))]
    order, names = [2, 0, 1], ["mtop_div", "novel_words"]
    want = jaxhal.score(lm, [some[n] for n in order], names)
    shuffled = pd.Series(some).iloc[order]
    for given in (shuffled, (one for one in shuffled)):
        found = jaxhal.score(lm, given, names)
        assert [one.id for one in found] == ["2", "0", "1"]
        assert [one.to_dict() for one in found] == [one.to_dict() for one in want]


def test_labels_of_numpy_are_those_of_python():
    """JSON holds no other.  Types are checked in tests alone, and before this is."""
    for given in ({"label": np.int64(1)}, {"labels": (Label(0, np.int64(3)),)}):
        one = Example("Pears.", prompt="What?")
        for name, value in given.items():
            object.__setattr__(one, name, value)
        one.__post_init__()
        assert json.dumps(one.label) == "1"
        assert [json.dumps(span[:2]) for span in one.labels or ()] in ([], ["[0, 3]"])
