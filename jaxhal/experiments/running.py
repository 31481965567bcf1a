"""One configuration to scores: read once, split, fit, judge, time."""

import dataclasses
import itertools
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxhal.datasets import load_dataset
from jaxhal.detectors import Detector, build
from jaxhal.evaluation.held_out import Measured
from jaxhal.experiments import finetuning
from jaxhal.experiments.config import Data, Experiment
from jaxhal.experiments.splitting import OFFICIAL, Split, official_split, splits
from jaxhal.experiments.tokens import first_highlights
from jaxhal.io.progress import note, progress_bar
from jaxhal.models.lm import LM
from jaxhal.models.lm import kept_lm as model
from jaxhal.models.registry import known_as, private_cache
from jaxhal.reading.sharing import Share
from jaxhal.reading.store import Store
from jaxhal.reporting import results
from jaxhal.reporting.results import Judged
from jaxhal.scoring import inputs
from jaxhal.scoring.collection import FittedDetectors, beside_controls
from jaxhal.scoring.fitting import Fitted
from jaxhal.scoring.inputs import (
    Inputs,
    about_answers,
    check_marked,
    collect,
    columns_of,
    fit_part,
    frame_of,
)
from jaxhal.texts import declines
from jaxhal.tuning import Tuned
from jaxhal.types import Example

if TYPE_CHECKING:
    import pandas as pd

# Of protocols repeated as published; the others split by the configuration's seed.
PUBLISHED_SEEDS = {"kfold": "42", "toha": "42 to 46", "leaky": "42"}


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run found.

    Attributes:
      config: every setting.
      folder: where it was written.
      detectors: those configured, then all controls.
      data: what was read, by data set.
      splits: per data set, of its protocol.
      judged: the scores of every test part.
      fitted: data set -> detector -> what was fitted on the first split.
      tuned: data set -> the reader tuned on the first split; empty without a tuning.
      rows: a row per method, best first, controls last; with several data sets for
        every pair of ``train`` and ``test``.
    """

    config: Experiment
    folder: Path
    detectors: list[Detector]
    data: dict[str, Inputs]
    splits: dict[str, list[Split]]
    judged: list[Judged]
    fitted: dict[str, dict[str, Fitted]]
    tuned: dict[str, Tuned]
    rows: list[dict[str, Any]]

    @property
    def table(self) -> "pd.DataFrame":
        """The rows as a data frame."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    @property
    def methods(self) -> list[Detector]:
        """The detectors, and the tuned reader where there is one."""
        return [*self.detectors, *([finetuning.FINE_TUNED] if self.tuned else [])]

    def ready(self, label: str) -> FittedDetectors:
        """What was fitted on the first split of a data set, to use and to save."""
        data, fitted = self.data[label], self.fitted[label]
        train = [data.examples[row] for row in self.splits[label][0].train]
        config = self.config
        lm = model(config.model, config.dtype, config.mesh)
        about = about_answers(lm, label, train) | {"model": known_as(config.model)}
        parts = [part for part in self.judged if part.train == part.test == label]
        fits = len({part.fit for part in parts})
        about["note"] = f"The figures are of protocol {config.protocol}: " + (
            f"the test parts of {fits} fits, of which the first is saved."
            if fits > 1
            else "answers that what is saved was not fitted to."
        )
        if config.unit != "response":
            about["note"] += (
                f" They are of each {config.unit} of an answer; whole answers get no "
                "verdict from these."
            )
        specs = beside_controls(config.detectors)
        rows = [r for r in results.own(self.rows, label) if r["method"] in fitted]
        spans = (
            first_highlights(data, fitted, parts) if config.unit == "response" else {}
        )
        read = {
            name: dataclasses.replace(
                one,
                dtype=config.dtype,
                unit=config.unit,
                highlights=spans.get(name),
            )
            for name, one in fitted.items()
        }
        return FittedDetectors(about, specs, read, rows)


def examples_of(data: Data, seed: int, protocol: str = "grouped") -> list[Example]:
    """The answers of a data set that are asked for.

    With the protocol ``official`` sources are drawn to train on: the test stays whole,
    and what is of neither part is left out.
    """
    found = load_dataset(data.name, **data.options)
    official = protocol == "official"
    parts = {one.split for one in found}
    if official and OFFICIAL < parts:
        several, found = len(found), [one for one in found if one.split in OFFICIAL]
        note(
            f"data {data.name!r}: {several - len(found)} of {several} answers are of "
            f"the splits {', '.join(map(repr, sorted(parts - OFFICIAL)))}, and the "
            "protocol 'official' leaves them out"
        )
    if not data.refusals:
        found = [one for one in found if not declines(one.response)]
        if not found:
            raise ValueError(f"data {data.name!r}: all answers decline; keep refusals")
    if data.sources is None:
        return found
    groups = list(dict.fromkeys(example.group for example in found))
    whole = {one.group for one in found if official and one.split == "test"}
    order = np.random.default_rng(seed).permutation(len(groups))
    drawn = [groups[number] for number in order if groups[number] not in whole]
    if data.sources > len(drawn):
        of = " to train on" if whole else ""
        raise ValueError(
            f"data {data.name!r} has {len(drawn)} sources{of}; sources is "
            f"{data.sources}"
        )
    kept = whole.union(drawn[: data.sources])
    return [example for example in found if example.group in kept]


def store_of(config: Experiment, share: Share | None = None) -> Store:
    """The feature store of a configuration, and which of its processes this is."""
    return Store(config.store or private_cache("features"), share)


