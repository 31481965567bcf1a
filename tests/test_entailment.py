"""Does one text follow from another: backends, and all pairs of samples."""

import json

import jax
import numpy as np
import pytest
from test_encoding import LABELS, write

from chat_server import serving
from jaxhal.llm import entailment
from jaxhal.llm.endpoint import Endpoint
from jaxhal.llm.entailment import (
    EndpointInference,
    Inference,
    Reader,
    Similarity,
    YesNo,
    answering,
    both_ways,
    of_each,
    resolve,
)
from jaxhal.models.encoders import encoding
from jaxhal.types import Example
from tiny_lm import tiny_lm

VECTORS = {
    "A cat sat.": [1.0, 0.0, 0.0],
    "A cat was sitting.": [0.96, 0.28, 0.0],
    "It rained.": [0.0, 0.0, 1.0],
    "Odd.": [0.0, 0.6, 0.8],
}


@pytest.fixture
def vectors(monkeypatch):
    """Sentences with known vectors, and what was asked for."""
    asked = []

    def embed(encoder, texts, progress=None):
        asked.append(list(texts))
        return np.array([VECTORS[text] for text in texts], np.float32)

    monkeypatch.setattr(entailment, "embed", embed)
    monkeypatch.setattr(entailment, "kept_encoder", lambda source: source)
    return asked


def test_similarity_is_linear_in_the_cosine_on_both_sides(vectors):
    judge = Similarity(threshold=0.8)
    pairs = [
        ("A cat sat.", "A cat sat."),
        ("A cat sat.", "A cat was sitting."),
        ("A cat sat.", "It rained."),
        ("It rained.", "Odd."),
    ]
    found = judge(pairs)
    entailed = [1.0, 0.5 + 0.5 * 0.16 / 0.2, 0.0, 0.5]
    np.testing.assert_allclose(found[:, 2], entailed, atol=1e-6)
    np.testing.assert_allclose(found.sum(1), 1.0, atol=1e-6)
    assert (found[:, 1] == 0).all()
    (asked,) = vectors
    assert sorted(asked) == sorted(set(asked))


def test_a_sentence_in_a_longer_text_is_supported(vectors):
    judge = Similarity()
    long = "It rained. A cat sat."
    there, back, none = judge(
        [("A cat sat.", long), (long, "A cat sat."), ("Odd.", "A cat sat.")]
    )
    assert there[2] == back[2] == pytest.approx(1.0)
    assert none[2] == 0.0


@pytest.mark.parametrize("threshold", [0.0, 1.0, -2.0])
def test_a_threshold_lies_inside(threshold):
    with pytest.raises(ValueError, match=f"threshold is {threshold}; give one in"):
        Similarity(threshold=threshold)


def test_inference_orders_labels_by_name(tmp_path):
    turned = {"0": "entailment", "1": "Contradiction", "2": "neutral"}
    folder = write(tmp_path, id2label=turned)
    pairs = [("w1 w2", "w3"), ("w3", "w1 w2"), ("w1 w2", "w3")]
    found = Inference(str(folder))(pairs)
    theirs = encoding.classify(encoding.load_encoder(folder), pairs)
    np.testing.assert_allclose(found, theirs[:, [1, 2, 0]], atol=1e-6)


def test_inference_without_a_neutral_class(tmp_path):
    folder = write(tmp_path, id2label=LABELS | {"1": "other"})
    found = Inference(str(folder))([("w1 w2", "w3")])
    assert found[0, 1] == 0 and (found[0, [0, 2]] > 0).all()


