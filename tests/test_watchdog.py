"""The watchdog on a bound that is known, and the proxy in front of it."""

import asyncio
import collections
import concurrent.futures
import contextlib
import copy
import http.client
import itertools
import json
import math
import pickle
import random
import re
import threading
import time
from typing import Any

import openai
import pytest
import uvicorn
from test_encoding import write, write_pooling

from chat_server import serving
from explore_world import Same
from jaxhal.llm.endpoint import Endpoint, Useless
from jaxhal.models.encoders.encoding import embed, kept_encoder
from jaxhal.serve.limits import OPTIONS, Fault, Limited
from jaxhal.serve.proxy import Service
from jaxhal.serve.proxy_wire import asked
from jaxhal.serve.running import bound, url_of
from jaxhal.watchdog import (
    CallableAgent,
    Conversation,
    EndpointAgent,
    ExactStore,
    Guard,
    Point,
    Reply,
    Watchdog,
    monitor,
)
from jaxhal.watchdog.guarding import BLOCKED

WIDTH = 32
KNOWN = [f"w{n} w{n + 1} w{n + 2}" for n in range(0, 27, 3)]
FAR = "w40 w3 w17 w22"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = write(tmp_path_factory.mktemp("encoder"))
    write_pooling(folder, normalize=True, mean=True)
    return str(folder)


def answer(query, temperature):
    """Unsure where the query says so; silent and broken likewise."""
    if "w44" in query:
        raise TimeoutError("too slow")
    if temperature > 0.5 and "w17" in query:
        return f"answer {random.random()}"
    return f"The answer to {query}."


def watchdog(encoder, guard=None, points=KNOWN, say=answer, entropy=0.5):
    store = ExactStore(WIDTH)
    if points:
        vectors = embed(kept_encoder(encoder), points, progress=False)
        some = [
            Point(f"p{n}", q, "wrong", entropy=entropy) for n, q in enumerate(points)
        ]
        store.add(some, vectors)
    return Watchdog(
        CallableAgent(say, "agent", concurrency=64),
        store,
        guard=guard or Guard(similarity=0.999),
        encoder=encoder,
        samples=4,
        entailment=Same(),
        domain="things",
    )


def test_a_query_is_looked_at(encoder):
    dog = watchdog(encoder, Guard(similarity=0.2))
    check = asyncio.run(dog.check(KNOWN[4]))
    assert check.hits[0].point.query == KNOWN[4] and len(check.hits) == 3
    assert check.flagged and check.near and check.entropy is None
    vectors = embed(kept_encoder(encoder), [KNOWN[4], *KNOWN], progress=False)
    want = monitor(vectors[0], 0.0, vectors[1:], [0.5] * 9, Guard(similarity=0.2))
    assert check.score == pytest.approx(float(want.score), abs=1e-5)
    assert check.cosine == pytest.approx(float(want.cosine), abs=1e-5)


def test_where_no_point_is_near_the_entropy_decides(encoder):
    dog = watchdog(encoder)
    sure, unsure = asyncio.run(dog.checks([KNOWN[4], FAR]))
    # Alone near a point is not enough: the third one has to be.
    assert not sure.flagged and sure.entropy == 0.0 and not sure.near
    assert sure.score == pytest.approx(1 / (1 + math.exp(0.5)), abs=1e-6)
    assert unsure.flagged and unsure.entropy == pytest.approx(math.log(4), abs=1e-6)
    assert unsure.score == pytest.approx(
        1 / (1 + math.exp(0.5 - math.log(4))), abs=1e-6
    )
    # Of all points the highest entropy: above it nothing of four answers is.
    high = watchdog(encoder, Guard(similarity=0.999, entropy="highest"))
    other = Point("high", "w9 w9", "wrong", entropy=1.4)
    high.store.add([other], embed(kept_encoder(encoder), ["w9 w9"], progress=False))
    assert not asyncio.run(high.check(FAR)).flagged


def test_an_agent_that_is_not_asked(encoder):
    def never(query, temperature):
        raise AssertionError

    dog = watchdog(
        encoder, Guard(similarity=0.999, gate=False, entropy=None), say=never
    )
    found = asyncio.run(dog.checks([FAR, *KNOWN]))
    assert all(check.entropy is None for check in found)


def test_an_entropy_of_too_few_answers_is_none(encoder):
    """One answer alone would agree with itself, and look sure."""
    count = itertools.count()

    def say(query, temperature):
        if next(count) >= answered:
            raise TimeoutError("too slow")
        return "yes"

    dog = watchdog(encoder, say=say)
    answered = dog.samples - 3
    check = asyncio.run(dog.check(FAR))
    assert check.entropy is None and not check.flagged
    assert "3 of" in str(check.error) and "too slow" in str(check.error)
    count, answered = itertools.count(), dog.samples - 2
    assert asyncio.run(dog.check(FAR)).entropy == 0.0


