"""Reports keep text as text, numbers finite, and the page to itself."""

import dataclasses
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from jaxhal.evaluation.held_out import Measured
from jaxhal.reporting.page import write_html
from jaxhal.reporting.report import Report, Span, Token
from jaxhal.reporting.summary import summarize
from jaxhal.types import Label

EVIL = "<script>alert('x')</script> & </script> \u2028 🎉 \"<!--"


def report(**changes):
    fields = {
        "id": "a",
        "model": "tiny",
        "response": "It is red.",
        "scores": {"toha": 0.25, "novel": 3.0},
        "tokens": [
            Token("It", 0, 2, {"entropy": 0.1, "lookback": 0.2}),
            Token(" is", 2, 5, {"entropy": 0.5, "lookback": 0.3}),
            Token(" red.", 5, 10, {"entropy": 0.9, "lookback": 0.4}),
            Token("</s>", 10, 10, {"entropy": 1.0, "lookback": 0.0}),
        ],
        "spans": [Span(6, 9, "red", 0.9)],
        "heads": {"lookback": np.float32([[0.1, 0.2, 0.3], [0.4, 0.5, 1 / 3]])},
        "layers": [3, 7],
        "detector": "entropy",
        "context": "It is blue.",
        "question": "Which colour?",
        "label": 1,
        "labels": (Label(6, 10, "conflict"),),
    }
    return Report(**fields | changes)


def page(tmp_path, reports, **options):
    path = tmp_path / "report.html"
    write_html(path, reports, options.pop("title", "Results"), **options)
    text = path.read_text("utf-8")
    data = re.search(r'<script type="application/json".*?>(.*?)</script>', text, re.S)
    return text, json.loads(data[1])


DECIDED = {
    "verdict": "hallucinated",
    "probability": 0.75,
    "by": "toha",
    "basis": Measured("crates", 40, 10, 0.9),
    "promise": "recall at least 90%",
}


def test_to_dict_is_the_output_row():
    row = report(**DECIDED).to_dict()
    assert row == {
        "id": "a",
        "verdict": "hallucinated",
        "probability": 0.75,
        "by": "toha",
        "spans": [{"start": 6, "end": 9, "text": "red", "confidence": 0.9}],
        "error": None,
    }
    assert json.loads(json.dumps(row)) == row
    nothing = {"verdict": None, "probability": None, "by": None, "spans": []}
    failed = report(spans=[], error="too long").to_dict()
    assert failed == row | nothing | {"error": "too long"}


def test_to_dict_of_everything_begins_with_the_row():
    sure = {"probabilities": {"toha": 0.4}, "flagged": ["toha"]}
    helped = {"helpers": {"toha": "a friend"}, "undecided": "who knows"}
    made = report(**DECIDED, **sure, **helped)
    row = made.to_dict(every=True)
    assert list(row)[:6] == list(made.to_dict())
    assert row == made.to_dict() | sure | helped | {
        "scores": {"toha": 0.25, "novel": 3.0},
        "basis": {"data": "crates", "answers": 40, "hallucinated": 10, "auroc": 0.9},
        "promise": "recall at least 90%",
        "detector": "entropy",
    }
    assert json.loads(json.dumps(row)) == row
    bare = report().to_dict(every=True)
    assert bare["basis"] is bare["promise"] is bare["undecided"] is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(tmp_path, value):
    with pytest.raises(ValueError, match="a: toha is (nan|inf)"):
        report(scores={"toha": value}).to_dict(every=True)
    with pytest.raises(ValueError, match="a: confidence is"):
        report(spans=[Span(6, 9, "red", value)]).to_dict()
    with pytest.raises(ValueError, match="a: probability is"):
        report(probability=value).to_dict()
    for changes in (
        {"tokens": [Token("It", 0, 2, {"entropy": value})]},
        {"heads": {"lookback": np.float32([[0.0, value]])}},
    ):
        with pytest.raises(ValueError, match="a: (entropy|lookback).* is (nan|inf)"):
            write_html(tmp_path / "report.html", [report(**changes)], "Results")
    assert not list(tmp_path.iterdir())


def test_to_pandas():
    frame = report().to_pandas()
    assert list(frame.columns) == ["token", "start", "end", "entropy", "lookback"]
    assert frame["token"].tolist() == ["It", " is", " red.", "</s>"]
    assert frame["entropy"].tolist() == [0.1, 0.5, 0.9, 1.0]
    assert list(report(tokens=[]).to_pandas().columns) == ["token", "start", "end"]


