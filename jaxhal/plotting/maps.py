"""Numbers as colours by layer and head and by data set, and where relevance differs."""

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from jaxtyping import Bool, Float

from jaxhal.evaluation.checks import group_codes, two_kinds
from jaxhal.evaluation.intervals import mean_interval
from jaxhal.plotting import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@style.styled
def head_map(
    values: Float[np.ndarray, "layer heads"] | Any,
    title: str = "",
    unit: str = "",
    ax: "Axes | None" = None,
    framed: Collection[tuple[int, int]] = (),
    layers: Sequence[int] = (),
) -> "Figure":
    """A layer x head heat map.

    Args:
      values: both signs get a diverging colour map about 0.
      unit: beside the colour bar.
      ax: where to draw; a new figure by default.
      framed: ``(row, head)`` to be framed, such as the heads a detector chose.
      layers: what the rows are called, by default 0 and on.
    """
    from matplotlib.ticker import MaxNLocator

    values = np.asarray(values)
    if values.ndim != 2 or not values.size:
        raise ValueError(
            f"values has shape {list(values.shape)}; give [layer, heads], for example "
            "the mean over the batch"
        )
    if not np.isfinite(values).all():
        layer, head = np.argwhere(~np.isfinite(values))[0].tolist()
        raise ValueError(
            f"values[{layer}, {head}] is {values[layer, head]}; every number must be "
            "finite"
        )
    rows, heads = values.shape
    for layer, head in framed:
        if not (0 <= layer < rows and 0 <= head < heads):
            raise ValueError(
                f"framed head {(layer, head)} is outside the {rows} layers and "
                f"{heads} heads, which count from 0"
            )
    size = np.clip([2.2 + 0.2 * heads, 1.2 + 0.14 * rows], [3.6, 2.4], [10, 8])
    ax = cast("Axes", ax or style.canvas(*size)[1][0, 0])
    limit = float(np.abs(values).max())
    signed = {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit}
    look: Any = signed if values.min() < 0 < values.max() else {}
    image = ax.imshow(values, **look)
    for layer, head in framed:
        style.frame(ax, layer, head)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(10, integer=True, min_n_ticks=1))
    if tuple(layers) != tuple(range(len(layers))):
        ax.set_yticks(range(rows), [*map(str, layers)])
    ax.set(xlabel="head", ylabel="layer", title=title)
    style.colour_bar(image, ax, unit, aspect=30)
    return cast("Figure", ax.figure)


