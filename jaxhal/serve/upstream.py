"""Verdicts in front of another engine: it writes, and what it writes is judged here.

Requests and answers of OpenAI's completions go through as they are; a verdict is added
to the body under ``jaxhal`` and, where the answer comes whole, to the headers.
"""

import dataclasses
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import httpx2
from fastapi.responses import Response, StreamingResponse

from jaxhal.io.showing import quoted
from jaxhal.llm import hosts
from jaxhal.llm.endpoint import MOST_BYTES, PATIENCE, by_environment
from jaxhal.reporting.report import Report
from jaxhal.serve.judge import Judge
from jaxhal.serve.limits import Fault, problem
from jaxhal.serve.openai import said_of, unjudged
from jaxhal.serve.writer import Busy, Failed
from jaxhal.types import Example, Turn

# Seconds for a connection; those for an answer are an endpoint's.
_CONNECT = 10.0
_KEPT = 20  # connections to the engine that nobody uses
# What comes of JSON of another shape than expected.
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
_MALFORMED += (OverflowError,)


class Unreachable(RuntimeError):
    """The other engine gave nothing of use."""


class Upstream:
    """Another engine.

    Args:
      url: its base address, such as ``http://localhost:8001/v1``.
      judge: reads its answers.

    It is shown $OPENAI_API_KEY, but never unencrypted, unless it is on this machine.
    """

    def __init__(self, url: str, judge: Judge):
        self.url, self.judge = url.rstrip("/"), judge
        safe = hosts.keyed(self.url)
        key = hosts.key() if safe else ""
        shown = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx2.Timeout(PATIENCE, connect=_CONNECT)
        keeping = CookieJar(DefaultCookiePolicy(allowed_domains=[]))  # none
        with by_environment():
            self._client = httpx2.AsyncClient(
                headers=shown,
                timeout=timeout,
                # As many as clients have here, which are counted.
                limits=httpx2.Limits(max_keepalive_connections=_KEPT),
                cookies=keeping,
                trust_env=not hosts.server_of(self.url).is_local,  # no proxy sees it
            )

    async def models(self) -> Response:
        """What the engine serves, in its own words."""
        found = await self._sent("GET", "models", None)
        return _passed(found, await _read(found))

    async def write(
        self, kind: str, body: dict[str, Any], count: Callable[[Report], None]
    ) -> Response:
        """An answer of the engine with the verdict on it.

        Args:
          kind: of completions, ``"chat/completions"`` or ``"completions"``.
          body: the request.
          count: is told every report.
        """
        example = example_of(body)
        found = await self._sent("POST", kind, body)
        if body.get("stream") and found.status_code == 200:
            events = self._events(found, example, count)
            return StreamingResponse(events, media_type="text/event-stream")
        raw = await _read(found)
        if found.status_code != 200:
            return _passed(found, raw)
        try:
            whole = json.loads(raw)
            texts = {int(one["index"]): _said(one) for one in whole["choices"]}
        except _MALFORMED as error:
            raise Unreachable(
                f"{self.url} answered something else than a completion: {error!r}"
            ) from error
        said = await self._judged(example, texts, count)
        for one in whole["choices"]:
            one["jaxhal"] = said[int(one["index"])]
        first = whole["jaxhal"] = next(iter(said.values()), None)
        # As the engine spelled it, infinite numbers and halves of characters too.
        shown, kind = json.dumps(whole), "application/json"
        return Response(shown, media_type=kind, headers=_headers(first or {}))

    async def _sent(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> httpx2.Response:
        try:
            request = self._client.build_request(
                method, f"{self.url}/{path}", json=body
            )
        except ValueError as error:  # such as NaN
            raise Fault(400, f"the body is not JSON: {error}") from error
        try:
            return await self._client.send(request, stream=True)
        except httpx2.HTTPError as error:
            why = hosts.hidden(str(error) or type(error).__name__)
            raise Unreachable(f"{self.url} gave no answer: {why}") from error

    async def _events(
        self,
        found: httpx2.Response,
        example: Example | str,
        count: Callable[[Report], None],
    ) -> AsyncIterator[str]:
        """The engine's events as they come, before its last one the verdict."""
        texts: dict[int, str] = defaultdict(str)
        about: dict[str, Any] = {}
        done = False
        try:
            async for line in _lines(found):
                data = line.removeprefix("data:").strip()
                done = done or data == "[DONE]"
                if done or not line.startswith("data:"):
                    continue
                yield f"data: {data}\n\n"
                chunk = json.loads(data)
                about = {n: chunk.get(n) for n in ("id", "object", "created", "model")}
                for one in chunk.get("choices") or ():
                    texts[int(one["index"])] += _said(one)
            if not done:
                raise ValueError("the stream has no end")
            said = await self._judged(example, texts, count)
            first = next(iter(said.values()), None)
            each = [{"index": at, **one} for at, one in said.items()]
            more = {"choices": [], "jaxhal": first, "verdicts": each}
            yield f"data: {json.dumps({**about, **more})}\n\n"
            yield "data: [DONE]\n\n"
        except (httpx2.HTTPError, Busy, Failed, *_MALFORMED) as error:
            why = f"the answer of {self.url} broke off: {hosts.hidden(repr(error))}"
            yield f"data: {json.dumps(problem(why, 'upstream_error'))}\n\n"
        finally:
            await found.aclose()

    async def _judged(
        self,
        example: Example | str,
        texts: dict[int, str],
        count: Callable[[Report], None],
    ) -> dict[int, dict[str, Any]]:
        """Verdicts by the number of the answer; an error where there is none."""
        if isinstance(example, str):
            return {at: unjudged(example) for at in texts}
        found = {at: unjudged("the answer holds no text") for at in texts}
        # Halves of a character that came apart are joined.
        how = "utf-16", "surrogatepass"
        texts = {at: text.encode(*how).decode(*how) for at, text in texts.items()}
        good = {at: text for at, text in texts.items() if text.strip()}
        examples = [dataclasses.replace(example, response=t) for t in good.values()]
        reports, left = self.judge.reports(examples), [*good]
        try:
            async for report in reports:
                count(report)
                found[left.pop(0)] = said_of(report)
        except (Busy, Failed) as error:  # the engine's answer counts
            found |= {at: unjudged(str(error)) for at in left}
        return found


def example_of(body: dict[str, Any]) -> Example | str:
    """What an answer to a request should rest on, or why nothing can be said of it.

    What tools gave is the context, and the user's last turn the question; without any
    the conversation is the prompt.
    """
    try:
        if "messages" not in body:
            return Example("-", prompt=_text(body["prompt"]))
        turns = [
            Turn(_role(one["role"]), _text(one["content"]))
            for one in body["messages"]
            if one.get("content") is not None
        ]
        given = [turn.content for turn in turns if turn.role == "tool"]
        if not given:
            return Example("-", turns=tuple(turns))
        asked = [turn.content for turn in turns if turn.role == "user"]
        context = "\n\n".join(given)
        return Example("-", context=context, question=asked[-1] if asked else None)
    except _MALFORMED as error:
        return f"the request cannot be judged: {error!r}"


def _role(name: str) -> str:
    return {"developer": "system", "function": "tool"}.get(name, name)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = [part["text"] for part in content if part["type"] == "text"]
    if len(parts) < len(content):
        raise ValueError("it holds something other than text")
    return "\n".join(parts)


def _said(choice: dict[str, Any]) -> str:
    """The text of a choice, or of a piece of one."""
    message = choice.get("message") or choice.get("delta")
    text = (choice.get("text") if message is None else message.get("content")) or ""
    if isinstance(text, list):  # of parts, such as what was thought before
        text = "".join(part["text"] for part in text if part.get("type") == "text")
    if not isinstance(text, str):
        raise ValueError(f"the content of a choice is {quoted(text)}, not text")
    return text


def _headers(said: dict[str, Any]) -> dict[str, str]:
    """The verdict for who looks at headers alone."""
    shown = {"X-Jaxhal-Verdict": said.get("verdict") or "none"}
    if (probability := said.get("probability")) is not None:
        shown["X-Jaxhal-Probability"] = f"{probability:.4f}"
    if by := said.get("by"):
        # A header holds no other script.
        shown["X-Jaxhal-By"] = by.encode("ascii", "backslashreplace").decode()
    return shown


async def _lines(found: httpx2.Response) -> AsyncIterator[str]:
    """Lines of a stream that is not endless; JSON may hold other ends of lines."""
    size, rest = 0, ""
    async for piece in found.aiter_text():
        if (size := size + len(piece)) > MOST_BYTES:
            raise ValueError(f"the stream is over {MOST_BYTES} bytes")
        *whole, last = piece.split("\n")
        for line in whole:
            yield (rest + line).removesuffix("\r")
            rest = ""
        rest += last
    yield rest


async def _read(found: httpx2.Response) -> bytes:
    """A body that is not endless."""
    raw = b""
    try:
        async for piece in found.aiter_bytes():
            raw += piece
            if len(raw) > MOST_BYTES:
                raise Unreachable(f"an answer is over {MOST_BYTES} bytes")
    except httpx2.HTTPError as error:
        raise Unreachable(f"an answer broke off: {error!r}") from error
    finally:
        await found.aclose()
    return raw


def _passed(found: httpx2.Response, raw: bytes) -> Response:
    """What the engine said, as it is."""
    kind = found.headers.get("content-type", "application/json")
    return Response(raw, found.status_code, media_type=kind)
