"""Fitting a detector: parameters, a calibrated probability and a threshold."""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float

from jaxhal import evaluation
from jaxhal.detectors import (
    Detector,
    HeldOut,
    Targets,
    held_out,
    scores_of,
)
from jaxhal.evaluation.guarantees import Guarantee
from jaxhal.evaluation.held_out import CalibrationSet, Measured
from jaxhal.evaluation.prevalence import at_rate
from jaxhal.evaluation.splits import SplitError
from jaxhal.evaluation.tables import VERDICTS
from jaxhal.features.base import OfText
from jaxhal.io.checks import one_of
from jaxhal.io.progress import note
from jaxhal.io.showing import shown
from jaxhal.models.lm import LM
from jaxhal.reading.keys import fingerprint
from jaxhal.scoring import encoders


@dataclasses.dataclass(frozen=True)
class Fitted:
    """A detector that has been fitted.

    One that is worth no more than a control flags nothing, whatever its threshold, and
    nobody flags what is more likely grounded; scores and probabilities are reported all
    the same.

    Attributes:
      calibration: score -> probability of a hallucination, as in the training part;
        ``None`` for a method that was shown no labelled answers.
      threshold: the score from which on an answer is flagged, ``None`` likewise.  The
        best by F1 may well lie where the probability is below a half.
      unseen: scores of the rows learnt from by fits that had not seen their sources, on
        the scale of :meth:`score`; calibration and threshold come from these.  What
        other rows hold means nothing; empty when the detector was not fitted here.
      beats: whether it ranked answers that it had not seen better than the best
        control, as :func:`jaxhal.evaluation.compare` has it: ``"yes"``, ``"within
        noise"`` or ``"no"``; ``None`` where nobody compared them.
      layers: of the reader it was fitted to, where it looks at layers.
      needs: what else a reader's configuration has to be, such as
        ``{"hidden_size": 64}``, where it was fitted elsewhere.
      reader: the :func:`~jaxhal.reading.keys.fingerprint` of that reader, where it has
        to be no other.
      encoders: fingerprints of those that it asks beside the reader, by source.
      dtype: of that reader's parameters, where it may be another one's, but is noted.
      measured: how well it ranked those answers, ``None`` likewise.
      calibrated_on: the answers that calibration and threshold come from, with their
        ``unseen`` scores; ``None`` where they are not known.
      unit: what it was fitted to, a ``response`` or parts of responses, as
        :class:`jaxhal.experiments.Experiment` has it; of whole answers only the former
        says anything.
      highlights: of answers that a fit had not seen, the mean share of supported
        characters in spans, per source and step of the token score
        (:func:`jaxhal.evaluation.highlighted`); ``None`` where it is not known.
      promise: what the threshold promises, where it was chosen for that; or that of
        token scores, of spans.
      rate: the base rate that probabilities are corrected for, ``None`` where it is
        that of ``calibrated_on``.
    """

    detector: Detector
    params: Any
    calibration: evaluation.Platt | evaluation.Isotonic | None
    threshold: float | None
    unseen: Float[np.ndarray, " samples"] = dataclasses.field(
        default_factory=lambda: np.zeros(0, np.float32)
    )
    beats: str | None = None
    layers: int | None = None
    needs: Mapping[str, int] = dataclasses.field(default_factory=dict)
    reader: str | None = None
    encoders: Mapping[str, str] = dataclasses.field(default_factory=dict)
    dtype: str | None = None
    measured: Measured | None = None
    calibrated_on: CalibrationSet | None = None
    unit: str = "response"
    highlights: Float[np.ndarray, "sources steps"] | None = None
    promise: Guarantee | None = None
    rate: float | None = None

    def __post_init__(self):
        if self.beats not in (None, *VERDICTS):
            raise ValueError(
                f"beats is {shown(self.beats)}; use {', '.join(VERDICTS)} or None"
            )

    def __repr__(self) -> str:
        why = "" if self.silent is None else f", flags nothing: {self.silent}"
        return f"<Fitted {self.detector.name}, threshold {self.threshold}{why}>"

    @property
    def silent(self) -> str | None:
        """Why it flags nothing, ``None`` when it may."""
        if self.detector.control:
            return "it is a control"
        if self.threshold is None:
            return "it was shown no labelled answers"
        if self.unit != "response":
            return f"it was fitted to each {self.unit} of answers, not to whole ones"
        if self.calibration is not None and self.calibration.flat:
            return "it gives every answer the same probability"
        return {
            "within noise": "it beats the best control only within the noise",
            "no": "it does not beat the best control",
        }.get(self.beats or "yes")

    def check_reader(self, lm: LM) -> None:
        """ValueError where it was fitted to what another model read, or others said.

        That the same model reads in another dtype is noted once.
        """
        name, layers = lm.name, lm.config.num_hidden_layers
        if self.layers not in (None, layers):
            raise ValueError(
                f"detector {self.detector.name!r} was fitted to a reader of "
                f"{self.layers} layers, and {name!r} has {layers}; read with the model "
                "it was fitted to, or fit it to answers that this one has read"
            )
        for key, needed in self.needs.items():
            if (found := getattr(lm.config, key)) != needed:
                raise ValueError(
                    f"detector {self.detector.name!r} was fitted to a reader of {key} "
                    f"{needed}, and {name!r} has {found}; read with the model it was "
                    "fitted to"
                )
        if self.reader is not None and self.reader != fingerprint(lm):
            raise ValueError(
                f"detector {self.detector.name!r} was fitted to a reader of other "
                f"weights than {name!r} has, or in another dtype; read with the model "
                "and dtype it was fitted to, or fit it to answers that this one has "
                "read"
            )
        now = encoders.fingerprints(self.detector) if self.encoders else {}
        for source, known in self.encoders.items():
            if now.get(source) != known:
                raise ValueError(
                    f"detector {self.detector.name!r} was fitted to what {source} "
                    "said, which has other weights now, or lies elsewhere; bring that "
                    "back, or fit it anew"
                )
        of_text = all(isinstance(one, OfText) for _, one in self.detector.features)
        if self.dtype not in (None, lm.dtype) and not of_text:
            note(
                f"detectors were fitted to what {name!r} reads in {self.dtype}, and it "
                f"reads in {lm.dtype} here: scores and probabilities may differ a "
                f"little; load it with --dtype {self.dtype} (dtype={self.dtype!r}) to "
                "read alike"
            )

    def score(self, inputs: Any) -> Float[np.ndarray, " samples"]:
        """Scores of answers from the detector's inputs."""
        return scores_of(self.detector, self.params, inputs)

    def probabilities(self, scores: Any) -> Float[np.ndarray, " samples"]:
        """Calibrated probabilities of a hallucination."""
        if self.calibration is None:
            raise ValueError(_uncalibrated(self.detector))
        found = self.calibration(scores)
        if self.rate is None or self.calibrated_on is None:
            return found
        return at_rate(found, self.calibrated_on.labels.mean(), self.rate)

    def adapted(self, scores: Any, sources: Sequence[Any] | None = None) -> "Fitted":
        """The same for the base rate that these scores seem to be of, all together.

        ``sources`` are those of the answers.  See :func:`jaxhal.evaluation.adapted`.
        ValueError where it was saved without the answers that it was calibrated on.
        """
        if self.calibration is None:
            return self
        if self.calibrated_on is None:
            raise ValueError(
                f"detector {self.detector.name!r} was saved without the answers that "
                "it was calibrated on, so their base rate is not known; fit it anew "
                "and use that one, or leave adapt out"
            )
        kept, given = self.calibrated_on, np.asarray(scores, float)
        fine = np.flatnonzero(np.isfinite(given))
        prior = kept.labels.mean()
        rate = evaluation.adapted(
            self.calibration(given[fine]),
            prior,
            None if sources is None else [sources[at] for at in fine.tolist()],
            known=self.calibration(kept.scores),
            known_groups=kept.sources.tolist(),
        )[1]
        return dataclasses.replace(self, rate=None if rate == prior else rate)

    def flags(self, scores: Any) -> Bool[np.ndarray, " samples"]:
        """Which answers it flags: those that reach the threshold and are more likely
        hallucinated than not; none when it is :attr:`silent`."""
        likely = self.probabilities(scores) >= 0.5
        return self.reaches(scores) & likely & (self.silent is None)

    def reaches(self, scores: Any) -> Bool[np.ndarray, " samples"]:
        """Which scores reach the threshold; methods are compared by it."""
        if self.threshold is None:
            raise ValueError(_uncalibrated(self.detector))
        # The threshold lies between two scores, where float32 may not tell it apart.
        return np.asarray(scores, float) >= self.threshold


