"""The share of hallucinated answers among some that nobody has labelled."""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jaxhal.detectors import Detector
from jaxhal.evaluation import prevalence
from jaxhal.evaluation.held_out import Measured
from jaxhal.models.lm import LM
from jaxhal.scoring.detection import resolve, score
from jaxhal.scoring.fitting import Fitted
from jaxhal.scoring.verdicts import decider, undecided
from jaxhal.types import Example


class Rated(NamedTuple):
    """A share of hallucinated answers.

    Attributes:
      rate: in [0, 1]; its 95 % interval is from ``low`` to ``high``.
      answers: how many were read.
      called: the share of them that got the verdict ``"hallucinated"``.
      by: the detector that judged them.
      basis: what that was measured on.
    """

    rate: float
    low: float
    high: float
    answers: int
    called: float
    by: str
    basis: Measured


def rate(
    lm: LM,
    examples: Sequence[Example],
    detectors: Iterable[str | Detector | Fitted] | None = None,
    *,
    batch_size: int = 8,
    progress: bool | None = None,
) -> Rated:
    """How many of some answers are hallucinated, by the deciding detector.

    Its probabilities are corrected by how it errs on the labelled answers it carries,
    and the interval is for both samples, whole sources drawn anew: see
    :func:`jaxhal.evaluation.rate`.  That assumes that grounded and hallucinated answers
    look as they did there, whatever their share.

    Raises ValueError where no detector may decide, or it carries no labelled answers,
    or none of the examples can be read; warns about those that cannot, and where
    sources are too few.

    Args:
      examples: unlabelled; ``source`` says which are not independent.
      detectors, batch_size, progress: as :func:`jaxhal.score` takes them.
    """
    chosen = resolve(lm.name, detectors, lm=lm)
    if (one := decider(chosen)) is None:
        raise ValueError(undecided(chosen, lm.name, lm))
    name, known = one.detector.name, one.calibrated_on
    if known is None or one.measured is None:
        raise ValueError(
            f"detector {name!r} carries no labelled answers to correct its errors by; "
            "fit it with jaxhal.fit, which keeps them"
        )
    how: Any = {"batch_size": batch_size, "progress": progress}
    reports = score(lm, examples, [one], **how)
    read = [n for n, report in enumerate(reports) if report.error is None]
    if len(read) < len(reports):
        why = next(report.error for report in reports if report.error is not None)
        said = f"{len(reports) - len(read)} of {len(reports)} answers cannot be read"
        if not read:
            raise ValueError(f"{said}: {why}")
        warnings.warn(f"{said} and are left out; the first: {why}", stacklevel=2)
    found = prevalence.rate(
        [reports[n].probability for n in read],
        one.probabilities(known.scores),
        known.labels,
        known.sources.tolist(),
        [examples[n].group for n in read],
    )
    called = sum(reports[n].verdict == "hallucinated" for n in read) / len(read)
    return Rated(*found, len(read), called, name, one.measured)
