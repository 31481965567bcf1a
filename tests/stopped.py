"""The commands that are stopped: what each reads, ends with, and must keep."""

import json
import re
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stops import Command
from test_encoding import write as write_encoder
from test_encoding import write_pooling

from golden_scores import labelled
from tiny_lm import write_lm

# What no two runs have in common: when things were done, and how long that took, with
# the picture of it and the page of a run that shows it; locks; and the parameters that
# Orbax saves in files of random names, which scores.parquet has the results of.
_TIMES = re.compile(rb'"(time|made|judged)": "[^"]*"|"seconds": \{[^}]*\}')
_UNLIKE = re.compile(r"timing\.png|report\.html|\.lock$|/params/")
_CONFIG = "config.yaml"


def content(*patterns: str, mixed: str = "") -> Callable:
    """What the files of a folder hold, without times; nothing where there are none.

    Args:
      patterns: of files, as :meth:`Path.glob` has it.
      mixed: the name of files whose lines may come in another order.
    """

    def results(folder: Path) -> dict[str, bytes]:
        found = dict.fromkeys((p for p in patterns if "*" not in p), b"")
        for path in sorted(path for each in patterns for path in folder.glob(each)):
            name = str(path.relative_to(folder))
            if path.is_file() and not _UNLIKE.search(name):
                text = _TIMES.sub(b"", path.read_bytes())
                if path.name == mixed:
                    text = b"\n".join(sorted(text.split(b"\n")))
                found[name] = text
        return found

    return results


def lines(*names: str) -> Callable[[Path], set]:
    """The whole lines of files that are written line by line."""

    def kept(folder: Path) -> set:
        paths = [path for path in map(folder.joinpath, names) if path.is_file()]
        each = [path.read_bytes().split(b"\n")[:-1] for path in paths]
        return {
            (path.name, line)
            for path, some in zip(paths, each, strict=True)
            for line in some
        }

    return kept


def _rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")


def _prepared(config: dict[str, Any], rows: list[dict[str, Any]]) -> Callable:
    """Writes the tiny model, rows and a configuration."""

    def prepare(folder: Path) -> None:
        write_lm(folder / "model")
        _rows(folder / "in.jsonl", rows)
        # JSON is YAML.
        (folder / _CONFIG).write_text(json.dumps(config), "utf-8")

    return prepare


# --- detect -------------------------------------------------------------------------


def answers(count: int) -> list[dict[str, Any]]:
    """Short answers of several lengths, every seventh of them bad."""
    return [
        {
            "id": f"row {at}",
            "context": f"The box holds {'many ' * (at % 5)}red balls.",
            "question": "What is inside?",
            "response": f"Balls{' and more' * (at % 4)}, {at}." if at % 7 else " ",
            "label": at % 2,
        }
        for at in range(count)
    ]


def detect(count: int) -> Command:
    names = ["-d", "lookback_ratio", "-d", "predictive_probability"]
    files = ["-i", "in.jsonl", "-o", "out.jsonl", "--html", "out.html"]
    return Command(
        _prepared({}, answers(count)),
        ["detect", "-m", "model", *files, *names, "--batch-size", "4"],
        content("out.jsonl", "out.html"),
        lines("out.jsonl.partial"),
        code=1,
    )


# --- run, sweep and tune ------------------------------------------------------------

_RUN = {
    "name": "mine",
    "data": [{"name": "in.jsonl"}],
    "detectors": ["lookback_ratio", "mtop_div"],
    "protocol": "holdout",
    "model": "model",
    "store": "store",
}
_FOUND = "runs/mine/results.json"


def _parts(folder: Path) -> set:
    """Parts of the feature store, whole ones."""
    return {path.name for path in folder.glob("store/*/parts/[!.]*.parquet")}


def run(count: int) -> Command:
    return Command(
        _prepared(_RUN, labelled(count)),
        ["run", _CONFIG],
        content(_FOUND, "runs/**/*", "store/*/parts/*"),
        _parts,
    )


def sweep(count: int) -> Command:
    """Folders of runs that are done stay done."""

    def kept(folder: Path) -> set:
        return _parts(folder) | {*folder.glob("runs/mine/[!.]*/results.json")}

    return Command(
        _prepared(_RUN, labelled(count)),
        ["sweep", _CONFIG, "seed=0,1,2"],
        content("runs/mine/sweep.csv", "runs/**/*"),
        kept,
    )


