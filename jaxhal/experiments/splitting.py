"""Which answers an experiment fits to, and which it judges."""

from collections.abc import Sequence
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
    unseen_kinds,
)
from jaxhal.experiments.config import Experiment
from jaxhal.scoring.inputs import Inputs
from jaxhal.types import Example

#: The parts of a data set that the protocol ``official`` fits to and judges.
OFFICIAL = frozenset({"train", "test"})


class Split(NamedTuple):
    """One fit: the rows to fit to and the rows to judge."""

    train: Int[np.ndarray, " train"]
    test: Int[np.ndarray, " test"]


def splits(config: Experiment, data: Inputs, label: str) -> list[Split]:
    """The splits of a configuration's protocol.

    Raises:
      ValueError: when the data has no official split or one that parts the answers of
        a source, too few answers, or a part of one class, with the data's ``label``.
    """
    found = _drawn(config, data, label)
    for number, split in enumerate(found, 1):
        for rows, purpose in zip(split, ("fit to", "judge"), strict=True):
            if len(known := set(data.labels[rows].tolist())) < 2:
                only = "grounded" if 0 in known else "hallucinated"
                raise ValueError(
                    f"data set {label!r}, protocol {config.protocol!r}: all "
                    f"{len(rows)} answers to {purpose} in split {number} of "
                    f"{len(found)} are {only}; use 'grouped' or 'holdout', fewer "
                    "folds, or more answers"
                )
    return found


def _drawn(config: Experiment, data: Inputs, label: str) -> list[Split]:
    labels, groups, count = data.labels, data.groups.tolist(), len(data.labels)
    folds, seed = config.folds, config.seed
    kinds = [kinds_of(example) for example in data.examples]
    if config.protocol == "official":
        return [official_split(data.examples, label)]
    if config.protocol == "toha":
        share = config.train_size / count
        if not 0 < share < 1:
            raise ValueError(
                f"train_size is {config.train_size} of {count} answers; leave some to "
                "test on"
            )
        rest, train = holdout(labels, groups, share, 42)
        return [Split(train, rest[test]) for _, _, test in toha_splits(len(rest))]
    found = {
        "kfold": lambda: kfold(count, folds),
        "stratified": lambda: stratified_kfold(labels, folds, seed),
        "grouped": lambda: grouped_kfold(labels, groups, folds, seed),
        "kinds": lambda: unseen_kinds(kinds, groups, folds, seed),
        "holdout": lambda: [holdout(labels, groups, config.test_share, seed)],
        "leaky": lambda: leaky_halves(count),
    }
    return [Split(*part) for part in found[config.protocol]()]


def official_split(examples: Sequence[Example], label: str) -> Split:
    """As the data set has it; ValueError where it has none that is of use."""
    parts = np.array([example.split for example in examples])
    train, test = np.flatnonzero(parts == "train"), np.flatnonzero(parts == "test")
    if not len(train) or not len(test):
        raise ValueError(
            f"data set {label!r}, protocol 'official': it has the splits "
            f"{sorted({*parts.tolist()})}; use 'grouped' or 'holdout'"
        )
    both = [{examples[row].group for row in part.tolist()} for part in (train, test)]
    if shared := both[0] & both[1]:
        raise ValueError(
            f"data set {label!r}, protocol 'official': {len(shared)} sources have "
            "answers to fit to and to judge, which would tell what is judged; use "
            "'grouped' or 'holdout'"
        )
    return Split(train, test)


def kinds_of(example: Example) -> list[str]:
    """Of the spans of a hallucinated answer, in order; none of a grounded one."""
    if not example.label:
        return []
    return [span.label or "unknown" for span in example.labels or ()] or ["unknown"]
