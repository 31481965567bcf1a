"""What tests show of each family of models: the table of the site is theirs.

Tests that are marked ``shows("logits")`` and take a ``case`` of :mod:`tiny` show that
of the case's family, where all of them pass.  ``JAXHAL_RECORD=1`` writes the table.
Where a fixture has the cases, ``shows("detectors", of=cases)`` says which.
"""

import importlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

import tiny

HERE = Path(__file__).parent
TABLE = HERE.parent / "jaxhal/models/families.json"
_found: dict[str, set[str]] = defaultdict(set)
_failed: dict[str, set[str]] = defaultdict(set)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    marks = [*item.iter_markers("shows")]
    if marks and (report.failed or report.when == "call" and report.passed):
        family = tiny.CASES[item.callspec.params["case"]][0]
        report.user_properties += [("shows", (family, mark.args)) for mark in marks]
    return report


def pytest_runtest_logreport(report):
    for name, value in report.user_properties:
        if name == "shows":
            family, what = value
            (_failed if report.failed else _found)[family].update(what)


def pytest_sessionfinish(session):
    """What this run showed of its families, anew; workers leave it to the main one."""
    if "JAXHAL_RECORD" not in os.environ or hasattr(session.config, "workerinput"):
        return
    table = json.loads(TABLE.read_text("utf-8")) if TABLE.exists() else {}
    for family in {*_found, *_failed}:
        passed = {*table.get(family, ())} | _found[family]
        table[family] = sorted(passed - _failed[family])
    text = json.dumps(dict(sorted(table.items())), indent=1)
    TABLE.write_text(text + "\n", encoding="utf-8")


def claimed() -> dict[str, list[str]]:
    """What there are tests to show of each family, by their marks; none is run."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in HERE.glob("*.py"):
        if "mark.shows(" not in path.read_text("utf-8"):
            continue
        module = importlib.import_module(path.stem)
        every = [one.mark for one in getattr(module, "pytestmark", ())]
        for name, test in vars(module).items():
            if not name.startswith("test_") or not callable(test):
                continue
            marks = [*every, *getattr(test, "pytestmark", ())]
            for mark in (one for one in marks if one.name == "shows"):
                for case in mark.kwargs.get("of") or _cases(marks):
                    found[tiny.CASES[case][0]].update(mark.args)
    return {family: sorted(what) for family, what in sorted(found.items())}


def _cases(marks: Iterable[pytest.Mark]) -> list[str]:
    """The values of ``case`` in the marks of a test."""
    for mark in marks:
        if mark.name == "parametrize":
            names, values = mark.args
            if names == "case":
                return [*values]
            if "case" in names:
                return [value[names.index("case")] for value in values]
    raise ValueError(f"marked with shows, without a parameter 'case': {marks}")
