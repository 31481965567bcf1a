"""Verdicts to a file, a pipe or a terminal."""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxhal.cli.console import finish, terminal, usage
from jaxhal.io.files import check_apart, is_file
from jaxhal.io.showing import printable, shown

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from jaxhal.reporting.report import Report, Verdict
    from jaxhal.scoring.results import OutputRow

_STYLES = {"hallucinated": "bold red", "unsure": "yellow", "supported": "green"}
# Characters of an answer in the table, and of them before its first span.
_WIDTH, _BEFORE = 160, 40


def check_results(
    source: str, read: Mapping[str, Path], output: str | None, page: Path | None
) -> None:
    """ValueError where results, or what is done of them, would replace what is read."""
    from jaxhal.scoring.partial import beside

    if page is not None and str(page) == "-":
        raise ValueError("--html is '-'; give a file, as a page goes to no stream")
    output = "-" if output is None else output
    check_apart(
        # What the shell reads from may be a file as well.
        {"--input": "/dev/stdin" if source == "-" else source} | {**read},
        {
            "--output": output,
            "--html": page,
            "what is done so far,": beside(output) if is_file(output) else None,
        },
    )


def deliver(
    made: Callable[..., Iterator["OutputRow"]],
    settings: Callable[[], Mapping[str, Any]],
    by: str,
    *,
    command: str,
    source: str,
    output: str | None,
    page: Path | None,
    as_rows: bool,
    force: bool,
    whole: bool = False,
) -> None:
    """Writes verdicts where they are wanted, says how many, and exits 1 on an error.

    Args:
      made: of :func:`jaxhal.scoring.results.results`, what is left to give is
        ``partial``.
      settings: of a result that can be taken up again.
      by: what decides, in words.
      as_rows: as JSON Lines, even on a terminal.
      whole: what is made is not what is kept on the way, and fits into memory.
    """
    from jaxhal.datasets.jsonl import write_rows
    from jaxhal.reporting.page import write_html
    from jaxhal.reporting.summary import summarize, verdict
    from jaxhal.scoring.partial import resuming
    from jaxhal.scoring.results import rows_of

    output = "-" if output is None else output
    kept: list[Report] = []
    errors: list[str | None] = []
    said: list[Verdict | None] = []

    def done(**options: Any) -> Iterator[Mapping[str, Any]]:
        for row, report in made(**options):
            errors.append(row["error"])
            said.append(row["verdict"])
            kept.extend([report] if report is not None else [])
            yield row

    def write_page() -> None:
        if page is not None:
            table = summarize(kept)
            note = verdict(table) if table else ""
            title = f"jaxhal {command}: {Path(source).name}"
            write_html(page, kept, title, table, note)

    with usage():
        if is_file(output):
            with resuming(output, settings(), force=force) as partial:
                held = [row for row in done(partial=partial) if whole]
                write_page()
                write_rows(output, held if whole else rows_of(partial))
        elif as_rows:
            write_rows(output, done())
            write_page()
        else:
            for _ in done():
                pass
            terminal().print(verdict_table(kept))
            write_page()
    console = terminal(stderr=True)
    console.print(by, soft_wrap=True)
    scored = f"{errors.count(None)} of {len(errors)} answers scored"
    if not errors:
        scored = f"no rows in {'standard input' if source == '-' else source}"
    if found := counted(said):
        scored += f": {found}"
    if as_rows:
        scored += f"; written to {'standard output' if output == '-' else output}"
    console.print(scored, soft_wrap=True)
    finish(console, errors)


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