def test_segments_split_at_every_boundary():
    assert report().segments() == [
        ("It", (0,), None, None),
        (" is", (1,), None, None),
        (" ", (2,), None, None),
        ("red", (2,), "conflict", 0.9),
        (".", (2,), "conflict", None),
    ]
    # Two tokens may share a character whose bytes they split.
    split = report(
        response="🎉!",
        tokens=[
            Token("🎉", 0, 1, {"entropy": 0.2}),
            Token("🎉", 0, 1, {"entropy": 0.6}),
        ],
        spans=[],
        labels=None,
    )
    assert split.segments() == [("🎉", (0, 1), None, None), ("!", (), None, None)]
    assert "entropy 0.600" in split._repr_html_()
    assert report(response="", tokens=[], spans=[], labels=None).segments() == []


@given(st.data())
def test_segments_join_up_to_the_response(data):
    text = data.draw(st.text(max_size=20))
    edge = st.integers(0, len(text))
    pair = st.tuples(edge, edge).map(sorted)
    pairs = st.lists(pair, max_size=5)
    tokens = [Token("", *pair, {"entropy": 0.5}) for pair in data.draw(pairs)]
    spans = [Span(*pair, "", 0.5) for pair in data.draw(pairs)]
    labels = tuple(Label(*pair) for pair in data.draw(pairs))
    found = report(response=text, tokens=tokens, spans=spans, labels=labels).segments()
    assert "".join(piece.text for piece in found) == text
    position = 0
    for piece in found:
        middle = position + 0.5
        for number, token in enumerate(tokens):
            assert (number in piece.tokens) == (token.start < middle < token.end)
        inside = any(label.start < middle < label.end for label in labels)
        assert (piece.label is not None) == inside
        position += len(piece.text)


def test_str_is_short():
    assert str(report()) == "a: toha 0.25, novel 3, 'red' (0.90)"
    decided = "a: hallucinated (probability 0.75 by toha), 'red' (0.90)"
    assert str(report(**DECIDED)) == decided
    assert str(report(error="too long")) == "a: too long"


def test_terminal_shows_the_whole_text():
    console = Console(width=40, force_terminal=True, color_system="truecolor")
    with console.capture() as capture:
        console.print(report(response="[b]It[/b] is", tokens=[], spans=[], labels=None))
        console.print(report())
    assert "[b]It[/b] is" in capture.get()
    assert re.sub(r"\x1b\[[\d;]*m", "", capture.get()).endswith("It is red.\n")
    assert "48;2;240;139;62" in capture.get()  # background of 0.9
    assert "48;2;251;182;121" in capture.get()  # and of 0.5


def test_notebook_html_escapes():
    evil = report(
        id=EVIL,
        response=EVIL,
        scores={"<b>toha": 0.5},
        tokens=[Token("<script>", 0, 8, {"entropy": 0.5})],
        spans=[Span(0, 3, "<sc", 0.5)],
        labels=(Label(0, 8, '"><img src=x onerror=alert(1)>'),),
    )
    text = evil._repr_html_()
    assert "<script" not in text and "<img" not in text and "<b>toha" not in text
    assert "&lt;b&gt;toha" in text and "underline" in text
    assert "<" not in report(id="<", error=EVIL)._repr_html_()[6:].replace("</", "")


def test_notebook_html_begins_with_the_verdict():
    text = report(**DECIDED)._repr_html_()
    assert "<p><b>hallucinated</b>, probability 0.75 <small>by toha: AUROC 0.9" in text
    assert text.index("hallucinated") < text.index("It") < text.index("<summary>")
    assert "no verdict: why" in report(undecided="no verdict: why")._repr_html_()


def test_notebook_html_keeps_joiners():
    """Of emoji and of Persian; what reorders text is spelled out."""
    response = "a\u200db\u200cc\r\nd\u202e"
    text = report(response=response, tokens=[], spans=[], labels=None)._repr_html_()
    assert "a\u200db\u200cc\r\nd\\u202e" in text


class Page(HTMLParser):
    """Collects elements and what would reach the network."""

    def __init__(self):
        super().__init__()
        self.elements, self.loads = [], []

    def handle_starttag(self, tag, attributes):
        self.elements.append(tag)
        self.loads += [
            value for name, value in attributes if name in ("src", "href", "action")
        ]


