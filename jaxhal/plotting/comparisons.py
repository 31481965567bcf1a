"""Methods, classes of answers, ways of writing and stages side by side."""

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxhal.plotting import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = 3


@style.styled
def auroc_intervals(
    intervals: Mapping[str, Any],
    controls: Collection[str] = (),
    title: str = "",
) -> "Figure":
    """AUROC of every detector with its interval: does it beat what costs nothing?

    Methods come first and controls, hollow and grey, below them, best first in both.
    The dashed line is the best control, the dotted one chance.

    Args:
      intervals: by detector, ``(AUROC, low, high)``, in [0, 1].

    Example:
      >>> figure = auroc_intervals({"mtop_div": (0.7, 0.6, 0.8)})
      >>> [text.get_text() for text in figure.axes[0].get_yticklabels()]
      ['mtop_div']
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
    ax.set_title(title, pad=16)
    return figure


@style.styled
def timing_bars(seconds: Mapping[str, int | float]) -> "Figure":
    """Seconds by stage, in the order given, with each stage's share of the total.

    Raises:
      ValueError: on no stage, or a time that is negative or not finite.

    Example:
      >>> figure = timing_bars({"read": 3.0, "score": 1.0})
      >>> [text.get_text() for text in figure.axes[0].texts]
      ['3 s  (75 %)', '1 s  (25 %)']
    """
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
        f"{value:.3g} s  ({'< 1' if 0 < share < 1 else f'{share:.0f}'} %)"
        for value, share in zip(values, shares, strict=True)
    ]
    ax.bar_label(bars, shown, padding=4)
    ax.set(xlim=(0, 1.35 * max(values) or 1.0))
    ax.set_xlabel(f"seconds ({sum(values):.3g} in all)")
    return figure


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
    a few far answers do not squeeze all others into one bin.

    Args:
      bins: of equal width in each panel, at least 1.
      unit: what the rows are.

    Example:
      >>> figure = score_histograms({"mtop_div": [0.1, 0.4, 0.8]}, [0, 0, 1])
      >>> [text.get_text() for text in figure.legends[0].get_texts()]
      ['grounded (2)', 'hallucinated (1)']
    """
    checked, positive = style.check_scores(scores, labels)
    if bins < 1:
        raise ValueError(f"bins is {bins}; give at least 1")
    columns = min(_COLUMNS, len(checked))
    rows = math.ceil(len(checked) / columns)
    width = max(3.6, 0.5 + 2.3 * columns)
    figure, axes = style.canvas(width, 0.8 + 1.55 * rows, rows, columns)
    for ax in axes.flat[len(checked) :]:
        ax.set_visible(False)
    for ax, (name, values) in zip(axes.flat, checked.items(), strict=False):
        values = np.clip(values, *np.percentile(values, [1, 99]))
        edges = np.histogram_bin_edges(values, bins)
        for some, colour in (
            (~positive, style.GROUNDED),
            (positive, style.HALLUCINATED),
        ):
            counts, _ = np.histogram(values[some], edges)
            ax.stairs(counts, edges, fill=True, alpha=0.3, color=colour)
            ax.stairs(counts, edges, color=colour, linewidth=1.2)
        ax.locator_params(axis="both", nbins=4)
        ax.yaxis.get_major_locator().set_params(integer=True)
        ax.set_title(name)
    for ax in axes[:, 0]:
        ax.set_ylabel(unit)
    figure.supxlabel("score")
    names = [f"grounded ({(~positive).sum()})", f"hallucinated ({positive.sum()})"]
    handles = axes.flat[0].patches[1::2]
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

    Raises:
      ValueError: when ``"guided"`` is missing, or ways differ in their questions.
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
        for way, colour in zip(others, style.COLOURS, strict=False):
            look: Any = {"color": colour, "alpha": 0.5, "markeredgewidth": 0}
            dots = values[way], values["guided"]
            ax.plot(*dots, "o", markersize=4, label=f"against {way}", **look)
        every = np.concatenate([np.asarray(one, float) for one in values.values()])
        ax.plot(*[[every.min(), every.max()]] * 2, color=style.GREY, linewidth=0.8)
        ax.set(xlabel=f"{title}, other way", ylabel=f"{title}, guided")
        ax.legend()
    return figure
