"""The server: verdicts on answers, and answers that are judged while they are written.

What it takes and says is in :mod:`jaxhal.serve.wire`, and in ``/openapi.json``.
"""

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import prometheus_client
from fastapi import Depends, FastAPI, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.middleware import Middleware

import jaxhal
from jaxhal.datasets.jsonl import Row, read_rows, to_row, to_turn
from jaxhal.models.lm import LM
from jaxhal.reporting.page import whole
from jaxhal.reporting.report import Report
from jaxhal.scoring import verdicts
from jaxhal.scoring.fitting import Fitted
from jaxhal.serve import LARGEST
from jaxhal.serve.failing import HANDLERS, failing
from jaxhal.serve.judge import Judge
from jaxhal.serve.limits import Fault, Limited, check_token, heard, problem
from jaxhal.serve.openai import Form, unjudged
from jaxhal.serve.response import Ended, News, Wish
from jaxhal.serve.upstream import Upstream
from jaxhal.serve.watched import Watched
from jaxhal.serve.wire import (
    LINES,
    LINES_BODY,
    VERSION,
    About,
    ChatRequest,
    CompletionRequest,
    Deciding,
    Failure,
    Ready,
    Verdict,
    VerdictRequest,
    Verdicts,
)
from jaxhal.serve.writer import Busy, Failed, Writer, riding
from jaxhal.types import Example

if TYPE_CHECKING:
    from jaxhal.serve.proxy import Service

