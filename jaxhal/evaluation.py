"""How well scores rank hallucinated answers above grounded ones, with intervals."""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float, Int

if TYPE_CHECKING:
    from jaxhal.report import Report


def auroc(scores: Collection[Any], labels: Collection[Any]) -> float:
    """Area under the ROC curve, in [0, 1]: 0.5 is chance, 1 a perfect ranking.

    The share of (hallucinated, grounded) pairs that the scores put in the right order;
    a tie counts one half.

    Args:
      scores: one finite number per answer, higher = more likely hallucinated.
      labels: 1 for hallucinated, 0 for grounded.

    Raises:
      ValueError: when only one class is present, a score is not finite, a label is not
        0 or 1, or the lengths differ.

    >>> auroc([0.1, 0.4, 0.4, 0.9], [0, 0, 1, 1])
    0.875
    """
    rank, positive = _ranked(scores, labels)
    return _auroc(rank, positive, np.ones(len(rank)))


def bootstrap(
    scores: Collection[Any],
    labels: Collection[Any],
    groups: Sequence[Hashable] | None = None,
    repeats: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile 95 % interval of :func:`auroc`, by resampling with replacement.

    Answers to one context rise and fall together, so resampling them singly makes the
    interval too narrow: give their source as ``groups`` and whole sources are drawn.
    A resample with one class has no AUROC and is drawn again.

    Args:
      scores: one finite number per answer.
      labels: 1 for hallucinated, 0 for grounded.
      groups: the source of each answer; each answer by itself when left out.
      repeats: number of resamples.
      seed: of the resampling; the same seed gives the same interval.

    Raises:
      ValueError: as :func:`auroc` does, when ``groups`` has another length, or when
        ``repeats`` is below 1.

    >>> bootstrap([0.1, 0.4, 0.4, 0.9], [0, 1, 0, 1], groups=["a", "a", "b", "b"])
    (0.875, 1.0)
    """
    rank, positive = _ranked(scores, labels)
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; give at least 1")
    sources = range(len(rank)) if groups is None else groups
    if len(sources) != len(rank):
        raise ValueError(
            f"got {len(sources)} groups for {len(rank)} scores; give one per score"
        )
    codes: dict[Hashable, int] = {}
    group = np.array([codes.setdefault(source, len(codes)) for source in sources])
    rng = np.random.default_rng(seed)
    found: list[float] = []
    while len(found) < repeats:
        drawn = np.bincount(
            rng.integers(len(codes), size=len(codes)), minlength=len(codes)
        )
        weight = drawn[group].astype(float)
        if weight[positive].any() and weight[~positive].any():
            found.append(_auroc(rank, positive, weight))
    low, high = np.percentile(found, [2.5, 97.5])
    return float(low), float(high)


def _ranked(
    scores: Collection[Any], labels: Collection[Any]
) -> tuple[Int[np.ndarray, " rows"], Bool[np.ndarray, " rows"]]:
    """Dense ranks (ties share one) and the mask of hallucinated rows."""
    score, label = np.asarray(scores, float), np.asarray(labels)
    if score.ndim != 1 or score.shape != label.shape:
        raise ValueError(
            f"scores of shape {score.shape} and labels of shape {label.shape} do not "
            "pair up; give two flat sequences of one length"
        )
    if not np.isfinite(score).all():
        row = int(np.argmin(np.isfinite(score)))
        raise ValueError(f"scores[{row}] is {score[row]}; every score must be finite")
    if not np.isin(label, (0, 1)).all():
        row = int(np.argmin(np.isin(label, (0, 1))))
        raise ValueError(f"labels[{row}] is {label[row]!r}; use 0 or 1")
    positive = label.astype(bool)
    if positive.all() or not positive.any():
        raise ValueError(
            f"all {len(label)} labels are of one class; AUROC needs at least one "
            "hallucinated and one grounded answer"
        )
    return np.unique(score, return_inverse=True)[1], positive


def _auroc(
    rank: Int[np.ndarray, " rows"],
    positive: Bool[np.ndarray, " rows"],
    weight: Float[np.ndarray, " rows"],
) -> float:
    high = np.bincount(rank, weight * positive)
    low = np.bincount(rank, weight * ~positive)
    wins = high @ (np.cumsum(low) - low / 2)
    return float(wins / (high.sum() * low.sum()))


def source(report: "Report") -> str | None:
    """What an answer rests on; answers that share it are not independent."""
    return report.prompt if report.context is None else report.context


def summarize(reports: Sequence["Report"]) -> list[dict[str, Any]]:
    """A row per detector, methods first, best first; none without both labels."""
    from jaxhal.detectors import CATALOGUE  # reports need no detectors otherwise

    known = [r for r in reports if r.error is None and r.label is not None]
    labels = [report.label for report in known]
    if len(set(labels)) < 2:
        return []
    groups = [source(report) for report in known]
    rows = []
    for name in known[0].scores:
        scores = [report.scores[name] for report in known]
        low, high = bootstrap(scores, labels, groups)
        rows.append(
            {
                "detector": name,
                "AUROC": auroc(scores, labels),
                "95 % interval": f"{low:.2f}–{high:.2f}",
                "token AUROC": _token_auroc(known, name),
                "control": name in CATALOGUE and CATALOGUE[name]().control,
                "beats controls": None,
                "low": low,
            }
        )
    rows.sort(key=lambda row: (row["control"], -row["AUROC"]))
    best = max((row["AUROC"] for row in rows if row["control"]), default=None)
    for row in rows:
        low = row.pop("low")
        if best is not None and not row["control"]:
            beats = "yes" if low > best else "within noise"
            row["beats controls"] = beats if row["AUROC"] > best else "no"
    return rows


def _token_auroc(reports: Iterable["Report"], name: str) -> float | None:
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
    """In words, which methods are worth more than the controls."""
    if not rows:
        return "Answers of one class have no AUROC."
    text = (
        "The intervals resample sources, since answers to one rise and fall together."
    )
    controls = [row for row in rows if row["control"]]
    if not controls:
        return text
    best = max(controls, key=lambda row: row["AUROC"])
    text += f" The best control is {best['detector']} ({best['AUROC']:.3f}); "
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
