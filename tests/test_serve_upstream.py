"""Another engine writes, and what it writes is judged on the way."""

import asyncio
import json

import httpx2 as httpx
import openai
import pytest
from serve_world import reader, renamed, served

import jaxhal
from chat_server import BREAK, serving
from jaxhal.serve.app import Server
from jaxhal.serve.upstream import Upstream, _headers, example_of
from jaxhal.serve.writer import Busy, Failed
from jaxhal.types import Example, Turn
from tiny_lm import tiny_lm

CHAT = [
    {"role": "developer", "content": "Be short."},
    {"role": "user", "content": "What is in the crate?"},
]
TURNS = (Turn("system", "Be short."), Turn("user", "What is in the crate?"))
SAID = "Red pears, I think."


@pytest.fixture(scope="module")
def lm():
    return renamed(tiny_lm(), "tiny")


@pytest.fixture(scope="module")
def one(lm):
    made = reader(lm)
    yield made
    made.close()


@pytest.fixture
def engine(tmp_path, monkeypatch):
    with serving(SAID, tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def url(one, engine):
    upstream = Upstream(engine.url, one.judge)
    with served(Server({"tiny": one}, upstream=upstream)) as url:
        yield url


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


def known(lm, one, response=SAID, **example):
    example = Example(response, **example)
    (report,) = jaxhal.score(lm, [example], one.judge.chosen, progress=False)
    return report


def test_an_answer_and_the_verdict_on_it(lm, one, engine, client):
    """In the body and in the headers; the request goes through as it is."""
    # tiny has no chat template, so a system turn cannot be read: the last turn alone.
    raw = client.chat.completions.with_raw_response.create(
        model="theirs", messages=CHAT[1:], temperature=0.3, extra_body={"own": 1}
    )
    found, want = raw.parse(), known(lm, one, turns=TURNS[1:])
    assert found.choices[0].message.content == SAID
    assert found.jaxhal["verdict"] == want.verdict == found.choices[0].jaxhal["verdict"]
    assert found.jaxhal["probability"] == pytest.approx(want.probability, abs=1e-5)
    assert raw.headers["x-jaxhal-verdict"] == want.verdict
    assert float(raw.headers["x-jaxhal-probability"]) == pytest.approx(
        want.probability, abs=1e-4
    )
    path, body = engine.asked[-1]
    assert path == "/v1/chat/completions"
    wanted = {"model": "theirs", "messages": CHAT[1:], "temperature": 0.3, "own": 1}
    assert body == wanted
    assert engine.keys == [None]  # the client's own key is not theirs


_PARTS = [{"type": "thinking", "thinking": []}, {"type": "text", "text": "Pears."}]


@pytest.mark.parametrize(
    ("change", "want"),
    [
        ({"logprobs": {"content": [{"logprob": float("-inf")}]}}, 200),
        ({"message": {"role": "assistant", "content": "Red \ud83d pears"}}, 200),
        ({"message": {"role": "assistant", "content": _PARTS}}, 200),
        ({"message": {"role": "assistant", "content": 5}}, 502),
        ({"index": float("inf")}, 502),
    ],
)
def test_odd_fields_of_an_engine_cost_no_answer(one, change, want):
    choice = {"index": 0, "message": {"role": "assistant", "content": "Red pears."}}
    said = json.dumps({"id": "x", "choices": [choice | change]}).encode()
    engine = Upstream("http://engine/v1", one.judge)
    answers = httpx.MockTransport(lambda request: httpx.Response(200, content=said))
    engine._client = httpx.AsyncClient(transport=answers)
    asked = {"messages": [{"role": "user", "content": "What?"}]}
    with served(Server({"tiny": one}, upstream=engine)) as url:
        found = httpx.post(f"{url}/v1/chat/completions", json=asked)
    assert found.status_code == want, found.text
    if want == 200:
        (told,) = json.loads(found.content)["choices"]
        assert told["jaxhal"]["verdict"] or told["jaxhal"]["error"]


def test_a_name_in_another_script_fits_in_a_header():
    found = _headers({"verdict": "supported", "by": "тест: a/b"})
    assert found["X-Jaxhal-By"].encode("latin-1").endswith(b"\\u0442: a/b")


def test_halves_of_a_character_are_joined(one):
    texts = {0: "Red \ud83d" + "\ude00 pears"}
    judged = Upstream("http://engine/v1", one.judge)._judged
    example = Example("-", prompt="What?")
    found = asyncio.run(judged(example, texts, lambda report: None))
    assert found[0]["error"] is None


def test_a_stream_goes_through_with_the_verdict_last(lm, one, client):
    *parts, last = client.chat.completions.create(
        model="theirs", messages=CHAT[1:], stream=True
    )
    assert "".join(part.choices[0].delta.content for part in parts) == SAID
    want = known(lm, one, turns=TURNS[1:])
    assert not last.choices and last.jaxhal["verdict"] == want.verdict
    assert last.jaxhal["probability"] == pytest.approx(want.probability, abs=1e-5)


@pytest.mark.parametrize("error", [Busy("too many wait"), Failed("no memory")])
def test_a_judge_that_fails_costs_no_answer(engine, client, one, monkeypatch, error):
    async def reports(examples):
        raise error
        yield

    monkeypatch.setattr(one.judge, "reports", reports)
    found = client.chat.completions.create(model="theirs", messages=CHAT)
    assert found.choices[0].message.content == SAID
    assert found.jaxhal["verdict"] is None and found.jaxhal["error"] == str(error)
    *parts, last = client.chat.completions.create(
        model="theirs", messages=CHAT, stream=True
    )
    assert "".join(part.choices[0].delta.content for part in parts) == SAID
    assert last.jaxhal["error"] == str(error)


def test_what_cannot_be_judged_says_why_and_loses_nothing(lm, engine, client):
    long = "pear " * lm.config.context_length
    engine.replies[:] = [long, None]
    raw = client.chat.completions.with_raw_response.create(
        model="theirs", messages=CHAT[1:]
    )
    found = raw.parse()
    assert found.choices[0].message.content == long
    assert found.jaxhal["verdict"] is None
    assert "over the model's context" in found.jaxhal["error"]
    assert raw.headers["x-jaxhal-verdict"] == "none"
    found = client.chat.completions.create(model="theirs", messages=CHAT[1:])
    assert "no text" in found.jaxhal["error"]


def test_an_engine_that_fails(engine, url, client):
    body = {"messages": CHAT[1:], "model": "theirs"}
    engine.replies[:] = [429, b"<html>", b'{"choices": 3}', ["Red", BREAK]]
    with httpx.Client(base_url=f"{url}/v1", timeout=60) as http:
        found = http.post("/chat/completions", json=body)
        assert found.status_code == 429  # as it is
        for _ in range(2):
            found = http.post("/chat/completions", json=body)
            assert found.status_code == 502
            assert "something else" in found.json()["error"]["message"]
        found = http.post("/chat/completions", json=body | {"stream": True})
        assert "Red" in found.text and "broke off" in found.text
        assert "[DONE]" not in found.text
        engine.replies[:] = [[b"data: [1]\n\n"]]
        found = http.post("/chat/completions", json=body | {"stream": True})
        assert "broke off" in found.text and "[DONE]" not in found.text
        found = http.post("/chat/completions", json=body | {"stop_on": {}})
        assert found.status_code == 400
    with pytest.raises(openai.BadRequestError, match="give a JSON object"):
        client.post("/completions", body=[], cast_to=object)


def test_an_engine_that_is_not_there(one):
    with served(
        Server({"tiny": one}, upstream=Upstream("http://127.0.0.1:9", one.judge))
    ) as url:
        found = httpx.post(f"{url}/v1/completions", json={"prompt": "A"})
        assert found.status_code == 502 and "no answer" in found.text


def test_models_of_an_engine_that_is_not_there(one):
    upstream = Upstream("http://127.0.0.1:9/v1", one.judge)
    with served(Server({"tiny": one}, upstream=upstream)) as url:
        found = httpx.get(f"{url}/v1/models")
        assert found.status_code == 502 and "no answer" in found.text
        raw = b'{"prompt": "A", "temperature": NaN}'
        json_kind = {"content-type": "application/json"}
        found = httpx.post(f"{url}/v1/completions", content=raw, headers=json_kind)
        assert found.status_code == 400 and "not JSON" in found.text


def test_other_ends_of_lines_stay_in_a_stream(engine, url):
    text = "one\u2028two\x85three"
    chunk = {"choices": [{"index": 0, "delta": {"content": text}}]}
    event = f"data: {json.dumps(chunk, ensure_ascii=False)}\r\n\r\n".encode()
    engine.replies[:] = [[event[:40], event[40:], b"data: [DONE]\n\n"]]
    body = {"messages": CHAT[1:], "model": "theirs", "stream": True}
    found = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).content
    *events, last = found.decode().strip("\n").split("\n\n")
    assert last == "data: [DONE]" and len(events) == 2
    assert json.loads(events[0].removeprefix("data: ")) == chunk
    assert "verdicts" in events[1]


