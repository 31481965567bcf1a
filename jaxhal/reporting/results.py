"""What a run found: scores, and tables in three forms."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxhal.detectors import Detector
from jaxhal.evaluation.intervals import Metric, interval
from jaxhal.evaluation.metrics import Decided, ece, ece_by_chance, evaluate
from jaxhal.evaluation.ranking import WithinParts, auprc, auroc
from jaxhal.evaluation.selective import CoverageAtPrecision, aurc, prr
from jaxhal.evaluation.tables import compare
from jaxhal.reporting.markdown import Markdown, escaped, measured
from jaxhal.reporting.markdown import table as table_markdown

if TYPE_CHECKING:
    import pandas as pd

# Columns of `evaluate` and their names in tables.
_METRICS = {
    "f1": "F1",
    "accuracy": "accuracy",
    "precision": "precision",
    "recall": "recall",
    "ece": "ECE",
    "adapted": "ECE adapted",
    "by_chance": "ECE by chance",
}
#: Of flags, 1 or 0.
DECIDED: dict[str, Metric] = {"F1": Decided("f1"), "accuracy": Decided("accuracy")}
# Of answers kept from the lowest score on.
_SELECTIVE: dict[str, Metric] = {
    "PRR": prr,
    "AURC": aurc,
    "coverage at 90 %": CoverageAtPrecision(0.9),
}
# Of an answer, by a method alone.
COST = "ms an answer"


@dataclasses.dataclass(frozen=True)
class Judged:
    """Scores of one test part, by one fit of every detector.

    Attributes:
      train: label of the data set fitted to.
      test: label of the data set judged.
      fold: number of the split.
      fit: number of the split fitted to; parts that share it share their fits.
      left_out: answers not judged, as another data set's fit has seen their source.
      apart: other parts judge the same grounded answers again, beside hallucinations of
        other kinds: only what one part holds is compared.
      frame: a row per answer: ``id, source, label`` and per detector its score, its
        ``<detector>.probability``, the same ``<detector>.adapted`` to the part's base
        rate, and whether it is ``<detector>.flagged`` by the threshold alone.
    """

    train: str
    test: str
    fold: int
    fit: int
    left_out: int
    frame: "pd.DataFrame"
    apart: bool = False


class Pooled(NamedTuple):
    """All test parts together, in the order of the data, by detector.

    An answer that several parts hold counts once, with its mean; ``flagged`` is 1 where
    its score reaches the threshold, ``rows`` are the answers' numbers in the data.
    """

    scores: dict[str, Float[np.ndarray, " answers"]]
    probabilities: dict[str, Float[np.ndarray, " answers"]]
    flagged: dict[str, Float[np.ndarray, " answers"]]
    labels: Int[np.ndarray, " answers"]
    sources: list[int]
    rows: list[int]


def pooled(judged: Sequence[Judged], detectors: Sequence[Detector]) -> Pooled:
    """Test parts as one.

    Answers are ranked by score where one fit judged all parts, and for a method that is
    not fitted.  Several fits differ in scale, so there it is by calibrated probability.
    """
    import pandas as pd

    whole = pd.concat([part.frame for part in judged])
    once: Any = whole.groupby("row", sort=True).mean(numeric_only=True)
    one_fit = len({part.fit for part in judged}) == 1
    scores, probabilities, flagged = {}, {}, {}
    for detector in detectors:
        name = detector.name
        probabilities[name] = once[f"{name}.probability"].to_numpy()
        flagged[name] = once[f"{name}.flagged"].to_numpy(float)
        own = one_fit or detector.fit is None
        scores[name] = once[name].to_numpy(float) if own else probabilities[name]
    labels = once["label"].to_numpy().astype(int)
    sources = once["source"].astype(int).tolist()
    rows = once.index.tolist()
    return Pooled(scores, probabilities, flagged, labels, sources, rows)


class Ranked(NamedTuple):
    """What an AUROC is of: rows, and how it is taken, as ``metric``.

    Rows are answers, or answers as often as parts apart hold them; ``rows`` are their
    numbers in the data.
    """

    scores: dict[str, Float[np.ndarray, " rows"]]
    labels: Int[np.ndarray, " rows"]
    sources: list[int]
    rows: list[int]
    metric: Metric


def ranked(judged: Sequence[Judged], detectors: Sequence[Detector]) -> Ranked:
    """Test parts as :func:`pooled` has them, or each apart."""
    if not any(part.apart for part in judged):
        whole = pooled(judged, detectors)
        return Ranked(whole.scores, whole.labels, whole.sources, whole.rows, auroc)
    import pandas as pd

    frames = [part.frame.assign(part=number) for number, part in enumerate(judged)]
    frame = pd.concat(frames)
    return Ranked(
        {one.name: frame[one.name].to_numpy(float) for one in detectors},
        frame["label"].to_numpy().astype(int),
        frame["source"].astype(int).tolist(),
        frame["row"].tolist(),
        WithinParts(frame["part"].tolist()),
    )


def table(
    judged: Sequence[Judged], detectors: Sequence[Detector]
) -> list[dict[str, Any]]:
    """A row per detector over all test parts together, as :func:`ranked` has them.

    Metrics at a threshold are means over the parts, and ``"AUROC (folds)"`` is the mean
    of the parts' own.
    """
    scores, labels, sources, _, metric = ranked(judged, detectors)
    controls = [detector.name for detector in detectors if detector.control]
    rows = compare(scores, labels, sources, controls, metric)
    for row in rows:
        folds = [_metrics(part.frame, row["method"]) for part in judged]
        for key, name in _METRICS.items():
            row[name] = float(np.mean([fold[key] for fold in folds]))
        row["AUROC (folds)"] = float(np.mean([fold["auroc"] for fold in folds]))
        row["AUROC (folds) sd"] = float(np.std([fold["auroc"] for fold in folds]))
        if isinstance(metric, WithinParts):
            row["AUPRC"] = float(np.mean([fold["auprc"] for fold in folds]))
    return rows


def estimates(
    metrics: Mapping[str, Metric],
    scores: Collection[Any],
    labels: Collection[Any],
    groups: Collection[Any],
    repeats: int = 1000,
) -> dict[str, float]:
    """Each metric, with its 95 % interval from ``"... low"`` to ``"... high"``."""
    found = {}
    for name, metric in metrics.items():
        low, high = interval(metric, scores, labels, groups, repeats)
        value = metric(np.asarray(scores), np.asarray(labels))
        found |= {name: value, f"{name} low": low, f"{name} high": high}
    return found


def in_short(
    judged: Sequence[Judged], detectors: Sequence[Detector]
) -> list[dict[str, Any]]:
    """AUROC, AUPRC, F1 and accuracy of each method, all with intervals.

    Of all test parts together, each with its own threshold, where :func:`table` has
    means over them.
    """
    scores, _, flagged, labels, sources, _ = pooled(judged, detectors)
    ranking = {"AUROC": auroc, "AUPRC": auprc}
    return [
        {
            "method": one.name,
            "control": one.control,
            **estimates(ranking, scores[one.name], labels, sources),
            **estimates(DECIDED, flagged[one.name], labels, sources),
        }
        for one in detectors
    ]


def selective(
    judged: Sequence[Judged], detectors: Sequence[Detector]
) -> list[dict[str, Any]]:
    """How good it is to keep what each method trusts, controls last, highest PRR first.

    Of all test parts together, by what :func:`pooled` ranks them by; the intervals
    resample sources 200 times.  Empty where parts are apart: what one keeps says
    nothing of another.
    """
    if any(part.apart for part in judged):
        return []
    scores, _, _, labels, sources, _ = pooled(judged, detectors)
    rows = [
        {
            "method": one.name,
            "control": one.control,
            **estimates(_SELECTIVE, scores[one.name], labels, sources, repeats=200),
        }
        for one in detectors
    ]
    return sorted(rows, key=lambda row: (row["control"], -row["PRR"]))


def _metrics(frame: "pd.DataFrame", name: str) -> dict[str, float]:
    found = evaluate(
        frame[name], frame["label"], probabilities=frame[f"{name}.probability"]
    )
    adapted = frame[f"{name}.adapted"]
    found["adapted"] = ece(adapted, frame["label"])
    found["by_chance"] = ece_by_chance(adapted)
    flagged = evaluate(frame[f"{name}.flagged"].astype(float), frame["label"], 0.5)
    return found | {k: v for k, v in flagged.items() if k in _METRICS}


def markdown(rows: Sequence[Mapping[str, Any]], several: bool) -> str:
    """The table as people read it; controls last."""
    timed = any(COST in row for row in rows)
    shown = []
    for row in rows:
        cells = {"method": _marked(row), "AUROC": row["AUROC"]}
        cells |= {"AUROC low": row["low"], "AUROC high": row["high"]}
        if several:
            mean, sd = row["AUROC (folds)"], row["AUROC (folds) sd"]
            cells["AUROC of folds"] = Markdown(f"{mean:.3f} ± {sd:.3f}")
        # Cards of detectors may be older than a column.
        named = ("AUPRC", *_METRICS.values())
        cells |= {name: row[name] for name in named if name in rows[0]}
        cells["vs best control"] = difference(row)
        if timed:
            cells[COST] = f"{row[COST]:.0f}" if COST in row else ""
        shown.append(cells)
    return interval_markdown(shown)


def short_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of methods, each with ``"control"``, as people read them."""
    shown = [{**row, "method": _marked(row)} for row in rows]
    for row in shown:
        del row["control"]
    return interval_markdown(shown)


