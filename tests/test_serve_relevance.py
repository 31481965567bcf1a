"""What spans rest on is what R* says, of the characters that were sent."""

import asyncio
import dataclasses
import json
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serve_world import alike, probe, reader, served

import jaxhal
from jaxhal import lrp
from jaxhal.reporting import attribution
from jaxhal.reporting.attribution import Piece
from jaxhal.serve.app import Server
from jaxhal.texts import sentences, whole_words
from jaxhal.types import Example, Turn

CONTEXT = "\n  A crate of red pears. It came in 1999, by sea! 🎈 It is 中国 heavy.\n"
QUESTION = "What is in it, and since when?"
ANSWER = "Red pears, they say. And a green dog of 1999."
ROW = {"context": CONTEXT, "question": QUESTION, "response": ANSWER}
TURNS = [
    {"role": "system", "content": " Be brief. Be kind. "},
    {"role": "user", "content": "Is it red?"},
    {"role": "assistant", "content": "It is. "},
    {"role": "user", "content": "\nAnd since when? Say it."},
]
TALK = {"messages": [*TURNS, {"role": "assistant", "content": ANSWER}]}
PROMPT = {"prompt": f"Read this. {CONTEXT}", "response": ANSWER}


@pytest.fixture(scope="module")
def lm(narrow):
    """A random model, with a chat template that trims what it is given."""
    return dataclasses.replace(jaxhal.load(narrow), name="narrow")


@pytest.fixture(scope="module")
def made(lm):
    one = reader(lm, probe(lm))
    yield Server({"narrow": one})
    one.close()


@pytest.fixture(scope="module")
def http(made):
    with served(made) as url, httpx.Client(base_url=url, timeout=300) as client:
        yield client


def asked(http, row):
    found = http.post("/v1/verdict", json=row | {"relevance": True})
    assert found.status_code == 200, found.text
    return found.json()


def by_hand(lm, example, batch, matrix, texts, span):
    """Shares of words and of sentences, token by token from ``R*`` of the library."""
    start, offsets = batch.prompt_length, np.asarray(batch.offsets)[0]
    own = [
        t for t, (a, b) in enumerate(offsets) if a < span["end"] and b > span["start"]
    ]
    values = matrix[own].sum(0)[: start + own[0]]
    values = values / np.abs(values).sum()
    prompt = lm.tokenizer.prompt(example)
    _, places = lm.tokenizer.encode_with_offsets(prompt.text, prompt.control)
    found, last = {}, 0
    for name, text in texts.items():
        if name == "response":
            tokens = list(zip(offsets[: own[0]], values[start:], strict=True))
            shift, text = 0, text[: span["start"]]
        else:
            inside = prompt.text.index(text.strip(), last)
            shift = text.index(text.strip()) - inside
            last = inside + len(text.strip())
            numbers = range(len(places)), values[start - len(places) : start]
            tokens = [
                (places[n], value)
                for n, value in zip(*numbers, strict=True)
                if places[n][1] > inside and places[n][0] < last
            ]
        cuts = [(one.start, one.end) for one in sentences(text)]
        for kind, pieces in (("sentences", cuts), ("words", whole_words(text))):
            for (first, end), value in tokens:
                over = [
                    (a, b) for a, b in pieces if a < end + shift and b > first + shift
                ]
                for a, b in over:
                    key = kind, name, a, b
                    found[key] = found.get(key, 0.0) + value / len(over)
    return found


