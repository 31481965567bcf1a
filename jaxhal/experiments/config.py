"""An experiment as data: one small YAML file, every key checked."""

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException


@dataclasses.dataclass
class Data:
    """A data set and how much of it.

    Attributes:
      name: of :data:`jaxhal.datasets.DATASETS`, or a file.
      options: of its loader.
      label: a short name for tables and plots; the data set's own by default.
      sources: keep this many sources, drawn by the experiment's seed; all by default.
    """

    name: str = MISSING
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    label: str = ""
    sources: int | None = None


@dataclasses.dataclass
class Config:
    """One experiment.

    Attributes:
      name: of the run's folder.
      data: the data sets; with several, each is trained on and tested on each.
      detectors: catalogue names, or ``{name: {option: value}}``; an ensemble is
        ``{ensemble: {members: [...], name: ...}}``.
      unit: what is judged: a ``response``, or as in Lookback Lens a ``span`` or a
        ``window`` of eight tokens.
      protocol: ``official`` (the data's own train and test), ``kfold`` (shuffled, as
        LRP4RAG), ``grouped`` (folds that keep sources whole), ``holdout`` (a share of
        the sources), ``toha`` (a sample to fit to, five random test parts), or
        ``leaky`` (random halves whatever the source, as published for Lookback Lens).
      folds: of ``kfold`` and ``grouped``.
      train_size: answers to fit to in ``toha``.
      test_share: of the sources in ``holdout``.
      threshold: what thresholds are chosen for, ``f1`` or ``accuracy``.
      precision: choose thresholds for this precision instead.
      model: what reads the answers.
      dtype: of its parameters.
      batch_size: answers read together.
      seed: of every random choice.
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
    model: str = "smollm2-135m"
    dtype: str = "float32"
    batch_size: int = 8
    seed: int = 0
    store: str = ""
    out: str = "runs"
    notes: list[str] = dataclasses.field(default_factory=list)


PROTOCOLS = ("official", "kfold", "grouped", "holdout", "toha", "leaky")
UNITS = ("response", "span", "window")
THRESHOLDS = ("f1", "accuracy")


def load_config(
    source: str | os.PathLike | Mapping[str, Any] | Config,
    overrides: Iterable[str] = (),
) -> Config:
    """A checked configuration from a YAML file, a mapping or another configuration.

    Args:
      source: where it comes from.
      overrides: dotted ``key=value`` pairs, values as in YAML.

    Raises:
      FileNotFoundError: when the file does not exist.
      ValueError: on an unknown key, a value of the wrong kind, or a missing one.

    >>> config = {"name": "a", "data": [{"name": "bundled"}], "detectors": ["toha"]}
    >>> load_config(config, ["folds=3", "data.0.sources=20"]).folds
    3
    """
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; give a .yaml configuration")
        found = OmegaConf.load(path)
    elif isinstance(source, Config):
        found = OmegaConf.structured(source)
    else:
        found = OmegaConf.create(dict(source))
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), found)
        for pair in overrides:
            key, equals, value = pair.partition("=")
            if not equals:
                raise ValueError(f"override {pair!r} is not of the form key=value")
            if OmegaConf.select(merged, key, throw_on_missing=False) is None:
                _check_key(merged, key)
            OmegaConf.update(merged, key, _parse(value))
        config: Any = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ValueError(f"configuration: {str(error).splitlines()[0]}") from error
    _check(config)
    return config


def to_yaml(config: Config) -> str:
    """The configuration with every default written out."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def _parse(value: str) -> Any:
    parsed: Any = OmegaConf.create(f"x: {value}")
    return parsed["x"]


def _check_key(merged: Any, key: str) -> None:
    """An override may name what has no value yet, but not what does not exist."""
    parent, _, last = key.rpartition(".")
    holder = OmegaConf.select(merged, parent) if parent else merged
    known = [str(name) for name in holder] if OmegaConf.is_dict(holder) else []
    if last not in known and not parent.endswith("options"):
        raise ValueError(f"unknown key {key!r}; it takes {', '.join(known)}")


def _check(config: Config) -> None:
    choices = {"protocol": PROTOCOLS, "unit": UNITS, "threshold": THRESHOLDS}
    for name, known in choices.items():
        value = getattr(config, name)
        if value not in known:
            raise ValueError(f"{name} is {value!r}; use one of {', '.join(known)}")
    for name in ("data", "detectors"):
        if not getattr(config, name):
            raise ValueError(f"{name} is empty; name at least one")
    labels = [data.label or data.name for data in config.data]
    if len(set(labels)) < len(labels):
        raise ValueError(f"data sets {labels} share a label; give each its own 'label'")
