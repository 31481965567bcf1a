"""A proxy in front of an agent that speaks as OpenAI's chat completions do.

What the watchdog says is in the response and its headers.  A stream begins when the
query is judged; pieces of an endpoint's answer are passed on as they come.
"""

import asyncio
import collections
import concurrent.futures
import hmac
import json
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from jaxhal.io.extras import brought_by
from jaxhal.serve import LARGEST
from jaxhal.watchdog import agents
from jaxhal.watchdog.agents import Pieces, Reply
from jaxhal.watchdog.conversation import Conversation, turns_of
from jaxhal.watchdog.guarding import BLOCKED, Check, Watchdog, verdict

with brought_by("watchdog"):
    import jiter
    import prometheus_client
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    from jaxhal.serve.limits import Fault, Limited, check_token, heard, problem, reason
    from jaxhal.serve.proxy_wire import Wanted, asked, bounded, must
    from jaxhal.serve.running import bound, run

# Of the last answers that feedback may name; of how many characters, and of how many a
# conversation that is looked at, as long as reading them five times.
_KEPT, _CHARACTERS, _LOOKED = 10_000, 100_000_000, 50_000
_CHAT = "/v1/chat/completions"
_COUNTED = {
    "requests": ("Requests by path and status.", "path", "status"),
    "checks": ("Queries by what became of them.", "verdict"),
    "failures": ("Queries that the agent gave no answer to.",),
    "feedback": ("Feedback by what it says.", "hallucinated"),
}
_TIMED = {
    "lookup": "Time that the bound was looked through.",
    "answer": "Time from a request to its whole answer.",
}
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class Given(NamedTuple):
    """An answer that feedback may name, and the points that its verdict named."""

    query: Conversation
    text: str
    context: str
    named: list[str]


