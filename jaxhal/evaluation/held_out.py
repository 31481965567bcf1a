"""What answers that a detector was not fitted to say of it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

# Standard errors from a mean to the end of its 95 % interval.
_NORMAL = 1.96


class Measured(NamedTuple):
    """How well a detector ranked answers that it was not fitted to.

    >>> print(Measured("ragtruth_qa", 298, 87, 0.848, 0.797, 0.894))
    AUROC 0.848 [0.80, 0.89] on 298 held-out answers of ragtruth_qa, 87 hallucinated
    """

    data: str
    answers: int
    hallucinated: int
    auroc: float
    low: float | None = None  # the 95 % interval over sources, where it is known
    high: float | None = None

    def __str__(self) -> str:
        around = ""
        if self.low is not None and self.high is not None:
            around = f" [{self.low:.2f}, {self.high:.2f}]"
        return (
            f"AUROC {self.auroc:.3f}{around} on {self.answers} held-out answers of "
            f"{self.data}, {self.hallucinated} hallucinated"
        )

    @property
    def standard_error(self) -> float:
        """Of the AUROC, by its interval; 0 where that is not known."""
        if self.low is None or self.high is None:
            return 0.0
        return (self.high - self.low) / (2 * _NORMAL)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; without the interval where it is not known."""
        return {name: at for name, at in self._asdict().items() if at is not None}

    @classmethod
    def of(cls, data: str, row: Mapping[str, Any], labels: Any) -> "Measured":
        """By a row of :func:`jaxhal.evaluation.compare`, over answers so labelled."""
        count, hallucinated = len(labels), int(np.sum(labels))
        return cls(data, count, hallucinated, row["AUROC"], row["low"], row["high"])


class CalibrationSet(NamedTuple):
    """Answers that a detector was not fitted to, as it judged them.

    Probabilities, thresholds and promises about answers to come rest on these.
    """

    scores: Float[np.ndarray, " answers"]
    labels: Int[np.ndarray, " answers"]  # 1 hallucinated, 0 grounded
    sources: Int[np.ndarray, " answers"]  # equal numbers are not independent
