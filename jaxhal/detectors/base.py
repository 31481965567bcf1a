"""What a detector is: a tuple of pure functions over features."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxhal.classifiers import selection
from jaxhal.classifiers.data import balanced
from jaxhal.detectors.series import Ragged
from jaxhal.evaluation.splits import holdout
from jaxhal.features.base import Feature, Reducer
from jaxhal.io.checks import check_name, of_kind
from jaxhal.llm.entailment import resolve
from jaxhal.reading.bulk import Measure

LOG_ODDS = "log odds of a hallucination"
# What stands beside detectors in a folder, or beside scores in tables.
_TAKEN = ("README.md", "token", "start", "end", "row", "id", "source", "label")
_TAKEN += ("train", "test", "fold", "part")
_COLUMNS = ".probability", ".adapted", ".flagged"  # of a detector, in tables

# name -> array with a batch axis where `jaxhal.read` has it.  Always there, as
# Bool[batch response]: "valid", real tokens; "text", those of them that have text,
# which the end of the sequence has not; and "marked", those annotated as hallucinated
# (none where no spans are known).
Features = Mapping[str, Any]


class HeldOut(NamedTuple):
    """Parameters, with scores of the rows learnt from that did not see them."""

    params: Any
    # By a fit that had not seen the source of the row, on the scale of `params`; what
    # other rows hold means nothing.
    unseen: Float[Any, " samples"]


class Targets(NamedTuple):
    """What a detector is fitted to.

    Which answers are learnt from is a weight, so that every fold of a data set has one
    shape and compiles once.
    """

    labels: Int[Any, " samples"]  # 1 hallucinated, 0 grounded
    groups: Int[Any, " samples"]  # the source; a split never parts its answers
    weight: Float[Any, " samples"]  # 1 for the answers to learn from, 0 for others
    key: Any  # of the weights that a network starts from; splits are fixed
    # Detectors that were fitted to the same rows before, which an ensemble takes.
    known: Mapping[str, HeldOut] | None = None

    @property
    def rows(self) -> Int[np.ndarray, " train"]:
        """Numbers of the answers to learn from."""
        return np.flatnonzero(np.asarray(self.weight) > 0)

    def only(self, rows: Int[Any, " part"]) -> "Targets":
        """The same, learning from these answers alone."""
        weight = np.zeros(len(self.labels), np.float32)
        weight[rows] = 1.0
        return self._replace(weight=weight, known=None)


def _as_it_is(params: Any, inputs: Any) -> Array:
    del params
    return inputs


class Detector(NamedTuple):
    """One method, as pure functions, like ``optax.GradientTransformation``.

    Reading and judging are apart: ``inputs`` turns features into what the decision
    looks at, once, however often a decision is then fitted; ``decide`` turns that and
    the parameters into scores, **higher = more likely hallucinated**.  What has values
    of every token is a :class:`~jaxhal.detectors.series.Series` for ``decide`` and a
    :class:`~jaxhal.detectors.series.Ragged` for ``fit``.

    Attributes:
      summary: what it measures, in one line.
      unit: of the score, with its range.
      features: what it looks at, by name; equal names mean equal features everywhere.
      inputs: ``features -> inputs``, a pytree whose leaves lead with ``batch``.
      decide: ``(params, inputs) -> Float[batch]``; the inputs themselves by default.
      fit: ``(inputs, targets) -> params``, for a method that is trained, or
        :class:`HeldOut` where it has scores of rows unseen anyway.
      fits: ``(inputs, targets, Float[fits rows]) -> params`` of as many fits, each as
        ``fit`` has it for these weights, with ``fits`` first on every leaf; for what
        takes less than one after the other.
      tokens: ``(params, features) -> Float[batch response]`` in [0, 1] and 0 on
        padding, or ``None`` for a method that only judges whole responses.
      taught: what it looks at besides while it is fitted, as ``features``; ``inputs``
        must do without.
      members: the detectors whose scores an ensemble weighs.
      control: a method has to beat it to be worth its cost.
      settings: the options that it was made with, by :func:`factory`.
      marked: it learns from annotated spans alone.
      kind: what :func:`factory` made, whatever the ``name`` it was given.
    """

    name: str
    summary: str
    unit: str
    reference: str
    features: tuple[tuple[str, Feature], ...]
    inputs: Callable[[Features], Any]
    decide: Callable[[Any, Any], Array] = _as_it_is
    fit: Callable[[Any, Targets], Any] | None = None
    fits: Callable[[Any, Targets, np.ndarray], Any] | None = None
    tokens: Callable[[Any, Features], Array] | None = None
    taught: tuple[tuple[str, Feature], ...] = ()
    members: tuple["Detector", ...] = ()
    control: bool = False
    settings: tuple[tuple[str, Any], ...] = ()
    marked: bool = False
    kind: str = ""

    @property
    def reducers(self) -> dict[str, Reducer]:
        """What is read of the answer itself, among its features."""
        return {n: one for n, one in self.features if isinstance(one, Reducer)}

    @property
    def measures(self) -> tuple[Measure, ...]:
        """What is computed of many answers at once, among its features."""
        return tuple(one for _, one in self.features if isinstance(one, Measure))

    @property
    def by(self) -> str:
        """What else than the reader decides, in words, where that can be chosen."""
        return ", ".join(filter(None, (one.by for one in self.measures)))

    @property
    def reads_rows(self) -> bool:
        """Whether it looks at rows of the answer's tokens, and nothing else."""
        return 0 < len(self.reducers) == len(self.features)

    @property
    def attends(self) -> bool:
        """Whether it looks at rows of attention, of the answer or of a rewrite."""
        looked_at = (*self.features, *self.taught)
        read = [getattr(one, "reducer", one) for _, one in looked_at]
        return any(isinstance(one, Reducer) and one.reads == "probs" for one in read)

    @property
    def layered(self) -> bool:
        """Whether it learns of layers, and so fits no reader with another number."""
        looks = any("layer" in feature.axes for _, feature in self.features)
        return looks and self.fit is not None

    def score(self, params: Any, features: Features) -> Float[Array, " batch"]:
        """Scores of answers from their features."""
        return self.decide(params, self.inputs(features))