class Service:
    """The proxy.

    Of a conversation every turn is looked at, since the client writes them all, but
    answers that the proxy itself gave.

    Args:
      block: answers to flagged queries are held back, and the agent is not asked.
      token: that a client has to show; ``None`` asks for none, and then answers only by
        its own name, as :class:`jaxhal.serve.limits.Limited` has it.
      teacher: that whoever gives feedback has to show instead; by default the same.
      largest: bytes of a request's body.
    """

    def __init__(
        self,
        watchdog: Watchdog,
        *,
        block: bool = False,
        token: str | None = None,
        teacher: str | None = None,
        largest: int = LARGEST,
    ):
        check_token(token=token, teacher=teacher)
        self.watchdog, self.block, self.token = watchdog, block, token
        self.teacher = token if teacher is None else teacher
        self.largest = largest
        self._given: dict[str, Given] = {}
        self._characters = 0
        # How often each text was said; the one in place of a blocked answer always was.
        self._said = collections.Counter([BLOCKED])
        # The threads that all of asyncio shares may all be reading long queries.
        self._pulse = concurrent.futures.ThreadPoolExecutor(1)
        self._registry = prometheus_client.CollectorRegistry()
        here: Any = {"namespace": "watchdog", "registry": self._registry}
        self._counters = {
            name: prometheus_client.Counter(name, text, labels, **here)
            for name, (text, *labels) in _COUNTED.items()
        }
        here |= {"unit": "seconds", "buckets": _SECONDS}
        self._timers = {
            name: prometheus_client.Histogram(name, text, **here)
            for name, text in _TIMED.items()
        }
        prometheus_client.Gauge(
            "watchdog_points", "Points of the bound.", registry=self._registry
        ).set_function(self._points)

    def app(self, host: str = "127.0.0.1") -> Starlette:
        """The proxy as an ASGI application, for the address that it is served at."""
        own = host if self.token is None else None
        return Starlette(
            routes=[
                *self.routes(),
                Route("/health", self._health, methods=["GET"]),
                Route("/metrics", self._metrics, methods=["GET"]),
            ],
            middleware=[Middleware(Limited, largest=self.largest, host=own)],
            exception_handlers={HTTPException: self._fault, Exception: self._broken},
        )

    def routes(self) -> list[Route]:
        """What a server has that asks the agent through the watchdog."""

        def told(work: Callable[[Request], Awaitable[Response]]) -> Any:
            async def answer(request: Request) -> Response:
                try:
                    return await work(request)
                except Fault as error:
                    return await self._fault(request, error)

            return answer

        return [
            Route(_CHAT, told(self._complete), methods=["POST"]),
            Route("/v1/feedback", told(self._learn), methods=["POST"]),
            Route("/v1/models", told(self._models), methods=["GET"]),
        ]

    def run(self, host: str = "127.0.0.1", port: int = 8080) -> None:
        """Serves until it is told to stop; open requests are then answered first."""
        run(self.app(host), bound(host, port))

    def latest(self) -> bytes:
        """What is counted, as Prometheus reads it."""
        return prometheus_client.generate_latest(self._registry)

    async def _complete(self, request: Request) -> Response:
        began = time.perf_counter()
        want = await asyncio.to_thread(asked, await self._body(request, self.token))
        size = sum(map(len, turns_of(want.prompt, self._said)))
        why = f"the messages have {size} characters, over {_LOOKED}, beside answers"
        must(size <= _LOOKED, f"{why} from here; leave out the first ones")
        check, reply, rest = await heard(request, self._guarded(want))
        kind = "near" if check.near else "unsure" if check.flagged else "clean"
        self._count("checks", "unknown" if check.error else kind)
        self._timers["lookup"].observe(check.seconds)
        status = 200 if reply.error is None else 502
        self._count("requests", _CHAT, str(status))
        said, wishes = verdict(check, self.block), want.prompt.wishes
        if getattr(self.watchdog.agent, "hears_wishes", False):
            wishes = {}
        said |= {"ignored": sorted([*want.ignored, *wishes])}
        short = {
            "X-Watchdog-Flagged": str(check.flagged).lower(),
            "X-Watchdog-Blocked": str(said["blocked"]).lower(),
            "X-Watchdog-Score": f"{check.score:.4f}",
        }
        about = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self.watchdog.agent.name,
        }
        query = Conversation(want.prompt.turns)  # its wishes were the answer's
        given = Given(query, "", reply.context, self.watchdog.close(check.hits))
        if status == 200 and want.stream:
            events = self._events(about, given, reply, rest, said, began)
            kind = "text/event-stream"
            return StreamingResponse(events, media_type=kind, headers=short)
        self._timers["answer"].observe(time.perf_counter() - began)
        if status == 502:
            body = {**self._unanswered(reply), "watchdog": said}
            return JSONResponse(body, status, headers=short)
        self._remember(about["id"], given, "" if said["blocked"] else reply.text)
        message = {"role": "assistant", "content": reply.text}
        choice = {"index": 0, "message": message}
        choice |= {"finish_reason": _ending(said["blocked"], reply.cut)}
        body = {**about, "object": "chat.completion", "choices": [choice]}
        return JSONResponse({**body, "watchdog": said}, headers=short)

    async def _guarded(self, want: Wanted) -> tuple[Check, Reply, Pieces]:
        """What is said of a query, the answer so far, and what comes still."""
        agent, temperature = self.watchdog.agent, want.temperature
        if temperature is None:
            temperature = self.watchdog.answer_temperature
        whole = not want.stream
        pieces = agents.streamed(agent, want.prompt, temperature, whole)
        # A client that reads slowly keeps no agent from answering others.
        pieces = agents.ahead(pieces)

        async def first() -> Reply:
            return await anext(pieces, agents.failed("the answer is empty"))

        look = self.watchdog.check(want.prompt, self._said)
        try:
            if not self.block:
                check, reply = await agents.together(look, first())
                return check, reply, pieces
            check = await look
            reply = Reply(BLOCKED) if check.flagged else await first()
            return check, reply, pieces
        except RuntimeError as error:
            raise Fault(503, str(error), "unavailable_error") from error

    async def _events(
        self,
        about: Mapping[str, Any],
        given: Given,
        reply: Reply,
        rest: Pieces,
        said: Mapping[str, Any],
        began: float,
    ) -> AsyncIterator[str]:
        """A streamed answer, the verdict in its last event."""

        def event(delta: Mapping[str, Any], ending: Any = None, **more: Any) -> str:
            choice = {"index": 0, "delta": delta, "finish_reason": ending}
            whole = {**about, "object": "chat.completion.chunk", "choices": [choice]}
            return f"data: {json.dumps({**whole, **more})}\n\n"

        piece, text, cut = reply, "", False
        try:
            yield event({"role": "assistant", "content": ""})
            while piece is not None:
                if piece.error is not None:
                    yield f"data: {json.dumps(self._unanswered(piece))}\n\n"
                    return
                text += piece.text
                cut = piece.cut
                yield event({"content": piece.text})
                piece = None if said["blocked"] else await anext(rest, None)
            self._remember(about["id"], given, "" if said["blocked"] else text)
            yield event({}, _ending(said["blocked"], cut), watchdog=said)
            yield "data: [DONE]\n\n"
        finally:
            await rest.aclose()
            self._timers["answer"].observe(time.perf_counter() - began)

    def _remember(self, name: str, given: Given, text: str) -> None:
        """Keeps an answer for feedback on it, or that a query was blocked."""
        self._given[name] = given = given._replace(text=text.strip())
        self._said[given.text] += 1
        self._characters += sum(map(len, given[:3]))
        while len(self._given) > _KEPT or self._characters > _CHARACTERS:
            old = self._given.pop(next(iter(self._given)))
            self._characters -= sum(map(len, old[:3]))
            self._said[old.text] -= 1
            if not self._said[old.text]:
                del self._said[old.text]

    async def _learn(self, request: Request) -> Response:
        body = await self._body(request, self.teacher)
        match body:
            case {"id": name, "hallucinated": bool(wrong)}:
                if str(name) not in self._given:
                    raise Fault(404, f"no answer {str(name)[:80]!r} is remembered")
                query, text, context, named = self._given[str(name)]
            case {"query": str(query), "hallucinated": bool(wrong)} if query.strip():
                text, context, named = body.get("response", ""), "", None
                must(isinstance(text, str), "'response' must be text")
                bounded("'query'", query)
                bounded("'response'", text, agents.LONGEST)
            case _:
                raise Fault(
                    400,
                    "feedback is {'id' of an answer, or 'query' and 'response', and "
                    "'hallucinated': true or false}",
                )
        learn = self.watchdog.learn(query, text, wrong, context, named=named)
        try:
            gained = await learn
        except (RuntimeError, ValueError) as error:
            raise Fault(503, str(error), "unavailable_error") from error
        self._count("feedback", str(wrong).lower())
        self._count("requests", "/v1/feedback", "200")
        points = await asyncio.to_thread(len, self.watchdog.store)
        return JSONResponse({"gained": gained, "points": points})

    async def _models(self, request: Request) -> Response:
        _allow(request, self.token)
        one = {"id": self.watchdog.agent.name, "object": "model"}
        one |= {"owned_by": "jaxhal", "created": 0}
        return JSONResponse({"object": "list", "data": [one]})

    async def _health(self, request: Request) -> Response:
        loop, store = asyncio.get_running_loop(), self.watchdog.store
        try:
            points = await loop.run_in_executor(self._pulse, len, store)
        except RuntimeError as error:
            return JSONResponse({"status": "failing", "why": str(error)}, 503)
        mode = "block" if self.block else "flag"
        about = {"agent": self.watchdog.agent.name, "mode": mode}
        status, code = ("ok", 200) if points else ("empty", 503)
        return JSONResponse({"status": status, "points": points, **about}, code)

    async def _metrics(self, request: Request) -> Response:
        _allow(request, self.token)
        text = await asyncio.to_thread(self.latest)
        kind = prometheus_client.CONTENT_TYPE_LATEST
        return Response(text, headers={"Content-Type": kind})

    async def _body(self, request: Request, token: str | None) -> Any:
        """The JSON of a request that is allowed, all texts in it valid."""
        _allow(request, token)
        # What a web page may send anywhere without asking is not taken.
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        if kind.lower() != "application/json":
            why = f"the body is {kind or 'of no type'}, not application/json"
            raise Fault(415, why)
        try:
            raw = await request.body()
            return await asyncio.to_thread(jiter.from_json, raw, allow_inf_nan=False)
        except ClientDisconnect as error:
            raise Fault(400, "the request ended before its body") from error
        except ValueError as error:
            raise Fault(400, f"the body is not JSON: {error}") from error

    async def _fault(self, request: Request, error: Any) -> Response:
        known = isinstance(error, Fault)
        path = request.scope["path"] if known else "other"
        self._count("requests", path, str(error.status_code))
        kind = error.kind if known else "invalid_request_error"
        body = problem(reason(error, request.method, request.url.path), kind)
        return JSONResponse(body, error.status_code, headers=error.headers)

    async def _broken(self, request: Request, error: Exception) -> Response:
        logging.getLogger(__name__).error("a request failed", exc_info=error)
        self._count("requests", request.scope["path"], "500")
        return JSONResponse(problem("the watchdog failed", "internal_error"), 500)

    def _unanswered(self, reply: Reply) -> dict[str, Any]:
        self._count("failures")
        return problem(f"the agent gave no answer: {reply.error}", "upstream_error")

    def _count(self, name: str, *labels: str) -> None:
        counter = self._counters[name]
        (counter.labels(*labels) if labels else counter).inc()

    def _points(self) -> float:
        try:
            return float(len(self.watchdog.store))
        except RuntimeError:
            return math.nan  # the store does not answer, which /health says


def _allow(request: Request, token: str | None) -> None:
    """Raises Fault where the client shows no token or another one."""
    if token is None:
        return
    scheme, _, shown = request.headers.get("authorization", "").partition(" ")
    same = hmac.compare_digest(shown.strip().encode(), token.encode())
    if not (same and scheme.lower() == "bearer"):
        raise Fault(401, "no token, or a wrong one", "authentication_error")


def _ending(blocked: bool, cut: bool) -> str:
    """Why the text ends, in OpenAI's words."""
    return "content_filter" if blocked else "length" if cut else "stop"
