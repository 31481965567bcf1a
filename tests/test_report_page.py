"""The report's page as people use it: spans open what they rest on."""

import dataclasses

import numpy as np
import pytest
from test_report import DECIDED, report

from browser import contrasts
from jaxhal.reporting.attribution import Piece, Sources, SpanRelevance
from jaxhal.reporting.page import write_html
from jaxhal.reporting.report import Span
from jaxhal.types import Example, Turn

CONTEXT = "🎈 It is blue. A crate\nof pears is red."
RESTS = SpanRelevance(
    "attnlrp",
    [
        Piece("context", 14, 38, "A crate\nof pears is red.", 0.375),
        Piece("response", 0, 5, "It is", -0.25),
        Piece("question", 0, 13, "Which colour?", 0.01),
    ],
    [
        Piece("context", 34, 37, "red", 0.5),
        Piece("response", 0, 2, "It", -0.25),
        Piece("context", 8, 12, "blue", -0.125),
    ],
)
SPAN = Span(6, 9, "red", 0.9, RESTS)
TRACE = Sources(["<s>", "🎈"], np.array([[1, 0.5] + 4 * [0]] * 4), "attnlrp")


@pytest.fixture
def opened(tmp_path, look):
    """``opened(reports, see, **options)``: what ``see(page)`` returns of their page."""

    def open_page(reports, see, **options):
        write_html(tmp_path / "report.html", reports, "Results")

        def seen(page):
            errors = []
            page.set_default_timeout(9000)
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.goto((tmp_path / "report.html").as_uri())
            result = see(page)
            assert errors == []
            return result

        return look(seen, **options)

    return open_page


def test_a_span_opens_what_it_rests_on(opened):
    def see(page):
        card = page.locator("#cards article")
        span = card.locator(".answer").get_by_role("button")
        rests = card.get_by_role("region", name="What a span rests on")
        assert span.inner_text() == "red" and rests.is_hidden()
        span.focus()
        page.keyboard.press("Enter")
        shades = "all => all.map(n => [n.textContent, n.className, n.title])"
        seen = (
            rests.locator("h4").all_inner_texts(),
            rests.locator(".shares li").all_inner_texts(),
            rests.locator(".text :is(.for, .against)").evaluate_all(shades),
            rests.locator(".text mark").all_inner_texts(),
            rests.locator("tbody tr").all_inner_texts(),
            page.locator("#status").inner_text(),
        )
        page.keyboard.press("Escape")
        assert rests.is_hidden() and span.get_attribute("aria-expanded") == "false"
        return seen

    one = report(context=CONTEXT, spans=[SPAN], labels=None, **DECIDED)
    heads, shares, shades, marks, rows, status = opened([one], see)
    assert heads[0] == "“red”, confidence 0.9" and heads[2] == "The context"
    assert [share.split("\n") for share in shares] == [
        ["+37.5 %", "“A crate↵of pears is red.” in the context"],
        ["−25.0 %", "“It is” in the answer before it"],
        ["+1.0 %", "“Which colour?” in the question"],
    ]
    assert shades == [["blue", "against", "−12.5 %"], ["red", "for", "+50.0 %"]]
    assert marks == ["red"] and rows == ["entropy\t0.9", "lookback\t0.4"]
    assert status.startswith("“red”: 0 of 1 word not in the context; rests most on")


def test_what_a_span_rests_on_in_a_conversation(opened):
    """Words of a turn are shaded where the prompt has it."""

    def see(page):
        page.locator(".answer").get_by_role("button").click()
        rests = page.get_by_role("region", name="What a span rests on")
        shades = "all => all.map(n => [n.textContent, n.className])"
        found = rests.locator(".text :is(.for, .against)").evaluate_all(shades)
        page.emulate_media(media="print")
        hidden = "n => n.scrollHeight - n.clientHeight"
        colours = "n => getComputedStyle(n).printColorAdjust"
        printed = [rests.locator(".text").evaluate(one) for one in (hidden, colours)]
        return found, rests.locator(".shares li").all_inner_texts(), printed

    turns = Turn("user", "🎈 Hello."), Turn("assistant", ""), Turn("user", CONTEXT * 40)
    rests = SpanRelevance(
        "attnlrp",
        [Piece("messages[2]", 16, 41, "of pears is red.", 0.375)],
        [
            Piece("messages[2]", 34, 37, "red", 0.5),
            Piece("messages[0]", 2, 7, "Hello", 1),
        ],
    )
    example = Example("It is red.", turns=turns)
    span = SPAN._replace(relevance=rests)
    one = report(
        context=None, prompt=example.prompt, turns=turns, spans=[span], labels=None
    )
    shades, shares, printed = opened([one], see)
    assert shades == [["Hello", "for"], ["red", "for"]]
    assert "in messages[2]" in shares[0] and printed == [0, "exact"]


def test_without_relevance_a_span_says_how_to_get_it(opened):
    def see(page):
        page.locator(".answer .guess").click()
        return page.locator(".rests").inner_text()

    said = opened([report()], see)
    assert "made without relevance; jaxhal detect --relevance attnlrp" in said
    assert "red not in the context" in said


def test_what_reorders_text_is_spelled_out(opened):
    """The answer that was judged is the one that is seen."""
    text = "It is \u202eder\u202c, \u0627\u0644\u200f."
    one = report(response=text, context=text, tokens=[], spans=[], labels=None)
    seen = opened([one], lambda page: page.locator("#cards article").all_inner_texts())
    assert "It is \\u202eder\\u202c, \u0627\u0644\u200f." in seen[0]
    assert "\u202e" not in seen[0]


def test_spans_are_those_of_one_detector(opened):
    def see(page):
        page.locator(".answer .guess").click()
        page.select_option("#detector", "lookback")
        assert page.locator(".rests").is_hidden()
        return page.locator(".answer .guess").count()

    assert opened([report()], see) == 0


def test_other_tokens_lead_to_what_they_rest_on(opened):
    one = report(context=CONTEXT, spans=[SPAN], relevance=TRACE)

    def see(page):
        answer = page.locator("#cards .answer")
        answer.locator(".guess").click()
        assert page.locator(".chosen ol").count() == 0
        answer.get_by_text("It", exact=True).click()
        return page.locator(".chosen").inner_text(), page.locator(".pick").inner_text()

    said, picked = opened([one], see)
    assert picked == "It" and "+1.00" in said and "Kept" in said


def test_what_detectors_say_is_a_table_the_likeliest_first(opened):
    one = report(
        **DECIDED,
        probabilities={"toha": 0.75},
        flagged=["toha"],
        helpers={"novel": "a friend"},
    )

    def see(page):
        page.get_by_text("What 2 detectors say").click()
        return page.locator("#cards tbody tr").all_inner_texts()

    assert opened([one], see) == [
        "toha\t75 %\t0.25\tflags it, decides",
        "novel\t\t3\tasks a friend",
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_every_text_can_be_read(opened, scheme, width):
    one = report(context=CONTEXT, spans=[SPAN], relevance=TRACE, **DECIDED)
    both = [one, dataclasses.replace(one, id="b", error="too long")]

    def see(page):
        page.locator(".answer .guess").first.click()
        page.evaluate("document.querySelectorAll('details').forEach(d => d.open = 1)")
        page.locator(".chosen").first.wait_for()
        return contrasts(page), page.evaluate("document.documentElement.scrollWidth")

    size = {"width": width, "height": 800}
    texts, wide = opened(both, see, viewport=size, color_scheme=scheme)
    assert len(texts) > 60 and wide <= width
    assert [text for text, contrast in texts if contrast < 4.5] == []
