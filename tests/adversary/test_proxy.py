"""The watchdog's proxy stands what clients may do to it, and is not talked past."""

import asyncio
import base64
import contextlib
import gc
import json
import logging
import os
import socket
import stat
import statistics
import sys
import threading
import time

import hypothesis
import numpy as np
import pytest
import uvicorn
from fuzz_requests import request, told
from hypothesis import strategies as st
from test_encoding import write, write_pooling
from test_watchdog import KNOWN, client, proxy, running, send, user, watchdog

from chat_server import serving
from jaxhal.llm.endpoint import Endpoint
from jaxhal.reading.store import Store
from jaxhal.serve import limits
from jaxhal.serve.limits import Fault, Limited, is_own
from jaxhal.serve.proxy import Service
from jaxhal.serve.proxy_wire import asked
from jaxhal.watchdog import EndpointAgent, ExactStore, Guard, Passages, Reply
from jaxhal.watchdog.agents import Gate
from jaxhal.watchdog.conversation import Conversation, looked_at
from jaxhal.watchdog.guarding import BLOCKED

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = write(tmp_path_factory.mktemp("encoder"))
    write_pooling(folder, normalize=True, mean=True)
    return str(folder)


@pytest.fixture(scope="module")
def served(encoder):
    with proxy(Service(watchdog(encoder, Guard(similarity=0.2)))) as port:
        yield port


@contextlib.contextmanager
def alive(port):
    """``/health`` answers all the while, and no slower than the machine has to."""
    over, times = threading.Event(), []

    def look(count):
        for _ in range(count):
            began = time.perf_counter()
            assert send(port, "GET", "/health")[0] in (200, 503)
            times.append(time.perf_counter() - began)

    def probe():
        while not over.is_set():
            look(1)
            over.wait(0.02)

    look(5)
    usual = statistics.median(times)
    times.clear()
    thread = threading.Thread(target=probe)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        look(5)  # one slow answer of few is no median
    assert statistics.median(times) < max(0.1, 5 * usual), times
    assert max(times) < max(3, 20 * usual), times


def ask(port, messages, **more):
    status, raw = send(port, "POST", CHAT, json.dumps({"messages": messages, **more}))
    return status, json.loads(raw)


def opened(port, raw=b""):
    line = socket.create_connection(("127.0.0.1", port), timeout=20)
    line.sendall(raw)
    return line


def heard(line):
    """What comes before the server hangs up."""
    raw = b""
    with contextlib.suppress(ConnectionError):
        while piece := line.recv(65536):
            raw += piece
    return raw


HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_more_messages_than_anybody_says(served):
    with alive(served):
        status, found = ask(served, user("a") * 30_000)
    assert status == 400
    assert found["error"]["message"] == "'messages' holds 30000, over 1000"
    with pytest.raises(Fault, match="holds 1001, over 1000"):
        asked({"messages": user("a") * 1001})


def test_as_many_messages_as_there_may_be(encoder, tmp_path, monkeypatch):
    dog = watchdog(encoder)
    with serving("same", tmp_path, monkeypatch) as server:
        dog.agent = EndpointAgent(Endpoint(server.url, "m"))
        with proxy(Service(dog)) as port:
            ask(port, user("w1"))  # compiles
            with alive(port):
                began = time.perf_counter()
                status, _ = ask(port, user("w1") * 1000)
                assert status == 200 and time.perf_counter() - began < 20
        assert len(server.asked[-1][1]["messages"]) == 1000


def test_what_is_said_is_bounded(served):
    with alive(served):
        status, found = ask(served, [*user("w1 w2 " * 150_000), *user("w3")])
        assert status == 400 and "characters, over 50000" in found["error"]["message"]
        names = {f"x{n}": n for n in range(60_000)}
        assert ask(served, user("w3"), **names)[0] == 200
        assert ask(served, [*user("w1 w2 " * 3000), *user("w3")])[0] == 200


def test_tiny_chunks(served):
    raw = HEAD + "Transfer-Encoding: chunked\r\n\r\n" + "1\r\n[\r\n" * 200_000
    with alive(served):
        assert told(served, raw.encode()) in (400, None)


def test_half_requests_lock_nobody_out(encoder, monkeypatch):
    for name, value in {"_HEAD": 1.0, "_BODY": 1.0, "_PER_CLIENT": 20}.items():
        monkeypatch.setattr(limits, name, value)
    service = Service(watchdog(encoder))
    halves = [HEAD.encode(), b"", (HEAD + "Content-Length: 9\r\n\r\n{").encode()]
    with running(service) as (server, port), contextlib.ExitStack() as stack:
        with alive(port):
            lines = [opened(port, halves[n % 3]) for n in range(60)]
            for line in lines:
                stack.enter_context(line)
        said = [heard(line)[:12] for line in lines]
        assert set(said) <= {b"HTTP/1.1 408", b"HTTP/1.1 503", b""}
        assert said.count(b"HTTP/1.1 408") >= 10
        assert send(port, "GET", "/health")[0] == 200


