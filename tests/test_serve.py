"""The server says what the library says, to many at once, and nothing is lost."""

import asyncio
import json
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import httpx2 as httpx
import jax
import numpy as np
import openai
import pytest
from serve_world import alike, reader, renamed, served

import jaxhal
from jaxhal.generation import GREEDY, Sampling, generate
from jaxhal.serve.app import Server
from jaxhal.serve.response import Wish
from jaxhal.types import Example, Turn
from tiny_lm import tiny_lm

CONTRACT = Path(__file__).parent / "golden" / "openapi.json"
ROW = {"context": "A crate of red pears.", "question": "What is in it?"}
CHAT = [{"role": "user", "content": "What is in the crate?"}]
TURNS = (Turn("user", "What is in the crate?"),)
ABOUT = {"name": "look", "arguments": "{}"}
CALL = {"role": "assistant", "tool_calls": [{"id": "1", "function": ABOUT}]}
GAVE = {"role": "tool", "tool_call_id": "1", "content": "Pears."}


@pytest.fixture(scope="module")
def lm():
    return renamed(tiny_lm(), "tiny")


@pytest.fixture(scope="module")
def made(lm):
    one = reader(lm)
    yield Server({"tiny": one}, max_tokens=12)
    one.close()


@pytest.fixture(scope="module")
def url(made):
    with served(made) as url:
        yield url


@pytest.fixture(scope="module")
def http(url):
    with httpx.Client(base_url=url, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as one:
        yield one


# --- the contract ---------------------------------------------------------------------


def test_the_contract_is_as_written_down(made):
    """A change here is one for clients: raise VERSION where an old one would break."""
    known = made.app().openapi()
    assert known == json.loads(CONTRACT.read_text()), (
        "the contract changed; if that is meant, write it down: "
        "python tests/make_contract.py"
    )


# --- verdicts -------------------------------------------------------------------------


def said_by_the_library(made, lm, row, **more):
    found = jaxhal.score(
        lm,
        [Example(**row, **more)],
        made.readers["tiny"].judge.chosen,
        progress=False,
    )
    return found[0]


def test_a_verdict_is_that_of_the_library(made, lm, http):
    row = ROW | {"response": "Red pears, and a green dog of 1999.", "id": "a"}
    found = http.post("/v1/verdict", json=row | {"tokens": True, "all": True})
    assert found.status_code == 200, found.text
    want, said = said_by_the_library(made, lm, row), found.json()
    tokens = said.pop("tokens")
    for name, value in want.to_dict(every=True).items():
        assert alike(said[name], value), name
    assert [token["text"] for token in tokens] == [t.text for t in want.tokens]
    for token, known in zip(tokens, want.tokens, strict=True):
        assert token["scores"] == pytest.approx(known.scores, abs=1e-5)
    short = http.post("/v1/verdict", json=row).json()
    assert set(short) == {"id", "verdict", "probability", "by", "spans", "error"}
    assert short["by"] == "token_probe" and short["verdict"] is not None


def test_many_rows_each_with_an_error_of_its_own(http, lm):
    rows = [
        ROW | {"response": "Pears.", "id": "good"},
        ROW | {"id": "nothing said"},
        {"answer": "Pears.", "contexts": ["A crate.", "Of pears."], "extra": 1},
        ROW | {"response": "pear " * lm.config.context_length, "id": "long"},
        {"messages": [*CHAT, {"role": "assistant", "content": "Pears."}]},
    ]
    said = http.post("/v1/verdict", json={"rows": rows}).json()["data"]
    assert [one["error"] is None for one in said] == [True, False, True, False, True]
    assert "'response' is missing" in said[1]["error"]
    assert "over the model's context" in said[3]["error"]
    assert [one["id"] for one in said] == [
        *("good", "nothing said", "row 3", "long", "row 5")
    ]
    lines = "\n\n".join(map(json.dumps, rows)) + "\nnot json\n"
    path, lined = "/v1/verdict/lines?tokens=true", {"content-type": "application/jsonl"}
    found = http.post(path, content=lines, headers=lined)
    assert found.headers["content-type"].startswith("application/x-ndjson")
    each = [json.loads(line) for line in found.text.splitlines()]
    assert [one["verdict"] for one in each[:-1]] == [one["verdict"] for one in said]
    assert each[-1]["error"].startswith("line 10: not JSON") and each[0]["tokens"]


def test_what_a_page_elsewhere_may_send_is_not_taken(http):
    """A browser asks before it sends JSON to a server of another name; not text."""
    raw = json.dumps(ROW | {"response": "Pears."})
    for path in ("/v1/verdict", "/v1/verdict/lines", "/v1/completions"):
        for kind in ("text/plain", "application/x-www-form-urlencoded"):
            found = http.post(path, content=raw, headers={"content-type": kind})
            assert found.status_code in (400, 415), path


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (ROW, 400, "'response' is missing"),
        ({"response": "Yes."}, 400, "neither 'prompt' nor 'context'"),
        (ROW | {"response": "  "}, 400, "visible character"),
        (ROW | {"response": 3}, 400, "response: Input should be a valid string"),
        (ROW | {"response": "x", "shape": 1}, 400, "shape: there is no such field"),
        (ROW | {"response": "x", "model": "other"}, 404, "use tiny"),
        (ROW | {"response": "pear " * 600}, 400, "over the model's context"),
        ({"messages": CHAT}, 400, "has to end with the answer"),
        (
            {
                "messages": [*CHAT, CALL, GAVE, {"role": "assistant", "content": "A"}],
                "tools": [{"type": "function", "function": {"name": "look"}}],
            },
            400,
            "user, assistant, tool need a chat template",
        ),
        ({"response": "x", "prompt": "y", "tools": [{}]}, 400, "'tools' without 'turn"),
        ([ROW], 400, "give a JSON object, and say so: Content-Type"),
    ],
)
def test_bad_answers(http, body, status, message):
    found = http.post("/v1/verdict", json=body)
    assert found.status_code == status
    assert message in found.json()["error"]["message"]


