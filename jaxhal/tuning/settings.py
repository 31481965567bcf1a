"""How a reader is fine-tuned, as data."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from jaxhal.io.checks import one_of


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Settings of a fine-tuning; hashable.

    Args:
      method: ``"lora"`` learns low-rank additions to some projections of a frozen
        model, ``"full"`` learns every weight.
      rank: of the additions.
      alpha: the additions are multiplied by ``alpha / rank``.
      targets: projections that get an addition, in every layer that has them.  Those
        of full attention stand here; layers of the delta rule have ``in_proj_q``,
        ``in_proj_k``, ``in_proj_v``, ``in_proj_z`` and ``out_proj``.
      learning_rate: the highest one, of AdamW.
      schedule: what follows the warm-up: ``"cosine"`` falls to 0, ``"constant"`` stays.
      warmup: share of the steps in which the learning rate rises.
      weight_decay: AdamW's, times the learning rate.
      epochs: at most this many.
      batch_size: answers that a step averages over.
      micro_batch: answers differentiated at once, on each device along ``data`` of a
        mesh; changes memory, not the result.
      remat: keep only what enters each layer and compute the rest again on the way
        back.
      validation_share: of the answers, sources whole, that only choose the epoch; 0
        trains on all and takes the last epoch.
      patience: epochs in a row without a lower validation loss before stopping.
      save_every: steps between checkpoints.
      seed: of the first weights, the order and the validation part.

    Raises:
      ValueError: on an unknown method or schedule, or a number out of range.
    """

    method: str = "lora"
    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    learning_rate: float = 5e-4
    schedule: str = "cosine"
    warmup: float = 0.1
    weight_decay: float = 0.01
    epochs: int = 3
    batch_size: int = 8
    micro_batch: int = 1
    remat: bool = True
    validation_share: float = 0.2
    patience: int = 3
    save_every: int = 10
    seed: int = 0

    @property
    def scale(self) -> float:
        """What additions are multiplied by."""
        return self.alpha / self.rank

    def __post_init__(self) -> None:
        above, share = "a number above 0", "a share from 0 to below 1"
        counts = "rank epochs batch_size micro_batch patience save_every".split()
        check(
            self,
            {"method": ("lora", "full"), "schedule": ("cosine", "constant")},
            {
                **{name: (getattr(self, name) >= 1, "at least 1") for name in counts},
                "targets": (bool(self.targets), "at least one projection"),
                "alpha": (self.alpha > 0, above),
                "learning_rate": (self.learning_rate > 0, above),
                "weight_decay": (self.weight_decay >= 0, "0 or more"),
                "warmup": (0 <= self.warmup < 1, share),
                "validation_share": (0 <= self.validation_share < 1, share),
                "seed": (0 <= self.seed < 2**32, "0 to 2**32 - 1"),
            },
            "tuning ",
        )


def check(
    settings: Any,
    choices: Mapping[str, Iterable[str]],
    ranges: Mapping[str, tuple[bool, str]],
    called: str = "",
) -> None:
    """Makes sure of settings by name: the words they may be; fine or not, and what is.

    Raises:
      ValueError: names the first that is wrong, after the prefix ``called``.
    """
    for name, known in choices.items():
        one_of(known, **{f"{called}{name}": getattr(settings, name)})
    for name, (fine, remedy) in ranges.items():
        if not fine:
            value = getattr(settings, name)
            raise ValueError(f"{called}{name} is {value}; give {remedy}")


# Every weight by AdamW as in the published code of LRP4RAG, which pooled a pad token
# and took a softmax of a softmax; neither is repeated here.  The epoch is chosen by the
# loss on a part of the training answers, not by the accuracy on the test fold.
PUBLISHED = Tuning(
    method="full",
    learning_rate=2e-5,
    schedule="constant",
    warmup=0.0,
    epochs=30,
    batch_size=8,
    patience=30,
)
