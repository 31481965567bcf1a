"""What is missing names its extra before work begins, and `detect` needs none."""

import importlib
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from typer.testing import CliRunner

import jaxhal
from jaxhal import plotting
from jaxhal.cli import app as cli
from jaxhal.datasets.sources import downloaded
from jaxhal.io.extras import MODULES, MissingExtra, brought_by, need
from jaxhal.llm.endpoint import Endpoint
from jaxhal.texts import _pysbd, sentences
from jaxhal.watchdog import MilvusStore

PROJECT = tomllib.loads(
    (Path(__file__).parent.parent / "pyproject.toml").read_text("utf-8")
)["project"]
# The package's card promises these.
CARD = "jax flax optax transformers numpy scikit-learn orbax-checkpoint datasets"
# What the wheel of a distribution is imported as, where that is another name.
IMPORTED = {"huggingface-hub": "huggingface_hub", "lazy-loader": "lazy_loader"}
IMPORTED |= {"pyyaml": "yaml"}


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def distributions(extra):
    """Those of an extra, and of the extras it holds."""
    for spec in PROJECT["optional-dependencies"][extra]:
        if found := re.fullmatch(r"jaxhal\[(.*)\]", spec):
            for other in found[1].split(","):
                yield from distributions(other)
        else:
            yield canonical(re.match(r"[\w.-]+", spec)[0])


def test_the_extras_are_those_of_the_project():
    of = packages_distributions()
    for extra, modules in MODULES.items():
        named = {canonical(name) for module in modules for name in of[module]}
        assert named == set(distributions(extra)), extra
    others = {"all", "cuda", "tpu", "test", "dev", "docs"}
    assert set(PROJECT["optional-dependencies"]) - others == set(MODULES)
    (everything,) = PROJECT["optional-dependencies"]["all"]
    assert everything == f"jaxhal[{','.join(sorted(MODULES))}]"
    assert "jaxhal[all]" in PROJECT["optional-dependencies"]["test"]


@pytest.mark.parametrize(
    ("extra", "module"), [(e, name) for e, names in MODULES.items() for name in names]
)
def test_a_missing_module_names_its_extra(monkeypatch, extra, module):
    need(extra)
    monkeypatch.setitem(sys.modules, module, None)
    said = rf'^{module} is not installed; pip install "jaxhal\[{extra}\]"$'
    with pytest.raises(MissingExtra, match=said):
        need(extra)
    with pytest.raises(MissingExtra, match=said), brought_by(extra):
        importlib.import_module(module)


def test_what_no_extra_brings_is_no_missing_extra():
    with pytest.raises(ModuleNotFoundError) as caught, brought_by("plots"):
        importlib.import_module("no_such_module")
    assert not isinstance(caught.value, MissingExtra)


@pytest.mark.parametrize(
    ("extra", "command"),
    [
        ("sentences", "detect -i {answers} -d selfcheck_ngram"),
        ("sentences", "detect -i {answers} -d semantic_entropy"),
        ("sentences", "detect -i {answers} --html page.html --relevance attnlrp"),
        ("sentences", "fit {answers} -o out -d nli_context"),
        ("sentences", "rate {answers} -d selfcheck_nli"),
        ("sentences", "data alterations"),
        ("sentences", "bench nli"),
        ("experiments", "run c.yaml"),
        ("experiments", "tune c.yaml"),
        ("experiments", "sweep c.yaml seed=0,1"),
        ("experiments", "generate c.yaml"),
        ("experiments", "guide c.yaml"),
        ("experiments", "fit -o out --preset ragtruth"),
        ("watchdog", "bench watchdog"),
        ("watchdog", "watchdog explore c.yaml"),
        ("watchdog", "watchdog evaluate c.yaml"),
        ("watchdog", "watchdog check c.yaml -q Why?"),
        ("watchdog", "watchdog serve c.yaml"),
        ("serve", "serve"),
        ("serve", "serve --watchdog c.yaml"),
    ],
)
def test_commands_name_their_extra(tmp_path, monkeypatch, extra, command):
    """In one line, before anything is read, loaded or written."""
    answers = tmp_path / "answers.jsonl"
    row = {"id": "a", "prompt": "Why?", "response": "So.", "label": 1}
    answers.write_text(json.dumps(row) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jaxhal, "load", None)
    for module in MODULES[extra]:
        monkeypatch.setitem(sys.modules, module, None)
    verb = "are" if len(MODULES[extra]) > 1 else "is"
    found = CliRunner().invoke(cli.app, command.format(answers=answers).split())
    assert (found.exit_code, found.stdout) == (2, "")
    said = f"jaxhal: {', '.join(MODULES[extra])} {verb} not installed; pip install "
    assert found.stderr == f'{said}"jaxhal[{extra}]"\n'
    assert [path.name for path in tmp_path.iterdir()] == [answers.name]


