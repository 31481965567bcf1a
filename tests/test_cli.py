"""What the command prints, writes and exits with."""

import dataclasses
import errno
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import thorough
from typer.testing import CliRunner

import jaxhal
from jaxhal.cli import app as cli
from jaxhal.cli import console, listing
from jaxhal.cli import scoring as scoring_commands
from jaxhal.cli.verdicts import excerpt
from jaxhal.datasets import bundled, bundled_answers
from jaxhal.datasets.jsonl import numbered_lines
from jaxhal.detectors import AT_ONCE, build
from jaxhal.evaluation import CalibrationSet, Measured, Platt
from jaxhal.io import progress
from jaxhal.reporting.report import Report, Span, Token
from jaxhal.reporting.summary import summarize, verdict
from jaxhal.scoring import detection
from jaxhal.scoring import results as scoring
from jaxhal.scoring.collection import FittedDetectors
from jaxhal.scoring.fitting import Fitted, untrained
from jaxhal.types import Example
from tiny_lm import tiny_lm, write_lm

GOOD = {"id": "good", "prompt": "Why?", "response": "So it is."}


def fake_report(example, scores=None, error=None):
    """A report whose scores follow from the example."""
    words, labels = example.response.split(" "), example.labels or ()
    tokens, at = [], 0
    for word in words:
        made_up = any(at < end and start < at + len(word) for start, end, _ in labels)
        value = 0.9 if made_up else 0.1
        tokens.append(Token(word, at, at + len(word), {"token_entropy": value}))
        at += len(word) + 1
    return Report(
        id=example.id,
        model="fake",
        response=example.response,
        scores={} if error else scores or {"token_entropy": float(len(words))},
        verdict=None if error else "unsure",
        probability=None if error else 0.5,
        by=None if error else "token_entropy",
        tokens=[] if error else tokens,
        spans=[] if error else [Span(0, len(words[0]), words[0], 0.5)],
        heads={},
        detector="token_entropy",
        context=example.context,
        question=example.question,
        prompt=example.prompt,
        label=example.label,
        labels=example.labels,
        error=error,
    )


@pytest.fixture
def calls(monkeypatch):
    """Replaces model and scoring; collects how they were called."""
    seen = []

    def load(name, dtype="float32", weights=None, mesh=None):
        if name == "gone":
            raise ValueError("unknown model 'gone'; did you mean 'smollm2-135m'?")
        return named(name)

    def score(lm, examples, detectors=None, *, batch_size=8, progress=None):
        seen.append((lm.name, len(examples), detectors, batch_size))
        return [
            fake_report(each, error="over the context" if "long" in each.id else None)
            for each in examples
        ]

    monkeypatch.setattr(jaxhal, "load", load)
    patch_score(monkeypatch, score)
    return seen


@functools.cache
def tiny():
    """As deep as the reader that detectors ship for."""
    return tiny_lm(num_hidden_layers=30)


def named(name):
    """A model that has a name, and that nothing is asked of."""
    return dataclasses.replace(tiny(), name=name)


def patch_score(monkeypatch, score):
    """Judges answers by another function, one after the other."""

    def batches(lm, examples, detectors, *, batch_size, known, **options):
        names = [one.detector.name for one in detectors]
        reports = score(lm, examples, names, batch_size=batch_size)
        for at, report in enumerate(reports):
            if at not in known:
                yield [(at, report)]

    monkeypatch.setattr(jaxhal, "score", score)
    monkeypatch.setattr(detection, "score_batches", batches)


def run(*arguments, **options):
    return CliRunner().invoke(cli.app, [str(each) for each in arguments], **options)


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


def write(path, *rows):
    raw = (row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)
    path.write_bytes(b"\n".join(raw) + b"\n")
    return path


@pytest.mark.parametrize("output", [["--output", "-"], []])
def test_detect_to_stdout(tmp_path, calls, output):
    source = write(tmp_path / "in.jsonl", GOOD, GOOD | {"id": 7})
    found = run("detect", "--model", "m", "--input", source, *output)
    assert found.exit_code == 0
    rows = [
        {
            "id": name,
            "verdict": "unsure",
            "probability": 0.5,
            "by": "token_entropy",
            "spans": [{"start": 0, "end": 2, "text": "So", "confidence": 0.5}],
            "error": None,
        }
        for name in ("good", "7")
    ]
    assert lines(found.stdout) == rows
    assert "2 of 2 answers scored: 2 unsure; written to standard" in found.stderr
    # The fake scores of a model that nothing was fitted for have an honest footnote.
    assert "no verdict: none of the detectors in use was fitted" in found.stderr
    assert calls == [("m", 2, list(AT_ONCE), 8)]
    every = lines(run("detect", "-m", "m", "-i", source, *output, "--all").stdout)
    assert [{key: row[key] for key in rows[0]} for row in every] == rows
    assert every[0]["scores"] == {"token_entropy": 3.0} and every[0]["flagged"] == []


def test_detect_has_a_default_reader(tmp_path, calls):
    source = write(tmp_path / "in.jsonl", GOOD)
    found = run("detect", "-i", source)
    assert found.exit_code == 0
    ((model, count, names, _),) = calls
    assert (model, count) == ("smollm2-135m", 1) and "ensemble" in names
    said = "verdicts by token_probe: AUROC 0.842 [0.79, 0.89] on 298 held-out"
    assert said in found.stderr


