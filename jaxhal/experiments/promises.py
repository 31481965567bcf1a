"""Whether promises of thresholds were kept, where that was asked for."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxhal.evaluation.promises import Answers, kept
from jaxhal.experiments.running import Result
from jaxhal.reporting import results
from jaxhal.reporting.markdown import Markdown, table
from jaxhal.reporting.results import Judged

#: How sure the thresholds were to be.
CONFIDENCE = 0.9
SPLITS = 200
_SAID = (
    "A threshold is chosen on a random half of the sources, for a promise with "
    f"{CONFIDENCE:.0%} confidence, and looked at on the other half, or on the "
    f"data set after an arrow; {SPLITS} times. Made: the share of halves where a "
    "threshold could promise that. Of these, kept: the share where it held on the "
    "answers looked at, which are a sample as well; broken: where it failed by more "
    "than chance (5 %). Realised and flagged are means. Methods that do not beat the "
    "best control are left out."
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
    chosen = [one for one in found.methods if one.name in own]
    here = _answers(found.judged, chosen, train, train)
    there = here if train == test else _answers(found.judged, chosen, train, test)
    for name in own:
        for promise in found.config.promises:
            looked = None if train == test else there[name]
            how: Any = {"confidence": CONFIDENCE, "elsewhere": looked, "splits": SPLITS}
            yield {
                "data": train if train == test else f"{train} → {test}",
                "method": name,
                "promise": dict(promise),
                **kept(here[name], promise, seed=found.config.seed, **how),
            }


def _answers(
    judged: Sequence[Judged], methods: Sequence[Any], train: str, test: str
) -> dict[str, Answers]:
    parts = [part for part in judged if (part.train, part.test) == (train, test)]
    if not methods:
        return {}
    found = results.pooled(parts, methods)
    return {
        name: Answers(score, found.labels, found.sources)
        for name, score in found.scores.items()
    }


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
    bound = "at most" if kind == "false_alarms" else "at least"
    numbers = [row[name] for name in ("made", "kept", "broken", "realised", "flagged")]
    return [
        row["data"],
        row["method"],
        f"{kind.replace('_', ' ')} {bound} {level:g}",
        *("" if value is None else Markdown(f"{value:.2f}") for value in numbers),
    ]
