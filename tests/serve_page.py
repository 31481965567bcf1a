"""The server's page in Chromium, with a server or answers of a test behind it."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from jaxhal.reporting.page import whole

HTML = whole("serve")
HERE = "http://jaxhal.test/"  # where no server is
CONTEXT = (
    "The museum in Harwick shows paintings of the sea. It is open from Tuesday to "
    "Sunday, and entry is free for children."
)
QUESTION = "In which year was the museum founded, and by whom?"
ANSWER = "The museum was founded in 1962 by Ida Rowe."


def quiet(see: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same, of a page whose script does not fail."""

    def seen(page: Any) -> Any:
        errors: list[Any] = []
        page.on("pageerror", lambda error: errors.append(error))
        result = see(page)
        assert errors == []
        return result

    return seen


def opened(page: Any, address: str) -> None:
    """Opens the page and fills it in."""
    page.set_default_timeout(240_000)
    page.goto(address)
    page.get_by_label("Context").fill(CONTEXT)
    page.get_by_label("Question or prompt").fill(QUESTION)
    page.get_by_label("Answer", exact=True).fill(ANSWER)
    page.locator("#check:enabled").wait_for()


def judged(page: Any) -> Any:
    """The card, once it has a verdict."""
    page.locator("#cards :is(.badge:not([hidden]), .error)").first.wait_for()
    card = page.locator("#cards article")
    assert card.locator(".badge").is_visible(), card.inner_text()
    return card


def reader_of(name: str) -> dict[str, Any]:
    known = {"mine": "what it measures", "other": "something else", "slow": "no token"}
    about = {"decides": "mine", "because": f"{name} was measured", "rides": "mine"}
    return {"name": name, **about, "detectors": known, "context": 512}


def found(text: str, spans: list[str], tokens: list[str], **changes) -> dict[str, Any]:
    """A verdict; the n-th token of N has the score n / N."""
    ends = [len("".join(tokens[: n + 1])) for n in range(len(tokens))]
    places = [(end - len(token), end) for token, end in zip(tokens, ends, strict=True)]
    at = [(text.index(one), one) for one in spans]
    return {
        **{"id": "a", "verdict": "hallucinated", "probability": 0.75, "by": "mine"},
        "spans": [
            {"start": n, "end": n + len(one), "text": one, "confidence": 0.5}
            for n, one in at
        ],
        "tokens": [
            {"text": token, "start": start, "end": end}
            | {"scores": {"other": 0.5, "mine": n / len(tokens)}}
            for n, (token, (start, end)) in enumerate(zip(tokens, places, strict=True))
        ],
        "scores": {"mine": 3.0, "other": 2.0, "slow": 1.0},
        "probabilities": {"mine": 0.75, "other": 0.5},
        "flagged": ["mine"],
        "undecided": None,
    } | changes


def resting(verdict: dict[str, Any], texts: dict[str, str]) -> dict[str, Any]:
    """The verdict, each of its spans resting on words of texts, against the last."""
    words = [(of, word) for of, text in texts.items() for word in text.split()]
    shares = [0.5 - n / (len(words) - 1) for n in range(len(words))]
    each = [
        {"of": of, "start": texts[of].index(word), "text": word, "share": share}
        for (of, word), share in zip(words, shares, strict=True)
    ]
    each = [one | {"end": one["start"] + len(one["text"])} for one in each]
    rests = {"rules": "attnlrp", "words": each, "sentences": [*each[:2], each[-1]]}
    spans = [span | {"relevance": rests} for span in verdict["spans"]]
    return verdict | {"spans": spans}


def streamed(*news: dict[str, Any], why: str = "stop", ends: bool = True) -> str:
    events = [
        {"choices": [{"delta": {"content": "x"}, "finish_reason": None}], "jaxhal": one}
        for one in news
    ]
    last = {"verdict": "unsure", "probability": 0.5, "by": "mine", "spans": []}
    reason = {"delta": {}, "finish_reason": why}
    events += [{"choices": [reason], "jaxhal": last}] if ends else []
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return "".join([*lines, "data: [DONE]\n\n" if ends else ""])


def staged(page: Any, verdict: Any = None, chat: str = "", readers=("tiny",)) -> None:
    """The page, opened and filled in, and what it is answered."""

    def answer(route: Any) -> None:
        path = route.request.url.removeprefix(HERE)
        if not path:
            route.fulfill(body=HTML, content_type="text/html")
        elif path == "v1/about":
            route.fulfill(json={"readers": [*map(reader_of, readers)]})
        elif path == "v1/verdict":
            body = route.request.post_data_json
            route.fulfill(json=verdict(body) if callable(verdict) else verdict)
        elif path == "v1/chat/completions":
            route.fulfill(body=chat, content_type="text/event-stream")
        else:
            pytest.fail(f"the page asks for {route.request.url}")

    page.route("**", answer)
    opened(page, HERE)
