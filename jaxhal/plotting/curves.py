"""Along the threshold: ROC, precision-recall and calibration curves."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxhal.plotting import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@style.styled
def roc_curves(
    scores: Mapping[str, Any],
    labels: Any,
    intervals: Mapping[str, Any] | None = None,
    controls: Collection[str] = (),
) -> "Figure":
    """ROC curves of several detectors, the largest area first in the legend.

    Args:
      intervals: by detector, ``(AUROC, low, high)`` to be printed beside its name.

    Example:
      >>> figure = roc_curves({"mtop_div": [0.1, 0.4, 0.8]}, [0, 0, 1])
      >>> figure.legends[0].get_texts()[0].get_text()
      'mtop_div  1.000'
    """
    from sklearn.metrics import auc, roc_curve

    checked, positive = style.check_scores(scores, labels)
    known = style.check_intervals(intervals or {})
    style.check_known(scores, known, "intervals of")
    points = {name: roc_curve(positive, each)[:2] for name, each in checked.items()}
    areas = {name: auc(*each) for name, each in points.items()}
    areas |= {name: area for name, (area, _, _) in known.items()}
    captions = {name: f"{area:.3f}" for name, area in areas.items()}
    for name, (_, low, high) in known.items():
        captions[name] += f"  [{low:.2f}, {high:.2f}]"
    title = "AUROC  [95 % interval]" if known else "AUROC"
    figure, ax = _curves(points, areas, captions, controls, title)
    ax.plot([0, 1], [0, 1], **style.REFERENCE)
    ax.set(xlabel="false alarms, share of grounded")
    ax.set(ylabel="found, share of hallucinated")
    return figure


@style.styled
def precision_recall_curves(
    scores: Mapping[str, Any], labels: Any, controls: Collection[str] = ()
) -> "Figure":
    """Precision-recall curves; the dotted line is what guessing reaches.

    Example:
      >>> figure = precision_recall_curves({"mtop_div": [0.1, 0.4, 0.8]}, [0, 0, 1])
      >>> [text.get_text() for text in figure.legends[0].get_texts()]
      ['mtop_div  1.000', 'guessing  0.333']
    """
    from sklearn.metrics import average_precision_score, precision_recall_curve

    checked, positive = style.check_scores(scores, labels)
    areas, points = {}, {}
    for name, values in checked.items():
        areas[name] = average_precision_score(positive, values)
        precision, recall, _ = precision_recall_curve(positive, values)
        points[name] = recall, precision
    captions = {name: f"{area:.3f}" for name, area in areas.items()}
    share = float(positive.mean())
    title, steps = "average precision", "steps-post"
    figure, ax = _curves(points, areas, captions, controls, title, share, steps)
    ax.set(xlabel="recall", ylabel="precision")
    return figure


def _curves(
    points: Mapping[str, Any],
    areas: Mapping[str, float],
    captions: Mapping[str, str],
    controls: Collection[str],
    title: str,
    guessing: float | None = None,
    drawstyle: Any = "default",
) -> Any:
    """A square with one curve a name, and a legend from the largest area down."""
    style.check_known(points, controls, "controls")
    looks = style.line_styles(points, controls)
    entries = {name: f"{name}  {captions[name]}" for name in points}
    height = max(3.6, 0.6 + 0.16 * (len(points) + 1))
    width = height + 0.7 + 0.065 * max(map(len, [*entries.values(), title]))
    figure, [[ax]] = style.canvas(width, height)
    ordered = sorted(points, key=lambda name: -areas[name])
    handles = []
    for rank, name in enumerate(ordered):
        # The best curve lies on top, and every method above the controls.
        order = 3 + (name not in controls) - rank / len(ordered)
        look = looks[name] | {"zorder": order, "drawstyle": drawstyle}
        handles += ax.plot(*points[name], label=entries[name], **look)
    if guessing is not None:
        caption = f"guessing  {guessing:.3f}"
        handles.append(ax.axhline(guessing, label=caption, **style.REFERENCE))
    ax.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.01), aspect="equal", anchor="NW")
    style.legend(figure, handles, title)
    return figure, ax


@style.styled
def calibration_curve(
    probabilities: Any, labels: Any, bins: int = 10, unit: str = "answers"
) -> "Figure":
    """How often answers are hallucinated that a detector calls so with probability p.

    The dotted diagonal is perfect calibration; bars below count the answers of each
    bin.  Bins without answers have no point.

    Args:
      probabilities: ``[rows]`` of being hallucinated, in [0, 1].
      bins: of equal width over [0, 1].
      unit: what the rows are.

    Raises:
      ValueError: on a probability outside [0, 1], or fewer than one bin.

    Example:
      >>> figure = calibration_curve([0.1, 0.2, 0.9, 0.7], [0, 0, 1, 1], bins=2)
      >>> figure.axes[0].lines[-1].get_ydata().tolist()
      [0.0, 1.0]
    """
    checked, positive = style.check_scores({"probabilities": probabilities}, labels)
    values = checked["probabilities"]
    if bins < 1:
        raise ValueError(f"bins is {bins}; give at least 1")
    if values.min() < 0 or values.max() > 1:
        raise ValueError(
            f"probabilities span [{values.min():g}, {values.max():g}]; they must lie "
            "in [0, 1], so map scores to probabilities first"
        )
    which = np.minimum((values * bins).astype(int), bins - 1)
    count = np.bincount(which, minlength=bins)
    there = count > 0
    totals = (np.bincount(which, of, bins)[there] for of in (values, positive))
    figure, ((curve,), (counts,)) = style.canvas(4.2, 4.8, 2)
    curve.get_gridspec().set_height_ratios([3, 1])
    curve.sharex(counts)
    curve.plot([0, 1], [0, 1], **style.REFERENCE)
    curve.plot(
        *(total / count[there] for total in totals),
        "o-",
        color=style.COLOURS[0],
        markersize=4,
    )
    curve.tick_params(labelbottom=False)
    curve.set(ylim=(-0.03, 1.03), xlim=(-0.03, 1.03))
    curve.set_ylabel("hallucinated, share of bin")
    edges = np.arange(bins) / bins
    bars = counts.bar(edges, count, 1 / bins, align="edge", color=style.PALE)
    if bins <= 20:
        shown = [str(n or "") if n < 10_000 else f"{n / 1000:.0f}k" for n in count]
        counts.bar_label(bars, shown, fontsize=7)
    counts.set(ylim=(0, 1.3 * count.max()), xlabel="predicted probability", ylabel=unit)
    counts.locator_params(axis="y", nbins=2, integer=True)
    return figure
