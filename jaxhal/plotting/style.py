"""What all figures share: quiet axes, colours all eyes tell apart, checked input."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GREY, PALE = "#262626", "#7a7a7a", "#dddddd"
# The palette of Okabe and Ito without its yellow, which is too light on paper.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GROUNDED, HALLUCINATED = COLOURS[:2]
SMALL = 8  # points, of everything but axis labels and titles


def canvas(width: float, height: float, rows: int = 1, columns: int = 1) -> Any:
    """A figure in inches and its axes, ``[rows columns]`` of them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat:
        quiet(ax)
    return figure, axes


def quiet(ax: "Axes") -> None:
    """Two thin spines, small ticks, and everything drawn above the grid."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(GREY)
    ax.tick_params(labelsize=SMALL, color=GREY, labelcolor=INK)
    ax.set_axisbelow(True)


def label(ax: "Axes", x: str = "", y: str = "", title: str = "") -> None:
    ax.set_xlabel(x, fontsize=9, color=INK)
    ax.set_ylabel(y, fontsize=9, color=INK)
    ax.set_title(title, fontsize=10, color=INK, parse_math=False)


def legend(figure: "Figure", handles: Sequence[Any], title: str) -> None:
    """Beside the axes, so that it covers nothing."""
    box = figure.legend(
        handles=handles,
        loc="outside right upper",
        title=title,
        fontsize=SMALL,
        title_fontsize=SMALL,
        frameon=False,
        alignment="left",
        handlelength=2.4,
    )
    for text in box.get_texts():
        text.set_parse_math(False)


def frame(ax: "Axes", row: int, column: int) -> None:
    """A frame around one cell, black on white, which shows on any colour."""
    from matplotlib.patches import Rectangle

    # All white lies under all black, so that neighbours keep their frames.
    for order, colour, width in ((3, "white", 3.0), (4, "black", 1.4)):
        box = Rectangle(
            (column - 0.5, row - 0.5),
            1,
            1,
            fill=False,
            edgecolor=colour,
            linewidth=width,
            zorder=order,
            clip_on=False,
        )
        ax.add_patch(box)


def line_styles(
    names: Collection[str], controls: Collection[str]
) -> dict[str, dict[str, Any]]:
    """A look for each name: colours for methods, grey dashes for controls."""
    methods = [name for name in names if name not in controls]
    grey = [name for name in names if name in controls]
    styles: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(methods):
        turn, colour = divmod(number, len(COLOURS))
        dashes = ("-", "-.", ":")[turn % 3]
        styles[name] = {"color": COLOURS[colour], "linestyle": dashes, "linewidth": 1.6}
    for number, name in enumerate(grey):
        dashes = ((0, (4, 1.5)), (0, (1.5, 1)), (0, (6, 1.5, 1.5, 1.5)))[number % 3]
        shade = ("#555555", "#8c8c8c", "#b0b0b0")[number // 3 % 3]
        styles[name] = {"color": shade, "linestyle": dashes, "linewidth": 1.3}
    return styles


def check_known(names: Collection[str], subset: Collection[str], what: str) -> None:
    """Raises ValueError when ``subset`` names something that is not there."""
    unknown = sorted(set(subset) - set(names))
    if unknown:
        raise ValueError(f"{what} {unknown} have no entry among {sorted(names)}")


def check_labels(labels: Any) -> Int[np.ndarray, " rows"]:
    """Labels as integers; raises ValueError unless both 0 and 1 occur, nothing else."""
    labels = np.asarray(labels)
    if labels.ndim != 1 or set(np.unique(labels).tolist()) != {0, 1}:
        raise ValueError(
            f"labels of shape {list(labels.shape)} hold "
            f"{np.unique(labels)[:5].tolist()}; give a flat sequence with both 0 "
            "(grounded) and 1 (hallucinated)"
        )
    return labels.astype(int)


def check_scores(
    scores: Mapping[str, Any], labels: Int[np.ndarray, " rows"]
) -> dict[str, Float[np.ndarray, " rows"]]:
    """Scores as arrays; raises ValueError on none, a wrong length or a value that is
    not finite."""
    if not scores:
        raise ValueError("scores are empty; give at least one name with its scores")
    checked = {}
    for name, given in scores.items():
        values = np.asarray(given, float)
        if values.shape != labels.shape:
            raise ValueError(
                f"scores of {name!r} have shape {list(values.shape)} for {len(labels)} "
                "labels; give one score per label"
            )
        if not np.isfinite(values).all():
            row = int(np.argmin(np.isfinite(values)))
            raise ValueError(f"score {row} of {name!r} is {values[row]}, not finite")
        checked[name] = values
    return checked


def check_intervals(intervals: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
    """``(AUROC, low, high)`` by name; raises ValueError on any other order or form."""
    checked = {}
    for name, given in intervals.items():
        interval = tuple(float(number) for number in given)
        # A bootstrap of few answers need not enclose the AUROC itself.
        if len(interval) != 3 or not 0 <= interval[1] <= interval[2] <= 1:
            raise ValueError(
                f"interval of {name!r} is {interval}; give (AUROC, low, high) in [0, 1]"
            )
        checked[name] = interval
    return checked
