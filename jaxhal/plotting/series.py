"""Numbers along layers, steps, queries and settings."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxhal.plotting import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


# Queries that are drawn singly.
_LAST = 30


@style.styled
def layer_curve(
    values: Any, low: Any = None, high: Any = None, title: str = ""
) -> "Figure":
    """AUROC by layer, such as that of a probe, with its interval shaded.

    The best layer is marked, and 0.5 is dotted where it is in sight.

    Args:
      values: ``[layers]``; ``low`` and ``high`` likewise, both or none.
    """
    from matplotlib.ticker import MaxNLocator

    values = style.check_array("values", values, "layers")
    if (low is None) != (high is None):
        raise ValueError("only one of 'low' and 'high' is given; give both or none")
    layers = np.arange(len(values))
    figure, [[ax]] = style.canvas(4.6, 2.8)
    if low is not None:
        low, high = np.asarray(low, float), np.asarray(high, float)
        same = low.shape == high.shape == values.shape
        if not same or not (low <= high).all():
            raise ValueError(
                f"low {list(low.shape)} and high {list(high.shape)} must be [layers] "
                f"like the {len(values)} values, and low never above high"
            )
        ax.fill_between(layers, low, high, color=style.COLOURS[0], alpha=0.18, lw=0)
    ax.plot(layers, values, "o-", color=style.COLOURS[0], markersize=3, linewidth=1.4)
    best = int(values.argmax())
    ax.plot(best, values[best], "o", color=style.COLOURS[1], markersize=6)
    right = best > len(values) / 2
    ax.annotate(
        f"layer {best}: {values[best]:.3f}",
        (best, values[best]),
        xytext=(-7 if right else 7, 6),
        textcoords="offset points",
        ha="right" if right else "left",
    )
    ax.margins(y=0.15)
    bottom, top = ax.get_ylim()
    if bottom < 0.5 < top:
        ax.axhline(0.5, **style.REFERENCE)
    ax.xaxis.set_major_locator(MaxNLocator(10, integer=True, min_n_ticks=1))
    ax.set(xlabel="layer", ylabel="AUROC", title=title)
    return figure


@style.styled
def loss_curve(losses: Any, validation: Any = ()) -> "Figure":
    """Training loss of every step, and validation loss after every epoch.

    Epochs are equally long and the last ends with the last step; nats an answer.
    """
    losses = style.check_array("losses", losses, "steps")
    if len(validation):
        validation = style.check_array("validation", validation, "epochs")
    if len(validation) and len(losses) % len(validation):
        raise ValueError(
            f"{len(losses)} steps do not make {len(validation)} equal epochs; give the "
            "loss of every step"
        )
    figure, [[ax]] = style.canvas(5.6, 2.8)
    steps = np.arange(1, len(losses) + 1)
    look: dict[str, Any] = {"color": style.COLOURS[0], "linewidth": 1.2}
    handles = ax.plot(steps, losses, label="training, a step", **look)
    if len(validation):
        ends = np.arange(1, len(validation) + 1) * (len(losses) // len(validation))
        look = {"color": style.COLOURS[1], "label": "validation, an epoch"}
        handles += ax.plot(ends, validation, "o-", **look)
    ax.set_ylim(bottom=0)
    ax.set(xlabel="step", ylabel="loss, nats an answer")
    style.legend(figure, handles, "loss")
    return figure


@style.styled
def sweep_curves(table: "DataFrame", setting: str) -> "Figure":
    """AUROC, with its interval shaded, and accuracy over the values of a setting.

    Controls are grey; they change where the setting changes the data or its split.

    Args:
      table: of :func:`jaxhal.experiments.sweep`.
      setting: the swept key, whose values are numbers.
    """
    if setting not in table:
        raise ValueError(f"the table has no column {setting!r}; sweep that key")
    try:
        table = table.assign(at=table[setting].astype(float)).sort_values("at")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{setting} takes values that are no numbers ({error}); read the table"
        ) from error
    controls = set(table.loc[table["control"], "method"])
    looks = style.line_styles(list(dict.fromkeys(table["method"])), controls)
    figure, [axes] = style.canvas(9.6, 3.2, columns=2)
    for ax, metric in zip(axes, ("AUROC", "accuracy"), strict=True):
        for method, look in looks.items():
            rows: Any = table[table["method"] == method].astype({metric: float})
            mark = {} if method in controls else {"marker": "o", "markersize": 2.5}
            ax.plot(rows["at"], rows[metric], label=method, **look, **mark)
            if metric == "AUROC" and method not in controls:
                ends = rows["low"].astype(float), rows["high"].astype(float)
                band: Any = {"color": look["color"], "alpha": 0.12, "linewidth": 0}
                ax.fill_between(rows["at"], *ends, **band)
        ax.set(xlabel=setting, ylabel=metric)
    style.legend(figure, axes[0].lines)
    return figure


@style.styled
def entropy_trend(entropies: Mapping[str, Sequence[float]]) -> "Figure":
    """Semantic entropy of the queries of explorations, in nats and in the order asked.

    All of them as a moving mean on the left, the last 30 singly on the right.
    What is not known is left out.

    References:
      Liu et al., Towards Mitigation of Hallucination for LLM-empowered Agents, 2025,
      figure 6, for the right part.
    """
    if not entropies:
        raise ValueError("there are no explorations; give at least one")
    figure, [[whole, end]] = style.canvas(9.0, 3.0, columns=2)
    for name, look in style.line_styles(entropies).items():
        known = np.asarray(entropies[name], float)
        known = known[np.isfinite(known)]
        if not len(known):
            raise ValueError(f"exploration {name!r} has no query of a known entropy")
        width = max(1, min(20, len(known) // 3))
        mean = np.convolve(known, np.ones(width) / width, "valid")
        whole.plot(np.arange(width, len(known) + 1), mean, label=name, **look)
        tail = known[-_LAST:]
        at = np.arange(1 - len(tail), 1)
        end.plot(at, tail, marker="o", markersize=2.5, **look)
    whole.set(xlabel="queries", ylabel="entropy, nats (moving mean)")
    whole.set_title("all queries")
    end.set(xlabel="queries before the last", ylabel="entropy, nats")
    end.set_title(f"the last {_LAST}")
    style.legend(figure, whole.lines)
    return figure


@style.styled
def ablations(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> "Figure":
    """AUROC and accuracy of the watchdog over its settings, one part a setting.

    Args:
      tables: by setting, rows with ``"value"``, ``"AUROC"`` and ``"accuracy"``.

    References:
      Liu et al., 2025, figure 7.
    """
    if not tables or not all(tables.values()):
        raise ValueError("tables are empty; give rows for at least one setting")
    figure, [axes] = style.canvas(4.2 * len(tables), 2.8, columns=len(tables))
    for ax, (setting, rows) in zip(axes, tables.items(), strict=True):
        at = [row["value"] for row in rows]
        for metric, look in style.line_styles(("AUROC", "accuracy")).items():
            y = [row[metric] for row in rows]
            ax.plot(at, y, marker="o", markersize=3, label=metric, **look)
        ax.axhline(0.5, **style.REFERENCE)
        ax.set(ylim=(0, 1.02), xlabel=setting)
    style.legend(figure, axes[0].lines[:2])
    return figure
