"""How text that anybody may have written is shown in terminals, errors and tables."""

import unicodedata
from typing import Any

# What names one thing in a line: longer ids and values end in "...".
_LONGEST = 80

# Control and format characters (which reorder what surrounds them), halves of pairs.
_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def printable(text: str, keep: str = "\n\t") -> str:
    r"""Text with what a terminal would obey rather than show spelled out.

    >>> printable("a\x1b[2Jb\u202ec")
    'a\\x1b[2Jb\\u202ec'
    """
    if text.isprintable():
        return text
    return "".join(
        character
        if character in keep or unicodedata.category(character) not in _HIDDEN
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def cut(text: str, longest: int = _LONGEST) -> str:
    """Text of at most ``longest`` characters; what is missing shows as three dots.

    >>> cut("abcdefgh", 6)
    'abc...'
    """
    return text if len(text) <= longest else text[: longest - 3] + "..."


def shown(value: Any) -> str:
    """A value in an error: one short line, whatever it is."""
    text = value if isinstance(value, str) else _spelled(value)
    return cut(printable(cut(text, 4 * _LONGEST), keep=""))


def quoted(value: Any) -> str:
    """A value in an error as Python spells it, so that its edges show."""
    return cut(_spelled(value))


def _spelled(value: Any) -> str:
    try:
        return repr(value)
    except (RecursionError, ValueError):  # endless brackets, endless digits
        return f"a long {type(value).__name__}"
