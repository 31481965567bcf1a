"""No text of data runs, loads or links anything in what the library writes to read."""

import dataclasses
import json
import re
from pathlib import Path

import markdown_it
import numpy as np
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cli import fake_report, named, patch_score
from test_cli import run as run_command

import jaxhal
from jaxhal import datasets
from jaxhal.cli.console import as_table, finish, terminal, usage
from jaxhal.datasets import Question
from jaxhal.evaluation import Measured
from jaxhal.experiments import guiding, run, running
from jaxhal.reporting import markdown
from jaxhal.reporting.attribution import Sources
from jaxhal.reporting.page import write_html
from jaxhal.reporting.report import Report, Span, Token
from jaxhal.types import Example, Label
from tiny_lm import tiny_lm

RUN = "window.__ran=1;alert(1);fetch('http://127.0.0.1:9/x')"
PAYLOADS = [
    f"<script>{RUN}</script>",
    f"</script><script>{RUN}</script>",
    f"</style><script>{RUN}</script>",
    f"<img src=x onerror={RUN}>",
    f'"><img src=x onerror="{RUN}">',
    f"'><svg/onload={RUN}>",
    f"<svg><script>{RUN}</script></svg>",
    f"<body onload={RUN}>",
    f"<details open ontoggle={RUN}>x</details>",
    f"<input autofocus onfocus={RUN}>",
    f'<iframe srcdoc="<script>parent.{RUN}</script>"></iframe>',
    "<iframe src=http://127.0.0.1:9/frame></iframe>",
    f'<a href="javascript:{RUN}">go</a>',
    "<base href=http://127.0.0.1:9/>",
    '<meta http-equiv=refresh content="0;url=http://127.0.0.1:9/">',
    "<link rel=stylesheet href=http://127.0.0.1:9/a.css>",
    "<style>@import 'http://127.0.0.1:9/a.css'; * {display: none}</style>",
    "<form action=http://127.0.0.1:9/><button>go</button></form>",
    f"<!--><script>{RUN}</script>-->",
    f"<![CDATA[<script>{RUN}</script>]]>",
    f"[go](javascript:{RUN})",
    "![seen](http://127.0.0.1:9/a.png)",
    "![seen](data:image/svg+xml;base64,PHN2Zy8+)",
    "[go]: http://127.0.0.1:9/ 'x'",
    "<http://127.0.0.1:9/auto> and http://127.0.0.1:9/bare",
    "www.example.com/bare",
    f"&lt;script&gt;{RUN}&lt;/script&gt; &#60;b&#62;",
    "{{ 7 * 7 }} {% raw %} ${7 * 7} {# x #}",
    "| a | b |\n| --- | --- |\n| cell | cell |",
    f"\n\n# Heading\n\n<div onclick={RUN}>\n\n- item\n\n```\ncode\n```",
    "*a* **b** _c_ ~~d~~ `e` \\",
    f"\u2028<script>{RUN}</script>\u2029\ufeff",
    "\u202egnirts\u2066 \x1b]8;;http://127.0.0.1:9/\x07link\x1b[2J",
    "__proto__",
    "constructor",
]
FLAT = " ".join(" ".join(PAYLOADS).split()).replace("/", "\u2215")


def example(text, number, **changes):
    return Example(
        f"It says {text}.",
        context=f"Source {number // 2}: {text}",
        question=f"What of {text}?",
        id=f"{number}{text}",
        labels=(Label(0, 7, text),) if number % 2 else (),
        **changes,
    )


def evil(text):
    """A report of nothing but this text."""
    size = len(text)
    return Report(
        id=text,
        model=text,
        response=text,
        scores={text: 0.5, "novel": 1.0},
        tokens=[Token(text, 0, size, {text: 0.5})],
        spans=[Span(0, size, text, 0.5)],
        heads={text: np.float32([[0.1, 0.2]])},
        detector=text,
        context=text,
        question=text,
        label=1,
        labels=(Label(0, size, text),),
        probabilities={text: 0.5},
        flagged=[text],
        verdict="hallucinated",
        probability=0.5,
        by=text,
        basis=Measured(text, 2, 1, 0.5),
        promise=text,
        undecided=text,
        helpers={text: text},
        relevance=Sources([text], np.float32([[1.0, 0.0]]), text),
    )