@pytest.fixture
def on_a_terminal(monkeypatch):
    """Commands take what they print to for a terminal of 80 columns."""
    for module in (console, scoring_commands):
        monkeypatch.setattr(module, "on_screen", lambda stderr=False: True)
    for name, value in (("FORCE_COLOR", "1"), ("COLUMNS", "80")):
        monkeypatch.setenv(name, value)


def test_detect_prints_a_table_on_a_terminal(tmp_path, calls, on_a_terminal):
    long = GOOD | {"id": "long", "response": "x"}
    evil = GOOD | {"id": "[b]\x1b[2J", "response": "So [i]\nit\u202e is."}
    source = write(tmp_path / "in.jsonl", GOOD, evil, long, b"{")
    command = ["detect", "-m", "m", "-i", source]
    found = run(*command)
    assert found.exit_code == 1
    assert "\x1b[33mSo\x1b[0m it is." in found.stdout  # the span, unsure
    shown = re.sub(r"\x1b\[[\d;]*m", "", found.stdout).splitlines()
    assert shown[0].split() == ["verdict", "probability", "id", "answer"]
    assert shown[1].split() == ["unsure", "0.50", "good", "So", "it", "is."]
    assert r"[b]\x1b[2J" in shown[2] and r"So [i] it\u202e is." in shown[2]
    assert shown[3].startswith("not scored") and "line 3: over the" in shown[3]
    assert shown[4].startswith("not scored") and "line 4: not JSON" in shown[4]
    assert max(map(len, shown)) <= 80
    assert "2 of 4 answers scored: 2 unsure\n" in found.stderr.replace("\r", "")
    # JSON lines where they are asked for.
    assert len(lines(run(*command, "-o", "-").stdout)) == 4
    assert all("scores" in row for row in lines(run(*command, "--all").stdout))


def test_an_excerpt_shows_the_first_span():
    words = [f"word{n}" for n in range(100)]
    text = " ".join(words)
    start = text.index("word70")
    spans = [Span(start, start + 6, "word70", 0.9), Span(780, 786, "word98", 0.9)]
    made = fake_report(bundled()[0])
    one = dataclasses.replace(made, response=text, spans=spans)
    shown = excerpt(one)
    assert shown.plain[0] == shown.plain[-1] == "…" and len(shown) == 162
    assert shown.plain[1:-1] in text
    assert [shown.plain[a:b] for a, b, _ in shown.spans] == ["word70"]
    whole = excerpt(dataclasses.replace(one, response="word0\nword1", spans=[]))
    assert whole.plain == "word0 word1" and not whole.spans
    last = excerpt(dataclasses.replace(one, spans=spans[1:]))
    assert last.plain == f"…{text[-160:]}"


def test_bad_rows_keep_their_place_and_exit_1(tmp_path, calls):
    source = write(
        tmp_path / "in.jsonl",
        GOOD | {"id": "first"},
        b'{"id": "cut", "response": ',
        GOOD | {"id": "long"},
        b'{"id": "\xff"}',
        GOOD | {"id": "empty", "response": " "},
        GOOD | {"id": "last"},
    )
    output, page = tmp_path / "out.jsonl", tmp_path / "out.html"
    found = run("detect", "-m", "m", "-i", source, "-o", output, "--html", page)
    assert found.exit_code == 1 and found.stdout == ""
    rows = lines(output.read_text())
    assert [row["id"] for row in rows] == [
        *("first", "line 2", "long", "line 4", "empty", "last")
    ]
    assert [row["error"] is None for row in rows] == [True, *[False] * 4, True]
    assert rows[1]["error"].startswith("line 2: not JSON at column 26")
    assert rows[2]["error"] == "line 3: over the context"
    assert "0xff" in rows[3]["error"] and "line 5: " in rows[4]["error"]
    assert rows[0]["verdict"] == rows[5]["verdict"] == "unsure"
    assert all(row["verdict"] is None and not row["spans"] for row in rows[1:5])
    assert "2 of 6 answers scored" in found.stderr
    for row in rows[1:5]:
        assert row["error"] in found.stderr
    assert "4 not scored" in page.read_text("utf-8")


def test_a_score_that_is_no_number_is_an_error_of_its_row(tmp_path, calls, monkeypatch):
    def score(lm, examples, detectors=None, **options):
        values = [1.0, float("nan"), 2.0]
        return [
            fake_report(example, scores={"toha": value}).checked()
            for example, value in zip(examples, values, strict=True)
        ]

    patch_score(monkeypatch, score)
    source = write(tmp_path / "in.jsonl", GOOD, GOOD | {"id": "bad"}, GOOD)
    page = tmp_path / "out.html"
    found = run("detect", "-m", "m", "-i", source, "--html", page, "--all")
    assert found.exit_code == 1
    first, bad, last = lines(found.stdout)
    assert (first["scores"], last["scores"]) == ({"toha": 1.0}, {"toha": 2.0})
    assert bad["scores"] == {} and bad["verdict"] is bad["probability"] is None
    assert bad["error"].startswith("line 2: bad: toha is nan")


def test_large_inputs_are_scored_in_parts(tmp_path, calls, monkeypatch):
    monkeypatch.setattr(scoring, "_PART_WAITED_FOR", 4)
    rows = [GOOD | {"id": str(n)} for n in range(10)]
    found = run("detect", "-m", "m", "-i", write(tmp_path / "in.jsonl", *rows))
    assert [row["id"] for row in lines(found.stdout)] == [str(n) for n in range(10)]
    assert [count for _, count, *_ in calls] == [4, 4, 2]


