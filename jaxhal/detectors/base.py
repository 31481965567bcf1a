"""What a detector is: a tuple of pure functions over features."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxhal.classifiers.selection import folds_of, unseen_scores
from jaxhal.features.base import Feature, Reducer
from jaxhal.reading.bulk import Measure

LOG_ODDS = "log odds of a hallucination"

# name -> array with a batch axis where `jaxhal.read` has it.  Always there, as
# Bool[batch response]: "valid", real tokens; "text", those of them that have text,
# which the end of the sequence has not; and "marked", those annotated as hallucinated
# (none where no spans are known).
Features = Mapping[str, Any]


class Info(NamedTuple):
    """What people should know of a method.

    Attributes:
      name: its catalogue name.
      summary: what it measures, in one line.
      unit: of the score, with its range.
      reference: where it comes from.
      control: True for what a method has to beat to be worth its cost.
    """

    name: str
    summary: str
    unit: str
    reference: str
    control: bool = False


class HeldOut(NamedTuple):
    """Parameters, with scores of the rows learnt from that did not see them.

    Attributes:
      params: from every row to learn from.
      unseen: of each of these rows, by a fit that had not seen its source, on the scale
        of ``params``; what other rows hold means nothing.
    """

    params: Any
    unseen: Float[Any, " samples"]


class Targets(NamedTuple):
    """What a detector is fitted to.

    Which answers are learnt from is a weight, so that every fold of a data set has one
    shape and compiles once.

    Attributes:
      labels: 1 hallucinated, 0 grounded.
      groups: a number per source; answers to one source stay on one side of a split.
      weight: 1 for the answers to learn from, 0 for those to leave out.
      key: of the weights that a network starts from; splits inside a fit are fixed.
      known: detectors that were fitted to the same rows before, for an ensemble to take
        as its members.
    """

    labels: Int[Any, " samples"]
    groups: Int[Any, " samples"]
    weight: Float[Any, " samples"]
    key: Any
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
    the parameters into scores, **higher = more likely hallucinated**.

    Attributes:
      info: its name, and what people should know.
      features: what it looks at, by name; equal names mean equal features everywhere.
      inputs: ``features -> inputs``, a pytree whose leaves lead with ``batch``.
      decide: ``(params, inputs) -> Float[batch]``; the inputs themselves by default.
      fit: ``(inputs, targets) -> params``, for a method that is trained, or
        :class:`HeldOut` where it has scores of rows unseen anyway.
      tokens: ``(params, features) -> Float[batch response]`` in [0, 1] and 0 on
        padding, or ``None`` for a method that only judges whole responses.
      members: the detectors whose scores an ensemble weighs.
    """

    info: Info
    features: tuple[tuple[str, Feature], ...]
    inputs: Callable[[Features], Any]
    decide: Callable[[Any, Any], Array] = _as_it_is
    fit: Callable[[Any, Targets], Any] | None = None
    tokens: Callable[[Any, Features], Array] | None = None
    members: tuple["Detector", ...] = ()

    @property
    def name(self) -> str:
        return self.info.name

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

    def score(self, params: Any, features: Features) -> Float[Array, " batch"]:
        """Scores of answers from their features."""
        return self.decide(params, self.inputs(features))


def features_of(detectors: Iterable[Detector]) -> dict[str, Feature]:
    """Everything that detectors look at, each feature once.

    Raises:
      ValueError: when two detectors give one name to different features.
    """
    merged: dict[str, Feature] = {}
    for detector in detectors:
        for name, feature in detector.features:
            if merged.setdefault(name, feature) != feature:
                raise ValueError(
                    f"detector {detector.name!r} looks at {name!r} as {feature}, "
                    f"another as {merged[name]}; name the feature otherwise"
                )
    return merged


def held_out(detector: Detector, inputs: Any, targets: Targets) -> HeldOut:
    """Fits a detector to every row to learn from, with scores that are unseen.

    Where its own ``fit`` gives none, it is fitted again without each of some folds, and
    scores are brought to one scale as by
    :func:`~jaxhal.classifiers.selection.unseen_scores`.  A method that is not trained
    has ``()`` and its scores.

    Raises:
      SplitError: when the folds cannot hold both classes.
    """
    inputs = jax.device_put(inputs)
    if detector.fit is None:
        return HeldOut((), np.asarray(detector.decide((), inputs)))
    found = detector.fit(inputs, targets)
    if isinstance(found, HeldOut):
        return HeldOut(found.params, np.asarray(found.unseen))
    train = folds_of(targets.labels, targets.groups, targets.weight)
    parts = [detector.fit(inputs, targets._replace(weight=fold)) for fold in train]
    scores = np.stack([np.asarray(detector.decide(part, inputs)) for part in parts])
    return HeldOut(found, unseen_scores(scores, train, detector.decide(found, inputs)))


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


def token_mean(
    values: Float[Array, "batch response"], valid: Bool[Array, "batch response"]
) -> Float[Array, " batch"]:
    """Mean over the real tokens of each response; 0 for an empty one."""
    total = jnp.where(valid, values, 0.0).sum(-1)
    return total / jnp.maximum(valid.sum(-1), 1)


def on_tokens(
    values: Float[Array, "batch response"], features: Features
) -> Float[Array, "batch response"]:
    """The values of real tokens, 0 on padding."""
    return jnp.where(features["valid"], values, 0.0)


def flat_heads(values: Float[Array, "layer batch *rest"]) -> Float[Array, "batch size"]:
    """One vector an answer: layer-major, as in the Lookback Lens code."""
    return jnp.moveaxis(values, 1, 0).reshape(values.shape[1], -1)
