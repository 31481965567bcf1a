"""Numbers as colours: by layer and head, and of one data set on another."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from jaxtyping import Float

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
) -> "Figure":
    """A layer x head heat map.

    Args:
      values: ``[layer heads]``; both signs get a diverging colour map about 0, as the
        difference of two classes needs.
      title: above the map.
      unit: beside the colour bar.
      ax: where to draw; a new figure by default.
      framed: ``(layer, head)`` to be framed, such as the heads a detector chose.

    Raises:
      ValueError: when ``values`` has not two axes or no numbers, or a framed head is
        none of them.

    Example:
      >>> figure = head_map([[0.1, -0.2], [0.0, 0.3]], framed=[(1, 1)])
      >>> figure.axes[0].images[0].get_clim()
      (-0.3, 0.3)
    """
    from matplotlib.ticker import MaxNLocator

    values = np.asarray(values)
    if values.ndim != 2 or not values.size:
        raise ValueError(
            f"values has shape {list(values.shape)}; give [layer, heads], for example "
            "the mean over the batch"
        )
    layers, heads = values.shape
    for layer, head in framed:
        if not (0 <= layer < layers and 0 <= head < heads):
            raise ValueError(
                f"framed head {(layer, head)} is outside the {layers} layers and "
                f"{heads} heads, which count from 0"
            )
    size = np.clip([2.2 + 0.2 * heads, 1.2 + 0.14 * layers], [3.6, 2.4], [10, 8])
    ax = cast("Axes", ax or style.canvas(*size)[1][0, 0])
    limit = float(np.abs(values).max())
    signed = {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit}
    look: Any = signed if values.min() < 0 < values.max() else {}
    image = ax.imshow(values, **look)
    for layer, head in framed:
        style.frame(ax, layer, head)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(10, integer=True, min_n_ticks=1))
    ax.set(xlabel="head", ylabel="layer", title=title)
    style.colour_bar(image, ax, unit, aspect=30)
    return cast("Figure", ax.figure)


@style.styled
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
