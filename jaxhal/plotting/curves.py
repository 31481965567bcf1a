"""Ranking quality along the threshold: ROC and precision-recall curves."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from jaxhal.plotting.style import (
    GREY,
    canvas,
    check_intervals,
    check_known,
    check_labels,
    check_scores,
    label,
    legend,
    line_styles,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def roc_curves(
    scores: Mapping[str, Any],
    labels: Any,
    intervals: Mapping[str, Any] | None = None,
    controls: Collection[str] = (),
) -> "Figure":
    """ROC curves of several detectors, the largest area first in the legend.

    Args:
      scores: by detector, ``[rows]``, higher = more likely hallucinated.
      labels: ``[rows]``, 1 for hallucinated, 0 for grounded.
      intervals: by detector, ``(AUROC, low, high)`` to be printed beside its name.
      controls: names to be drawn as grey dashes.

    Raises:
      ValueError: on no scores, scores that do not pair up with the labels or are not
        finite, one class only, intervals or controls of unknown detectors.

    Example:
      >>> figure = roc_curves({"mtop_div": [0.1, 0.4, 0.8]}, [0, 0, 1])
      >>> figure.legends[0].get_texts()[0].get_text()
      'mtop_div  1.000'
    """
    from sklearn.metrics import roc_auc_score, roc_curve

    labels = check_labels(labels)
    checked = check_scores(scores, labels)
    known = check_intervals(intervals or {})
    check_known(scores, known, "intervals of")
    areas = {name: roc_auc_score(labels, values) for name, values in checked.items()}
    captions = {name: f"{area:.3f}" for name, area in areas.items()}
    for name, (area, low, high) in known.items():
        areas[name] = area
        captions[name] = f"{area:.3f}  [{low:.2f}, {high:.2f}]"
    points = {name: roc_curve(labels, values)[:2] for name, values in checked.items()}
    title = "AUROC  [95 % interval]" if known else "AUROC"
    figure, ax = _curves(points, areas, captions, controls, title)
    ax.plot([0, 1], [0, 1], color=GREY, linewidth=0.8, linestyle=":", zorder=1)
    label(ax, "false alarms, share of grounded", "found, share of hallucinated")
    return figure


def precision_recall_curves(
    scores: Mapping[str, Any], labels: Any, controls: Collection[str] = ()
) -> "Figure":
    """Precision-recall curves; the dotted line is what guessing reaches.

    Args:
      scores: by detector, ``[rows]``, higher = more likely hallucinated.
      labels: ``[rows]``, 1 for hallucinated, 0 for grounded.
      controls: names to be drawn as grey dashes.

    Raises:
      ValueError: as :func:`roc_curves` does.

    Example:
      >>> figure = precision_recall_curves({"mtop_div": [0.1, 0.4, 0.8]}, [0, 0, 1])
      >>> [text.get_text() for text in figure.legends[0].get_texts()]
      ['mtop_div  1.000', 'guessing  0.333']
    """
    from sklearn.metrics import average_precision_score, precision_recall_curve

    labels = check_labels(labels)
    checked = check_scores(scores, labels)
    areas, points = {}, {}
    for name, values in checked.items():
        areas[name] = average_precision_score(labels, values)
        precision, recall, _ = precision_recall_curve(labels, values)
        points[name] = recall, precision
    captions = {name: f"{area:.3f}" for name, area in areas.items()}
    share = float(labels.mean())
    figure, ax = _curves(
        points, areas, captions, controls, "average precision", share, "steps-post"
    )
    label(ax, "recall", "precision")
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
    check_known(points, controls, "controls")
    looks = line_styles(points, controls)
    entries = {name: f"{name}  {captions[name]}" for name in points}
    height = max(3.6, 0.6 + 0.16 * (len(points) + 1))
    width = height + 0.7 + 0.065 * max(map(len, [*entries.values(), title]))
    figure, [[ax]] = canvas(width, height)
    ordered = sorted(points, key=lambda name: -areas[name])
    handles = []
    for rank, name in enumerate(ordered):
        # The best curve lies on top, and every method above the controls.
        order = 3 + (name not in controls) - rank / len(ordered)
        [line] = ax.plot(
            *points[name],
            label=entries[name],
            drawstyle=drawstyle,
            zorder=order,
            **looks[name],
        )
        handles.append(line)
    if guessing is not None:
        handles.append(
            ax.axhline(
                guessing,
                label=f"guessing  {guessing:.3f}",
                color=GREY,
                linewidth=0.8,
                linestyle=":",
                zorder=1,
            )
        )
    ax.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.01), aspect="equal", anchor="NW")
    legend(figure, handles, title)
    return figure, ax
