"""What the proxy answers at each of its paths."""

import asyncio
import concurrent.futures
import functools
import hmac
import json
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

import prometheus_client
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jaxhal.serve.limits import Limited
from jaxhal.watchdog.agents import LONGEST, Pieces, Reply
from jaxhal.watchdog.bounds import BoundaryStore
from jaxhal.watchdog.conversation import turns_of
from jaxhal.watchdog.guarding import Guarded, headers, verdict
from jaxhal.watchdog.wire import Fault, Wanted, asked, check_text

# Characters of a conversation that are looked at, as long as reading them thrice.
_LOOKED = 50_000
_BOUNDARIES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class Metrics:
    """Counters and times of one proxy, and the points of its store."""

    def __init__(self, store: BoundaryStore):
        self._store = store
        self.registry = prometheus_client.CollectorRegistry()

        here: Any = {"namespace": "watchdog", "registry": self.registry}
        counter = functools.partial(prometheus_client.Counter, **here)
        here |= {"unit": "seconds", "buckets": _BOUNDARIES}
        timer = functools.partial(prometheus_client.Histogram, **here)
        self.requests = counter(
            "requests", "Requests by path and status.", ["path", "status"]
        )
        self._checks = counter("checks", "Queries by what became of them.", ["verdict"])
        self.failures = counter("failures", "Queries that the agent gave no answer to.")
        self.feedback = counter(
            "feedback", "Feedback by what it says.", ["hallucinated"]
        )
        self._lookup = timer("lookup", "Time that the bound was looked through.")
        self.seconds = timer("answer", "Time from a request to its whole answer.")
        prometheus_client.Gauge(
            "watchdog_points", "Points of the bound.", registry=self.registry
        ).set_function(self._points)

    def count(self, found: Guarded) -> None:
        """Takes in what became of a query."""
        check = found.check
        kind = "near" if check.near else "unsure" if check.flagged else "clean"
        self._checks.labels("unknown" if check.error else kind).inc()
        self._lookup.observe(check.seconds)
        if found.reply.error is not None:
            self.failures.inc()

    def _points(self) -> float:
        try:
            return float(len(self._store))
        except RuntimeError:
            return math.nan  # the store does not answer, which /health says


def application(service: Any, host: str) -> Starlette:
    """A :class:`jaxhal.watchdog.Service` as an application, served at an address."""
    own = host if service.token is None else None
    limited = Middleware(Limited, largest=service.limits.largest, host=own)
    here = _Routes(service)
    routes = [
        Route("/v1/chat/completions", here.complete, methods=["POST"]),
        Route("/v1/feedback", here.learn, methods=["POST"]),
        Route("/v1/models", here.models, methods=["GET"]),
        Route("/health", here.health, methods=["GET"]),
        Route("/metrics", here.counted, methods=["GET"]),
    ]
    handlers: Any = {
        Fault: here.fault,
        HTTPException: here.unknown,
        Exception: here.broken,
    }
    return Starlette(routes=routes, middleware=[limited], exception_handlers=handlers)