def test_detect_reads_stdin_and_passes_options(calls):
    options = ["--detector", "mtop_div", "-d", "novel_words", "--batch-size", "3"]
    text = json.dumps(GOOD) + "\n"
    found = run("detect", "-m", "m", "-i", "-", *options, input=text)
    assert found.exit_code == 0 and len(lines(found.stdout)) == 1
    assert calls == [("m", 1, ["mtop_div", "novel_words"], 3)]


def test_detectors_are_asked_for_once(tmp_path, calls, monkeypatch):
    """Of the hub, however many parts the rows come in."""
    asked, known = [], {"mtop_div": untrained(build("mtop_div"))}

    def located(name):
        asked.append(name)
        return tmp_path / "hub"

    ready = FittedDetectors({}, {}, known, [])
    monkeypatch.setattr(detection, "located", located)
    monkeypatch.setattr(FittedDetectors, "from_pretrained", lambda _: ready)
    monkeypatch.setattr(scoring, "_PART", 2)
    source, output = write(tmp_path / "in.jsonl", *[GOOD] * 5), tmp_path / "out"
    command = ["-m", "m", "-d", "me/mine"]
    assert run("detect", "-i", source, "-o", output, *command).exit_code == 0
    assert [count for _, count, *_ in calls] == [2, 2, 1] and asked == ["me/mine"]
    assert "no verdict: none of" in run("rate", source, *command).stderr
    assert asked == ["me/mine"] * 2


@pytest.mark.parametrize("output", ["out.jsonl", "-"])
def test_probabilities_are_corrected_for_the_base_rate_of_all_rows(
    tmp_path, monkeypatch, output
):
    half = CalibrationSet(np.zeros(2), np.array([0, 1]), np.arange(2))
    one = Fitted(
        build("novel_words")._replace(control=False),
        *((), Platt(0.5, -1.9), -1.0),
        beats="yes",
        measured=Measured("crates", 40, 10, 0.9),
        calibrated_on=half,
    )
    known = FittedDetectors({}, {}, {"novel_words": one}, [])
    monkeypatch.setattr(FittedDetectors, "from_pretrained", lambda _: known)
    monkeypatch.setattr(detection, "located", Path)
    monkeypatch.setattr(jaxhal, "load", lambda name, **how: named(name))
    monkeypatch.setattr(scoring, "_PART", 16)
    said = ["A fig, nut, plum, kiwi." if n % 6 == 0 else "A b." for n in range(30)]
    rows = [
        {"id": f"{n}", "context": "A b.", "response": s} for n, s in enumerate(said)
    ]
    source = write(tmp_path / "in.jsonl", *rows[:20], b"no JSON", *rows[20:])
    out, mine = output if output == "-" else tmp_path / output, tmp_path / "mine"
    mine.mkdir()
    command = ["detect", "-m", "m", "-d", mine, "-i", source, "-o", out, "--all"]
    if output != "-":  # what a stopped command has done is not done again
        parts, whole = [], detection.score_batches

        def stopping(lm, examples, *options, **how):
            parts.append(len(examples))
            if len(parts) == 2:
                raise OSError(errno.EIO, "gone")
            yield from whole(lm, examples, *options, **how)

        monkeypatch.setattr(detection, "score_batches", stopping)
        assert run(*command, "--adapt").exit_code and parts == [16, 14]
        assert (tmp_path / f"{output}.partial").is_file() and not out.exists()
    progress.note.cache_clear()
    found = run(*command, "--adapt")
    assert found.exit_code == 1 and "of its calibration" in found.stderr
    got = lines(found.stdout if output == "-" else out.read_text())
    assert got.pop(20)["error"].startswith("line 21: ")
    examples = [Example(row["response"], context="A b.", id=row["id"]) for row in rows]
    want = jaxhal.score(named("m"), examples, [one], adapt=True)
    assert got == [report.to_dict(every=True) for report in want]
    few = write(tmp_path / "few.jsonl", *rows[:19])
    found = run("detect", "-m", "m", "-d", mine, "-i", few, "--adapt")
    assert found.exit_code == 2 and not found.stdout
    assert "19 of them could be read; give 20 or more" in found.stderr


def test_square_brackets_are_no_markup(tmp_path, calls):
    source = write(tmp_path / "in.jsonl", b"[bold]", GOOD)
    output = tmp_path / "[red]out.jsonl"
    found = run("detect", "-m", "m", "-i", source, "-o", output)
    assert output.is_file() and str(output) in found.stderr


