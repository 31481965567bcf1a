"""Which layer or setting: chosen inside the training part, by grouped folds."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from jaxhal.classifiers.data import auroc, check
from jaxhal.classifiers.linear import (
    Linear,
    fit_grid,
    fit_linear,
    grid_logits,
    linear_logits,
)
from jaxhal.evaluation.checks import group_codes
from jaxhal.evaluation.splits import grouped_kfold

# Inverse penalties C to choose from; probes of hundreds of features want strong ones.
STRENGTHS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 1.0)
FOLDS = 5


class Chosen(NamedTuple):
    """A linear probe, fitted to the whole training part, and how it was chosen."""

    linear: Linear
    layer: Int[Any, ""]
    strength: Float[Any, ""]  # its inverse penalty C
    auroc: Float[Any, ""]  # mean over the folds left out; 0 where nothing was chosen


def choose_linear(
    x: Float[Any, "samples layers size"],
    labels: Int[Any, " samples"],
    groups: Int[Any, " samples"],
    weight: Float[Any, " samples"],
    strengths: Sequence[float] = STRENGTHS,
    standardize: bool = True,
    folds: int = FOLDS,
) -> tuple[Chosen, Float[np.ndarray, " samples"]]:
    """Fits layers x folds x strengths at once, then the best pair to everything.

    The best has the highest mean AUROC over grouped folds; among equals the lower layer
    and the stronger penalty.  With the probe come the :func:`unseen_scores` of the
    folds at its layer and strength.

    Args:
      x: one vector a layer and answer.
      labels: 1 hallucinated, 0 grounded.
      groups: the source of each answer; a fold never splits one.
      weight: 1 for the answers to learn from, 0 for those to leave out.
      strengths: inverse penalties C, as in scikit-learn.
      standardize: scale features by their training deviation.
      folds: how many.
    """
    train = folds_of(labels, groups, weight, folds)
    y, layers = jnp.asarray(labels), jnp.swapaxes(jnp.asarray(x), 0, 1)
    c = jnp.asarray(sorted(strengths), jnp.float32)
    grid = fit_grid(layers, y, jnp.asarray(train), c, standardize=standardize)
    logits = grid_logits(grid, layers)
    found = _held_out_auroc(logits, y, train[:, None]).mean(1)
    layer, strength = np.unravel_index(int(jnp.argmax(found)), found.shape)
    linear = fit_linear(
        layers[layer], y, weight, float(c[strength]), standardize=standardize
    )
    chosen = Chosen(
        linear, jnp.asarray(layer, jnp.int32), c[strength], found[layer, strength]
    )
    final = linear_logits(linear, layers[layer])
    return chosen, unseen_scores(logits[layer, :, strength], train, final)


class Selected(NamedTuple):
    """A classifier, fitted to the whole training part, and its setting."""

    params: Any
    setting: dict[str, Any]
    auroc: Float[Any, ""]  # mean over the folds left out


def choose(
    fit: Callable[..., Any],
    decide: Callable[[Any, Any], Any],
    grid: Mapping[str, Sequence[Any]],
    x: Any,
    labels: Any,
    groups: Any,
    weight: Any,
) -> tuple[Selected, Float[np.ndarray, " samples"]]:
    """Fits every setting to every one of three folds, then the best to everything.

    The best has the highest mean AUROC over the folds; among equals the first.

    Args:
      fit: ``(x, labels, weight, **setting) -> params``.
      decide: ``(params, x) -> Float[samples]``, higher = more likely hallucinated.
      grid: the values of each setting, simplest first; all combinations are tried.
      x, labels, groups, weight: as :func:`choose_linear` takes them, of one layer.
    """
    group = group_codes(np.asarray(groups).tolist(), len(labels))
    x, y, (weight,) = check(x, labels, weight=weight)
    settings = [
        dict(zip(grid, values, strict=True))
        for values in itertools.product(*grid.values())
    ]
    if not settings:
        raise ValueError(f"grid is {dict(grid)}; give every setting a value")

    def way(setting: dict[str, Any]) -> Way:
        def fitted(weight: Any) -> Any:
            return fit(x, y, weight, **setting)

        return Way(fitted, lambda params: decide(params, x))

    best, params, found, unseen = best_way([*map(way, settings)], y, group, weight)
    setting = {name: jnp.asarray(value) for name, value in settings[best].items()}
    return Selected(params, setting, found), unseen


class Way(NamedTuple):
    """One of several ways to fit and to decide."""

    fit: Callable[[Any], Any]  # weight -> params
    decide: Callable[[Any], Any]  # params -> Float[samples]


def best_way(
    ways: Sequence[Way], labels: Any, groups: Any, weight: Any
) -> tuple[int, Any, Float[Array, ""], Float[np.ndarray, " samples"]]:
    """Fits in every way to every one of three folds, then in the best to everything.

    The best has the highest mean AUROC over the folds; among equals it is the first.
    Its number, parameters, AUROC and :func:`unseen_scores` are returned.
    """
    train = folds_of(labels, groups, weight, 3)
    scores = np.array([[way.decide(way.fit(fold)) for fold in train] for way in ways])
    found = _held_out_auroc(scores, jnp.asarray(labels), train).mean(1)
    best = int(jnp.argmax(found))
    params = ways[best].fit(weight)
    unseen = unseen_scores(scores[best], train, ways[best].decide(params))
    return best, params, found[best], unseen


def folds_of(
    labels: Any,
    groups: Int[Any, " samples"],
    weight: Float[Any, " samples"],
    folds: int = FOLDS,
) -> Float[np.ndarray, "folds samples"]:
    """The weights without one fold after the other; a fold never splits a source."""
    rows = np.flatnonzero(np.asarray(weight) > 0)
    labels, groups = np.asarray(labels)[rows], np.asarray(groups)[rows]
    train = np.tile(np.asarray(weight, np.float32), (folds, 1))
    for fold, (_, test) in enumerate(grouped_kfold(labels, groups.tolist(), folds)):
        train[fold, rows[test]] = 0.0
    return train


def unseen_scores(
    scores: Float[Any, "folds samples"],
    train: Float[np.ndarray, "folds samples"],
    final: Float[Any, " samples"],
) -> Float[np.ndarray, " samples"]:
    """Of each row the score by the fit that left it out, on the scale of the final fit.

    Every fit has a scale of its own, so scores of different folds cannot be compared:
    each is brought to the mean and deviation that the final fit gives to the rows this
    one has seen.  Rows that are not learnt from have 0.
    """
    # In float64 the deviation of equal scores is 0.
    scores, final = np.asarray(scores, float), np.asarray(final, float)
    unseen = np.zeros(len(final), np.float32)
    for score, fold in zip(scores, train, strict=True):
        seen, test = fold > 0, fold < train.max(0)
        spread = score[seen].std()
        scale = final[seen].std() / spread if spread else 1.0
        apart = score[test] - score[seen].mean()
        unseen[test] = scale * apart + final[seen].mean()
    return unseen


def published(linear: Linear) -> Chosen:
    """A probe of one layer with C = 1, which nobody chose."""
    nothing = jnp.zeros(())
    return Chosen(linear, nothing.astype(jnp.int32), nothing + 1, nothing)


def chosen_logits(
    chosen: Chosen, x: Float[Any, "samples layers size"]
) -> Float[Array, " samples"]:
    """Log odds of a hallucination, from the chosen layer."""
    layer = jnp.take(jnp.asarray(x), chosen.layer, axis=1)
    return linear_logits(chosen.linear, layer)


@jax.jit
def _held_out_auroc(
    scores: Float[Any, "*fits samples"],
    y: Num[Any, " samples"],
    train: Float[Any, "*folds samples"],
) -> Float[Array, "*fits"]:
    """AUROC of every fit on the rows its fold leaves out; axes broadcast."""
    test = train < train.max(tuple(range(train.ndim - 1)))
    each = jnp.vectorize(auroc, signature="(n),(n),(n)->()")
    return each(scores, test & (y == 1), test & (y == 0))
