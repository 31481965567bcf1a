"""One configuration to scores: read once, fit, judge."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxhal.datasets import load_dataset
from jaxhal.detectors import CATALOGUE, Detector, build
from jaxhal.experiments import finetuning
from jaxhal.experiments.config import Config, Data
from jaxhal.experiments.protocols import Split, splits
from jaxhal.io.progress import progress_bar
from jaxhal.models.lm import kept_lm as model
from jaxhal.models.registry import private_cache
from jaxhal.reading.store import Store
from jaxhal.reporting.results import Judged, own
from jaxhal.scoring.fitting import Fitted
from jaxhal.scoring.inputs import Inputs, collect, columns_of, fit_part, frame_of
from jaxhal.tuning import Tuned
from jaxhal.types import Example


def examples_of(data: Data, seed: int) -> list[Example]:
    """The answers of a data set, or those of some of its sources.

    Raises:
      ValueError: when more sources are asked for than there are.
    """
    found = load_dataset(data.name, **data.options)
    if data.sources is None:
        return found
    groups = list(dict.fromkeys(example.group for example in found))
    if data.sources > len(groups):
        raise ValueError(
            f"data {data.name!r} has {len(groups)} sources; sources is {data.sources}"
        )
    drawn = np.random.default_rng(seed).permutation(len(groups))[: data.sources]
    kept = {groups[number] for number in drawn}
    return [example for example in found if example.group in kept]


def read_data(
    config: Config, detectors: Sequence[Detector], progress: bool | None = None
) -> dict[str, Inputs]:
    """Every data set of a configuration, read through its store."""
    lm = model(config.model, config.dtype)
    store = Store(config.store or private_cache("features"))
    return {
        data.label: collect(
            lm,
            examples_of(data, config.seed),
            detectors,
            store,
            unit=config.unit,  # pyright: ignore[reportArgumentType]  (checked before)
            batch_size=config.batch_size,
            progress=progress,
        )
        for data in config.data
    }


@dataclasses.dataclass(frozen=True)
class Found:
    """What a run computed.

    Attributes:
      judged: the scores of every test part.
      splits: per data set, of its protocol.
      fitted: data set -> detector -> what was fitted on the first split.
      tuned: data set -> the reader tuned on the first split; empty without a tuning.
    """

    judged: list[Judged]
    splits: dict[str, list[Split]]
    fitted: dict[str, dict[str, Fitted]]
    tuned: dict[str, Tuned] = dataclasses.field(default_factory=dict)


def judge(
    config: Config,
    detectors: Sequence[Detector],
    data: Mapping[str, Inputs],
    progress: bool | None = None,
) -> Found:
    """Fits every detector on every training part and scores the test parts.

    Raises:
      ValueError: when data cannot be split, or two data sets share so many sources that
        nothing is left to test on.
    """
    parts = {label: splits(config, one) for label, one in data.items()}
    elsewhere = _elsewhere(data, parts)
    judged, kept, kept_tuned = [], {}, {}
    total = sum(len(found) for found in parts.values()) * len(detectors)
    with progress_bar(total, "fitting", "fit", progress) as bar:
        for label, found in parts.items():
            fitted: dict[str, Fitted] = {}
            tuned: finetuning.Judge | None = None
            number = 0
            for fold, (train, test) in enumerate(found):
                # The splits of `toha` differ in what they test only.
                if fold and np.array_equal(train, found[fold - 1].train):
                    bar.update(len(detectors))
                else:
                    fitted = fit_part(
                        detectors,
                        data[label],
                        train,
                        jax.random.fold_in(jax.random.key(config.seed), fold),
                        objective=config.threshold,
                        precision=config.precision,
                        calibration=config.calibration,
                        bar=bar,
                    )
                    if config.tuning is not None:
                        tuned = _tune(config, label, data[label], train, fold, progress)
                        kept_tuned.setdefault(label, tuned.tuned)
                    number = fold
                kept.setdefault(label, fitted)
                for other, one in data.items():
                    whole = test if other == label else parts[other][0].test
                    rows = elsewhere.get((label, other), whole)
                    left_out = len(whole) - len(rows)
                    frame = frame_of(one, rows, fitted)
                    if tuned is not None:
                        some = [one.examples[row] for row in rows]
                        score = tuned.score(some, progress)
                        name = finetuning.FINE_TUNED.name
                        frame = frame.assign(**columns_of(name, tuned.fitted, score))
                    judged.append(Judged(label, other, fold, number, left_out, frame))
    return Found(judged, parts, kept, kept_tuned)


def compared(found: Found, rows: Sequence[Mapping[str, Any]]) -> Found:
    """The same, where each fitted detector knows whether it beat the controls.

    Args:
      found: what a run computed.
      rows: of its table.
    """
    fitted = {}
    for label, some in found.fitted.items():
        beats = {row["method"]: row["beats controls"] for row in own(rows, label)}
        fitted[label] = {
            name: dataclasses.replace(one, beats=beats[name])
            for name, one in some.items()
        }
    return dataclasses.replace(found, fitted=fitted)


def _elsewhere(
    data: Mapping[str, Inputs], parts: Mapping[str, Sequence[Split]]
) -> dict[tuple[str, str], np.ndarray]:
    """What is tested in a second data set: no answer whose source the first fits to."""
    rows = {}
    for label, other in itertools.permutations(data, 2):
        (train, _), (_, test) = parts[label][0], parts[other][0]
        known = {data[label].examples[row].group for row in train}
        examples = data[other].examples
        kept = [row for row in test if examples[row].group not in known]
        if len({examples[row].label for row in kept}) < 2:
            raise ValueError(
                f"data sets {label!r} and {other!r} share sources: what is trained on "
                f"in {label!r} leaves {len(kept)} of {len(test)} test answers of "
                f"{other!r}, not of both classes; give data sets, or 'sources' of "
                "them, that overlap less"
            )
        rows[label, other] = np.array(kept)
    return rows


def _tune(
    config: Config,
    label: str,
    data: Inputs,
    train: np.ndarray,
    fold: int,
    progress: bool | None,
) -> finetuning.Judge:
    lm = model(config.model, config.dtype)
    folder = Path(config.out) / config.name / finetuning.CHECKPOINTS / label / str(fold)
    return finetuning.tune(config, lm, data, train, folder, progress)


def specs_of(config: Config) -> dict[str, Any]:
    """How every detector of a run is built: those configured, then all controls.

    Raises:
      ValueError: when two are configured under one name.
    """
    chosen: dict[str, Any] = {}
    for spec in config.detectors:
        name = build(spec).name
        if name in chosen:
            raise ValueError(
                f"two detectors are named {name!r}; give one another 'name'"
            )
        chosen[name] = spec
    every = {name: make() for name, make in CATALOGUE.items()}
    return chosen | {
        n: n for n, d in every.items() if d.info.control and n not in chosen
    }


def detectors_of(config: Config) -> list[Detector]:
    """The configured detectors, and every control beside them."""
    return [build(spec) for spec in specs_of(config).values()]
