"""A classifier fitted on one model's heads judges what another model reads."""

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Float

from jaxhal.detectors import Detector, Targets
from jaxhal.detectors.lookback_lens import Spans
from jaxhal.evaluation.tables import compare
from jaxhal.experiments import running
from jaxhal.experiments.config import UNITS, Experiment, load_config
from jaxhal.experiments.splitting import splits
from jaxhal.io.showing import quoted
from jaxhal.scoring.fitting import fit
from jaxhal.scoring.inputs import Inputs

if TYPE_CHECKING:
    import pandas as pd


def across_models(
    config: Any,
    reader: str,
    overrides: Iterable[str] = (),
    *,
    progress: bool | None = None,
) -> "pd.DataFrame":
    """Lets detectors fitted on one model judge answers that another model reads.

    Every head of the first model is predicted from all heads of the other by least
    squares, on the training part without its labels; then the first model's classifier
    is applied to the predictions.

    Args:
      config: an experiment on one data set; its ``model`` is the first model, and its
        detectors decide on one vector an answer, as ``lookback_probe`` does, or are
        ``lookback_lens``, of which whole answers are mapped.
      reader: the other model.
      overrides: dotted ``key=value`` pairs.
      progress: show progress bars; ``None`` shows them on a terminal.

    Returns:
      Three rows a detector, of the first test part: AUROC with interval of the first
      model, of the other fitted by itself, and of the ``transferred`` classifier.

    Raises:
      ValueError: on several data sets, a detector that decides on something else, or
        models that do not read the same answers or cut them into the same parts.

    References:
      Chuang et al., Lookback Lens, 2024, cross-model transfer.
    """
    import pandas as pd

    config = load_config(config, overrides)
    if len(config.data) != 1:
        raise ValueError(f"config has {len(config.data)} data sets; give one")
    detectors = [d for d in running.detectors_of(config) if not d.control and d.fit]
    both = (config, dataclasses.replace(config, model=reader))
    first, other = (
        next(iter(running.read_data(c, detectors, progress).values())) for c in both
    )
    failed = sorted(first.errors.keys() ^ other.errors.keys())
    if failed:
        raise ValueError(
            f"only one of the models could read rows {failed}; leave out what is too "
            "long for the other"
        )
    if [e.id for e in first.examples] != [e.id for e in other.examples]:
        raise ValueError(
            f"the models cut the answers into different {UNITS[config.unit]}, "
            f"{len(first.examples)} and {len(other.examples)}; use unit: response, or "
            "models of one tokenizer"
        )
    rows = []
    for detector in detectors:
        scores, labels, groups = _scores(config, detector, first, other)
        for row in compare(scores, labels, groups):
            kept = {key: row[key] for key in ("AUROC", "low", "high")}
            rows.append({"detector": detector.name, "fitted on": row["method"], **kept})
    return pd.DataFrame(rows)


def _scores(
    config: Experiment, detector: Detector, first: Inputs, other: Inputs
) -> tuple:
    ours, theirs = first.inputs[detector.name], other.inputs[detector.name]
    own, read = _vectors(detector, first, "first"), _vectors(detector, other, "other")
    train, test = splits(config, first, config.data[0].label)[0]
    key = jax.random.key(config.seed)
    weight = np.ones(len(first.labels))
    targets = Targets(first.labels, first.groups, weight, key).only(train)
    fitted = fit(detector, ours, targets)
    mapped = predicted_heads(read[train], own[train], read)
    predicted = ours._replace(whole=mapped) if isinstance(ours, Spans) else mapped
    scores = {
        "first": fitted.score(ours)[test],
        "other": fit(detector, theirs, targets).score(theirs)[test],
        "transferred": fitted.score(predicted)[test],
    }
    return scores, first.labels[test], first.groups[test].tolist()


def predicted_heads(
    source: Float[np.ndarray, "train source"],
    target: Float[np.ndarray, "train target"],
    read: Float[np.ndarray, "rows source"],
) -> Float[np.ndarray, "rows target"]:
    """What the target's heads would say of rows, by least squares from the source's."""
    from sklearn.linear_model import Ridge

    # So small a penalty only keeps the solution finite where heads are collinear or
    # outnumber answers; in float64, for the squares of float32 lose its digits.
    ridge = Ridge(1e-4, solver="svd").fit(source.astype(float), target)
    return np.asarray(ridge.predict(read), np.float32)


def _vectors(detector: Detector, data: Inputs, which: str) -> np.ndarray:
    """One vector an answer: all that a linear classifier decides on."""
    inputs = data.inputs[detector.name]
    vectors = inputs.whole if isinstance(inputs, Spans) else inputs
    if not isinstance(vectors, np.ndarray) or vectors.ndim != 2:
        raise ValueError(
            f"detector {detector.name!r} does not decide on one vector an answer; use "
            "lookback_probe, lookback_lens, max_prompt_probe, toha_supervised or toha"
        )
    if len(bad := np.argwhere(~np.isfinite(vectors))):
        row, head = bad[0].tolist()
        raise ValueError(
            f"head {head} of the {which} model is {vectors[row, head]} at row {row}, "
            f"answer {quoted(data.examples[row].id)}; leave that answer out"
        )
    return vectors