def test_an_empty_file_is_no_error(tmp_path, calls):
    source, page = write(tmp_path / "in.jsonl", b"", b"  "), tmp_path / "out.html"
    found = run("detect", "-m", "m", "-i", source, "--html", page)
    assert (found.exit_code, found.stdout) == (0, "")
    assert "0 answers" in page.read_text()
    assert f"no rows in {source}" in " ".join(found.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-d", "mtop_dib"], "unknown detector 'mtop_dib'; did you mean 'mtop_div'?"),
        (
            ["-d", "mine"],
            "unknown detector 'mine' (fitted ones are named by ",
        ),
        (["-d", "./mine"], "./mine: no such folder; give one of fitted detectors"),
        (["-d", "mine/"], "mine/: no such folder; give one of fitted detectors"),
        (["-m", "gone"], "did you mean 'smollm2-135m'?"),
        (["--threshold", "recall"], "'recall' is no option; write key=value"),
        (["--threshold", "recall=x"], "threshold 'recall=x' has no number; write rec"),
        (["--threshold", "recall=0.9"], "{'recall': 0.9}: no verdict: none of the"),
        (["--confidence", "0.95"], "--confidence 0.95 is that of a promise; give --th"),
        (
            ["-m", "smollm2-135m", "--threshold", "precision=0.99"],
            "no known threshold keeps precision 0.99 on 1655 answers of 839 sources",
        ),
        (["-i", "missing.jsonl"], "missing.jsonl: no such file"),
        (["-i", "."], "is a folder"),
        (["-o", "missing/out.jsonl"], "missing: no such folder"),
        (["-o", "o" * 220], "no file can be made there (File name too long); give"),
        (["--html", "o" * 220], "no file can be made there (File name too long); give"),
        pytest.param(
            ["-o", "/proc/out.jsonl"],
            "/proc/out.jsonl: no file can be made there (",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="/proc"),
        ),
        (["--html", "-"], "--html is '-'; give a file, as a page goes to no stream"),
        (["-o", "."], "is a folder"),
        (["--html", "missing/out.html"], "missing: no such folder"),
        (["--adapt", "--relevance", "attnlrp"], "--relevance attnlrp is of spans, and"),
    ],
)
def test_usage_errors_exit_2(tmp_path, calls, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    write(Path("in.jsonl"), GOOD)
    found = run("detect", "-m", "m", "-i", "in.jsonl", "-o", "out.jsonl", *arguments)
    assert found.exit_code == 2 and found.stdout == ""
    assert message in found.stderr and "Traceback" not in found.stderr
    assert os.listdir() == ["in.jsonl"] and calls == []


@pytest.mark.parametrize("start", [b"PAR1\x15", b"\x1f\x8b\x08", b"PK\x03\x04"])
def test_files_that_hold_no_lines(tmp_path, calls, start):
    path = tmp_path / "rows"
    path.write_bytes(start + b"\n\0\xff\n" * 9)
    found = run("detect", "-m", "m", "-i", path, "-o", tmp_path / "out.jsonl")
    assert found.exit_code == 2 and "give its rows as JSON Lines" in found.stderr
    assert os.listdir(tmp_path) == ["rows"]


def test_lines_that_begin_with_such_letters(tmp_path):
    path = tmp_path / "queries.txt"
    path.write_text("PAR1 and its inhibitors?\nPKU: how is it treated?\n")
    assert len([*numbered_lines(path)]) == 2
    path.write_text("PKU: how is it treated?\n")
    assert len([*numbered_lines(path)]) == 1


@pytest.mark.parametrize("command", ["detect", "demo"])
def test_a_full_disk_is_one_line(command, tmp_path, calls, monkeypatch):
    """Exit code 2, not that of a row that failed."""

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    source, out = write(tmp_path / "in.jsonl", GOOD), tmp_path / "out"
    detect = ["detect", "-m", "m", "-i", source, "-o", out, "--html", tmp_path / "x"]
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        found = run(*(detect if command == "detect" else ["demo", "--out", out]))
    assert found.exit_code == 2
    assert found.stderr.splitlines()[-1].startswith("jaxhal: ")
    assert "No space left" in found.stderr and "Traceback" not in found.stderr
    if command == "demo":  # nothing of it is left, so the same command begins anew
        assert not os.listdir(out)
        assert run("demo", "--out", out, "--limit", "1").exit_code == 0


def test_a_reader_that_fails_in_a_demo_is_one_line(tmp_path, calls, monkeypatch):
    def fails(*arguments, **options):
        raise RuntimeError("no memory")

    monkeypatch.setattr(jaxhal, "score", fails)
    found = run("demo", "--out", tmp_path / "out", "--limit", "1")
    assert (found.exit_code, found.stderr) == (2, "jaxhal: no memory\n")


def test_a_home_that_nobody_knows_is_one_line(monkeypatch):
    monkeypatch.setenv("JAXHAL_CACHE", "~nosuchuser/x")
    found = run("list", "datasets")
    assert found.exit_code == 2 and found.stderr.startswith("jaxhal: Could not ")
    assert "Set $JAXHAL_CACHE to a folder" in found.stderr


def test_a_folder_called_like_a_model_has_no_fitted_detectors(
    tmp_path, calls, monkeypatch
):
    monkeypatch.setattr(jaxhal, "load", lambda name, *_, **__: named(f"./{name}"))
    source = write(tmp_path / "in.jsonl", GOOD)
    found = run("detect", "-m", "smollm2-135m", "-i", source, "-d", "token_probe")
    assert (found.exit_code, found.stdout) == (2, "") and calls == []
    assert "labelled answers of './smollm2-135m' first" in found.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["detect"],
        ["detect", "-m", "m", "-i", "-", "--batch-size", "0"],
        ["demo", "--limit", "0"],
        ["list", "planets"],
        ["fly"],
        ["demo", "--fast"],
    ],
)
def test_wrong_arguments_exit_2(calls, arguments):
    found = run(*arguments, input="")
    assert found.exit_code == 2 and found.stdout == "" and found.stderr


@pytest.mark.parametrize(
    "error", [ValueError("so"), FileNotFoundError("so"), KeyError("so"), OSError("so")]
)
def test_what_loading_raises_is_one_line(tmp_path, calls, monkeypatch, error):
    def load(name, dtype="float32", weights=None, mesh=None):
        raise error

    monkeypatch.setattr(jaxhal, "load", load)
    source = write(tmp_path / "in.jsonl", GOOD)
    found = run("detect", "-m", "m", "-i", source)
    assert (found.exit_code, found.stderr) == (2, "jaxhal: so\n")


