"""What settings may be, said in one line where they are something else."""

import re
from collections.abc import Iterable
from typing import Any

from jaxhal.io.showing import shown

# Bytes of a folder's name; systems allow 255, and what is built beside it has more.
_LONGEST_NAME = 150


def one_of(known: Iterable[Any], /, **settings: object) -> None:
    """Raises ValueError unless settings are among the words that are known.

    >>> one_of(["a", "b"], kind="c")
    Traceback (most recent call last):
    ValueError: kind is 'c'; use one of a, b
    """
    words = [*known]
    for name, value in settings.items():
        if value not in words:
            allowed = ", ".join(map(str, words))
            raise ValueError(f"{name} is {value!r}; use one of {allowed}")


def at_least(least: int, /, **settings: Any) -> None:
    """Raises ValueError on numbers that are too small; ``None`` is none.

    >>> at_least(1, size=0)
    Traceback (most recent call last):
    ValueError: size is 0; give at least 1
    >>> at_least(1, size="3")
    Traceback (most recent call last):
    ValueError: size is '3'; give a number, at least 1
    """
    for name, value in settings.items():
        if isinstance(value, str):
            raise ValueError(f"{name} is {value!r}; give a number, at least {least}")
        if value is not None and not value >= least:
            raise ValueError(f"{name} is {value}; give at least {least}")


def check_name(name: str, key: str = "name") -> None:
    """Raises ValueError unless a name is that of one folder, and of no other place."""
    plain = re.fullmatch(r"[^./\\][^/\\]*", name) and name.isprintable()
    if not plain or name != name.strip() or len(name.encode()) > _LONGEST_NAME:
        raise ValueError(
            f"{key} is {shown(name)!r}; it names one folder: give at most "
            f"{_LONGEST_NAME} bytes without slashes and without a dot first"
        )