# --- answers --------------------------------------------------------------------------


def test_an_answer_is_that_of_the_library(lm, client):
    """Whole and streamed: text, log probabilities, usage, and the verdict on it."""
    options = {"model": "tiny", "messages": CHAT, "max_tokens": 9, "seed": 3}
    whole = client.chat.completions.create(**options, top_p=0.9, logprobs=True)
    ((want,),) = generate(
        lm,
        [Example("-", turns=TURNS)],
        max_new_tokens=9,
        sampling=Sampling(top_p=0.9),
        key=jax.random.key(3),
        progress=False,
    )
    choice = whole.choices[0]
    assert choice.message.content == want.text
    assert choice.finish_reason == {"eos": "stop"}.get(want.stopped, want.stopped)
    known = [one.logprob for one in choice.logprobs.content]
    assert np.allclose(known, want.logprobs, atol=1e-5)
    told = [(one.token, one.bytes) for one in choice.logprobs.content]
    whole_ones = [(token, some) for token, some in told if some is not None]
    assert whole_ones and all(
        bytes(some).decode() == token for token, some in whole_ones
    )
    split = [token for token, some in told if some is None]  # bytes of a character
    assert split and all("\N{REPLACEMENT CHARACTER}" in token for token in split)
    assert whole.usage.completion_tokens == len(want.tokens)
    parts = list(
        client.chat.completions.create(
            **options,
            top_p=0.9,
            stream=True,
            logprobs=True,
            stream_options={"include_usage": True},
        )
    )
    *parts, last = parts
    assert last.usage.total_tokens == whole.usage.total_tokens and not last.choices
    # The prompt but for its last token was read for the first of the two.
    read_before = last.usage.prompt_tokens_details.cached_tokens
    assert read_before == last.usage.prompt_tokens - 1
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == want.text
    assert parts[-1].jaxhal == whole.jaxhal
    tokens = [one for part in parts[1:-1] for one in part.jaxhal["tokens"]]
    assert "".join(one["text"] for one in tokens) == text
    assert len(tokens) == len(want.tokens)
    assert all(0 <= one["score"] <= 1 for one in tokens)


