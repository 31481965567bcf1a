"""Keys and contexts go to servers that the user named, and nowhere else."""

import asyncio
import contextlib
import hashlib
import http.server
import inspect
import json
import os
import stat
import threading

import numpy as np
import pytest
from safetensors.numpy import save as serialized
from typer.testing import CliRunner

import jaxhal
from chat_server import serving
from jaxhal import detectors
from jaxhal.cli import app as cli
from jaxhal.detectors import CATALOGUE, build
from jaxhal.evaluation.calibration import Platt
from jaxhal.experiments import making, running
from jaxhal.experiments.config import load_config
from jaxhal.io import sealing
from jaxhal.io.configuration import write_config
from jaxhal.llm import endpoint, entailment, hosts
from jaxhal.llm.endpoint import Endpoint
from jaxhal.models import registry
from jaxhal.reporting.page import write_html
from jaxhal.scoring.fitting import Fitted, untrained
from jaxhal.scoring.saving import load, save
from jaxhal.types import Example
from jaxhal.watchdog import EndpointAgent, building
from jaxhal.watchdog import config as watches
from tiny_lm import tiny_lm

KEY = "sk-adversary-0123456789"
FAR = "https://collector.example/v1"
REFUSED = "collector.example/v1'?, a server that you have not named; .* --allow-e"


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, tmp_path):
    """A key, nothing named, and a cache of its own."""
    for name in (hosts.VARIABLE, "OPENAI_BASE_URL", "OPENAI_ORG_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAXHAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


@pytest.fixture
def server(surroundings, tmp_path, monkeypatch):
    """One on this machine that says Yes, and the same key."""
    with serving("Yes", tmp_path, monkeypatch) as server:
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        yield server


# --- who is who ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1@collector.example/v1",
        "https://api.openai.com:443@collector.example/v1",
        "https://user:secret-word@api.openai.com/v1",
        "https://collector.example\\@api.openai.com/v1",
        "https://api.openai.com\\.collector.example/v1",
        " https://collector.example/v1",
        "https://collector.example/v1 ",
        "ht\ntps://collector.example/v1",
        "https://api.openai.com\t.collector.example/v1",
        "https://api.openai.com#@collector.example/v1",
        "https://api.openai.com?@collector.example/v1",
        "https:///collector.example/v1",
        "https:collector.example",
        "//collector.example/v1",
        "https://\u0430pi.openai.com/v1",  # the first letter is Cyrillic
        "https://api\u3002openai.com/v1",
        "https://[::1/v1",
        "ftp://collector.example/v1",
        "file:///etc/passwd",
        "javascript:alert(1)",
        "http://",
        "http://localho\u017ft/v1",
        "https://\u212aey.example/v1",
        "",
    ],
)
def test_addresses_that_may_be_read_in_two_ways(url):
    with pytest.raises(ValueError, match="endpoint is .*; give the base address") as it:
        Endpoint(url, "m")
    assert "secret-word" not in str(it.value)


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://localhost:8000/v1", True),
        ("http://LOCALHOST/v1", True),
        ("http://127.0.0.1:1/v1", True),
        ("http://127.9.9.9/v1", True),
        ("http://[::1]:8000/v1", True),
        ("http://127.0.0.1.collector.example/v1", False),
        ("http://localhost.collector.example/v1", False),
        ("http://localhost./v1", False),
        ("http://127.1/v1", False),
        ("http://0x7f000001/v1", False),
        ("http://0.0.0.0/v1", False),
        ("http://[::]/v1", False),
        ("http://10.0.0.1/v1", False),
        ("http://169.254.169.254/v1", False),
    ],
)
def test_what_is_on_this_machine(url, local):
    assert hosts.server_of(url).is_local is local
    assert hosts.keyed(url) is local  # no https
    with hosts.brought("data"):
        if local:
            assert not hosts.keyed(url)
        else:
            with pytest.raises(hosts.Refused):
                hosts.keyed(url)
    with hosts.brought("data", trusted=False), pytest.raises(hosts.Refused):
        hosts.keyed(url)


