"""Detectors side by side: intervals, scores, and curves along the threshold."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxhal.evaluation.metrics import in_bins
from jaxhal.io.checks import at_least
from jaxhal.plotting import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@style.styled
def auroc_intervals(
    intervals: Mapping[str, Any], controls: Collection[str] = ()
) -> "Figure":
    """AUROC of every detector with its interval, ``(AUROC, low, high)``, by name.

    Methods come first and controls, hollow and grey, below them, best first in both.
    The dashed line is the best control, the dotted one chance.
    """
    known = style.check_intervals(intervals)
    if not known:
        raise ValueError("intervals are empty; give at least one detector")
    style.check_known(known, controls, "controls")
    names = sorted(known, key=lambda name: (name in controls, -known[name][0]))
    figure, ax = _named_rows(names, 5.2, 0.9 + 0.24 * len(names))
    right = ax.get_yaxis_transform()
    for row, name in enumerate(names):
        value, low, high = known[name]
        colour = style.GREY if name in controls else style.COLOURS[0]
        fill = "white" if name in controls else colour
        ax.plot([low, high], [row, row], color=colour, linewidth=1.6, zorder=3)
        dot: Any = {"color": colour, "markerfacecolor": fill, "markersize": 5.5}
        ax.plot(value, row, "o", zorder=4, **dot)
        shown = f"{value:.3f}  [{low:.2f}, {high:.2f}]"
        ax.text(1.02, row, shown, transform=right, va="center")
    ax.axvline(0.5, **style.REFERENCE)
    if controls:
        best = max(known[name][0] for name in controls)
        ax.axvline(best, color=style.INK, linewidth=1, linestyle=(0, (4, 2)), zorder=2)
        above: Any = {"xytext": (0, 3), "textcoords": "offset points", "ha": "center"}
        where = ("data", "axes fraction")
        ax.annotate("best control", (best, 1), xycoords=where, **above)
    for name, text in zip(names, ax.get_yticklabels(), strict=True):
        text.set_color(style.GREY if name in controls else style.INK)
    ax.spines["left"].set_visible(False)
    ax.grid(axis="x", color=style.PALE, linewidth=0.5)
    ax.set_xlabel("AUROC, 95 % interval")
    return figure


@style.styled
def timing_bars(seconds: Mapping[str, int | float]) -> "Figure":
    """Seconds by stage, in the order given, with each stage's share of the total."""
    if not seconds:
        raise ValueError("seconds are empty; give at least one stage")
    for name, value in seconds.items():
        if not 0 <= value < float("inf"):
            raise ValueError(f"stage {name!r} took {value} s; give 0 or more")
    names, values = list(seconds), list(seconds.values())
    shares = [100 * value / (sum(values) or 1.0) for value in values]
    figure, ax = _named_rows(names, 4.4, 0.7 + 0.26 * len(names))
    bars = ax.barh(range(len(names)), values, height=0.62, color=style.COLOURS[0])
    shown = [
        f"{_rounded(value)} s  ({'< 1' if 0 < share < 1 else f'{share:.0f}'} %)"
        for value, share in zip(values, shares, strict=True)
    ]
    ax.bar_label(bars, shown, padding=4)
    ax.set(xlim=(0, 1.35 * max(values) or 1.0))
    ax.set_xlabel(f"seconds ({_rounded(sum(values))} in all)")
    return figure


def _rounded(seconds: float) -> str:
    """Three digits, or all before the point."""
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"


def _named_rows(names: Collection[str], width: float, height: float) -> Any:
    """Axes with a name on every row, the first on top."""
    figure, [[ax]] = style.canvas(width + 0.06 * max(map(len, names)), height)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    return figure, ax