@pytest.mark.parametrize("command", ["detect", "demo", "rate", "serve"])
def test_how_a_model_is_loaded(tmp_path, monkeypatch, command):
    seen = {}

    def load(name, **how):
        seen.update(how)
        raise ValueError("enough")

    monkeypatch.setattr(jaxhal, "load", load)
    source = str(write(tmp_path / "in.jsonl", GOOD))
    rest = {"detect": ["-i", source], "rate": [source], "serve": ["--port", 0]}
    rest["demo"] = ["--out", str(tmp_path / "demo")]
    how = ["--dtype", "bfloat16", "--weights", "int8", "--mesh", "data=1"]
    found = run(command, *rest[command], *how)
    assert (found.exit_code, found.stderr) == (2, "jaxhal: enough\n")
    assert seen == {"dtype": "bfloat16", "weights": "int8", "mesh": "data=1"}


def test_tokens_of_the_environment(monkeypatch):
    """One of a watchdog's teacher is there for other servers; none may be empty."""

    def load(*args, **options):
        raise ValueError("that far")

    monkeypatch.setattr(jaxhal, "load", load)
    monkeypatch.setenv("JAXHAL_TEACHER", "s3cret")
    assert run("serve", "--port", 0).stderr == "jaxhal: that far\n"
    said = run("serve", "--port", 0, "--teacher", "other").stderr
    assert "--teacher are a watchdog's; give --watchdog" in said
    monkeypatch.setenv("JAXHAL_TOKEN", "")
    assert "$JAXHAL_TOKEN is empty; give one" in run("serve", "--port", 0).stderr