def _uncalibrated(detector: Detector) -> str:
    return (
        f"detector {detector.name!r} was shown no labelled answers, so its scores have "
        "no probability and no threshold; use jaxhal.scoring.fit"
    )


def untrained(
    detector: Detector, *, model: str | None = None, readers: str = ""
) -> Fitted:
    """A method without parameters as it is: scores, but no probability.

    ValueError on another one, which names the ``model`` whose answers to fit it to, and
    the ``readers`` it comes fitted for.
    """
    if detector.fit is not None:
        raise ValueError(
            f"detector {detector.name!r} must be fitted to labelled answers of "
            f"{model or 'the reader'!r} first; pass what jaxhal.scoring.fit, "
            "jaxhal.scoring.load or jaxhal.experiments.run returned instead of it"
            + (f", or read with {readers}" if readers else "")
        )
    return Fitted(detector, (), None, None)


def fit(
    detector: Detector,
    inputs: Any,
    targets: Targets,
    *,
    objective: Literal["f1", "accuracy"] = "f1",
    precision: float | None = None,
    calibration: Literal["platt", "isotonic"] = "platt",
    known: Mapping[str, Fitted] | None = None,
    layers: int | None = None,
) -> Fitted:
    """Fits a detector to a training part.

    Warns when the scores say nothing of answers not fitted to, so that all have one
    probability.  Raises ValueError when the rows have one class, too few sources for
    the folds, or cannot reach the precision.

    Args:
      inputs: of :func:`jaxhal.scoring.collect`.
      targets: labels, sources, and which rows to learn from.
      objective: what the threshold is chosen for.
      precision: choose the threshold for this precision instead.
      calibration: how scores become probabilities: a sigmoid, or any steps that rise,
        which take more answers to find.
      known: members of an ensemble that were fitted to the same rows before.
      layers: of the reader, so that what looks at them refuses one with others.
    """
    one_of(("f1", "accuracy"), objective=objective)
    one_of(("platt", "isotonic"), calibration=calibration)
    before = {n: HeldOut(one.params, one.unseen) for n, one in (known or {}).items()}
    try:
        params, unseen = held_out(detector, inputs, targets._replace(known=before))
    except SplitError as error:
        raise ValueError(
            f"detector {detector.name!r} cannot be fitted, which takes folds inside "
            f"what it learns from: {error.args[0]}; give more labelled sources of each "
            "class"
        ) from error
    seen, labels = unseen[targets.rows], np.asarray(targets.labels)[targets.rows]
    if precision is not None:
        threshold = evaluation.precision_threshold(seen, labels, precision)
    elif objective == "accuracy":
        threshold = evaluation.best_accuracy_threshold(seen, labels)
    else:
        threshold = evaluation.best_f1_threshold(seen, labels)
    calibrate = evaluation.platt if calibration == "platt" else evaluation.isotonic
    found = calibrate(seen, labels)
    if found.flat and not detector.control:
        warnings.warn(
            f"detector {detector.name!r} ranks answers of the training part no better "
            "than chance: all get one probability, and it flags none; give more "
            "labelled answers, or use another detector",
            stacklevel=2,
        )
    own = layers if detector.layered else None
    sources = np.asarray(targets.groups)[targets.rows]
    kept = CalibrationSet(seen, labels, sources)
    return Fitted(
        detector, params, found, threshold, unseen, layers=own, calibrated_on=kept
    )