def test_the_verdict_on_an_answer_is_that_of_a_stream(made, lm, client):
    found = client.completions.create(
        model="tiny", prompt="A crate of ", max_tokens=30, temperature=0.0
    )
    (one, *_) = made.readers["tiny"].judge.chosen
    prompt = Example("-", prompt="A crate of ", templated=True)
    *_, last = jaxhal.stream_scores(
        lm, prompt, [one], max_new_tokens=30, sampling=GREEDY
    )
    (want,) = one.probabilities([last.scores["token_probe"]])
    assert found.jaxhal["probability"] == pytest.approx(want, abs=1e-5)
    assert found.jaxhal["by"] == "token_probe"
    again = {"prompt": "A crate of ", "max_tokens": 3, "temperature": 0.0}
    for count, given in ((None, False), (0, True), (1, True)):
        told = client.completions.create(model="tiny", logprobs=count, **again)
        (choice,) = told.choices
        assert (choice.logprobs is not None) == given
        assert not given or len(choice.logprobs.token_logprobs) == 3


def test_many_at_once_are_as_each_alone(client, url):
    """More than there are slots, of all lengths, hot and cold."""
    asked = [
        {
            "prompt": "word " * (3 + 11 * number),
            "max_tokens": 3 + 5 * number,
            "seed": number,
            "temperature": [0.0, 1.0, 0.5][number % 3],
            "top_p": [1.0, 0.7][number % 2],
        }
        for number in range(7)
    ]

    async def together():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as many:
            return await asyncio.gather(
                *(many.completions.create(model="tiny", **one) for one in asked)
            )

    for one, found in zip(asked, asyncio.run(together()), strict=True):
        alone = client.completions.create(model="tiny", **one)
        assert alone.choices[0].text == found.choices[0].text
        assert alone.usage.total_tokens == found.usage.total_tokens
        assert alone.jaxhal["probability"] == pytest.approx(
            found.jaxhal["probability"], abs=1e-5
        )


def test_a_stop_string_ends_an_answer(client):
    options = {"model": "tiny", "prompt": "A", "max_tokens": 30, "temperature": 0.0}
    whole = client.completions.create(**options).choices[0].text
    end = whole[8:10]
    found = client.completions.create(**options, stop=[end]).choices[0]
    assert found.text == whole[: whole.index(end)] and found.finish_reason == "stop"


def test_a_verdict_is_of_what_was_told(made, client):
    """Not of the tokens behind a stop string, which were written before it was seen."""
    options = {"model": "tiny", "prompt": "A", "temperature": 0.0}
    whole = client.completions.create(**options, max_tokens=30).choices[0].text
    for at in range(5, 9):  # wherever a round of steps ends
        stop = [whole[at : at + 2]]
        found = client.completions.create(**options, max_tokens=30, stop=stop)
        count = found.usage.completion_tokens
        alone = client.completions.create(**options, max_tokens=count)
        assert found.jaxhal["probability"] == pytest.approx(
            alone.jaxhal["probability"], abs=1e-5
        )


def test_a_store_that_does_not_answer_is_no_error_of_the_server(made, monkeypatch):
    def gone(self):
        raise RuntimeError("the store gave no answer")

    store = type("Store", (), {"__len__": gone})()
    dog = SimpleNamespace(watchdog=SimpleNamespace(store=store))
    monkeypatch.setattr(made, "watchdog", dog)
    response = SimpleNamespace(status_code=200)
    found = asyncio.run(made.ready(response))
    assert response.status_code == 503 and "gave no answer" in found.why


def test_who_leaves_waits_no_more(made):
    writer = made.readers["tiny"].writer

    async def leave():
        told = await writer.write(Wish(Example("-", prompt="A"), 4))
        begun = asyncio.ensure_future(anext(told))
        await asyncio.sleep(0)
        begun.cancel()
        await asyncio.gather(begun, return_exceptions=True)
        await told.aclose()

    with writer._changed:
        rows = dict(writer._rows)
    most, writer.most = writer.most, 0  # no slot is free
    try:
        asyncio.run(leave())
        assert writer.load == (len(rows), 0)
    finally:
        writer.most = most


