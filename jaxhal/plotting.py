"""Pictures of features; every function draws on an Axes and returns it."""

from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def head_map(
    values: Float[np.ndarray, "layer heads"] | Any,
    title: str = "",
    unit: str = "",
    ax: "Axes | None" = None,
) -> "Axes":
    """A layer x head heat map.

    Args:
      values: ``[layer heads]``; both signs get a diverging colour map about 0.
      title: above the map.
      unit: beside the colour bar.
      ax: where to draw; a new figure by default.

    Raises:
      ValueError: when ``values`` has not two axes.
    """
    import matplotlib.pyplot as plt

    values = np.asarray(values)
    if values.ndim != 2:
        raise ValueError(
            f"values has shape {list(values.shape)}; give [layer, heads], for example "
            "the mean over the batch"
        )
    if ax is None:
        layers, heads = values.shape
        size = (2.4 + 0.24 * heads, 1.4 + 0.14 * layers)
        _, ax = plt.subplots(figsize=size, layout="constrained")
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
    ax.set(xlabel="head", ylabel="layer", title=title)
    ax.figure.colorbar(image, ax=ax, label=unit)
    return ax