def _marked(row: Mapping[str, Any]) -> Markdown:
    name = escaped(row["method"])
    return Markdown(f"*{name}* (control)") if row["control"] else name


def difference(row: Mapping[str, Any]) -> Markdown:
    """In AUROC to the best control; nothing of a control, or without one."""
    if row["difference"] is None:
        return Markdown()
    low, high = row["difference low"], row["difference high"]
    gap = f"{row['difference']:+.3f} [{low:+.2f}, {high:+.2f}]"
    return Markdown(f"{gap} {row['beats controls']}")


def methods_markdown(methods: Sequence[Detector]) -> list[str]:
    """What each method computes, and by what: the model that compares texts, say."""
    said = [
        f"- {escaped(f'{one.name}: {one.summary} ({one.reference})')}"
        for one in methods
    ]
    return ["## Methods", "", *said, ""]


def interval_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of equal keys as people read them.

    The interval of ``x`` is from ``"x low"`` to ``"x high"`` and stands beside it.
    """
    shown = [name for name in rows[0] if not name.endswith((" low", " high"))]
    head = [
        Markdown(f"{escaped(name)} [95 %]") if f"{name} low" in rows[0] else name
        for name in shown
    ]
    return table_markdown(head, ([_cell(row, name) for name in shown] for row in rows))


def _cell(row: Mapping[str, Any], name: str) -> str:
    value, low = row[name], row.get(f"{name} low")
    if not isinstance(value, float):
        return value if isinstance(value, str) else str(value)
    return f"{value:.3f}" if low is None else measured(value, low, row[f"{name} high"])


def transfer(
    judged: Sequence[Judged], detectors: Sequence[Detector]
) -> list[dict[str, Any]]:
    """The rows of :func:`table` for every pair of data sets, ``train`` and ``test``."""
    return [
        {"train": part.train, "test": part.test, **row}
        for part in judged
        for row in table([part], detectors)
    ]


def own(rows: Sequence[Mapping[str, Any]], label: str) -> list[Mapping[str, Any]]:
    """The rows of a data set tested on itself; all rows where there is one data set."""
    return [r for r in rows if r.get("train", label) == r.get("test", label) == label]


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