@style.styled
def transfer_map(matrix: Any, rows: Sequence[str], columns: Sequence[str]) -> "Figure":
    """AUROC of what was fitted on one data set (rows) and tested on another (columns).

    Colours run from 0.5 to 1 in every figure, so that figures compare; where a row and
    a column have one name, the cell is framed.  NaN, where nothing was run, stays
    white.
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
    figure, [[ax]] = style.canvas(2.2 + 0.62 * len(columns), height)
    image = ax.imshow(matrix, cmap="cividis", vmin=0.5, vmax=1)
    for (row, column), value in np.ndenumerate(matrix):
        if np.isfinite(value):
            # Black and white stand out equally from this map's colour of 0.735.
            colour = "white" if value < 0.735 else "black"
            middle: Any = {"ha": "center", "va": "center", "color": colour}
            ax.text(column, row, f"{value:.2f}", **middle)
        if rows[row] == columns[column]:
            style.frame(ax, row, column)
    turned: Any = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
    ax.set_xticks(range(len(columns)), columns, **turned)
    ax.set_yticks(range(len(rows)), rows)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set(xlabel="tested on", ylabel="fitted on")
    style.colour_bar(image, ax, "AUROC")
    return figure


@style.styled
def relevance_boxes(values: Mapping[str, Any], labels: Any) -> "Figure":
    """A panel a quantity: its median, quartiles and reach in both classes.

    Whiskers end at the last answer within 1.5 times the height of the box; how many lie
    beyond, which are not drawn, stands below.

    Args:
      values: by quantity, named with its unit, ``[answers]``.

    References:
      Hu et al., `LRP4RAG <https://arxiv.org/abs/2408.15533>`_, 2024, figure 2.
    """
    from matplotlib.cbook import boxplot_stats

    checked, positive = style.check_scores(values, labels)
    figure, axes = style.panels(
        checked, 2, lambda wide, high: (0.4 + 2.8 * wide, 0.2 + 2.5 * high)
    )
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    for ax, (name, value) in zip(axes.flat, checked.items(), strict=False):
        for at, (kind, colour) in enumerate(style.KINDS):
            [box] = boxplot_stats(value[positive == at])
            answers, hidden = (positive == at).sum(), len(box["fliers"])
            box["label"] = f"{kind}\n{answers} answers\n{hidden} not drawn"
            line = {"color": colour}
            look: Any = {"boxprops": {"facecolor": (colour, 0.25), "edgecolor": colour}}
            look |= {"medianprops": line | {"linewidth": 1.8}, "patch_artist": True}
            look |= {"whiskerprops": line, "capprops": line, "showfliers": False}
            ax.bxp([box], [at + 1], widths=0.5, **look)
        ax.tick_params(axis="x", length=0)
        ax.grid(axis="y", color=style.PALE, linewidth=0.5)
        ax.locator_params(axis="y", nbins=6)
        ax.set_ylabel(name)
    return figure


@style.styled
def relevance_lines(
    profiles: Mapping[str, Any],
    labels: Any,
    groups: Collection[Hashable] | None = None,
    unit: str = "",
) -> "Figure":
    """A panel a profile: its mean over the answers of each class, 95 % interval shaded.

    Where a few bins lie far off all others, as the prompt's first may, they leave the
    axes, which say how far they go.

    Args:
      profiles: by name, ``[answers, bins]``, relevance resampled to one length.
      groups: the source of each answer, to be drawn whole by the bootstrap.

    References:
      Hu et al., 2024, figure 3.
    """
    from matplotlib.patches import Patch

    positive = two_kinds(labels)
    if not profiles:
        raise ValueError("profiles are empty; give at least one by its name")
    group = group_codes(groups, len(positive))
    checked = {n: _check(n, given, positive, "bins") for n, given in profiles.items()}
    width = max(4.8, 0.6 + 3.2 * len(checked))
    figure, [axes] = style.canvas(width, 2.9, columns=len(checked))
    for ax, (name, values) in zip(axes, checked.items(), strict=True):
        ends = []
        where = (np.arange(values.shape[1]) + 0.5) * 100 / values.shape[1]
        for kind, (_, colour) in enumerate(style.KINDS):
            some = positive == kind
            low, high = mean_interval(values[some], group[some])
            ax.fill_between(where, low, high, color=colour, alpha=0.2, lw=0)
            ax.plot(where, values[some].mean(0), color=colour, linewidth=1.3)
            ends += [low, high]
        _limit(ax, where, np.stack(ends))
        ax.axhline(0, **style.REFERENCE)
        ax.set(xlim=(0, 100), title=name)
    axes[0].set_ylabel(_of(unit))
    figure.supxlabel("position, % of tokens")
    handles = [*axes[0].lines[:2], Patch(color=style.GREY, alpha=0.3, linewidth=0)]
    names = [*style.counted(positive), "95 % interval"]
    figure.legend(handles, names, loc="outside upper center", ncols=3)
    return figure


def _limit(
    ax: "Axes",
    where: Float[np.ndarray, " bins"],
    ends: Float[np.ndarray, "ends bins"],
) -> None:
    """Cuts extreme bins where they would flatten all others."""
    low, high = np.percentile(ends, [2, 98])
    room = 2 * (high - low)
    some = ends[(low - room <= ends) & (ends <= high + room)]
    pad = 0.08 * np.ptp(some)
    if some.size < ends.size:
        ax.set_ylim(some.min() - pad, some.max() + pad)
    for top, place in ((1, ends.argmax()), (0, ends.argmin())):
        far, at = ends.flat[place], where[place % len(where)]
        if not some.min() <= far <= some.max():
            right = at > 50
            ax.annotate(
                f"{'up' if top else 'down'} to {far:.2g}",
                (at, top),
                xycoords=("data", "axes fraction"),
                xytext=(-5 if right else 5, -2 if top else 2),
                textcoords="offset points",
                ha="right" if right else "left",
                va="top" if top else "bottom",
            )


@style.styled
def relevance_maps(maps: Any, labels: Any, unit: str = "") -> "Figure":
    """Mean relevance of prompt to response, grounded and hallucinated side by side.

    Both have one scale, centred on 0.  It ends at the largest size, or at twice their
    90th percentile, so that a few bins do not bleach all others; the colour bar is
    pointed where any lie beyond.

    Args:
      maps: ``[answers, response, prompt]``, relevance in bins.

    References:
      Hu et al., 2024, figure 4.
    """
    positive = two_kinds(labels)
    values = _check("maps", maps, positive, "response", "prompt")
    means = np.stack([values[positive == kind].mean(0) for kind in (0, 1)])
    sizes = np.abs(means)
    limit = min(sizes.max(), 2 * np.percentile(sizes, 90)) or sizes.max()
    figure, [axes] = style.canvas(7.0, 3.2, 1, 2)
    look: Any = {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit}
    for ax, mean, title in zip(axes, means, style.counted(positive), strict=True):
        ax.imshow(mean, extent=(0, 100, 100, 0), **look)
        ax.set(xlabel="position in prompt, %", title=title)
    axes[0].set_ylabel("position in response, %")
    beyond = {(False, False): "neither", (True, False): "min", (False, True): "max"}
    extend = beyond.get((means.min() < -limit, means.max() > limit), "both")
    style.colour_bar(axes[1].images[0], list(axes), _of(unit), aspect=30, extend=extend)
    return figure


def _of(unit: str) -> str:
    return f"mean relevance ({unit})" if unit else "mean relevance"


def _check(
    name: str, given: Any, positive: Bool[np.ndarray, " rows"], *axes: str
) -> Float[np.ndarray, "rows *axes"]:
    values = style.check_array(name, given, "answers", *axes)
    if len(values) != len(positive):
        raise ValueError(
            f"{name} holds {len(values)} answers for {len(positive)} labels; give one "
            "label per answer"
        )
    return values
