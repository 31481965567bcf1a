"""The server's page: whole texts, whose marks anybody finds, and nothing that runs."""

import base64
import hashlib
import re

import pytest
from serve_page import (
    ANSWER,
    CONTEXT,
    HERE,
    HTML,
    found,
    judged,
    quiet,
    resting,
    staged,
    streamed,
)

from browser import contrasts

EVIL = "<img src=x onerror='window.__ran=1'><script>window.__ran=1</script>"


def test_characters_are_counted_as_the_server_does(look):
    """Some take two units in JavaScript, and several tokens share one."""
    text, tokens = "\U0001d49c 🎉🎉 ran 9", ["\U0001d49c", " 🎉", "🎉", " ran", " 9"]
    said = found(text, ["🎉 ran", "9"], tokens)
    said["tokens"].insert(2, dict(said["tokens"][1], scores={"mine": 0.9}))

    @quiet
    def see(page):
        staged(page, said)
        page.get_by_label("Answer", exact=True).fill(text)
        page.click("#check")
        box = judged(page).locator(".answer").first
        marks = box.locator(".token").evaluate_all(
            "all => all.map(n => "
            "[n.textContent, Number(n.style.getPropertyValue('--s'))])"
        )
        return box.inner_text(), box.locator(".guess").all_inner_texts(), marks

    shown, spans, marks = look(see)
    assert shown == text and spans == ["🎉 ran", "9"]
    assert "".join(piece for piece, _ in marks) == text
    assert marks[0] == ["\U0001d49c", 0] and marks[1] == [" 🎉", 0.9]
    assert marks[-1] == ["9", 0.8]


def test_a_span_opens_by_keys_alone(look):
    """What is known of it are scores, its words in the context, and, asked for only
    then and once, what it rests on."""
    tokens = ["The museum", " was founded", " in 1962", " by", " Ida Rowe."]
    said = found(ANSWER, ["in 1962 by Ida Rowe"], tokens)
    context, asked = "🎈 It is in Harwick.", []

    def verdict(body):
        asked.append(body)
        texts = {"context": context, "response": "museum"}
        return resting(said, texts) if body.get("relevance") else said

    @quiet
    def see(page):
        staged(page, verdict)
        page.get_by_label("Context").fill(context)
        page.locator("#answer").focus()
        for _ in range(2):  # past the reader's choice
            page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "check"
        page.keyboard.press("Enter")
        card = judged(page)
        span = card.locator(".answer .guess")
        for _ in range(9):
            if span.evaluate("node => node === document.activeElement"):
                break
            page.keyboard.press("Tab")
        width = span.evaluate("node => getComputedStyle(node).outlineWidth")
        page.keyboard.press("Enter")
        assert span.get_attribute("aria-expanded") == "true"
        rests = card.get_by_role("region", name="What a span rests on")
        rests.locator(".shares").wait_for()
        shades = "all => all.map(n => [n.textContent, n.className, n.title])"
        seen = (
            rests.locator(".shares li").all_inner_texts(),
            rests.locator(".text :is(.for, .against)").evaluate_all(shades),
            rests.locator(".words li").all_inner_texts(),
            rests.locator(".text mark").all_inner_texts(),
            rests.locator("thead th").all_inner_texts(),
            rests.locator("tbody tr").all_inner_texts(),
            page.get_by_role("status").inner_text(),
        )
        page.keyboard.press("Escape")
        assert rests.is_hidden() and span.get_attribute("aria-expanded") == "false"
        page.keyboard.press(" ")
        assert rests.is_visible()
        return width, *seen

    width, shares, shades, words, marks, head, rows, status = look(see)
    plain, more = asked
    assert "relevance" not in plain and more["relevance"] is True
    assert more.keys() & {"tokens", "all"} == set() and more["response"] == ANSWER
    assert [share.split("\n") for share in shares] == [
        ["+50.0 %", "“🎈” in the context"],
        ["+30.0 %", "“It” in the context"],
        ["−50.0 %", "“museum” in the answer before it"],
    ]
    assert shades == [
        ["🎈", "for", "+50.0 %"],
        ["It", "for", "+30.0 %"],
        ["is", "for", "+10.0 %"],
        ["in", "against", "−10.0 %"],
        ["Harwick.", "against", "−30.0 %"],
    ]
    assert width == "2px"
    gone = [f"{word} not in the context" for word in ("1962", "by", "Ida", "Rowe")]
    assert words == ["in 1×", *gone] and marks == ["in"]
    assert head == ["detector", *(f"“{token}”" for token in tokens[2:])]
    assert rows == ["mine\t0.4\t0.6\t0.8", "other\t0.5\t0.5\t0.5"]
    said = "“in 1962 by Ida Rowe”: 4 of 5 words not in the context"
    strongest = "rests most on “🎈” in the context, +50.0 %"
    assert status == f"{said}; {strongest}; more below the answer."


