"""What each detector costs: every one alone, on a few of the answers."""

import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxhal.detectors import Detector
from jaxhal.experiments.config import Config
from jaxhal.io.progress import progress_bar
from jaxhal.models.lm import LM
from jaxhal.reading.store import Store
from jaxhal.scoring.inputs import Inputs, collect
from jaxhal.types import Example


def costs(
    config: Config,
    lm: LM,
    data: Mapping[str, Inputs],
    detectors: Sequence[Detector],
    progress: bool | None = None,
) -> dict[str, float]:
    """Milliseconds an answer from its text to what a detector decides on.

    Everything is computed anew: tokens, passes of the reader, samples, entailment.
    Programs are compiled before, models loaded, an endpoint has replied; what fits a
    detector and what it then decides, a product of small matrices, is left out.
    Detectors that compute the same are timed once.

    Args:
      config: how many answers, evenly spaced, and how many are read together.
      lm: the reader.
      data: what was read; the answers are those of the first.
      detectors: each alone.
      progress: show a progress bar; ``None`` shows it on a terminal.

    Returns:
      detector -> milliseconds.
    """
    examples = next(iter(data.values())).examples
    chosen = np.linspace(0, len(examples) - 1, config.timed).round().astype(int)
    some = [examples[number] for number in np.unique(chosen)]
    alike: dict[Any, list[Detector]] = {}
    for detector in detectors:
        alike.setdefault(frozenset(detector.features), []).append(detector)
    found: dict[str, float] = {}
    with progress_bar(len(alike), "timing", "detector", progress) as bar:
        for same in alike.values():
            _seconds(lm, some, same[0], config.batch_size)  # compiles
            cost = 1000 * _seconds(lm, some, same[0], config.batch_size) / len(some)
            found |= {detector.name: cost for detector in same}
            bar.update()
    return {detector.name: found[detector.name] for detector in detectors}


def _seconds(
    lm: LM, examples: Sequence[Example], detector: Detector, batch_size: int
) -> float:
    # A batch that is filled up with nothing would count as the cost of a few.
    options: Any = {"batch_size": min(batch_size, len(examples)), "progress": False}
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        began = time.perf_counter()
        collect(lm, examples, [detector], store, **options)
        return time.perf_counter() - began
