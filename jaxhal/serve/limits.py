"""What clients may take of a server: bytes, seconds, connections, and names of it.

:class:`Limited` wraps any ASGI application, :data:`OPTIONS` are for uvicorn, which by
itself waits for ever for the rest of a request, and for a client to read.
"""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

import h11
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxhal.llm.hosts import Server, address, place_of

# Seconds from a connection, or the last response on it, to the end of the next one's
# head (uvicorn closes one that is silent for 5 seconds after a response); from there to
# the end of its body; that a client has to take what is sent to it, 48 KiB at a time.
_HEAD, _BODY, _UNREAD = 10.0, 30.0, 30.0
# Connections from one address, and from all; half of what the process may open, where
# that is less.
_PER_CLIENT, _CONNECTIONS = 256, 1024
# Characters of a path that an error shows.
_PATH = 80
# Of one read, so many pieces of bodies; each takes as long as a larger one.
_PIECES = 2000

_T = TypeVar("_T")


class Limited:
    """An ASGI application that is told only what is small enough, and meant for it.

    A body over ``largest`` bytes raises starlette's ``HTTPException`` 413 where it is
    read.  A request by a name that is not the server's is answered 421, as a web page
    may make its own name point here.  A server that listens at ``host`` owns that name,
    ``localhost`` and loopback addresses, and all addresses in numbers where it listens
    at all of them; ``None`` lets any name through, as is safe where a token is asked.
    """

    def __init__(self, app: Any, *, largest: int, host: str | None):
        self.app, self.largest, self.host = app, largest, host

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        named = dict(scope["headers"]).get(b"host", b"").decode("latin-1")

        async def refuse(status: int, why: str, kind: str) -> None:
            await JSONResponse(problem(why, kind), status)(scope, receive, send)

        if self.host is not None and not is_own(named, self.host):
            why = f"{named[:80]!r} is not this server's name; use localhost, or a token"
            await refuse(421, why, "invalid_request_error")
            return
        size, begun = 0, False

        async def counted() -> Any:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.largest:
                raise HTTPException(413, f"the request is over {self.largest} bytes")
            return message

        async def noted(message: Any) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, counted, noted)
        except asyncio.CancelledError:  # the server ends, and has waited long enough
            if not begun:
                await refuse(503, "the server is stopping", "unavailable_error")


class Fault(HTTPException):
    """What is wrong with a request: the response's status, and the error's kind."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error"):
        shown = {"WWW-Authenticate": "Bearer"} if status == 401 else None
        super().__init__(status, message, shown)
        self.kind = kind


async def heard(request: Request, work: Awaitable[_T]) -> _T:
    """What some work gives; given up when the client has left."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise Fault(499, "the client left")
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


def check_token(**tokens: str | None) -> None:
    """Raises ValueError on a token that no client could show; ``None`` is none."""
    for name, token in tokens.items():
        if token is None:
            continue
        if not token.strip():
            raise ValueError(f"{name} is empty; give one, or leave it out")
        if not (token.isascii() and token.isprintable() and token == token.strip()):
            raise ValueError(
                f"{name} holds characters that a header cannot, or space around it; "
                "give printable ASCII"
            )


def problem(message: str, kind: str) -> dict[str, Any]:
    """What is wrong, in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def reason(error: HTTPException, method: str, path: str) -> str:
    """What is wrong with a request; the framework's two words for a path become more.

    >>> reason(HTTPException(405, headers={"Allow": "POST"}), "GET", "/v1/verdict")
    'GET is not answered at /v1/verdict; send POST'
    """
    if isinstance(error, Fault) or error.status_code not in (404, 405):
        return str(error.detail)
    path = path[:_PATH]
    if error.status_code == 404:
        return f"nothing is served at {path}; compare it with the documentation"
    allowed = (error.headers or {}).get("Allow", "another method")
    return f"{method} is not answered at {path}; send {allowed}"


def is_own(named: str, host: str) -> bool:
    """Whether a request's Host names a server that listens at ``host``."""
    try:
        found = place_of(named)[0].strip("[]")
    except ValueError:
        return False
    everywhere = (ip := address(host)) is not None and ip.is_unspecified
    return (
        found == host.lower().strip("[]")
        or Server("http", found, 80).is_local
        or (everywhere and address(found) is not None)
    )


