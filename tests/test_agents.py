"""Agents of every kind, and what comes of those that misbehave."""

import asyncio
import json
import ssl
import sys
import threading
import time

import numpy as np
import pytest
from test_encoding import write, write_pooling

import jaxhal
from chat_server import BREAK, STALL, serving
from jaxhal.datasets import Question
from jaxhal.llm import endpoint as endpoints
from jaxhal.llm.endpoint import Endpoint
from jaxhal.models.encoders.encoding import embed
from jaxhal.watchdog import (
    Agent,
    CallableAgent,
    Conversation,
    EndpointAgent,
    EndpointEvaluator,
    Evaluator,
    LocalAgent,
    Passages,
    RagAgent,
    ReferenceEvaluator,
    Reply,
    agents,
    evaluators,
)
from jaxhal.watchdog.agents import local, rag
from tiny_lm import tiny_lm


def ask(agent, queries, n=1, temperature=1.0):
    return asyncio.run(agent.respond(queries, n, temperature))


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = write(tmp_path_factory.mktemp("encoder"))
    write_pooling(folder, normalize=True, mean=True)
    return str(folder)


def test_a_model_here(lm):
    agent = LocalAgent(lm, "Say: {query}", max_new_tokens=6)
    assert isinstance(agent, Agent) and agent.name == lm.name
    some = ask(agent, ["a", "b"], n=3, temperature=0.8)
    assert [len(replies) for replies in some] == [3, 3]
    # What is said follows from the query alone.
    assert ask(agent, ["b"], n=3, temperature=0.8) == [some[1]]
    assert ask(agent, ["b"], n=3, temperature=0.7) != [some[1]]
    assert ask(agent, ["b"], n=3, temperature=0.8123) == [some[1]]
    ((likeliest,),) = ask(agent, ["a"], temperature=0.0)
    ((want,),) = jaxhal.generate(
        lm, ["Say: a"], max_new_tokens=6, sampling=jaxhal.GREEDY, progress=False
    )
    assert likeliest.text == want.text.strip()


def test_a_query_too_long_fails_alone(lm):
    agent = LocalAgent(lm, max_new_tokens=4)
    long = "word " * lm.config.context_length
    (failed,), (fine,), (empty,) = ask(agent, [long, "a", ""], temperature=0.0)
    assert failed.error and "over the model's context" in failed.error
    assert fine.text and fine.error is None
    assert empty.error


def test_queries_at_one_time_are_answered_together(lm, monkeypatch):
    sizes = []
    real = local.generate

    def counting(lm, prompts, **options):
        sizes.append((len(prompts), options["n"]))
        return real(lm, prompts, **options)

    monkeypatch.setattr(local, "generate", counting)
    agent = LocalAgent(lm, max_new_tokens=3)

    async def many():
        return await asyncio.gather(
            *(agent.respond([f"q{n}"], temperature=0.0) for n in range(8)),
            *(agent.respond([f"q{n}"], n=2) for n in range(2)),
        )

    found = asyncio.run(many())
    assert sizes == [(8, 1), (2, 2)]
    assert found[3] == ask(agent, ["q3"], temperature=0.0)


@pytest.mark.parametrize(
    ("characters", "n", "sizes"),
    # Reads at most 32 prompts, and writes 128 short answers or 32 to long prompts.
    [(9, 1, [32, 8]), (9, 10, [12, 12, 12, 4]), (9000, 10, [3] * 13 + [1])],
)
def test_how_many_are_answered_at_once(lm, monkeypatch, characters, n, sizes):
    seen = []

    def written(lm, prompts, *, n, **options):
        seen.append(len(prompts))
        tokens, values = np.zeros(1, int), np.zeros(1)
        said = local.requests.Generated("a", tokens, values, "eos", {})
        return [[said] * n for _ in prompts]

    monkeypatch.setattr(local, "generate", written)
    monkeypatch.setattr(local.requests, "unanswerable", lambda *_: {})
    agent = LocalAgent(lm, max_new_tokens=48)
    ask(agent, [f"{at} {'x' * characters}" for at in range(40)], n=n)
    assert seen == sizes


