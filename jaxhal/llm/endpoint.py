"""Asking a language model behind an OpenAI-compatible address, each question once."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import re
import ssl
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxhal.io.extras import need
from jaxhal.io.files import replacing
from jaxhal.io.showing import quoted, shown
from jaxhal.io.threads import at_once
from jaxhal.llm import hosts
from jaxhal.models.registry import cache_dir, private_cache
from jaxhal.texts import storable

#: Bytes of what a server sends in reply to one request, its pieces together.
MOST_BYTES = 64 * 2**20
#: Seconds that a response may take at least, however little comes at a time.
PATIENCE = 600.0
# What a server that gets no key is given, since the client insists on one, and the
# headers it gets: the client adds others that the environment holds.
_NO_KEY = "none"
_HEADERS = {"host", "connection", "user-agent"}
_HEADERS |= {"accept", "accept-encoding", "content-type", "content-length"}
# By where a reply is kept, one asks at a time.
_ASKING: "weakref.WeakValueDictionary[Path, threading.Lock]"
_ASKING, _GUARD = weakref.WeakValueDictionary(), threading.Lock()
# How often a model is asked for a reply that can be used.
_ATTEMPTS = 3
# Of a reply that an error shows.
_SHOWN = 80
# Chat models like to hand over JSON as a block of code.
_FENCED = re.compile(r"\s*```(?:json)?\n(.*)\n```\s*", re.DOTALL)


def json_object(reply: str) -> dict[str, Any]:
    """The JSON object that a reply is, fenced as code or not; ValueError where none."""
    fenced = _FENCED.fullmatch(reply)
    try:
        found = json.loads(fenced[1] if fenced else reply)
    except (RecursionError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise ValueError("it is not one JSON object and nothing else")
    return found


class NoReply(Exception):
    """A question that was left without a reply of use; another one may get one."""


class Unanswered(NoReply, RuntimeError):
    """The server gave no answer, after the client's retries."""


