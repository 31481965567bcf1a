"""Run folders: nothing is deleted that the run did not make, nothing before it is done.

A run is built beside its name; a run that fails, is refused or is killed leaves what
was there to the last byte.
"""

import json
import os
import shutil
import signal
import sys

import children
import pytest
from typer.testing import CliRunner

from golden_scores import labelled
from jaxhal import experiments
from jaxhal.cli.app import app
from jaxhal.experiments import folder
from jaxhal.experiments.making import make
from jaxhal.io import files
from jaxhal.io.files import staged
from tiny_lm import write_lm

TEXT = "a year of work"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A tiny model, answers and a store that several runs share."""
    folder = tmp_path_factory.mktemp("world")
    write_lm(folder / "tiny")
    rows = "".join(json.dumps(row) + "\n" for row in labelled(30))
    (folder / "crates.jsonl").write_text(rows)
    return folder


@pytest.fixture
def config(world, tmp_path):
    return {
        "name": "mine",
        "data": [{"name": str(world / "crates.jsonl")}],
        "detectors": ["mtop_div"],
        "model": str(world / "tiny"),
        "protocol": "holdout",
        "store": str(world / "store"),
        "out": str(tmp_path / "runs"),
    }


def tree(folder) -> dict[str, bytes]:
    """Every file below a folder, hidden ones too."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _named(paths):
    """Without files of checkpoints, which have other names each time."""
    return {path for path in paths if "/params/" not in path}


def run(config, **options):
    return experiments.run(config, progress=False, **options)


def foreign(folder):
    """What somebody works on, with names that a run writes."""
    (folder / "fitted").mkdir(parents=True)
    for name in ("figure.png", "report.html", "results.md", "fitted/model.bin"):
        (folder / name).write_text(TEXT)
    return tree(folder)


@pytest.mark.parametrize(
    "name",
    [".", "..", "../..", "", " ", "/tmp/x", "a/b", "a\\b", "a\0b", ".hidden", "a\nb"]
    + ["x" * 300, "a\x9b2J", "a\x7f", "a\u202eb"],
)
def test_a_name_is_that_of_one_folder(config, tmp_path, name, monkeypatch):
    here = tmp_path / "here"
    before = foreign(here)
    monkeypatch.chdir(here)
    with pytest.raises(ValueError, match="name is .* it names one folder"):
        run(config | {"name": name, "out": "."})
    with pytest.raises(ValueError, match="name is"):
        make({"name": name, "questions": "coqa", "out": "."})
    assert tree(here) == before


@pytest.mark.parametrize("extra", ["", "config.yaml", "results.json"])
def test_a_folder_that_no_run_made_is_refused(config, tmp_path, extra):
    target = tmp_path / "runs" / "mine"
    foreign(target)
    if extra:
        (target / extra).write_text('{"name": "another program\'s"}')
    before = tree(tmp_path)
    with pytest.raises(FileExistsError, match="holds what no run made, such as"):
        run(config)
    with pytest.raises(FileExistsError):
        run(config, force=True)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("label", ["..", ".x", "a\\b", "a\0b", "a\x1b[2J"])
def test_a_label_is_that_of_one_folder(config, label):
    with pytest.raises(ValueError, match="label is .* it names one folder"):
        run(config | {"data": [{"name": "bundled", "label": label}]})


def test_a_run_that_has_the_name_of_a_part_stays(config, tmp_path):
    """In a folder of several runs, where one run would go by the folder's own name."""
    inner = tmp_path / "runs" / "mine" / "fitted"
    inner.mkdir(parents=True)
    (inner / "config.yaml").write_text("name: fitted")
    (inner / "results.json").write_text('{"versions": {"jaxhal": "1"}}')
    before = tree(tmp_path)
    with pytest.raises(FileExistsError, match="holds what no run made, such as"):
        run(config)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["model.bin", "in/1/model.bin", "in/tuning.json"])
def test_checkpoints_that_no_run_made_are_refused(config, tmp_path, name):
    path = tmp_path / "runs" / "mine" / "checkpoints" / name
    path.parent.mkdir(parents=True)
    path.write_text(TEXT)
    before = tree(tmp_path)
    with pytest.raises(FileExistsError, match="no run made, such as 'checkpoints'"):
        run(config)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["sweep.csv", "sweep.png"])
def test_a_table_that_no_sweep_wrote_is_refused(config, tmp_path, name):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / name).write_text(TEXT)
    before = tree(tmp_path)
    with pytest.raises(FileExistsError, match="so no sweep wrote it"):
        experiments.sweep(config, {"seed": [0]}, progress=False)
    assert tree(tmp_path) == before


def test_what_comes_while_a_run_lasts_is_not_its_own(config, tmp_path, monkeypatch):
    target = tmp_path / "runs" / "mine"
    real = folder.write

    def write(*arguments):
        real(*arguments)
        foreign(target)

    monkeypatch.setattr(folder, "write", write)
    with pytest.raises(FileExistsError, match="holds what no run made"):
        run(config)
    kept = tree(target)
    assert set(kept.values()) == {TEXT.encode()} and "report.html" in kept


