"""What all figures share: quiet axes, colours all eyes tell apart, checked input."""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
from jaxtyping import Bool, Float

from jaxhal.evaluation.checks import two_classes
from jaxhal.io.extras import brought_by

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Given = ParamSpec("Given")
Drawn = TypeVar("Drawn")

INK, GREY, PALE = "#262626", "#7a7a7a", "#dddddd"
# The palette of Okabe and Ito without its yellow, which is too light on paper.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GROUNDED, HALLUCINATED = COLOURS[:2]
KINDS = (("grounded", GROUNDED), ("hallucinated", HALLUCINATED))
REFERENCE = {"color": GREY, "linewidth": 0.8, "linestyle": ":", "zorder": 1}
STYLE = {
    "figure.constrained_layout.use": True,
    "figure.dpi": 150,
    "figure.labelsize": 9,
    "font.size": 8,
    "text.color": INK,
    "text.parse_math": False,
    "axes.axisbelow": True,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.labelsize": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "image.aspect": "auto",
    "image.interpolation": "nearest",
    "legend.fontsize": 8,
    "legend.frameon": False,
    "legend.title_fontsize": 8,
}


def styled(draw: Callable[Given, Drawn]) -> Callable[Given, Drawn]:
    """Lets a function draw in :data:`STYLE`, whatever the settings around it."""

    @functools.wraps(draw)
    def drawn(*args: Given.args, **kwargs: Given.kwargs) -> Drawn:
        with brought_by("plots"):
            import matplotlib
        with matplotlib.rc_context(STYLE):  # pyright: ignore[reportArgumentType]
            return draw(*args, **kwargs)

    return drawn


def canvas(width: float, height: float, rows: int = 1, columns: int = 1) -> Any:
    """A figure in inches and its axes, ``[rows columns]`` of them."""
    from jaxhal.plotting.figure import Shown

    figure = Shown(figsize=(width, height))
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat:
        # Ticks are made when the figure is drawn, out of the style's reach.
        ax.tick_params(labelsize=8, color=GREY, labelcolor=INK)
    return figure, axes


def panels(names: Collection[str], columns: int, size: Any) -> Any:
    """A figure with axes for each name, of ``size(columns, rows)`` inches."""
    columns = min(columns, len(names))
    rows = -(-len(names) // columns)
    width, height = size(columns, rows)
    figure, axes = canvas(width, height, rows, columns)
    for ax in axes.flat[len(names) :]:
        ax.set_visible(False)
    return figure, axes


def counted(positive: Bool[np.ndarray, " rows"]) -> list[str]:
    return [f"{kind} ({(positive == n).sum()})" for n, (kind, _) in enumerate(KINDS)]


def legend(figure: "Figure", handles: Sequence[Any], title: str = "") -> None:
    """Beside the axes, so that it covers nothing."""
    look: Any = {"loc": "outside right upper", "alignment": "left", "handlelength": 2.4}
    figure.legend(handles=handles, title=title, **look)


def colour_bar(image: Any, axes: Any, unit: str, **given: Any) -> None:
    bar = image.figure.colorbar(image, ax=axes, **given)
    bar.set_label(unit)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)


def frame(ax: "Axes", row: int, column: int) -> None:
    """A frame around one cell, black on white, which shows on any colour."""
    from matplotlib.patches import Rectangle

    # All white lies under all black, so that neighbours keep their frames.
    for order, colour, width in ((3, "white", 3.0), (4, "black", 1.4)):
        look: Any = {"fill": False, "ec": colour, "lw": width, "zorder": order}
        corner = (column - 0.5, row - 0.5)
        ax.add_patch(Rectangle(corner, 1, 1, clip_on=False, **look))


def line_styles(
    names: Collection[str], controls: Collection[str] = ()
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


def check_scores(
    scores: Mapping[str, Any], labels: Any
) -> tuple[dict[str, Float[np.ndarray, " rows"]], Bool[np.ndarray, " rows"]]:
    """Scores as arrays, and which rows are hallucinated; ValueError on bad ones."""
    if not scores:
        raise ValueError("scores are empty; give at least one name with its scores")
    checked, positive = {}, np.zeros(0, bool)
    for name, given in scores.items():
        checked[name], positive = two_classes(given, labels, f"scores of {name!r}")
    return checked, positive


def check_array(name: str, given: Any, *axes: str) -> Float[np.ndarray, "..."]:
    """Numbers as an array; ValueError unless they are finite and have these axes."""
    values = np.asarray(given, float)
    if values.ndim != len(axes) or not values.size or not np.isfinite(values).all():
        raise ValueError(
            f"{name} of shape {list(values.shape)} must be [{', '.join(axes)}] of "
            "finite numbers"
        )
    return values


def check_intervals(intervals: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
    """``(AUROC, low, high)`` by name; ValueError on any other order or form."""
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