class Useless(NoReply, ValueError):
    """What the server said could not be used."""


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """A chat model at an address, static by value.

    The key is $OPENAI_API_KEY; who may have it (``keyed``) says
    :mod:`jaxhal.llm.hosts`, which raises :class:`~jaxhal.llm.hosts.Refused` at a server
    that only data names.

    Args:
      url: the base address, such as ``http://localhost:8000/v1``.
      timeout: seconds that one attempt may wait for the server; three are made.
    """

    url: str
    model: str
    timeout: float = 60.0
    keyed: bool = dataclasses.field(init=False, repr=False)

    def __post_init__(self):
        need("prompt")
        object.__setattr__(self, "keyed", hosts.keyed(self.url))
        if not self.model:
            raise ValueError(f"model is {self.model!r}; give its name at {self.url}")
        if not 0 < self.timeout < math.inf:
            raise ValueError(f"timeout is {self.timeout}; give seconds, more than 0")

    @property
    def name(self) -> str:
        return f"{self.model} at {self.url}"

    def ask(self, question: str, accept: Callable[[str], object] = str) -> str:
        """The reply at temperature 0; asked once, then found in the cache.

        Only a reply on which ``accept`` raises no ValueError is kept.  Another is asked
        for again, up to twice, with what was wrong added to the question.

        Raises:
          NoReply: where this question is left without a reply of use.
          RuntimeError: where every question would be: a wrong key, address or model.
        """
        with _alone(self.path(question)):  # who asks the same waits for this reply
            return self._answered(question, accept)

    def _answered(self, question: str, accept: Callable[[str], object]) -> str:
        kept = self._kept(question)
        if kept is not None and _fault(kept, accept) is None:
            return kept
        asked, reply, fault = question, "", ""
        for _ in range(_ATTEMPTS):
            reply = self._ask(asked)
            fault = _fault(reply, accept)
            if fault is None:
                self._keep(question, asked, reply)
                return reply
            asked = (
                f"{question}\n\nYour last reply to this was of no use: {fault}. Reply "
                "again, in the form asked for."
            )
        raise Useless(
            f"{self.model!r} replied {reply[:_SHOWN]!r}, of no use in {_ATTEMPTS} "
            f"attempts: {fault}; leave this one out, or choose another model"
        )

    def ask_all(
        self, questions: Iterable[str], accept: Callable[[str], object] = str
    ) -> list[str]:
        """The reply to each question, some of them asked at a time; see :meth:`ask`.

        All are asked, so that replies are kept, before the first :class:`NoReply` is
        raised; what every question would meet with ends it at once.
        """

        def ask(question: str) -> str | NoReply:
            try:
                return self.ask(question, accept)
            except NoReply as error:
                return error

        every = list(questions)
        fresh = list(dict.fromkeys(every))
        known = dict(zip(fresh, at_once(ask, fresh), strict=True))
        for reply in known.values():
            if isinstance(reply, NoReply):
                raise reply
        return [known[one] for one in every]

    def path(self, question: str) -> Path:
        """Where the reply is kept, ``$JAXHAL_CACHE/replies/<hash>.json``."""
        request = json.dumps(self._request(question))
        name = hashlib.sha256(request.encode()).hexdigest()[:32]
        return cache_dir() / "replies" / f"{name}.json"

    def _kept(self, question: str) -> str | None:
        path = self.path(question)
        if not path.is_file():
            return None
        try:
            return str(json.loads(path.read_text("utf-8"))["reply"])
        except (KeyError, TypeError, ValueError) as error:
            raise Useless(f"{path} holds no reply; delete it to ask again") from error

    def _keep(self, question: str, asked: str, reply: str) -> None:
        path = self.path(question)
        private_cache(path.parent.name)
        with replacing(path, private=True) as file:
            json.dump(self._request(asked) | {"reply": reply}, file, indent=1)

    def _request(self, asked: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": asked}]
        return {"endpoint": self.url, "model": self.model, "messages": messages}

    def _ask(self, asked: str) -> str:
        openai = self.client_library()
        try:
            # A client of its own each time leaves no connection open behind it.
            with self.client() as client:
                messages = self._request(asked)["messages"]
                answer = client.chat.completions.create(
                    model=self.model, messages=messages, temperature=0
                )
        # A reply nested too deep for a parser is malformed as well.
        except (openai.OpenAIError, ValueError, RecursionError) as error:
            # What would be said to every question is not this one's error.
            kind = RuntimeError if isinstance(error, self.refusals()) else Unanswered
            raise kind(
                f"{self.url} gave no answer from {self.model!r} "
                f"({hosts.hidden(error)}); {self.remedy}, then run the same again"
            ) from None
        if isinstance(answer, str):  # a page
            raise RuntimeError(
                f"{self.url} answers with something other than a chat completion; give "
                "the base address of its API, which often ends in /v1"
            )
        try:
            reply, _ = content_of(answer)
            if isinstance(reply, str):
                return storable(reply)
            raise ValueError(f"it answered without text from {self.model!r}")
        except ValueError as error:
            raise Unanswered(
                f"{self.url}: {error}; run the same again, or choose another model"
            ) from error

    def client(self, retries: int = 2, turn: Any = None) -> Any:
        """A client whose requests and responses are looked at.

        With ``turn``, a coroutine function that every request waits for first, it is
        asynchronous.
        """
        openai = self.client_library()

        async def begins(request: Any) -> None:
            self._bared(request)
            await turn()

        async def ends(response: Any) -> None:
            self._bounded(response)

        kind, http = openai.OpenAI, openai.DefaultHttpxClient
        hooks: dict[str, Any] = {"request": [self._bared], "response": [self._bounded]}
        if turn is not None:
            kind, http = openai.AsyncOpenAI, openai.DefaultAsyncHttpxClient
            hooks = {"request": [begins], "response": [ends]}
        near = hosts.server_of(self.url).is_local  # no proxy should see it
        with by_environment():
            connecting = http(
                event_hooks=hooks,
                verify=trusted(),
                follow_redirects=False,
                trust_env=not near,
            )
        return kind(
            base_url=self.url,
            api_key=self.key(),
            timeout=self.timeout,
            max_retries=retries,
            http_client=connecting,
        )

    def _bared(self, request: Any) -> None:
        """Takes from a request whatever a server without the key should not have."""
        if self.keyed:
            return
        for name in {*request.headers}:
            if name not in _HEADERS and not name.startswith("x-stainless-"):
                del request.headers[name]
        request.headers["Authorization"] = f"Bearer {_NO_KEY}"

    def _bounded(self, response: Any) -> None:
        """Ends one that redirects, is too much or too slow in the client's error."""
        openai = self.client_library()
        if response.has_redirect_location:
            raise openai.PermissionDeniedError(
                f"it sends to {shown(response.headers['location'])}, where nothing is "
                "sent; give that address if you trust it",
                response=response,
                body=None,
            )
        read, later = response.iter_bytes, response.aiter_bytes
        size, ends = 0, time.monotonic() + self.patience

        def take(piece: bytes) -> bytes:
            nonlocal size
            size += len(piece)
            if size > MOST_BYTES:
                raise openai.OpenAIError(f"the server sent over {MOST_BYTES} bytes")
            if time.monotonic() > ends:
                late = f"no whole answer in {self.patience:.0f} seconds"
                raise openai.OpenAIError(late)
            return piece

        async def bounded(chunk_size: int | None = None) -> AsyncIterator[bytes]:
            async for piece in later(chunk_size):
                yield take(piece)

        response.iter_bytes = lambda chunk_size=None: map(take, read(chunk_size))
        response.aiter_bytes = bounded

    @property
    def patience(self) -> float:
        """Seconds that a response may take, even if something comes all the time."""
        return max(PATIENCE, 10 * self.timeout)

    def client_library(self) -> Any:
        """The ``openai`` package."""
        import openai

        return openai

    def refusals(self) -> tuple[type[Exception], ...]:
        """The client's errors that every question would meet with."""
        openai = self.client_library()
        return (
            openai.AuthenticationError,
            openai.PermissionDeniedError,
            openai.NotFoundError,
        )

    def key(self) -> str:
        """What the server is told of who asks."""
        key = hosts.key() if self.keyed else ""
        if self.keyed and not key and hosts.server_of(self.url).is_openai:
            raise RuntimeError(
                f"$OPENAI_API_KEY is not set, which {self.url} needs; set it, or give "
                "the address of another server"
            )
        return key or _NO_KEY

    @property
    def remedy(self) -> str:
        """What to do when it does not answer."""
        known = "check the address, the model's name and $OPENAI_API_KEY"
        if self.keyed or not os.environ.get("OPENAI_API_KEY"):
            return known
        host = hosts.server_of(self.url).host
        return (
            f"{known}, which it was not given: that takes https, or this machine, and "
            f"{host} in ${hosts.VARIABLE} where data names it"
        )


@contextlib.contextmanager
def by_environment() -> Iterator[None]:
    """Names the variable that is wrong where no client can be made."""
    import httpx2

    try:
        yield
    except OSError as error:
        raise RuntimeError(
            f"$SSL_CERT_FILE is {quoted(os.environ.get('SSL_CERT_FILE'))}, where no "
            f"certificates can be read ({error}); give a PEM file of them, or unset it"
        ) from error
    except (ImportError, ValueError, httpx2.InvalidURL) as error:
        kinds = "all_proxy", "https_proxy", "http_proxy"
        names = [f"${name}" for name in os.environ if name.lower() in kinds]
        raise RuntimeError(
            f"the proxy in {' or '.join(names)} cannot be used ({error}); give one "
            "that begins with http://, or unset it"
        ) from error


@functools.cache
def trusted() -> ssl.SSLContext:
    """Who is trusted as a server: what clients use by default, read from disk once."""
    import httpx2  # what openai's clients are made of

    return httpx2.create_ssl_context()


def _alone(path: Path) -> threading.Lock:
    with _GUARD:
        return _ASKING.setdefault(path, threading.Lock())


def content_of(answer: Any) -> tuple[Any, bool]:
    """The text of a completion, cut or not; ValueError where it is something else."""
    with contextlib.suppress(AttributeError, IndexError, TypeError):
        (choice, *_) = answer.choices
        return choice.message.content, is_cut(choice)
    raise ValueError("the server sent no chat completion")


def is_cut(choice: Any) -> bool:
    """Whether an answer, or a piece of one, ended for want of tokens."""
    return getattr(choice, "finish_reason", None) == "length"


def endpoint_of(url: str | None, model: str | None) -> Endpoint | None:
    """The endpoint that is asked in place of the reader; ``None`` for the reader."""
    if url is None and model is None:
        return None
    if url is None or model is None:
        raise ValueError(
            f"endpoint is {url!r} and model is {model!r}; give both, or neither to ask "
            "the reader"
        )
    return Endpoint(url, model)


def _fault(reply: str, accept: Callable[[str], object]) -> str | None:
    try:
        accept(reply)
    except ValueError as error:
        return str(error)
    return None if reply.strip() else "it is empty"