def test_entailment_that_is_not_known(encoder):
    """An endpoint that decides it fails at one query, which costs no other."""

    class Picky(Same):
        def __call__(self, pairs):
            if any("w44" in text for pair in pairs for text in pair):
                raise Useless("it says nothing of use")
            return super().__call__(pairs)

    def say(query, temperature):
        return f"{query} {random.random()}"

    dog = watchdog(encoder, say=say)
    dog.entailment = Picky()
    bad, fine = asyncio.run(dog.checks(["w44 w44", FAR]))
    assert bad.entropy is None and "says nothing of use" in str(bad.error)
    assert fine.error is None and fine.entropy == pytest.approx(math.log(4), abs=1e-6)


def test_slow_entailment_leaves_threads_to_others(encoder):
    """A server's own work, which asyncio's threads do, goes on meanwhile."""
    said, go = [], threading.Event()

    def say(query, temperature):
        said.append(query)
        return f"{len(said)}"

    class Slow(Same):
        def __call__(self, pairs):
            assert go.wait(timeout=30)
            return super().__call__(pairs)

    dog = watchdog(encoder, say=say)
    dog.entailment = Slow()

    async def others():
        asked = [f"{FAR} w{n}" for n in range(64)]
        checks = [asyncio.create_task(dog.check(query)) for query in asked]
        while len(said) < len(asked) * dog.samples:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(go.set)
        return await asyncio.gather(*checks)

    assert all(one.entropy is not None for one in asyncio.run(others()))


def test_an_entropy_that_cannot_be_known(encoder):
    check = asyncio.run(watchdog(encoder).check("w44 w1"))
    assert not check.flagged and check.entropy is None and check.score == 0.5
    assert "too slow" in str(check.error)


def test_an_empty_bound(encoder):
    check = asyncio.run(watchdog(encoder, points=[]).check(FAR))
    assert not check.flagged and check.score == 0.5 and check.hits == []


def test_it_learns(encoder):
    dog = watchdog(encoder)
    assert asyncio.run(dog.learn("w7 w7", "Bad.", True, "C")) == 1
    assert asyncio.run(dog.learn("w7 w7", "Worse.", True)) == 0
    (hit, *_) = asyncio.run(dog.check("w7 w7")).hits
    point = hit.point
    assert (point.response, point.agent, point.domain) == ("Worse.", "agent", "things")
    assert hit.similarity == pytest.approx(1, abs=1e-5)
    assert asyncio.run(dog.learn("w7 w7", "Good.", False)) == -1
    assert len(dog.store) == len(KNOWN)
    with pytest.raises(RuntimeError, match="answers nothing to 'w44': .*Timeout"):
        asyncio.run(dog.learn("w44", "Bad.", True))


def test_bad_settings(encoder):
    with pytest.raises(ValueError, match="samples is 0"):
        Watchdog(CallableAgent(answer), ExactStore(WIDTH), encoder=encoder, samples=0)
    with pytest.raises(
        ValueError, match="vectors of 32 numbers, and the store holds 7"
    ):
        Watchdog(CallableAgent(answer), ExactStore(7), encoder=encoder)


def test_it_is_served_with_its_limits(encoder, monkeypatch):
    """What other tests set themselves is what ``run`` sets."""
    seen = []

    def serve(self, sockets):
        seen.append((self.config, *sockets))

    monkeypatch.setattr(uvicorn.Server, "run", serve)
    dog = Watchdog(CallableAgent(answer), ExactStore(WIDTH), encoder=encoder)
    Service(dog).run("localhost", 0)
    ((config, at),) = seen
    with at:
        host, port = at.getsockname()
    assert OPTIONS and {name: getattr(config, name) for name in OPTIONS} == OPTIONS
    assert host == "127.0.0.1" and port > 0
    (limited,) = config.app.user_middleware
    assert limited.cls is Limited and limited.kwargs["host"] == "localhost"


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("127.0.0.1", "in use"),
        ("nowhere.invalid", ""),
        ("203.0.113.9", "assign"),
        ("a..b", ""),
    ],
)
def test_an_address_that_cannot_be_had(host, why):
    with bound("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        problem = rf"host '{host}', port {port} \(.*{why}.*\); give another port"
        with pytest.raises(RuntimeError, match=problem):
            bound(host, port)
    with pytest.raises(RuntimeError, match="port 70000"):
        bound("127.0.0.1", 70_000)


def test_the_address_that_was_had():
    for host, begin in (("127.0.0.1", "http://127.0.0.1:"), ("::1", "http://[::1]:")):
        with contextlib.suppress(RuntimeError), bound(host, 0) as at:  # without IPv6
            assert url_of(host, at) == f"{begin}{at.getsockname()[1]}"


@contextlib.contextmanager
def running(service):
    """Its server and address."""
    config = uvicorn.Config(service.app(), port=0, log_level="critical", **OPTIONS)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield server, server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def proxy(service):
    """Its address."""
    with running(service) as (_, port):
        yield port


def client(port, key="none", **options):
    url = f"http://127.0.0.1:{port}/v1"
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, **options)