def test_errors_of_the_model_are_raised(lm, monkeypatch):
    def broken(*_, **__):
        raise MemoryError("no room")

    agent = LocalAgent(lm, max_new_tokens=3)
    monkeypatch.setattr(local, "generate", broken)
    with pytest.raises(MemoryError, match="no room"):
        ask(agent, ["a"])
    monkeypatch.undo()
    assert ask(agent, ["a"])[0][0].text


@pytest.mark.parametrize(
    ("options", "message"), [({"n": 0}, "n is 0"), ({"temperature": -1.0}, "e -1.0")]
)
def test_bad_wishes(lm, options, message):
    with pytest.raises(ValueError, match=message):
        ask(LocalAgent(lm), ["a"], **options)
    with pytest.raises(ValueError, match="must hold {query}"):
        LocalAgent(lm, "Say")


def test_any_function():
    seen = []

    def slow(query, temperature):
        seen.append((query, temperature))
        return f"{query}!"

    agent = CallableAgent(slow)
    assert isinstance(agent, Agent) and agent.name == "slow"
    assert ask(agent, ["a", "b"], n=2, temperature=0.5) == [[Reply("a!")] * 2] + [
        [Reply("b!")] * 2
    ]
    assert sorted(seen) == [("a", 0.5)] * 2 + [("b", 0.5)] * 2

    async def later(query):
        await asyncio.sleep(0)
        return query.upper()

    assert ask(CallableAgent(later, "later"), ["a"]) == [[Reply("A")]]
    with pytest.raises(ValueError, match="concurrency is 0"):
        CallableAgent(slow, concurrency=0)


def test_functions_run_so_many_at_a_time():
    lock, now, most = threading.Lock(), [0], [0]

    def busy(query):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.01)
        with lock:
            now[0] -= 1
        return query

    agent, queries = CallableAgent(busy, concurrency=3), [str(n) for n in range(12)]
    ask(agent, queries)
    assert most[0] == 3

    async def twice():
        return await asyncio.gather(agent.respond(queries), agent.respond(queries))

    most[0] = 0
    asyncio.run(twice())
    assert most[0] == 3


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("", "the answer is empty"),
        (" \n", "the answer is empty"),
        (None, "the answer is NoneType and not text"),
        ({"a": 1}, "the answer is dict and not text"),
        ("x" * 200_000, "200000 characters, over 100000"),
        (RuntimeError("broken"), "RuntimeError: broken"),
        (OSError("x" * 999), "OSError: xxx"),
    ],
)
def test_answers_of_no_use(said, error):
    def answer(query):
        if isinstance(said, Exception):
            raise said
        return said

    ((reply,),) = ask(CallableAgent(answer), ["a"])
    assert not reply.text and error in reply.error and len(reply.error) <= 200


def test_slow_functions_leave_threads_to_others():
    slow, both = threading.Event(), threading.Barrier(65)

    def answer(query):
        both.wait(timeout=30)  # all of them at once
        slow.wait(timeout=30)
        return "late"

    async def others():
        agent = CallableAgent(answer, concurrency=64)
        waiting = asyncio.create_task(agent.respond(["a"], 64))
        await asyncio.to_thread(both.wait, 30)
        slow.set()
        return await waiting

    (replies,) = asyncio.run(others())
    assert [one.text for one in replies] == ["late"] * 64


def test_half_a_character_is_replaced():
    ((reply,),) = ask(CallableAgent(lambda query: "a\ud800b"), ["a"])
    assert reply.text == "a?b" and json.dumps(reply.text).encode()


def endpoint(server, **options):
    timeout = options.pop("timeout", 5.0)
    return EndpointAgent(Endpoint(server.url, "m", timeout), **options)


def test_an_endpoint(tmp_path, monkeypatch):
    with serving(lambda question: question.upper(), tmp_path, monkeypatch) as server:
        agent = endpoint(server, max_tokens=9)
        assert isinstance(agent, Agent) and agent.name == "m"
        assert ask(agent, ["a", "b"], 2, 0.7) == [[Reply("A")] * 2, [Reply("B")] * 2]
    assert len(server.asked) == 4
    for path, body in server.asked:
        assert path == "/v1/chat/completions"
        assert body["temperature"] == 0.7 and body["max_tokens"] == 9


