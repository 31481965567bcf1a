"""Cases beyond one of each kind, which ``pytest -m ""`` runs too."""

from typing import Any

import pytest

mark = pytest.mark.thorough


def more(*cases: Any) -> list[Any]:
    """Parameters of tests, each a value or several; the marker keeps them out."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
        for case in cases
    ]