def test_an_answer_that_turns_goes_no_further(client):
    """What made it suspicious is not shown; written anew it may be another one."""
    options = {"model": "tiny", "prompt": "A", "max_tokens": 40, "seed": 1}
    free = list(client.completions.create(**options, stream=True))
    seen = [one.jaxhal["probability"] for one in free[:-1]]
    assert free[-1].choices[0].finish_reason == "length"
    most = (max(seen) + seen[0]) / 2  # reached on the way
    shown = "".join(one.choices[0].text for one in free)
    for then in ("end", "regenerate"):
        on = {"stop_on": {"probability": most, "then": then}}
        found = client.completions.create(**options, extra_body=on)
        if found.choices[0].finish_reason == "content_filter":
            assert found.jaxhal["probability"] >= most
        else:
            assert then == "regenerate" and found.jaxhal["probability"] < most
        if then == "end":
            assert found.choices[0].finish_reason == "content_filter"
            assert shown.startswith(found.choices[0].text)
            assert len(found.choices[0].text) < len(shown)
    # Where nothing is shown it says why all the same.
    on = {"stop_on": {"probability": min(seen) / 2, "then": "end"}}
    none = client.completions.create(**options, extra_body=on)
    assert none.choices[0].text == "" and none.jaxhal["verdict"] is None
    assert none.jaxhal["probability"] >= min(seen) / 2
    assert "before anything was shown" in none.jaxhal["error"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"n": 2}, "n: Input should be less than or equal to 1"),
        ({"n": True}, "n: Input should be a valid integer"),
        ({"tools": [{"type": "function"}]}, "tools: List should have at most 0"),
        ({"top_logprobs": 3}, "top_logprobs: Input should be less"),
        ({"x" * 9000: 3}, f"{'x' * 80}: this is not supported; leave it out"),
        ({"temperature": 3.0}, "less than or equal to 2"),
        ({"max_tokens": 0}, "greater than or equal to 1"),
        ({"max_tokens": 5000}, "over the model's context"),
        ({"stop": [""]}, "give a list of strings that hold text"),
        ({"stop": ["x"] * 17}, "at most 16 items"),
        ({"stop": "x" * 201}, "at most 200 characters"),
        ({"stop_on": {"probability": 2}}, "less than or equal to 1"),
        (
            {"temperature": 0, "stop_on": {"probability": 0.5, "then": "regenerate"}},
            "give a temperature above 0",
        ),
        ({"messages": []}, "at least 1 item"),
        ({"messages": [{"role": "function", "content": "x"}]}, "'system'"),
        ({"messages": [*CHAT, {"role": "tool"}]}, "'messages[1].content' is null"),
        ({"messages": [*CHAT, CALL]}, "to the user or a tool"),
        ({"messages": [*CHAT, CALL, GAVE]}, "assistant, tool need a chat template"),
        (
            {"messages": [{"role": "assistant", "content": "x"}]},
            "to the user or a tool",
        ),
    ],
)
def test_bad_wishes(http, more, message):
    body = {"model": "tiny", "messages": CHAT, "stream": True} | more
    found = http.post("/v1/chat/completions", json=body)
    assert found.status_code == 400
    assert message in found.json()["error"]["message"]


def test_what_changes_nothing_may_be_said(client):
    options = {"model": "tiny", "messages": CHAT, "max_tokens": 2, "user": "me"}
    options |= {"n": 1, "frequency_penalty": 0.0, "tools": []}
    client.chat.completions.create(**options, extra_body={"functions": None})


# --- the server -----------------------------------------------------------------------


def test_who_leaves_frees_the_slot(made, url):
    with httpx.Client(base_url=url, timeout=60) as one:
        body = {"prompt": "A", "max_tokens": 400, "stream": True}
        with one.stream("POST", "/v1/completions", json=body) as stream:
            next(stream.iter_lines())
            assert made.readers["tiny"].writer.load[0] == 1
    until = time.monotonic() + 60
    while made.readers["tiny"].writer.load != (0, 0):
        assert time.monotonic() < until, "the slot is still taken"
        time.sleep(0.02)


def test_what_a_server_says_of_itself(http, client):
    assert [one.id for one in client.models.list().data] == ["tiny"]
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").json()["status"] == "ready"
    (about,) = http.get("/v1/about").json()["readers"]
    assert about["decides"] == about["rides"] == "token_probe"
    assert "AUROC 0.80" in about["because"]
    said = http.get("/metrics").text
    assert 'jaxhal_requests_total{path="/health",status="200"}' in said
    assert "jaxhal_tokens_total" in said and "jaxhal_writing 0.0" in said
    for path, status, why in (
        ("/nowhere", 404, "nothing is served at /nowhere"),
        ("/v1/verdict", 405, "GET is not answered at /v1/verdict; send POST"),
    ):
        refused = http.get(path)
        assert refused.status_code == status
        assert why in refused.json()["error"]["message"]


