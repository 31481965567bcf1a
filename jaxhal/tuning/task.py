"""What is fine-tuned on what: encoded answers, their parts and their order."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from jaxhal.evaluation.splits import SplitError, holdout
from jaxhal.models.lm import LM
from jaxhal.reading.keys import fingerprint
from jaxhal.tuning.classifier import encode
from jaxhal.tuning.settings import Tuning
from jaxhal.types import Example


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """What is fine-tuned on what.

    Attributes:
      lm: the model.
      tuning: the settings.
      sequences: tokens of every answer.
      labels: 1 hallucinated, 0 grounded.
      train: numbers of the answers to learn from.
      validation: numbers of those that choose the epoch.
    """

    lm: LM
    tuning: Tuning
    sequences: list[np.ndarray]
    labels: Int[np.ndarray, " answers"]
    train: Int[np.ndarray, " train"]
    validation: Int[np.ndarray, " validation"]

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.train) // self.tuning.batch_size)

    @property
    def steps(self) -> int:
        return self.tuning.epochs * self.steps_per_epoch

    def batch(self, step: int) -> list[int]:
        """The answers of a step; every epoch takes all in an order of its own."""
        epoch, part = divmod(step, self.steps_per_epoch)
        key = jax.random.fold_in(jax.random.key(self.tuning.seed), epoch)
        order = self.train[np.asarray(jax.random.permutation(key, len(self.train)))]
        size = self.tuning.batch_size
        return order[part * size : (part + 1) * size].tolist()

    def about(self) -> dict[str, Any]:
        """What decides the result, as JSON."""
        digest = hashlib.sha256(self.labels.astype(np.int8).tobytes())
        digest.update(np.concatenate([self.train, self.validation]).tobytes())
        for sequence in self.sequences:
            digest.update(sequence.tobytes() + b"|")
        settings = dataclasses.asdict(self.tuning)
        del settings["save_every"]
        return {
            "model": self.lm.name,
            "weights": fingerprint(self.lm),
            "answers": len(self.labels),
            "data": digest.hexdigest(),
            **settings,
        }


def prepare(lm: LM, examples: Sequence[Example], tuning: Tuning) -> Task:
    """Encodes the answers and keeps a validation part out of training.

    Raises:
      ValueError: as :func:`jaxhal.tuning.fit` does.
    """
    sequences = encode(lm, examples)
    for number, example in enumerate(examples):
        if example.label is None:
            raise ValueError(
                f"example {example.id or number!r} has no label; give 'label' or "
                "'labels'"
            )
    labels = np.array([example.label for example in examples])
    if len(set(labels.tolist())) < 2:
        only = "hallucinated" if labels[0] else "grounded"
        raise ValueError(
            f"all {len(labels)} answers are {only}; give answers of both kinds"
        )
    train, validation = np.arange(len(labels)), np.zeros(0, int)
    if tuning.validation_share:
        groups = [example.group for example in examples]
        try:
            train, validation = holdout(
                labels, groups, tuning.validation_share, tuning.seed
            )
        except SplitError as error:
            raise ValueError(
                f"no validation part of {tuning.validation_share} can be kept out of "
                f"training: {error.args[0]}; give more labelled sources of each class, "
                "another share, or 0 for none"
            ) from error
    return Task(lm, tuning, sequences, labels, train, validation)
