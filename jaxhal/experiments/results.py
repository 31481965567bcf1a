"""What a run found: scores, and tables in three forms."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxhal.evaluation.metrics import evaluate
from jaxhal.evaluation.tables import compare

if TYPE_CHECKING:
    import pandas as pd

# Columns of `evaluate` and their names in tables.
_METRICS = {
    "f1": "F1",
    "accuracy": "accuracy",
    "precision": "precision",
    "recall": "recall",
    "ece": "ECE",
}


@dataclasses.dataclass(frozen=True)
class Judged:
    """Scores of one test part, by one fit of every detector.

    Attributes:
      train: label of the data set fitted to.
      test: label of the data set judged.
      fold: number of the split.
      frame: a row per answer: ``id, source, label`` and per detector its score, its
        ``<detector>.probability`` and whether it was ``<detector>.flagged``.
    """

    train: str
    test: str
    fold: int
    frame: "pd.DataFrame"


def table(
    judged: Sequence[Judged], detectors: Sequence[str], controls: Sequence[str]
) -> list[dict[str, Any]]:
    """A row per detector over all test parts together.

    With one part the ranking is by score.  With several, fits differ in scale, so
    answers are ranked by calibrated probability; metrics at a threshold are means over
    the parts, and ``"AUROC (folds)"`` is the mean of the parts' own.  An answer that
    several parts hold counts once, with the mean of its probabilities.
    """
    import pandas as pd

    whole = pd.concat([part.frame for part in judged])
    suffix = "" if len(judged) == 1 else ".probability"
    columns = {name: f"{name}{suffix}" for name in detectors}
    once: Any = whole.groupby("row", sort=True).mean(numeric_only=True)
    scores = {name: once[column].to_numpy() for name, column in columns.items()}
    labels = once["label"].to_numpy().astype(int)
    rows = compare(scores, labels, once["source"].tolist(), controls)
    for row in rows:
        folds = [_metrics(part.frame, row["method"]) for part in judged]
        for key, name in _METRICS.items():
            row[name] = float(np.mean([fold[key] for fold in folds]))
        row["AUROC (folds)"] = float(np.mean([fold["auroc"] for fold in folds]))
        row["AUROC (folds) sd"] = float(np.std([fold["auroc"] for fold in folds]))
    return rows


def _metrics(frame: "pd.DataFrame", name: str) -> dict[str, float]:
    found = evaluate(
        frame[name], frame["label"], probabilities=frame[f"{name}.probability"]
    )
    flagged = evaluate(frame[f"{name}.flagged"].astype(float), frame["label"], 0.5)
    return found | {k: v for k, v in flagged.items() if k in _METRICS}


def markdown(rows: Sequence[Mapping[str, Any]], several: bool) -> str:
    """The table as people read it; controls last."""
    head = ["method", "AUROC [95 %]", "AUPRC", *_METRICS.values(), "vs best control"]
    if several:
        head.insert(2, "AUROC of folds")
    lines = [head, ["---"] * len(head)]
    for row in rows:
        name = f"*{row['method']}* (control)" if row["control"] else row["method"]
        cells = [name, f"{row['AUROC']:.3f} [{row['low']:.2f}, {row['high']:.2f}]"]
        if several:
            mean, sd = row["AUROC (folds)"], row["AUROC (folds) sd"]
            cells.append(f"{mean:.3f} ± {sd:.3f}")
        cells.append(f"{row['AUPRC']:.3f}")
        cells += [f"{row[name]:.3f}" for name in _METRICS.values()]
        cells.append(_difference(row))
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def token_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table over tokens as people read it."""
    head = list(rows[0])
    lines = [head, ["---"] * len(head)]
    for row in rows:
        lines.append([v if isinstance(v, str) else f"{v:.3f}" for v in row.values()])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _difference(row: Mapping[str, Any]) -> str:
    if row["difference"] is None:
        return ""
    low, high = row["difference low"], row["difference high"]
    return f"{row['difference']:+.3f} [{low:+.2f}, {high:+.2f}] {row['beats controls']}"


def transfer(
    judged: Sequence[Judged], detectors: Sequence[str], controls: Sequence[str]
) -> list[dict[str, Any]]:
    """The rows of :func:`table` for every pair of data sets, ``train`` and ``test``."""
    return [
        {"train": part.train, "test": part.test, **row}
        for part in judged
        for row in table([part], detectors, controls)
    ]


def matrices(rows: Sequence[Mapping[str, Any]]) -> dict[str, "pd.DataFrame"]:
    """Per detector the AUROC of every data set trained on (rows) and tested on."""
    import pandas as pd

    frame = pd.DataFrame(rows)
    order = list(dict.fromkeys(frame["train"]))
    return {
        str(name): part.pivot(index="train", columns="test", values="AUROC").loc[
            order, order
        ]
        for name, part in frame.groupby("method", sort=False)
    }
