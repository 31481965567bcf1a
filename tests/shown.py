"""What tests show of each family of models: the table of the site is theirs.

Tests that are marked ``shows("logits")`` and take a ``case`` of :mod:`tiny` show that
of the case's family, where all of them pass.  ``JAXHAL_RECORD=1`` writes the table.
"""

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest

import tiny

TABLE = Path(__file__).parents[1] / "jaxhal/models/families.json"
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
