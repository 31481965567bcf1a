"""Fitting a detector: parameters, a calibrated probability and a threshold."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Bool, Float

from jaxhal.classifiers.selection import chosen_logits
from jaxhal.detectors import Detector, Targets, fit_all, out_of_fold, weigh
from jaxhal.detectors.ensemble import Stack, folds_of
from jaxhal.evaluation.calibration import (
    Platt,
    best_accuracy_threshold,
    best_f1_threshold,
    platt,
    precision_threshold,
)


@dataclasses.dataclass(frozen=True)
class Fitted:
    """A detector that has been fitted.

    Attributes:
      detector: the method.
      params: its parameters, a pytree.
      calibration: score -> probability of a hallucination, as in the training part;
        ``None`` for a method that was shown no labelled answers.
      threshold: the score from which on an answer is flagged; ``None`` likewise.
      unseen: ``Float[samples]``, scores of the rows learnt from by fits that had not
        seen them; calibration and threshold come from these.
    """

    detector: Detector
    params: Any
    calibration: Platt | None
    threshold: float | None
    unseen: Float[np.ndarray, " samples"]

    def score(self, inputs: Any) -> Float[np.ndarray, " samples"]:
        """Scores of answers from the detector's inputs."""
        return np.asarray(self.detector.decide(self.params, jax.device_put(inputs)))

    def probabilities(self, scores: Any) -> Float[np.ndarray, " samples"]:
        """Calibrated probabilities of a hallucination.

        Raises:
          ValueError: when the method was shown no labelled answers.
        """
        if self.calibration is None:
            raise ValueError(_uncalibrated(self.detector))
        return self.calibration(scores)

    def flags(self, scores: Any) -> Bool[np.ndarray, " samples"]:
        """Which scores reach the threshold.

        Raises:
          ValueError: when the method was shown no labelled answers.
        """
        if self.threshold is None:
            raise ValueError(_uncalibrated(self.detector))
        return np.asarray(scores) >= self.threshold


def _uncalibrated(detector: Detector) -> str:
    return (
        f"detector {detector.name!r} was shown no labelled answers, so its scores have "
        "no probability and no threshold; use jaxhal.fitting.fit"
    )


def untrained(detector: Detector) -> Fitted:
    """A method without parameters as it is: scores, but no probability.

    Raises:
      ValueError: when the method must be fitted.
    """
    if detector.fit is not None:
        raise ValueError(
            f"detector {detector.name!r} must be fitted to labelled answers first"
        )
    return Fitted(detector, (), None, None, np.zeros(0, np.float32))


def fit(
    detector: Detector,
    inputs: Any,
    targets: Targets,
    *,
    objective: Literal["f1", "accuracy"] = "f1",
    precision: float | None = None,
    known: Mapping[str, Fitted] | None = None,
) -> Fitted:
    """Fits a detector to a training part.

    Args:
      detector: the method, trained or not.
      inputs: of :func:`jaxhal.inputs.collect`.
      targets: labels, sources, and which rows to learn from.
      objective: what the threshold is chosen for.
      precision: choose the threshold for this precision instead.
      known: members of an ensemble that were fitted to the same rows before.

    Raises:
      ValueError: when the rows have one class, too few sources for the folds, or cannot
        reach the precision.
    """
    inputs = jax.device_put(inputs)
    if detector.members:
        params, unseen = _stack(detector, inputs, targets, known or {})
    else:
        unseen = out_of_fold(detector, inputs, targets)
        params = fit_all(detector, inputs, targets)
    seen, labels = unseen[targets.rows], np.asarray(targets.labels)[targets.rows]
    if precision is not None:
        threshold = precision_threshold(seen, labels, precision)
    elif objective == "accuracy":
        threshold = best_accuracy_threshold(seen, labels)
    else:
        threshold = best_f1_threshold(seen, labels)
    return Fitted(detector, params, platt(seen, labels), threshold, unseen)


def _stack(
    detector: Detector, inputs: Any, targets: Targets, known: Mapping[str, Fitted]
) -> tuple[Stack, np.ndarray]:
    members = {
        m.name: known.get(m.name) or fit(m, inputs[m.name], targets)
        for m in detector.members
    }
    unseen = [one.unseen for one in members.values()]
    x, out = np.stack(unseen, 1)[:, None], np.zeros(len(unseen[0]), np.float32)
    for seen, test in folds_of(targets, seed=2):
        out[test] = np.asarray(chosen_logits(weigh(unseen, seen), x))[test]
    params = {name: one.params for name, one in members.items()}
    return Stack(params, weigh(unseen, targets)), out
