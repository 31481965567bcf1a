"""How results change with one setting."""

from typing import TYPE_CHECKING, Any

from jaxhal.plotting.style import canvas, label, legend, line_styles

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

_METRICS = ("AUROC", "accuracy")


def sweep_curves(table: "DataFrame", setting: str) -> "Figure":
    """AUROC, with its interval shaded, and accuracy over the values of a setting.

    Controls are grey; they change where the setting changes the data or its split.

    Args:
      table: of :func:`jaxhal.experiments.sweep`.
      setting: the swept key, whose values are numbers.

    Raises:
      ValueError: when the table has no such column, or values that are no numbers.
    """
    if setting not in table:
        raise ValueError(f"the table has no column {setting!r}; sweep that key")
    try:
        at = table[setting].astype(float)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{setting} takes values that are no numbers ({error}); read the table"
        ) from error
    controls = set(table.loc[table["control"], "method"])
    styles = line_styles(list(dict.fromkeys(table["method"])), controls)
    figure, [axes] = canvas(9.6, 3.2, columns=2)
    handles: list[Any] = []
    for ax, metric in zip(axes, _METRICS, strict=True):
        handles = []
        for method, style in styles.items():
            own: Any = table.assign(at=at)[table["method"] == method]
            rows = own.sort_values(by="at")
            x = rows["at"].to_numpy()
            if metric == "AUROC" and method not in controls:
                low, high = rows["low"].to_numpy(float), rows["high"].to_numpy(float)
                ax.fill_between(x, low, high, color=style["color"], alpha=0.12, lw=0)
            y = rows[metric].to_numpy(float)
            mark = {"marker": "o", "markersize": 2.5} if method not in controls else {}
            handles += ax.plot(x, y, label=method, **style, **mark)
        label(ax, setting, metric)
    legend(figure, handles, "")
    return figure