def test_a_request_that_trickles_is_late(encoder, monkeypatch):
    for name in ("_HEAD", "_BODY"):
        monkeypatch.setattr(limits, name, 0.5)
    with proxy(Service(watchdog(encoder))) as port:
        for raw in (
            b"GET / HTTP/1.1\r\nx: ",
            HEAD.encode() + b"Content-Length: 99\r\n\r\n",
        ):
            with opened(port, raw) as line, contextlib.suppress(ConnectionError):
                line.settimeout(0.1)
                began = time.perf_counter()
                while time.perf_counter() - began < 15:
                    line.sendall(b" ")
                    with contextlib.suppress(TimeoutError):
                        assert line.recv(99)[:12] in (b"HTTP/1.1 408", b"")
                        break
            assert time.perf_counter() - began < 15


class Slow:
    """Says as much as it is told to, or waits; to so many at a time."""

    name = "slow"

    def __init__(self, pieces=0, most=8):
        self.pieces, self.gate, self.go = pieces, Gate(most), threading.Event()

    async def respond(self, queries, n=1, temperature=1.0):
        while not self.go.is_set():
            await asyncio.sleep(0.02)
        return [[Reply("sample")] * n for _ in queries]

    async def stream(self, query, temperature=1.0):
        async with self.gate():
            for _ in range(self.pieces if "w9" in query else 1):
                yield Reply("x" * 10_000)
                await asyncio.sleep(0)


def test_one_address_has_so_many_connections(encoder, monkeypatch):
    monkeypatch.setattr(limits, "_PER_CLIENT", 4)
    dog = watchdog(encoder, Guard(similarity=0.2))
    dog.agent = Slow()
    body = json.dumps({"messages": user(KNOWN[0])})
    raw = f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}".encode()
    with proxy(Service(dog)) as port:
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(opened(port, raw))
            time.sleep(1)
            with opened(port) as line:
                assert heard(line).startswith(b"HTTP/1.1 503")
        dog.agent.go.set()
        assert send(port, "GET", "/health")[0] == 200


def test_who_does_not_read_stops_nobody(encoder, monkeypatch):
    """Eight do not read, of an agent that says something to eight at a time."""
    monkeypatch.setattr(limits, "_UNREAD", 1.0)
    dog = watchdog(encoder, Guard(similarity=0.2))
    dog.agent = Slow(pieces=1000)
    body = json.dumps({"messages": user("w9 w10 w11"), "stream": True})
    raw = f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}".encode()
    with (
        running(Service(dog)) as (server, port),
        contextlib.ExitStack() as stack,
    ):
        for _ in range(8):
            line = stack.enter_context(socket.socket())
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            line.connect(("127.0.0.1", port))
            line.sendall(raw)
        with alive(port), client(port, timeout=30) as one:
            create = one.chat.completions.create
            pieces = list(create(model="a", messages=user(KNOWN[2]), stream=True))
            assert pieces[-1].choices[0].finish_reason == "stop"
        deadline = time.monotonic() + 30
        while server.server_state.connections and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not server.server_state.connections


def test_who_leaves_is_no_failure(served, caplog):
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            opened(served, (HEAD + "Content-Length: 99\r\n\r\n{").encode()).close()
        time.sleep(0.3)
        assert send(served, "GET", "/health")[0] == 200
    assert not caplog.records


@pytest.mark.parametrize(
    ("named", "host", "own"),
    [
        ("localhost:8080", "127.0.0.1", True),
        ("LocalHost", "127.0.0.1", True),
        ("127.0.0.1", "127.0.0.1", True),
        ("[::1]:9", "::1", True),
        ("10.0.0.1", "127.0.0.1", False),
        ("10.0.0.1:80", "0.0.0.0", True),
        ("10.0.0.1", "10.0.0.1", True),
        ("proxy.lan:8080", "proxy.lan", True),
        ("evil.example", "0.0.0.0", False),
        ("localhost.evil.example", "127.0.0.1", False),
        ("127.0.0.1.evil.example", "127.0.0.1", False),
        ("a@localhost", "127.0.0.1", False),
        ("", "127.0.0.1", False),
    ],
)
def test_names_of_a_server(named, host, own):
    assert is_own(named, host) is own


