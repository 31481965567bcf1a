"""Reports of a run as one table and one sentence."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from jaxhal.evaluation.intervals import FEWEST, fewest_sources
from jaxhal.evaluation.ranking import auroc
from jaxhal.evaluation.tables import compare
from jaxhal.reporting.report import Report, Verdict


def source(report: Report) -> str | None:
    """What an answer rests on; answers that share it are not independent."""
    return report.source or report.context or report.prompt


def summarize(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """A row per detector, methods first, best first; none without both labels.

    The rows of :func:`compare` with answers grouped by :func:`source`, and the AUROC
    over tokens where spans are annotated.  Answers of fewer than five sources of either
    class are too few for an interval.  ValueError where only some of the reports have a
    detector's score.
    """
    return short(compared(reports))


def short(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What :func:`summarize` keeps of rows of :func:`compared`."""
    return [
        {
            "detector": row["method"],
            "AUROC": row["AUROC"],
            "95 % interval": ""
            if row["few"]
            else f"{row['low']:.2f}–{row['high']:.2f}",
            "token AUROC": row["token AUROC"],
            "control": row["control"],
            "beats controls": row["beats controls"],
        }
        for row in rows
    ]


def compared(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """The rows of :func:`summarize` with all that :func:`compare` says."""
    from jaxhal.detectors import CATALOGUE  # reports need no detectors otherwise

    known = [r for r in reports if r.error is None and r.label is not None]
    labels = [report.label for report in known]
    if len(set(labels)) < 2:
        return []
    first = known[0].scores
    if some := {name for r in known for name in r.scores.keys() ^ first.keys()}:
        raise ValueError(
            f"only some reports have scores of {', '.join(sorted(some))}; give reports "
            "of one run"
        )
    scores = {name: [r.scores[name] for r in known] for name in first}
    controls = {n for n in scores if n in CATALOGUE and CATALOGUE[n]().control}
    groups = [source(one) or f"answer {number}" for number, one in enumerate(known)]
    few = fewest_sources(labels, groups) < FEWEST
    return [
        row | {"token AUROC": _token_auroc(known, row["method"]), "few": few}
        for row in compare(scores, labels, groups, controls)
    ]


def markdown(
    title: str,
    model: str,
    parts: Mapping[str, tuple[Sequence[Report], Sequence[Mapping[str, Any]]]],
) -> str:
    """What a model's detectors make of answers by people, a table for each part.

    Args:
      parts: by the title of a table, reports and what :func:`compared` says of them.
        A last table counts verdicts by the answers' labels.
    """
    from jaxhal.reporting.markdown import table as table_of
    from jaxhal.reporting.results import difference, short_markdown

    head, said = [f"# {title}", "", f"Reader: {model}.", ""], []
    for name, (reports, rows) in parts.items():
        sources = len({source(report) for report in reports})
        bad = sum(report.label or 0 for report in reports)
        counted = f"{len(reports)} answers, {sources} sources, {bad} hallucinated"
        head.append(f"- {name.lower()}: {counted}")
        shown = [
            {
                "method": row["method"],
                "control": row["control"],
                "AUROC": row["AUROC"],
                "AUROC low": row["low"],
                "AUROC high": row["high"],
                "token AUROC": row["token AUROC"] or "",
                "vs best control": difference(row),
            }
            for row in rows
        ]
        if shown:
            table, said_of = short_markdown(shown), verdict(short(rows))
            said += ["", f"## {name}", "", table, "", said_of]
    if called := [
        row
        for name, (reports, _) in parts.items()
        for row in _called(name.lower(), reports)
    ]:
        columns = ["answers", "number", *get_args(Verdict)]
        said += ["", "## Verdicts", "", table_of(columns, called)]
    return "\n".join([*head, *said, ""])


def _called(name: str, reports: Sequence[Report]) -> Iterator[list[str]]:
    """How many answers of either label get which verdict; none without verdicts."""
    for kind, label in (("hallucinated", 1), ("supported", 0)):
        some = [r.verdict for r in reports if r.label == label and r.verdict]
        if some:
            counts = [str(some.count(verdict)) for verdict in get_args(Verdict)]
            yield [f"{name}, {kind}", str(len(some)), *counts]


def _token_auroc(reports: Iterable[Report], name: str) -> float | None:
    """AUROC over all tokens against the annotated spans; ``None`` where undefined."""
    pairs = [
        (
            token.scores[name],
            any(token.start < span.end and span.start < token.end for span in labels),
        )
        for report in reports
        if (labels := report.labels) is not None
        for token in report.tokens
        if name in token.scores and token.start < token.end
    ]
    if len({label for _, label in pairs}) < 2:
        return None
    scores, labels = zip(*pairs, strict=True)
    return auroc(scores, labels)


def verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """In words, what the intervals are and which methods are worth more than controls.

    Args:
      rows: of :func:`summarize`.
    """
    if not rows:
        return "Answers of one class have no AUROC."
    text = (
        "The intervals resample sources, since answers to one rise and fall together."
    )
    if all(row.get("95 % interval") == "" for row in rows):
        text = "Fewer than five sources of a class are too few for an interval."
    return f"{text} {against_controls(rows)}".rstrip()


def against_controls(rows: Sequence[Mapping[str, Any]]) -> str:
    """In words, which methods are above the best control; nothing without one."""
    controls = [row for row in rows if row["control"]]
    if not controls:
        return ""
    best = max(controls, key=lambda row: row["AUROC"])
    text = f"The best control is {best['detector']} ({best['AUROC']:.3f}); "
    verdicts = {
        "yes": "clearly above it: {}",
        "within noise": "above it only within the noise: {}",
        "no": "not above it: {}",
    }
    found = []
    for verdict, phrase in verdicts.items():
        names = [row["detector"] for row in rows if row["beats controls"] == verdict]
        found += [phrase.format(", ".join(names))] if names else []
    return f"{text}{'; '.join(found) or 'no method was scored'}."