def shown(text):
    """As a browser gives it back: line ends are one, and what reorders is spelled."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    signs = "[\u202a-\u202e\u2066-\u2069]"
    return re.sub(signs, lambda sign: f"\\u{ord(sign[0]):x}", text)


def watch(path: Path, errors=()):
    """Opens a page, does what readers do, and gives what it shows once it is quiet."""

    def see(page):
        said, asked = [], []
        page.on("dialog", lambda one: (said.append(one.message), one.dismiss()))
        page.on("console", lambda one: said.append(one.text))
        page.on("pageerror", lambda one: said.append(str(one)))
        page.on("request", lambda one: asked.append(one.url))
        page.goto(path.as_uri())
        for name in ("order", "detector"):
            if page.locator(f"#{name}").is_visible():
                page.select_option(f"#{name}", index=1 if name == "order" else 0)
        page.evaluate(
            "document.querySelectorAll('details').forEach(d => d.open = true)"
        )
        page.mouse.move(200, 200)
        page.wait_for_timeout(100)
        assert page.evaluate("window.__ran") is None and said == []
        assert [one for one in asked if not one.startswith("data:image/png")] == [
            path.as_uri()
        ]
        assert page.locator("a, iframe, form, base, link, main meta").count() == 0
        return {
            "ids": page.locator("#cards h3").all_text_contents(),
            "answers": page.locator(".answer").all_text_contents(),
            "sources": page.locator("details .text").all_text_contents(),
            "errors": page.locator(".error").all_text_contents(),
            "elements": page.evaluate(
                "[...new Set([...document.querySelectorAll('main *')]"
                ".map(one => one.localName))]"
            ),
            "body": page.locator("main").inner_text(),
        }

    return see


def demo(tmp_path, monkeypatch):
    many = [example(text, n) for n, text in enumerate(PAYLOADS)]
    monkeypatch.setattr(datasets, "bundled_answers", lambda: many)
    monkeypatch.setattr(datasets, "bundled", lambda: [])
    monkeypatch.setattr(jaxhal, "load", lambda name, *_, **__: named(name))
    patch_score(
        monkeypatch, lambda lm, some, *_, **options: [fake_report(one) for one in some]
    )
    found = run_command("demo", "--out", tmp_path, "--model", PAYLOADS[3])
    assert found.exit_code == 0, found.output
    return tmp_path / "report.html", many, []


def detect(tmp_path, monkeypatch):
    many = [example(text, n) for n, text in enumerate(PAYLOADS)]
    many.append(example("nothing", len(many)))
    monkeypatch.setattr(jaxhal, "load", lambda name, *_, **__: named(name))
    patch_score(
        monkeypatch,
        lambda lm, some, *_, **options: [
            fake_report(one, error=one.id if "nothing" in one.id else None)
            for one in some
        ],
    )
    source = tmp_path / "<img src=x onerror=alert(1)>.jsonl"
    rows = [
        {"id": one.id, "response": one.response, "context": one.context}
        | {"question": one.question}
        for one in many
    ]
    source.write_text("\n".join(map(json.dumps, rows)))
    page = tmp_path / "page.html"
    found = run_command(
        *("detect", "--model", "m", "--input", source, "--html", page),
        *("--output", tmp_path / "out.jsonl"),
    )
    assert found.exit_code == 1, found.output
    return page, many[:-1], [many[-1].id]


def run_folder(tmp_path, monkeypatch):
    many = [
        example(text, n, source=f"s{n}", split="train" if n < 12 else "test")
        for n, text in enumerate(PAYLOADS[::2])
    ]
    long = example("long " * 900, len(many), source="long", split="test")
    many.append(dataclasses.replace(long, id=f"long {FLAT}"))
    lm = tiny_lm(context=4096)
    monkeypatch.setattr(running, "model", lambda name, *_, **__: lm)
    monkeypatch.setattr(running, "load_dataset", lambda name, **options: many)
    config = {
        "name": "a <img src=x onerror=alert(1)> *b*",
        "data": [{"name": "x", "label": "<b>[x](javascript:alert(1))|"}],
        "detectors": ["novel_words"],
        "batch_size": 40,
        "notes": [text.replace("${", "$ {") for text in PAYLOADS],
        "protocol": "official",
        "out": str(tmp_path),
        "store": str(tmp_path / "store"),
    }
    folder = run(config, progress=False).folder
    tests = [one for one in many[:-1] if one.split == "test"]
    return folder / "report.html", tests, []


def guide(tmp_path, monkeypatch):
    many = [example(text, n) for n, text in enumerate(PAYLOADS)]
    asked = [Question(one.question, one.response, id=one.id) for one in many]
    made = [
        dataclasses.replace(fake_report(one, {FLAT: 0.5}), context=None, prompt=text)
        for one, text in zip(many, PAYLOADS, strict=True)
    ]
    config = guiding.Guiding(
        name="a <img src=x onerror=alert(1)> *b*",
        questions="<img src=x onerror=alert(1)>|[q](javascript:alert(1))",
        model="<img src=x onerror=alert(1)>|[m](javascript:alert(1))",
        detector="<b onclick=alert(1)>*x*|",
    )
    measured = {
        way: guiding._measures(config, asked, made) | {guiding.CUT: np.zeros(len(made))}
        for way in guiding.WAYS
    }
    reports = dict.fromkeys(guiding.WAYS, made)
    guiding._write(
        config,
        tmp_path,
        guiding._table(measured, [q.id for q in asked]),
        measured,
        reports,
        0,
    )
    shown = [dataclasses.replace(one, context=one.prompt) for one in made[:30]]
    return tmp_path / "report.html", shown, []


KINDS = [demo, detect, run_folder, guide]


@pytest.mark.parametrize("write", KINDS)
def test_pages_run_nothing_of_their_data(look, tmp_path, monkeypatch, write):
    page, answers, errors = write(tmp_path, monkeypatch)
    found = look(watch(page))
    assert found["ids"], "the page's own script did not run"
    for one in answers:
        assert shown(one.id) in found["ids"]
        assert shown(one.response) in found["answers"]
        assert shown(one.context) in found["sources"]
    assert found["errors"] == [f"Not scored: line 36: {error}" for error in errors]
    wide = look(width_of(page), viewport={"width": 390, "height": 800})
    assert wide <= 390, "the page is wider than a phone"
    for results in page.parent.glob("results.md"):
        check_markdown(results.read_text("utf-8"))


def width_of(path):
    def see(page):
        page.goto(path.as_uri())
        return page.evaluate("document.documentElement.scrollWidth")

    return see


def check_markdown(text):
    found = markdown_it.MarkdownIt("commonmark").enable("table").parse(text)
    inline = [one for token in found for one in token.children or ()]
    assert not [one for one in (*found, *inline) if "html" in one.type]
    assert not [one for one in inline if one.type == "link_open"]
    for one in inline:
        if one.type == "image":
            assert re.fullmatch(r"[\w%.-]+\.png", str(one.attrs["src"]))


def elements(tmp_path, look, many):
    write_html(tmp_path / "page.html", many, "t", [{"a": 1}], "n")
    return look(watch(tmp_path / "page.html"))


def test_every_field_of_a_page_is_text(look, tmp_path):
    write_html(
        tmp_path / "page.html",
        [evil(text) for text in PAYLOADS],
        FLAT,
        [{text: text for text in PAYLOADS}],
        FLAT,
    )
    found = look(watch(tmp_path / "page.html"))
    assert found["ids"] == [shown(text) for text in PAYLOADS]
    assert found["answers"] == [shown(text) for text in PAYLOADS]
    plain = elements(tmp_path, look, [evil("plain")])
    assert sorted(found["elements"]) == sorted(plain["elements"])


def test_a_notebook_shows_reports_as_text(look, tmp_path):
    many = [evil(text) for text in PAYLOADS]
    many += [dataclasses.replace(one, error=one.id) for one in many]
    path = tmp_path / "notebook.html"
    body = "".join(one._repr_html_() for one in many)
    path.write_text(f'<meta charset="utf-8"><main>{body}</main>', "utf-8")
    found = look(watch(path))
    assert set(found["elements"]) <= set(
        "div p span small table tbody tr th td b details summary".split()
    )


def test_a_page_may_not_be_changed_to_run_more(look, tmp_path):
    """The policy holds where escaping once should not."""
    path = tmp_path / "page.html"
    body = f"<img src=x onerror={RUN}><script>{RUN}</script><b onclick={RUN}>b</b>"
    write_html(path, [evil("a")], "t", body=body)

    def see(page):
        said = []
        page.on("console", lambda one: said.append(one.text))
        page.goto(path.as_uri())
        page.locator("b", has_text="b").first.click()
        assert page.evaluate("window.__ran") is None
        assert page.locator(".answer").all_text_contents() == ["a"]
        return said

    assert sum("Content Security Policy" in text for text in look(see)) >= 3


def text_of(source):
    """What Markdown shows in one paragraph, and the kinds of its parts."""
    reader = markdown_it.MarkdownIt("gfm-like").disable("linkify")
    tokens = reader.parse(source)
    inline = next(token for token in tokens if token.type == "inline")
    kinds = {token.type for token in (*tokens, *inline.children)}
    return "".join(child.content for child in inline.children), kinds


@pytest.mark.parametrize("text", PAYLOADS)
def test_escaped_text_is_one_line_of_text(text):
    line = markdown.escaped(text)
    assert line.splitlines() == [line] and line.isprintable()
    found, kinds = text_of(line)
    assert kinds <= {
        "paragraph_open",
        "inline",
        "paragraph_close",
        "text",
        "text_special",
    }
    assert found == markdown.printable(" ".join(text.split()), keep="")


@settings(max_examples=200, deadline=None)
@given(
    st.text(st.sampled_from("a1 \n\t\\`*_[]()<>&|~$#+-=.:/!{}\"'"), max_size=12)
    | st.text(max_size=12)
)
def test_escaped_text_comes_back(text):
    want = markdown.printable(" ".join(text.split()), keep="")
    if want:
        assert text_of(markdown.escaped(text))[0] == want
        cells = markdown.rendered(markdown.table(["a", text], [[text, "b"]]))
        assert cells.count("<td>") == cells.count("<th>") == 2


# Surrogates and line ends, too, which HTML would change.
TEXT = st.text(max_size=8) | st.sampled_from(["\ud83d", "\r\n", "</script>", "<!--"])


@settings(max_examples=60, deadline=None)
@given(TEXT, TEXT.filter(bool))
def test_page_data_is_what_was_given(tmp_path_factory, text, name):
    path = tmp_path_factory.getbasetemp() / "page.html"
    one = evil(text)
    many = [dataclasses.replace(one, scores={name: 0.5}), one]
    write_html(path, many, text, [{name: text}], name)
    written = path.read_bytes().decode()
    (raw,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', written
    )
    first, second = json.loads(raw)["answers"]
    assert first["scores"] == {name: 0.5} and second["scores"][text] == 0.5
    assert first["id"] == first["question"] == first["detector"] == text
    assert first["source"] == ["context", text] and first["helpers"] == {text: text}
    assert first["response"] == first["spans"][0]["text"] == text


ESCAPES = "\x1b]0;title\x07\x1b[2Jred\u202e"


def test_a_terminal_obeys_no_table_and_no_error(capfd):
    terminal().print(as_table([{"method": ESCAPES, "AUROC": 0.5}]))
    with pytest.raises(typer.Exit), usage():
        raise ValueError(f"configuration: Key {ESCAPES} not in 'Experiment'")
    with pytest.raises(typer.Exit):
        finish(terminal(stderr=True), [ESCAPES])
    for said in capfd.readouterr():
        assert said.count(markdown.printable(ESCAPES)) and said.count("red") < 3
        assert all(line.isprintable() for line in said.splitlines())


def test_a_terminal_obeys_no_report():
    one = evil(ESCAPES)
    text = one.__rich__()
    assert text.plain == markdown.printable(ESCAPES) and text.plain.isprintable()
    assert str(one).isprintable()
    assert str(dataclasses.replace(one, error=ESCAPES)).isprintable()
    parts = [
        Token("\x1b[2J", 0, 4, {"entropy": 0.1}),
        Token("red", 4, 7, {"entropy": 0.9}),
    ]
    red = dataclasses.replace(
        one, response="\x1b[2Jred", tokens=parts, detector="entropy", labels=None
    )
    (shade,) = [span for span in red.__rich__().spans if "on #" in str(span.style)]
    assert red.__rich__().plain[shade.start : shade.end] == "red"