def test_what_a_stop_ends_is_told_so():
    async def slow(scope, receive, send):
        await asyncio.sleep(20)

    async def ended():
        sent = asyncio.Queue()
        served = Limited(slow, largest=1, host=None)
        scope = {"type": "http", "headers": []}
        task = asyncio.create_task(served(scope, sent.get, sent.put))
        await asyncio.sleep(0)
        task.cancel("timeout graceful shutdown exceeded")
        await task
        return sent.get_nowait()["status"]

    assert asyncio.run(ended()) == 503


def test_a_page_that_points_its_name_here_is_told_nothing(encoder, served):
    body = json.dumps({"messages": user("w1")})
    for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/metrics")):
        status, raw = send(served, method, path, body, Host="evil.example:80")
        assert status == 421 and b"not this server's name" in raw
    with proxy(Service(watchdog(encoder), token="secret")) as port:
        shown = {"Host": "proxy.example", "Authorization": "Bearer secret"}
        assert send(port, "GET", "/v1/models", **shown)[0] == 200
        del shown["Authorization"]
        assert send(port, "GET", "/v1/models", **shown)[0] == 401


QUESTION = "w0 w1 w2?"
LONG = " ".join(f"w{n}" for n in range(16))
SHORT = " ".join(f"w{n}" for n in range(8))
PADDING = " ".join(f"w{20 + n % 9}" for n in range(24))
ASIDE = [*user(QUESTION), {"role": "assistant", "content": "Well."}, *user("w30.")]
EVASIONS = {
    "plain": user(QUESTION),
    "earlier": ASIDE,
    "system": [{"role": "system", "content": QUESTION}, *user("w30.")],
    "developer": [{"role": "developer", "content": QUESTION}, *user("w30.")],
    "assistant": [{"role": "assistant", "content": QUESTION}, *user("w30.")],
    "between": user(f"w30 w31. w32! {QUESTION} w33 w34."),
    "close": user(f"w30 w31!{QUESTION}w32 w33 w34"),
    "lines": user(f"w30 w31\nw32\n{QUESTION}\nw33"),
    "parts": user([{"type": "text", "text": t} for t in ("w30", QUESTION, "w31")]),
    "long": user(f"{'w30 w31. ' * 1500}{QUESTION}{' w33 w34.' * 300}"),
    "words": user(f"{PADDING} {LONG} {PADDING}"),
    "both": [*user(f"{PADDING} {LONG} {PADDING}"), *user("w30.")],
    "short": user(f"{PADDING} {SHORT} {PADDING}"),
}


@pytest.fixture(scope="module")
def blocking(encoder):
    guard = Guard(similarity=0.99, gate=False, entropy=None)
    with contextlib.ExitStack() as stack:
        ports = [
            stack.enter_context(
                proxy(Service(watchdog(encoder, guard, [point]), block=True))
            )
            for point in (QUESTION, LONG, SHORT)
        ]
        yield dict(zip((QUESTION, LONG, SHORT), ports, strict=True))


@pytest.mark.parametrize("name", EVASIONS)
def test_a_question_is_found_wherever_it_stands(name, blocking):
    point = {"words": LONG, "both": LONG, "short": SHORT}.get(name, QUESTION)
    status, found = ask(blocking[point], EVASIONS[name])
    assert status == 200 and found["watchdog"]["blocked"], found
    assert found["choices"][0]["message"]["content"] == BLOCKED
    assert found["watchdog"]["nearest"][0]["query"] == point


