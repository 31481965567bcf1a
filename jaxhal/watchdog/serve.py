"""A proxy in front of an agent that speaks as OpenAI's chat completions do.

Whatever talks to the agent talks to the proxy instead, and finds what the watchdog
says in the response and its headers.  An endpoint is told all that the client says;
the wishes that another agent is not told, the verdict names.  A stream begins when
the query is judged; the pieces of an endpoint's answer are then passed on as they
come, while a model in this process, which writes for several clients at a time, says
its answer whole.
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
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxhal.serve.limits import Limited, Limits, options
from jaxhal.watchdog.agents import (
    LONGEST,
    Agent,
    Pieces,
    Reply,
    ahead,
    failed,
    streamed,
    together,
)
from jaxhal.watchdog.conversation import Conversation, turns_of
from jaxhal.watchdog.guarding import Check, Guarded, Watchdog
from jaxhal.watchdog.wire import Asked, Fault, asked, check_text

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

#: Said in place of an answer that is held back.
BLOCKED = (
    "I may not know enough to answer this question without making something up, so I "
    "would rather not."
)
# Of the last answers that feedback may name.
_KEPT = 10_000
# And of how many characters, conversations included.
_CHARACTERS = 100_000_000
# Of a conversation that are looked at, which takes as long as reading them thrice.
_LOOKED = 50_000
_BOUNDARIES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


def verdict(check: Check, mode: str, blocked: bool) -> dict[str, Any]:
    """What the watchdog says, as the response has it."""
    return {
        "flagged": check.flagged,
        "blocked": blocked,
        "score": check.score,
        "near": check.near,
        "cosine": check.cosine,
        "entropy": check.entropy,
        "mode": mode,
        "error": check.error,
        "nearest": [
            {"query": hit.point.query, "similarity": hit.similarity}
            for hit in check.hits
        ],
    }


def headers(check: Check, blocked: bool) -> dict[str, str]:
    """The same in short, as headers."""
    return {
        "X-Watchdog-Flagged": str(check.flagged).lower(),
        "X-Watchdog-Blocked": str(blocked).lower(),
        "X-Watchdog-Score": f"{check.score:.4f}",
    }


class _Given(NamedTuple):
    """An answer that feedback may name, and the points that its verdict named."""

    query: str
    reply: Reply
    named: list[str]

    @property
    def characters(self) -> int:
        return len(self.query) + len(self.reply.text) + len(self.reply.context)


class Service:
    """The proxy.

    Of a conversation every turn is looked at, since the client writes them all, but
    answers that the proxy itself gave (see
    :func:`jaxhal.watchdog.conversation.looked_at`): one that once held a query near the
    bound is flagged until the client leaves that turn out.

    Args:
      watchdog: whose agent answers.
      mode: ``"flag"`` adds the verdict; ``"block"`` holds answers to flagged queries
        back, which the agent is then not asked for.
      token: that a client has to show; ``None`` asks for none, and then
        answers only by its own name, as :class:`jaxhal.serve.limits.Limited` has it.
      teacher: that whoever gives feedback has to show instead; by default the same.
      limits: of requests and connections.
      blocked: what is said in place of an answer that is held back.

    Raises:
      ModuleNotFoundError: without starlette and prometheus-client.
      ValueError: on another mode, or an empty token.
    """

    def __init__(
        self,
        watchdog: Watchdog,
        *,
        mode: str = "flag",
        token: str | None = None,
        teacher: str | None = None,
        limits: Limits = Limits(),  # noqa: B008  (an immutable default)
        blocked: str = BLOCKED,
    ):
        try:
            import prometheus_client
            import starlette  # noqa: F401
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"the proxy needs {error.name}; pip install 'jaxhal[watchdog]'"
            ) from error
        if mode not in ("flag", "block"):
            raise ValueError(f"mode is {mode!r}; use 'flag' or 'block'")
        for name, one in (("token", token), ("teacher", teacher)):
            if one is not None and not one.strip():
                raise ValueError(f"{name} is empty; give one, or leave it out")
        self.watchdog, self.mode, self.token = watchdog, mode, token
        self.teacher = token if teacher is None else teacher
        self.limits, self.blocked = limits, blocked
        self._given: collections.OrderedDict[str, _Given]
        self._given = collections.OrderedDict()
        self._characters = 0  # of what is remembered
        self._said = collections.Counter([blocked.strip()])
        # The threads that all of asyncio shares may all be reading long queries.
        self._pulse = concurrent.futures.ThreadPoolExecutor(1)
        self.registry = prometheus_client.CollectorRegistry()
        named: Any = {"registry": self.registry}
        counter, histogram = prometheus_client.Counter, prometheus_client.Histogram
        self._requests = counter(
            "watchdog_requests",
            "Requests by path and status.",
            ["path", "status"],
            **named,
        )
        self._checks = counter(
            "watchdog_checks", "Queries by what became of them.", ["verdict"], **named
        )
        self._failures = counter(
            "watchdog_failures", "Queries that the agent gave no answer to.", **named
        )
        self._feedback = counter(
            "watchdog_feedback", "Feedback by what it says.", ["hallucinated"], **named
        )
        self._lookup = histogram(
            "watchdog_lookup_seconds",
            "Time that the bound was looked through.",
            buckets=_BOUNDARIES,
            **named,
        )
        self._seconds = histogram(
            "watchdog_answer_seconds",
            "Time from a request to its whole answer.",
            buckets=_BOUNDARIES,
            **named,
        )
        points = prometheus_client.Gauge(
            "watchdog_points", "Points of the bound.", **named
        )
        points.set_function(self._points)

    def app(self, host: str = "127.0.0.1") -> "Starlette":
        """The proxy as an ASGI application.

        Args:
          host: address it is served at, for :class:`jaxhal.serve.limits.Limited`.
        """
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.middleware import Middleware
        from starlette.routing import Route

        routes = [
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
            Route("/v1/feedback", self._learn, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
        ]
        handlers: Any = {
            Fault: self._fault,
            HTTPException: self._unknown,
            Exception: self._broken,
        }
        own = host if self.token is None else None
        limited = Middleware(Limited, largest=self.limits.largest, host=own)
        return Starlette(
            routes=routes, middleware=[limited], exception_handlers=handlers
        )

    def run(self, host: str = "127.0.0.1", port: int = 8080) -> None:
        """Serves until it is told to stop; open requests are then answered first.

        Args:
          host: address to listen at; by default this machine's own alone.
          port: of the address.
        """
        import uvicorn

        uvicorn.run(
            self.app(host),
            host=host,
            port=port,
            log_level="warning",
            timeout_graceful_shutdown=30,
            **options(self.limits),
        )

    async def _complete(self, request: "Request") -> "Response":
        from starlette.responses import JSONResponse, StreamingResponse

        began = time.perf_counter()
        want = await asyncio.to_thread(asked, await self._body(request, self.token))
        size = sum(map(len, turns_of(want.prompt, self._said)))
        if size > _LOOKED:
            why = f"the messages have {size} characters, over {_LOOKED}, beside answers"
            raise Fault(400, f"{why} from here; leave out the first ones")
        found, rest = await self._guarded(want)
        self._count(found)
        said = verdict(found.check, self.mode, found.blocked)
        said |= {"ignored": self._ignored(want)}
        short = headers(found.check, found.blocked)
        status = 200 if found.reply.error is None else 502
        self._requests.labels("/v1/chat/completions", str(status)).inc()
        about = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self.watchdog.agent.name,
        }
        if status == 200 and want.stream:
            events = self._events(about, want, found, rest, said, began)
            kind = "text/event-stream"
            return StreamingResponse(events, media_type=kind, headers=short)
        self._seconds.observe(time.perf_counter() - began)
        if status == 502:
            body = {**_unanswered(found.reply), "watchdog": said}
            return JSONResponse(body, status, headers=short)
        self._remember(about["id"], want.prompt, found, found.reply.text)
        message = {"role": "assistant", "content": found.reply.text}
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": _ending(found, found.reply.cut),
        }
        body = {**about, "object": "chat.completion", "choices": [choice]}
        return JSONResponse({**body, "watchdog": said}, headers=short)

    async def _guarded(self, want: Asked) -> tuple[Guarded, Pieces]:
        """The answer so far, what is said of it, and what comes still."""
        temperature = want.temperature
        if temperature is None:
            temperature = self.watchdog.answer_temperature
        begin = streamed if want.stream else _whole
        # A client that reads slowly keeps no agent from answering others.
        pieces = ahead(begin(self.watchdog.agent, want.prompt, temperature))

        async def first() -> Reply:
            return await anext(pieces, failed("the answer is empty"))

        try:
            if self.mode == "block":
                check = await self.watchdog.check(want.prompt, self._said)
                if check.flagged:
                    return Guarded(Reply(self.blocked), check, True), pieces
                return Guarded(await first(), check, False), pieces
            check, reply = await together(
                self.watchdog.check(want.prompt, self._said), first()
            )
            return Guarded(reply, check, False), pieces
        except RuntimeError as error:
            raise Fault(503, str(error), "unavailable_error") from error

    async def _events(
        self,
        about: Mapping[str, Any],
        want: Asked,
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
                    self._failures.inc()
                    yield f"data: {json.dumps(_unanswered(piece))}\n\n"
                    return
                text += piece.text
                cut = piece.cut
                yield event({"content": piece.text})
                piece = None if found.blocked else await anext(rest, None)
            self._remember(about["id"], want.prompt, found, text)
            yield event({}, _ending(found, cut), watchdog=said)
            yield "data: [DONE]\n\n"
        finally:
            await rest.aclose()
            self._seconds.observe(time.perf_counter() - began)

    def _ignored(self, want: Asked) -> list[str]:
        """Names of what was wished and has no part in the answer."""
        heard = getattr(self.watchdog.agent, "hears_wishes", False)
        return sorted([*want.ignored, *([] if heard else want.prompt.wishes)])

    async def _learn(self, request: "Request") -> "Response":
        from starlette.responses import JSONResponse

        body = await self._body(request, self.teacher)
        if not isinstance(body, Mapping) or not isinstance(
            body.get("hallucinated"), bool
        ):
            raise Fault(400, "feedback is {'id', 'hallucinated': true or false}")
        if "id" in body:
            given = self._given.get(str(body["id"]))
            if given is None:
                raise Fault(404, f"no answer {str(body['id'])[:80]!r} is remembered")
            query, reply, named = given
        else:
            query, text = body.get("query"), body.get("response", "")
            if not isinstance(query, str) or not query.strip():
                raise Fault(400, "feedback without 'id' needs the 'query' as text")
            if not isinstance(text, str):
                raise Fault(400, "'response' must be text")
            check_text("'query'", query)
            check_text("'response'", text, LONGEST)
            reply, named = Reply(text), None
        try:
            gained = await self.watchdog.learn(
                query, reply.text, body["hallucinated"], reply.context, named=named
            )
        except (RuntimeError, ValueError) as error:
            raise Fault(503, str(error), "unavailable_error") from error
        self._feedback.labels(str(body["hallucinated"]).lower()).inc()
        self._requests.labels("/v1/feedback", "200").inc()
        points = await asyncio.to_thread(len, self.watchdog.store)
        return JSONResponse({"gained": gained, "points": points})

    async def _models(self, request: "Request") -> "Response":
        from starlette.responses import JSONResponse

        _allow(request, self.token)
        one = {"id": self.watchdog.agent.name, "object": "model", "owned_by": "jaxhal"}
        return JSONResponse({"object": "list", "data": [{**one, "created": 0}]})

    async def _health(self, request: "Request") -> "Response":
        from starlette.responses import JSONResponse

        loop = asyncio.get_running_loop()
        try:
            points = await loop.run_in_executor(self._pulse, len, self.watchdog.store)
        except RuntimeError as error:
            return JSONResponse({"status": "failing", "why": str(error)}, 503)
        about = {"agent": self.watchdog.agent.name, "mode": self.mode}
        status, code = ("ok", 200) if points else ("empty", 503)
        return JSONResponse({"status": status, "points": points, **about}, code)

    async def _metrics(self, request: "Request") -> "Response":
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
        from starlette.responses import Response

        _allow(request, self.token)
        text = await asyncio.to_thread(generate_latest, self.registry)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    def _points(self) -> float:
        try:
            return float(len(self.watchdog.store))
        except RuntimeError:
            return math.nan  # the store does not answer, which /health says

    async def _body(self, request: "Request", token: str | None) -> Any:
        """The JSON of a request that is allowed."""
        from starlette.requests import ClientDisconnect

        _allow(request, token)
        # What a web page may send anywhere without asking is not taken.
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        if kind.lower() != "application/json":
            raise Fault(
                415, f"the body is {kind or 'of no type'}, not application/json"
            )
        try:
            return await asyncio.to_thread(json.loads, await request.body())
        except ClientDisconnect as error:
            raise Fault(400, "the request ended before its body") from error
        except (RecursionError, ValueError) as error:
            raise Fault(400, "the body is not JSON") from error

    def _remember(self, name: str, query: str, found: Guarded, text: str) -> None:
        """Keeps an answer for feedback on it, or that a query was blocked."""
        said = "" if found.blocked else text
        if isinstance(query, Conversation):
            query = Conversation(query.turns)  # its wishes were the answer's
        reply = Reply(said, found.reply.context)
        named = self.watchdog.close(found.check.hits)
        self._given[name] = given = _Given(query, reply, named)
        self._characters += given.characters
        self._said[said.strip()] += 1
        while len(self._given) > _KEPT or self._characters > _CHARACTERS:
            _, old = self._given.popitem(last=False)
            self._characters -= old.characters
            self._said[old.reply.text.strip()] -= 1
            if not self._said[old.reply.text.strip()]:
                del self._said[old.reply.text.strip()]

    def _count(self, found: Guarded) -> None:
        check = found.check
        kind = "near" if check.near else "unsure" if check.flagged else "clean"
        self._checks.labels("unknown" if check.error else kind).inc()
        self._lookup.observe(check.seconds)
        if found.reply.error is not None:
            self._failures.inc()

    async def _fault(self, request: "Request", error: Any) -> "Response":
        from starlette.responses import JSONResponse

        more = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
        self._requests.labels(request.scope["path"], str(error.status)).inc()
        return JSONResponse(_error(str(error), error.kind), error.status, headers=more)

    async def _unknown(self, request: "Request", error: Any) -> "Response":
        from starlette.responses import JSONResponse

        self._requests.labels("other", str(error.status_code)).inc()
        body = _error(str(error.detail), "invalid_request_error")
        return JSONResponse(body, error.status_code, headers=error.headers)

    async def _broken(self, request: "Request", error: Exception) -> "Response":
        from starlette.responses import JSONResponse

        logging.getLogger(__name__).error("a request failed", exc_info=error)
        self._requests.labels(request.scope["path"], "500").inc()
        return JSONResponse(_error("the watchdog failed", "internal_error"), 500)


def _allow(request: "Request", token: str | None) -> None:
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


async def _whole(agent: Agent, query: str, temperature: float) -> Pieces:
    """An answer in one piece."""
    ((reply,),) = await agent.respond([query], 1, temperature)
    yield reply
