"""Whether promises of thresholds were kept, where that was asked for."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxhal.detectors import Detector
from jaxhal.evaluation.promises import Answers, Highlights, kept, kept_highlights
from jaxhal.experiments.running import Result
from jaxhal.reporting import results
from jaxhal.reporting.markdown import Markdown, table
from jaxhal.reporting.results import Judged
from jaxhal.scoring.tokens import highlights

#: How sure the thresholds were to be.
CONFIDENCE = 0.9
SPLITS = 200
_SAID = (
    "A threshold is chosen on a random half of the sources, for a promise with "
    f"{CONFIDENCE:.0%} confidence, and looked at on the other half, or on the data "
    f"set after an arrow, without the half's sources; {SPLITS} times. Made: the share "
    "of halves where a threshold could promise that. Of these, kept: the share where "
    "it held on the answers looked at, which are a sample as well; broken: where it "
    "failed by more than chance (5 %). Realised and flagged are means. Highlighted "
    "are characters in spans, by a threshold of token scores, of those that no "
    "annotated span holds; there it is the first fit's test answers that are halved. "
    "Methods that do not beat the best control are left out."
)


def rows(found: Result) -> list[dict[str, Any]]:
    """A row per promise, method that beats the controls, and data set looked at."""
    labels = list(dict.fromkeys(part.train for part in found.judged))
    return [
        row
        for train in labels
        for test in labels
        for row in _between(found, train, test)
    ]


def _between(found: Result, train: str, test: str) -> Iterable[dict[str, Any]]:
    own = [
        row["method"]
        for row in found.rows
        if row["beats controls"] == "yes"
        and row.get("train", train) == row.get("test", train) == train
    ]
    if not own:
        return
    chosen = [one for one in found.methods if one.name in own]
    made = {}
    for spans in {"highlighted" in promise for promise in found.config.promises}:
        make = _highlights if spans else _answers
        made[spans] = {at: make(found, chosen, train, at) for at in {train, test}}
    for name in own:
        for promise in found.config.promises:
            spans = "highlighted" in promise
            answers = made[spans]
            if name not in answers[train]:  # it scores no tokens
                continue
            look = kept_highlights if spans else kept
            looked = None if train == test else answers[test][name]
            how: Any = {"confidence": CONFIDENCE, "elsewhere": looked, "splits": SPLITS}
            yield {
                "data": train if train == test else f"{train} → {test}",
                "method": name,
                "promise": dict(promise),
                **look(answers[train][name], promise, seed=found.config.seed, **how),
            }


def _answers(
    found: Result, methods: Sequence[Detector], train: str, test: str
) -> dict[str, Answers]:
    whole = results.pooled(_parts(found, train, test), methods)
    sources = _sources(found, test, whole.rows)
    return {
        name: Answers(score, whole.labels, sources)
        for name, score in whole.scores.items()
    }


def _highlights(
    found: Result, methods: Sequence[Detector], train: str, test: str
) -> dict[str, Highlights]:
    """Of the answers that the first fit had not seen."""
    data, fitted = found.data[test], found.fitted[train]
    parts = [part.frame["row"] for part in _parts(found, train, test) if not part.fit]
    rows = sorted({row for part in parts for row in part.tolist()})
    some = {one.name: fitted[one.name] for one in methods if one.name in fitted}
    sources = _sources(found, test, rows)
    return {
        name: Highlights(shares, sources)
        for name, shares in highlights(data, some, rows).items()
    }


def _sources(found: Result, label: str, rows: Sequence[int]) -> list[str]:
    """By name: another data set may have the same."""
    return [found.data[label].examples[row].group for row in rows]


def _parts(found: Result, train: str, test: str) -> list[Judged]:
    return [one for one in found.judged if (one.train, one.test) == (train, test)]


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table and how to read it."""
    head = [
        "data",
        "method",
        "promise",
        "made",
        "kept",
        "broken",
        "realised",
        "flagged",
    ]
    return "\n".join([table(head, map(_cells, rows)), "", _SAID])


def _cells(row: Mapping[str, Any]) -> list[str]:
    ((kind, level),) = row["promise"].items()
    bound = "at least" if kind in ("precision", "recall") else "at most"
    numbers = [row[name] for name in ("made", "kept", "broken", "realised", "flagged")]
    return [
        row["data"],
        row["method"],
        f"{kind.replace('_', ' ')} {bound} {level:g}",
        *("" if value is None else Markdown(f"{value:.2f}") for value in numbers),
    ]