@pytest.mark.parametrize(
    ("extra", "module", "work"),
    [
        ("sentences", "pysbd", lambda: (_pysbd.cache_clear(), sentences("A b. C d."))),
        ("plots", "matplotlib", lambda: plotting.roc_curves({"a": [0.0, 1.0]}, [0, 1])),
        ("prompt", "openai", lambda: Endpoint("http://localhost/v1", "judge")),
        ("experiments", "aiohttp", lambda: downloaded("http://localhost", {})),
        ("watchdog", "pymilvus", lambda: MilvusStore(2, "bound.db")),
        ("watchdog", "jiter", "jaxhal.serve.proxy"),
        ("agentscope", "agentscope", "jaxhal.watchdog.middleware"),
        ("experiments", "omegaconf", "jaxhal.io.configuration"),
    ],
)
def test_the_library_names_its_extra(monkeypatch, extra, module, work):
    monkeypatch.setitem(sys.modules, module, None)
    if isinstance(work, str):
        monkeypatch.delitem(sys.modules, work, raising=False)
    with pytest.raises(MissingExtra, match=rf'{module}.*"jaxhal\[{extra}\]"'):
        importlib.import_module(work) if isinstance(work, str) else work()


CORE = """
import json, sys
blocked, arguments = json.loads(sys.argv[1])
sys.modules |= dict.fromkeys(blocked)
from jaxhal.cli import app as cli
sys.argv[1:] = arguments
try:
    cli.main()
except SystemExit as stop:
    assert not stop.code, stop.code
import jaxhal
lm = jaxhal.load(arguments[2])
(report,) = jaxhal.score(lm, [jaxhal.Example("It opened in 1932.", prompt="When?")])
assert report.error is None and report.scores, report
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def test_detect_and_score_need_no_extra(narrow, tmp_path):
    """Nor do they import what is not declared; a pipe sees whole lines alone."""
    source, page = tmp_path / "in.jsonl", tmp_path / "page.html"
    source.write_text('{"id": "a", "prompt": "When?", "response": "In 1932."}\n')
    extra = {name for names in MODULES.values() for name in names}
    blocked = sorted(extra - {"httpx2"})  # huggingface-hub imports it
    command = ["detect", "--model", narrow, "--input", source, "--html", page]
    given = json.dumps([blocked, list(map(str, command))])
    done = subprocess.run([sys.executable, "-c", CORE, given], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    row, modules = map(json.loads, done.stdout.splitlines())
    assert row["id"] == "a" and row["error"] is None and page.is_file()
    assert b"\r" not in done.stdout + done.stderr
    core = [re.match(r"[\w-]+", spec)[0] for spec in PROJECT["dependencies"]]
    assert core[:8] == CARD.split()
    # What they bring anyway is declared where it is imported; no GGUF file is read.
    brought = {
        canonical(re.match(r"[\w.-]+", spec)[0])
        for name in core[:8]
        for spec in requires(name) or ()
        if "extra ==" not in spec
    }
    unused = {name for name in core[8:] if IMPORTED.get(name, name) not in modules}
    assert unused - brought <= {"gguf"}