def test_inference_names_classes_that_a_configuration_does_not(tmp_path, monkeypatch):
    folder = str(write(tmp_path, id2label={str(at): f"LABEL_{at}" for at in range(3)}))
    pairs = [("w1 w2", "w3")]
    with pytest.raises(ValueError, match="name its classes by labels"):
        Inference(folder)(pairs)
    named = ("neutral", "entailment", "Contradiction")
    found = Inference(folder, named)(pairs)
    theirs = encoding.classify(encoding.load_encoder(folder), pairs)
    np.testing.assert_allclose(found[:, [1, 2, 0]], theirs, atol=1e-6)
    monkeypatch.setitem(entailment.PUBLISHED, folder, Inference(folder, named))
    np.testing.assert_array_equal(Inference(folder)(pairs), found)
    # Long ones are read in windows, by the class that is named entailment.
    long = [(" ".join(f"w{n % 40}" for n in range(60)), "w3 w4")]
    own = write(tmp_path / "own", id2label=dict(zip("012", named, strict=True)))
    want = encoding.classify(encoding.load_encoder(own), long)
    found = Inference(folder, named)(long)
    np.testing.assert_allclose(found[:, [1, 2, 0]], want, atol=1e-6)
    with pytest.raises(ValueError, match="has 3 classes; name each of them"):
        Inference(folder, ("entailment", "contradiction"))(pairs)


def test_inference_wants_a_classifier_of_inference(tmp_path):
    folder = write(tmp_path, id2label={"0": "good", "1": "bad", "2": "ugly"})
    with pytest.raises(ValueError, match="has the labels good, bad, ugly, none of"):
        Inference(str(folder))([("w1", "w2")])


def test_a_reader_says_yes_by_its_odds():
    lm = tiny_lm()
    pairs = [("All is red.", "It is red."), ("No", "A longer one"), ("No", "B")]
    found = Reader(lm)(pairs)

    def said(pair, reply):
        prompt = entailment.ASK.format(premise=pair[0], hypothesis=pair[1])
        row = lm.tokenizer.encode_example(Example(reply, prompt=prompt))
        tokens = np.concatenate([row.prompt_ids, row.response_ids])
        logp = jax.nn.log_softmax(lm.forward(tokens[None])[0])
        at = np.arange(len(row.prompt_ids) - 1, len(tokens) - 2)
        return float(logp[at, tokens[at + 1]].sum())

    for pair, row in zip(pairs, found, strict=True):
        yes, no = said(pair, "Yes"), said(pair, "No")
        assert row[2] == pytest.approx(1 / (1 + np.exp(no - yes)), abs=1e-4)
    lines = Reader(lm)([("All is\n red.\n", "It is red.")])  # on one line
    np.testing.assert_allclose(lines[0], found[0], atol=1e-6)
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-6)
    assert Reader(lm).name == "tiny 0 asked yes or no"


def test_what_is_remembered_is_not_asked_again():
    asked = []

    class Letters:
        name = "letters"

        def __call__(self, pairs):
            asked.extend(pairs)
            return np.array([[len(a), len(b), 0] for a, b in pairs], np.float32)

    found = entailment.Remembered(Letters())
    assert isinstance(found, entailment.Entailment) and found.name == "letters"
    some = [("a", "bb"), ("ccc", "d"), ("a", "bb")]
    assert found(some).tolist() == [[1, 2, 0], [3, 1, 0], [1, 2, 0]]
    assert found([("ccc", "d"), ("d", "ccc")]).tolist() == [[3, 1, 0], [1, 3, 0]]
    assert found(some[:1]).tolist() == [[1, 2, 0]]
    assert asked == [("a", "bb"), ("ccc", "d"), ("d", "ccc")]


def test_an_endpoint_names_the_relation(tmp_path, monkeypatch):
    def reply(relation):
        return json.dumps({"relation": relation})

    with serving(reply("neutral"), tmp_path, monkeypatch) as server:
        useless = ["what?"]

        def said(question):
            if "First text: b" in question:
                return reply("contradiction")
            return useless.pop() if useless else reply("entailment")

        server.replies = [said]
        judge = EndpointInference(Endpoint(server.url, "m"))
        found = judge([("a", "b"), ("b", "a")])
        assert found.tolist() == [[0, 0, 1], [1, 0, 0]]
        assert len(server.asked) == 3
        again = judge([("b", "a"), ("a", "b")])
        assert again.tolist() == found[::-1].tolist() and len(server.asked) == 3
        assert judge.name == f"m at {server.url}"


def test_an_endpoint_that_names_no_relation(tmp_path, monkeypatch):
    with serving('{"relation": "maybe"}', tmp_path, monkeypatch) as server:
        with pytest.raises(ValueError, match="the relation is 'maybe', not one of"):
            EndpointInference(Endpoint(server.url, "m"))([("a", "b")])


