"""What a wheel carries, and what it says of itself."""

import email
import re
import tomllib
import zipfile
from pathlib import Path

import httpx2
import psutil
import pytest
from hatchling.build import build_wheel

from jaxhal.bench.server import started
from jaxhal.detectors import CATALOGUE
from jaxhal.models.registry import cache_dir
from jaxhal.scoring.shipped import MODELS, shipped

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return folder / build_wheel(str(folder))


def test_a_wheel_carries_the_package_and_nothing_else(wheel):
    """Shipped detectors, templates, data and types; no tests, and under 5 MB."""
    assert wheel.stat().st_size < 5_000_000
    names = zipfile.ZipFile(wheel).namelist()
    found = {name for name in names if not name.startswith("jaxhal-0")}
    package = ROOT / "jaxhal"
    assert found == {
        path.relative_to(ROOT).as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"jaxhal/py.typed", "jaxhal/__init__.pyi"} <= found
    assert {"jaxhal/models/registry.toml", "jaxhal/datasets/bundled.jsonl"} <= found
    pages = (f"{p}.{k}" for p in ("report", "serve") for k in ("html", "css", "js"))
    for name in (*pages, "page.css", "page.js", "verdict.html"):
        assert f"jaxhal/reporting/templates/{name}" in found
    for model in MODELS:
        assert shipped(model).keys() - {"ensemble"} <= CATALOGUE.keys()
        for name in shipped(model):
            folder = f"jaxhal/scoring/shipped/{model}/{name}"
            assert {f"{folder}/card.json", f"{folder}/params.safetensors"} <= found


def test_a_wheel_says_what_it_is(wheel):
    archive = zipfile.ZipFile(wheel)
    (place,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
    about = email.message_from_bytes(archive.read(place))
    assert about["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in about.get_all("Classifier", [])
    core = [one for one in about.get_all("Requires-Dist", []) if "extra ==" not in one]
    assert len(core) == len({re.split(r"[<>=!~ ]", one)[0] for one in core}) < 30
    (scripts,) = (n for n in archive.namelist() if n.endswith("/entry_points.txt"))
    assert b"jaxhal = jaxhal.__main__:main" in archive.read(scripts)


def test_a_server_runs_from_a_wheel(wheel, tmp_path, narrow, monkeypatch):
    """Its page and its verdicts miss nothing that is in the source tree alone."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    monkeypatch.chdir(tmp_path)  # which `python -m` looks into first
    command = "jaxhal", "serve", "--model", str(narrow), "--detector", "token_entropy"
    with started(*command) as server:
        assert psutil.Process(server.process).cwd() == str(tmp_path)
        assert "<title>jaxhal" in httpx2.get(server.url).text
        asked = {"context": "A crate.", "response": "Pears.", "all": True}
        found = httpx2.post(f"{server.url}/v1/verdict", json=asked, timeout=100)
    assert found.json()["scores"]["token_entropy"] > 0


def test_an_image_is_made_of_what_the_project_declares(monkeypatch):
    """Of a Python that it supports, of its extras, around its command and its cache."""
    recipe = (ROOT / "Dockerfile").read_text("utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (python,) = set(re.findall("^FROM python:(.*?)-slim", recipe, re.MULTILINE))
    assert f"Programming Language :: Python :: {python}" in project["classifiers"]
    extras = set(re.findall(r"EXTRAS=([\w,]+)", recipe))
    assert extras == {"all", "all,cuda"}
    assert set(",".join(extras).split(",")) <= set(project["optional-dependencies"])
    (command,) = re.findall(r"^ENTRYPOINT \[\"(.*)\"\]$", recipe, re.MULTILINE)
    assert command in project["scripts"]
    (cache,) = re.findall(r"JAXHAL_CACHE=(\S+)", recipe)
    monkeypatch.setenv("JAXHAL_CACHE", cache)
    assert str(cache_dir()) == cache and f"VOLUME {cache}" in recipe
    assert f"-o jaxhal {cache}" in recipe  # whose owner may write there
