"""Where scores lie, and whether probabilities mean what they say."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxhal.plotting.style import (
    COLOURS,
    GREY,
    GROUNDED,
    HALLUCINATED,
    INK,
    PALE,
    SMALL,
    canvas,
    check_labels,
    check_scores,
    label,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = 3


def score_histograms(
    scores: Mapping[str, Any], labels: Any, bins: int = 20, unit: str = "answers"
) -> "Figure":
    """A panel a detector: how its scores spread over grounded and hallucinated answers.

    The outermost bins also hold what lies beyond the 1st and 99th percentile, so that
    a few far answers do not squeeze all others into one bin.

    Args:
      scores: by detector, ``[rows]``, each in its own unit.
      labels: ``[rows]``, 1 for hallucinated, 0 for grounded.
      bins: of equal width in each panel.
      unit: what the rows are.

    Raises:
      ValueError: on no scores, scores that do not pair up with the labels or are not
        finite, one class only, fewer than one bin.

    Example:
      >>> figure = score_histograms({"mtop_div": [0.1, 0.4, 0.8]}, [0, 0, 1])
      >>> [text.get_text() for text in figure.legends[0].get_texts()]
      ['grounded (2)', 'hallucinated (1)']
    """
    labels = check_labels(labels)
    checked = check_scores(scores, labels)
    _check_bins(bins)
    columns = min(_COLUMNS, len(checked))
    rows = math.ceil(len(checked) / columns)
    width = max(3.6, 0.5 + 2.3 * columns)
    figure, axes = canvas(width, 0.8 + 1.55 * rows, rows, columns)
    for ax in axes.flat[len(checked) :]:
        ax.set_visible(False)
    for number, (name, values) in enumerate(checked.items()):
        ax = axes.flat[number]
        values = np.clip(values, *np.percentile(values, [1, 99]))
        edges = np.histogram_bin_edges(values, bins)
        for kind, colour in ((0, GROUNDED), (1, HALLUCINATED)):
            counts, _ = np.histogram(values[labels == kind], edges)
            ax.stairs(counts, edges, fill=True, alpha=0.3, color=colour)
            ax.stairs(counts, edges, color=colour, linewidth=1.2)
        ax.locator_params(axis="both", nbins=4)
        ax.yaxis.get_major_locator().set_params(integer=True)
        label(ax, title=name, y=unit if number % columns == 0 else "")
    figure.supxlabel("score", fontsize=9, color=INK)
    handles = [axes.flat[0].patches[i] for i in (1, 3)]
    names = [f"grounded ({(labels == 0).sum()})", f"hallucinated ({labels.sum()})"]
    figure.legend(
        handles,
        names,
        loc="outside upper center",
        ncols=2,
        frameon=False,
        fontsize=SMALL,
    )
    return figure


def calibration_curve(
    probabilities: Any, labels: Any, bins: int = 10, unit: str = "answers"
) -> "Figure":
    """How often answers are hallucinated that a detector calls so with probability p.

    The dotted diagonal is perfect calibration; bars below count the answers of each
    bin.  Bins without answers have no point.

    Args:
      probabilities: ``[rows]`` of being hallucinated, in [0, 1].
      labels: ``[rows]``, 1 for hallucinated, 0 for grounded.
      bins: of equal width over [0, 1].
      unit: what the rows are.

    Raises:
      ValueError: on a probability outside [0, 1], lengths that differ, one class only,
        fewer than one bin.

    Example:
      >>> figure = calibration_curve([0.1, 0.2, 0.9, 0.7], [0, 0, 1, 1], bins=2)
      >>> figure.axes[0].lines[-1].get_ydata().tolist()
      [0.0, 1.0]
    """
    labels = check_labels(labels)
    values = check_scores({"probabilities": probabilities}, labels)
    values = values["probabilities"]
    _check_bins(bins)
    if values.min() < 0 or values.max() > 1:
        raise ValueError(
            f"probabilities span [{values.min():g}, {values.max():g}]; they must lie "
            "in [0, 1], so map scores to probabilities first"
        )
    which = np.minimum((values * bins).astype(int), bins - 1)
    count = np.bincount(which, minlength=bins)
    there = count > 0
    predicted = np.bincount(which, values, bins)[there] / count[there]
    found = np.bincount(which, labels, bins)[there] / count[there]
    figure, axes = canvas(4.2, 4.8, 2)
    axes[0, 0].get_gridspec().set_height_ratios([3, 1])
    (curve,), (counts,) = axes
    curve.sharex(counts)
    curve.plot([0, 1], [0, 1], color=GREY, linewidth=0.8, linestyle=":")
    curve.plot(predicted, found, "o-", color=COLOURS[0], markersize=4)
    curve.tick_params(labelbottom=False)
    curve.set(ylim=(-0.03, 1.03), xlim=(-0.03, 1.03))
    label(curve, y="hallucinated, share of bin")
    edges = np.linspace(0, 1, bins + 1)
    counts.bar(edges[:-1], count, np.diff(edges), align="edge", color=PALE)
    for edge, number in zip(edges, count, strict=False):
        if number and bins <= 20:
            counts.text(
                edge + 0.5 / bins,
                number,
                str(number) if number < 10_000 else f"{number / 1000:.0f}k",
                ha="center",
                va="bottom",
                fontsize=7,
            )
    counts.set_ylim(0, 1.3 * count.max())
    counts.locator_params(axis="y", nbins=2, integer=True)
    label(counts, "predicted probability", unit)
    return figure


def _check_bins(bins: int) -> None:
    if bins < 1:
        raise ValueError(f"bins is {bins}; give at least 1")