CASES = {
    "context": (
        ROW,
        Example(ANSWER, context=CONTEXT, question=QUESTION),
        {"context": CONTEXT, "question": QUESTION, "response": ANSWER},
    ),
    "prompt": (
        PROMPT,
        Example(ANSWER, prompt=PROMPT["prompt"]),
        {"prompt": PROMPT["prompt"], "response": ANSWER},
    ),
    "messages": (
        TALK,
        Example(ANSWER, turns=tuple(Turn(**one) for one in TURNS)),
        {f"messages[{n}]": one["content"] for n, one in enumerate(TURNS)}
        | {"response": ANSWER},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_shares_are_those_of_the_whole_matrix(lm, http, case):
    row, example, texts = CASES[case]
    spans = asked(http, row)["spans"]
    assert spans and spans[-1]["start"] > 0
    batch = lm.encode([example])
    matrix = np.asarray(jaxhal.relevance(lm, batch).matrix)[0]
    for span in spans:
        said = span["relevance"]
        assert said["rules"] == "attnlrp"
        want = by_hand(lm, example, batch, matrix, texts, span)
        for kind, most in (("sentences", 3), ("words", 50)):
            known = {key[1:]: value for key, value in want.items() if key[0] == kind}
            shares = [abs(one["share"]) for one in said[kind]]
            assert shares == sorted(shares, reverse=True)
            assert len(shares) == min(most, len(known))
            largest = sorted(map(abs, known.values()), reverse=True)[: len(shares)]
            assert shares == pytest.approx(largest, abs=1e-5)
            for one in map(lambda fields: Piece(**fields), said[kind]):
                assert texts[one.of][one.start : one.end] == one.text
                assert known[one[:3]] == pytest.approx(one.share, abs=1e-5)


def test_many_are_as_each_alone_and_as_the_report(lm, made, http):
    rows = [ROW, TALK, PROMPT, {"response": "x"}, ROW | {"response": "pear " * 9000}]
    said = http.post("/v1/verdict", json={"rows": rows, "relevance": True}).json()
    said = said["data"]
    assert [one["error"] is None for one in said] == [True, True, True, False, False]
    assert said[3]["spans"] == said[4]["spans"] == []
    for row, found in zip(rows[:3], said, strict=False):
        assert alike(asked(http, row)["spans"], found["spans"])
    lined = {"content-type": "application/jsonl"}
    path = "/v1/verdict/lines?relevance=true"
    lines = http.post(path, content="\n".join(map(json.dumps, rows)), headers=lined)
    each = [json.loads(line)["spans"] for line in lines.text.splitlines()]
    assert each == [one["spans"] for one in said]
    plain = http.post("/v1/verdict", json=ROW).json()["spans"]
    assert plain and not any("relevance" in span for span in plain)
    # The report of the library has them from a pass back for each token.
    chosen = made.readers["narrow"].judge.chosen
    example = CASES["context"][1]
    (report,) = jaxhal.score(lm, [example], chosen, progress=False, relevance="attnlrp")
    assert alike(report.to_dict()["spans"], said[0]["spans"])


def test_what_is_no_number_is_an_error_of_its_row(http, monkeypatch):
    def broken(*args):
        return np.full((1, 9, 2000), np.nan, np.float32)

    monkeypatch.setattr(attribution, "relevance_sums", broken)
    rows = {"rows": [ROW, ROW], "relevance": True}
    for one in http.post("/v1/verdict", json=rows).json()["data"]:
        assert "'attnlrp' holds numbers that are not finite" in one["error"]
    found = http.post("/v1/verdict", json=ROW | {"relevance": True})
    assert found.status_code == 400
    assert http.post("/v1/verdict", json=ROW).status_code == 200


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_relevance_is_asked_for_with_true(http, value):
    found = http.post("/v1/verdict", json=ROW | {"relevance": value})
    assert found.status_code == 400
    assert "relevance: Input should be a valid boolean" in found.text


TEXT = st.text(st.sampled_from("ab1 .\n\t\u00a0é🙂中👩\u200d💻<|im_end|>"), max_size=30)
SEEN = TEXT.filter(lambda text: bool(text.strip()))
PLACES = st.tuples(st.integers(0, 99), st.integers(0, 99))


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(context=SEEN, question=TEXT, response=SEEN, places=PLACES)
def test_any_text_is_pointed_at(lm, monkeypatch, context, question, response, places):
    """Whatever a template trims and a tokenizer cuts, by relevance drawn at random."""

    def drawn(lm, batch, weights, rules):
        shape = 1, weights.shape[1], batch.tokens.shape[1]
        return np.random.default_rng(0).normal(size=shape)

    monkeypatch.setattr(attribution, "relevance_sums", drawn)
    start, end = sorted(place % (len(response) + 1) for place in places)
    start, end = (start, end) if start < end else (0, len(response))
    texts = {"context": context, "question": question, "response": response[:start]}
    example = Example(response, context=context, question=question)
    (found,) = attribution.explain(lm, example, [(start, end)], lrp.attnlrp())
    for pieces in (found.sentences, found.words):
        assert sum(abs(one.share) for one in pieces) < 1 + 1e-6
        for one in pieces:
            assert texts[one.of][one.start : one.end] == one.text and one.text.strip()


def test_the_documented_answer_is_what_the_default_reader_says(smollm2):
    page = Path(__file__).parent.parent / "notebooks" / "serving.md"
    text = page.read_text("utf-8")
    asked = json.loads(text.partition("-d '")[2].partition("'\n```")[0])
    shown = json.loads(text.partition("```json\n")[2].partition("```")[0])
    example = Example(asked.pop("response"), **asked)
    quiet = {"progress": False, "relevance": "attnlrp"}
    (report,) = jaxhal.score(smollm2, [example], **quiet)
    (span,) = json.loads(json.dumps(report.to_dict()["spans"]))
    rests = span["relevance"]
    # The page shows the first of each, and the sentence by its beginning.
    for kind in ("sentences", "words"):
        rests[kind] = rests[kind][: len(shown["relevance"][kind])]
    (sentence,) = shown["relevance"]["sentences"]
    begin = sentence["text"].removesuffix("...")
    assert rests["sentences"][0]["text"].startswith(begin)
    sentence["text"] = rests["sentences"][0]["text"]
    assert alike(span, shown, within=2e-3)


def test_a_pass_back_that_fails_is_of_one_answer(made, monkeypatch):
    """Of answers read together; one whose client has left costs no pass back."""
    from jaxhal.serve import judge as judges

    judge, traced = made.readers["narrow"].judge, []
    real_pass = judges.explain

    def explained(lm, example, places, rules):
        traced.append(example.id)
        if example.id == "large":
            raise RuntimeError("no memory")
        return real_pass(lm, example, places, rules)

    monkeypatch.setattr(judges, "explain", explained)
    some = [
        jaxhal.Example("Pears.", prompt="What?", id=name)
        for name in ("large", "left", "good")
    ]
    loop = asyncio.new_event_loop()
    asked = [judges._Asked(one, True, loop, loop.create_future()) for one in some]
    real = judges.detection.score_batches

    def read(*arguments, **options):
        yield from real(*arguments, **options)
        asked[1].report.cancel()

    monkeypatch.setattr(judges.detection, "score_batches", read)
    judge._read(asked)
    with pytest.raises(judges.Failed, match="no memory"):
        loop.run_until_complete(asked[0].report)
    assert loop.run_until_complete(asked[2].report).id == "good"
    assert traced == ["large", "good"]
    loop.close()
