"""How a training went: its loss by step."""

from typing import TYPE_CHECKING, Any

import numpy as np

from jaxhal.plotting.style import COLOURS, canvas, label, legend

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def loss_curve(losses: Any, validation: Any = ()) -> "Figure":
    """Training loss of every step, and validation loss after every epoch.

    Args:
      losses: ``[steps]``, in nats an answer.
      validation: ``[epochs]``, likewise; epochs are equally long and the last ends with
        the last step.  The least is the one that counts.

    Raises:
      ValueError: when a row is not one of finite numbers, there are no steps, or they
        cannot be shared out evenly to the epochs.

    Example:
      >>> loss_curve([0.9, 0.7, 0.6, 0.4], [0.8, 0.7]).axes[0].lines[1].get_xdata()
      array([2, 4])
    """
    losses, validation = np.asarray(losses, float), np.asarray(validation, float)
    for name, values in (("losses", losses), ("validation", validation)):
        if values.ndim != 1 or not np.isfinite(values).all():
            raise ValueError(
                f"{name} of shape {list(values.shape)} must be one row of finite "
                "numbers"
            )
    if not len(losses) or (len(validation) and len(losses) % len(validation)):
        raise ValueError(
            f"{len(losses)} steps do not make {len(validation)} equal epochs; give the "
            "loss of every step"
        )
    figure, [[ax]] = canvas(5.6, 2.8)
    steps = np.arange(1, len(losses) + 1)
    handles = ax.plot(
        steps, losses, color=COLOURS[0], linewidth=1.2, label="training, a step"
    )
    if len(validation):
        ends = np.arange(1, len(validation) + 1) * (len(losses) // len(validation))
        handles += ax.plot(
            ends, validation, "o-", color=COLOURS[1], label="validation, an epoch"
        )
    ax.set_ylim(bottom=0)
    label(ax, "step", "loss, nats an answer")
    legend(figure, handles, "loss")
    return figure