def test_why_nothing_is_known_of_a_span(look):
    """A server that cannot say is asked again when the span is opened again."""
    said, answers = found(ANSWER, ["1962"], [ANSWER]), []

    def verdict(body):
        if not body.get("relevance"):
            return said
        answers.append(body)
        return resting(found(ANSWER, ["Ida"], [ANSWER]), {"context": "a b c"})

    @quiet
    def see(page):
        staged(page, verdict)
        page.click("#check")
        card = judged(page)
        broken = {"error": {"message": "no memory <b>"}}
        page.route(
            f"{HERE}v1/verdict", lambda route: route.fulfill(status=500, json=broken)
        )
        span = card.locator(".answer .guess")
        span.click()
        card.get_by_text("It cannot be said: no memory <b>").wait_for()
        page.unroute(f"{HERE}v1/verdict")
        span.click()
        span.click()
        card.get_by_text("not one of the verdict of all detectors").wait_for()

    look(see)
    assert len(answers) == 1


def test_readers_and_detectors_stand_side_by_side(look):
    def verdict(body):
        if body["model"] == "two":
            return found(ANSWER, [], [ANSWER], verdict="supported", probability=0.25)
        return found(ANSWER, ["1962"], [ANSWER])

    @quiet
    def see(page):
        staged(page, verdict, readers=("one", "two"))
        page.get_by_label("Reader").select_option("all, side by side")
        page.click("#check")
        cards = page.locator("#cards article")
        cards.locator(".badge:not([hidden])").nth(1).wait_for()
        tops = cards.locator(".top").all_inner_texts()
        one, two = (cards.nth(n).bounding_box() for n in range(2))
        first = cards.first
        first.get_by_label("Beside it").select_option("other")
        marks = first.locator(".answer").evaluate_all(
            "all => all.map(n => [n.textContent, n.querySelectorAll('.guess').length,"
            " n.querySelector('.token').title.split(' ')[0]])"
        )
        return tops, one["y"] == two["y"], marks

    tops, beside, marks = look(see, viewport={"width": 1200, "height": 800})
    assert beside and [" ".join(top.split()) for top in tops] == [
        "one hallucinated 75 % likely hallucinated",
        "two supported 25 % likely hallucinated",
    ]
    assert marks == [[ANSWER, 1, "mine"], [ANSWER, 0, "other"]]


def test_text_of_the_server_stays_text(look):
    said = found(EVIL, ["onerror"], [EVIL], undecided=EVIL, verdict=None, by=None)
    said = resting(said, {"context": EVIL, EVIL: EVIL})
    said["tokens"][0]["scores"] = {EVIL: 0.5}
    said |= {
        "scores": {EVIL: 1.0, "__proto__": 2.0},
        "probabilities": {},
        "flagged": [],
    }
    news = {"probability": 0.5, "tokens": [{"text": EVIL, "score": 0.5}]}

    @quiet
    def see(page):
        staged(page, said, streamed(news), readers=(EVIL,))
        page.get_by_label("Context").fill(EVIL)
        page.get_by_label("Answer", exact=True).fill(EVIL)
        page.click("#check")
        card = judged(page)
        card.locator(".answer .guess").click()
        card.locator(".shares").wait_for()
        card.get_by_text("What 2 detectors say").click()
        card.get_by_text("Every token").click()
        assert EVIL in card.locator(".answer").inner_text()
        page.click("#write")
        page.get_by_text("Check it with every detector").wait_for()
        assert judged(page).locator(".answer").inner_text() == EVIL
        assert page.locator("main :is(img, script, iframe, a)").count() == 0
        assert page.evaluate("window.__ran") is None

    look(see)


