"""Which layer or setting: chosen inside the training part, by grouped folds."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num

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
from jaxhal.io.checks import at_least

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
    given: tuple[int, Sequence[int]] | None = None,
) -> tuple[Chosen, Float[np.ndarray, " samples"]]:
    """Fits layers x folds x strengths at once, then the best pair to everything.

    The best has the highest mean AUROC over grouped folds; among equals the lower layer
    and the stronger penalty.  With the probe come :func:`unseen_scores`, those of each
    fold at the pair that is best in the others, by fits without it: no answer has a
    part in choosing what it is scored by.

    Args:
      x: one vector a layer and answer.
      labels: 1 hallucinated, 0 grounded.
      groups: the source of each answer; a fold never splits one.
      weight: 1 for the answers to learn from, 0 for those to leave out.
      strengths: inverse penalties C, as in scikit-learn.
      standardize: scale features by their training deviation.
      folds: how many, at least three, as fits without two of them are needed.
      given: the layer, and that of each fold's scores, where they were chosen before;
        only strengths are chosen then.
    """
    at_least(3, folds=folds)
    train = folds_of(labels, groups, weight, folds)
    c = jnp.asarray(sorted(strengths), jnp.float32)
    logits, found = _tried(x, labels, train, c, standardize)
    if given is None:
        best, others = found.best()
        (layer, *layer_of), (strength, *strength_of) = np.unravel_index(
            [best, *others], found.whole.shape[:2]
        )
    else:
        layer, layer_of = given
        strength, _ = found.at(layer).best()
        strength_of = [found.at(n).best()[1][at] for at, n in enumerate(layer_of)]
    own = jnp.asarray(x)[:, layer]
    linear = fit_linear(
        own, labels, weight, float(c[strength]), standardize=standardize
    )
    auroc = jnp.asarray(found.whole[layer, strength].mean(), jnp.float32)
    chosen = Chosen(linear, jnp.asarray(layer, jnp.int32), c[strength], auroc)
    final = linear_logits(linear, own)
    scores = np.asarray(logits)[list(layer_of), strength_of, np.arange(folds)]
    return chosen, unseen_scores(scores, train, final)


class Aurocs(NamedTuple):
    """What each way to fit is worth on the folds of a training part.

    ``whole``: on each fold, of the fit without it.  ``inner``: by the fold whose scores
    are chosen for, on each of the others, of the fit without both; on itself 0.
    """

    whole: Float[np.ndarray, "*ways folds"]
    inner: Float[np.ndarray, "*ways folds others"]

    def at(self, way: int) -> "Aurocs":
        return Aurocs(self.whole[way], self.inner[way])

    def best(self) -> tuple[int, list[int]]:
        """The number of the best way, and for each fold that of the best without it.

        Among equals it is the first.
        """
        folds = self.whole.shape[-1]
        whole = self.whole.reshape(-1, folds).mean(1)
        inner = self.inner.reshape(-1, folds, folds).sum(2)
        return int(whole.argmax()), inner.argmax(0).tolist()


def linear_aurocs(
    x: Float[Any, "samples layers size"],
    labels: Int[Any, " samples"],
    groups: Int[Any, " samples"],
    weight: Float[Any, " samples"],
) -> Aurocs:
    """Of every layer and strength that :func:`choose_linear` chooses from."""
    train = folds_of(labels, groups, weight)
    return _tried(x, labels, train, jnp.asarray(STRENGTHS, jnp.float32), True)[1]


def _tried(
    x: Any, labels: Any, train: np.ndarray, strengths: Array, standardize: bool
) -> tuple[Array, Aurocs]:
    """Scores of all fits, ``[layer, strength, fit, sample]``, and their AUROC."""
    y, layers = jnp.asarray(labels), jnp.swapaxes(jnp.asarray(x), 0, 1)
    without = jnp.asarray(_left_out(train))
    grid = fit_grid(layers, y, without, strengths, standardize=standardize)
    logits = jnp.swapaxes(grid_logits(grid, layers), 1, 2)
    return logits, _judged(logits, y, train)


def _left_out(train: np.ndarray) -> np.ndarray:
    """The weights without each fold, then without each two."""
    pairs = itertools.combinations(train, 2)
    return np.stack([*train, *(np.minimum(*pair) for pair in pairs)])


def _judged(scores: Any, y: Any, train: np.ndarray) -> Aurocs:
    """Of fits to what :func:`_left_out` has, ``[*ways, fit, sample]``."""
    folds, test = len(train), train < train.max(0)
    one, other = np.array([*itertools.combinations(range(folds), 2)]).T
    y, scores = jnp.asarray(y), jnp.asarray(scores)
    whole, two = scores[..., :folds, :], scores[..., folds:, :]
    inner = np.zeros((*whole.shape[:-1], folds))
    inner[..., one, other] = _auroc_on(two, y, test[other])
    inner[..., other, one] = _auroc_on(two, y, test[one])
    return Aurocs(np.asarray(_auroc_on(whole, y, test), float), inner)


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
    Its number, parameters and AUROC are returned, and :func:`unseen_scores`: those of
    each fold in the way that is best in the others.  Their fits have learnt from it, as
    fits without two of three folds would have too little to learn from.
    """
    train = folds_of(labels, groups, weight, 3)
    scores = np.array([[way.decide(way.fit(fold)) for fold in train] for way in ways])
    whole = np.asarray(_auroc_on(scores, labels, train < train.max(0)), float)
    tried = Aurocs(whole, whole[:, None] * ~np.eye(len(train), dtype=bool))
    best, own = tried.best()
    params = ways[best].fit(weight)
    each = scores[own, np.arange(len(train))]
    unseen = unseen_scores(each, train, ways[best].decide(params))
    return best, params, jnp.asarray(tried.whole[best].mean(), jnp.float32), unseen


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
def _auroc_on(
    scores: Float[Any, "*fits samples"],
    y: Num[Any, " samples"],
    test: Bool[Any, "fits samples"],
) -> Float[Array, "*fits"]:
    """AUROC of fits, each on rows of its own."""
    each = jnp.vectorize(auroc, signature="(n),(n),(n)->()")
    return each(scores, test & (y == 1), test & (y == 0))