class _Routes:
    def __init__(self, service: Any):
        self.service = service
        self._metrics = Metrics(service.watchdog.store)
        # The threads that all of asyncio shares may all be reading long queries.
        self._pulse = concurrent.futures.ThreadPoolExecutor(1)

    async def complete(self, request: Request) -> Response:
        began, service = time.perf_counter(), self.service
        want = await asyncio.to_thread(asked, await self._body(request, service.token))
        size = sum(map(len, turns_of(want.prompt, service.remembered.said)))
        if size > _LOOKED:
            why = f"the messages have {size} characters, over {_LOOKED}, beside answers"
            raise Fault(400, f"{why} from here; leave out the first ones")
        found, rest = await service.guarded(want)
        self._metrics.count(found)
        said = verdict(found.check, service.mode, found.blocked)
        said |= {"ignored": service.ignored(want)}
        short = headers(found.check, found.blocked)
        status = 200 if found.reply.error is None else 502
        self._metrics.requests.labels("/v1/chat/completions", str(status)).inc()
        about = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": service.watchdog.agent.name,
        }
        if status == 200 and want.stream:
            events = self._events(about, want, found, rest, said, began)
            kind = "text/event-stream"
            return StreamingResponse(events, media_type=kind, headers=short)
        self._metrics.seconds.observe(time.perf_counter() - began)
        if status == 502:
            body = {**_unanswered(found.reply), "watchdog": said}
            return JSONResponse(body, status, headers=short)
        service.remember(about["id"], want, found, found.reply.text)
        message = {"role": "assistant", "content": found.reply.text}
        choice = {"index": 0, "message": message}
        choice |= {"finish_reason": _ending(found, found.reply.cut)}
        body = {**about, "object": "chat.completion", "choices": [choice]}
        return JSONResponse({**body, "watchdog": said}, headers=short)

    async def _events(
        self,
        about: Mapping[str, Any],
        want: Wanted,
        found: Guarded,
        rest: Pieces,
        said: Mapping[str, Any],
        began: float,
    ) -> AsyncIterator[str]:
        """A streamed answer, the verdict in its last event."""

        def event(delta: Mapping[str, Any], ending: Any = None, **more: Any) -> str:
            choice = {"index": 0, "delta": delta, "finish_reason": ending}
            whole = {**about, "object": "chat.completion.chunk", "choices": [choice]}
            return f"data: {json.dumps({**whole, **more})}\n\n"

        piece, text, cut = found.reply, "", False
        try:
            yield event({"role": "assistant", "content": ""})
            while piece is not None:
                if piece.error is not None:
                    self._metrics.failures.inc()
                    yield f"data: {json.dumps(_unanswered(piece))}\n\n"
                    return
                text += piece.text
                cut = piece.cut
                yield event({"content": piece.text})
                piece = None if found.blocked else await anext(rest, None)
            self.service.remember(about["id"], want, found, text)
            yield event({}, _ending(found, cut), watchdog=said)
            yield "data: [DONE]\n\n"
        finally:
            await rest.aclose()
            self._metrics.seconds.observe(time.perf_counter() - began)

    async def learn(self, request: Request) -> Response:
        body = await self._body(request, self.service.teacher)
        match body:
            case {"id": name, "hallucinated": bool(wrong)}:
                try:
                    query, reply, named = self.service.remembered[str(name)]
                except KeyError:
                    why = f"no answer {str(name)[:80]!r} is remembered"
                    raise Fault(404, why) from None
            case {"query": str(query), "hallucinated": bool(wrong)} if query.strip():
                text = body.get("response", "")
                if not isinstance(text, str):
                    raise Fault(400, "'response' must be text")
                check_text("'query'", query)
                check_text("'response'", text, LONGEST)
                reply, named = Reply(text), None
            case _:
                raise Fault(
                    400,
                    "feedback is {'id' of an answer, or 'query' and 'response', and "
                    "'hallucinated': true or false}",
                )
        try:
            gained = await self.service.watchdog.learn(
                query, reply.text, wrong, reply.context, named=named
            )
        except (RuntimeError, ValueError) as error:
            raise Fault(503, str(error), "unavailable_error") from error
        self._metrics.feedback.labels(str(wrong).lower()).inc()
        self._metrics.requests.labels("/v1/feedback", "200").inc()
        points = await asyncio.to_thread(len, self.service.watchdog.store)
        return JSONResponse({"gained": gained, "points": points})

    async def models(self, request: Request) -> Response:
        _allow(request, self.service.token)
        one = {"id": self.service.watchdog.agent.name, "object": "model"}
        one |= {"owned_by": "jaxhal", "created": 0}
        return JSONResponse({"object": "list", "data": [one]})

    async def health(self, request: Request) -> Response:
        loop, store = asyncio.get_running_loop(), self.service.watchdog.store
        try:
            points = await loop.run_in_executor(self._pulse, len, store)
        except RuntimeError as error:
            return JSONResponse({"status": "failing", "why": str(error)}, 503)
        about = {"agent": self.service.watchdog.agent.name, "mode": self.service.mode}
        status, code = ("ok", 200) if points else ("empty", 503)
        return JSONResponse({"status": status, "points": points, **about}, code)

    async def counted(self, request: Request) -> Response:
        _allow(request, self.service.token)
        text = await asyncio.to_thread(generate_latest, self._metrics.registry)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _body(self, request: Request, token: str | None) -> Any:
        """The JSON of a request that is allowed."""
        _allow(request, token)
        # What a web page may send anywhere without asking is not taken.
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        if kind.lower() != "application/json":
            why = f"the body is {kind or 'of no type'}, not application/json"
            raise Fault(415, why)
        try:
            return await asyncio.to_thread(json.loads, await request.body())
        except ClientDisconnect as error:
            raise Fault(400, "the request ended before its body") from error
        except (RecursionError, ValueError) as error:
            raise Fault(400, "the body is not JSON") from error

    async def fault(self, request: Request, error: Any) -> Response:
        more = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
        self._metrics.requests.labels(request.scope["path"], str(error.status)).inc()
        return JSONResponse(_error(str(error), error.kind), error.status, headers=more)

    async def unknown(self, request: Request, error: Any) -> Response:
        self._metrics.requests.labels("other", str(error.status_code)).inc()
        body = _error(str(error.detail), "invalid_request_error")
        return JSONResponse(body, error.status_code, headers=error.headers)

    async def broken(self, request: Request, error: Exception) -> Response:
        logging.getLogger(__name__).error("a request failed", exc_info=error)
        self._metrics.requests.labels(request.scope["path"], "500").inc()
        return JSONResponse(_error("the watchdog failed", "internal_error"), 500)


def _allow(request: Request, token: str | None) -> None:
    """Raises Fault where the client shows no token or another one."""
    if token is None:
        return
    shown = request.headers.get("authorization", "")
    if not hmac.compare_digest(shown.encode(), f"Bearer {token}".encode()):
        raise Fault(401, "no token, or a wrong one", "authentication_error")


def _error(message: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def _unanswered(reply: Reply) -> dict[str, Any]:
    return _error(f"the agent gave no answer: {reply.error}", "upstream_error")


def _ending(found: Guarded, cut: bool) -> str:
    """Why the text ends, in OpenAI's words."""
    if found.blocked:
        return "content_filter"
    return "length" if cut else "stop"
