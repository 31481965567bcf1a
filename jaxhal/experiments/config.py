"""An experiment as data: one small YAML file, every key checked."""

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxhal.evaluation.guarantees import KINDS, check_promise
from jaxhal.io.checks import check_name
from jaxhal.io.configuration import MISSING, structured
from jaxhal.io.extras import need
from jaxhal.models.lm import DTYPES
from jaxhal.tuning.settings import Tuning, check

#: Experiments that come along, by name.
PRESETS = {
    path.stem: path for path in sorted(Path(__file__).parent.glob("presets/*.yaml"))
}
PROTOCOLS = "official kfold stratified grouped kinds holdout toha leaky".split()
# What is judged, and what several of them are called.
UNITS = {
    "response": "answers",
    "sentence": "sentences",
    "span": "spans",
    "window": "windows",
}


@dataclasses.dataclass
class Data:
    """A data set and how much of it.

    Attributes:
      name: of :data:`jaxhal.datasets.DATASETS`, or a file.
      options: of its loader.
      label: a short name for tables, plots and files; by default the data set's own,
        of a file the name without folder and ending.
      sources: keep this many sources, drawn by the experiment's seed; all by default.
        With the protocol ``official`` they are those to train on, and no other is left
        out.
      refusals: keep answers that decline; those of one wording are told by it alone.
    """

    name: str = MISSING
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    label: str = ""
    sources: int | None = None
    refusals: bool = True


@dataclasses.dataclass
class Experiment:
    """One experiment.

    Attributes:
      name: of the run's folder.
      data: the data sets; with several, each is trained on and tested on each, without
        answers whose source was trained on.
      detectors: catalogue names, or ``{name: {option: value}}``; an ensemble is
        ``{ensemble: {members: [...], name: ...}}``.
      unit: what is judged: a ``response``, each ``sentence`` of it as in SelfCheckGPT,
        or as in Lookback Lens a ``span`` or a ``window`` of eight tokens.
      protocol: ``official`` (the data's own train and test, which may share no
        source), ``kfold`` (shuffled, as LRP4RAG), ``stratified`` (folds with even
        classes, whatever the source), ``grouped`` (the same with sources whole),
        ``kinds`` (the same, each fold judged on kinds of spans that were kept from its
        training part), ``holdout`` (a share of the sources), ``toha`` (a sample to fit
        to, five random test parts), or ``leaky`` (random halves whatever the source, as
        published for Lookback Lens).
        Several data sets need ``official`` or ``holdout``.
      folds: of ``kfold``, ``stratified``, ``grouped`` and ``kinds``.
      train_size: answers to fit to in ``toha``.
      test_share: of the sources in ``holdout``.
      threshold: what thresholds are chosen for, ``f1`` or ``accuracy``.
      precision: choose thresholds for this precision instead.
      calibration: how scores become probabilities, ``platt`` or ``isotonic``.
      promises: see how often such are kept, each like ``{precision: 0.9}``, as
        :func:`jaxhal.evaluation.guarantee` takes them, or ``{highlighted: 0.05}``, of
        supported characters (:func:`jaxhal.evaluation.guaranteed_highlights`).
      model: what reads the answers.
      dtype: of its parameters, ``float32`` or ``bfloat16``.
      mesh: devices of a process that it is spread over, such as ``data=2,model=4``; by
        default all.
      batch_size: answers read together, on each device along ``data``.
      tuning: of the reader itself, which then judges the answers as well.
      timed: time every detector alone on this many answers of the first data set.
      seed: of the sources drawn, of the splits ``stratified``, ``grouped``, ``kinds``
        and ``holdout``, and of the networks' first weights.  ``kfold``, ``toha`` and
        ``leaky`` split with the seeds they were published with, and folds inside a
        training part are always the same.
      store: folder of the feature store; in the user's cache by default.
      out: folder that run folders go to.
      notes: sentences for the results, such as the paper's own figures.
    """

    name: str = MISSING
    data: list[Data] = MISSING
    detectors: list[Any] = MISSING
    unit: str = "response"
    protocol: str = "official"
    folds: int = 5
    train_size: int = 150
    test_share: float = 0.3
    threshold: str = "f1"
    precision: float | None = None
    calibration: str = "platt"
    promises: list[Any] = dataclasses.field(default_factory=list)
    model: str = "smollm2-135m"
    dtype: str = "float32"
    mesh: str = ""
    batch_size: int = 8
    tuning: Tuning | None = None
    timed: int = 0
    seed: int = 0
    store: str = ""
    out: str = "runs"
    notes: list[str] = dataclasses.field(default_factory=list)


