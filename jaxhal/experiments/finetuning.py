"""The fine-tuned reader as one more method of an experiment."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from jaxhal import plotting, tuning
from jaxhal.detectors import Detector, Targets
from jaxhal.detectors.base import LOG_ODDS, HeldOut
from jaxhal.experiments.config import Experiment
from jaxhal.models.lm import LM
from jaxhal.scoring.fitting import Fitted, fit
from jaxhal.scoring.inputs import Inputs
from jaxhal.tuning.checkpoints import CARD

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Folder of a run that its checkpoints go to.
CHECKPOINTS = "checkpoints"

# Its inputs are the scores themselves, which a tuned reader makes of text.
FINE_TUNED = Detector(
    "fine_tuned",
    "the reader itself, fine-tuned to classify answers",
    LOG_ODDS,
    "Hu et al., LRP4RAG, 2024, section 4.3, baseline LLM fine-tuning",
    features=(),
    inputs=lambda features: features["fine_tuned"],
    fit=lambda scores, targets: HeldOut((), scores),
)


def holds_checkpoints(path: Path) -> bool:
    """Whether it is the folder of checkpoints, and all in it belongs to them."""
    if path.name != CHECKPOINTS or not path.is_dir():
        return False
    files = [one for one in path.rglob("[!.]*") if not one.is_dir()]
    folds = {path.joinpath(*one.relative_to(path).parts[:2]) for one in files}
    return all((fold / CARD).is_file() for fold in folds)


class Judge(NamedTuple):
    """A reader, what it learned, and what its scores mean by its validation part."""

    lm: LM
    tuned: tuning.Tuned
    fitted: Fitted


def tune(
    config: Experiment,
    lm: LM,
    data: Inputs,
    train: np.ndarray,
    folder: Path,
    progress: bool | None,
) -> Judge:
    """Tunes the reader on the training part of a split."""
    assert config.tuning is not None
    examples = [data.examples[row] for row in train]
    tuned = tuning.fit(lm, examples, config.tuning, folder, progress)
    held_out = train[tuned.validation]
    scores = np.zeros(len(data.labels), tuned.unseen.dtype)
    scores[held_out] = tuned.unseen
    weight = np.ones(len(scores))
    everything = Targets(data.labels, data.groups, weight, jax.random.key(config.seed))
    fitted = fit(
        FINE_TUNED,
        scores,
        everything.only(held_out),
        objective=config.threshold,  # pyright: ignore[reportArgumentType]
        precision=config.precision,
        calibration=config.calibration,  # pyright: ignore[reportArgumentType]
    )
    return Judge(lm, tuned, fitted)


def figures(tuned: Mapping[str, tuning.Tuned]) -> Iterator[tuple[str, "Figure"]]:
    """Name and loss curve of every data set's first tuning."""
    for label, one in tuned.items():
        figure = plotting.loss_curve(one.losses, one.validation_losses)
        yield f"tuning_{label}", figure


def note(label: str, one: tuning.Tuned) -> str:
    """How the reader of a data set was tuned, in words."""
    how = one.tuning
    what = "every weight"
    if how.method == "lora":
        what = f"LoRA of rank {how.rank} on {', '.join(how.targets)}"
    best = int(np.argmin(one.validation_losses))
    return (
        f"{FINE_TUNED.name} is the reader itself, tuned on the training part of "
        f"{label} ({what}; learning rate {how.learning_rate:g}; {len(one.losses)} "
        f"steps of {how.batch_size} answers). Of that part, {len(one.validation)} "
        f"answers were not learned from: they chose epoch {best + 1} of "
        f"{len(one.validation_losses)}, with a validation loss of "
        f"{one.validation_losses[best]:.3f} nats, the threshold and the calibration."
    )