def test_without_a_detector_that_decides(lm):
    """Answers come without a verdict, and the server says that none is to be had."""
    from jaxhal.detectors import build
    from jaxhal.scoring.fitting import untrained

    one = reader(lm, untrained(build("token_entropy")))
    try:
        with served(Server({"tiny": one})) as url, httpx.Client(base_url=url) as http:
            found = http.get("/ready")
            assert found.status_code == 503 and "fitted" in found.json()["why"]
            body = {"prompt": "A", "max_tokens": 2}
            said = http.post("/v1/completions", json=body, timeout=60).json()
            assert said["jaxhal"] is None
            on = body | {"stop_on": {"probability": 0.5}}
            found = http.post("/v1/completions", json=on)
            assert "nothing can stop" in found.json()["error"]["message"]
    finally:
        one.close()


def test_a_token_and_a_name_of_its_own(made, http):
    locked = Server(made.readers, token="secret", largest=1000)
    with served(locked) as url, httpx.Client(base_url=url) as client:
        for shown in (None, "Bearer wrong", "Basic secret"):
            headers = {} if shown is None else {"Authorization": shown}
            found = client.get("/v1/models", headers=headers)
            assert found.status_code == 401, shown
        bearer = {"Authorization": "Bearer secret"}
        assert client.get("/v1/models", headers=bearer).status_code == 200
        assert client.get("/health").status_code == 200
        body = {"prompt": "A" * 2000}
        found = client.post("/v1/completions", json=body, headers=bearer)
        assert found.status_code == 413
    found = http.get("/v1/models", headers={"Host": "elsewhere.example"})
    assert found.status_code == 421