def user(text) -> Any:
    return [{"role": "user", "content": text}]


def send(port, method, path, body: Any = b"", **headers):
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    sent = {"Content-Type": "application/json"} | headers
    line.request(method, path, body, sent)
    found = line.getresponse()
    raw = found.read()
    line.close()
    return found.status, raw


@pytest.fixture(scope="module")
def served(encoder):
    """Flags from a cosine of 0.2 on."""
    with proxy(Service(watchdog(encoder, Guard(similarity=0.2)))) as port:
        yield port


def test_chat(served):
    with client(served) as one:
        raw = one.chat.completions.with_raw_response.create(
            model="any", messages=user(KNOWN[2])
        )
    found: Any = raw.parse()
    assert found.choices[0].message.content == f"The answer to {KNOWN[2]}."
    assert found.choices[0].finish_reason == "stop" and found.model == "agent"
    said = found.watchdog
    assert said["flagged"] and not said["blocked"] and said["mode"] == "flag"
    assert said["nearest"][0]["query"] == KNOWN[2] and said["score"] > 1
    assert raw.headers["x-watchdog-flagged"] == "true"
    assert raw.headers["x-watchdog-blocked"] == "false"
    shown = float(raw.headers["x-watchdog-score"])
    assert shown == pytest.approx(said["score"], abs=1e-3)


def test_a_stream(served):
    with client(served) as one:
        pieces: Any = list(
            one.chat.completions.create(
                model="any", messages=user(KNOWN[2]), stream=True
            )
        )
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == f"The answer to {KNOWN[2]}."
    assert pieces[-1].choices[0].finish_reason == "stop"
    assert pieces[-1].watchdog["flagged"]
    assert len({piece.id for piece in pieces}) == 1


class Writing:
    """Says its pieces one by one, the later ones when it is told to."""

    name = "writer"

    def __init__(self, *pieces):
        self.pieces, self.go = pieces, threading.Event()
        self.closed = threading.Event()

    async def respond(self, queries, n=1, temperature=1.0):
        return [[Reply("sample")] * n for _ in queries]

    async def stream(self, query, temperature=1.0):
        first, *rest = self.pieces
        try:
            yield first
            if rest:
                await asyncio.to_thread(self.go.wait, 20)
            for piece in rest:
                yield piece
        finally:
            self.closed.set()


def text_of(piece):
    return piece.choices[0].delta.content or ""


def test_a_stream_comes_while_it_is_written(encoder):
    dog = watchdog(encoder, Guard(similarity=0.2))
    dog.agent = agent = Writing(Reply("One", "C"), Reply(" two."))
    with proxy(Service(dog)) as port, client(port) as one:
        create: Any = one.chat.completions.create
        stream = iter(create(model="any", messages=user(KNOWN[2]), stream=True))
        assert [text_of(next(stream)) for _ in range(2)] == ["", "One"]
        agent.go.set()
        *pieces, last = list(stream)
        assert "".join(map(text_of, pieces)) == " two." and last.watchdog["flagged"]
        body = json.dumps({"id": last.id, "hallucinated": True})
        assert send(port, "POST", "/v1/feedback", body)[0] == 200
    (hit,) = [h for h in asyncio.run(dog.check(KNOWN[2])).hits if h.point.context]
    assert (hit.point.response, hit.point.context) == ("One two.", "C")


