"""Labelled rows with weights: checks before tracing, class weights, moments."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

Values = Array | np.ndarray  # what fitted probes are applied to

# A spread this far below the mean is rounding: the feature is constant.
_CONSTANT = 1e-6
# Features that are looked at together, where there are many.
_COLUMNS = 256


def check(
    x: Any, y: Any, rows_axis: int = 0, **weights: Any
) -> tuple[Float[Array, "..."], Float[Array, " rows"], list[Any]]:
    """Float32 features, labels (0 or 1) and weights that a probe can be trained on.

    Rows are on ``rows_axis`` of ``x`` and last in weights, of which ``None`` stays.

    Raises:
      ValueError: when shapes do not pair up, a label is not 0 or 1, a feature or a
        weight is not finite, a weight is negative, or weights leave a class without
        rows.  Values of tracers are not looked at.
    """
    x, y = jnp.asarray(x, jnp.float32), jnp.asarray(y)
    if x.ndim <= rows_axis or y.ndim != 1 or x.shape[rows_axis] != len(y):
        raise ValueError(
            f"features of shape {x.shape} and labels of shape {y.shape} do not pair "
            f"up; give one label per row of axis {rows_axis}"
        )
    _check_finite(x)
    if not isinstance(y, Tracer) and not (known := np.isin(y, (0, 1))).all():
        row = int(np.argmin(known))
        raise ValueError(f"labels[{row}] is {y[row]}; use 0 or 1")
    checked = [
        None if value is None else _check_weight(name, value, y)
        for name, value in weights.items()
    ]
    return x, y.astype(jnp.float32), checked


def check_series(
    x: Any, valid: Any, y: Any, train: Any, stop: Any
) -> tuple[Float[Array, "rows steps width"], Bool[Array, "rows steps"], Any, Any, Any]:
    """Checked features of a series a row, with its mask, labels and two weights.

    Padding, which may hold anything, becomes 0.  ValueError as :func:`check`, and when
    no row to train on has a step.
    """
    x, valid = jnp.asarray(x, jnp.float32), jnp.asarray(valid, bool)
    if x.ndim != 3 or x.shape[:2] != valid.shape:
        raise ValueError(
            f"features have shape {x.shape} and valid {valid.shape}; pass "
            "[rows, steps, width] and [rows, steps]"
        )
    x = jnp.where(valid[..., None], x, 0.0)
    x, y, (train, stop) = check(x, y, train=train, stop=stop)
    steps = (train > 0) @ valid.astype(jnp.float32)
    if not isinstance(steps, Tracer) and not steps.any():
        raise ValueError("valid marks no step of a training row; mark its tokens")
    return x, valid, y, train, stop


def check_tokens(
    x: Any, row: Any, y: Any, train: Any, stop: Any
) -> tuple[Float[Array, "tokens width"], Int[Array, " tokens"], Any, Any, Any]:
    """Checked features of tokens, whose each is, and labels and two weights of rows.

    ValueError as :func:`check`, and when rows do not rise from 0 to the number of
    labels, or no row to train on has a token.
    """
    x, row, y = jnp.asarray(x, jnp.float32), jnp.asarray(row), jnp.asarray(y)
    if x.ndim != 2 or row.shape != x.shape[:1]:
        raise ValueError(
            f"features of shape {x.shape} and row of shape {row.shape} do not pair up; "
            "pass [tokens, width] and [tokens]"
        )
    if not isinstance(row, Tracer):
        within = not len(row) or (0 <= int(row[0]) and int(row[-1]) < len(y))
        if not within or (np.diff(row) < 0).any():
            raise ValueError(
                f"row must rise from 0 to below the {len(y)} labels; give the tokens "
                "of one row after those of another"
            )
    _, y, (train, stop) = check(y[:, None], y, train=train, stop=stop)
    _check_finite(x)
    if not isinstance(row, Tracer) and not (train[row] > 0).any():
        raise ValueError("row names no row to train on; give its tokens")
    return x, row, y, train, stop


def _check_finite(x: Float[Array, "..."]) -> None:
    # Where they lie: a device may be far, and they are many.
    if not isinstance(x, Tracer) and not _all_finite(x):
        where = np.argwhere(~np.isfinite(x))[0].tolist()
        raise ValueError(f"features{where} is not finite; drop that row or feature")


@jax.jit
def _all_finite(x: Array) -> Array:
    return jnp.isfinite(x).all()


def _check_weight(name: str, weight: Any, y: Array) -> Float[Array, "..."]:
    weight = jnp.asarray(weight, jnp.float32)
    if weight.ndim < 1 or weight.shape[-1] != len(y):
        raise ValueError(
            f"{name} has shape {weight.shape} for {len(y)} rows; give one per row"
        )
    if isinstance(weight, Tracer) or isinstance(y, Tracer):
        return weight
    values, labels = np.asarray(weight), np.asarray(y)
    good = np.isfinite(values) & (values >= 0)
    if not good.all():
        at = tuple(np.argwhere(~good)[0].tolist())
        raise ValueError(f"{name}{[*at]} is {values[at]}; use 0 or more, but finite")
    for label, kind in ((1, "hallucinated"), (0, "grounded")):
        total = values[..., labels == label].sum(-1)
        if not total.all():
            where = "".join(f"[{axis}]" for axis in np.argwhere(total == 0)[0])
            raise ValueError(
                f"{name}{where} leaves no {kind} row (label {label}); a probe needs "
                "rows of both classes"
            )
    return weight


def balanced(y: Any, weight: Any) -> Float[Array, "*lead rows"]:
    """Weights under which both classes count the same, with the same sum.

    scikit-learn's ``class_weight="balanced"`` where the weights are all one.
    """
    label = jnp.asarray(y)
    _, positive, (weight,) = check(label[..., None], label, weight=weight)
    return _balanced(positive, weight)


@jax.jit
def _balanced(positive: Array, weight: Array) -> Array:
    high = (weight * positive).sum(-1, keepdims=True)
    total = weight.sum(-1, keepdims=True)
    return weight * total / 2 / jnp.where(positive == 1, high, total - high)


def moments(
    x: Float[Array, "*rows width"], weight: Float[Array, "*rows"]
) -> tuple[Float[Array, " width"], Float[Array, " width"]]:
    """Weighted mean and standard deviation of each feature.

    A constant feature has the deviation ``inf``, so standardising turns it to 0.
    """
    share = weight / weight.sum()
    axes = share.ndim

    def some(x: Float[Array, "*rows columns"]) -> tuple[Array, Array]:
        with jax.default_matmul_precision("highest"):
            mean = jnp.tensordot(share, x, axes)
            std = jnp.sqrt(jnp.tensordot(share, (x - mean) ** 2, axes))
        # Sums of many equal numbers round to a mean beside them, and so to a deviation.
        same = ~_varies(x, weight) | (std <= _CONSTANT * jnp.abs(mean))
        return mean, jnp.where(same, jnp.inf, std)

    return over_columns(some, x)


def varies(
    x: Float[Array, "*rows width"], weight: Float[Array, "*rows"]
) -> Bool[Array, " width"]:
    """Whether a feature is more than one number and how that is rounded."""
    return over_columns(functools.partial(_varies, weight=weight), x)


def _varies(x: Float[Array, "*rows columns"], weight: Float[Array, "*rows"]) -> Array:
    rows, counts = tuple(range(weight.ndim)), (weight > 0)[..., None]
    high = jnp.max(x, rows, initial=-jnp.inf, where=counts)
    low = jnp.min(x, rows, initial=jnp.inf, where=counts)
    return high - low > _CONSTANT * jnp.maximum(jnp.abs(high), jnp.abs(low))


def over_columns(
    function: Callable[[Float[Array, "*rows columns"]], Any],
    x: Float[Array, "*rows width"],
) -> Any:
    """``function(x)``, leaves ``[... width]``, of some columns at a time.

    What it computes on its way takes memory for those alone.
    """
    width = x.shape[-1]
    starts = range(0, width, _COLUMNS)
    if len(starts) < 2:
        return function(x)
    # The last columns are full as well, and begin before the others end.
    first = jnp.array([min(start, width - _COLUMNS) for start in starts])
    each = jax.lax.map(
        lambda at: function(jax.lax.dynamic_slice_in_dim(x, at, _COLUMNS, -1)), first
    )
    last = width - (len(starts) - 1) * _COLUMNS

    def joined(leaf: Array) -> Array:
        whole = jnp.moveaxis(leaf[:-1], 0, -2)
        whole = whole.reshape(*whole.shape[:-2], -1)
        return jnp.concatenate([whole, leaf[-1][..., -last:]], -1)

    return jax.tree.map(joined, each)


def auroc(
    scores: Float[Array, " rows"],
    positive: Bool[Array, " rows"],
    negative: Bool[Array, " rows"],
) -> Float[Array, ""]:
    """Share of pairs of a positive and a negative row in the right order, in [0, 1].

    A tie counts one half.  Rows that are neither are left out, so that under ``vmap``
    every fold has one shape.
    """
    below = jnp.sort(jnp.where(negative, scores, jnp.inf))
    # Twice the pairs, in whole numbers: equal orders have equal values, whatever the
    # scores, until a float32 cannot count them.
    wins = sum(jnp.searchsorted(below, scores, side) for side in ("left", "right"))
    wins = jnp.where(positive, wins, 0).astype(jnp.float32).sum()
    return wins / (2.0 * positive.sum() * negative.sum())


class WeightedRows(NamedTuple):
    """What scikit-learn is shown: the rows that have weight.

    ``mean`` and ``std`` are what ``x`` was standardised by, with ``std = inf`` for a
    feature that is constant; 0 and 1 where it was not.
    """

    x: Float[np.ndarray, "kept width"]
    y: Int[np.ndarray, " kept"]
    weight: Float[np.ndarray, " kept"]
    number: Int[np.ndarray, " kept"]
    mean: Float[np.ndarray, " width"]
    std: Float[np.ndarray, " width"]

    def fit(self, model: Any) -> Any:
        """Fits a scikit-learn model, to weights unless all are 1.

        From weights, even equal ones, a forest draws other rows than without.
        """
        weight = () if (self.weight == 1).all() else (self.weight,)
        return model.fit(self.x, self.y, *weight)


def weighted_rows(
    x: Any, labels: Any, weight: Any, standardize: bool = False
) -> WeightedRows:
    """The rows of weight above 0, standardised by their own moments if asked.

    Example:
      >>> rows = weighted_rows([[1.0], [9.0], [3.0]], [0, 0, 1], [1, 0, 1], True)
      >>> print(rows.x.ravel(), rows.number)
      [-1.  1.] [0 2]
    """
    x, y, (weight,) = check(x, labels, weight=weight)
    if x.ndim != 2:
        raise ValueError(f"features have shape {x.shape}; pass [rows, width]")
    mean, std = jnp.zeros(x.shape[1]), jnp.ones(x.shape[1])
    if standardize:
        mean, std = moments(jnp.where(weight[:, None] > 0, x, 0.0), weight)
    number = np.flatnonzero(weight)
    scaled, y, weight = (np.asarray(a)[number] for a in ((x - mean) / std, y, weight))
    return WeightedRows(
        scaled, y.astype(int), weight, number, np.asarray(mean), np.asarray(std)
    )