def _connections() -> int:
    """How many connections may be open; what answers them opens files too."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return _CONNECTIONS
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = soft == resource.RLIM_INFINITY
    return _CONNECTIONS if endless else min(_CONNECTIONS, max(1, soft // 2))


class Connection(h11.Connection):
    pieces = 0

    def next_event(self) -> Any:
        event = super().next_event()
        self.pieces += isinstance(event, h11.Data)
        if self.pieces > _PIECES:
            raise h11.RemoteProtocolError("too many pieces at once")
        return event


class Protocol(H11Protocol):
    """A request that is late is answered 408; who does not read is hung up on.

    Where there are too many connections, the one that has waited longest for the rest
    of a request makes way, or else the new one is answered 503.
    """

    waits: str | None = None
    since = 0.0
    _late: Any = None
    _unread: Any = None

    def connection_made(self, transport: Any) -> None:
        size = self.config.h11_max_incomplete_event_size
        whole = {} if size is None else {"max_incomplete_event_size": size}
        self.conn = Connection(h11.SERVER, **whole)
        super().connection_made(transport)
        self._watch()
        self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in filter(None, (self._late, self._unread)):
            timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.conn.pieces = 0  # pyright: ignore[reportAttributeAccessIssue]
        super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        if self._is_answering():  # nothing else can be said any more
            self.transport.abort()
        elif self.conn.our_state is h11.SEND_RESPONSE or self.cycle is None:
            super().send_400_response(msg)
        else:
            self.transport.close()
        self._leave()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(_UNREAD, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def _leave(self) -> None:
        """Has the application hear at once that nobody listens any more."""
        if self.cycle and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _is_answering(self) -> bool:
        cycle = self.cycle
        return bool(cycle and cycle.response_started and not cycle.response_complete)

    def _watch(self) -> None:
        """Sets the clock for what the client owes, if it owes something else."""
        cycle = self.cycle
        waits = "body" if cycle and cycle.more_body else None
        if cycle is None or cycle.response_complete:
            waits = "head"
        if waits == self.waits:
            return
        self.waits, self.since = waits, self.loop.time()
        if self._late is not None:
            self._late.cancel()
        if waits is not None:
            seconds = _HEAD if waits == "head" else _BODY
            late = "408 Request Timeout"
            self._late = self.loop.call_later(seconds, self.hang_up, late)

    def _make_room(self) -> None:
        everyone: list[Any] = [*self.connections]
        host = (self.client or [None])[0]
        mine = [o for o in everyone if o.client and o.client[0] == host]
        crowd = mine if len(mine) > _PER_CLIENT else everyone
        if crowd is everyone and len(everyone) <= _connections():
            return
        waiting = [one for one in crowd if one.waits and one is not self]
        oldest = min(waiting, key=lambda one: one.since, default=self)
        oldest.hang_up("503 Service Unavailable")
        self.connections.discard(oldest)

    def hang_up(self, status: str) -> None:
        """Ends the connection, and says why where that can still be heard."""
        unheard = self.transport.get_write_buffer_size()
        if self.transport.is_closing() or unheard or self._is_answering():
            self.transport.abort()
            return
        self._leave()
        about = "Connection: close\r\nContent-Length: 0\r\n\r\n"
        self.transport.write(f"HTTP/1.1 {status}\r\n{about}".encode())
        self.transport.close()


#: What ``uvicorn.run`` or ``uvicorn.Config`` is given to keep limits.
OPTIONS: dict[str, Any] = {"http": Protocol, "ws": "none"}
