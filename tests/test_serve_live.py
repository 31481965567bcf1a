"""The server's page on a running server: what it says is what the server says."""

import asyncio
import contextlib
import dataclasses
import http.client
import json
import os
import queue
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import thorough
import uvicorn
from serve_page import ANSWER, CONTEXT, QUESTION, judged, opened, quiet

import jaxhal
from jaxhal.scoring.detection import resolve_for
from jaxhal.serve.app import Reader, Server

SITE = Path(__file__).parent.parent / "notebooks" / "images"


@contextlib.contextmanager
def serving(app: Any) -> Iterator[str]:
    """Its address."""
    config = uvicorn.Config(app, port=0, log_level="critical", timeout_keep_alive=60)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def reading(lm: Any, detectors: list[str] | None = None) -> Iterator[Reader]:
    one = Reader.of(lm, resolve_for(lm, detectors), most=2)
    try:
        yield one
    finally:
        one.close()


@pytest.fixture(scope="module")
def reader(narrow):
    """A model of random weights that has the real one's name, and its detectors."""
    lm = dataclasses.replace(jaxhal.load(narrow), name="smollm2-135m")
    chosen = ["lookback_lens", "token_entropy", "response_length"]
    with reading(lm, chosen) as one:
        yield one


@pytest.fixture(scope="module")
def server(reader):
    with serving(Server({reader.lm.name: reader}).app()) as address:
        yield address


def asked(address: str, path: str, body: Any) -> bytes:
    line = http.client.HTTPConnection(address.split("/")[2], timeout=300)
    line.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    found = line.getresponse()
    raw = found.read()
    line.close()
    assert found.status == 200, raw
    return raw


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def test_an_answer_is_checked(look, server):
    @quiet
    def see(page):
        opened(page, server)
        page.click("#check")
        card = judged(page)
        page.get_by_text("What 3 detectors say").click()
        page.get_by_text("Every token").click()
        return (
            card.locator(".badge").inner_text(),
            card.locator(".chance").inner_text(),
            card.locator(".answer").first.inner_text(),
            card.locator(".answer .guess").all_inner_texts(),
            card.locator("tbody").first.locator("tr").all_inner_texts(),
            card.locator("tbody").last.locator("tr").count(),
        )

    badge, chance, answer, spans, rows, tokens = look(see)
    row = {"context": CONTEXT, "question": QUESTION, "response": ANSWER}
    found = json.loads(
        asked(server, "/v1/verdict", row | {"tokens": True, "all": True})
    )
    assert (badge, chance) == (found["verdict"], percent(found["probability"]))
    assert answer == ANSWER and spans == [span["text"] for span in found["spans"]]
    likely = sorted(found["probabilities"], key=lambda n: -found["probabilities"][n])
    assert [one.split("\t")[0] for one in rows] == likely
    assert tokens == len(found["tokens"])


def test_an_answer_is_written(look, server):
    @quiet
    def see(page):
        opened(page, server)
        page.locator("#how summary").click()
        page.get_by_label("Most tokens").fill("24")
        page.click("#write")
        card = judged(page)
        text = card.locator(".answer").first.evaluate("node => node.textContent")
        course = card.locator("figure path").get_attribute("d")
        says = card.locator(".badge, .chance, .error").all_inner_texts()
        page.get_by_text("Check it with every detector").click()
        page.get_by_text("What 3 detectors say").wait_for()
        return text, course, says, page.get_by_label("Answer", exact=True).input_value()

    text, course, says, filled = look(see)
    message = {"role": "user", "content": f"{CONTEXT}\n\n{QUESTION}"}
    want = {"messages": [message], "max_tokens": 24, "temperature": 0, "stream": True}
    raw = asked(server, "/v1/chat/completions", want).decode()
    chunks = [json.loads(line[6:]) for line in raw.split("\n\n") if "{" in line]
    told = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    last = chunks[-1]["jaxhal"]
    assert text == told == filled
    news = [c["jaxhal"] for c in chunks if "tokens" in (c["jaxhal"] or {})]
    chances = [one["probability"] for one in (*news, last)]
    assert re.findall("[ML]", course) == ["M", *["L"] * len(news)]
    heights = [float(y) for y in re.findall(r" ([\d.e-]+)", course)]
    assert heights == pytest.approx([100 - 100 * one for one in chances])
    assert says[:2] == [last["verdict"], percent(last["probability"])]
    assert says[2:] == ["The answer has as many tokens as it may have."]