def test_a_schema_asks_nothing_unseen(blocking):
    schema = {"type": "object", "properties": {"a": {"description": QUESTION}}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    found = ask(blocking[QUESTION], user("w30."), response_format=form)[1]
    assert found["watchdog"]["blocked"]


@pytest.mark.parametrize("role", [QUESTION, "w9", "User", "user ", "", "x" * 90_000])
def test_a_role_says_nothing(role, blocking):
    turns = [{"role": role, "content": "w31."}, *user("w30.")]
    status, found = ask(blocking[QUESTION], turns)
    assert status == 400 and len(found["error"]["message"]) < 200


def test_what_stands_around_is_no_reason(blocking):
    messages = [*user(f"{PADDING}. w30 w31."), *user("w33 w34.")]
    for port in blocking.values():
        assert not ask(port, messages)[1]["watchdog"]["blocked"]


def test_its_own_answers_are_no_reason(encoder):
    guard = Guard(similarity=0.99, gate=False, entropy=None)

    def say(query):
        return QUESTION if query.endswith("w40") else "w41."

    dog = watchdog(encoder, guard, [QUESTION], say=say)
    with proxy(Service(dog, block=True)) as port:
        said = ask(port, user("w40"))[1]["choices"][0]["message"]
        assert said["content"] == QUESTION
        found = ask(port, [*user("w40"), said, *user("w42")])[1]
        assert not found["watchdog"]["blocked"]
        found = ask(port, [*user("w40"), said | {"role": "user"}, *user("w42")])[1]
        assert found["watchdog"]["blocked"]


def test_a_query_that_is_no_conversation_is_looked_at_as_it_is():
    text = f"{QUESTION} {PADDING}"
    assert looked_at(text) == [text]
    one = Conversation([("system", " "), ("user", "w" * 100_000)])
    assert len(looked_at(one)) < 1000 and all(map(str.strip, looked_at(one)))
    many = " ".join(f"{number}?" for number in range(9000))
    assert len(looked_at(Conversation([("user", many), ("user", "w1")]))) < 9000 / 4


def test_one_vote_takes_out_what_it_names(encoder):
    dog = watchdog(
        encoder, Guard(similarity=0.2), points=[f"w1 w{n}" for n in range(9)]
    )
    with proxy(Service(dog, block=True)) as port:
        found = ask(port, [*user("w1 w3"), *user("w40 w3")])[1]
        named = {one["query"] for one in found["watchdog"]["nearest"]}
        assert len(named) == 3 and found["watchdog"]["blocked"]
        body = json.dumps({"id": found["id"], "hallucinated": False})
        for gained in (-3, 0):  # and said again, no other
            raw = send(port, "POST", "/v1/feedback", body)[1]
            assert json.loads(raw) == {"gained": gained, "points": 6}
        assert not named & {point.query for point in dog.store}
        body = json.dumps({"query": "w1", "hallucinated": False})
        raw = send(port, "POST", "/v1/feedback", body)[1]
        assert json.loads(raw)["gained"] >= -3


def test_an_empty_bound_is_not_well(encoder):
    with proxy(Service(watchdog(encoder, points=[]))) as port:
        status, raw = send(port, "GET", "/health")
    assert status == 503 and json.loads(raw)["status"] == "empty"


GOOD = {"id": "a", "query": "q", "response": "r"}
GOOD["vector"] = base64.b64encode(np.ones(4, "<f4").tobytes()).decode()
NAN = base64.b64encode(np.full(4, np.nan, "<f4").tobytes()).decode()
ROWS = {
    "no vector": {k: v for k, v in GOOD.items() if k != "vector"},
    "no query": {k: v for k, v in GOOD.items() if k != "query"},
    "another key": GOOD | {"x": 1},
    "base64": GOOD | {"vector": "!!!"},
    "half a number": GOOD | {"vector": "AAAA"},
    "vector": GOOD | {"vector": 5},
    "not finite": GOOD | {"vector": NAN},
    "id": GOOD | {"id": 5},
    "response": GOOD | {"response": None},
    "entropy": GOOD | {"entropy": "high"},
    "removed": {"removed": []},
    "list": [1],
    "text": "removed",
    "null": None,
}


@pytest.mark.parametrize("name", ROWS)
def test_a_bound_that_is_damaged_says_where(name, tmp_path):
    rows = [GOOD, ROWS[name]]
    path = tmp_path / "points.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError) as caught:
        ExactStore(4, tmp_path)
    error = str(caught.value)
    assert f"{path}, line 2: no point of a bound" in error and "\n" not in error
    assert "restore the file, or delete the line" in error


def test_what_is_cached_is_for_its_owner_alone(encoder, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXHAL_CACHE", str(tmp_path))
    for name in ("passages", "features"):
        (tmp_path / name).mkdir(mode=0o755)
    before = os.umask(0)
    try:
        from jaxhal.models.registry import private_cache

        Passages(["w1 w2"], encoder, progress=False)
        Store(private_cache("features"))
    finally:
        os.umask(before)
    for folder in tmp_path.iterdir():
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (kept,) = (tmp_path / "passages").iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


@hypothesis.settings(max_examples=80, deadline=None, database=None)
@hypothesis.given(st.randoms(use_true_random=False))
def test_fuzzed_requests(served, draw):
    """``python tests/adversary/fuzz.py requests`` sends more."""
    assert told(served, request(draw)) != 500


def test_collecting_garbage_passes_over_what_was_imported(encoder, monkeypatch):
    turns, frozen, seen = sys.getswitchinterval(), gc.get_freeze_count(), []
    sys.setswitchinterval(0.005)  # as Python has it
    garbage = [[] for _ in range(1000)]

    def see(_, sockets):
        sockets[0].close()
        seen.append((gc.get_freeze_count(), sys.getswitchinterval()))

    monkeypatch.setattr(uvicorn.Server, "run", see)
    try:
        Service(watchdog(encoder)).run(port=0)
    finally:
        sys.setswitchinterval(turns)
    ((now, shorter),) = seen
    assert now >= frozen + len(garbage) and shorter < 0.005


def test_health_after_all_of_that(served):
    assert send(served, "GET", "/health")[0] in (200, 503)