def test_only_the_page_s_own_script_and_style_are_taken():
    (policy,) = re.findall(r'Policy"\s+content="(.*?)"', HTML)
    own = {
        name: base64.b64encode(
            hashlib.sha256(
                re.findall(f"<{name}>(.*?)</{name}>", HTML, re.S)[0].encode()
            ).digest()
        ).decode()
        for name in ("style", "script")
    }
    assert policy.split("; ") == [
        "default-src 'none'",
        "connect-src 'self'",
        "img-src data:",
        f"style-src 'sha256-{own['style']}'",
        f"script-src 'sha256-{own['script']}'",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    assert re.findall('https?://[^"]*', HTML) == ["http://www.w3.org/2000/svg"]
    assert not re.search("innerHTML|insertAdjacent|document.write|eval\\(", HTML)


def test_what_grows_is_told_now_and_then(look):
    """Eighty pieces of news are two for a screen reader: one so far, the verdict."""
    part = {"text": "a ", "score": 0.5}
    news = [{"probability": 0.5, "tokens": [part]} for _ in range(80)]
    half = {"text": "", "score": 0.9}  # of a character; the next token has the rest
    news[3] = {"probability": 0.5, "tokens": [half, part]}
    watch = """() => {
      window.said = [];
      const status = document.getElementById("status");
      new MutationObserver(() => said.push(status.textContent))
        .observe(status, {childList: true});
    }"""

    @quiet
    def see(page):
        staged(page, chat=streamed(*news))
        page.evaluate(watch)
        page.click("#write")
        box = judged(page).locator(".answer")
        titles = box.locator(".token").evaluate_all("all => all.map(n => n.title)")
        return page.evaluate("said"), box.inner_text(), titles

    heard, text, titles = look(see)
    assert heard == [
        "Writing …",
        "tiny: so far 50 % likely hallucinated.",
        "tiny: unsure, 50 % likely hallucinated.",
    ]
    assert text.split() == ["a"] * 80
    assert titles[2:5] == ["mine 0.5", "mine 0.9", "mine 0.5"]


def test_a_stream_that_breaks_off_has_no_verdict(look):
    part = {"probability": 0.5, "tokens": [{"text": "It is", "score": 0.5}]}
    broken = 'data: {"error": {"message": "the model failed: <b>"}}\n\n'

    @quiet
    def see(page):
        staged(page, chat=streamed(part, ends=False))
        page.click("#write")
        page.get_by_text("the server broke off").first.wait_for()
        kept = page.locator("#cards .answer").inner_text()
        assert page.locator("#cards .badge").is_hidden()
        page.unroute_all()
        staged(page, chat=streamed(part, ends=False) + broken)
        page.click("#write")
        page.get_by_text("the model failed: <b>").first.wait_for()
        return kept

    assert look(see) == "It is"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_every_text_can_be_read(look, scheme, width):
    """Contrast of 4.5 at least, on each colour; no page wider than the screen; a label
    on every field.
    """
    tokens = [f"{word} " for word in "one two three four five six seven eight".split()]
    said = found("".join(tokens), ["five six"], tokens)
    said = resting(said, {"context": CONTEXT})
    bare = """() => [...document.querySelectorAll("input, select, textarea")]
      .filter(node => !node.labels.length).map(node => node.outerHTML)"""

    @quiet
    def see(page):
        staged(page, said, streamed({"probability": 0.5, "tokens": []}))
        page.locator("#how summary").click()
        page.click("#check")
        card = judged(page)
        card.locator(".answer .guess").first.click()
        card.locator(".shares").wait_for()
        for fold in card.locator("summary").all():
            fold.click()
        seen = contrasts(page), page.evaluate(bare)
        return *seen, page.evaluate("document.documentElement.scrollWidth")

    size = {"width": width, "height": 800}
    texts, bare, wide = look(see, viewport=size, color_scheme=scheme)
    assert len(texts) > 60 and bare == [] and wide <= width
    assert [text for text, contrast in texts if contrast < 4.5] == []