def test_a_model_that_fails_says_so_and_goes_on(made, http, monkeypatch):
    from jaxhal.generation import pieces, slots

    def broken(*args, **options):
        raise RuntimeError("no memory")

    body = {"prompt": "A", "max_tokens": 2}
    # Wherever it fails, a row that is about to be written as well is told.
    for module, name in (
        (pieces, "begin"),
        (pieces, "read_piece"),
        (slots, "empty"),
        (slots, "enter"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, broken)
            new = body | {"prompt": f"Of {name}"}
            found = http.post("/v1/completions", json=new, timeout=60)
            assert found.status_code == 500 and "no memory" in found.text, name
    with monkeypatch.context() as patch:
        patch.setattr(slots, "go_on", broken)
        found = http.post("/v1/completions", json=body)
        assert found.status_code == 500
        streamed = http.post("/v1/completions", json=body | {"stream": True})
        assert "no memory" in streamed.text and "[DONE]" not in streamed.text
    assert http.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize("token", ["", "pässwörd", "abc\n", " abc"])
def test_a_token_that_nobody_could_show(made, token):
    with pytest.raises(ValueError, match="token (is empty|holds characters)"):
        Server(made.readers, token=token)


def test_too_many_are_told_so(made, http, monkeypatch):
    from jaxhal.serve import judge, writer

    monkeypatch.setattr(writer, "_WAITING", 0)
    monkeypatch.setattr(judge, "_WAITING", 1)
    monkeypatch.setattr(judge.Judge, "waiting", 1)
    for path, kind, body in (
        ("/v1/completions", "json", {"prompt": "A", "stream": True}),
        ("/v1/verdict", "json", ROW | {"response": "Pears."}),
        ("/v1/verdict/lines", "jsonl", ROW | {"response": "Pears."}),
    ):
        kind = {"content-type": f"application/{kind}"}
        found = http.post(path, content=json.dumps(body), headers=kind)
        assert found.status_code == 503
        assert "try again later" in found.json()["error"]["message"]
    row = json.dumps(ROW | {"response": "Pears."})
    for path, kind, body in (
        ("/v1/verdict", "json", f'{{"rows": [{row}, {row}]}}'),
        ("/v1/verdict/lines", "jsonl", f"{row}\n{row}"),
    ):
        kind = {"content-type": f"application/{kind}"}
        found = http.post(path, content=body, headers=kind)
        assert found.status_code == 413
        why = "2 answers are asked of at once, over 1; send them in parts"
        assert found.json()["error"]["message"] == why


def test_answers_that_are_read_together_are_as_each_alone(made, lm, url):
    """Asked by threads at once."""
    texts = [f"Pears, {n} of them, and {'more ' * n}." for n in range(9)]
    found = {}

    def ask(text):
        with httpx.Client(base_url=url, timeout=120) as one:
            row = ROW | {"response": text}
            found[text] = one.post("/v1/verdict", json=row).json()

    threads = [threading.Thread(target=ask, args=(text,)) for text in texts]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    for text in texts:
        want = said_by_the_library(made, lm, ROW | {"response": text})
        assert found[text]["probability"] == pytest.approx(want.probability, abs=1e-5)


def test_greedy_is_the_likeliest(lm, client):
    ((want,),) = generate(
        lm,
        [Example("-", turns=TURNS)],
        max_new_tokens=8,
        sampling=GREEDY,
        progress=False,
    )
    found = client.chat.completions.create(
        model="tiny", messages=CHAT, temperature=0, max_completion_tokens=8
    )
    assert found.choices[0].message.content == want.text


def test_a_watchdog_is_a_mode_of_the_same_server(made, tmp_path_factory):
    """It has the conversations; verdicts are beside it."""
    from test_encoding import write, write_pooling
    from test_watchdog import KNOWN, watchdog

    from jaxhal.serve.proxy import Service
    from jaxhal.watchdog import Guard

    folder = write(tmp_path_factory.mktemp("encoder"))
    write_pooling(folder, normalize=True, mean=True)
    for points, ready in ((None, 200), ([], 503)):
        given = {} if points is None else {"points": points}
        dog = Service(watchdog(str(folder), Guard(similarity=0.2), **given))
        with pytest.raises(ValueError, match="not that of the watchdog"):
            Server(made.readers, watchdog=dog, token="secret")
        both = Server(made.readers, watchdog=dog)
        with served(both) as url, httpx.Client(base_url=url, timeout=60) as http:
            assert http.get("/ready").status_code == ready
            said = http.post(
                "/v1/chat/completions",
                json={"messages": [{"role": "user", "content": KNOWN[0]}]},
            )
            assert said.json()["watchdog"]["flagged"] is (points is None)
            name = said.json()["id"]
            body = {"id": name, "hallucinated": True}
            assert http.post("/v1/feedback", json=body).status_code == 200
            assert http.post("/v1/feedback", json={}).status_code == 400
            row = ROW | {"response": "Pears."}
            assert http.post("/v1/verdict", json=row).json()["verdict"] is not None
            assert http.post("/v1/completions", json={"prompt": "A"}).status_code == 404
            metrics = http.get("/metrics").text
            assert "watchdog_checks_total" in metrics
            for path, status in (("chat/completions", 200), ("feedback", 400)):
                counted = f'path="/v1/{path}",status="{status}"'
                assert f"jaxhal_requests_total{{{counted}}} 1.0" in metrics


def test_a_reader_that_fails_says_so_in_the_line(http, monkeypatch):
    from jaxhal.scoring import detection

    def broken(*args, **options):
        raise RuntimeError("no memory")

    row, lined = ROW | {"response": "Pears."}, {"content-type": "application/jsonl"}
    with monkeypatch.context() as patch:
        patch.setattr(detection, "score_batches", broken)
        found = http.post("/v1/verdict/lines", content=json.dumps(row), headers=lined)
        assert "no memory" in json.loads(found.text)["error"]["message"]
        assert http.post("/v1/verdict", json=row).status_code == 500
    assert http.post("/v1/verdict", json=row).status_code == 200


def test_an_upload_that_breaks_off_is_no_failure_of_the_server(http, caplog):
    where = http.base_url
    head = "POST /v1/verdict/lines HTTP/1.1\r\nHost: localhost\r\n"
    head += "Content-Type: application/jsonl\r\nContent-Length: 99\r\n\r\n"
    with socket.create_connection((where.host, where.port)) as one:
        one.sendall(head.encode() + b'{"id"')
    said = 'path="/v1/verdict/lines",status="499"'
    for _ in range(100):
        if said in http.get("/metrics").text:
            break
        time.sleep(0.05)
    assert said in http.get("/metrics").text
    assert "a request failed" not in caplog.text