def test_a_stream_that_fails_on_its_way(encoder):
    dog = watchdog(encoder, Guard(similarity=0.2))
    dog.agent = Writing(Reply("One"), Reply("", error="cut off"))
    dog.agent.go.set()
    with proxy(Service(dog)) as port, client(port) as one:
        create: Any = one.chat.completions.create
        heard = []
        with pytest.raises(openai.APIError, match="gave no answer: cut off"):
            for piece in create(model="any", messages=user(KNOWN[2]), stream=True):
                heard.append(text_of(piece))
        assert heard == ["", "One"]
        metrics = send(port, "GET", "/metrics")[1].decode()
        assert "watchdog_failures_total 1.0" in metrics
        dog.agent = Writing(Reply("", error="too slow"))
        with pytest.raises(openai.InternalServerError, match="no answer: too slow"):
            create(model="any", messages=user(KNOWN[2]), stream=True)


def test_a_client_that_leaves(encoder):
    dog = watchdog(encoder, Guard(similarity=0.2))
    dog.agent = agent = Writing(*[Reply("x" * 5000)] * 5000)
    with proxy(Service(dog)) as port, client(port) as one:
        create: Any = one.chat.completions.create
        stream = create(model="any", messages=user(KNOWN[2]), stream=True)
        assert text_of(next(iter(stream))) == ""
        stream.close()
        agent.go.set()
        assert agent.closed.wait(20)
        assert send(port, "GET", "/health")[0] == 200


def test_a_client_that_leaves_before_the_answer(encoder):
    """Nothing is drawn for it any more, and its next try finds a free agent."""
    dog = watchdog(encoder, Guard(similarity=0.2))
    dog.agent = agent = Writing()
    respond = agent.respond

    async def slow(*asked):
        try:
            await asyncio.sleep(60)
            return await respond(*asked)
        finally:
            agent.closed.set()

    agent.respond = slow
    with proxy(Service(dog)) as port, client(port) as one:
        hurried = one.with_options(timeout=2.0, max_retries=0)
        with pytest.raises(openai.APITimeoutError):
            hurried.chat.completions.create(model="any", messages=user(KNOWN[2]))
        assert agent.closed.wait(20)
        assert send(port, "GET", "/health")[0] == 200


def test_turns_before(served):
    told = [
        {"role": "system", "content": "Be brief."},
        *user("Hello?"),
        {"role": "assistant", "content": None},
        {"role": "user", "content": [{"type": "text", "text": KNOWN[1]}]},
    ]
    with client(served) as one:
        found: Any = one.chat.completions.create(model="any", messages=told)
    text = str(found.choices[0].message.content)
    assert "system: Be brief." in text and f"user: {KNOWN[1]}" in text
    assert found.watchdog["nearest"][0]["query"] == KNOWN[1]


def test_an_endpoint_is_told_what_the_client_said(encoder, tmp_path, monkeypatch):
    dog = watchdog(encoder, Guard(similarity=0.2))
    told: Any = [{"role": "system", "content": "Be brief."}, *user(KNOWN[2])]
    named = [told[0], {**told[1], "name": "Ann"}]
    options: Any = {"max_tokens": 7, "top_p": 0.5, "temperature": 0.3}
    choice = {"index": 0, "finish_reason": "length"}
    whole = choice | {"message": {"role": "assistant", "content": "And"}}
    with serving("", tmp_path, monkeypatch) as server:
        server.replies = [json.dumps({"choices": [whole]}).encode(), "one two"]
        dog.agent = EndpointAgent(Endpoint(server.url, "m"))
        # Near the bound, so the agent is asked for its answer alone.
        with proxy(Service(dog)) as port, client(port) as one:
            create: Any = one.chat.completions.create
            found = create(model="any", messages=told, **options)
            *_, last = create(
                model="any",
                messages=named,
                stream=True,
                stream_options={"include_usage": True},
            )
    (_, first), (_, second) = server.asked
    assert first["messages"] == second["messages"] == told
    assert {name: first[name] for name in options} == options and first["model"] == "m"
    assert "stream_options" not in second
    assert found.choices[0].finish_reason == "length"
    assert found.watchdog["ignored"] == []
    assert last.choices[0].finish_reason == "stop"
    assert last.watchdog["ignored"] == ["messages.name", "stream_options"]


def test_samples_are_of_the_whole_conversation(encoder, tmp_path, monkeypatch):
    told: Any = [*user("Hi."), {"role": "assistant", "content": "Hello."}, *user(FAR)]
    dog = watchdog(encoder)
    with serving(lambda question: "same", tmp_path, monkeypatch) as server:
        dog.agent = EndpointAgent(Endpoint(server.url, "m"))
        with proxy(Service(dog)) as port, client(port) as one:
            create: Any = one.chat.completions.create
            found = create(model="any", messages=told, seed=3, temperature=0.2)
    assert found.watchdog["entropy"] == 0.0 and not found.watchdog["near"]
    bodies = [body for _, body in server.asked]
    assert len(bodies) == 1 + dog.samples
    assert all(body["messages"] == told for body in bodies)
    # With the seed of the answer all samples would be the same.
    assert [body["temperature"] for body in bodies if "seed" in body] == [0.2]
    check = asyncio.run(watchdog(encoder).check(Conversation([("user", FAR)])))
    assert check.query == FAR and type(check.query) is str