def test_an_endpoint_says_yes_or_no(tmp_path, monkeypatch):
    pairs = [("a\n b", "1"), ("a", "2"), ("a", "3"), ("a", "4")]
    with serving("", tmp_path, monkeypatch) as server:
        replies = ["Yes, it is.", " NONE of it", "I cannot tell.", "?"]
        server.replies = [lambda question: replies[int(question[-2]) - 1]]
        judge = YesNo(Endpoint(server.url, "m"), "{premise}|{hypothesis}?")
        found = judge(pairs)
        assert found.tolist() == [[0, 0, 1], [1, 0, 0], *[[0.5, 0, 0.5]] * 2]
        assert {*server.questions} == {"a b|1?", "a|2?", "a|3?", "a|4?"}
        assert judge(pairs).tolist() == found.tolist() and len(server.asked) == 4
        assert judge.name == f"m at {server.url} asked yes or no"


def test_answers_to_a_question():
    """Only what reads both sees the question; likeness would find it in both."""
    assert answering(Inference("m"), "Who?", "Ann.") == "Who? Ann."
    assert answering(Inference("m"), None, "Ann.") == "Ann."
    assert answering(Inference("m"), "Who?", "") == ""
    remembered = entailment.Remembered(Inference("m"))
    assert answering(remembered, "Who?", "Ann.") == "Who? Ann."
    likeness = Similarity()
    for _ in range(3):  # also where pairs are remembered
        assert answering(likeness, "Who?", "Ann.") == "Ann."
        likeness = entailment.Remembered(likeness)


def test_resolving():
    assert resolve("nli:some/model") == Inference("some/model")
    assert resolve("similarity") == Similarity()
    there = resolve("endpoint:org/a@b@http://localhost:8000/v1@u")
    assert there == EndpointInference(Endpoint("http://localhost:8000/v1@u", "org/a@b"))
    lm = tiny_lm()
    reader = resolve("reader", lm)
    assert isinstance(reader, Reader) and reader.lm is lm
    own = Similarity(threshold=0.5)
    assert resolve(own) is own
    with pytest.raises(ValueError, match="length is 0; give at least 1"):
        Inference("some/model", length=0)
    for wrong in ("nli:", "magic", "reader"):
        with pytest.raises(ValueError, match=f"entailment is '{wrong}'.*; use 'simil"):
            resolve(wrong)
    with pytest.raises(TypeError, match="give a callable with a 'name'"):
        resolve(lambda pairs: pairs)


def test_lists_of_pairs_are_asked_about_together():
    class Lengths:
        name = "lengths"
        calls = 0

        def __call__(self, pairs):
            self.calls += 1
            return np.array([[len(a), len(b), 0] for a, b in pairs], float)

    judge = Lengths()
    found = of_each(judge, [[], [("a", "bb"), ("ccc", "")], [], [("d", "e")]])
    want = [[], [[1, 2, 0], [3, 0, 0]], [], [[1, 1, 0]]]
    assert [one.tolist() for one in found] == want and judge.calls == 1
    assert [len(one) for one in of_each(judge, [[], []])] == [0, 0]
    assert of_each(judge, []) == both_ways(judge, []) == []
    assert judge.calls == 1


def test_both_ways_asks_for_each_pair_of_texts_once():
    asked = []

    class Counting:
        name = "counting"

        def __call__(self, pairs):
            asked.extend(pairs)
            return np.array([[len(a), len(b), 0] for a, b in pairs], float)

    lists = [["a", "bb", "a"], ["bb", "a"], ["ccc"], []]
    found = both_ways(Counting(), lists)
    assert sorted(asked) == [("a", "bb"), ("bb", "a")]
    assert [one.shape[:2] for one in found[:3]] == [(3, 3), (2, 2), (1, 1)]
    assert len(found[3]) == 0
    assert found[0][0, 1].tolist() == [1, 2, 0]
    assert found[0][1, 0].tolist() == [2, 1, 0]
    assert found[0][0, 2].tolist() == [0, 0, 1]
