"""Where in the model something happens: by layer and head, and by layer."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from jaxtyping import Float

from jaxhal.plotting.style import COLOURS, GREY, INK, SMALL, canvas, frame, label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
    if ax is None:
        width, height = 2.2 + 0.2 * heads, 1.2 + 0.14 * layers
        _, [[own]] = canvas(*np.clip([width, height], [3.6, 2.4], [10, 8]))
        return head_map(values, title, unit, own, framed)
    signed = values.min() < 0 < values.max()
    limit = float(np.abs(values).max())
    limits: dict[str, Any] = {"vmin": -limit, "vmax": limit} if signed else {}
    image = ax.imshow(
        values,
        aspect="auto",
        cmap="RdBu_r" if signed else "viridis",
        interpolation="nearest",
        **limits,
    )
    for layer, head in framed:
        frame(ax, layer, head)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(10, integer=True, min_n_ticks=1))
    label(ax, "head", "layer", title)
    bar = ax.figure.colorbar(image, ax=ax, aspect=30)
    bar.set_label(unit, fontsize=9, color=INK)
    bar.ax.tick_params(labelsize=SMALL)
    bar.outline.set_visible(False)
    return cast("Figure", ax.figure)


def layer_curve(
    values: Any,
    low: Any = None,
    high: Any = None,
    title: str = "",
    ylabel: str = "AUROC",
) -> "Figure":
    """A number by layer, such as the AUROC of a probe, with its interval shaded.

    The best layer is marked, and 0.5 is dotted where it is in sight.

    Args:
      values: ``[layers]``.
      low: ``[layers]``, lower end of each interval; give both ends or none.
      high: ``[layers]``, upper end.
      title: above the axes.
      ylabel: what the numbers are.

    Raises:
      ValueError: on anything but one row of finite numbers, or on ends of another
        length or upside down.

    Example:
      >>> layer_curve([0.5, 0.7, 0.6]).axes[0].texts[0].get_text()
      'layer 1: 0.700'
    """
    from matplotlib.ticker import MaxNLocator

    values = np.asarray(values, float)
    if values.ndim != 1 or not values.size or not np.isfinite(values).all():
        raise ValueError(
            f"values of shape {list(values.shape)} must be one row of finite numbers, "
            "[layers]"
        )
    if (low is None) != (high is None):
        raise ValueError("only one of 'low' and 'high' is given; give both or none")
    layers = np.arange(len(values))
    figure, [[ax]] = canvas(4.6, 2.8)
    if low is not None:
        low, high = np.asarray(low, float), np.asarray(high, float)
        same = low.shape == high.shape == values.shape
        if not same or not (low <= high).all():
            raise ValueError(
                f"low {list(low.shape)} and high {list(high.shape)} must be [layers] "
                f"like the {len(values)} values, and low never above high"
            )
        ax.fill_between(layers, low, high, color=COLOURS[0], alpha=0.18, lw=0)
    ax.plot(layers, values, "o-", color=COLOURS[0], markersize=3, linewidth=1.4)
    best = int(values.argmax())
    ax.plot(best, values[best], "o", color=COLOURS[1], markersize=6)
    right = best > len(values) / 2
    ax.annotate(
        f"layer {best}: {values[best]:.3f}",
        (best, values[best]),
        xytext=(-7 if right else 7, 6),
        textcoords="offset points",
        ha="right" if right else "left",
        fontsize=SMALL,
        color=INK,
    )
    ax.margins(y=0.15)
    bottom, top = ax.get_ylim()
    if bottom < 0.5 < top:
        ax.axhline(0.5, color=GREY, linewidth=0.8, linestyle=":", zorder=1)
    ax.xaxis.set_major_locator(MaxNLocator(10, integer=True, min_n_ticks=1))
    label(ax, "layer", ylabel, title)
    return figure