def test_page_escapes_everything(tmp_path):
    evil = report(
        id=EVIL,
        model=EVIL,
        response=EVIL,
        context=EVIL,
        question=EVIL,
        scores={EVIL: 0.5},
        tokens=[Token(EVIL, 0, len(EVIL), {EVIL: 0.5})],
        detector=EVIL,
        labels=(Label(0, 8, EVIL),),
    )
    plain, _ = page(tmp_path, [report()], summary=[{"a": 1}], note="n")
    text, data = page(
        tmp_path, [evil], title=EVIL, summary=[{EVIL: EVIL}], note=f"{EVIL}"
    )
    parsed, expected = Page(), Page()
    parsed.feed(text)
    expected.feed(plain)
    assert parsed.elements == expected.elements
    answer = data["answers"][0]
    assert answer["id"] == answer["question"] == EVIL
    assert answer["source"] == ["context", EVIL] and answer["response"] == EVIL


def test_page_needs_no_network(tmp_path):
    text, _ = page(tmp_path, [report()])
    parsed = Page()
    parsed.feed(text)
    assert parsed.loads == [] and "link" not in parsed.elements
    # The one address in the page is the name of SVG.
    assert set(re.findall(r"https?://[^\"' ]*", text)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in text
    assert not re.search(r"@import|url\(|fetch\(|innerHTML|document\.write", text)


def test_page_data(tmp_path):
    text, data = page(tmp_path, [report(), report(id="b", label=None, labels=None)])
    assert data["detectors"] == ["entropy", "lookback"]
    assert data["scores"] == ["toha", "novel"]
    first, second = data["answers"]
    assert first["heads"] == {"lookback": [[0.1, 0.2, 0.3], [0.4, 0.5, 0.333]]}
    assert first["layers"] == [3, 7]
    assert first["tokens"]["entropy"] == [0.1, 0.5, 0.9, 1.0]
    assert first["places"] == [[0, 2], [2, 5], [5, 10], [10, 10]]
    red = {"start": 6, "end": 9, "text": "red", "confidence": 0.9}
    assert first["spans"] == [red] and first["response"] == "It is red."
    assert first["labels"] == [{"start": 6, "end": 10, "label": "conflict"}]
    assert second["labels"] == []
    assert (first["label"], second["label"], second["id"]) == (1, None, "b")
    assert "read by tiny" in text and "2 answers" in text
    assert "1 hallucinated and 0 grounded" in text


def test_page_of_a_prompt_and_of_a_failure(tmp_path):
    prompted = report(context=None, question=None, prompt="Why?")
    failed = report(
        response="", scores={}, tokens=[], spans=[], heads={}, labels=None, error="long"
    )
    text, data = page(tmp_path, [prompted, failed])
    assert data["answers"][0]["source"] == ["prompt", "Why?"]
    assert data["answers"][1]["error"] == "long" and data["answers"][1]["places"] == []
    assert "1 not scored" in text


def test_the_page_opens_with_the_verdicts(tmp_path, look):
    sure = report(**DECIDED)
    fine = {"verdict": "supported", "probability": 0.25, "spans": [], "label": 0}
    fine = dataclasses.replace(sure, id="fine", labels=None, **fine)
    open_ = report(id="open", undecided="no verdict: who knows", labels=None)
    failed = report(id="failed", error="long", scores={}, tokens=[], spans=[], heads={})
    summary = [{"detector": "toha", "AUROC": 0.61}]
    text, data = page(tmp_path, [fine, open_, failed, sure], summary=summary)
    assert [answer["verdict"] for answer in data["answers"]] == [
        *("supported", None, None, "hallucinated")
    ]
    assert [answer["probability"] for answer in data["answers"]][::3] == [0.25, 0.75]
    assert re.findall("<h2.*?>(.*?)</h2>", text) == [
        *("Verdicts", "Answers", "All detectors", "Attention heads")
    ]

    def see(shown):
        shown.goto((tmp_path / "report.html").as_uri())
        first = shown.locator("main section").first.inner_text()
        cards = shown.locator("#cards article").all_inner_texts()
        order = shown.locator("#cards h3").all_text_contents()
        shown.select_option("#order", label="as given")
        return first, cards, order, shown.locator("#cards h3").all_text_contents()

    first, cards, order, given = look(see)
    assert first.split("\n")[0] == "Verdicts"
    assert "1 hallucinated" in first and "1 supported" in first
    assert (
        "Decided by toha: AUROC 0.900 on 40 held-out answers of crates, 10 "
        "hallucinated; threshold for recall at least 90%." in first
    )
    assert "no verdict: who knows." in first
    assert [row.split() for row in first.split("\n")[-2:]] == [
        *(["hallucinated", "1", "0"], ["supported", "0", "1"])
    ]
    assert re.search(r"fine\s+supported\s+25 %\s+label: grounded", cards[1])
    assert "toha 0.25" not in cards[1] and "What 2 detectors say" in cards[1]
    assert "It is blue." in cards[1], "the context is not open"
    assert order == ["a", "fine", "open", "failed"]
    assert given == ["fine", "open", "failed", "a"]


def test_tokens_may_lack_a_detector(tmp_path):
    some = report(tokens=[Token("It", 0, 2, {}), Token(" is", 2, 5, {"entropy": 0.5})])
    _, data = page(tmp_path, [some])
    assert data["answers"][0]["tokens"] == {"entropy": [None, 0.5]}
    assert "entropy 0.500" in some._repr_html_()


def test_aggregate_map(tmp_path):
    heads = [np.float32([[value], [2 * value]]) for value in (0.1, 0.3, 0.8)]
    made = [
        report(id=str(n), heads={"lookback": heads[n]}, label=label, labels=None)
        for n, label in enumerate((0, 0, 1))
    ]
    _, data = page(tmp_path, made)
    assert data["maps"]["lookback"] == {
        "values": [[0.6], [1.2]],
        "layers": [3, 7],
        "signed": True,
        "range": [0.1, 1.6],
    }
    unknown = [dataclasses.replace(each, label=None) for each in made]
    _, data = page(tmp_path, unknown)
    assert data["maps"]["lookback"]["values"] == [[0.4], [0.8]]
    assert not data["maps"]["lookback"]["signed"]
    wider = report(heads={"lookback": np.zeros((2, 3), np.float32)})
    elsewhere = dataclasses.replace(made[0], layers=[2, 5])
    another = dataclasses.replace(made[0], model="another")
    for other in (wider, elsewhere, another):
        _, data = page(tmp_path, [*made, other])
        assert data["maps"] == {}


def test_answers_of_one_source_are_not_independent():
    """Intervals are over what the examples name, or else over contexts."""
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1, 0, 1], 12)
    scores = labels + np.repeat([0.0, 2.0, -1.0, 1.0], 12) + rng.normal(size=48)
    made = [
        report(id=str(n), scores={"a": float(s)}, label=int(y), context=f"Text {n}.")
        for n, (s, y) in enumerate(zip(scores, labels, strict=True))
    ]
    named = [
        dataclasses.replace(one, source=f"s{n // 12}") for n, one in enumerate(made)
    ]
    bare = [dataclasses.replace(one, context=None) for one in made]
    alone, together, nothing = (
        summarize(some)[0]["95 % interval"] for some in (made, named, bare)
    )
    assert alone == nothing != together


def test_summary_table(tmp_path):
    summary = [
        {"detector": "toha", "AUROC": 0.61, "n": 104, "control": False, "note": None},
        {"AUROC": 0.5, "detector": "novel", "n": 104, "control": True, "note": "x"},
        {"detector": "more", "n": 3},
    ]
    text, _ = page(tmp_path, [report()], summary=summary, note="Read with care.")
    cells = re.findall(r"<t[hd](?: [^>]*)?>(.*?)</t[hd]>", text)
    assert cells[:5] == ["detector", "AUROC", "n", "control", "note"]
    assert cells[5:10] == ["toha", "0.610", "104", "no", ""]
    assert cells[10:15] == ["novel", "0.500", "104", "yes", "x"]
    assert cells[15:20] == ["more", "", "3", "", ""]
    assert "Read with care." in text


def test_page_of_none_and_of_many(tmp_path):
    _, data = page(tmp_path, [])
    assert data == {"detectors": [], "scores": [], "maps": {}, "answers": []}
    _, data = page(tmp_path, [report(id=str(n)) for n in range(2000)])
    assert [answer["id"] for answer in data["answers"]] == [str(n) for n in range(2000)]


def test_page_needs_its_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        write_html(tmp_path / "gone" / "report.html", [], "Results")
