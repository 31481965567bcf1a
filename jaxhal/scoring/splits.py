"""Detectors fitted to one part of labelled answers, and what they say of another."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Int

from jaxhal.detectors import Detector, Targets
from jaxhal.io.progress import Bar
from jaxhal.scoring.fitting import Fitted, fit
from jaxhal.scoring.inputs import Inputs

if TYPE_CHECKING:
    import pandas as pd


def fit_part(
    detectors: Sequence[Detector],
    data: Inputs,
    train: Int[np.ndarray, " train"],
    key: jax.Array,
    *,
    bar: Bar | None = None,
    **options: Any,
) -> dict[str, Fitted]:
    """Every detector, fitted to some of the answers with options of ``fit``.

    The key is of the networks' first weights; the bar moves by one for each detector.
    """
    everything = Targets(data.labels, data.groups, np.ones(len(data.labels)), key)
    targets = everything.only(train)
    fitted: dict[str, Fitted] = {}
    # Ensembles last: their members need not be fitted again.
    for detector in sorted(detectors, key=lambda one: bool(one.members)):
        inputs = data.inputs[detector.name]
        fitted[detector.name] = fit(detector, inputs, targets, known=fitted, **options)
        if bar is not None:
            bar.update()
    return {detector.name: fitted[detector.name] for detector in detectors}


def frame_of(
    data: Inputs, rows: Int[np.ndarray, " rows"], fitted: Mapping[str, Fitted]
) -> "pd.DataFrame":
    """What was fitted says of some answers, as ``jaxhal.reporting.results.Judged``."""
    import pandas as pd

    columns: dict[str, Any] = {
        "row": rows,
        "id": [data.examples[row].id for row in rows],
        "source": data.groups[rows],
        "label": data.labels[rows],
    }
    for name, one in fitted.items():
        columns |= columns_of(name, one, one.score(data.inputs[name])[rows])
    return pd.DataFrame(columns)


def columns_of(name: str, one: Fitted, score: np.ndarray) -> dict[str, np.ndarray]:
    """Scores of a detector, their probabilities, and which reach its threshold."""
    return {
        name: score,
        f"{name}.probability": one.probabilities(score),
        f"{name}.flagged": one.reaches(score),
    }