@style.styled
def score_histograms(
    scores: Mapping[str, Any], labels: Any, bins: int = 20, unit: str = "answers"
) -> "Figure":
    """A panel a detector: how its scores spread over grounded and hallucinated answers.

    The outermost bins also hold what lies beyond the 1st and 99th percentile, so that
    a few far answers do not squeeze all others into one bin.  ``unit`` is what rows
    are.
    """
    checked, positive = style.check_scores(scores, labels)
    at_least(1, bins=bins)
    figure, axes = style.panels(
        checked, 3, lambda wide, high: (max(3.6, 0.5 + 2.3 * wide), 0.8 + 1.55 * high)
    )
    for ax, (name, values) in zip(axes.flat, checked.items(), strict=False):
        values = np.clip(values, *np.percentile(values, [1, 99]))
        edges = np.histogram_bin_edges(values, bins)
        for kind, (_, colour) in enumerate(style.KINDS):
            counts, _ = np.histogram(values[positive == kind], edges)
            ax.stairs(counts, edges, fill=True, alpha=0.3, color=colour)
            ax.stairs(counts, edges, color=colour, linewidth=1.2)
        ax.locator_params(axis="both", nbins=4)
        ax.yaxis.get_major_locator().set_params(integer=True)
        ax.set_title(name)
    for ax in axes[:, 0]:
        ax.set_ylabel(unit)
    figure.supxlabel("score")
    handles, names = axes.flat[0].patches[1::2], style.counted(positive)
    figure.legend(handles, names, loc="outside upper center", ncols=2)
    return figure


@style.styled
def guided_pairs(
    scores: Mapping[str, Any], overlaps: Mapping[str, Any], detector: str
) -> "Figure":
    """Each guided response against the others: its score, and ROUGE-L.

    A point below the diagonal on the left is a response that the guide made less
    suspicious; one above it on the right, one nearer to its reference.

    Args:
      scores: way of writing -> ``[questions]``; ``"guided"`` and others.
      overlaps: the same of ROUGE-L with the reference.
      detector: what guided.
    """
    for name, values in (("scores", scores), ("overlaps", overlaps)):
        sizes = {way: np.shape(one) for way, one in values.items()}
        if "guided" not in sizes or len(set(sizes.values())) > 1:
            raise ValueError(
                f"{name} are {sizes}; give 'guided' and others, as many each"
            )
    figure, [axes] = style.canvas(8.0, 3.8, columns=2)
    titles = f"score of {detector}", "ROUGE-L with the reference"
    for ax, values, title in zip(axes, (scores, overlaps), titles, strict=True):
        others = [way for way in values if way != "guided"]
        for number, way in enumerate(others):
            turn, colour = divmod(number, len(style.COLOURS))
            look: Any = {"color": style.COLOURS[colour], "marker": "os^D"[turn % 4]}
            look |= {"alpha": 0.5, "markeredgewidth": 0, "markersize": 4}
            dots = values[way], values["guided"]
            ax.plot(*dots, linestyle="", label=f"against {way}", **look)
        every = np.concatenate([np.asarray(one, float) for one in values.values()])
        ax.plot(*[[every.min(), every.max()]] * 2, color=style.GREY, linewidth=0.8)
        ax.set(xlabel=f"{title}, other way", ylabel=f"{title}, guided")
        ax.legend()
    return figure


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
    """Precision-recall curves; the dotted line is what guessing reaches."""
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
    bin, of equal width over [0, 1].  Bins without answers have no point.
    """
    checked, positive = style.check_scores({"probabilities": probabilities}, labels)
    values = checked["probabilities"]
    if values.min() < 0 or values.max() > 1:
        raise ValueError(
            f"probabilities span [{values.min():g}, {values.max():g}]; they must lie "
            "in [0, 1], so map scores to probabilities first"
        )
    which = in_bins(values, bins)
    count = np.bincount(which, minlength=bins)
    there = count > 0
    totals = (np.bincount(which, of, bins)[there] for of in (values, positive))
    figure, ((curve,), (counts,)) = style.canvas(4.2, 4.8, 2)
    curve.get_gridspec().set_height_ratios([3, 1])
    curve.sharex(counts)
    curve.plot([0, 1], [0, 1], **style.REFERENCE)
    look: Any = {"color": style.COLOURS[0], "markersize": 4}
    curve.plot(*(total / count[there] for total in totals), "o-", **look)
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
