"""Methods side by side on the same answers, and beside the controls they must beat."""

from collections.abc import Collection, Mapping
from typing import Any

from jaxhal.evaluation.checks import Groups, Rows
from jaxhal.evaluation.intervals import FEWEST, Metric, fewest_sources, interval, paired
from jaxhal.evaluation.ranking import auprc, auroc

# Whether a method beats the controls.
VERDICTS = ("yes", "within noise", "no")
_DIFFERENCE = ("difference", "difference low", "difference high", "p")


def compare(
    scores: Mapping[str, Rows],
    labels: Rows,
    groups: Groups = None,
    controls: Collection[str] = (),
    metric: Metric = auroc,
) -> list[dict[str, Any]]:
    """A row per method, methods before controls, each kind from the highest AUROC down.

    A method is worth its cost when it ranks the answers better than the best control
    does: ``"beats controls"`` is ``"yes"`` when the 95 % interval of the paired
    difference in AUROC lies above 0 and answers of each class come from
    five sources or more, ``"within noise"`` when only the difference does, and
    ``"no"`` otherwise.  That is said of each method by itself: of many that are worth
    nothing some would be above by chance.

    Args:
      scores: per method, one finite number per answer.
      controls: names of the methods that are controls.
      metric: what is given as AUROC, such as :class:`WithinParts`.

    Returns:
      Rows with ``"method"``, ``"control"``, ``"AUROC"`` with its 95 % interval from
      ``"low"`` to ``"high"``, ``"AUPRC"``, and for a method beside a control the
      ``"difference"`` in AUROC from ``"difference low"`` to ``"difference high"`` with
      its p-value ``"p"``, and ``"beats controls"``; ``None`` elsewhere.

    >>> scores = {"ours": range(10), "length": range(10, 0, -1)}
    >>> for row in compare(scores, [0] * 5 + [1] * 5, controls={"length"}):
    ...     print(row["method"], row["AUROC"], row["difference"], row["beats controls"])
    ours 1.0 1.0 yes
    length 0.0 None None
    """
    missing = sorted(set(controls) - set(scores))
    if missing:
        raise ValueError(f"no scores for the controls {missing}; got {[*scores]}")
    rows = []
    for name, some in scores.items():
        try:
            low, high = interval(metric, some, labels, groups)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        row = {"method": name, "control": name in controls}
        row |= {"AUROC": metric(some, labels), "low": low, "high": high}
        rows.append(row | {"AUPRC": auprc(some, labels)})
    rows.sort(key=lambda row: (row["control"], -row["AUROC"]))
    enough = rows and fewest_sources(labels, groups) >= FEWEST
    best = next((row["method"] for row in rows if row["control"]), None)
    for row in rows:
        found = verdict = None
        if best is not None and not row["control"]:
            found = paired(scores[row["method"]], scores[best], labels, groups, metric)
            verdict = "yes" if enough and found.low > 0 else "within noise"
            verdict = verdict if found.value > 0 else "no"
        row |= dict(zip(_DIFFERENCE, found or [None] * 4, strict=True))
        row["beats controls"] = verdict
    return rows