def test_nothing_of_one_client_goes_out_with_another(one, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example:3128")
    near = Upstream("http://localhost:8001/v1", one.judge)._client
    assert not near.trust_env
    answer = httpx.Response(
        200,
        headers={"set-cookie": "session=a"},
        request=httpx.Request("GET", "http://localhost:8001/v1/models"),
    )
    near.cookies.extract_cookies(answer)
    assert not [*near.cookies.jar]


def test_what_tools_gave_is_the_context():
    messages = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "The crate holds pears."},
        {"role": "tool", "content": [{"type": "text", "text": "They are red."}]},
    ]
    found = example_of({"messages": messages})
    assert isinstance(found, Example)
    assert found.context == "The crate holds pears.\n\nThey are red."
    assert found.question == "What is in the crate?"
    assert example_of({"messages": CHAT}).turns == TURNS
    assert example_of({"prompt": "Go on"}).prompt == "Go on"
    for bad in ({"messages": 3}, {"messages": [{"role": "user"}]}, {"prompt": [1]}, {}):
        assert "cannot be judged" in example_of(bad), json.dumps(bad)


def test_a_key_goes_to_those_alone_who_may_have_it(one, engine, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-key\r")
    with served(Server({"tiny": one}, upstream=Upstream(engine.url, one.judge))) as url:
        httpx.post(
            f"{url}/v1/completions",
            json={"prompt": "A"},
            headers={"Authorization": "Bearer mine"},
        )
    assert engine.keys == ["Bearer sk-secret-key"]
    far = Upstream("http://engine.example/v1", one.judge)
    assert "authorization" not in far._client.headers
    with pytest.raises(ValueError, match="give the base address"):
        Upstream("engine", one.judge)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ALL_PROXY", "socks5://a.b:1"),
        ("SSL_CERT_FILE", "/nope.pem"),
        ("OPENAI_API_KEY", "sk-schlüssel"),
    ],
)
def test_a_variable_that_forbids_every_request(one, name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=rf"\${name}\b"):
        Upstream("https://engine.example/v1", one.judge)