_T = TypeVar("_T")
# What a page cannot say of itself: that no other may show it, nor learn of it.
_SHUT = {
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_FAILURES: dict[int | str, Any] = {
    code: {"model": Failure} for code in (400, 401, 404, 413, 415, 421, 503)
}


class Reader(NamedTuple):
    """A model that judges answers, and writes them."""

    lm: LM
    judge: Judge
    writer: Writer

    @classmethod
    def of(cls, lm: LM, chosen: list[Fitted], most: int = 16) -> "Reader":
        """One with detectors of :func:`jaxhal.scoring.detection.resolve_for`."""
        return cls(lm, Judge(lm, chosen), Writer(lm, riding(chosen), most=most))

    @property
    def about(self) -> Deciding:
        chosen, rides = self.judge.chosen, self.writer.detector
        decides = verdicts.decider(chosen)
        return Deciding(
            name=self.lm.name,
            decides=decides and decides.detector.name,
            because=verdicts.described(chosen, self.lm),
            rides=rides and rides.detector.name,
            detectors={o.detector.name: o.detector.summary for o in chosen},
            context=self.lm.config.context_length,
        )

    def close(self) -> None:
        self.writer.close()
        self.judge.close()


class Server:
    """The application and what it holds.

    Args:
      readers: models by name; the first is used where a request names none.
      upstream: another engine that writes instead.
      watchdog: has an agent answer conversations, and guards it.
      max_tokens: of an answer, where a request does not say.
      token: that a client has to show; ``None`` asks for none, and then answers only by
        its own name, as :class:`jaxhal.serve.limits.Limited` has it.
      largest: bytes of a request's body.
    """

    def __init__(
        self,
        readers: Mapping[str, Reader],
        *,
        upstream: Upstream | None = None,
        watchdog: "Service | None" = None,
        max_tokens: int = 256,
        token: str | None = None,
        largest: int = LARGEST,
    ):
        check_token(token=token)
        if watchdog is not None and watchdog.token != token:
            raise ValueError("token is not that of the watchdog; give both the same")
        self.readers, self.upstream = dict(readers), upstream
        self.watchdog, self.max_tokens = watchdog, max_tokens
        self.token, self.largest = token, largest
        self.watched = Watched()
        self.watched.gauge("writing", "Answers being written.", lambda: self._load[0])
        self.watched.gauge("waiting", "Answers that wait.", lambda: self._load[1])

    def app(self, host: str = "127.0.0.1") -> FastAPI:
        """As an ASGI application, for the address that it is served at."""
        own = host if self.token is None else None
        app = FastAPI(
            title="jaxhal",
            version=VERSION,
            summary="Verdicts on what language models write.",
            docs_url=None,
            redoc_url=None,
            middleware=[
                Middleware(self.watched.middleware),
                Middleware(Limited, largest=self.largest, host=own),
            ],
            exception_handlers=HANDLERS,
        )
        locked: Any = {
            "dependencies": [Depends(self._allow)],
            "responses": _FAILURES,
        }
        unset = {"response_model_exclude_unset": True}
        app.get("/", include_in_schema=False)(_page)
        app.post("/v1/verdict", response_model=Verdict | Verdicts, **unset, **locked)(
            self.verdict
        )
        body = {"openapi_extra": {"requestBody": LINES_BODY}}
        app.post("/v1/verdict/lines", response_model=None, **body, **locked)(self.lines)
        if self.watchdog is not None:
            for one in self.watchdog.routes():  # so that they are counted by path
                how: Any = {"methods": one.methods, "include_in_schema": False}
                app.add_api_route(one.path, one.endpoint, **how)
        else:
            writes = (self.chat, self.complete, self.models)
            if (up := self.upstream) is not None:
                writes = self.chat_upstream, self.complete_upstream, up.models
            chat, complete, models = writes
            app.post("/v1/chat/completions", response_model=None, **locked)(chat)
            app.post("/v1/completions", response_model=None, **locked)(complete)
            app.get("/v1/models", response_model=None, **locked)(models)
        app.get("/v1/about", **locked)(self.about)
        app.get("/health")(_health)
        app.get("/ready", responses={503: {"model": Ready}})(self.ready)
        app.get("/metrics", response_class=Response, **locked)(self.metrics)
        return app

    # --- verdicts -------------------------------------------------------------------

    async def verdict(self, want: VerdictRequest, request: Request) -> Any:
        """The verdict on an answer, or on many, each with an error of its own."""
        reader = self._reader(want.model)
        rows = [
            to_row(number, "row", lambda fields=fields: fields)
            for number, fields in enumerate(want.answers, 1)
        ]
        if want.rows is None and rows[0].error is not None:
            raise Fault(400, rows[0].error.removeprefix("row 1: "))
        said = self._said(reader, rows, want.tokens, want.all, want.relevance)
        found = await heard(request, _listed(said))
        if want.rows is None:
            if found[0]["error"] is not None:
                raise Fault(400, found[0]["error"])
            return found[0]
        return {"object": "list", "data": found}

    async def lines(
        self,
        request: Request,
        model: Annotated[str | None, Query()] = None,
        tokens: Annotated[bool, Query()] = False,
        all: Annotated[bool, Query()] = False,
        relevance: Annotated[bool, Query()] = False,
    ) -> StreamingResponse:
        """Verdicts on JSON Lines of answers, a line each as they are done."""
        # What a web page may send anywhere without asking is not taken.
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        if kind.lower() not in LINES:
            why = f"the body is {kind[:80] or 'of no type'}; send {' or '.join(LINES)}"
            raise Fault(415, why)
        reader, raw = self._reader(model), await request.body()
        rows = [*read_rows(raw.splitlines())]
        reader.judge.check(len(rows))
        said = self._said(reader, rows, tokens, all, relevance)

        async def written() -> AsyncIterator[str]:
            try:
                async for one in said:
                    yield f"{json.dumps(one)}\n"
            except (Busy, Failed) as error:
                yield f"{json.dumps(problem(str(error), 'internal_error'))}\n"

        return StreamingResponse(written(), media_type=LINES[0])

    async def _said(
        self,
        reader: Reader,
        rows: list[Row],
        tokens: bool,
        every: bool,
        relevance: bool,
    ) -> AsyncIterator[dict[str, Any]]:
        """What is said of rows, in order."""
        good = [row.example for row in rows if row.example is not None]
        reports = reader.judge.reports(good, relevance)
        for row in rows:
            if row.example is None:
                yield {"id": row.id, **unjudged(row.error)}
                continue
            report = await anext(reports)
            self._count(report)
            found = report.to_dict(every)
            if tokens:
                found["tokens"] = [token._asdict() for token in report.tokens]
            yield found

    # --- answers --------------------------------------------------------------------

    async def chat(self, want: ChatRequest, request: Request) -> Response:
        """Goes on with a conversation, in the form of OpenAI's chat completions."""
        try:
            turns = tuple(
                to_turn(f"messages[{number}]", message.model_dump())
                for number, message in enumerate(want.messages)
            )
        except ValueError as error:
            raise Fault(400, str(error)) from error
        limit = want.max_completion_tokens or want.max_tokens
        return await self._write(want, {"turns": turns}, limit, request)

    async def complete(self, want: CompletionRequest, request: Request) -> Response:
        """Goes on with a text as it is, in the form of OpenAI's completions."""
        prompt = {"prompt": want.prompt, "templated": True}
        return await self._write(want, prompt, want.max_tokens, request)

    async def _write(
        self,
        want: ChatRequest | CompletionRequest,
        prompt: dict[str, Any],
        limit: int | None,
        request: Request,
    ) -> Response:
        reader, on = self._reader(want.model), want.stop_on
        try:
            wish = Wish(
                Example("-", **prompt),
                self.max_tokens if limit is None else limit,
                temperature=1.0 if want.temperature is None else want.temperature,
                top_p=1.0 if want.top_p is None else want.top_p,
                seed=None if want.seed is None else want.seed % 2**32,
                stop=want.stops,
                most=on and on.probability,
                anew=on is not None and on.then == "regenerate",
            )
            told = await reader.writer.write(wish)
        except ValueError as error:
            raise Fault(400, str(error)) from error
        told = self._timed(told)
        form = Form(want, reader.lm.name, reader.lm.require_tokenizer(), told)
        if want.stream:
            return StreamingResponse(
                failing(form.events()), media_type="text/event-stream"
            )
        return JSONResponse(await heard(request, form.whole()))

    async def _timed(
        self, told: AsyncIterator[News | Ended]
    ) -> AsyncIterator[News | Ended]:
        began, first = time.perf_counter(), True
        async for one in told:
            if first:
                self.watched.first.observe(time.perf_counter() - began)
                first = False
            if isinstance(one, News):
                self.watched.tokens.inc(len(one.tokens))
            elif one.report is not None:
                self._count(one.report)
            yield one

    async def chat_upstream(self, body: dict[str, Any], request: Request) -> Response:
        """Has the engine go on with a conversation, and says the verdict on it."""
        return await self._upstream("chat/completions", body, request)

    async def complete_upstream(
        self, body: dict[str, Any], request: Request
    ) -> Response:
        """Has the engine go on with a text, and says the verdict on it."""
        return await self._upstream("completions", body, request)

    async def _upstream(
        self, kind: str, body: dict[str, Any], request: Request
    ) -> Response:
        assert self.upstream is not None
        if "stop_on" in body:
            raise Fault(400, "'stop_on' needs a reader that writes; leave it out")
        return await heard(request, self.upstream.write(kind, body, self._count))

    def _count(self, report: Report) -> None:
        self.watched.verdicts.labels(report.verdict or "none").inc()

    # --- about the server -----------------------------------------------------------

    async def models(self) -> dict[str, Any]:
        """The readers, in the form of OpenAI's models."""
        each = {"object": "model", "created": 0, "owned_by": "jaxhal"}
        return {"object": "list", "data": [{"id": n, **each} for n in self.readers]}

    async def about(self) -> About:
        """The readers, and what judges with them."""
        each = [reader.about for reader in self.readers.values()]
        return About(jaxhal=jaxhal.__version__, contract=VERSION, readers=each)

    async def ready(self, response: Response) -> Ready:
        """Whether every reader has a detector that decides, and a bound has points."""
        writing, waiting = self._load
        abouts = [reader.about for reader in self.readers.values()]
        lacks = [one.because for one in abouts if not one.decides]
        if self.watchdog is not None:
            store = self.watchdog.watchdog.store
            try:
                if not await asyncio.to_thread(len, store):
                    lacks.append("the bound holds no point: no query will be near it")
            except RuntimeError as error:
                lacks.append(str(error))
        if not lacks:
            return Ready(status="ready", writing=writing, waiting=waiting)
        response.status_code = 503
        why = "; ".join(lacks)
        return Ready(status="unready", why=why, writing=writing, waiting=waiting)

    async def metrics(self) -> Response:
        """Counts and times, as Prometheus reads them."""
        text = await asyncio.to_thread(self.watched.latest)
        if self.watchdog is not None:
            text += await asyncio.to_thread(self.watchdog.latest)
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    @property
    def _load(self) -> tuple[int, int]:
        """Answers being written, and what waits to be written or judged."""
        loads = [reader.writer.load for reader in self.readers.values()]
        judged = sum(reader.judge.waiting for reader in self.readers.values())
        return sum(one for one, _ in loads), judged + sum(more for _, more in loads)

    def _reader(self, name: str | None) -> Reader:
        if name is None:
            return next(iter(self.readers.values()))
        if name not in self.readers:
            known = ", ".join(self.readers)
            why = f"no model {name[:80]!r} is served; use {known}"
            raise Fault(404, why, "model_not_found")
        return self.readers[name]

    async def _allow(
        self,
        shown: Annotated[
            HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))
        ],
    ) -> None:
        if self.token is None:
            return
        said = "" if shown is None else shown.credentials
        if not hmac.compare_digest(said.encode(), self.token.encode()):
            raise Fault(401, "no token, or a wrong one", "authentication_error")


async def _listed(each: AsyncIterator[_T]) -> list[_T]:
    return [one async for one in each]


async def _health() -> dict[str, str]:
    """That the server lives."""
    return {"status": "ok"}


async def _page() -> HTMLResponse:
    return HTMLResponse(whole("serve"), headers=_SHUT)