def test_streams_wait_for_no_slot_of_their_own_checks(encoder, tmp_path, monkeypatch):
    """Far from the bound, where samples are drawn while the answer is under way."""
    dog = watchdog(encoder)
    with serving("the same words", tmp_path, monkeypatch) as server:
        dog.agent = EndpointAgent(Endpoint(server.url, "m"), concurrency=1)
        with proxy(Service(dog)) as port, client(port, timeout=30) as one:
            create: Any = one.chat.completions.create

            def said(number):
                pieces = create(model="any", messages=user(FAR), stream=True)
                return "".join(filter(None, map(text_of, pieces)))

            with concurrent.futures.ThreadPoolExecutor(6) as several:
                assert [*several.map(said, range(6))] == ["the same words"] * 6
            plain: Any = create(model="any", messages=user(FAR))
            assert plain.watchdog["entropy"] == 0.0


@pytest.mark.parametrize(
    ("host", "teacher", "status"),
    [
        ("127.0.0.1:1", None, 200),
        ("localhost", None, 200),
        ("[::1]:80", None, 200),
        ("evil.example:80", None, 421),
        ("evil.example", "t", 421),
    ],
)
def test_names_that_anybody_may_give(encoder, host, teacher, status):
    """A page that makes its own name point here is told nothing it could teach."""
    body = json.dumps({"query": "w7 w7", "response": "Bad.", "hallucinated": True})
    shown = {"Authorization": f"Bearer {teacher}"} if teacher else {}
    with proxy(Service(watchdog(encoder), teacher=teacher)) as port:
        told, raw, *_ = send(port, "POST", "/v1/feedback", body, Host=host, **shown)
    assert told == status
    assert status == 200 or b"is not this server's name" in raw


def test_wishes_are_not_remembered(encoder, tmp_path, monkeypatch):
    dog = watchdog(encoder)
    with serving("same", tmp_path, monkeypatch) as server:
        dog.agent = EndpointAgent(Endpoint(server.url, "m"))
        service = Service(dog)
        with proxy(service) as port, client(port) as one:
            create: Any = one.chat.completions.create
            create(model="any", messages=user(KNOWN[2]), stop=["x" * 1000])
    ((query, *_),) = service._given.values()
    assert query.wishes == {}
    assert ["x" * 1000] in [body.get("stop") for _, body in server.asked]


def test_what_an_agent_cannot_hear_is_said(served):
    with client(served) as one:
        found: Any = one.chat.completions.create(
            model="any", messages=user(KNOWN[2]), max_tokens=7, seed=1
        )
    assert found.watchdog["ignored"] == ["max_tokens", "seed"]


def test_errors_as_the_client_knows_them(served):
    with client(served) as one:
        with pytest.raises(openai.BadRequestError, match="the last message is empty"):
            one.chat.completions.create(model="any", messages=user(" "))
        with pytest.raises(openai.InternalServerError, match="gave no answer.*slow"):
            one.chat.completions.create(model="any", messages=user("w44"))
        assert [model.id for model in one.models.list()] == ["agent"]


def test_block(encoder):
    service = Service(watchdog(encoder, Guard(similarity=0.2)), block=True)
    with proxy(service) as port, client(port) as one:
        found: Any = one.chat.completions.create(model="any", messages=user(KNOWN[2]))
        assert found.choices[0].message.content == BLOCKED
        assert found.choices[0].finish_reason == "content_filter"
        assert found.watchdog["blocked"]
        stream: Any = one.chat.completions.create(
            model="any", messages=user(KNOWN[2]), stream=True
        )
        text = "".join(piece.choices[0].delta.content or "" for piece in stream)
        assert text == BLOCKED