def test_an_endpoint_hears_a_conversation(encoder, tmp_path, monkeypatch):
    turns = [
        ("system", "Be kind."),
        ("user", "Hi."),
        ("assistant", "Hello."),
        ("user", "w1?"),
    ]
    talk = Conversation(turns, {"max_tokens": 50, "stop": ["x"], "top_k": 3})
    assert talk.query == "w1?" and talk.startswith("system: Be kind.\n\nuser: Hi.")
    with serving("fine", tmp_path, monkeypatch) as server:
        agent = endpoint(server, max_tokens=9)
        wide = endpoint(server, max_tokens=90)
        rag = RagAgent(wide, Passages(["w1 w2"], encoder, progress=False))
        for one in (agent, rag):
            assert one.hears_wishes
            assert ask(one, [talk])[0][0].text == "fine"
        assert heard(wide, Conversation([("user", "q")], {"max_completion_tokens": 95}))
    (_, first), (_, second), (_, third) = server.asked
    said = [(one["role"], one["content"]) for one in first["messages"]]
    assert said == turns
    assert (first["max_tokens"], first["stop"], first["top_k"]) == (9, ["x"], 3)
    said = [(one["role"], one["content"]) for one in second["messages"]]
    assert said[:-1] == turns[:-1] and "w1 w2" in said[-1][1] and "w1?" in said[-1][1]
    assert "Hello" not in said[-1][1] and second["max_tokens"] == 50
    assert third["max_completion_tokens"] == 90 and "max_tokens" not in third
    assert not RagAgent(CallableAgent(str.upper, "up"), rag.passages).hears_wishes
    with pytest.raises(ValueError, match="turns is empty"):
        Conversation([])


def test_answers_that_are_cut(lm, tmp_path, monkeypatch):
    choice = {"index": 0, "finish_reason": "length"}
    whole = choice | {"message": {"role": "assistant", "content": "And"}}
    piece = choice | {"delta": {"content": "And"}}
    with serving("", tmp_path, monkeypatch) as server:
        server.replies = [
            json.dumps({"choices": [whole]}).encode(),
            [f"data: {json.dumps({'choices': [piece]})}\n\n".encode()],
        ]
        agent = endpoint(server)
        assert ask(agent, ["a"]) == [[Reply("And", cut=True)]]
        assert heard(agent) == [Reply("And", cut=True)]
    local = LocalAgent(lm, max_new_tokens=8)
    ((reply,),) = ask(local, ["b"], temperature=0.0)
    assert len(reply.text) > 2 and reply.cut


@pytest.mark.parametrize("status", [429, 500, 503])
def test_it_is_asked_again(tmp_path, monkeypatch, status):
    with serving("late", tmp_path, monkeypatch) as server:
        server.replies = [status, status, "late"]
        assert ask(endpoint(server), ["a"]) == [[Reply("late")]]
        server.replies = [status]
        ((reply,),) = ask(endpoint(server, retries=2), ["a"])
    assert not reply.text and reply.error and str(status) in reply.error
    assert len(server.asked) == 3 + 3


@pytest.mark.parametrize(
    "said",
    [
        None,
        "",
        b"{",
        b"[]",
        b'"text"',
        b"{}",
        b'{"choices": 5}',
        "y" * 100_001,
        b"[" * 100_000,
    ],
)
def test_what_is_no_completion(tmp_path, monkeypatch, said):
    def reply(question):
        return said if question == "bad" else "fine"

    with serving(reply, tmp_path, monkeypatch) as server:
        (bad,), (fine,) = ask(endpoint(server, retries=0), ["bad", "good"])
    assert not bad.text and bad.error
    assert fine == Reply("fine")


def test_a_fault_of_ones_own_is_no_answer(tmp_path, monkeypatch):
    def broken(answer):
        raise AttributeError("a slip")

    monkeypatch.setattr("jaxhal.watchdog.agents.endpoint.content_of", broken)
    with (
        serving("same", tmp_path, monkeypatch) as server,
        pytest.raises(AttributeError, match="a slip"),
    ):
        ask(endpoint(server), ["a"])


def test_an_endpoint_that_hangs(tmp_path, monkeypatch):
    def reply(question):
        return STALL if question == "bad" else "fine"

    with serving(reply, tmp_path, monkeypatch) as server:
        agent = endpoint(server, timeout=0.3, retries=1)
        (bad,), (fine,) = ask(agent, ["bad", "good"])
        assert "Timeout" in str(bad.error) and fine.text == "fine"
        assert server.questions.count("bad") == 2