@pytest.mark.parametrize("command", [["serve"], ["watchdog", "serve", "gone.yaml"]])
def test_a_port_that_is_taken_costs_no_loading(command, monkeypatch):
    monkeypatch.setattr(jaxhal, "load", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = run(*command, "--port", port)
    assert (found.exit_code, found.stdout) == (2, "")
    said = f"jaxhal: no server can be at host '127.0.0.1', port {port} ("
    assert found.stderr.startswith(said) and found.stderr.count("\n") == 1


def test_ctrl_c_writes_nothing(tmp_path, calls, monkeypatch):
    def score(*arguments, **options):
        signal.raise_signal(signal.SIGINT)

    patch_score(monkeypatch, score)
    source, output = write(tmp_path / "in.jsonl", GOOD), tmp_path / "out.jsonl"
    found = run("detect", "-m", "m", "-i", source, "-o", output)
    assert found.exit_code == 130
    assert os.listdir(tmp_path) == ["in.jsonl"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="of Linux")
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("list models > /dev/full", "[Errno 28] No space left on device"),
        ("list models >&-", "standard output is closed; give it a file or a pipe"),
        ("detect -d novel_words -i - <&-", "standard input is closed; give it a file"),
        ("data bundled >&- 2>&-", None),
    ],
)
def test_a_stream_that_fails_is_bad_usage(command, said):
    whole = f"{sys.executable} -m jaxhal {command}"
    found = subprocess.run(whole, shell=True, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith(f"jaxhal: {said}") if said else not found.stderr
    assert found.stderr.count("\n") == bool(said)


@pytest.mark.skipif(os.name != "posix", reason="of shells")
@pytest.mark.parametrize("closed", [">&-", *thorough.more("<&-", "2>&-")])
def test_what_needs_no_stream_takes_it_closed(tmp_path, closed):
    source, output = write(tmp_path / "in.jsonl", GOOD), tmp_path / "out.jsonl"
    model = write_lm(tmp_path / "lm")
    command = f"detect --model {model} -d novel_words -i {source} -o {output} {closed}"
    whole = f"{sys.executable} -m jaxhal {command}"
    found = subprocess.run(whole, shell=True, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert len(output.read_text().splitlines()) == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_table_is_shown_in_any_encoding(encoding):
    shell = os.environ | {"PYTHONIOENCODING": encoding}
    code = """if True:
        from jaxhal.cli import console
        console.open_streams()
        console.tell([{"95 % interval": "0.40–0.60", "name": "漢 é"}])
    """
    whole = [sys.executable, "-c", code]
    found = subprocess.run(whole, env=shell, capture_output=True, check=True)
    accent = {"ascii": "\\xe9", "latin-1": "é"}[encoding]
    spelled = found.stdout.decode(encoding).splitlines()[1].split()
    assert spelled == [r"0.40\u20130.60", r"\u6f22", accent]


SLOW = """
import sys, time
from jaxhal.cli import app as cli
from jaxhal.cli import console
from jaxhal.cli import scoring as scoring_commands
from jaxhal.scoring import detection
def batches(*arguments, **options):
    print("scoring", file=sys.stderr, flush=True)
    time.sleep(60)
detection.score_batches = batches
cli.main()
"""


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_of_a_process(tmp_path):
    source, output = write(tmp_path / "in.jsonl", GOOD), tmp_path / "out.jsonl"
    output.write_text("old")
    model = write_lm(tmp_path / "model")
    process = subprocess.Popen(
        [*(sys.executable, "-c", SLOW, "detect", "-m", model), "-i", source]
        + ["-o", output],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stderr.readline() == "scoring\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors
    assert output.read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "model", "out.jsonl"]


def test_demo(tmp_path, calls):
    out = tmp_path / "new" / "demo"
    found = run("demo", "--out", out)
    assert found.exit_code == 0 and "token_entropy" in found.stdout
    ((*asked, detectors, _),) = calls
    assert asked == ["smollm2-135m", 170]
    assert names_of(detectors) == names_of(detection.resolve("smollm2-135m", None))
    rows = lines((out / "scores.jsonl").read_text("utf-8"))
    assert [row["id"] for row in rows] == [
        example.id for example in [*bundled_answers(), *bundled()]
    ]
    table = (out / "results.md").read_text("utf-8")
    assert "- answers: 66 answers, 22 sources, 20 hallucinated" in table
    assert "- hard pairs: 104 answers, 52 sources, 52 hallucinated" in table
    titles = re.findall("^## (.*)", table, re.MULTILINE)
    assert titles == ["Answers", "Hard pairs", "Verdicts"]
    assert "| answers, hallucinated | 20 | 0 | 20 | 0 |" in table
    assert "| hard pairs, supported | 52 | 0 | 52 | 0 |" in table
    assert table.count("| method | AUROC [95 %] | token AUROC | vs best control |") == 2
    page = (out / "report.html").read_text("utf-8")
    for text in (page, " ".join(found.stderr.split())):
        assert "66 answers to 22 texts, 30 % hallucinated, as chat models" in text
        assert "Then 104 answers to 52 texts, 50 % hallucinated, short" in text
        assert "written by hand" in text
        assert "smollm2-135m, is a small surrogate" in text
        assert "ms per answer" in text
    for text in (page, found.stdout):
        assert "token_entropy" in text and "on hard pairs" in text
    assert str(out / "report.html") in found.stderr
    assert "allotments-2 (hallucinated)" in found.stderr


def test_a_demo_writes_over_nothing_but_a_demo(tmp_path, calls):
    own = tmp_path / "results.md"
    own.write_text("mine")
    found = run("demo", "--out", tmp_path)
    assert found.exit_code == 2 and "holds 'results.md' and not the" in found.stderr
    assert own.read_text() == "mine" and not calls
    found = run("demo", "--out", own)
    assert found.exit_code == 2 and "is a file; give a folder" in found.stderr
    for _ in range(2):
        assert run("demo", "--out", tmp_path / "new", "--limit", "1").exit_code == 0


def test_demo_compares_with_the_controls_on_both(tmp_path, calls, monkeypatch):
    def score(lm, some, *_, **options):
        made_up = [{"token_entropy": float(e.label), "novel_words": 0.5} for e in some]
        return [fake_report(*each) for each in zip(some, made_up, strict=True)]

    patch_score(monkeypatch, score)
    found = run("demo", "--out", tmp_path)
    said = " ".join(found.stderr.split())
    best = "The best control is novel_words (0.500); clearly above it: token_entropy."
    assert found.exit_code == 0 and said.count(best) == 2
    page = (tmp_path / "report.html").read_text("utf-8")
    assert page.count(best) == 2
    assert "1.00 (1.00–1.00)" in page and "0.50 (0.50–0.50)" in page


def test_demo_of_one_answer_has_no_table(tmp_path, calls):
    found = run("demo", "--out", tmp_path, "--limit", "1", "--model", "other")
    assert found.exit_code == 0
    assert [name for name, *_ in calls] == ["other"] and calls[0][1] == 1
    assert "Answers of one class have no AUROC" in " ".join(found.stderr.split())
    assert "hard" not in found.stderr
    assert len(lines((tmp_path / "scores.jsonl").read_text())) == 1


def test_demo_of_named_detectors(tmp_path, calls):
    named = "-d", "token_entropy", "-d", "novel_words"
    found = run("demo", "--out", tmp_path, *named)
    assert found.exit_code == 0
    assert names_of(calls[0][2]) == ["token_entropy", "novel_words"]
    found = run("demo", "--out", tmp_path / "new", "-d", "token_entrophy")
    assert found.exit_code == 2 and "did you mean 'token_entropy'?" in found.stderr
    assert len(calls) == 1 and not (tmp_path / "new").exists()


def names_of(fitted):
    return [one.detector.name for one in fitted]


def test_demo_folder_that_is_a_file(tmp_path, calls):
    (tmp_path / "file").write_text("")
    found = run("demo", "--out", tmp_path / "file")
    assert found.exit_code == 2 and "Traceback" not in found.stderr and calls == []


def test_results_compare_with_the_controls():
    examples = bundled()
    reports = [
        fake_report(
            example,
            scores={
                "novel_words": float(number % 7),
                "token_entropy": float(example.label),
                "mtop_div": -float(example.label),
                "lookback_ratio": number % 7 + 0.1 * example.label * (number < 2),
            },
        )
        for number, example in enumerate(examples)
    ]
    rows = summarize(reports)
    assert [row["detector"] for row in rows] == [
        *("token_entropy", "lookback_ratio", "mtop_div", "novel_words")
    ]
    assert [row["AUROC"] for row in rows][::2] == [1.0, 0.0]
    assert [row["control"] for row in rows] == [False, False, False, True]
    assert [row["beats controls"] for row in rows] == [
        *("yes", "within noise", "no", None)
    ]
    assert rows[0]["95 % interval"] == "1.00–1.00"
    assert rows[0]["token AUROC"] > 0.95  # a word may end in punctuation outside
    assert rows[1]["token AUROC"] is None
    text = verdict(rows)
    assert "best control is novel_words" in text and "not above it: mtop_div" in text


def test_results_need_both_classes():
    grounded = [fake_report(each) for each in bundled() if each.label == 0]
    assert summarize(grounded) == summarize([]) == []


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("models", ["smollm2-135m", "Apache-2.0"]),
        ("families", ["gemma4_text", "logits", "detectors"]),
        ("detectors", ["mtop_div", "novel_words", "control", "Bazarova"]),
        ("datasets", ["bundled", "104", "ragtruth", "MIT", "Niu"]),
    ],
)
def test_list(kind, words):
    found = run("list", kind)
    assert found.exit_code == 0 and found.stderr == ""
    for word in words:
        assert word in found.stdout


