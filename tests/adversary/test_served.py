"""Whatever is sent to the server of verdicts, it answers, and loses nothing."""

import asyncio
import contextlib
import json
import os
import threading

import httpx2 as httpx
import hypothesis
import hypothesis.strategies as st
import pytest
import uvicorn
from fuzz_requests import HEADERS, METHODS, VALUES, told
from serve_world import reader, renamed, served

from jaxhal.serve.app import Server
from jaxhal.serve.limits import OPTIONS
from tiny_lm import tiny_lm

EXAMPLES = int(os.environ.get("EXAMPLES", "60"))
PATHS = ["/v1/verdict", "/v1/chat/completions", "/v1/completions", "/v1/verdict/lines"]
NAMES = ["model", "id", "response", "answer", "context", "contexts", "question"]
NAMES += ["prompt", "templated", "messages", "rows", "tokens", "all", "max_tokens"]
NAMES += ["temperature", "top_p", "seed", "stop", "stream", "stop_on", "logprobs"]
NAMES += ["n", "stream_options", "tools", "é"]
WHOLE = {
    "/v1/verdict": {"context": "A crate.", "response": "Pears."},
    "/v1/verdict/lines": {"context": "A crate.", "response": "Pears."},
    "/v1/completions": {"prompt": "A", "max_tokens": 1},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "A"}],
        "max_tokens": 1,
    },
}


@pytest.fixture(scope="module")
def made():
    one = reader(renamed(tiny_lm(context=128), "tiny"))
    yield Server({"tiny": one}, max_tokens=2, largest=100_000)
    one.close()


@pytest.fixture(scope="module")
def url(made):
    with served(made) as url:
        yield url


def sent(draw) -> bytes:
    """A request with some of it exchanged, cut or doubled."""
    path = draw.choice(PATHS)
    whole = dict(WHOLE[path])
    for _ in range(draw.choice([0, 1, 1, 2, 4])):
        whole[draw.choice(NAMES)] = draw.choice(
            [*VALUES, WHOLE[path], [WHOLE[path]], 0.5]
        )
    raw = bytearray(json.dumps(whole).encode())
    for _ in range(draw.choice([0, 0, 0, 1, 3])):
        at = draw.randrange(len(raw))
        raw[at:at] = draw.choice([b'"', b"{", b"[" * 5000, b"1e999", b"\\u0000", b"\n"])
    kind = "application/jsonl" if path.endswith("lines") else "application/json"
    lines = [f"{draw.choice(METHODS)} {path} HTTP/1.1", "Host: localhost"]
    lines += [f"Content-Type: {kind}", f"Content-Length: {len(raw)}"]
    if draw.random() < 0.1:
        lines.append(draw.choice(HEADERS))
    if draw.random() < 0.9:  # who sent it waits for more where the line stays open
        lines.append("Connection: close")
    return "\r\n".join(lines).encode("utf-8", "surrogatepass") + b"\r\n\r\n" + raw


@hypothesis.settings(max_examples=EXAMPLES, deadline=None, database=None)
@hypothesis.given(st.randoms(use_true_random=False))
def test_fuzzed_requests(url, draw):
    port = int(url.rpartition(":")[2])
    assert told(port, sent(draw)) != 500


def test_a_server_that_is_told_to_stop_ends_what_is_open(made):
    """More streams than slots come to their ends, and nothing new is taken."""
    config = uvicorn.Config(made.app(), port=0, log_level="warning", **OPTIONS)
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run)
    thread.start()
    while not running.started:
        assert thread.is_alive()
    port = running.servers[0].sockets[0].getsockname()[1]
    body = {"prompt": "A", "max_tokens": 60, "stream": True}
    streams, begun = made.readers["tiny"].writer.most + 2, []

    async def one(http):
        async with http.stream("POST", "/v1/completions", json=body) as stream:
            begun.append(stream.status_code)
            running.should_exit = len(begun) == streams
            return [line async for line in stream.aiter_lines()]

    async def all_of_them():
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:
            found = await asyncio.gather(*(one(http) for _ in range(streams)))
            await asyncio.to_thread(thread.join)
            with contextlib.suppress(httpx.TransportError):
                pytest.fail(f"it still answers: {await http.get('/health')}")
            return found

    found = asyncio.run(all_of_them())
    assert begun == [200] * streams
    assert all(lines[-2:] == ["data: [DONE]", ""] for lines in found)


def test_all_is_well_after_all_of_that(made, url):
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    found = httpx.post(f"{url}/v1/verdict", json=WHOLE["/v1/verdict"], timeout=60)
    assert found.json()["verdict"] is not None
    assert made.readers["tiny"].writer.load == (0, 0)
