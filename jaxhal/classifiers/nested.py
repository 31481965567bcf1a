"""Which setting of a classifier: chosen inside the training part, by grouped folds."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxhal.classifiers.data import auroc, check, moments
from jaxhal.classifiers.selection import folds_of, unseen_scores
from jaxhal.evaluation.checks import group_codes

FOLDS = 3


class Tuned(NamedTuple):
    """A classifier and how its setting was chosen; a pytree.

    Attributes:
      params: the classifier, fitted to the whole training part.
      setting: what was chosen, by name.
      auroc: the mean AUROC of that choice on the folds left out.
    """

    params: Any
    setting: dict[str, Any]
    auroc: Float[Any, ""]


def choose(
    fit: Callable[..., Any],
    decide: Callable[[Any, Any], Any],
    grid: Mapping[str, Sequence[Any]],
    x: Any,
    labels: Any,
    groups: Any,
    weight: Any,
    folds: int = FOLDS,
) -> tuple[Tuned, Float[np.ndarray, " samples"]]:
    """Fits every setting to every fold, then the best setting to everything.

    The best has the highest mean AUROC over grouped folds; among equals the first.

    Args:
      fit: ``(x, labels, weight, **setting) -> params``.
      decide: ``(params, x) -> Float[samples]``, higher = more likely hallucinated.
      grid: the values of each setting, simplest first; all combinations are tried.
      x: ``[samples, ...]`` features.
      labels: ``[samples]``, 1 for hallucinated and 0 for grounded.
      groups: ``[samples]``, the source of each answer; a fold never splits one.
      weight: ``[samples]``, 0 for the answers to leave out: of these nothing is used.
      folds: number of parts, of which each is left out once.

    Returns:
      The classifier, and the :func:`~jaxhal.classifiers.selection.unseen_scores` of
      the folds at its setting.

    Raises:
      ValueError: when shapes do not pair up, a value is not finite, a class has no
        rows, or a setting has no values.
      SplitError: when the folds cannot hold both classes.
    """
    group = group_codes(np.asarray(groups).tolist(), len(labels))
    x, y, (weight,) = check(x, labels, weight=weight)
    train = folds_of(np.asarray(y).astype(int), group, np.asarray(weight), folds)
    settings = [
        dict(zip(grid, values, strict=True))
        for values in itertools.product(*grid.values())
    ]
    if not settings:
        raise ValueError(f"grid is {dict(grid)}; give every setting a value")
    scores = np.stack(
        [
            [decide(fit(x, y, fold, **setting), x) for fold in train]
            for setting in settings
        ]
    )
    high, test = np.asarray(y) == 1, train < train.max(0)
    over_folds = jax.vmap(auroc)
    over_settings = jax.vmap(over_folds, in_axes=(0, None, None))
    found = over_settings(jnp.asarray(scores), test & high, test & ~high).mean(1)
    best = int(jnp.argmax(found))
    params = fit(x, y, weight, **settings[best])
    setting = {name: jnp.asarray(value) for name, value in settings[best].items()}
    unseen = unseen_scores(scores[best], train, decide(params, x))
    return Tuned(params, setting, found[best]), unseen


class Rows(NamedTuple):
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


def weighted_rows(x: Any, labels: Any, weight: Any, standardize: bool = False) -> Rows:
    """The rows of weight above 0, standardised by their own moments if asked.

    Raises:
      ValueError: when shapes do not pair up, a value is not finite, a weight is
        negative, or a class has no rows.

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
    return Rows(
        scaled, y.astype(int), weight, number, np.asarray(mean), np.asarray(std)
    )
