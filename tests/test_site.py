"""The README is short, its links lead somewhere, its figures are the results'."""

import importlib
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from jaxhal.detectors import CATALOGUE

ROOT = Path(__file__).parent.parent
SITE = ROOT / "notebooks"
README = (ROOT / "README.md").read_text("utf-8")


@pytest.fixture
def generate(monkeypatch):
    monkeypatch.syspath_prepend(str(SITE))
    return runpy.run_path(str(SITE / "generate.py"))


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150
    assert len(README.encode()) <= 8192


def test_the_readme_begins_with_the_two_commands():
    block = re.search(r"```bash\n(.*?)```", README, re.DOTALL)
    assert block
    commands = [line.partition("#")[0].strip() for line in block[1].splitlines()]
    assert commands == [
        'pip install -e ".[all]" && jaxhal demo',
        'pip install -e ".[test]" && pytest -q',
    ]


def test_the_figures_of_the_readme_are_those_of_the_results(generate):
    assert README == generate["readme"](README), "run: python notebooks/generate.py"


def test_the_readme_says_how_many_answers_were_judged(monkeypatch):
    """A part held out, several such draws, folds, or all that there were."""
    monkeypatch.syspath_prepend(str(SITE))
    import results

    for name, count, said in (
        ("ragtruth", 1953, "298 of 1,953"),
        ("toha_coqa", 1552, "5 x 351 of 1,552"),
        ("halueval", 1000, "1,000"),
        ("halmit_treatment", 300, "300"),
    ):
        assert results.held_out(name, count) == said
        assert f"| {said} |" in README


@pytest.mark.parametrize(
    "path",
    [ROOT / "README.md", *(ROOT / "configs").rglob("*.md")],
    ids=lambda p: p.stem,
)
def test_every_link_leads_somewhere(path):
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text("utf-8")):
        assert "://" in link or (path.parent / link).exists(), link


def test_the_family_that_is_shown_stands_in_three_files():
    text = (SITE / "develop.md").read_text("utf-8")
    part = text.split("## A family of models touches three files")[1].split("\n## ")[0]
    shown = re.findall(r"^\+(.+)$", part, re.MULTILINE)
    named = ["jaxhal/models/families.py", "jaxhal/models/gguf_families.py"]
    files = [*named, "tests/tiny.py"]
    assert all(f"`{name}`" in part for name in files)
    found = [
        name
        for line in shown
        for name in files
        if line in (ROOT / name).read_text("utf-8").splitlines()
    ]
    assert len(found) == len(shown) == 4 and {*found} == {*files}


def test_the_screenshot_is_small():
    assert (SITE / "images" / "report.png").stat().st_size <= 150 * 1024


def test_a_figure_that_is_not_there_says_what_is(monkeypatch):
    monkeypatch.syspath_prepend(str(SITE))
    cell = importlib.import_module("results").cell
    assert cell("halueval", "linear_probe").startswith("0.996 [")
    with pytest.raises(KeyError, match="halueval has no 'AUROC' of 'nothing'"):
        cell("halueval", "nothing")


@pytest.mark.skipif(find_spec("furo") is None, reason='pip install -e ".[docs]"')
def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    built = subprocess.run(
        [*command, str(SITE), str(tmp_path)], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr[-3000:]
    detectors = tmp_path / "generated" / "detectors"
    assert {path.stem for path in detectors.glob("*.html")} >= set(CATALOGUE)
    assert "max_heads" in (detectors / "toha.html").read_text("utf-8")
    assert "0.840" in (tmp_path / "results.html").read_text("utf-8")
