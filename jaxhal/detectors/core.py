"""What a detector is: a tuple of pure functions."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxhal.types import Example, Reducer

LOG_ODDS = "log odds of a hallucination"

# name -> array with a batch axis where `jaxhal.read` has it.  Always there, as
# Bool[batch response]: "valid", real tokens; "text", those of them that have text,
# which the end of the sequence has not; and "marked", those annotated as hallucinated
# (none where no spans are known).
Features = Mapping[str, Any]

# Detector -> its parameters, and scores of the rows it learnt from by fits that had not
# seen them.
Known = Mapping[str, tuple[Any, Float[Any, " samples"]]]


class Targets(NamedTuple):
    """What a detector is fitted to.

    Which answers are learnt from is a weight, so that every fold of a data set has one
    shape and compiles once.

    Attributes:
      labels: 1 hallucinated, 0 grounded.
      groups: a number per source; answers to one source stay on one side of a split.
      weight: 1 for the answers to learn from, 0 for those to leave out.
      key: of the weights that a network starts from; splits inside a fit are fixed.
    """

    labels: Int[Any, " samples"]
    groups: Int[Any, " samples"]
    weight: Float[Any, " samples"]
    key: Any

    @property
    def rows(self) -> Int[np.ndarray, " train"]:
        """Numbers of the answers to learn from."""
        return np.flatnonzero(np.asarray(self.weight) > 0)

    def only(self, rows: Int[Any, " part"]) -> "Targets":
        """The same, learning from these answers alone."""
        weight = np.zeros(len(self.labels), np.float32)
        weight[rows] = 1.0
        return self._replace(weight=weight)


# From an answer to another example that is read in its place.
Recast = Callable[[Example], Example]


class ExampleView(NamedTuple):
    """Another example that is made of an answer, and what is read from it.

    Where its response is the answer's own, features may run along its tokens; where it
    is another one, each feature is one array an answer, whatever their length.

    Attributes:
      of: ``example -> example``, static by value; views with one ``of`` are read once.
      reads: reducers by feature name.
    """

    of: Recast
    reads: tuple[tuple[str, Reducer], ...]


def _as_it_is(params: Any, inputs: Any) -> Array:
    del params
    return inputs


class Detector(NamedTuple):
    """One method, as pure functions, like ``optax.GradientTransformation``.

    Reading and judging are apart: ``inputs`` turns what was read into what the decision
    looks at, once, however often a decision is then fitted; ``decide`` turns that and
    the parameters into scores, **higher = more likely hallucinated**.

    Attributes:
      name: its catalogue name.
      summary: what it measures, in one line.
      unit: of the score, with its range.
      reference: where it comes from.
      inputs: ``features -> inputs``, a pytree whose leaves lead with ``batch``.
      decide: ``(params, inputs) -> Float[batch]``; the inputs themselves by default.
      fit: ``(inputs, targets) -> params``, for a method that is trained.
      fit_held_out: ``(inputs, targets, known) -> (params, Float[samples])``: ``fit``,
        and scores of the rows to learn from by fits that had not seen their source, on
        the scale of its own; ``None`` where folds are to be fitted for that.  An
        ensemble takes from ``known`` members that were fitted to the same rows.
      tokens: ``(params, features) -> Float[batch response]`` in [0, 1] and 0 on
        padding, or ``None`` for a method that only judges whole responses.
      reads: reducers by feature name; equal names mean equal reducers everywhere.
      views: the same, read from other examples made of the answer.
      text: numbers computed from the example's text, by feature name.
      measures: what is computed of many answers at once: a
        :class:`jaxhal.detectors.bulk.Measure` each, whose ``feature`` is its name.
      control: True for what a method has to beat to be worth its cost.
      members: the detectors whose scores an ensemble weighs.
    """

    name: str
    summary: str
    unit: str
    reference: str
    inputs: Callable[[Features], Any]
    decide: Callable[[Any, Any], Array] = _as_it_is
    fit: Callable[[Any, Targets], Any] | None = None
    fit_held_out: Callable[[Any, Targets, Known], tuple[Any, Any]] | None = None
    tokens: Callable[[Any, Features], Array] | None = None
    reads: tuple[tuple[str, Reducer], ...] = ()
    views: tuple[ExampleView, ...] = ()
    text: tuple[tuple[str, Callable[[Example], Any]], ...] = ()
    measures: tuple[Any, ...] = ()
    control: bool = False
    members: tuple["Detector", ...] = ()

    @property
    def by(self) -> str:
        """What else than the reader decides, in words, where that can be chosen."""
        return ", ".join(filter(None, (one.by for one in self.measures)))

    @property
    def reads_rows(self) -> bool:
        """Whether it reads features of the answer itself, and nothing else."""
        return bool(self.reads) and not (self.views or self.text or self.measures)

    def score(self, params: Any, features: Features) -> Float[Array, " batch"]:
        """Scores of the answers that were read."""
        return self.decide(params, self.inputs(features))


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