def test_feedback(encoder):
    with proxy(Service(watchdog(encoder))) as port, client(port) as one:
        found: Any = one.chat.completions.create(model="any", messages=user("w30 w31"))
        for wrong, points in ((True, 10), (False, 9)):
            body = json.dumps({"id": found.id, "hallucinated": wrong})
            status, raw = send(port, "POST", "/v1/feedback", body)
            assert status == 200 and json.loads(raw)["points"] == points
        body = json.dumps({"query": "w1", "response": "x", "hallucinated": True})
        assert json.loads(send(port, "POST", "/v1/feedback", body)[1])["gained"] == 1
        for bad, want in (
            ({"id": "nobody", "hallucinated": True}, 404),
            ({"id": found.id}, 400),
            ({"hallucinated": True}, 400),
            ({"query": " ", "hallucinated": True}, 400),
            ({"query": "a", "response": 5, "hallucinated": True}, 400),
            ({"query": "a" * 20_001, "hallucinated": True}, 400),
            ({"query": "\ud800", "hallucinated": True}, 400),
            ({"query": "a", "response": "b" * 100_001, "hallucinated": True}, 400),
            ([], 400),
        ):
            assert send(port, "POST", "/v1/feedback", json.dumps(bad))[0] == want
        text = send(port, "GET", "/metrics")[1].decode()
    assert 'watchdog_feedback_total{hallucinated="true"} 2.0' in text
    assert "watchdog_points 10.0" in text
    assert (
        'watchdog_requests_total{path="/v1/chat/completions",status="200"} 1.0' in text
    )
    assert 'watchdog_checks_total{verdict="clean"} 1.0' in text


def test_an_agent_is_not_asked_for_what_is_blocked(encoder):
    said = []

    def say(query, temperature):
        said.append(query)
        return answer(query, temperature)

    for guard, heard in ((Guard(similarity=0.2), []), (None, [KNOWN[0]])):
        service = Service(watchdog(encoder, guard, say=say), block=True)
        with proxy(service) as port, client(port) as one:
            one.chat.completions.create(model="any", messages=user(KNOWN[0]))
        assert [*dict.fromkeys(said)] == heard


def test_health(served):
    status, raw = send(served, "GET", "/health")
    known = json.loads(raw)
    assert status == 200 and known["status"] == "ok" and known["points"] == len(KNOWN)


def test_a_token(encoder):
    service = Service(watchdog(encoder), token="secret")
    with proxy(service) as port:
        with client(port, "secret") as one:
            assert one.chat.completions.create(model="any", messages=user("w1"))
        with client(port, "other") as one, pytest.raises(openai.AuthenticationError):
            one.chat.completions.create(model="any", messages=user("w1"))
        for path in ("/v1/models", "/metrics"):
            assert send(port, "GET", path)[0] == 401
        assert send(port, "GET", "/health")[0] == 200
        assert send(port, "POST", "/v1/feedback", b"{}")[0] == 401
    with pytest.raises(ValueError, match="token is empty"):
        Service(watchdog(encoder), token=" ")


def test_who_may_teach(encoder):
    body = json.dumps({"query": "w1", "response": "x", "hallucinated": True})

    def told(port, token):
        shown = {"Authorization": f"Bearer {token}"}
        return send(port, "POST", "/v1/feedback", body, **shown)[0]

    service = Service(watchdog(encoder), token="secret", teacher="chalk")
    with proxy(service) as port:
        assert told(port, "secret") == 401 and told(port, "chalk") == 200
        shown = {"Authorization": "bearer chalk"}  # in any letters, as HTTP has it
        assert send(port, "POST", "/v1/feedback", body, **shown)[0] == 200
        shown = {"Authorization": "Basic chalk"}
        assert send(port, "POST", "/v1/feedback", body, **shown)[0] == 401
        with client(port, "chalk") as one, pytest.raises(openai.AuthenticationError):
            one.chat.completions.create(model="any", messages=user("w1"))
    with pytest.raises(ValueError, match="teacher is empty"):
        Service(watchdog(encoder), teacher="")


def test_what_a_web_page_could_send(served):
    """A form, or plain text, which no browser asks about before it sends it."""
    body = json.dumps({"messages": user("w1 w2")})
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        for path in ("/v1/chat/completions", "/v1/feedback"):
            status, raw = send(served, "POST", path, body, **{"Content-Type": kind})
            assert status == 415 and b"not application/json" in raw
    kind = {"Content-Type": "application/json; charset=utf-8"}
    assert send(served, "POST", "/v1/chat/completions", body, **kind)[0] == 200


def test_a_query_that_is_blocked_can_be_taught(encoder):
    dog = watchdog(encoder, Guard(similarity=0.2, entropy=None))
    query = KNOWN[4]
    with proxy(Service(dog, block=True)) as port, client(port) as one:
        found: Any = one.chat.completions.create(model="any", messages=user(query))
        assert found.choices[0].message.content == BLOCKED
        body = json.dumps({"id": found.id, "hallucinated": False})
        status, raw = send(port, "POST", "/v1/feedback", body)
        assert status == 200 and json.loads(raw)["gained"] == -3
        for _ in range(2):
            body = json.dumps({"query": query, "hallucinated": False})
            assert send(port, "POST", "/v1/feedback", body)[0] == 200
        found = one.chat.completions.create(model="any", messages=user(query))
        assert found.choices[0].message.content != BLOCKED


