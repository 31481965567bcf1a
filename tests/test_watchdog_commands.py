"""Configurations of watchdogs, and the commands that take them."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import openai
import pytest
import thorough
from test_encoding import write, write_pooling
from typer.testing import CliRunner

from chat_server import serving
from jaxhal.cli import app as cli
from jaxhal.datasets import Question
from jaxhal.datasets.jsonl import write_rows
from jaxhal.evaluation import auroc
from jaxhal.experiments import making
from jaxhal.io.configuration import claim, write_config
from jaxhal.io.files import lines_of
from jaxhal.plotting.series import ablations, entropy_trend
from jaxhal.serve import running
from jaxhal.serve.proxy import Service
from jaxhal.watchdog import (
    CallableAgent,
    EndpointAgent,
    EndpointEvaluator,
    ExactStore,
    LocalAgent,
    MilvusStore,
    Point,
    RagAgent,
    Reply,
    building,
    domain,
)
from jaxhal.watchdog import config as configs
from jaxhal.watchdog import evaluate as evaluating
from jaxhal.watchdog import page as pages
from jaxhal.watchdog.agents.rag import FROM_PASSAGES
from jaxhal.watchdog.journal import Journal, Recorded
from tiny_lm import tiny_lm


def questions():
    """Thirty, of which three share an answer."""
    same = {3, 7, 11}
    return [
        Question(
            f"w{n} w{n + 1} w{n + 2}",
            "One answer. It is long." if n in same else f"Answer {n}. It is short.",
            id=f"q{n}",
        )
        for n in range(30)
    ]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = write(tmp_path_factory.mktemp("encoder"))
    write_pooling(folder, normalize=True, mean=True)
    return str(folder)


@pytest.fixture(scope="module")
def lm():
    return tiny_lm(context=2048)


@pytest.fixture
def written(encoder, lm, tmp_path, monkeypatch):
    """A file, for the tiny model and the questions above."""
    monkeypatch.setattr(building, "model", lambda name, *_, **__: lm)
    monkeypatch.setitem(making.QUESTIONS, "medquad", lambda **options: questions())
    path = tmp_path / "watch.yaml"
    path.write_text(
        f"name: tiny\ndomain: things\nquestions: medquad\nexplored: 20\nheld_out: 10\n"
        f"encoder: {encoder}\nout: {tmp_path}\njudge_similarity: 0.999\n"
        "agent: {passages: 2, max_new_tokens: 4, words: 4}\n"
        "plan: {budget: 6, least: 50, starts: 3, width: 3, samples: 2, gamma: 1.0}\n"
        "entailment: similarity\n"
    )
    return path


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(one) for one in arguments])


def test_questions_with_one_answer_stay_together(written):
    config = configs.load_watch(written)
    known, others = domain.questions_of(config)
    assert (len(known), len(others)) == (20, 10)
    names = {one.id for one in known}, {one.id for one in others}
    assert not names[0] & names[1]
    assert {"q3", "q7", "q11"} <= names[0] or {"q3", "q7", "q11"} <= names[1]
    again = domain.questions_of(configs.load_watch(written, ["seed=1"]))
    assert again[0] != known
    with pytest.raises(ValueError, match="held_out 11; there are 30 questions, in 28"):
        domain.questions_of(configs.load_watch(written, ["held_out=11"]))


def test_related_questions():
    """Chains of equal words, answers, sources and contexts."""
    some = [
        Question("What is it?", "A."),
        Question("what is  it", "B."),
        Question("Who?", "B."),
        Question("When?", "C.", context="One.", source="s"),
        Question("Where?", "D.", context="Two.", source="s"),
        Question("Why?", "E."),
        Question("How?", "F.", context="Three."),
        Question("Which?", "G.", context="Three."),
    ]
    found = domain.related(some).tolist()
    assert found[0] == found[1] == found[2] and found[3] == found[4]
    assert found[6] == found[7] and len(set(found)) == 4


def test_what_the_agent_was_told(written):
    config = configs.load_watch(written)
    assert "P.\n\nAnswer the question" in building.told(config, "Q?", "P.")
    own = configs.load_watch(written, ["agent.prompt='{passages}! {query}'"])
    assert building.told(own, "Q?", "P.") == "P.! Q?"
    alone = configs.load_watch(written, ["agent={passages: 0, prompt: 'Say: {query}'}"])
    assert building.told(alone, "Q?", "") == "Say: Q?"
    far = configs.load_watch(written, ["agent={endpoint: 'http://x/v1', passages: 0}"])
    assert building.told(far, "Q?", "") == "Q?"


def test_every_exploration_has_a_collection(written, tmp_path):
    pytest.importorskip("milvus_lite")
    shared = f"store={tmp_path}/bound.db"
    names = set()
    for name in ("tiny", "other-one"):
        store = building.store_of(configs.load_watch(written, [shared, f"name={name}"]))
        assert len(store) == 0
        store.add([Point(name, "w1", "")], [[1.0] * 32])
        names.add(store._name)
        store.close()
    assert len(names) == 2


@thorough.mark
def test_a_bound_in_milvus(written, tmp_path):
    """Explored, gone on with, checked and taught, all in one embedded file."""
    pytest.importorskip("milvus_lite")
    # It resets logging, and closes what a captured command takes for its own output.
    pytest.importorskip("pymilvus")
    written.write_text(written.read_text() + "store: milvus\n")
    for budget, least in ((4, 1), (8, 2)):
        found = run("watchdog", "explore", written, f"plan.budget={budget}")
        assert found.exit_code == 0, found.output
        summary = json.loads((tmp_path / "tiny" / "summary.json").read_text("utf-8"))
        assert summary["points"] == summary["hallucinated"] >= least
    assert (tmp_path / "tiny" / "bound.db").exists()
    assert not (tmp_path / "tiny" / "points.jsonl").exists()
    found = run("watchdog", "check", written, "-q", "w1 w2 w3")
    assert found.exit_code == 0, found.output
    (row,) = map(json.loads, found.stdout.splitlines())
    assert len(row["nearest"]) == min(3, summary["points"])
    dog = building.watchdog_of(configs.load_watch(written))
    assert asyncio.run(dog.learn("w9 w9 w9", "Wrong.", True)) == 1
    assert len(dog.store) == summary["points"] + 1
    dog.store.close()


def test_passages_are_whole_sentences(written):
    config = configs.load_watch(written)
    texts = domain.passages_of(config, 4)
    assert "w3 w4 w5\nOne answer." in texts and "w3 w4 w5\nIt is long." in texts
    assert len(texts) == len(set(texts)) == 60
    assert "w7 w8 w9\nOne answer. It is long." in domain.passages_of(config, 20)


def test_passages_are_pieces_of_a_context_where_there_is_one(written, monkeypatch):
    asked = Question("w1 w2", "Two.", context="One is here. Two is there. Three too.")
    monkeypatch.setitem(making.QUESTIONS, "medquad", lambda **options: [asked, asked])
    config = configs.load_watch(written)
    pieces = ["One is here. Two is there.", "Three too."]
    assert domain.passages_of(config, 6) == pieces
    each = ["One is here.", "Two is there.", "Three too."]
    assert domain.passages_of(config, 1) == each


def test_who_is_who(written, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXHAL_ENDPOINTS", "x")
    config = configs.load_watch(written)
    agent = building.agent_of(config, config.agent, progress=False)
    assert isinstance(agent, RagAgent) and agent.k == 2
    assert isinstance(agent.agent, LocalAgent) and agent.agent.max_new_tokens == 4
    assert (agent.prompt, agent.agent.prompt) == (FROM_PASSAGES, "{query}")
    own = configs.load_watch(written, ["agent.prompt='{passages} {query}'"])
    agent = building.agent_of(own, own.agent, progress=False)
    assert (agent.prompt, agent.agent.prompt) == ("{passages} {query}", "{query}")
    alone = dataclasses.replace(own.agent, passages=0, prompt="Say: {query}")
    assert building.agent_of(own, alone).prompt == "Say: {query}"
    seen, lm = [], agent.agent.lm
    monkeypatch.setattr(building, "model", lambda *how: seen.append(how) or lm)
    building.agent_of(own, dataclasses.replace(alone, mesh="data=2"))
    assert seen == [(alone.model, "float32", "data=2")]
    far = "endpoint: 'http://x/v1', model: m, timeout: 3, per_second: 2, passages: 0"
    config = configs.load_watch(written, [f"agent={{{far}}}"])
    agent = building.agent_of(config, config.agent)
    assert isinstance(agent, EndpointAgent) and agent.per_second == 2.0
    assert (agent.endpoint.timeout, agent.name) == (3.0, "m")
    judge = ["judge=endpoint", "judge_endpoint=http://x/v1", "judge_model=j"]
    config = configs.load_watch(written, judge)
    assert isinstance(building.evaluator_of(config, []), EndpointEvaluator)
    assert isinstance(building.store_of(config), ExactStore)
    pytest.importorskip("milvus_lite")
    config = configs.load_watch(written, [f"store={tmp_path}/bound.db"])
    store = building.store_of(config)
    assert isinstance(store, MilvusStore)
    store.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("questions=odd", "questions is 'odd'; use one of"),
        ("judge=odd", "judge is 'odd'; use one of reference, endpoint"),
        ("judge=endpoint", "an endpoint judges by all three"),
        ("preset=odd", "preset is 'odd'; use one of paper"),
        ("explored=0", "explored is 0; give at least 1"),
        (
            "agent={endpoint: 'http://x/v1', passages: 0, prompt: 'Be brief. {query}'}",
            "agent.prompt is 'Be brief. {query}', but an endpoint that is given no",
        ),
        ("similarity=2", "similarity is 2.0; give a cosine"),
        ("judge_similarity=90", "judge_similarity is 90.0; give a cosine"),
        ("store=exakt", "store is 'exakt'; use exact, milvus, a file that ends in .db"),
        ("store='tcp://localhost:1'", "store is 'tcp://localhost:1'; use exact, milvu"),
        ("plan={speed: 3}", "'speed' not in 'Plan'"),
        ("plan={gamma: 0.0}", "gamma is 0.0; give a share"),
        ("training={epochs: 0}", "epochs is 0; give one above 0"),
        ("agent.dtype=int8", "dtype is 'int8'; use one of"),
        ("agents=1", "unknown key 'agents'"),
    ],
)
def test_bad_configurations(written, change, message):
    with pytest.raises(ValueError, match=message):
        configs.load_watch(written, [change])


def test_a_mistake_claims_no_folder(written, tmp_path):
    """What was never explored may be configured otherwise."""
    wrong = run("watchdog", "explore", written, "encoder=nowhere", "agent.passages=0")
    assert wrong.exit_code == 2 and "nowhere" in wrong.output
    assert not (tmp_path / "tiny" / "config.yaml").exists()


@pytest.mark.parametrize(
    "change",
    ["plan.samples=3", "plan.temperature=0.5", "entailment=nli", "agent.passages=1"],
)
def test_explorations_of_other_entropies_are_not_compared(written, tmp_path, change):
    config = configs.load_watch(written)
    other = configs.load_watch(written, ["name=other", change])
    other.folder.mkdir()
    write_config(other.folder, other)
    name = change.split("=")[0].split(".passages")[0]
    with pytest.raises(ValueError, match=f"{name} of 'other' is .*entropies of one ki"):
        configs.beside(config, "other")


def test_commands(written, tmp_path):
    nothing = run("watchdog", "check", written, "-q", "w1")
    assert nothing.exit_code == 2 and "explore" in nothing.output
    found = run("watchdog", "explore", written)
    assert found.exit_code == 0, found.output
    assert "stopped by" in found.output
    assert "no policy was trained: of 8 queries" in found.output
    folder = tmp_path / "tiny"
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    assert summary["queries"] == 6 and summary["stopped"] == "budget"
    assert summary["points"] == summary["hallucinated"] > 0
    asked = len(lines_of(folder / "journal.jsonl"))
    longer = run("watchdog", "explore", written, "plan.budget=8")
    assert longer.exit_code == 0 and len(lines_of(folder / "journal.jsonl")) > asked
    other = run("watchdog", "explore", written, "seed=1")
    said = " ".join(other.output.split())
    assert (
        other.exit_code == 2 and "another configuration made, with another seed" in said
    )
    queries = tmp_path / "queries.txt"
    queries.write_text("w1 w2\n\nw3 w4\n")
    checked = run("watchdog", "check", written, "-q", "w5", "-i", queries)
    assert checked.exit_code == 0, checked.output
    rows = [json.loads(line) for line in checked.stdout.splitlines()]
    assert [row["query"] for row in rows] == ["w5", "w1 w2", "w3 w4"]
    assert {"flagged", "score", "nearest", "entropy"} <= set(rows[0])
    empty = run("watchdog", "check", written)
    assert empty.exit_code == 2 and "nothing to check" in empty.output


def test_held_out_questions_of_one_group_teach_nothing(written, monkeypatch):
    """Said before anything is checked and read."""
    asked = [
        Question(f"w{n}", f"Answer {n}.", source="one" if n < 4 else str(n))
        for n in range(10)
    ]
    monkeypatch.setattr(domain, "questions_of", lambda config: ([], asked))
    agent = CallableAgent(
        lambda query, temperature: "Pears." if query < "w4" else f"Answer {query[1:]}."
    )
    config = configs.load_watch(written)
    dog = building.watchdog_of(config)
    dog.agent = agent
    said = "of 10 held-out questions that were answered, 4 wrongly, .* raise held_out"
    with pytest.raises(ValueError, match=said):
        domain.known_of(config, dog)


def claimed(config):
    claim(config.folder, config, configs.explored)


def test_how_an_agent_is_reached_is_not_what_was_explored(written):
    far = "agent={{endpoint: '{}', model: m, passages: 0, {}}}"
    first = configs.load_watch(written, [far.format("http://a/v1", "timeout: 3")])
    claimed(first)
    slower = far.format("http://b:9/v1", "timeout: 9, per_second: 2, concurrency: 1")
    more = [
        "reader=other",
        "held_out=7",
        "agent.mesh=data=2",
        f"out={first.folder}/../../{first.folder.parent.name}",
    ]
    claimed(configs.load_watch(written, [slower, *more]))
    for change in (["encoder=x"], ["plan.samples=9"], ["agent.model=n"]):
        with pytest.raises(
            ValueError, match=f"with another {re.split('[.=]', change[0])[0]}"
        ):
            claimed(configs.load_watch(written, [slower, *change]))


def test_serve(written, monkeypatch):
    seen, free = {}, ("--port", 0)

    def serve(app, at):
        with at:
            seen.update(port=at.getsockname()[1])

    def app(self, host):
        seen.update(service=self, host=host)

    monkeypatch.setattr(running, "run", serve)
    monkeypatch.setattr(Service, "app", app)
    with monkeypatch.context() as patched:  # nothing is loaded to find that out
        patched.setattr(building, "watchdog_of", None)
        empty = run("watchdog", "serve", written, "--block", *free)
        assert empty.exit_code == 2 and "holds no point; run" in empty.output
        assert run("watchdog", "check", written, "-q", "w1").output == empty.output
    assert "the bound is empty" in run("watchdog", "serve", written, *free).output
    store = building.store_of(configs.load_watch(written))
    store.add([Point("p", "w1", "")], [[1.0] * 32])
    found = run("watchdog", "serve", written, "similarity=0.7", "--block", *free)
    assert found.exit_code == 0, found.output
    service = seen["service"]
    assert (seen["host"], service.block) == ("127.0.0.1", True)
    assert f" 1 points at http://127.0.0.1:{seen['port']}/v1\n" in found.output
    assert service.watchdog.settings.similarity == 0.7 and service.token is None
    assert "give --token" not in found.output and "is empty" not in found.output
    monkeypatch.setenv("JAXHAL_TOKEN", "secret")
    run("watchdog", "serve", written, "--host", "0.0.0.0", *free)
    assert seen["service"].token == "secret"
    for name in ("JAXHAL_TOKEN", "JAXHAL_TEACHER"):
        with monkeypatch.context() as empty:
            empty.setenv("JAXHAL_TOKEN", "secret")
            empty.setenv(name, "")
            found = run("watchdog", "serve", written, "--host", "0.0.0.0", *free)
        assert found.exit_code == 2 and f"${name} is empty; give one" in found.output
    monkeypatch.delenv("JAXHAL_TOKEN")
    open_ = run("watchdog", "serve", written, "--host", "0.0.0.0", *free)
    assert "give --token" in open_.output


def test_open_requests_are_answered_before_the_process_ends(
    encoder, tmp_path, monkeypatch
):
    asked, go = threading.Event(), threading.Event()

    def reply(question):
        asked.set()
        assert go.wait(60)
        return "Late."

    rows = [{"question": f"w{n}", "answer": f"A{n}.", "id": n} for n in range(4)]
    write_rows(tmp_path / "own.jsonl", rows)
    with serving(reply, tmp_path, monkeypatch) as server, socket.socket() as free:
        path = tmp_path / "served.yaml"
        path.write_text(
            f"name: served\ndomain: things\nquestions: {tmp_path}/own.jsonl\n"
            f"explored: 2\nheld_out: 2\nencoder: {encoder}\nout: {tmp_path}\n"
            f"agent: {{endpoint: '{server.url}', model: m, passages: 0}}\n"
        )
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command = [sys.executable, "-c", "from jaxhal.cli.app import main; main()"]
        command += ["watchdog", "serve", str(path), "--port", str(port)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
            url = f"http://127.0.0.1:{port}/v1"
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
                for _ in range(600):
                    with contextlib.suppress(openai.APIConnectionError):
                        client.models.list()
                        break
                    time.sleep(0.1)
                messages: Any = [{"role": "user", "content": "w1"}]
                with concurrent.futures.ThreadPoolExecutor(1) as pool:
                    create: Any = client.chat.completions.create
                    waiting = pool.submit(create, model="any", messages=messages)
                    assert asked.wait(60)
                    child.terminate()
                    time.sleep(0.5)
                    assert child.poll() is None and not waiting.done()
                    go.set()
                    answer = waiting.result()
            assert answer.choices[0].message.content == "Late."
            _, shown = child.communicate(timeout=60)
            assert child.returncode == 128 + signal.SIGTERM
            assert "Traceback" not in shown


def test_an_agent_behind_an_address(written, tmp_path, monkeypatch):
    """Explored and checked through an endpoint; what fails is counted."""

    def reply(question):
        if "Write one" in question:
            return "What of w8 w9?"
        return 500 if question.startswith("w2") else "Made up."

    with serving(reply, tmp_path, monkeypatch) as server:
        far = f"agent={{endpoint: '{server.url}', model: m, passages: 0}}"
        found = run("watchdog", "explore", written, far, "name=far")
        assert found.exit_code == 0, found.output
    rows = lines_of(tmp_path / "far" / "queries.jsonl")
    assert len(rows) == 6
    for row in rows:
        failed = row["query"].startswith("w2")
        assert bool(row["answer"]) != failed and (row["label"] is None) >= failed


def test_evaluate(written, tmp_path, lm, monkeypatch):
    """Beside baselines, controls and a bound that was explored at random."""
    monkeypatch.setattr(evaluating, "model", lambda name, *_, **__: lm)
    monkeypatch.setattr(
        evaluating, "private_cache", lambda name: tmp_path / "cache" / name
    )
    # The tiny model says nothing right, so every other answer counts as such.
    real, right = domain.OverlapRule(), iter(range(1000))

    def rule(question, text):
        return real(question, text)._replace(label=next(right) % 2)

    monkeypatch.setattr(domain, "OverlapRule", lambda contained: rule)
    none = run("watchdog", "evaluate", written)
    assert none.exit_code == 2 and "holds no exploration" in none.output
    for more in ([], ["name=other", "plan.how=random"], ["name=third", "seed=1"]):
        assert run("watchdog", "explore", written, *more).exit_code == 0
    # What was explored from other questions, or is not there, is not compared.
    for name, why in (("third", "seed of 'third' is 1"), ("x", "explore 'x' first")):
        wrong = run("watchdog", "evaluate", written, "--beside", name)
        assert wrong.exit_code == 2 and why in " ".join(wrong.output.split())
    # Nor are questions in another order, or with another answer, the same.
    first, *rest = questions()
    another = dataclasses.replace(first, answer="Something else.")
    for changed in ([*rest, first], [another, *rest]):
        with monkeypatch.context() as patched:
            patched.setitem(making.QUESTIONS, "medquad", lambda c=changed, **options: c)
            for command in ("explore", "evaluate"):
                found = run("watchdog", command, written)
                assert found.exit_code == 2, found.output
                assert "has other questions, answers or contexts" in found.output
    digest = tmp_path / "tiny" / "questions.digest"
    kept = digest.read_text("utf-8")
    digest.unlink()
    unknown = run("watchdog", "evaluate", written)
    assert unknown.exit_code == 2 and "explore it again" in unknown.output
    assert not digest.exists()
    assert run("watchdog", "explore", written).exit_code == 0
    assert digest.read_text("utf-8") == kept
    moved = run("watchdog", "evaluate", written, "seed=1")
    assert moved.exit_code == 2 and "what another configuration made" in moved.output
    found = run("watchdog", "evaluate", written, "--beside", "other")
    assert found.exit_code == 0, found.output
    folder = tmp_path / "tiny"
    known = json.loads((folder / "evaluation.json").read_text("utf-8"))
    rows = {row["method"]: row for row in known["rows"]}
    assert {"tiny", "other", "predictive_probability", "icl_prompt"} <= set(rows)
    assert {"selfcheck_nli", "selfcheck_ngram"} <= set(rows)
    controls = {name for name, row in rows.items() if row["control"]}
    assert controls >= {"nearest_similarity", "query_length", "response_length"}
    config = configs.load_watch(written)
    _, others = domain.questions_of(config)
    lengths = [len(one.text.split()) for one in others]
    labels = [n % 2 for n in range(len(others))]
    assert rows["query_length"]["AUROC"] == auroc(lengths, labels)
    every = "(flagging every query)"
    assert {row["watchdog"] for row in known["guards"]} == {"tiny", "other", every}
    (flags,) = [row for row in known["guards"] if row["watchdog"] == every]
    assert known["prevalence"] == flags["precision"] == 0.5 and flags["recall"] == 1.0
    assert flags["F1"] == 2 / 3 and flags["F1 low"] < 2 / 3 < flags["F1 high"]
    short = {row["method"]: row for row in known["short"]}
    assert [*short] == [*rows]
    for name, row in rows.items():
        one = short[name]
        assert (one["AUROC"], one["AUROC low"]) == (row["AUROC"], row["low"])
        assert one["AUPRC low"] <= one["AUPRC"] == row["AUPRC"] <= one["AUPRC high"]
        # Two halves of five questions each.
        assert one["accuracy"] == pytest.approx(row["accuracy"])
    dog = building.watchdog_of(config, progress=False)
    dog.agent = Recorded(dog.agent, Journal(folder / "evaluation.jsonl"))
    asked = len(dog.agent.journal)
    checks = asyncio.run(dog.checks([one.text for one in others]))
    assert len(dog.agent.journal) == asked  # everything was known
    assert rows["tiny"]["AUROC"] == auroc([one.score for one in checks], labels)
    (guard,) = [row for row in known["guards"] if row["watchdog"] == "tiny"]
    assert guard["flagged"] == sum(one.flagged for one in checks)
    (same,) = [
        row
        for row in known["ablations"]["similarity (epsilon)"]
        if row["value"] == dog.settings.similarity
    ]
    assert same["flagged"] == guard["flagged"]
    assert same["AUROC"] == rows["tiny"]["AUROC"]
    *_, last = known["ablations"]["queries explored"]
    assert (last["value"], last["points"]) == (6, len(dog.store))
    assert {k: last[k] for k in ("AUROC", "accuracy", "flagged")} == {
        k: same[k] for k in ("AUROC", "accuracy", "flagged")
    }
    # All answers of the exploration are wrong, so nothing is fitted to it.
    changed = {row["change"]: row for row in known["changes"]}
    entropies = [changed["entropy, compared with nothing"]["AUROC"]]
    assert entropies == [rows["semantic_entropy_discrete"]["AUROC"]]
    for row in changed.values():
        difference = row["AUROC"] - rows["tiny"]["AUROC"]
        assert row["above the watchdog"] == pytest.approx(difference)
        difference = row["AUROC"] - rows["nearest_similarity"]["AUROC"]
        assert row["above the nearest point"] == pytest.approx(difference)
    text = (folder / "evaluation.md").read_text("utf-8")
    assert "## Other uses of the exploration" in text
    assert "Held out: 10 questions, 5 answered wrongly (50%)" in text
    assert "| *query_length* (control) |" in text and "| tiny |" in text
    assert "from the 2 nearest passages of medquad" in text
    said = text.partition("## Methods")[2]
    assert "- selfcheck_nli: " in said and "similarity of embeddings" in said
    for name in ("auroc", "entropy", "ablations"):
        assert (folder / f"{name}.png").stat().st_size > 5000


def test_an_answer_that_failed_is_asked_for_again(tmp_path):
    out = True

    def say(query):
        if out:
            raise TimeoutError
        return "late"

    for turn in range(2):
        agent = Recorded(CallableAgent(say), Journal(tmp_path / "said.jsonl"))
        ((reply,),) = asyncio.run(agent.respond(["a"]))
        assert (reply.text, len(agent.journal)) == (("", 0), ("late", 1))[turn]
        out = False


def test_what_is_asked_twice_at_once_is_asked_once(tmp_path):
    asked = []

    async def say(query):
        asked.append(query)
        number = len(asked)
        await asyncio.sleep(0.01)
        return f"answer {number}"

    agent = Recorded(CallableAgent(say), Journal(tmp_path / "said.jsonl"))
    for _ in range(2):  # a loop each
        found = asyncio.run(agent.respond(["a", "b", "a", "a"]))
        said = [reply.text for (reply,) in found]
        assert said[0] == said[2] == said[3] != said[1]
    assert sorted(asked) == ["a", "b"] and len(agent.journal) == 2


def test_the_first_error_stops_the_others(tmp_path):
    """None goes on asking for what nobody waits for any more."""
    ended = []

    class Fails:
        name = "fails"

        async def respond(self, queries, n=1, temperature=1.0):
            if queries == ["bad"]:
                raise RuntimeError("the key is wrong")
            try:
                await asyncio.sleep(30)
            finally:
                ended.append(queries)
            return [[Reply("late")]]

    async def ask():
        agent = Recorded(Fails(), Journal(tmp_path / "said.jsonl"))
        with pytest.raises(RuntimeError, match="the key is wrong"):
            await agent.respond(["a", "bad"])
        assert ended == [["a"]]

    asyncio.run(ask())


def test_the_bound_at_a_share(encoder):
    rows = [
        {"label": label, "query": f"w{n}", "answer": "a", "entropy": 0.5, "round": n}
        for n, label in enumerate([0, 1, None, 1, 1, 1])
    ]
    reached = evaluating._reached
    assert [reached(rows, 0.5, 1), reached(rows, 0.5, 4)] == [2, 4]
    bound = evaluating._beginning(encoder, rows[:4])
    assert [one.query for one in bound] == ["w1", "w3"]
    assert reached(rows, 0.9, 1) is None
    # An exploration looks at its share when a round is over.
    for row in rows:
        row["round"] = row["round"] // 3
    assert [reached(rows, 0.5, 1), reached(rows, 0.6, 1)] == [3, 6]


def test_figures_without_anything():
    with pytest.raises(ValueError, match="no explorations"):
        entropy_trend({})
    with pytest.raises(ValueError, match="'a' has no query of a known entropy"):
        entropy_trend({"a": [float("nan")]})
    with pytest.raises(ValueError, match="tables are empty"):
        ablations({})


def test_what_is_said_of_shares():
    """Below their table, or in place of it where none was reached."""
    epsilon, row = "similarity (epsilon)", {"value": 0.5, "AUROC": 0.6}
    reached = pages._ablations({pages.GAMMA: [row], epsilon: [row]}, 10)
    (at,) = (n for n, line in enumerate(reached) if line.startswith("Of the shares"))
    assert at < reached.index(f"## Over {epsilon}")
    said = "\n".join(pages._ablations({epsilon: [row]}, 10))
    assert "was reached" in said and "those in the table" not in said
