"""Markdown that holds text which anybody may have written."""

import re
import urllib.parse
from collections.abc import Iterable, Sequence

from jaxhal.io.extras import brought_by
from jaxhal.io.showing import printable

# What could be markup, in CommonMark or on GitHub: in a line, and where it begins.
_MARKUP = re.compile(
    r"[\\`*\[\]<&|~$]"
    r"|(?<![^\W_])_|_(?![^\W_])"  # inside a word it is no emphasis
    r"|:(?=//)|(?<=www)\."  # addresses become links by themselves
    r"|^[-+](?!\d)|^[=>]|(?<!\S)#",
    re.IGNORECASE,
)
_NUMBERED = re.compile(r"^(\d+)([.)])(?!\S)")


class Markdown(str):
    """Text that is Markdown already; any other is data, see :func:`table`."""


def escaped(text: str) -> Markdown:
    r"""Text as one line of Markdown that shows it and nothing else.

    White space becomes single spaces; what a terminal would obey is spelled out.

    >>> print(escaped("<img src=x>\n*a* | [b](javascript:c)"))
    \<img src=x> \*a\* \| \[b\](javascript:c)
    """
    line = printable(" ".join(text.split()), keep="")
    return Markdown(_NUMBERED.sub(r"\1\\\2", _MARKUP.sub(r"\\\g<0>", line)))


def measured(value: float, low: float, high: float) -> Markdown:
    """A number and its interval.

    >>> print(measured(0.5, 0.25, 1.0))
    0.500 [0.25, 1.00]
    """
    return Markdown(f"{value:.3f} [{low:.2f}, {high:.2f}]")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells that are not :class:`Markdown` are escaped.

    >>> print(table(["a"], [["b|c"]]))
    | a |
    | --- |
    | b\\|c |
    """
    lines = [head, [Markdown("---")] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, cells))} |" for cells in lines)


def _cell(text: str) -> str:
    return text if isinstance(text, Markdown) else escaped(text)


def picture(name: str) -> str:
    """A link to the picture ``<name>.png`` that stands beside the text.

    >>> print(picture("a b"))
    ![a b](a%20b.png)
    """
    return f"![{escaped(name)}]({urllib.parse.quote(name, safe='')}.png)"


def rendered(text: str) -> str:
    """Markdown as HTML: raw HTML in it is text, and nothing is a link or a picture."""
    with brought_by("experiments"):
        from markdown_it import MarkdownIt

    reader = MarkdownIt("commonmark", {"html": False}).enable("table")
    return reader.disable(["autolink", "image", "link", "reference"]).render(text)