def test_an_endpoint_that_drips(tmp_path, monkeypatch):
    monkeypatch.setattr(endpoints, "PATIENCE", 0.5)
    with serving([b" "] * 1000, tmp_path, monkeypatch) as server:
        ((bad,),) = ask(endpoint(server, timeout=0.2), ["a"])
        assert bad.error == "no whole answer in 2 seconds" and len(server.asked) == 1


def test_a_stream_that_never_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(endpoints, "PATIENCE", 0.5)

    def slowly():
        time.sleep(0.05)
        return "more "

    with serving([slowly] * 1000, tmp_path, monkeypatch) as server:
        *pieces, last = heard(endpoint(server, timeout=0.2))
        assert pieces and last.error == "no whole answer in 2 seconds"


@pytest.mark.parametrize("status", [401, 403, 404])
def test_an_endpoint_that_takes_nothing(tmp_path, monkeypatch, status):
    with (
        serving(status, tmp_path, monkeypatch) as server,
        pytest.raises(RuntimeError, match="takes no query for 'm'.*check the address"),
    ):
        ask(endpoint(server), ["a", "b"])


def heard(agent, query="q"):
    async def all_of():
        return [piece async for piece in agents.streamed(agent, query, 0.3)]

    return asyncio.run(all_of())


def test_an_answer_while_it_is_written(encoder, tmp_path, monkeypatch):
    with serving("one two three", tmp_path, monkeypatch) as server:
        agent = endpoint(server, max_tokens=9)
        assert hasattr(agent, "stream")
        pieces = heard(agent)
        assert pieces == [Reply("one"), Reply(" two"), Reply(" three")]
        ((_, body),) = server.asked
        assert body["temperature"] == 0.3 and body["max_tokens"] == 9
        passages = Passages(["w1 w2"], encoder, progress=False)
        found = heard(RagAgent(agent, passages))
        assert found == [Reply(piece.text, "w1 w2") for piece in pieces]
    # One that cannot say so says it in one piece.
    whole = CallableAgent(lambda query: query.upper())
    assert not hasattr(whole, "stream") and heard(whole) == [Reply("Q")]
    assert heard(RagAgent(whole, passages))[0].context == "w1 w2"


@pytest.mark.parametrize(
    ("reply", "before", "error"),
    [
        (500, 0, "500"),
        ("", 0, "the answer is empty"),
        (["a", b'data: {"error": {"message": "no more"}}\n\n'], 1, "no more"),
        (["a", b"data: {\n\n"], 1, "JSON"),
        (["a", b'data: {"choices": 5}\n\n'], 1, "no piece of a chat completion"),
        ([b"Content", BREAK], 0, ""),
        (["a", STALL], 1, "imeout"),
        (["y" * 60_000] * 2, 1, "over 100000 characters"),
    ],
)
def test_streams_that_fail(tmp_path, monkeypatch, reply, before, error):
    with serving(reply, tmp_path, monkeypatch) as server:
        *pieces, last = heard(endpoint(server, timeout=0.5, retries=0))
    assert len(pieces) == before and all(one.error is None for one in pieces)
    assert not last.text and last.error is not None and error in last.error


def test_a_reply_without_end_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(endpoints, "MOST_BYTES", 100_000)
    endless = [b": nothing to say yet" * 2000] * 100
    with serving(endless, tmp_path, monkeypatch) as server:
        agent = endpoint(server)
        for bad in (ask(agent, ["q"])[0][0], heard(agent)[-1]):
            assert bad.error == "OpenAIError: the server sent over 100000 bytes"
            assert not bad.text


def test_a_stream_that_is_refused(tmp_path, monkeypatch):
    with (
        serving(401, tmp_path, monkeypatch) as server,
        pytest.raises(RuntimeError, match="takes no query for 'm'"),
    ):
        heard(endpoint(server))