def test_list_has_a_line_a_name():
    names = [row.split()[0] for row in run("list", "detectors").stdout.splitlines()[1:]]
    assert names == [*jaxhal.detectors.CATALOGUE, "ensemble"]


@pytest.mark.parametrize("kind", ["models", "families", "detectors", "datasets"])
def test_list_as_json(kind):
    """What the table holds, an object a line."""
    rows = lines(run("list", kind, "--json").stdout)
    head, *table = run("list", kind).stdout.splitlines()
    assert [row["name"] for row in rows] == [line.split()[0] for line in table]
    assert list(rows[0]) == re.split(r"  +", head.strip())


def test_on_a_terminal_it_says_what_else_loads(monkeypatch):
    monkeypatch.setattr(listing, "on_screen", lambda stderr=False: True)
    assert (
        run("list", "models").stdout.splitlines()[-1].endswith("jaxhal list families")
    )


def test_on_a_terminal_detectors_are_listed_in_two_columns(monkeypatch):
    for module in (console, listing):
        monkeypatch.setattr(module, "on_screen", lambda stderr=False: True)
    monkeypatch.setenv("COLUMNS", "70")
    rows = run("list", "detectors").stdout.splitlines()
    assert rows[0].split() == ["name", "what"] and max(map(len, rows)) <= 70
    names = [row.split()[0] for row in rows[1:] if not row.startswith(" ")]
    assert names == [*jaxhal.detectors.CATALOGUE, "ensemble"]


def test_data_counts():
    found = run("data", "bundled")
    assert found.exit_code == 0 and found.stderr == ""
    rows = dict(re.split(r"  +", row)[:2] for row in found.stdout.splitlines())
    assert (rows["split"], rows["rows"], rows["sources"]) == ("all", "104", "52")
    assert (rows["hallucinated"], rows["spans: conflict"]) == ("52", "48")
    assert rows["AUROC of response length"] == "0.471"


def test_data_as_json(tmp_path):
    source = write(
        tmp_path / "in.jsonl",
        GOOD | {"label": 1, "split": "train"},
        {"prompt": "Why?", "answer": "No.", "is_hallucination": 0, "split": "test"},
    )
    found = run("data", source, "--json")
    assert found.exit_code == 0 and found.stderr == ""
    [card] = lines(found.stdout)
    assert card["name"] == str(source)
    assert [part["split"] for part in card["splits"]] == ["train", "test", "all"]
    assert [part["share"] for part in card["splits"]] == [1.0, 0.0, 0.5]
    assert card["splits"][2]["auroc"]["response_length"] == 1.0


def test_data_with_bad_rows_counts_the_others(tmp_path):
    source = write(tmp_path / "in.jsonl", b"{", GOOD, GOOD | {"response": " "})
    found = run("data", source, "--json")
    assert found.exit_code == 1
    assert lines(found.stdout)[0]["splits"][0]["rows"] == 1
    assert "line 1: not JSON" in found.stderr and "line 3: " in found.stderr
    only = write(tmp_path / "bad.jsonl", b"{")
    found = run("data", only, "--json")
    assert found.exit_code == 1 and lines(found.stdout)[0]["splits"] == []
    found = run("data", only)
    assert (found.exit_code, found.stdout) == (1, "") and "line 1" in found.stderr


def test_data_options(monkeypatch):
    seen = []
    entry = jaxhal.datasets.DATASETS["bundled"]

    def loader(
        split: str | None = "a",
        quality: str | Collection[str] | None = None,
        whole: bool = True,
        each: int | None = None,
    ):
        seen.append((split, quality, whole, each))
        return bundled()

    entry = entry._replace(loader=loader)
    monkeypatch.setitem(jaxhal.datasets.DATASETS, "bundled", entry)
    options = ["split=a=b", "quality=x", "quality=3", "whole=False", "each=2"]
    assert run("data", "bundled", *options).exit_code == 0
    assert run("data", "bundled", "split=null", "quality=true").exit_code == 0
    assert seen == [("a=b", ["x", "3"], False, 2), (None, "true", True, None)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bundeld"], "unknown data set 'bundeld'; did you mean 'bundled'?"),
        (["gone.parquet"], "gone.parquet: no such file"),
        (["bundled", "split"], "'split' is no option; write key=value"),
        (["bundled", "=x"], "'=x' is no option"),
        (["bundled", "split=x"], "unknown option 'split' of 'bundled'"),
        (["ragtruth", "root=/gone"], "/gone, given as root, is no folder"),
        (["alterations", "each=x"], "each is 'x'; give a whole number, 0 or more"),
        (["alterations", "each=1", "each=2"], "each is given 2 times; give it once"),
        (["alterations", "seed=null"], "seed is 'null'; give a whole number, 0 or m"),
        (["alterations", "seed=-1"], "seed is '-1'; give a whole number, 0 or more"),
        (["alterations", "seed=1.5"], "seed is '1.5'; give a whole number, 0 or more"),
        (["alterations", "seed=1", "seed=2"], "seed is given 2 times; give it once"),
        (["truthfulqa", "categories=null", "categories=x"], "categories is null and"),
        (["ragtruth", "task=null", "task=QA"], "task is given 2 times; give it once"),
        (["ragtruth", "implicit_true=5"], "implicit_true is '5'; use one of true, fa"),
        (["halueval", "root=a", "root=b"], "root is given 2 times; give it once"),
        (["bundled", "x=1", "x=2"], "unknown option 'x' of 'bundled'; it takes: none"),
        (["empty.jsonl"], "empty.jsonl holds no rows; give at least one"),
        (["empty.jsonl", "split=x"], "unknown option 'split' of 'empty.jsonl'"),
    ],
)
def test_data_bad_usage(tmp_path, monkeypatch, arguments, message):
    (tmp_path / "empty.jsonl").write_text("")
    monkeypatch.chdir(tmp_path)
    found = run("data", *arguments)
    assert (found.exit_code, found.stdout) == (2, "")
    assert found.stderr.startswith("jaxhal: ") and message in found.stderr