def features_of(
    detectors: Iterable[Detector], *, fitting: bool = False
) -> dict[str, Feature]:
    """Everything that detectors look at, or are taught by, each feature once.

    ValueError when two detectors give one name to different features.
    """
    merged: dict[str, Feature] = {}
    for detector in detectors:
        for name, feature in (
            *detector.features,
            *(detector.taught if fitting else ()),
        ):
            if merged.setdefault(name, feature) != feature:
                raise ValueError(
                    f"detector {detector.name!r} looks at {name!r} as {feature}, "
                    f"another as {merged[name]}; name the feature otherwise"
                )
    return merged


def factory(make: Callable[..., Detector]) -> Callable[..., Detector]:
    """Gives the same detector for the same settings, so that it compiles once.

    ``name`` is a setting of everyone, and that of the folder it is saved in.  An
    endpoint is made anew each time, for not everyone may name one.  A setting that is
    one of some words, true or false, or a whole number is checked to be one.
    """

    # By its types as well, for layer 1 is none of 1.0, which Python calls equal.
    @functools.cache
    def known(types: Any, settings: tuple[tuple[str, Any], ...]) -> Detector:
        del types
        made = make(**dict(settings))  # which another factory may have made
        if made.kind and not settings:
            return made
        kind = made.kind or made.name
        return made._replace(settings=made.settings + settings, kind=kind)

    signature = inspect.signature(make)
    named = inspect.Parameter("name", inspect.Parameter.KEYWORD_ONLY, default=None)

    @functools.wraps(make)
    def call(*args: Any, name: str | None = None, **options: Any) -> Detector:
        given = signature.bind(*args, **options)
        given.apply_defaults()
        for key, value in given.arguments.items():
            of_kind(signature.parameters[key].annotation, **{key: value})
        settings = tuple((key, _frozen(it)) for key, it in given.arguments.items())
        made = known(_types(settings), settings)
        if name in (None, made.name):
            return made
        check_name(name, f"name of detector {made.name!r}")
        if name in _TAKEN or name.endswith(_COLUMNS):
            taken = f"one of {', '.join(_TAKEN)}, or ends in {', '.join(_COLUMNS)}"
            raise ValueError(f"name of detector {made.name!r} is {taken}")
        return _renamed(made, name)

    every = [*signature.parameters.values(), named]
    vars(call)["__signature__"] = signature.replace(parameters=every)
    return call