def load_config(
    source: str | os.PathLike | Mapping[str, Any] | Experiment,
    overrides: Iterable[str] = (),
) -> Experiment:
    """A checked configuration, with dotted ``key=value`` pairs in the place of its own.

    Args:
      source: a path, a name in :data:`PRESETS`, a mapping or an :class:`Experiment`.

    Raises:
      MissingExtra: unless all that experiments need is installed.
      FileNotFoundError: when the file does not exist.
      ValueError: on what is not YAML, an unknown key, or a value that is missing, of
        the wrong kind or out of range.

    >>> config = {"name": "a", "data": [{"name": "bundled"}], "detectors": ["toha"]}
    >>> load_config(config, ["folds=3", "data.0.sources=20"]).folds
    3
    """
    need("experiments")
    if isinstance(source, str):
        source = PRESETS.get(source, source)
    config = structured(Experiment, source, overrides)
    for data in config.data:
        data.label = data.label or Path(data.name).stem
    check_name(config.name)
    precision, tuning = config.precision, config.tuning
    share = "a share above 0 and at most 1"
    check(
        config,
        {
            "protocol": PROTOCOLS,
            "unit": UNITS,
            "threshold": ("f1", "accuracy"),
            "calibration": ("platt", "isotonic"),
            "dtype": DTYPES,
        },
        {
            "folds": (config.folds >= 2, "at least 2"),
            "train_size": (config.train_size >= 1, "at least 1"),
            "test_share": (0 < config.test_share < 1, "a share between 0 and 1"),
            "precision": (precision is None or 0 < precision <= 1, share),
            "batch_size": (config.batch_size >= 1, "at least 1"),
            "timed": (config.timed >= 0, "0 or more"),
            "seed": (0 <= config.seed < 2**32, "0 to 2**32 - 1"),
        },
    )
    for name in ("data", "detectors"):
        if not getattr(config, name) and (name == "data" or tuning is None):
            raise ValueError(f"{name} is empty; name at least one")
    if tuning is not None and config.unit != "response":
        raise ValueError(
            f"unit is {config.unit!r} with a 'tuning'; a tuned reader judges whole "
            "answers, so use unit 'response'"
        )
    if tuning is not None and not tuning.validation_share:
        raise ValueError(
            "tuning.validation_share is 0; an experiment needs a validation part for "
            "the threshold, so give a share between 0 and 1"
        )
    for promise in config.promises:
        kind, _ = check_promise(promise, kinds=(*KINDS, "highlighted"))
        if kind == "highlighted" and config.unit != "response":
            raise ValueError(
                f"unit is {config.unit!r} with a promise of highlighted characters, "
                "which are those of whole answers; use unit 'response'"
            )
    _check_data(config)
    return config


def _check_data(config: Experiment) -> None:
    labels = [data.label for data in config.data]
    if len(set(labels)) < len(labels):
        raise ValueError(f"data sets {labels} share a label; give each its own 'label'")
    for data in config.data:
        check_name(data.label, "label")
        if data.sources is not None and data.sources < 1:
            raise ValueError(f"sources is {data.sources}; give at least 1")
    if len(labels) > 1 and config.protocol not in ("official", "holdout"):
        raise ValueError(
            f"protocol is {config.protocol!r} with {len(labels)} data sets; use "
            "'official' or 'holdout', which split each of them once"
        )