def test_what_is_learnt_of_a_conversation(encoder):
    """Its last turn, and how unsure the agent is of the whole."""
    asked = []

    def say(query, temperature):
        asked.append(query)
        return f"{query} {temperature}"

    dog = watchdog(encoder, say=say)
    turns = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "ok"}]
    with proxy(Service(dog)) as port, client(port) as one:
        found: Any = one.chat.completions.create(
            model="any", messages=[*turns, *user("w30 w31")]
        )
        asked.clear()
        body = json.dumps({"id": found.id, "hallucinated": True})
        assert send(port, "POST", "/v1/feedback", body)[0] == 200
    assert len(asked) == dog.samples and all("assistant: ok" in one for one in asked)
    assert "w30 w31" in {point.query for point in dog.store}


def test_only_so_much_is_remembered(encoder, monkeypatch):
    monkeypatch.setattr("jaxhal.serve.proxy._CHARACTERS", 90)
    service = Service(watchdog(encoder))
    with proxy(service) as port, client(port) as one:
        names = []
        for query in ("w1", "w2", "w3 " * 10):
            found: Any = one.chat.completions.create(model="any", messages=user(query))
            names.append(found.id)
        bodies = [json.dumps({"id": n, "hallucinated": True}) for n in names]
        status = [send(port, "POST", "/v1/feedback", body)[0] for body in bodies]
    assert status[0] == 404 and status[-1] == 200
    kept = [given.text for given in service._given.values()]
    assert "The answer to w1." not in kept
    assert service._said == collections.Counter([BLOCKED, *kept])


def test_feedback_beside_queries(encoder):
    """Points come and go while others are searched for."""
    dog = watchdog(encoder, Guard(similarity=0.2, entropy=None))
    names = [f"w{n} w{n + 1}" for n in range(30)]

    def teach(query):
        for wrong in (True, False, True):
            asyncio.run(dog.learn(query, "Bad.", wrong))

    def look(query):
        for _ in range(5):
            (check,) = asyncio.run(dog.checks([query]))
            for hit in check.hits:
                want = embed(kept_encoder(encoder), [hit.point.query], progress=False)
                assert hit.vector @ want[0] > 0.999
        return True

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        taught = [pool.submit(teach, query) for query in names]
        assert all(pool.map(look, names))
        for one in taught:
            one.result()


def test_large_requests(encoder):
    with proxy(Service(watchdog(encoder), largest=2000)) as port:
        body = json.dumps({"messages": user("w1 " * 1000)})
        status, raw = send(port, "POST", "/v1/chat/completions", body)
        assert status == 413 and "over 2000 bytes" in raw.decode()
        assert send(port, "GET", "/health")[0] == 200


BAD = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"messages": []}',
    b'{"messages": {}}',
    b'{"messages": [5]}',
    b'{"messages": [{"role": "user"}]}',
    b'{"messages": [{"role": 5, "content": "a"}]}',
    b'{"messages": [{"role": "user", "content": 5}]}',
    b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
    b'{"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "system", "content": "a"}]}',
    b'{"messages": [{"role": "user", "content": "a"}], "stream": 5}',
    b'{"messages": [{"role": "user", "content": "a"}], "n": 2}',
    b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e999}',
    b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
    b'{"messages": [{"role": "user", "content": "a"}], "temperature": "hot"}',
    b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 0}',
    b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": true}',
    b'{"messages": [{"role": "user", "content": "a"}], "tools": [{}]}',
    b'{"messages": [{"role": "user", "content": "a"}], "\\ud800": 1}',
    b'{"messages": [{"role": "user", "content": "a"}], "stop": ["\\ud800"]}',
    b'{"messages": [{"role": "user", "content": "a", "\\ud800": 1}]}',
    b'{"messages": [{"role": "user", "content": "a"}], "top_p": NaN}',
    json.dumps({"messages": [{"role": "tool", "content": "a"}, *user("a")]}).encode(),
    json.dumps({"messages": user("w1 " * 10_000)}).encode(),
]


