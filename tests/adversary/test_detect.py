"""``jaxhal detect`` never harms what it reads, and loses nothing of what it did."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jaxhal import cli

ROW = {"id": "a", "prompt": "Why?", "response": "So it is."}


def run(*arguments, **options):
    return CliRunner().invoke(cli.app, [str(each) for each in arguments], **options)


def rows(count):
    return [
        {
            "id": f"row {at}",
            "context": f"The box holds {'many ' * (at % 5)}red balls.",
            "question": "What is inside?",
            "response": f"Balls{' and more' * (at % 4)}, {at}.",
            "label": at % 2,
        }
        for at in range(count)
    ]


def write(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    return path


# --- what is read is never written over ---------------------------------------------


@pytest.fixture
def spelled(tmp_path, monkeypatch):
    """One file of answers by many names."""
    monkeypatch.chdir(tmp_path)
    source = write(tmp_path / "in.jsonl", [ROW])
    (tmp_path / "folder").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "soft").symlink_to("in.jsonl")
    (tmp_path / "hard").hardlink_to(source)
    return source


SPELLINGS = [
    *("in.jsonl", "./in.jsonl", "folder/../in.jsonl", "linked/in.jsonl"),
    *("soft", "hard", "linked/soft"),
]


@pytest.mark.parametrize("name", [*SPELLINGS, None])
@pytest.mark.parametrize("option", ["-o", "--html"])
def test_detect_refuses_to_write_over_its_input(spelled, option, name):
    before = spelled.read_bytes()
    target = name or spelled
    found = run("detect", "-m", "gone/gone", "-i", "in.jsonl", option, target)
    assert (found.exit_code, found.stdout) == (2, "")
    assert found.stderr.count("\n") == 1 and "is the file of --input" in found.stderr
    assert spelled.read_bytes() == before and len(os.listdir()) == 5


def test_detect_refuses_one_file_for_two_results(spelled):
    command = ["detect", "-m", "gone/gone", "-i", "in.jsonl"]
    found = run(*command, "-o", "out", "--html", "folder/../out")
    assert found.exit_code == 2 and "is the file of --output" in found.stderr
    assert not Path("out").exists()


@pytest.mark.parametrize("model", ["model", "model/weights.gguf"])
@pytest.mark.parametrize("option", ["-o", "--html"])
def test_detect_refuses_to_write_over_its_model(spelled, option, model):
    Path("model").mkdir()
    Path("model/weights.gguf").write_text("weights")
    command = ["detect", "-m", model, "-i", "in.jsonl"]
    found = run(*command, option, "linked/model/weights.gguf")
    assert found.exit_code == 2 and "is the file of --model" in found.stderr
    assert Path("model/weights.gguf").read_text() == "weights"


def test_sweep_refuses_to_write_over_its_configuration(spelled):
    found = run("sweep", "in.jsonl", "seed=0,1", "-o", "soft")
    assert found.exit_code == 2 and "is the file of the config" in found.stderr
    assert json.loads(spelled.read_text()) == ROW
