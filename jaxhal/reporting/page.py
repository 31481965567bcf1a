"""A page to read: answers, their coloured tokens and a table, in one file."""

import base64
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np

from jaxhal.io.files import replacing
from jaxhal.io.showing import shown
from jaxhal.reporting.attribution import page_data
from jaxhal.reporting.report import (
    Report,
    Verdict,
    finite,
    rounded,
    templates,
    token_detectors,
)
from jaxhal.types import Turn


def write_html(
    path: str | os.PathLike,
    reports: Sequence[Report],
    title: str,
    summary: Sequence[Mapping[str, Any]] | None = None,
    note: str = "",
    body: str = "",
) -> None:
    """Writes one page that holds everything: no network, no other file.

    It opens with the verdicts; what every detector says stands below, or folded away.

    Args:
      path: of the page; it appears only when complete.
      reports: the answers; those with a verdict stand on the page by probability, until
        its reader chooses the order given.
      title: the page's heading.
      summary: rows of a table of results; the keys of the first are its columns.
      note: a paragraph under the table.
      body: HTML above the verdicts; it can run no script and load nothing, and
        ``style`` attributes in it are ignored.

    Raises:
      FileNotFoundError: when the folder of ``path`` does not exist.
      ValueError: on a number that is not finite.
    """
    columns = list(summary[0]) if summary else []
    text = whole(
        "report",
        title=title,
        models=", ".join(sorted({report.model for report in reports})),
        total=len(reports),
        labelled=[sum(report.label == label for report in reports) for label in (1, 0)],
        failed=sum(report.error is not None for report in reports),
        decided=_decided(reports),
        columns=columns,
        summary=[[cell(row.get(name)) for name in columns] for row in summary or ()],
        note=note,
        body=body,
        data=_script(_page_data(reports)),
    )
    with replacing(path) as file:
        file.write(text)


def whole(name: str, **filled: Any) -> str:
    """A page in one file, of the template of that name.

    It has the style and the script that pages share, and its own after them; a browser
    takes no other.
    """
    pages = templates()
    style, script = (
        "\n".join(
            pages.loader.get_source(pages, f"{part}.{kind}")[0]
            for part in ("page", name)
        )
        for kind in ("css", "js")
    )
    allowed = {"style": _digest(style), "script": _digest(script)}
    return pages.get_template(f"{name}.html").render(
        style=style, script=script, allowed=allowed, **filled
    )


def _decided(reports: Sequence[Report]) -> dict[str, Any]:
    """How many answers have which verdict, who decided, or why nobody did."""
    read = [report for report in reports if report.error is None]
    names = [n for n in get_args(Verdict) if any(r.verdict == n for r in read)]

    def counts(some: Sequence[Report]) -> list[int]:
        return [sum(r.verdict == name for r in some) for name in names]

    by_label = {
        kind: [r for r in read if r.label == label]
        for kind, label in (("hallucinated", 1), ("grounded", 0))
    }
    decided = [r for r in read if r.verdict is not None]
    return {
        "counts": list(zip(names, counts(read), strict=True)),
        "by": dict.fromkeys((r.by, str(r.basis), r.promise) for r in decided),
        "not_by": dict.fromkeys(r.undecided for r in read if r.undecided is not None),
        "by_label": {kind: counts(some) for kind, some in by_label.items() if some},
    }


def _page_data(reports: Sequence[Report]) -> dict[str, Any]:
    return {
        "answers": [_answer(report) for report in reports],
        "detectors": token_detectors(reports),
        "scores": list(dict.fromkeys(name for each in reports for name in each.scores)),
        "maps": _aggregate(reports),
    }


def _starts(turns: Sequence[Turn]) -> dict[str, int]:
    """Where the texts of turns begin in the prompt that they are."""
    found, start = {}, 0
    for number, turn in enumerate(turns):
        if turn.content:
            found[f"messages[{number}]"] = start
            start += len(turn.content) + len("\n\n")
    return found


def _answer(report: Report) -> dict[str, Any]:
    row, own = report.to_dict(every=True), shown(report.id)
    spans = np.array([(t.start, t.end) for t in report.tokens], int).reshape(-1, 2)
    return {
        "id": report.id,
        "source": ("context", report.context)
        if report.prompt is None
        else ("prompt", report.prompt),
        "starts": _starts(report.turns),
        "question": report.question,
        "response": report.response,
        "spans": row["spans"],
        "labels": [label._asdict() for label in report.labels or ()],
        "places": spans.tolist(),
        "tokens": {
            name: [
                None
                if (score := token.scores.get(name)) is None
                else round(finite(score, f"{own}: {name} of a token"), 3)
                for token in report.tokens
            ]
            for name in token_detectors([report])
        },
        **{name: row[name] for name in ("verdict", "probability", "by", "promise")},
        **{name: row[name] for name in ("scores", "probabilities", "flagged")},
        "helpers": report.helpers,
        "layers": report.layers,
        "heads": {n: rounded(h, f"{own}: {n}") for n, h in report.heads.items()},
        "relevance": None
        if report.relevance is None
        else page_data(report.relevance, report.response, spans),
        "label": report.label,
        "detector": report.detector,
        "error": report.error,
    }


def _aggregate(reports: Sequence[Report]) -> dict[str, Any]:
    """Feature -> mean map of the answers, hallucinated minus grounded if labelled."""
    maps = {}
    for name in dict.fromkeys(name for report in reports for name in report.heads):
        have = [report for report in reports if name in report.heads]
        if len({(r.model, r.heads[name].shape, *r.layers) for r in have}) > 1:
            continue  # several models: their heads do not correspond
        every = np.array([report.heads[name] for report in have], float)
        labels = np.array([-1 if r.label is None else r.label for r in have])
        signed = bool({0, 1} <= set(labels.tolist()))
        values = every.mean(0)
        if signed:
            values = every[labels == 1].mean(0) - every[labels == 0].mean(0)
        maps[name] = {
            "values": rounded(values, name),
            "layers": have[0].layers,
            "signed": signed,
            "range": rounded([every.min(), every.max()], name),
        }
    return maps


def cell(value: Any) -> tuple[str, bool]:
    """The text of a table cell, and whether it is a number."""
    if value is None:
        return "", False
    if isinstance(value, bool):
        return ("yes" if value else "no"), False
    if isinstance(value, float):
        return f"{value:.3f}", True
    return str(value), isinstance(value, int)


def _digest(text: str) -> str:
    """A text's name in a content security policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _script(data: Any) -> str:
    """JSON that a script element can hold: nothing in it can end the element.

    Halves of surrogate pairs, which no file holds, are spelled out.
    """
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&\ud800-\udfff]", lambda one: f"\\u{ord(one[0]):04x}", text)
