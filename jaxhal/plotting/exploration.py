"""How an exploration went, and what its settings do to the watchdog."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxhal.plotting.style import GREY, canvas, label, legend, line_styles

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def entropy_trend(entropies: Mapping[str, Sequence[float]], last: int = 30) -> "Figure":
    """Semantic entropy of the queries of explorations, in the order they were asked.

    All of them as a moving mean on the left, the last ones singly on the right.

    Args:
      entropies: by exploration, in nats; what is not known is left out.
      last: how many the right part shows.

    Raises:
      ValueError: when there is no exploration, or one without a known entropy.

    References:
      Liu et al., Towards Mitigation of Hallucination for LLM-empowered Agents, 2025,
      figure 6, for the right part.
    """
    if not entropies:
        raise ValueError("there are no explorations; give at least one")
    figure, [[whole, end]] = canvas(9.0, 3.0, columns=2)
    styles, handles = line_styles(list(entropies), ()), []
    for name, values in entropies.items():
        known = np.asarray(values, float)
        known = known[np.isfinite(known)]
        if not len(known):
            raise ValueError(f"exploration {name!r} has no query of a known entropy")
        width = max(1, min(20, len(known) // 3))
        mean = np.convolve(known, np.ones(width) / width, "valid")
        handles += whole.plot(
            np.arange(width, len(known) + 1), mean, label=name, **styles[name]
        )
        tail = known[-last:]
        at = np.arange(1 - len(tail), 1)
        end.plot(at, tail, marker="o", markersize=2.5, **styles[name])
    label(whole, "queries", "entropy, nats (moving mean)", "all queries")
    label(end, "queries before the last", "entropy, nats", f"the last {last}")
    legend(figure, handles, "")
    return figure


def ablations(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> "Figure":
    """AUROC and accuracy of the watchdog over its settings, one part a setting.

    Args:
      tables: by setting, rows with its ``"value"``, ``"AUROC"`` and ``"accuracy"``;
        not a number where it is not known.

    Raises:
      ValueError: when there is no setting, or one without rows.

    References:
      Liu et al., 2025, figure 7.
    """
    if not tables or not all(tables.values()):
        raise ValueError("tables are empty; give rows for at least one setting")
    figure, [axes] = canvas(4.2 * len(tables), 2.8, columns=len(tables))
    styles, handles = line_styles(("AUROC", "accuracy"), ()), []
    for ax, (setting, rows) in zip(axes, tables.items(), strict=True):
        handles = []
        for metric, style in styles.items():
            x = [row["value"] for row in rows]
            y = [row[metric] for row in rows]
            handles += ax.plot(x, y, marker="o", markersize=3, label=metric, **style)
        ax.axhline(0.5, color=GREY, linewidth=0.8, linestyle=":")
        ax.set_ylim(0, 1.02)
        label(ax, setting, "")
    legend(figure, handles, "")
    return figure
