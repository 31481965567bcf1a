"""What settings may be, said in one line where they are something else."""

import numbers
import re
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal

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


def of_kind(annotation: Any, /, **settings: object) -> None:
    """Raises ValueError where an annotation is of words, bool or int and they are not.

    ``None`` is one where it says so.  Of other annotations nothing is known.

    >>> of_kind(int | None, window=2.5)
    Traceback (most recent call last):
    ValueError: window is 2.5; give a whole number
    >>> of_kind(bool, whole="no")
    Traceback (most recent call last):
    ValueError: whole is 'no'; give true or false
    """
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    kinds = typing.get_args(annotation) if union else (annotation,)
    for name, value in settings.items():
        if value is None and types.NoneType in kinds:
            continue
        match [kind for kind in kinds if kind is not types.NoneType]:
            case [kind] if typing.get_origin(kind) is Literal:
                one_of(typing.get_args(kind), **{name: value})
            case [kind] if kind is bool and type(value) is not bool:
                raise ValueError(f"{name} is {value!r}; give true or false")
            case [kind] if kind is int:
                if isinstance(value, bool) or not isinstance(value, numbers.Integral):
                    raise ValueError(f"{name} is {value!r}; give a whole number")


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