def test_what_is_wrong_is_said(look, server):
    @quiet
    def see(page):
        opened(page, server)
        page.get_by_label("Answer", exact=True).fill("")
        page.click("#check")
        wrong = page.locator("#cards .error")
        blank = wrong.inner_text()
        page.locator("#how summary").click()
        page.get_by_label("and then").select_option("regenerate")
        page.get_by_label("Stop at a probability of").first.check()
        page.click("#write")
        wrong.filter(has_text="give a temperature above 0").wait_for()
        page.get_by_label("Temperature").fill("7")
        page.locator("#how summary").click()
        page.click("#write")  # nothing is asked, and the field is there to see
        assert page.get_by_label("Temperature").is_visible()
        page.route("**/v1/**", lambda route: route.abort())
        page.click("#check")
        wrong.filter(has_text="fetch").wait_for()
        return blank

    assert "response" in look(see)


def test_a_token_is_asked_for_and_forgotten(look, reader):
    @quiet
    def see(page):
        page.goto(address)
        field = page.get_by_label("Token of this server")
        field.wait_for()
        assert page.locator("#check").is_disabled()
        page.keyboard.type("wrong\n")
        page.locator("#status", has_text="no token, or a wrong one").wait_for()
        field.fill("s3cret")
        page.keyboard.press("Enter")
        page.locator("#check:enabled").wait_for()
        assert not field.is_visible()
        kept = "[localStorage.length, sessionStorage.length, document.cookie]"
        assert page.evaluate(kept) == [0, 0, ""] and page.url == address
        page.reload()
        field.wait_for()

    with serving(Server({reader.lm.name: reader}, token="s3cret").app()) as address:
        look(see)


class Paced:
    """An application whose streams wait for a sign before every event.

    ``sent`` gets the text up to each, and why it ends, if it does.
    """

    def __init__(self, app: Any):
        self.app, self.go, self.sent = app, threading.Semaphore(0), queue.Queue()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        text = ""

        async def paced(message: Any) -> None:
            nonlocal text
            body = message.get("body", b"")
            if not body.startswith(b"data: {"):
                await send(message)
                return
            await asyncio.to_thread(self.go.acquire, timeout=100)
            (choice,) = json.loads(body[6:])["choices"]
            text += choice["delta"].get("content", "")
            await send(message)
            self.sent.put((text, choice["finish_reason"]))

        await self.app(scope, receive, paced)


@thorough.mark
def test_a_stream_turns_and_the_page_shows_it(look, smollm2, tmp_path):
    """The passage holds no year: the one that is made up is coloured before its
    sentence ends, and with a limit it is never seen.

    ``$JAXHAL_RECORD`` puts the pictures of it into the site.
    """
    frames = SITE if "JAXHAL_RECORD" in os.environ else tmp_path
    grown = "text => document.querySelector('#cards .answer')?.textContent === text"

    @quiet
    def see(page):
        opened(page, address)
        card = page.locator("#cards article")

        def picture(number):
            card.screenshot(path=frames / f"turn-{number}.png")

        page.click("#write")
        turned = ended = None
        while ended is None:
            paced.go.release()
            text, ended = paced.sent.get(timeout=100)
            page.wait_for_function(grown, arg=text)
            if not re.search("[0-9]", text):
                picture(1)
            elif turned is None:
                picture(2)
                marked = card.locator(".high").all_inner_texts()[1:]  # the legend's
                turned = text, "".join(marked), card.locator(".chance").inner_text()
        verdict = judged(page).locator(".badge").inner_text()
        picture(3)

        page.locator("#how summary").click()
        page.get_by_label("Stop at a probability of").first.check()
        page.get_by_label("Stop at a probability of").last.fill("70")
        paced.go.release(1000)
        page.click("#write")
        page.get_by_text("Stopped at 70 %").wait_for()
        picture(4)
        return turned, verdict, card.locator(".answer").inner_text()

    with reading(smollm2, ["token_probe"]) as one:
        paced = Paced(Server({one.lm.name: one}).app())
        with serving(paced) as address:
            size = {"width": 760, "height": 900}
            (text, marked, chance), verdict, kept = look(see, viewport=size)
    assert not re.search("[0-9]", CONTEXT + QUESTION)
    assert "." not in text and re.search("[0-9]", marked)
    assert int(chance.split()[0]) >= 40 and verdict == "hallucinated"
    assert kept and text.startswith(kept) and not re.search("[0-9]", kept)
