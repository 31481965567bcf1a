"""Annotations under test: of parameters before a call, of its result after it."""

import functools
from typing import Any

from beartype import beartype

_checked: dict[Any, Any] = {}


def beartyped(stub: Any) -> Any:
    """One of the two stubs that jaxtyping calls beside a function, made at first use.

    The first one has the parameters, the second one these and the result: there the
    result is checked alone, against the axes that the first one has bound.  Functions
    that others define at each call are checked by what was made at the first.
    """

    @functools.cache
    def made() -> Any:
        hints = {n: h for n, h in stub.__annotations__.items() if h is not Any}
        if "return" in hints:
            hints = {"return": hints["return"]}
        about = stub.__module__, stub.__qualname__, stub.__code__, str(hints)
        if about not in _checked:
            stub.__annotations__ = hints
            _checked[about] = beartype(stub)
        return _checked[about]

    return lambda *values, **named: made()(*values, **named)