def test_bench_passes_on(tmp_path, monkeypatch):
    seen = []
    module = SimpleNamespace(run=lambda *arguments: seen.append(arguments))
    monkeypatch.setitem(sys.modules, "jaxhal.bench", module)
    monkeypatch.setattr(jaxhal, "bench", module, raising=False)
    assert run("bench").exit_code == 0
    assert run("bench", "read", "--json", tmp_path / "x.json").exit_code == 0
    assert run("bench", "versions", "--against", tmp_path).exit_code == 0
    assert seen == [
        ([], None, None),
        (["read"], tmp_path / "x.json", None),
        (["versions"], None, tmp_path),
    ]
    assert run("bench", "--json", tmp_path / "gone" / "x.json").exit_code == 2


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("seed=,1", "seed=,1 has an empty value; write seed=V1,V2"),
        ("seed=0,", "seed=0, has an empty value"),
        ("precision", "'precision' is no option; write key=value"),
        ("=0,1", "'=0,1' is no option"),
        ("seed2=2", "seed2 is given 2 times; give it once, as seed2=V1,V2"),
    ],
)
def test_sweep_bad_usage(monkeypatch, setting, message):
    monkeypatch.setattr("jaxhal.experiments.sweep", None)
    found = run("sweep", "smoke.yaml", setting, "seed2=0,1")
    assert (found.exit_code, found.stdout) == (2, "")
    assert found.stderr.startswith(f"jaxhal: {message}")


def test_version():
    found = run("--version")
    assert (found.exit_code, found.stdout) == (0, f"jaxhal {jaxhal.__version__}\n")


def test_help_is_light():
    code = (
        "import sys; from jaxhal.cli import app as cli; sys.argv[1:] = ['--help']\n"
        "try: cli.main()\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "heavy = {'jax', 'flax', 'numpy', 'transformers', 'pandas', 'matplotlib',"
        " 'sklearn', 'jinja2'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "[]\n"
    for command in ("demo", "detect", "list", "data", "bench"):
        assert command in done.stdout


@pytest.mark.parametrize("own", [None, "/elsewhere"])
def test_what_was_compiled_is_kept(own, tmp_path, monkeypatch):
    """Below the cache folder, unless jax was told of another one."""
    monkeypatch.setenv("JAXHAL_CACHE", str(tmp_path))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", own or "")
    least = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
    monkeypatch.setenv(least, "")
    monkeypatch.delenv(least)
    if own is None:
        monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    assert CliRunner().invoke(cli.app, ["list", "models"]).exit_code == 0
    found = os.environ["JAX_COMPILATION_CACHE_DIR"]
    assert found == (own or str(tmp_path / "compiled"))
    assert os.environ[least] == "0"  # programs that compile in no time are many


@pytest.mark.parametrize(
    "command, function",
    [
        ("run", "jaxhal.experiments.run"),
        ("tune", "jaxhal.experiments.run"),
        ("generate", "jaxhal.experiments.making.make"),
        ("guide", "jaxhal.experiments.guiding.compare"),
    ],
)
def test_the_mesh_of_an_experiment(monkeypatch, command, function):
    """It overrides that of the configuration and of settings."""

    def seen(config, settings, **options):
        raise ValueError(" ".join(settings))

    monkeypatch.setattr(function, seen)
    asked = [command, "a.yaml", "mesh=data=1", "--mesh", "data=2,model=4"]
    result = CliRunner().invoke(cli.app, asked)
    assert result.exit_code == 2
    assert result.output.endswith(" mesh=data=1 mesh=data=2,model=4\n")


def test_run_and_sweep(narrow, tmp_path):
    """Both commands on a few bundled sources; a list is one value, commas and all."""
    settings = ["data.0.sources=10", "test_share=0.5", f"out={tmp_path}"]
    settings += [
        f"model={narrow}",
        f"store={tmp_path / 'store'}",
        "detectors=[mtop_div,novel_words]",
    ]
    config = str(Path(__file__).parent.parent / "configs" / "smoke.yaml")
    runner = CliRunner()
    result = runner.invoke(cli.app, ["run", config, *settings])
    assert result.exit_code == 0, result.output
    assert (
        "mtop_div" in result.stdout and (tmp_path / "smoke" / "report.html").is_file()
    )
    table = tmp_path / "table.csv"
    swept = ["sweep", config, "seed=0,1", *settings, "-o", str(table)]
    result = runner.invoke(cli.app, swept)
    assert result.exit_code == 0, result.output
    rows = table.read_text("utf-8").splitlines()
    assert rows[0].startswith("seed,method") and len(rows) > 3
    result = runner.invoke(cli.app, ["run", "none.yaml"])
    assert result.exit_code == 2 and "no such file" in result.output