@functools.cache
def _renamed(detector: Detector, name: str) -> Detector:
    return detector._replace(name=name)


def _types(value: Any) -> Any:
    """Of a setting and what is in it."""
    return tuple(map(_types, value)) if type(value) is tuple else type(value)


def _frozen(value: Any) -> Any:
    """A setting that can be told from others by its hash."""
    if isinstance(value, Mapping):
        return tuple(sorted((key, _frozen(one)) for key, one in value.items()))
    if type(value) is tuple or isinstance(value, list | Iterator):
        return tuple(map(_frozen, value))
    if isinstance(value, str) and value.startswith("endpoint:"):
        return resolve(value)
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"{value!r} has no hash; give a frozen dataclass or a plain object"
        ) from None
    return value


def held_out(detector: Detector, inputs: Any, targets: Targets) -> HeldOut:
    """Fits a detector to every row to learn from, with scores that are unseen.

    Where its own ``fit`` gives none, it is fitted again without each of some folds; see
    :func:`~jaxhal.classifiers.selection.unseen_scores`.  A method that is not trained
    has ``()`` and its scores.
    """
    # Series stay: a fit takes one of them at a time.
    inputs = jax.tree.map(
        lambda one: one if isinstance(one, Ragged) else jax.device_put(one), inputs
    )
    if detector.fit is None:
        return HeldOut((), scores_of(detector, (), inputs))
    if detector.fits is not None:
        train = selection.folds_of(targets.labels, targets.groups, targets.weight)
        weights = np.stack([np.asarray(targets.weight), *train])
        each = detector.fits(inputs, targets, weights)
        whole, *scores = scores_of(detector, each, inputs, several=True)
        unseen = selection.unseen_scores(np.stack(scores), train, whole)
        return HeldOut(jax.tree.map(lambda leaf: leaf[0], each), unseen)
    found = detector.fit(inputs, targets)
    if isinstance(found, HeldOut):
        return HeldOut(found.params, np.asarray(found.unseen))
    train = selection.folds_of(targets.labels, targets.groups, targets.weight)
    parts = [detector.fit(inputs, targets._replace(weight=fold)) for fold in train]
    scores = np.stack([scores_of(detector, part, inputs) for part in parts])
    whole = scores_of(detector, found, inputs)
    return HeldOut(found, selection.unseen_scores(scores, train, whole))


# Answers scored at once: what is computed on the way is as large as their inputs.
_TOGETHER = 64


def scores_of(
    detector: Detector, params: Any, inputs: Any, *, several: bool = False
) -> Float[np.ndarray, "*fits n"]:
    """Scores of any number of answers, some at a time.

    ``several`` takes parameters of as many fits as their leaves lead with, each of
    which scores every answer.
    """
    rows = len(jax.tree.leaves(inputs)[0])
    # Detectors that decide by the same function share its programs.
    decide = _each(detector.decide) if several else jax.jit(detector.decide)

    def some(start: int) -> np.ndarray:  # padded: one at a time, or memory holds all
        return np.asarray(decide(params, take(inputs, slice(start, start + _TOGETHER))))

    starts = range(0, max(rows, 1), _TOGETHER)
    return np.concatenate([some(start) for start in starts], -1)


