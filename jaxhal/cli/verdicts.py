"""Verdicts on a terminal."""

import collections
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from jaxhal.io.showing import printable, shown

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from jaxhal.reporting.report import Report

_STYLES = {"hallucinated": "bold red", "unsure": "yellow", "supported": "green"}
# Characters of an answer in the table, and of them before its first span.
_WIDTH, _BEFORE = 160, 40


def verdict_table(reports: Iterable["Report"]) -> "Table":
    """A row an answer: the verdict first, the spans in colour."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("verdict", "probability", "id", "answer"):
        right = name == "probability"
        made.add_column(
            name,
            justify="right" if right else "left",
            no_wrap=name != "answer",
            max_width=24 if name == "id" else None,
            overflow="ellipsis" if name == "id" else "fold",
        )
    for one in reports:
        said = Text(one.verdict or "none", _STYLES.get(one.verdict or "", "dim"))
        sure = "" if one.probability is None else f"{one.probability:.2f}"
        answer = excerpt(one)
        if one.error is not None:
            said = Text("not scored", "dim")
            answer = Text(printable(one.error, keep=""), "dim")
        made.add_row(said, sure, Text(shown(one.id)), answer)
    return made


def excerpt(report: "Report") -> "Text":
    """The answer in one line, from shortly before its first span on, spans in colour.

    Dots stand for what is left out.
    """
    from rich.text import Text

    text = report.response
    first = report.spans[0].start if report.spans else 0
    start = max(0, min(first - _BEFORE, len(text) - _WIDTH))
    end = min(len(text), start + _WIDTH)
    made = Text("…" if start else "")
    style = _STYLES.get(report.verdict or "", "bold")
    inside = [(max(s.start, start), min(s.end, end)) for s in report.spans]
    at = start
    for left, right in inside:
        if left < right:
            made.append(_line(text[at:left]))
            made.append(_line(text[left:right]), style)
            at = right
    made.append(_line(text[at:end]))
    return made.append("…" if end < len(text) else "")


def _line(text: str) -> str:
    return printable(text.replace("\n", " "), keep="")


def counted(verdicts: Sequence[str | None]) -> str:
    """How many answers have which verdict.

    >>> counted(["supported", None, "supported", "unsure"])
    '1 unsure, 2 supported'
    """
    counts = collections.Counter(verdicts)
    return ", ".join(f"{counts[name]} {name}" for name in _STYLES if counts[name])
