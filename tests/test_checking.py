"""Annotations are checked, those of jaxhal too, at every call."""

from typing import Any

import jax.numpy as jnp
import pytest
from checking import beartyped
from jaxtyping import Array, Float, TypeCheckError, jaxtyped

from jaxhal.classifiers.solver import basis


@jaxtyped(typechecker=beartyped)
def rows(
    x: Float[Array, "rows width"], out: Any, *, scale: int = 1
) -> Float[Array, " rows"]:
    return out


@jaxtyped(typechecker=beartyped)
def nothing(out: Any) -> None:
    return out


@pytest.mark.parametrize("time", ["first", "second"])
def test_parameters_and_results(time):
    x = jnp.ones((2, 3))
    assert rows(x, x[:, 0], scale=2) is not None and nothing(None) is None
    with pytest.raises(TypeCheckError, match="the parameters of .*rows"):
        rows(x[0], x[:, 0])
    with pytest.raises(TypeCheckError, match="the parameters of .*rows"):
        rows(x, x[:, 0], scale="1")
    with pytest.raises(TypeCheckError, match="the return value of .*rows"):
        rows(x, x[0])  # of the length of another axis
    with pytest.raises(TypeCheckError, match="the return value of .*nothing"):
        nothing(1)


def test_the_package_is_checked():
    with pytest.raises(TypeCheckError, match="the parameters of .*solver.basis"):
        basis(jnp.ones(3), jnp.ones(3))
