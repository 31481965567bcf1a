"""What an exploration could say of a query beside what the watchdog takes of it.

Each change keeps what makes HalMit: the queries that an agent was explored by, found by
vector, and the entropy of its answers.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from jaxhal.evaluation.intervals import paired
from jaxhal.evaluation.ranking import auroc
from jaxhal.models.encoders.encoding import embed, kept_encoder
from jaxhal.reporting.results import estimates
from jaxhal.watchdog.index import unit

_METRIC = {"AUROC": auroc}
# Neighbours of a query, in place of the three nearest points.
_MANY = 10


class Asked(NamedTuple):
    """Queries and what the agent's answers to them were like.

    ``entropies`` are in nats; queries of one ``path`` were made of each other.
    """

    queries: Sequence[str]
    answers: Sequence[str]
    entropies: Float[np.ndarray, " queries"]
    wrong: Bool[np.ndarray, " queries"]
    paths: Sequence[str]


def judged(rows: Sequence[Mapping[str, Any]]) -> Asked:
    """The judged queries of an exploration, answered wrongly or not."""
    some = [row for row in rows if row["label"] is not None]
    return Asked(
        [row["query"] for row in some],
        [row["answer"] for row in some],
        np.array([row["entropy"] for row in some], float),
        np.array([row["label"] == 1 for row in some]),
        [row["first"] for row in some],
    )


def compared(
    asked: Asked,
    bound: Asked,
    encoder: str,
    beside: Mapping[str, Float[np.ndarray, " queries"]],
    groups: Sequence[Any],
) -> list[dict[str, Any]]:
    """AUROC of each change, and how far it is from scores that are known.

    Intervals of 95 % are over ``groups`` of queries.  Empty where no answer of the
    exploration is wrong.
    """
    if not bound.wrong.any():
        return []
    rows = []
    for name, score in scored(asked, bound, encoder).items():
        row = {"change": name, **estimates(_METRIC, score, asked.wrong, groups)}
        for other, baseline in beside.items():
            found = paired(score, baseline, asked.wrong, groups)
            row |= {other: found.value, f"{other} low": found.low}
            row[f"{other} high"] = found.high
        rows.append(row)
    return rows


def scored(asked: Asked, bound: Asked, encoder: str) -> dict[str, np.ndarray]:
    """A score of each query under each change; higher = more likely hallucinated.

    The regression is fitted to the exploration, each of its queries beside those of
    other paths, and left out where all its answers are right or all are wrong.
    """
    ours, theirs = (_vectors(one.queries, encoder) for one in (asked, bound))
    said, answered = (_vectors(_told(one), encoder) for one in (asked, bound))
    near, alike = ours @ theirs.T, said @ answered.T
    points = bound.entropies[bound.wrong][_nearest(near[:, bound.wrong])]
    found = {
        "entropy, compared with nothing": asked.entropies,
        f"entropy above the mean of {_MANY} points": asked.entropies
        - points.mean(axis=1),
        f"wrong among {_MANY} queries": _share(near, bound),
        f"wrong among {_MANY} queries with answers": _share(alike, bound),
    }
    if 0 < bound.wrong.sum() < len(bound.wrong):
        paths, others = np.array(bound.paths), theirs @ theirs.T
        others[paths[:, None] == paths] = -np.inf
        fit = make_pipeline(StandardScaler(), LogisticRegression())
        fit.fit(_columns(others, bound, bound), bound.wrong)
        found["regression on entropy, wrong among queries, nearest point"] = (
            fit.decision_function(_columns(near, asked, bound))
        )
    return found


def _told(one: Asked) -> list[str]:
    pairs = zip(one.queries, one.answers, strict=True)
    return [f"{query} {answer}" for query, answer in pairs]


def _vectors(texts: Sequence[str], encoder: str) -> Float[np.ndarray, "texts width"]:
    return np.asarray(unit(embed(kept_encoder(encoder), texts, progress=False)))


def _nearest(near: Float[np.ndarray, "some others"]) -> Int[np.ndarray, "some few"]:
    return np.argsort(-near, axis=1, kind="stable")[:, :_MANY]


def _share(
    near: Float[np.ndarray, "some others"], bound: Asked
) -> Float[np.ndarray, " some"]:
    """Of the nearest queries those answered wrongly, weighted by their cosines."""
    rows = _nearest(near)
    weights = np.maximum(np.take_along_axis(near, rows, axis=1), 0.0)
    total = weights.sum(axis=1)
    unknown = np.full(len(near), bound.wrong.mean())
    wrong = (weights * bound.wrong[rows]).sum(axis=1)
    return np.divide(wrong, total, out=unknown, where=total > 0)


def _columns(
    near: Float[np.ndarray, "some others"], asked: Asked, bound: Asked
) -> Float[np.ndarray, "some 3"]:
    point = np.maximum(near[:, bound.wrong].max(axis=1), -1.0)
    return np.stack([asked.entropies, _share(near, bound), point], axis=1)
