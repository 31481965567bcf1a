"""The minimum spanning forest that MTop-Div weighs, drawn edge by edge."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxhal.plotting import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import PathPatch

_ROW = 0.17  # inches
_LONGEST = 20  # characters of a token
_MOST = 400  # response tokens on a readable page
_ROUNDING = 1e-3  # of attention in half precision
_FAINTEST = 0.1  # opacity of an edge without attention


@style.styled
def forest_drawing(
    parents: Any,
    weights: Any,
    tokens: Sequence[str],
    prompt_length: int,
    hallucinated: Any = None,
    title: str = "",
) -> "Figure":
    """The forest of one head: prompt on the left, response on the right.

    An edge is as opaque as the attention along it; between response tokens it is an
    arc.  Edges and tokens of hallucinated tokens are vermilion, others blue.  Of the
    prompt only tokens with an edge are named, the rest is counted.

    Args:
      parents: ``[response]`` of :func:`jaxhal.features.forest.forest`, columns of
        ``tokens``.
      weights: ``[response]``, ``1 - attention`` along each edge.
      tokens: text of every token, prompt first, without padding; may be empty.
      prompt_length: how many of them are prompt.
      hallucinated: ``[response]``, True for tokens marked as hallucinated.

    References:
      Bazarova et al., 2025, Figure 5.
    """
    parents, weights = np.asarray(parents), np.asarray(weights, float)
    marked = np.zeros(len(parents)) if hallucinated is None else hallucinated
    marked = np.asarray(marked).astype(bool)
    given = {"parents": parents, "weights": weights, "hallucinated": marked}
    _check(given, len(tokens), prompt_length)
    height, gaps, rows = _layout(parents.tolist(), len(tokens), prompt_length)
    inches = 0.7 + _ROW * rows
    figure, [[ax]] = style.canvas(np.clip(inches / 4, 5, 9), inches)
    _text(ax, 0, -1.2, "prompt", style.GREY)
    _text(ax, 1, -1.2, "response", style.GREY)
    for column, y in height.items():
        if column in gaps:
            words = f"… {gaps[column]} token{'s' * (gaps[column] > 1)}"
            _text(ax, 0, y, words, style.GREY)
            continue
        row, colour = column - prompt_length, style.INK
        if row >= 0:
            colour = style.HALLUCINATED if marked[row] else style.GROUNDED
        _text(ax, int(row >= 0), y, _shown(tokens[column]), colour)
        ax.plot(int(row >= 0), y, "o", color=colour, markersize=3)
        if row >= 0:
            parent = int(parents[row])
            edge = _edge(y, height[parent], parent < prompt_length, rows)
            attention = float(np.clip(1 - weights[row], _FAINTEST, 1))
            edge.set(edgecolor=colour, alpha=attention, zorder=1 + 0.1 * marked[row])
            ax.add_patch(edge)
    ax.set(xlim=(-0.04, 1.04), ylim=(rows - 0.3, -1.8))
    ax.axis("off")
    ax.set_title(title)
    _legend(figure, bool(marked.any()))
    return figure


def _check(given: Mapping[str, np.ndarray], length: int, prompt_length: int) -> None:
    count = length - prompt_length
    if not 1 <= prompt_length < length:
        raise ValueError(
            f"prompt_length is {prompt_length} but there are {length} tokens; give the "
            "texts of prompt and response, at least one token each"
        )
    for name, array in given.items():
        if array.shape != (count,):
            raise ValueError(
                f"{name} has shape {list(array.shape)} but the response has {count} "
                f"tokens; give [response] of one head"
            )
    if count > _MOST:
        raise ValueError(
            f"the response has {count} tokens, more than the {_MOST} that can be read "
            "on a page; draw a shorter answer"
        )
    parents, weights = given["parents"], given["weights"]
    own = prompt_length + np.arange(count)
    bad = (parents < 0) | (parents >= length) | (parents == own)
    if bad.any():
        row = int(np.argmax(bad))
        raise ValueError(
            f"parents[{row}] is {parents[row]}; parents are columns of the {length} "
            "tokens and never the token itself, so leave padding out and count columns "
            "from the first real token"
        )
    if not ((weights > -_ROUNDING) & (weights < 1 + _ROUNDING)).all():
        raise ValueError(
            f"weights span [{weights.min():g}, {weights.max():g}]; an edge weighs "
            "1 - attention, in [0, 1]"
        )


def _layout(
    parents: list[int], length: int, prompt_length: int
) -> tuple[dict[int, float], dict[int, int], int]:
    """Height of each column to be drawn, gaps in the prompt, and rows of the page.

    A gap, by the column it starts at, is how many prompt tokens have no edge there.
    """
    named = sorted({parent for parent in parents if parent < prompt_length})
    gaps, start = {}, 0
    for column in [*named, prompt_length]:
        if column > start:
            gaps[start] = column - start
        start = column + 1
    left, right = sorted([*named, *gaps]), range(prompt_length, length)
    rows = max(len(left), len(right))
    height = {}
    for side in (left, right):
        top = 0.0 if len(side) > 1 else (rows - 1) / 2
        places = np.linspace(top, rows - 1 - top, len(side))
        height |= dict(zip(side, places.tolist(), strict=True))
    return height, gaps, rows


def _shown(token: str) -> str:
    """A token on one line, in characters the font has."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    known = get_font(findfont(FontProperties())).get_charmap()
    text = token.replace("\n", "↵").replace("\t", "⇥").strip()
    text = text or ("␣" if token else "")  # white space alone, or no text at all
    text = "".join(c if ord(c) in known else "□" for c in text)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _text(ax: "Axes", side: int, y: float, text: str, colour: str) -> None:
    x, align = (1.025, "left") if side else (-0.025, "right")
    ax.text(x, y, text, ha=align, va="center", color=colour)


def _edge(own: float, parent: float, straight: bool, rows: int) -> "PathPatch":
    """A line to the prompt, or an arc that bulges the more the farther it goes."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    if straight:
        path = Path([(1, own), (0, parent)])
    else:
        bulge = 0.92 - 0.45 * abs(own - parent) / rows
        path = Path(
            [(1, own), (bulge, own), (bulge, parent), (1, parent)],
            [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4],
        )
    return PathPatch(path, fill=False, capstyle="round", linewidth=1.2)


def _legend(figure: "Figure", marked: bool) -> None:
    from matplotlib.lines import Line2D

    # A wrong answer whose place nobody marked has no marked token either.
    kinds = [("not marked", style.GROUNDED)]
    kinds += [("marked as hallucinated", style.HALLUCINATED)] if marked else []
    look: Any = {"marker": "o", "markersize": 3}
    handles = [Line2D([], [], color=each, label=name, **look) for name, each in kinds]
    title = "opacity: attention along the edge"
    figure.legend(handles=handles, loc="outside upper center", ncols=2, title=title)