@functools.lru_cache
def _each(decide: Callable[[Any, Any], Array]) -> Callable[..., Array]:
    """The decisions of several parameters, one after the other, in one program."""
    return jax.jit(lambda params, x: jax.lax.map(lambda one: decide(one, x), params))


def take(inputs: Any, rows: Any) -> Any:
    """Some rows of every leaf."""
    return jax.tree.map(lambda leaf: leaf[rows], inputs)


def measured(*measures: Measure) -> tuple[tuple[str, Feature], ...]:
    """Measures as features, named after themselves."""
    return tuple((one.feature, one) for one in measures)


def response_mean(
    values: Float[Array, "*lead batch heads response"], features: Features
) -> Float[Array, "*lead batch heads"]:
    """Mean over the real tokens of each response; 0 for an empty one."""
    valid = features["valid"][:, None]
    count = jnp.maximum(valid.sum(-1), 1)
    return jnp.where(valid, values, 0.0).sum(-1) / count


def on_tokens(
    values: Float[Array, "batch response"], features: Features
) -> Float[Array, "batch response"]:
    """The values of real tokens, 0 on padding."""
    return jnp.where(features["valid"], values, 0.0)


def flat_heads(values: Float[Array, "layer batch *rest"]) -> Float[Array, "batch size"]:
    """One vector an answer: layer-major, as in the Lookback Lens code."""
    return jnp.moveaxis(values, 1, 0).reshape(values.shape[1], -1)


# Logistic regression, and what else is fitted to one vector an answer.


def _linear(inputs: Float[Array, "samples *layers size"]) -> Float[Array, "..."]:
    """The inputs with an axis of layers: one, unless they have it."""
    return inputs if inputs.ndim == 3 else inputs[:, None]


def fit_logistic(inputs: Any, targets: Targets) -> HeldOut:
    """Layer and penalty by grouped folds inside the training part, then all of it."""
    return HeldOut(
        *selection.choose_linear(
            _linear(jnp.asarray(inputs)), targets.labels, targets.groups, targets.weight
        )
    )


def logistic_scores(params: selection.Chosen, inputs: Array) -> Array:
    """Log odds of what :func:`fit_logistic` fitted."""
    fitted, given = params.linear.w.shape[-1], inputs.shape[-1]
    if fitted != given:
        raise ValueError(
            f"the classifier was fitted to {fitted} features (of lookback ratios, one "
            f"a head) and is given {given}; read with the model it was fitted to"
        )
    return selection.chosen_logits(params, _linear(inputs))


def logistic(
    name: str,
    summary: str,
    reference: str,
    inputs: Callable[[Features], Any],
    *features: tuple[str, Feature],
) -> Detector:
    """A detector that is a logistic regression on ``inputs``."""
    about = (name, summary, LOG_ODDS, reference)
    return Detector(*about, features, inputs, logistic_scores, fit_logistic)


def split_rows(targets: Targets, share: float) -> tuple[np.ndarray, np.ndarray]:
    """The rows to learn from in two parts, whole sources, the second with ``share``."""
    rows = targets.rows
    labels, groups = np.asarray(targets.labels)[rows], np.asarray(targets.groups)[rows]
    rest, part = holdout(labels, groups.tolist(), share)
    return rows[rest], rows[part]


def early_stopping(targets: Targets, *inputs: Any) -> tuple[Any, ...]:
    """Arguments of a classifier that stops early: key, inputs, labels, two weights.

    Those are of the rows to train on and of the fifth to stop by, classes even.
    """
    labels = jnp.asarray(targets.labels)
    parts = (targets.only(rows).weight for rows in split_rows(targets, 0.2))
    weights = (balanced(labels, part) for part in parts)
    return targets.key, *map(jnp.asarray, inputs), labels, *weights
