"""What tests show of each family of models: the table of the site is theirs.

Tests that are marked ``shows("logits")`` and take a ``case`` of :mod:`tiny` show that
of the case's family, where all that there are pass: the table holds how many.
``JAXHAL_RECORD=1`` writes it, of what a run has all tests of (``-m ""``).
"""

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

import tiny

HERE = Path(__file__).parent
TABLE = HERE.parent / "jaxhal/models/families.json"
# Of a family and what is shown of it, the tests that passed, and whether one failed.
_passed: dict[tuple[str, str], set[str]] = defaultdict(set)
_failed: set[tuple[str, str]] = set()
_COUNTED = "tests that show something: "


def _cells(item: pytest.Item) -> set[tuple[str, str]]:
    marks = [*item.iter_markers("shows")]
    if not marks:
        return set()
    assert isinstance(item, pytest.Function)
    family, _ = tiny.CASES[item.callspec.params["case"]]
    return {(family, what) for mark in marks for what in mark.args}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed or report.when == "call" and report.passed:
        report.user_properties += [("shows", cell) for cell in _cells(item)]
    return report


def pytest_runtest_logreport(report):
    for name, cell in report.user_properties:
        if name != "shows":
            continue
        if report.failed:
            _failed.add(tuple(cell))
        else:
            _passed[tuple(cell)].add(report.nodeid)


def pytest_sessionfinish(session):
    """What this run showed of its families, anew; workers leave it to the main one."""
    if "JAXHAL_RECORD" not in os.environ or hasattr(session.config, "workerinput"):
        return
    if not _passed and not _failed:
        return
    there, table = claimed(), json.loads(TABLE.read_text("utf-8"))
    for family, what in _failed:
        table.get(family, {}).pop(what, None)
    for family, what in _passed.keys() - _failed:
        if len(_passed[family, what]) == there[family][what]:
            table.setdefault(family, {})[what] = there[family][what]
    table = {family: dict(sorted(of.items())) for family, of in sorted(table.items())}
    TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def pytest_report_collectionfinish(config, items) -> str | list[str]:
    """A line for :func:`claimed`, where tests are only collected."""
    if not config.option.collectonly:
        return []
    count = Counter(cell for item in items for cell in _cells(item))
    return _COUNTED + json.dumps([[*cell, number] for cell, number in count.items()])


def claimed() -> dict[str, dict[str, int]]:
    """How many tests there are to show what of each family; none is run."""
    files = [
        path for path in HERE.glob("*.py") if "mark.shows(" in path.read_text("utf-8")
    ]
    collect = ["--collect-only", "-q", "-n=0", "-m="]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *collect, *files],
        env=os.environ | {"JAXHAL_RECORD": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        cwd=HERE.parent,
    )
    lines = [one for one in done.stdout.splitlines() if one.startswith(_COUNTED)]
    assert len(lines) == 1, done.stdout[-2000:] + done.stderr[-2000:]
    there = defaultdict(dict)
    for family, what, number in json.loads(lines[0].removeprefix(_COUNTED)):
        there[family][what] = number
    return dict(there)
