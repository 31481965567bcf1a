r"""L2-regularised logistic regression, solved by preconditioned conjugate gradients.

The Hessian :math:`I + C X^\top D X` has :math:`D_{ii} = p_i (1 - p_i)`.  One number
:math:`\kappa`, the mean of :math:`D`, stands in for it in the preconditioner
:math:`(I + C \kappa X^\top X)^{-1}`.  One eigendecomposition of the rows then serves
every fold, strength and step, since folds share most rows and :math:`C \kappa` only
rescales eigenvalues.  Conjugate gradients after Polak and Ribiere correct the rest.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxhal.classifiers.data import over_columns

# The Newton decrement is the squared distance to the solution in the metric of the
# Hessian, which is at least the identity: relative to the squared weights, and not
# below what float32 can resolve.
_TOLERANCE = 1e-7
_RESOLUTION = 1e-12
_MAX_STEPS = 500
_LEAST_CURVATURE = 1e-6


class Basis(NamedTuple):
    """Eigenvectors of ``X^T X`` with eigenvalues; 0 where float32 cannot tell them."""

    vectors: Float[Array, "width rank"]
    values: Float[Array, " rank"]


class Fold(NamedTuple):
    """Rows in the frame of one fold: features are ``(x - mean) * scale``."""

    x: Float[Array, "rows width"]
    mean: Float[Array, " width"]
    scale: Float[Array, " width"]
    y: Float[Array, " rows"]
    weight: Float[Array, " rows"]


class Point(NamedTuple):
    """Weights and intercept; also a gradient or a direction."""

    w: Float[Array, " width"]
    b: Float[Array, ""]


class _State(NamedTuple):
    step: Int[Array, ""]
    point: Point
    margin: Float[Array, " rows"]
    gradient: Point
    direction: Point
    decrement: Float[Array, ""]


def basis(x: Float[Array, "rows width"], weight: Float[Array, " rows"]) -> Basis:
    """Eigenvectors of ``X^T X`` of weighted rows, found on their shorter side."""
    rows, width = x.shape
    if rows >= width:
        gram = over_columns(lambda some: x.T @ (weight[:, None] * some), x)
        values, vectors = jnp.linalg.eigh(gram)
        return Basis(vectors, jnp.maximum(values, 0.0))
    x = jnp.sqrt(weight)[:, None] * x
    values, vectors = jnp.linalg.eigh(x @ x.T)
    known = values > rows * jnp.finfo(jnp.float32).eps * values[-1]
    scale = jnp.where(known, jax.lax.rsqrt(jnp.where(known, values, 1.0)), 0.0)
    return Basis((x.T @ vectors) * scale, jnp.where(known, values, 0.0))


def _margin(fold: Fold, point: Point) -> Float[Array, " rows"]:
    w = fold.scale * point.w
    return w @ fold.x.T + (point.b - fold.mean @ w)


def _dot(a: Point, b: Point) -> Float[Array, ""]:
    return a.w @ b.w + a.b * b.b


def solve(basis: Basis, fold: Fold, C: Float[Array, ""], start: Point) -> Point:
    r"""Weights and intercept of the least :math:`\|w\|^2/2 + C \sum_i s_i \ell_i`."""
    weight = C * fold.weight
    total = weight.sum()

    def preconditioned(gradient: Point, p: Float[Array, " rows"]) -> Point:
        curvature = jnp.maximum(weight @ (p * (1 - p)) / total, _LEAST_CURVATURE)
        inside = gradient.w @ basis.vectors
        w = (inside / (1 + C * curvature * basis.values)) @ basis.vectors.T
        if basis.vectors.shape[1] < len(gradient.w):
            # Directions no row reaches.  Taken off twice: the rounding error of the
            # first time would outweigh the small steps along large eigenvalues.
            rest = gradient.w - basis.vectors @ inside
            w += rest - basis.vectors @ (rest @ basis.vectors)
        return Point(w, gradient.b / (curvature * total))

    def state(point: Point, margin: Float[Array, " rows"], last: _State | None):
        p = jax.nn.sigmoid(margin)
        residual = weight * (p - fold.y)
        pulled = residual @ fold.x - fold.mean * residual.sum()
        gradient = Point(point.w + fold.scale * pulled, residual.sum())
        descent = preconditioned(gradient, p)
        decrement, beta = _dot(gradient, descent), jnp.zeros(())
        direction = jax.tree.map(jnp.negative, descent)
        if last is not None:
            beta = (decrement - _dot(last.gradient, descent)) / last.decrement
            beta = jnp.maximum(beta, 0.0)
            direction = jax.tree.map(lambda d, p: beta * d - p, last.direction, descent)
        step = jnp.zeros((), int) if last is None else last.step + 1
        return _State(step, point, margin, gradient, direction, decrement)

    def advance(last: _State) -> _State:
        along = _margin(fold, last.direction)
        t = _line_search(fold.y, weight, last, along)
        point = jax.tree.map(lambda a, d: a + t * d, last.point, last.direction)
        return state(point, last.margin + t * along, last)

    def unsolved(state: _State):
        near = _TOLERANCE * state.point.w @ state.point.w + _RESOLUTION * total
        return (state.decrement > near) & (state.step < _MAX_STEPS)

    first = state(start, _margin(fold, start), None)
    return jax.lax.while_loop(unsolved, advance, first).point


def _line_search(
    y: Float[Array, " rows"],
    weight: Float[Array, " rows"],
    state: _State,
    along: Float[Array, " rows"],
) -> Float[Array, ""]:
    """Step of (nearly) the least objective: Newton's method on margins, bracketed."""
    w, d = state.point.w, state.direction.w
    low, high, t = jnp.zeros(()), jnp.inf, jnp.zeros(())
    for _ in range(3):
        p = jax.nn.sigmoid(state.margin + t * along)
        slope = w @ d + t * d @ d + (weight * (p - y)) @ along
        curve = d @ d + (weight * p * (1 - p)) @ along**2
        low, high = jnp.where(slope < 0, t, low), jnp.where(slope < 0, high, t)
        newton = t - slope / curve
        inside = (newton >= low) & (newton <= high)
        t = jnp.where(inside, newton, 0.5 * (low + high))
    return t