@pytest.mark.parametrize(
    ("variables", "url", "keyed"),
    [
        ({}, "https://api.openai.com/v1", True),
        ({}, "https://API.openai.com:443/v1", True),
        ({}, "https://api.openai.com:8443/v1", None),
        ({}, "http://api.openai.com/v1", None),
        ({}, "https://api.openai.com.collector.example/v1", None),
        ({}, FAR, None),
        ({"JAXHAL_ENDPOINTS": "collector.example"}, FAR, True),
        ({"JAXHAL_ENDPOINTS": "a.b, Collector.Example ,"}, FAR, True),
        ({"JAXHAL_ENDPOINTS": "collector.example:443"}, FAR, True),
        ({"JAXHAL_ENDPOINTS": "collector.example:8443"}, FAR, None),
        ({"JAXHAL_ENDPOINTS": "example"}, FAR, None),
        ({"JAXHAL_ENDPOINTS": "sub.collector.example"}, FAR, None),
        ({"JAXHAL_ENDPOINTS": "api.openai.com"}, "http://api.openai.com/v1", False),
        ({"JAXHAL_ENDPOINTS": "collector.example"}, FAR.replace("s:", ":"), False),
        ({"JAXHAL_ENDPOINTS": "localhost"}, "http://localhost:8000/v1", True),
        ({"OPENAI_BASE_URL": FAR}, FAR, True),
        ({"OPENAI_BASE_URL": FAR}, "https://collector.example:1/v1", None),
        ({"OPENAI_BASE_URL": "http://localhost:8000"}, "http://localhost:8000/", True),
        ({"OPENAI_BASE_URL": "http://localhost:8000"}, "http://localhost:80/", False),
    ],
)
def test_who_may_have_the_key(variables, url, keyed, monkeypatch):
    """``None``: it may not even be asked."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with hosts.brought("a configuration"):
        if keyed is None:
            with pytest.raises(hosts.Refused, match="that you have not named"):
                Endpoint(url, "m")
        else:
            assert Endpoint(url, "m").key() == (KEY if keyed else "none")


@pytest.mark.parametrize("name", ["https://a.org", "a.org/v1", "*", "a b", "@", "a:b"])
def test_what_names_no_host(name, monkeypatch):
    monkeypatch.setenv(hosts.VARIABLE, name)
    wrong = r"^\$JAXHAL_ENDPOINTS: .* names no host; write"
    with hosts.brought("data"), pytest.raises(ValueError, match=wrong):
        Endpoint(FAR, "m")


def test_a_base_address_that_is_none_is_called_by_its_name(monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", "api.example.org/v1")
    wrong = r"^\$OPENAI_BASE_URL is 'api.example.org/v1'; give the base address"
    with hosts.brought("data"), pytest.raises(ValueError, match=wrong):
        Endpoint(FAR, "m")


def test_what_code_names_is_the_callers_choice():
    assert Endpoint(FAR, "m").key() == KEY
    assert Endpoint(FAR.replace("https", "http"), "m").key() == "none"
    assert detectors.detection_prompt(FAR, "m").measures[0].endpoint.key() == KEY


@pytest.mark.parametrize("space", ["\r", "\n", " \t"])
def test_space_around_a_key_is_not_the_key(space, monkeypatch):
    """As files of variables have it whose lines end as on Windows."""
    monkeypatch.setenv("OPENAI_API_KEY", space + KEY + space)
    assert Endpoint(FAR, "m").key() == KEY
    assert KEY not in hosts.hidden(f"wrong: {KEY}")
    monkeypatch.setenv("OPENAI_API_KEY", space)
    assert Endpoint(FAR, "m").key() == "none"
    with pytest.raises(RuntimeError, match="OPENAI_API_KEY is not set"):
        Endpoint("https://api.openai.com/v1", "m").key()


@pytest.mark.parametrize("key", ["sk-ключ-0123456789", "sk-“0123456789”", "sk-\n0123"])
def test_a_key_that_nobody_can_be_sent(key, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(
        RuntimeError, match="OPENAI_API_KEY holds .*; copy the key anew"
    ):
        Endpoint(FAR, "m").client()
    assert Endpoint(FAR.replace("https", "http"), "m").key() == "none"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "ALL_PROXY",
            "socks5://a.b:1",
            r"\$ALL_PROXY.* cannot .*socksio.*; give one th",
        ),
        (
            "https_proxy",
            "x://u:secret@a.b",
            r"\$https_proxy.* cannot be used \(Unknown",
        ),
        ("HTTPS_PROXY", "http://a:b", r"\$HTTPS_PROXY.* cannot be used \(Invalid port"),
        (
            "SSL_CERT_FILE",
            "/nope.pem",
            r"^\$SSL_CERT_FILE is '/nope.pem', .*; give a P",
        ),
        ("SSL_CERT_FILE", __file__, r"^\$SSL_CERT_FILE is .*\.py', where no certific"),
    ],
)
def test_variables_of_which_no_client_is_made(name, value, message, monkeypatch):
    monkeypatch.setenv(name, value)
    endpoint.trusted.cache_clear()
    with pytest.raises(RuntimeError, match=message) as found:
        Endpoint(FAR, "m").ask("Hello?")
    assert "secret" not in str(found.value)


# --- saved detectors ----------------------------------------------------------------


def card(folder, spec):
    """A saved detector that somebody else hands over, without its parameters."""
    folder.mkdir(parents=True)
    about = {
        "detector": spec,
        "threshold": 0.5,
        **dict.fromkeys(
            ["calibrated on", "beats controls", "layers", "reader", "measured"]
        ),
        "calibration": {"slope": 1.0, "intercept": 0.0},
        "params": {"dict": None},
        "sha256": hashlib.sha256(serialized({})).hexdigest(),
    }
    (folder / "params.safetensors").write_bytes(serialized({}))
    sealing.write(folder / "card.json", about)
    return folder


def recipes(url):
    """Every recipe that can name an endpoint, alone and in an ensemble."""
    for name, make in CATALOGUE.items():
        taken = inspect.signature(make).parameters
        if "endpoint" in taken:
            yield {name: {"endpoint": url, "model": "m"}}
        if "entailment" in taken:
            yield {name: {"entailment": f"endpoint:m@{url}"}}
    inner = {"detection_prompt": {"endpoint": url, "model": "m"}}
    yield {"ensemble": {"members": ["novel_words", inner]}}
    both = {"ensemble": {"members": ["novel_words", inner], "name": "inner"}}
    yield {"ensemble": {"members": ["mtop_div", both]}}


LOCAL, OPENAI = "http://127.0.0.1:9/v1", "https://api.openai.com/v1"


@pytest.mark.parametrize("url", [FAR, LOCAL, OPENAI])
def test_a_saved_detector_brings_no_endpoint(url, tmp_path):
    specs = [*recipes(url)]
    assert len(specs) >= 8
    host = hosts.server_of(url).host
    for number, spec in enumerate(specs):
        folder = card(tmp_path / str(number), spec)
        with pytest.raises(hosts.Refused, match=f"{folder} would send .*{host}"):
            load(folder)
        # Not even after code, or who consented, has made the same.
        name, options = next(iter(spec.items()))
        if name != "ensemble":
            CATALOGUE[name](**options)
        assert load(folder, endpoints=[host]).detector.name == name
        with pytest.raises(hosts.Refused):
            load(folder)


def test_consent_by_the_environment(monkeypatch, tmp_path):
    folder = card(tmp_path / "one", next(recipes(FAR)))
    monkeypatch.setenv(hosts.VARIABLE, "collector.example")
    (measure,) = load(folder).detector.measures
    assert measure.endpoint.key() == KEY
    assert "collector.example" in load(folder).detector.summary


def test_a_saved_detector_asks_nobody(server, tmp_path):
    folder = card(tmp_path / "one", next(recipes(server.url)))
    with pytest.raises(hosts.Refused):
        jaxhal.score(tiny_lm(), [Example("b", prompt="a")], [load(folder)])
    assert not server.asked


@pytest.mark.parametrize(
    ("name", "called"),
    [
        ("detection_prompt", "mtop_div"),
        ("detection_prompt", "MTop-Div"),
        ("detection_prompt", "mtop_div "),
        ("detection_prompt", "mtop\u200b_div"),
        ("detection_prompt", "\uff4d\uff54\uff4f\uff50_div"),  # letters of full width
        ("detection_prompt", "response_length"),  # a control
        ("semantic_entropy", "ensemble"),
        ("ensemble", "lookback_lens"),
    ],
)
def test_a_name_cannot_pose_as_another_detector(name, called, tmp_path):
    options = {"name": called}
    if name == "ensemble":
        options["members"] = ["novel_words", "mtop_div"]
    spec = {name: options}
    with pytest.raises(ValueError, match=f"detector '{name}' is given the name"):
        build(spec)
    with pytest.raises(ValueError, match="is another detector"):
        load(card(tmp_path / "one", spec))


@pytest.mark.parametrize("name", ["a/b", ".hidden", "", "x" * 200, "a\nb"])
def test_a_detectors_name_is_that_of_one_folder(name):
    wrong = "name of detector 'toha' is .*; it names one folder"
    with pytest.raises(ValueError, match=wrong):
        detectors.build({"toha": {"name": name}})
    with pytest.raises(ValueError, match=wrong):
        detectors.toha(name=name)


@pytest.mark.parametrize("name", ["source", "label", "row", "id", "token"])
def test_a_detector_is_called_like_no_column(name):
    spec = {"ensemble": {"members": ["toha", "novel_words"], "name": name}}
    with pytest.raises(ValueError, match="name of detector 'ensemble' is one of READ"):
        build(spec)


def test_names_of_ones_own(tmp_path):
    assert build({"ensemble": {"members": ["toha", "novel_words"]}}).name == "ensemble"
    assert build({"detection_prompt": {"name": "mtop_div_asked"}}).name
    assert build({"mtop_div": {}}).name == "mtop_div"


# --- configurations -----------------------------------------------------------------


@pytest.mark.parametrize("spec", recipes(FAR), ids=str)
def test_an_experiment_asks_whom_the_user_named(spec, monkeypatch):
    config = load_config({"name": "a", "data": [{"name": "b"}], "detectors": [spec]})
    with pytest.raises(hosts.Refused, match=REFUSED):
        running.detectors_of(config)
    monkeypatch.setenv(hosts.VARIABLE, "collector.example")
    assert running.detectors_of(config)


@pytest.mark.parametrize("spec", recipes(LOCAL), ids=str)
def test_a_server_here_gets_no_key_by_a_configuration(spec):
    detector = build(spec)
    asked = [*_endpoints((detector.measures, detector.taught))]
    assert asked and not any(one.keyed for one in asked)


def _endpoints(value):
    """All endpoints in a value, however deep."""
    if isinstance(value, Endpoint):
        yield value
    elif isinstance(value, tuple):
        for one in value:
            yield from _endpoints(one)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from _endpoints(getattr(value, name))


def test_a_judge_is_one_that_the_user_named(tmp_path, monkeypatch):
    monkeypatch.setattr(making, "model", None)  # found out before it loads
    config = {"name": "a", "questions": "squad", "out": str(tmp_path)}
    config |= {"judge": "endpoint", "endpoint": FAR, "endpoint_model": "m"}
    monkeypatch.setattr(making, "questions_of", lambda config: [])
    with pytest.raises(hosts.Refused, match=REFUSED):
        making.make(config)


WATCH = {"name": "a", "domain": "things", "questions": "squad"}


@pytest.mark.parametrize(
    ("changes", "make"),
    [
        (
            {"agent": {"endpoint": FAR, "model": "m"}},
            lambda config: building.agent_of(config, config.agent),
        ),
        (
            {"judge": "endpoint", "judge_endpoint": FAR, "judge_model": "m"},
            lambda config: building.evaluator_of(config, []),
        ),
        ({"store": FAR.removesuffix("/v1")}, building.store_of),
        ({"entailment": f"endpoint:m@{FAR}"}, building.watchdog_of),
        ({"entailment": f"endpoint:m@{FAR}"}, building.explorer_of),
    ],
)
def test_a_watchdog_asks_whom_the_user_named(changes, make, monkeypatch, tmp_path):
    monkeypatch.setenv("MILVUS_TOKEN", "root:word")
    config = watches.load_watch(WATCH | {"out": str(tmp_path)} | changes)
    monkeypatch.setattr(building, "kept_encoder", lambda name: tiny_encoder)
    with pytest.raises(hosts.Refused, match="collector.example"):
        make(config)


class tiny_encoder:
    class config:
        hidden_size = 4


@pytest.mark.parametrize(
    ("named", "uri", "token"),
    [
        ("", "http://localhost:19530", ""),
        ("localhost", "http://localhost:19530", "root:word"),
        ("milvus.example", "https://milvus.example", "root:word"),
        ("milvus.example", "http://milvus.example:19530", ""),
    ],
)
def test_who_gets_the_token_of_a_store(named, uri, token, monkeypatch, tmp_path):
    pytest.importorskip("pymilvus")
    given = []

    def connect(*args):
        given.append(args)
        raise RuntimeError("no server")

    monkeypatch.setattr("jaxhal.watchdog.milvus.MilvusStore", connect)
    monkeypatch.setattr(building, "kept_encoder", lambda name: tiny_encoder)
    monkeypatch.setenv("MILVUS_TOKEN", "root:word")
    monkeypatch.setenv(hosts.VARIABLE, named)
    config = watches.load_watch(WATCH | {"out": str(tmp_path), "store": uri})
    with pytest.raises(RuntimeError, match="no server"):
        building.store_of(config)
    ((_, where, _, shown),) = given
    assert (where, shown) == (uri, token)


def test_the_flag_names_a_host(tmp_path, monkeypatch):
    monkeypatch.setenv(hosts.VARIABLE, "")
    config = tmp_path / "a.yaml"
    asked = "{detection_prompt: {endpoint: 'https://collector.example/v1', model: m}}"
    config.write_text(
        f"name: a\ndata: [{{name: {tmp_path}/none.jsonl}}]\ndetectors: [{asked}]\n"
        f"out: {tmp_path}\nmodel: /nowhere\n"
    )

    def run(*flags):
        return CliRunner().invoke(cli.app, [*flags, "run", str(config)])

    found = run()
    assert found.exit_code == 2 and "--allow-endpoint collector.example" in found.stderr
    assert found.stderr.count("\n") == 1
    found = run("--allow-endpoint", "other.example")
    assert os.environ[hosts.VARIABLE] == ",other.example"
    assert "--allow-endpoint collector.example" in found.stderr
    found = run("--allow-endpoint", "a.org", "--allow-endpoint", "collector.example")
    assert found.exit_code == 2 and "collector" not in found.stderr  # something else
    found = run("--allow-endpoint", "https://collector.example")
    assert found.exit_code == 2 and "names no host; write such as" in found.stderr


# --- on the way ---------------------------------------------------------------------


class Ear(http.server.ThreadingHTTPServer):
    """Hears everything, and sends whoever asks elsewhere."""

    def __init__(self, location=""):
        super().__init__(("127.0.0.1", 0), _Ear)
        self.location, self.heard = location, []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Ear(http.server.BaseHTTPRequestHandler):
    server: Ear

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.heard.append((self.path, dict(self.headers), body))
        self.send_response(307 if self.server.location else 502)
        if self.server.location:
            self.send_header("Location", self.server.location)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_CONNECT = do_POST

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def ear(location=""):
    with Ear(location) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def told(endpoint):
    agent = EndpointAgent(endpoint, retries=0)
    ((reply,),) = asyncio.run(agent.respond(["A context?"]))
    return reply


async def streamed(endpoint):
    agent = EndpointAgent(endpoint, retries=0)
    return [piece async for piece in agent.stream("A context?")]


@pytest.mark.parametrize(
    "ask",
    [
        lambda endpoint: endpoint.ask("A context?"),
        told,
        lambda endpoint: asyncio.run(streamed(endpoint)),
    ],
)
def test_nobody_follows_a_redirect(ask):
    with ear() as other, ear(f"{other.url}/v1/chat/completions") as first:
        with pytest.raises(RuntimeError, match=f"it sends to {other.url}/v1/chat"):
            ask(Endpoint(f"{first.url}/v1", "m"))
        assert len(first.heard) == 1 and not other.heard


@pytest.mark.parametrize("ask", [lambda endpoint: endpoint.ask("A context?"), told])
def test_no_proxy_hears_what_stays_on_this_machine(ask, server, monkeypatch):
    with ear() as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        ask(Endpoint(server.url, "m"))
        assert server.keys == [f"Bearer {KEY}"] and not proxy.heard


@pytest.mark.parametrize("ask", [lambda endpoint: endpoint.ask("Q?"), told])
def test_a_server_without_the_key_gets_nothing_in_its_place(ask, monkeypatch):
    """The client adds what the environment holds for OpenAI."""
    monkeypatch.setenv("OPENAI_ORG_ID", "org-secret")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "proj-secret")
    monkeypatch.setenv("OPENAI_ADMIN_KEY", "admin-secret")
    extra = "X-Gateway: gate-secret\nAuthorization: Bearer other-secret"
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", extra)
    with ear() as server:
        with hosts.brought("a configuration"):
            endpoint = Endpoint(f"{server.url}/v1", "m", timeout=5.0)
        with contextlib.suppress(RuntimeError):
            ask(endpoint)
        assert server.heard
        for _, headers, body in server.heard:
            said = json.dumps(headers) + body.decode()
            assert "secret" not in said and KEY not in said
            assert headers["Authorization"] == "Bearer none"


# --- what is written and said -------------------------------------------------------


def everything(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class _Echo(_Ear):
    """Says back what it was shown."""

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        said = self.headers["Authorization"]
        raw = json.dumps({"error": {"message": f"{said}: {said * 20}"}}).encode()
        self.server.heard.append(said)
        self.send_response(self.server.location)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_a_key_that_a_server_says_back_is_not_passed_on(status, caplog, capfd):
    for name in ("openai", "httpx2", "httpcore2", "jaxhal"):
        caplog.set_level("DEBUG", name)
    with ear(status) as server:
        server.RequestHandlerClass = _Echo
        endpoint = Endpoint(f"{server.url}/v1", "m")
        with pytest.raises(RuntimeError) as error:
            endpoint.ask("Q?")
        said = [repr(error.getrepr(style="long", chain=True))]
        try:
            said.append(repr(told(endpoint)))
        except RuntimeError as refused:
            said.append(str(refused))
        assert server.heard == [f"Bearer {KEY}"] * 2
    assert "$OPENAI_API_KEY" in str(error.value) and "$OPENAI_API_KEY" in said[1]
    heard = capfd.readouterr()
    for text in (str(error.value), *said[1:], caplog.text, heard.out, heard.err):
        assert KEY not in text
    assert error.value.__suppress_context__


def test_no_key_in_anything_that_is_written(server, tmp_path, caplog, capfd):
    for name in ("openai", "httpx2", "httpcore2", "jaxhal"):
        caplog.set_level("DEBUG", name)
    server.replies = [json.dumps({"hallucinations": ["b"]}), 400]
    os.environ["OPENAI_BASE_URL"] = server.url
    spec = {"detection_prompt": {"endpoint": server.url, "model": "m"}}
    try:
        asked = build(spec)
        rows = [Example("b", prompt="a" * n, id=str(n)) for n in (1, 2)]
        reports = jaxhal.score(tiny_lm(), rows, [untrained(asked)])
        fitted = Fitted(asked, (), Platt(1.0, 0.0), 0.5, np.zeros(0, np.float32))
        save(tmp_path / "saved", fitted, spec)
        config = {"name": "a", "data": [{"name": "b"}], "detectors": [spec]}
        write_config(tmp_path, load_config(config))
    finally:
        del os.environ["OPENAI_BASE_URL"]
    write_html(tmp_path / "page.html", reports, "page", [], "")
    assert {*server.keys} == {f"Bearer {KEY}"}
    written = everything(tmp_path)
    assert {path.name for path in written} >= {"card.json", "config.yaml", "page.html"}
    assert any(path.parent.name == "replies" for path in written)
    heard = capfd.readouterr()
    for text in (*written.values(), caplog.text, heard.out, heard.err, repr(reports)):
        assert KEY.encode() not in (text if isinstance(text, bytes) else text.encode())


def test_replies_are_for_their_owner_alone(server, tmp_path):
    folder = tmp_path / "cache" / "replies"
    folder.mkdir(parents=True, mode=0o755)
    before = os.umask(0o022)
    try:
        Endpoint(server.url, "m").ask("A secret of mine?")
    finally:
        os.umask(before)
    (reply,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(reply.stat().st_mode) == 0o600


def test_texts_are_kept_in_folders_of_their_owner(tmp_path):
    for name in ("features", "passages"):
        folder = registry.private_cache(name)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    config = load_config({"name": "a", "data": [{"name": "b"}], "detectors": ["toha"]})
    assert not config.store  # its default is private_cache("features")


def test_entailment_of_data():
    """However it is written, an endpoint in a text is made and judged at once."""
    made = detectors.semantic_entropy(entailment=f"endpoint:m@{FAR}")
    (first, *_) = made.measures
    assert isinstance(first.entailment, entailment.EndpointInference)
