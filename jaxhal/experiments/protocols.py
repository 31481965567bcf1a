"""Which answers an experiment fits to and which it judges."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jaxhal.evaluation.splits import (
    grouped_kfold,
    holdout,
    kfold,
    leaky_halves,
    stratified_kfold,
    toha_splits,
)
from jaxhal.experiments.config import Config
from jaxhal.scoring.inputs import Inputs

# Of protocols repeated as published; the others split by the configuration's seed.
PUBLISHED_SEEDS = {"kfold": "42", "toha": "42 to 46", "leaky": "42"}


class Split(NamedTuple):
    """One fit: the rows to fit to and the rows to judge."""

    train: Int[np.ndarray, " train"]
    test: Int[np.ndarray, " test"]


def splits(config: Config, data: Inputs) -> list[Split]:
    """The splits of a configuration's protocol.

    Raises:
      ValueError: when the data has no official split, or too few answers.
    """
    labels, groups = data.labels, data.groups
    if config.protocol == "official":
        parts = np.array([example.split for example in data.examples])
        train, test = np.flatnonzero(parts == "train"), np.flatnonzero(parts == "test")
        if not len(train) or not len(test):
            raise ValueError(
                f"protocol is 'official' but the data has the splits "
                f"{sorted(set(parts))}; use 'grouped' or 'holdout'"
            )
        return [Split(train, test)]
    if config.protocol == "kfold":
        return [Split(*part) for part in kfold(len(labels), config.folds)]
    if config.protocol == "stratified":
        parts = stratified_kfold(labels, config.folds, config.seed)
        return [Split(*part) for part in parts]
    if config.protocol == "grouped":
        parts = grouped_kfold(labels, groups.tolist(), config.folds, config.seed)
        return [Split(*part) for part in parts]
    if config.protocol == "holdout":
        share = config.test_share
        return [Split(*holdout(labels, groups.tolist(), share, config.seed))]
    if config.protocol == "leaky":
        return [Split(*part) for part in leaky_halves(len(labels))]
    share = config.train_size / len(labels)
    if not 0 < share < 1:
        raise ValueError(
            f"train_size is {config.train_size} of {len(labels)} answers; leave some "
            "to test on"
        )
    rest, train = holdout(labels, groups.tolist(), share, 42)
    return [Split(train, rest[test]) for _, _, test in toha_splits(len(rest))]