def test_so_many_requests_a_second(tmp_path, monkeypatch):
    with serving("x", tmp_path, monkeypatch) as server:
        agent, began = endpoint(server, per_second=20.0), time.monotonic()
        ask(agent, [str(n) for n in range(6)])
        assert time.monotonic() - began >= 0.25
    with serving(429, tmp_path, monkeypatch) as server:  # retries are requests too
        agent, began = endpoint(server, per_second=20.0, retries=5), time.monotonic()
        ((bad,),) = ask(agent, ["a"])
        assert "429" in str(bad.error) and len(server.asked) == 6
        assert time.monotonic() - began >= 0.25
    for change, message in (
        ({"per_second": 0.0}, "per_second is 0.0"),
        ({"retries": -1}, "retries is -1"),
        ({"concurrency": 0}, "concurrency is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            endpoint(server, **change)


def test_vectors_of_passages_are_kept(encoder, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXHAL_CACHE", str(tmp_path))
    read = []

    def counted(known, texts, **options):
        read.append(list(texts))
        return embed(known, texts, **options)

    monkeypatch.setattr(rag, "embed", counted)
    for texts in (["w1 w2", "w3"], ["w1 w2", "w3"], ["w3", "w1 w2"]):
        found = Passages(texts, encoder, progress=False)
        assert found.search(["w3"], 1) == [["w3"]]
    assert read == [["w1 w2", "w3"], ["w3"], ["w3"], ["w3", "w1 w2"], ["w3"]]


def test_answers_from_passages(encoder):
    texts = [f"w{n} w{n + 1} w{n + 2}" for n in range(0, 30, 3)]
    passages = Passages([*texts, texts[0]], encoder, progress=False)
    assert len(passages) == 10
    ((first, *others),) = passages.search([texts[4]], 3)
    assert first == texts[4] and len(others) == 2
    seen = []

    def answer(query):
        seen.append(query)
        return "An answer."

    agent = RagAgent(CallableAgent(answer, "one"), passages, k=2)
    assert isinstance(agent, Agent) and agent.name == "one with 10 passages"
    (replies,) = ask(agent, [texts[7]], n=2)
    assert {one.text for one in replies} == {"An answer."}
    context = replies[0].context
    assert context.startswith(texts[7]) and context.count("\n\n") == 1
    assert all(context in query and texts[7] in query for query in seen)
    with pytest.raises(ValueError, match="must hold {passages} and {query}"):
        RagAgent(CallableAgent(answer), passages, prompt="{query}")
    with pytest.raises(ValueError, match="k is 0"):
        RagAgent(CallableAgent(answer), passages, k=0)


def judged(evaluator, query, text, context=""):
    (found,) = asyncio.run(evaluator.judge(query, [Reply(text, context)]))
    return found


def test_references_judge(encoder):
    questions = [
        Question("w0 w1 w2", "It is red.", id="a"),
        Question("w20 w21 w22", ("It is blue.", "Blue."), id="b"),
    ]
    evaluator = ReferenceEvaluator(questions, similarity=0.999, encoder=encoder)
    assert isinstance(evaluator, Evaluator)
    assert judged(evaluator, "w20 w21 w22", "blue").label == 0
    found = judged(evaluator, "w20 w21 w22", "It runs fast.")
    assert found.label == 1 and "overlap" in found.why and "'w20 w21 w22'" in found.why
    far = judged(evaluator, "w40 w3 w17", "blue")
    assert far.label is None and far.confidence == 0 and "under 0.999" in far.why
    with pytest.raises(ValueError, match="no questions"):
        ReferenceEvaluator([], encoder=encoder)


def verdict(hallucinated, confidence, why="so"):
    return json.dumps(
        {"hallucinated": hallucinated, "confidence": confidence, "why": why}
    )


def test_a_model_judges(tmp_path, monkeypatch):
    with serving(verdict(True, 90), tmp_path, monkeypatch) as server:
        evaluator = EndpointEvaluator(Endpoint(server.url, "m", 5.0))
        assert isinstance(evaluator, Evaluator)
        assert judged(evaluator, "q", "a", "The source.") == (1, "so", 0.9, False)
        (asked,) = server.questions
        assert all(part in asked for part in ("The source.", "q", "a"))
        server.replies = [verdict(False, 60)]
        assert judged(evaluator, "q2", "a") == (0, "so", 0.6, False)
        server.replies = [verdict(True, 59)]
        assert judged(evaluator, "q3", "a") == (None, "so", 0.59, False)
        # Nothing of use, three times: a person decides.
        for bad in (
            "yes",
            verdict("true", 90),
            verdict(True, 101),
            verdict(True, True),
        ):
            server.replies = [bad]
            found = judged(evaluator, f"q {bad}", "a")
            assert found.label is None and "of no use in 3 attempts" in found.why
            assert not found.failed
        server.replies = [500]  # nobody has judged it
        down = judged(evaluator, "q4", "a")
        assert down.failed and down.label is None and "gave no answer" in down.why
        server.replies = [401]
        with pytest.raises(RuntimeError, match="gave no answer"):
            judged(evaluator, "q5", "a")


@pytest.mark.parametrize(
    "said",
    [
        None,
        b"{",
        b"[]",
        b"5",
        b"{}",
        b'{"choices": 5}',
        b'{"choices": []}',
        b'{"choices": [{}]}',
        b'{"choices": [{"message": {"content": 5}}]}',
        b"[" * 100_000,
        [b" " * 30_000] * 100,
    ],
)
def test_what_is_no_judgement(tmp_path, monkeypatch, said):
    """It costs that judgement; whoever explores goes on."""
    monkeypatch.setattr(endpoints, "MOST_BYTES", 1_000_000)
    with serving(said, tmp_path, monkeypatch) as server:
        evaluator = EndpointEvaluator(Endpoint(server.url, "m", 5.0))
        found = judged(evaluator, "q", "a")
        assert found.failed and found.label is None and found.why
        server.replies = [verdict(True, 90, "so \ud83d")]
        found = judged(evaluator, "q", "a")
        assert found == (1, "so ?", 0.9, False)


def test_a_judge_that_drips(tmp_path, monkeypatch):
    monkeypatch.setattr(endpoints, "PATIENCE", 0.5)
    with serving([b" "] * 1000, tmp_path, monkeypatch) as server:
        evaluator = EndpointEvaluator(Endpoint(server.url, "m", 0.1))
        found = judged(evaluator, "q", "a")
        assert found.failed and "no whole answer in 1 seconds" in found.why


def test_so_many_judgements_at_a_time(tmp_path, monkeypatch):
    """Of all calls together."""
    most, now, lock = [0], [0], threading.Lock()

    def reply(question):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.05)
        with lock:
            now[0] -= 1
        return verdict(True, 90)

    with serving(reply, tmp_path, monkeypatch) as server:
        monkeypatch.setattr(evaluators, "_AT_ONCE", 2)
        evaluator = EndpointEvaluator(Endpoint(server.url, "m", 5.0))

        async def several():
            calls = [evaluator.judge(f"q{n}", [Reply("a")]) for n in range(6)]
            return await asyncio.gather(*calls)

        assert len(asyncio.run(several())) == 6 and most[0] <= 2


def test_clients_need_nothing_that_openai_does_not_bring(monkeypatch):
    """AgentScope, which the tests install, brings more."""
    monkeypatch.setitem(sys.modules, "httpx", None)
    endpoints.trusted.cache_clear()
    context = endpoints.trusted()
    assert context is endpoints.trusted() and context.verify_mode == ssl.CERT_REQUIRED


def test_a_function_that_raises_has_judged_nothing():
    from jaxhal.watchdog import CallableEvaluator

    def out(query, text):
        raise TimeoutError("out")

    found = judged(CallableEvaluator(out), "q", "a")
    assert found == (None, "TimeoutError: out", 0.0, True)


def test_who_leaves_while_waiting_takes_no_turn():
    agent = EndpointAgent(Endpoint("http://localhost:9", "m"), per_second=0.1)

    async def ask():
        await agent._turn()
        after = agent._free
        waiting = [asyncio.create_task(agent._turn()) for _ in range(50)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return after

    assert asyncio.run(ask()) == agent._free


def test_an_answer_in_numbers():
    from jaxhal.watchdog import CallableEvaluator, Judgement

    some = ((True, 1), (np.int64(0), 0), (np.bool_(True), 1), (None, None))
    for said, label in some:
        evaluator = CallableEvaluator(lambda query, text, said=said: said)
        assert judged(evaluator, "q", "a").label == label
    own = CallableEvaluator(lambda *_: Judgement(np.int64(1), "so", np.float32(0.5)))
    assert json.dumps(judged(own, "q", "a")) == '[1, "so", 0.5, false]'