def tune(count: int) -> Command:
    """Every step that a checkpoint was made of stays done."""
    tuning = {"rank": 2, "batch_size": 4, "epochs": 4, "save_every": 2}
    config = {**_RUN, "protocol": "grouped", "folds": 2, "tuning": tuning}

    def kept(folder: Path) -> set:
        steps = folder.glob("runs/mine/checkpoints/*/*/steps/[0-9]*")
        done = [one for one in steps if one.name.isdigit()]
        return _parts(folder) | {
            (one.parent, step) for one in done for step in range(int(one.name) + 1)
        }

    return Command(
        _prepared(config, labelled(count)),
        ["tune", _CONFIG],
        content(_FOUND, "runs/**/*"),
        kept,
    )


# --- generate and guide -------------------------------------------------------------

_WRITING = {
    "name": "mine",
    "questions": "in.jsonl",
    "model": "model",
    "max_new_tokens": 24,
    "temperature": 1.0,
    "batch_size": 4,
}


def _questions(count: int) -> list[dict[str, Any]]:
    """What the tiny model says holds one of these letters by itself, or does not."""
    return [
        {
            "id": f"q{at}",
            "context": f"The box {at} holds {'many ' * (at % 5)}balls.",
            "question": f"What is inside {at}?",
            "answer": [*string.ascii_lowercase, *string.digits],
        }
        for at in range(count)
    ]


def generate(count: int) -> Command:
    """An answer that is cut off or empty has an error, and the command exits 1."""
    more = {"stop": [*"tc"], "judge": "overlap", "contained": 0}
    return Command(
        _prepared(_WRITING | more, _questions(count)),
        ["generate", _CONFIG],
        content("runs/mine/dataset.jsonl", "runs/mine/*"),
        lines("runs/mine/generated.jsonl"),
        code=1,
    )


def guide(count: int) -> Command:
    more = {"detector": "predictive_probability", "candidates": 2, "chunk": 8}
    return Command(
        _prepared(_WRITING | more, _questions(count)),
        ["guide", _CONFIG],
        # Not its page, which goes by the name of one that shows times.
        content("runs/mine/results.json", "runs/mine/*"),
        lines("runs/mine/responses.jsonl"),
    )


# --- watchdog -----------------------------------------------------------------------

WATCH = {
    "name": "mine",
    "domain": "things",
    "questions": "in.jsonl",
    "encoder": "encoder",
    "explored": 8,
    "held_out": 10,
    "judge_similarity": 0.999,
    "agent": {"model": "model", "max_new_tokens": 8},
}


def prepare_watch(config: dict[str, Any]) -> Callable[[Path], None]:
    """Writes a tiny encoder too, and questions that it knows the words of."""
    asked = [
        {"id": f"q{n}", "question": f"w{n} w{n + 1} w{n + 2}", "answer": f"Answer {n}."}
        for n in range(30)
    ]
    write = _prepared(config, asked)

    def prepare(folder: Path) -> None:
        write(folder)
        write_encoder(folder / "encoder")
        write_pooling(folder / "encoder", normalize=True, mean=True)

    return prepare


def explore(budget: int) -> Command:
    """What is asked at the same time is written down in any order."""
    plan = {"budget": budget, "starts": 4, "width": 3, "samples": 2, "steps": 3}
    config = {
        **WATCH,
        "plan": {**plan, "gamma": 1.0},
        "training": {"epochs": 3},
    }
    return Command(
        prepare_watch(config),
        ["watchdog", "explore", _CONFIG],
        content("runs/mine/summary.json", "runs/mine/*", mixed="journal.jsonl"),
        lines("runs/mine/journal.jsonl", "runs/mine/points.jsonl"),
    )


COMMANDS: dict[str, Callable[[], Command]] = {
    "detect": lambda: detect(1500),
    "run": lambda: run(90),
    "sweep": lambda: sweep(30),
    "tune": lambda: tune(30),
    "generate": lambda: generate(200),
    "guide": lambda: guide(12),
    "explore": lambda: explore(12),
}