def test_a_file_of_that_name_is_refused(config, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").write_text(TEXT)
    with pytest.raises(FileExistsError, match="is no folder"):
        run(config)
    assert (tmp_path / "runs" / "mine").read_text() == TEXT


def test_a_run_that_fails_leaves_the_finished_one(config, tmp_path):
    run(config)
    before = tree(tmp_path)
    for change in ({"model": "/nope"}, {"data": [{"name": "/nope.jsonl"}]}):
        with pytest.raises((OSError, ValueError)):
            run(config | change, force=True)
        assert tree(tmp_path) == before


def test_from_the_command_line_as_well(config, tmp_path):
    run(config)
    before = tree(tmp_path)
    kept = str(tmp_path / "runs" / "mine" / "config.yaml")
    found = CliRunner().invoke(app, ["run", kept, "model=/nope", "--force"])
    assert found.exit_code == 2 and tree(tmp_path) == before
    found = CliRunner().invoke(app, ["run", kept, "seed=1"])
    assert found.exit_code == 2 and "--force" in found.output
    assert tree(tmp_path) == before


def test_what_another_seed_made_is_replaced_only_by_force(config, tmp_path):
    run(config)
    before = tree(tmp_path)
    with pytest.raises(ValueError, match="finished run with another seed.*--force"):
        run(config | {"seed": 1})
    assert tree(tmp_path) == before
    run(config | {"seed": 1}, force=True)
    assert "seed: 1" in (tmp_path / "runs" / "mine" / "config.yaml").read_text()


def test_what_the_run_did_not_make_stays_in_its_folder(config, tmp_path):
    target = tmp_path / "runs" / "mine"
    run(config)
    made = set(tree(target))
    (target / "notes.txt").write_text(TEXT)
    others = ["notes.txt", "inside/plot.png", "checkpoints/mine.bin"]
    for name in others:
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text(TEXT)
    run(config)
    found = tree(target)
    assert {found.pop(name) for name in others} == {TEXT.encode()}
    assert _named(found) == _named(made)


def test_killed_anywhere_the_old_folder_or_the_new_one_is_whole(tmp_path):
    """Before each step that changes a folder a kill, until there is none left."""
    target = tmp_path / "runs" / "mine"
    seen = set()
    for step in range(40):
        shutil.rmtree(target.parent, ignore_errors=True)
        foreign(target)
        (target / "notes.txt").write_text(TEXT)
        process, line = children.start(_swap_and_die, target, step)
        process.join()
        # The next use of the name puts right what was cut short.
        with pytest.raises(OSError, match="stop"), staged(target, own=_made):
            raise OSError("stop")
        found = tree(target)
        assert found.pop("notes.txt") == TEXT.encode()
        whole = found == {"fitted/model.bin": b"new"}
        assert whole or set(found.values()) == {TEXT.encode()} and len(found) == 4
        assert [path.name for path in target.parent.iterdir()] == ["mine"]
        seen.add(whole)
        if process.exitcode == 0:
            break
    assert process.exitcode == 0 and seen == {True, False}


def test_stopped_anywhere_it_is_whole_at_once(tmp_path):
    """Ctrl-C leaves nothing that the next use of the name has to put right."""
    target = tmp_path / "runs" / "mine"
    seen = set()
    for step in range(40):
        shutil.rmtree(target.parent, ignore_errors=True)
        foreign(target)
        try:
            with pytest.MonkeyPatch.context() as patch:
                _swap(target, patch, step, _interrupt)
            break
        except KeyboardInterrupt:
            found = tree(target)
            whole = found == {"fitted/model.bin": b"new"}
            assert whole or set(found.values()) == {TEXT.encode()} and len(found) == 4
            assert [path.name for path in target.parent.iterdir()] == ["mine"]
            seen.add(whole)
    assert seen == {True, False}


def test_of_half_a_folder_nothing_comes_back(tmp_path):
    """A kill may come when what says which files were a run's is deleted already."""
    target = tmp_path / "runs" / "mine"
    foreign(target)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(
            shutil, "rmtree", lambda path: sys.exit((path / "results.md").unlink())
        )
        patch.setattr(files, "_sweep", lambda path: None)
        with staged(target, own=_said):
            pass
    with staged(target, own=_said):
        pass
    assert os.listdir(target.parent) == ["mine"] and not os.listdir(target)


def _said(folder):
    return os.listdir(folder) if (folder / "results.md").exists() else []


def _made(folder):
    return ["fitted", "figure.png", "report.html", "results.md"]


def _interrupt():
    raise KeyboardInterrupt


def _swap_and_die(target, step, line):
    """Dies before the step of this number."""
    patch = pytest.MonkeyPatch()
    _swap(target, patch, step, lambda: os.kill(os.getpid(), signal.SIGKILL))


def _swap(target, patch, step, stop):
    """Makes a new folder; something stops it before the step of this number."""
    left = step

    def counted(function):
        def call(*args, **kwargs):
            nonlocal left
            left -= 1
            if left == -1:
                stop()
            return function(*args, **kwargs)

        return call

    for name in ("mkdir", "rename", "rmdir", "unlink"):
        patch.setattr(os, name, counted(getattr(os, name)))
    with staged(target, own=_made) as place:
        (place / "fitted").mkdir()
        (place / "fitted" / "model.bin").write_text("new")


def test_other_commands_refuse_what_is_not_theirs(world, tmp_path):
    before = foreign(tmp_path / "out" / "mine")
    asked = tmp_path / "questions.jsonl"
    asked.write_text(json.dumps({"question": "Who?", "answer": "Ada"}) + "\n")
    with pytest.raises(FileExistsError, match="holds what was not made here"):
        make(
            {
                "name": "mine",
                "questions": str(asked),
                "model": str(world / "tiny"),
                "out": str(tmp_path / "out"),
                "judge": "overlap",
                "contained": 0,
            }
        )
    assert tree(tmp_path / "out" / "mine") == before
