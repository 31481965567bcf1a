"""A watchdog over its settings, judged by what is known of the agent's answers."""

import asyncio
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxhal.evaluation.metrics import evaluate
from jaxhal.io.files import lines_of
from jaxhal.models.encoders.encoding import embed, kept_encoder
from jaxhal.reading.keys import digest
from jaxhal.reporting import results
from jaxhal.reporting.markdown import escaped
from jaxhal.watchdog.bounds import ExactStore, Point
from jaxhal.watchdog.config import Watch, plan_of
from jaxhal.watchdog.guarding import Watchdog

_EPSILONS = (0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9)
_GAMMAS = (0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65)
_GAMMA = "share of hallucinations (gamma)"
# Of the queries explored, after which the bound is looked at.
_PARTS = (0.125, 0.25, 0.5, 0.75, 1.0)


def ablated(
    config: Watch, dog: Watchdog, queries: Sequence[str], labels: np.ndarray
) -> dict[str, list[dict[str, Any]]]:
    """The watchdog over epsilon and, by beginnings of the exploration, over gamma."""
    asked = lines_of(config.folder / "queries.jsonl")

    @functools.cache
    def after(count: int) -> dict[str, Any]:
        store = _beginning(dog.encoder, asked[:count])
        found = _fit(dog.behind(store), queries, labels)
        return {"points": len(store), **found}

    epsilon = []
    for value in _EPSILONS:
        other = dog.behind(dog.store, similarity=value)
        epsilon.append({"value": value, **_fit(other, queries, labels)})
    least, gamma = plan_of(config).starts, []
    for value in _GAMMAS:
        count = _reached(asked, value, least)
        if count is not None:
            gamma.append({"value": value, "queries": count, **after(count)})
    # Where one share is reached as soon as another, how far it came says more.
    hits = [at for at, row in enumerate(asked, 1) if row["label"] == 1]
    counts = {max(hits[0], round(part * len(asked))) for part in _PARTS if hits}
    queried = [{"value": count, **after(count)} for count in sorted(counts)]
    tables = {"similarity (epsilon)": epsilon, _GAMMA: gamma}
    tables |= {"queries explored": queried}
    return {name: rows for name, rows in tables.items() if rows}


def _fit(dog: Watchdog, queries: Sequence[str], labels: np.ndarray) -> dict[str, Any]:
    found = asyncio.run(dog.checks(queries))
    flags = np.array([one.flagged for one in found], float)
    scores = [one.score for one in found]
    return {
        "AUROC": evaluate(scores, labels, 0.5)["auroc"],
        "accuracy": evaluate(flags, labels, 0.5)["accuracy"],
        "flagged": int(flags.sum()),
    }


def _reached(
    asked: Sequence[Mapping[str, Any]], gamma: float, least: int
) -> int | None:
    """Queries until the round after which the share first was that high, if it was."""
    hits = judged = 0
    after = [*(row["round"] for row in asked[1:]), None]
    for number, (row, later) in enumerate(zip(asked, after, strict=True), 1):
        judged += row["label"] is not None
        hits += row["label"] == 1
        ends = row["round"] != later and number >= least
        if ends and judged and hits / judged >= gamma:
            return number
    return None


def _beginning(encoder: str, asked: Sequence[Mapping[str, Any]]) -> ExactStore:
    """The bound that some queries made."""
    hits = [row for row in asked if row["label"] == 1]
    queries = [row["query"] for row in hits]
    vectors = embed(kept_encoder(encoder), queries, progress=False)
    found = ExactStore(vectors.shape[1])
    points = [
        Point(digest(row["query"]), row["query"], row["answer"], entropy=row["entropy"])
        for row in hits
    ]
    found.add(points, vectors)
    return found


def markdown(
    changes: Mapping[str, Sequence[Mapping[str, Any]]], least: int
) -> list[str]:
    """Tables of the ablations, what there is to say below each."""
    shares = ", ".join(map(str, _GAMMAS))
    lines = []
    for setting, rows in changes.items():
        table = results.interval_markdown(rows)
        lines += [f"## Over {escaped(setting)}", "", table, ""]
        if setting == _GAMMA:
            reached = (
                f"Of the shares {shares} those in the table were reached, each after "
                f"at least {least} queries; those reached after as many queries have "
                "one bound."
            )
            lines += [reached, ""]
    if _GAMMA not in changes:
        lines += [f"## Over {_GAMMA}", "", f"None of {shares} was reached.", ""]
    return lines