def prepare(config: Experiment, share: Share) -> None:
    """Draws and reads with other processes what :func:`read_data` will look at."""
    lm, store = model(config.model, config.dtype, config.mesh), store_of(config, share)
    for data in config.data:
        inputs.prepare(
            lm,
            examples_of(data, config.seed, config.protocol),
            detectors_of(config, lm),
            store,
            unit=config.unit,  # pyright: ignore[reportArgumentType]  (checked before)
            batch_size=config.batch_size,
            progress=False,
        )


def read_data(
    config: Experiment,
    detectors: Sequence[Detector],
    progress: bool | None = None,
    share: Share | None = None,
) -> dict[str, Inputs]:
    """Every data set of a configuration, read through its store."""
    lm, store = model(config.model, config.dtype, config.mesh), store_of(config, share)
    examples = {
        data.label: examples_of(data, config.seed, config.protocol)
        for data in config.data
    }
    if config.protocol == "official":
        for label, some in examples.items():
            official_split(some, label)
    if config.unit == "response":
        for some in examples.values():
            check_marked(detectors, some)
    return {
        data.label: collect(
            lm,
            examples[data.label],
            detectors,
            store,
            unit=config.unit,  # pyright: ignore[reportArgumentType]  (checked before)
            batch_size=config.batch_size,
            progress=progress,
        )
        for data in config.data
    }


def judge(
    config: Experiment,
    detectors: list[Detector],
    data: dict[str, Inputs],
    progress: bool | None = None,
) -> Result:
    """Fits every detector on every training part and scores the test parts.

    Raises:
      ValueError: when data cannot be split, or two data sets share so many sources that
        nothing is left to test on.
    """
    folder = Path(config.out) / config.name
    parts = {label: splits(config, one, label) for label, one in data.items()}
    found = Result(config, folder, detectors, data, parts, [], {}, {}, [])
    elsewhere = _elsewhere(data, parts)
    total = sum(map(len, parts.values())) * len(detectors)
    with progress_bar(total, "fitting", "fit", progress) as bar:
        for label in parts:
            fitted: dict[str, Fitted] = {}
            tuned: finetuning.Judge | None = None
            fit = 0
            for fold, (train, test) in enumerate(parts[label]):
                # The splits of `toha` differ in what they test only.
                if fold and np.array_equal(train, parts[label][fold - 1].train):
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
                    fit = fold
                    if config.tuning is not None:
                        place = folder / finetuning.CHECKPOINTS / label / str(fold)
                        lm = model(config.model, config.dtype, config.mesh)
                        tuned = finetuning.tune(
                            config, lm, data[label], train, place, progress
                        )
                        found.tuned.setdefault(label, tuned.tuned)
                found.fitted.setdefault(label, fitted)
                for other, one in data.items():
                    whole = test if other == label else parts[other][0].test
                    rows = elsewhere.get((label, other), whole)
                    frame = frame_of(one, rows, fitted)
                    if tuned is not None:
                        some = [one.examples[row] for row in rows]
                        score = tuned.tuned.score(tuned.lm, some, progress)
                        name = finetuning.FINE_TUNED.name
                        also = columns_of(name, tuned.fitted, score, one.groups[rows])
                        frame = frame.assign(**also)
                    left_out = len(whole) - len(rows)
                    apart = config.protocol == "kinds"
                    part = Judged(label, other, fold, fit, left_out, frame, apart)
                    found.judged.append(part)
    return found


def tabled(found: Result, costs: Mapping[str, float]) -> Result:
    """The same with its table; each fitted detector knows what it is worth.

    ``costs`` are the milliseconds an answer that are known.
    """
    make = results.transfer if len(found.data) > 1 else results.table
    rows = make(found.judged, found.methods)
    for row in rows:
        if row["method"] in costs:
            row[results.COST] = costs[row["method"]]
    fitted = {}
    for label, some in found.fitted.items():
        own = {row["method"]: row for row in results.own(rows, label)}
        parts = [part for part in found.judged if part.train == part.test == label]
        judged = results.pooled(parts, found.methods)
        fitted[label] = {
            name: dataclasses.replace(
                one,
                beats=own[name]["beats controls"],
                measured=Measured.of(label, own[name], judged.labels),
            )
            for name, one in some.items()
        }
    return dataclasses.replace(found, rows=rows, fitted=fitted)


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


def detectors_of(config: Experiment, lm: LM | None = None) -> list[Detector]:
    """The configured detectors, and every control beside them that a reader allows."""
    return [build(spec) for spec in beside_controls(config.detectors, lm).values()]


def costs(
    config: Experiment,
    data: Mapping[str, Inputs],
    detectors: Sequence[Detector],
    progress: bool | None = None,
) -> dict[str, float]:
    """Milliseconds an answer from its text to what each detector alone decides on.

    Over ``config.timed`` answers of the first data set, evenly spaced.  All is computed
    anew: tokens, passes of the reader, samples, entailment.  Programs are compiled
    before, models loaded, an endpoint has replied; fitting and deciding, a product of
    small matrices, is left out.  Detectors that compute the same are timed once.
    """
    if not config.timed:
        return {}
    lm = model(config.model, config.dtype, config.mesh)
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
    return found


def _seconds(
    lm: LM, examples: Sequence[Example], detector: Detector, batch_size: int
) -> float:
    # A batch that is filled up with nothing would count as the cost of a few.
    options: Any = {"batch_size": min(batch_size, len(examples)), "progress": False}
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        decides = detector._replace(taught=())
        began = time.perf_counter()
        collect(lm, examples, [decides], store, **options)
        return time.perf_counter() - began
