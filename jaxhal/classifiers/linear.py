"""Linear probes: L2-regularised logistic regression, one fit or a whole grid.

Features are standardised with the weighted moments of the training rows, as
scikit-learn's ``StandardScaler`` in front of its ``LogisticRegression`` does.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float

from jaxhal.classifiers.data import Values, check, moments, varies
from jaxhal.classifiers.solver import Fold, Point, basis, solve


class Linear(NamedTuple):
    """A linear probe: the logit is ``((x - mean) / std) @ w + b``; a pytree.

    ``w mean std: Float[... width]``, ``b: Float[...]``.  A feature that was constant
    in training has ``std = inf``, so it adds nothing, and ``w = 0``.
    """

    w: Float[Array, "*lead width"]
    b: Float[Array, "*lead"]
    mean: Float[Array, "*lead width"]
    std: Float[Array, "*lead width"]


def fit_linear(
    x: Any, y: Any, weight: Any = None, C: Any = 1.0, *, standardize: bool = True
) -> Linear:
    r"""Logistic regression with an L2 penalty, solved to convergence.

    .. math:: \min_{w, b} \tfrac{1}{2} \|w\|^2 + C \sum_i s_i
      \log\left(1 + e^{-\tilde y_i (w^\top x_i + b)}\right), \quad \tilde y_i = \pm 1

    Args:
      x, y: ``[rows, width]`` features, and ``[rows]`` labels.
      weight: ``[rows]``, :math:`s_i`; 0 leaves a row out, also of the standardisation.
        All one when left out; see :func:`~jaxhal.classifiers.data.balanced`.
      C: strength of the data against the penalty, as in scikit-learn.
      standardize: scale features to unit variance.

    Example:
      >>> probe = fit_linear([[0.0], [1.0], [2.0], [3.0]], [0, 0, 1, 1])
      >>> print(linear_logits(probe, jnp.array([[1.5], [3.0]])).round(2) + 0.0)
      [0.   1.27]
    """
    x = jnp.asarray(x, jnp.float32)[None]  # of which there should be one copy
    if x.ndim != 3:
        raise ValueError(f"features have shape {x.shape[1:]}; pass [rows, width]")
    weight = jnp.ones(x.shape[1]) if weight is None else jnp.asarray(weight)
    grid = fit_grid(x, y, weight[None], [C], standardize=standardize)
    return jax.tree.map(lambda leaf: leaf[0, 0, 0], grid)


def linear_logits(
    params: Linear, x: Float[Values, "*rows width"]
) -> Float[Array, "*rows"]:
    """Logits of one probe; higher = more likely hallucinated."""
    with jax.default_matmul_precision("highest"):
        return ((jnp.asarray(x) - params.mean) / params.std) @ params.w + params.b


def fit_grid(x: Any, y: Any, train: Any, C: Any, *, standardize: bool = True) -> Linear:
    """Every layer, fold and strength at once: one compiled program.

    Each fit is that of :func:`fit_linear`, with its own standardisation.

    Args:
      x, y: ``[layers, rows, width]`` features, and ``[rows]`` labels.
      train: ``[folds, rows]``, weights; 0 leaves a row out of that fold's training.
      C: ``[strengths]``, best in rising or falling order.
    """
    x, y, (train,) = check(x, y, rows_axis=1, train=train)
    if x.ndim != 3 or train.ndim != 2:
        raise ValueError(
            f"features have shape {x.shape} and train {train.shape}; pass "
            "[layers, rows, width] and [folds, rows]"
        )
    C = jnp.asarray(C, jnp.float32)
    if C.ndim != 1 or not len(C):
        raise ValueError(f"C has shape {C.shape}; pass a flat list of strengths")
    if not isinstance(C, Tracer) and not (np.isfinite(C) & (np.asarray(C) > 0)).all():
        raise ValueError(f"C is {C.tolist()}; every strength must be above 0")
    return _fit_grid(x, y, train, C, standardize)


@functools.partial(jax.jit, static_argnames="standardize")
def _fit_grid(
    x: Float[Array, "layers rows width"],
    y: Float[Array, " rows"],
    train: Float[Array, "folds rows"],
    C: Float[Array, " strengths"],
    standardize: bool,
) -> Linear:
    overall = train.mean(0)
    # Neighbouring strengths take a similar number of steps, so pairs waste few of them,
    # and two times the folds is enough columns for fast matrix products.
    pairs = jnp.pad(C, (0, len(C) % 2), mode="edge").reshape(-1, 2)

    def layer(x: Float[Array, "rows width"]) -> Linear:
        # The frame of all folds, in which float32 loses nothing and folds are alike.
        origin, unit = moments(x, overall)
        differs = jax.vmap(lambda weight: varies(x, weight))(train)
        unit = jnp.where(jnp.isfinite(unit) & standardize, unit, 1.0)
        x = (x - origin) / unit
        shared = basis(x, overall)
        mean, std = jax.vmap(lambda weight: moments(x, weight))(train)
        # From the origin, what was rounding is all that there is.
        std = jnp.where(differs, std, jnp.inf) if standardize else jnp.ones_like(std)

        def pair(start: Point, C: Float[Array, " pair"]) -> tuple[Point, Point]:
            def fold(mean, scale, weight, start):
                rows = Fold(x, mean, scale, y, weight)
                return jax.vmap(lambda C: solve(shared, rows, C, start))(C)

            found = jax.vmap(fold)(mean, 1 / std, train, start)
            return jax.tree.map(lambda leaf: leaf[:, -1], found), found

        def flat(a: Float[Array, "pairs folds pair *width"]) -> Array:
            a = jnp.moveaxis(a, 0, 1)
            return a.reshape(len(train), -1, *a.shape[3:])[:, : len(C)]

        start = Point(jnp.zeros_like(mean), jnp.zeros(len(train)))
        w, b = (flat(a) for a in jax.lax.scan(pair, start, pairs)[1])
        mean, std = origin + unit * mean, unit * std
        mean, std = (jnp.broadcast_to(a[:, None], w.shape) for a in (mean, std))
        return Linear(jnp.where(jnp.isfinite(std), w, 0.0), b, mean, std)

    with jax.default_matmul_precision("highest"):
        return jax.lax.map(layer, x)


@jax.jit
def grid_logits(
    params: Linear, x: Float[Values, "layers rows width"]
) -> Float[Array, "layers folds strengths rows"]:
    """Logits of every probe of :func:`fit_grid` on all rows of its layer."""
    with jax.default_matmul_precision("highest"):
        # Centred first: a large mean would eat the digits that tell rows apart.
        centre = params.mean.mean((1, 2))
        w = params.w / params.std
        shift = ((centre[:, None, None] - params.mean) * w).sum(-1) + params.b
        logits = jnp.einsum("lnd,lfsd->lfsn", x - centre[:, None], w)
        return logits + shift[..., None]
