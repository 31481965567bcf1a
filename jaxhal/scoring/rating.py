"""The share of hallucinated answers among some of which few or none are labelled."""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jaxhal.evaluation import prevalence
from jaxhal.evaluation.held_out import CalibrationSet, Measured
from jaxhal.models.lm import LM
from jaxhal.scoring.collection import Asked
from jaxhal.scoring.detection import resolve, score
from jaxhal.scoring.fitting import Fitted
from jaxhal.scoring.verdicts import decider, undecided
from jaxhal.types import Example

# Labelled answers of either class from which on they are used.
_EACH = 5


class Rated(NamedTuple):
    """A share of hallucinated answers.

    Attributes:
      rate: in [0, 1]; its 95 % interval is from ``low`` to ``high``.
      answers: how many were read.
      labelled: of how many of them the labels were used; 0 where those were that the
        detector carries.
      called: the share of them that got the verdict ``"hallucinated"``.
      by: the detector that judged them.
      basis: what that was measured on.
    """

    rate: float
    low: float
    high: float
    answers: int
    labelled: int
    called: float
    by: str
    basis: Measured


def rate(
    lm: LM,
    examples: Iterable[Example],
    detectors: Iterable[Asked] | None = None,
    *,
    batch_size: int = 8,
    progress: bool | None = None,
) -> Rated:
    """How many of some answers are hallucinated, by the deciding detector.

    Its probabilities are corrected by how it errs on labelled answers, and the interval
    is for both samples, whole sources drawn anew: see :func:`jaxhal.evaluation.rate`.

    - Where none of the examples is labelled, those are the answers that the detector
      carries (scaled probability average; Bella et al., 2010).  That assumes that
      grounded and hallucinated answers look as they did there, whatever their share.
    - Where at least five grounded and five hallucinated ones are, and others are not,
      the labelled examples are (prediction-powered inference; `Angelopoulos et al.
      <https://arxiv.org/abs/2311.01453>`_, 2023), and the probabilities those of the
      others.  That assumes that they are a random part of the examples, and that the
      detector was not fitted to them.
    - Other labels are not looked at, with a warning.

    Raises ValueError where no detector may decide, or it carries no labelled answers
    that are needed, or none of the examples can be read; warns about those that cannot,
    and where sources are too few.

    Args:
      examples: ``source`` says which are not independent.
      detectors, batch_size, progress: as :func:`jaxhal.score` takes them.
    """
    examples = list(examples)
    chosen = resolve(lm.name, detectors, lm=lm)
    if (one := decider(chosen)) is None or one.measured is None:
        raise ValueError(undecided(chosen, lm))
    if not _parted(examples, range(len(examples)))[0]:
        _carried(one)  # to find that it has none should cost no reading
    how: Any = {"batch_size": batch_size, "progress": progress}
    reports = score(lm, examples, [one], **how)
    read = [n for n, report in enumerate(reports) if report.error is None]
    if len(read) < len(reports):
        why = next(report.error for report in reports if report.error is not None)
        said = f"{len(reports) - len(read)} of {len(reports)} answers cannot be read"
        if not read:
            raise ValueError(f"{said}: {why}")
        warnings.warn(f"{said} and are left out; the first: {why}", stacklevel=2)
    labelled, rest = _parted(examples, read)
    if labelled:
        known = [reports[n].probability for n in labelled]
        labels = [examples[n].label for n in labelled]
        sources = [examples[n].group for n in labelled]
    else:
        scores, labels, numbers = _carried(one)
        known, sources = one.probabilities(scores), numbers.tolist()
        if vain := sum(examples[n].label is not None for n in read):
            warnings.warn(
                f"{vain} of {len(read)} answers are labelled, and their labels are not "
                f"used: that takes {_EACH} of each class, and others without a label",
                stacklevel=2,
            )
    found = prevalence.rate(
        [reports[n].probability for n in rest],
        known,
        labels,
        sources,
        [examples[n].group for n in rest],
        shifted=not labelled,
    )
    called = sum(reports[n].verdict == "hallucinated" for n in read) / len(read)
    counts, by = (len(read), len(labelled), called), one.detector.name
    return Rated(*found, *counts, by, one.measured)


def _parted(
    examples: Sequence[Example], read: Sequence[int]
) -> tuple[Sequence[int], ...]:
    """Of those read, the ones whose labels are used, if any, and the ones rated."""
    labelled = [n for n in read if examples[n].label is not None]
    rest = [n for n in read if examples[n].label is None]
    hallucinated = sum(examples[n].label == 1 for n in labelled)
    if not rest or min(hallucinated, len(labelled) - hallucinated) < _EACH:
        return [], read
    return labelled, rest


def _carried(one: Fitted) -> CalibrationSet:
    """The labelled answers that it carries; ValueError where there are none."""
    if one.calibrated_on is None:
        raise ValueError(
            f"detector {one.detector.name!r} carries no labelled answers to correct "
            "its errors by; fit it with jaxhal.fit, which keeps them"
        )
    return one.calibrated_on
