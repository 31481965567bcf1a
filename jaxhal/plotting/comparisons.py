"""Methods, data sets and stages side by side."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxhal.plotting.style import (
    COLOURS,
    GREY,
    INK,
    PALE,
    SMALL,
    canvas,
    check_intervals,
    check_known,
    frame,
    label,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def auroc_intervals(
    intervals: Mapping[str, Any],
    controls: Collection[str] = (),
    title: str = "",
) -> "Figure":
    """AUROC of every detector with its interval: does it beat what costs nothing?

    Methods come first and controls, hollow and grey, below them, best first in both.
    The dashed line is the best control, the dotted one chance.

    Args:
      intervals: by detector, ``(AUROC, low, high)``.
      controls: names of those that any method has to beat.
      title: above the axes.

    Raises:
      ValueError: on no detector, an interval outside [0, 1] or upside down, or an
        unknown control.

    Example:
      >>> figure = auroc_intervals({"mtop_div": (0.7, 0.6, 0.8)})
      >>> [text.get_text() for text in figure.axes[0].get_yticklabels()]
      ['mtop_div']
    """
    known = check_intervals(intervals)
    if not known:
        raise ValueError("intervals are empty; give at least one detector")
    check_known(known, controls, "controls")
    names = sorted(known, key=lambda name: (name in controls, -known[name][0]))
    figure, [[ax]] = canvas(5.2 + 0.06 * max(map(len, names)), 0.9 + 0.24 * len(names))
    for row, name in enumerate(names):
        value, low, high = known[name]
        control = name in controls
        colour = GREY if control else COLOURS[0]
        ax.plot([low, high], [row, row], color=colour, linewidth=1.6, zorder=3)
        ax.plot(
            value,
            row,
            "o",
            color=colour,
            markersize=5.5,
            markerfacecolor="white" if control else colour,
            zorder=4,
        )
        ax.text(
            1.02,
            row,
            f"{value:.3f}  [{low:.2f}, {high:.2f}]",
            transform=ax.get_yaxis_transform(),
            va="center",
            fontsize=SMALL,
            color=INK,
        )
    ax.axvline(0.5, color=GREY, linewidth=0.8, linestyle=":", zorder=1)
    if controls:
        best = max(known[name][0] for name in controls)
        ax.axvline(best, color=INK, linewidth=1, linestyle=(0, (4, 2)), zorder=2)
        ax.annotate(
            "best control",
            (best, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=SMALL,
            color=INK,
        )
    ax.set_yticks(range(len(names)), names, parse_math=False)
    for name, text in zip(names, ax.get_yticklabels(), strict=True):
        text.set_color(GREY if name in controls else INK)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.grid(axis="x", color=PALE, linewidth=0.5)
    label(ax, "AUROC, 95 % interval")
    ax.set_title(title, fontsize=10, pad=16, parse_math=False)
    return figure


def transfer_map(matrix: Any, rows: Sequence[str], columns: Sequence[str]) -> "Figure":
    """AUROC of what was fitted on one data set (rows) and tested on another (columns).

    Colours run from 0.5 to 1 in every figure, so that figures compare; where a row and
    a column have one name, the cell is framed.

    Args:
      matrix: ``[rows columns]`` in [0, 1]; NaN, where nothing was run, stays white.
      rows: what each row was fitted on.
      columns: what each column was tested on.

    Raises:
      ValueError: when names and matrix differ in number, or a value is outside [0, 1].

    Example:
      >>> figure = transfer_map([[0.9, 0.6]], ["CoQA"], ["CoQA", "SQuAD"])
      >>> [text.get_text() for text in figure.axes[0].texts]
      ['0.90', '0.60']
    """
    matrix = np.asarray(matrix, float)
    if matrix.shape != (len(rows), len(columns)) or not matrix.size:
        raise ValueError(
            f"matrix has shape {list(matrix.shape)} for {len(rows)} rows and "
            f"{len(columns)} columns; give [rows, columns] with a name for each"
        )
    if np.nanmin(matrix, initial=0.5) < 0 or np.nanmax(matrix, initial=0.5) > 1:
        raise ValueError("matrix holds values outside [0, 1]; give AUROC, not per cent")
    height = 1.4 + 0.36 * len(rows) + 0.055 * max(map(len, columns))
    figure, [[ax]] = canvas(2.2 + 0.62 * len(columns), height)
    image = ax.imshow(matrix, cmap="cividis", vmin=0.5, vmax=1, aspect="auto")
    for (row, column), value in np.ndenumerate(matrix):
        if np.isfinite(value):
            ax.text(
                column,
                row,
                f"{value:.2f}",
                ha="center",
                va="center",
                fontsize=SMALL,
                color=_readable_on(image.cmap(image.norm(value))),
            )
        if rows[row] == columns[column]:
            frame(ax, row, column)
    ax.set_xticks(
        range(len(columns)),
        columns,
        rotation=30,
        ha="right",
        rotation_mode="anchor",
        parse_math=False,
    )
    ax.set_yticks(range(len(rows)), rows, parse_math=False)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    label(ax, "tested on", "fitted on")
    bar = figure.colorbar(image, ax=ax)
    bar.set_label("AUROC", fontsize=9, color=INK)
    bar.ax.tick_params(labelsize=SMALL)
    bar.outline.set_visible(False)
    return figure


def _readable_on(colour: tuple[float, ...]) -> str:
    """Black or white, whichever contrasts more (relative luminance of sRGB)."""
    linear = [(c / 12.92 if c < 0.04 else ((c + 0.055) / 1.055) ** 2.4) for c in colour]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "black" if luminance > 0.179 else "white"


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
    total = sum(values) or 1.0
    width = 4.4 + 0.06 * max(map(len, names))
    figure, [[ax]] = canvas(width, 0.7 + 0.26 * len(names))
    ax.barh(range(len(names)), values, height=0.62, color=COLOURS[0])
    for row, value in enumerate(values):
        share = 100 * value / total
        ax.annotate(
            f"{value:.3g} s  ({'< 1' if 0 < share < 1 else f'{share:.0f}'} %)",
            (value, row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=SMALL,
            color=INK,
        )
    ax.set_yticks(range(len(names)), names, parse_math=False)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_xlim(0, 1.35 * max(values) or 1.0)
    ax.tick_params(axis="y", length=0)
    label(ax, f"seconds ({sum(values):.3g} in all)")
    return figure