@pytest.mark.parametrize("body", BAD, ids=range(len(BAD)))
def test_bad_requests(served, body):
    status, raw = send(served, "POST", "/v1/chat/completions", body)
    error = json.loads(raw)["error"]
    assert status == 400 and error["type"] == "invalid_request_error"
    assert error["message"]


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b'{"messages": ', "the body is not JSON: EOF .* at line 1 column 13"),
        (b'{"a": "\\ud800"}', "the body is not JSON: .* escape at line 1 column 14"),
        (
            b'{"messages": [{"role": "user", "content": "a"}], "top_p": 1e999}',
            "a setting cannot be passed on: Out of range",
        ),
    ],
)
def test_what_is_no_json_is_told_where(served, body, where):
    _, raw = send(served, "POST", "/v1/chat/completions", body)
    assert re.match(where, json.loads(raw)["error"]["message"])


def test_fuzzed_requests_crash_nothing(served):
    """Requests cut, doubled and mixed up are answered, all of them, and never 500."""
    rng = random.Random(0)
    good = json.dumps({"messages": user("w1 w2"), "stream": False}).encode()
    seen = set()
    for _ in range(300):
        raw = bytearray(good)
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(raw))
            kind = rng.randrange(4)
            if kind == 0:
                raw[at] = rng.randrange(256)
            elif kind == 1:
                del raw[at : at + rng.randint(1, 9)]
            elif kind == 2:
                raw[at:at] = raw[: rng.randint(1, 20)]
            else:
                raw[at:at] = rng.choice([b'"', b"{", b"null", b"1e9", b"\\u0000", b","])
            raw = raw or bytearray(b"x")
        seen.add(send(served, "POST", "/v1/chat/completions", bytes(raw))[0])
    for method, path in (
        ("GET", "/v1/chat/completions"),
        ("POST", "/nowhere"),
        ("DELETE", "/health"),
        ("GET", "/%00"),
    ):
        seen.add(send(served, method, path)[0])
    assert seen <= {200, 400, 404, 405} and {200, 400, 404, 405} <= seen
    why = json.loads(send(served, "GET", "/v1/chat/completions")[1])["error"]["message"]
    assert why == "GET is not answered at /v1/chat/completions; send POST"
    assert send(served, "GET", "/health")[0] == 200


def test_200_clients_at_once(served):
    def one(number):
        with client(served, timeout=60) as mine:
            query = KNOWN[number % len(KNOWN)]
            found = mine.chat.completions.create(model="any", messages=user(query))
            return str(found.choices[0].message.content) == f"The answer to {query}."

    with concurrent.futures.ThreadPoolExecutor(200) as pool:
        assert all(pool.map(one, range(200)))


def test_open_requests_are_answered_before_it_stops(encoder):
    def slow(query, temperature):
        time.sleep(0.5)
        return "late"

    service = Service(watchdog(encoder, Guard(similarity=0.2), say=slow))
    with (
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        running(service) as (server, port),
        client(port) as one,
    ):
        create: Any = one.chat.completions.create
        waiting = pool.submit(create, model="any", messages=user(KNOWN[0]))
        time.sleep(0.2)
        server.should_exit = True
        assert waiting.result().choices[0].message.content == "late"


def test_what_is_asked():
    want = asked({"messages": user("a"), "temperature": 0, "stream": None})
    assert want == ("a", False, 0.0, ()) and want.prompt.query == "a"
    assert want.prompt.turns == (("user", "a"),) and want.prompt.wishes == {}


@pytest.mark.parametrize("turns", [[("user", "a")], [("system", "b"), ("user", "a")]])
def test_a_conversation_can_be_copied(turns):
    one = Conversation(turns, {"stop": ["x"]})
    for other in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert isinstance(other, Conversation) and other == one
        assert (other.turns, other.wishes) == (one.turns, one.wishes)


def test_only_known_wishes_are_passed_on():
    body = {
        "messages": [{"role": "user", "content": "a"}],
        # Some servers would take these for the messages, or for the limit of tokens.
        "Messages": [{"role": "user", "content": "b"}],
        "n_predict": 9999,
        "N": 5,
        "best_of": 3,
        "top_p": 0.5,
        "max_tokens": 3,
    }
    want = asked(body)
    assert want.prompt.wishes == {"top_p": 0.5, "max_tokens": 3}
    assert want.ignored == ("Messages", "n_predict", "N", "best_of")
    many = asked(body | {f"x{n}": 1 for n in range(999)} | {"y" * 999: 1})
    assert len(many.ignored) == 20 and max(map(len, many.ignored)) <= 40
    turn = user("a")[0] | {f"x{n}": 1 for n in range(999)} | {"y" * 999: 1}
    many = asked({"messages": [turn]})
    assert len(many.ignored) == 20 and max(map(len, many.ignored)) <= 40
    with pytest.raises(Fault, match="the body is not a JSON object"):
        asked([])
