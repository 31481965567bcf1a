"""``jaxhal detect`` never harms what it reads, and loses nothing of what it did."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jaxhal.cli import app as cli
from jaxhal.scoring import detection
from jaxhal.scoring import results as scoring
from jaxhal.scoring.partial import Partial, resuming
from tiny_lm import write_lm

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


@pytest.mark.parametrize("option", ["-o", "--html"])
def test_detect_refuses_to_write_over_what_the_shell_reads(spelled, option):
    kept = os.dup(0)
    try:
        with spelled.open() as file:
            os.dup2(file.fileno(), 0)
        found = run("detect", "-m", "gone/gone", "-i", "-", option, "hard")
    finally:
        os.dup2(kept, 0)
        os.close(kept)
    assert found.exit_code == 2 and "is the file of --input" in found.stderr
    assert json.loads(spelled.read_text()) == ROW


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


# --- a stop loses nothing -----------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_lm(tmp_path_factory.mktemp("model"))


@pytest.fixture
def stop(monkeypatch):
    """Lets a command be stopped when so many batches are kept."""
    add = Partial.add

    def after(batches):
        left = iter(range(batches))

        def counted(self, records):
            if next(left, None) is None:
                raise KeyboardInterrupt
            add(self, records)

        monkeypatch.setattr(Partial, "add", counted)

    yield after


def detect(folder, model):
    """The command line for a few rows, two of them bad, in four batches."""
    bad = [{"id": "no response"}, {"id": 3, "response": "x", "prompt": "y " * 900}]
    source = write(folder / "in.jsonl", [*rows(5), *bad, *rows(3)])
    names = ["-d", "lookback_ratio", "-d", "predictive_probability"]
    return ["detect", "-m", model, "-i", source, "--batch-size", 2, *names]


@pytest.fixture
def command(tmp_path, model):
    return detect(tmp_path, model)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, model):
    """Result and page of a command that nobody stops."""
    folder = tmp_path_factory.mktemp("whole")
    command = detect(folder, model)
    found = run(*command, "-o", folder / "whole", "--html", folder / "whole.html")
    assert found.exit_code == 1 and "8 of 10 answers scored" in found.stderr
    return [(folder / name).read_bytes() for name in ("whole", "whole.html")]


@pytest.mark.parametrize(("batches", "page"), [(1, True), (3, True), (4, False)])
def test_a_second_call_goes_on(tmp_path, command, whole, stop, batches, page):
    output, html = tmp_path / "out.jsonl", tmp_path / "out.html"
    command = [*command, "-o", output, *(["--html", html] if page else [])]
    output.write_text("old")
    stop(batches)
    assert run(*command).exit_code == 130
    assert output.read_text() == "old" and not html.exists()
    kept = (tmp_path / "out.jsonl.partial").read_bytes()
    assert kept.count(b"\n") > batches
    stop(99)
    found = run(*command)
    assert found.exit_code == 1 and "8 of 10 answers scored" in found.stderr
    assert output.read_bytes() == whole[0]
    assert not page or html.read_bytes() == whole[1]
    assert not list(tmp_path.glob("*partial*")) and not list(tmp_path.glob(".*"))


def test_what_is_done_is_not_done_again(tmp_path, command, whole, stop, monkeypatch):
    command = [*command, "-o", tmp_path / "out"]
    stop(5)
    assert run(*command).exit_code == 130
    seen, judge = [], detection.judge
    monkeypatch.setattr(
        detection, "judge", lambda *given: seen.append(0) or judge(*given)
    )
    stop(99)
    assert run(*command).exit_code == 1 and len(seen) == 1
    assert (tmp_path / "out").read_bytes() == whole[0]


def test_relevance_and_samples_go_on_too(tmp_path, model, stop):
    source = write(tmp_path / "in.jsonl", rows(2))
    options = ["--relevance", "attnlrp", "-d", "selfcheck_ngram", "-d", "token_entropy"]
    command = ["detect", "-m", model, "-i", source, "--batch-size", 1, *options]
    for name in ("whole", "out"):
        line = [*command, "-o", tmp_path / name, "--html", tmp_path / f"{name}.html"]
        if name == "out":
            stop(1)
            assert run(*line).exit_code == 130
            stop(99)
        assert run(*line).exit_code == 0
    for end in ("", ".html"):
        whole, resumed = (tmp_path / f"{name}{end}" for name in ("whole", "out"))
        assert whole.read_bytes() == resumed.read_bytes()


def test_a_torn_line_is_made_again(tmp_path, command, whole, stop):
    partial = tmp_path / "out.partial"
    command = [*command, "-o", tmp_path / "out"]
    stop(5)
    run(*command)
    stop(99)
    kept = partial.read_bytes()
    for end in (len(kept) - 1, kept.find(b"\n"), 9):
        partial.write_bytes(kept[:end])
        assert run(*command).exit_code == 1
        assert (tmp_path / "out").read_bytes() == whole[0] and not partial.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--batch-size", 3], "was made with batch size 2, not 3"),
        (["-d", "novel_words"], "was made without detectors ['novel_words'];"),
        (["--html", "page"], "was made with page False, not True"),
        (["-i", "other"], "another input: lines 1 to 3 differ; give that input"),
        (["-i", "longer"], "another input: lines 1 to 11 differ"),
        (["-m", "model"], "was made with model "),
    ],
)
def test_other_settings_or_rows_are_refused(
    tmp_path, command, whole, stop, monkeypatch, change, message
):
    monkeypatch.chdir(tmp_path)
    write(Path("other"), rows(3))
    write(Path("longer"), rows(11))
    write_lm(Path("model"), seed=1)
    command = [*command, "-o", "out"]
    stop(3)
    run(*command)
    stop(99)
    kept = Path("out.partial").read_bytes()
    found = run(*command, *change)
    assert found.exit_code == 2 and message in found.stderr
    assert found.stderr.count("\n") == 1
    assert Path("out.partial").read_bytes() == kept and not Path("out").exists()
    assert "the same command goes on" not in found.stderr
    if change == ["-i", "other"]:
        assert run(*command, *change, "--force").exit_code == 0
        assert len(Path("out").read_text().splitlines()) == 3
        Path("out.partial").write_bytes(kept)
        assert run(*command).exit_code == 1  # the same again goes on
        assert Path("out").read_bytes() == whole[0]


def test_a_shorter_input_is_another_one(tmp_path, command, stop, monkeypatch):
    monkeypatch.setattr(scoring, "_PART", 4)
    stop(5)
    assert run(*command, "-o", tmp_path / "out").exit_code == 130
    stop(99)
    write(tmp_path / "in.jsonl", rows(4))
    found = run(*command, "-o", tmp_path / "out")
    assert found.exit_code == 2 and "the last lines differ" in found.stderr


@pytest.mark.parametrize("content", [b"mine", b'{"jaxhal": 1}\n', b"\xff\n" * 9])
def test_a_file_of_somebody_else_stays(tmp_path, command, content):
    (tmp_path / "out.partial").write_bytes(content)
    for force in ([], ["--force"]):
        found = run(*command, "-o", tmp_path / "out", *force)
        assert found.exit_code == 2 and "not what jaxhal detect left" in found.stderr
        assert (tmp_path / "out.partial").read_bytes() == content


def test_the_input_may_be_what_would_be_kept(tmp_path, command):
    source = write(tmp_path / "out.partial", rows(2))
    found = run(*command, "-i", source, "-o", tmp_path / "out")
    assert found.exit_code == 2 and "is the file of --input" in found.stderr
    assert source.read_text().count("\n") == 2


def test_a_damaged_record_is_named(tmp_path, command, stop):
    stop(5)
    run(*command, "-o", tmp_path / "out")
    stop(99)
    partial = tmp_path / "out.partial"
    first, second, *rest = partial.read_bytes().splitlines(keepends=True)
    partial.write_bytes(first + b"{" + second + b"".join(rest))
    found = run(*command, "-o", tmp_path / "out")
    assert found.exit_code == 2 and "out.partial, line 2: not JSON" in found.stderr


@pytest.mark.parametrize("settings", [b"5", b"[1]", b"{", b'"\xff"', b"[" * 99_999])
def test_damaged_settings_are_named(tmp_path, command, settings):
    (tmp_path / "out.partial").write_bytes(b'{"jaxhal detect": ' + settings + b"\n")
    found = run(*command, "-o", tmp_path / "out")
    assert found.exit_code == 2 and "out.partial, line 1: no settings" in found.stderr


def test_two_do_not_write_one_result(tmp_path, command):
    with resuming(tmp_path / "out", {}):
        found = run(*command, "-o", tmp_path / "out")
        assert found.exit_code == 2 and "another process writes" in found.stderr
    assert not (tmp_path / "out.partial").exists()


def test_what_is_done_is_as_private_as_the_result(tmp_path, command, stop):
    output = tmp_path / "out"
    output.touch(0o600)
    stop(2)
    run(*command, "-o", output)
    assert (tmp_path / "out.partial").stat().st_mode & 0o777 == 0o600
    stop(99)
    run(*command, "-o", output)
    assert output.stat().st_mode & 0o777 == 0o600
