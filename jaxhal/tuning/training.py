"""Fine-tuning step by step: accumulated gradients, early stopping, resumption."""

import contextlib
import dataclasses
import functools
import hashlib
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from jaxhal.evaluation.splits import SplitError, holdout
from jaxhal.io.progress import Bar, progress_bar
from jaxhal.io.showing import quoted
from jaxhal.models.lm import LM
from jaxhal.models.mesh import check_one_process, rows_at_once, spread
from jaxhal.reading.keys import fingerprint
from jaxhal.tuning.checkpoints import Checkpoints, opened
from jaxhal.tuning.classifier import Learned, batches, encode, log_loss, start
from jaxhal.tuning.settings import Tuning
from jaxhal.tuning.tuned import Tuned, scores
from jaxhal.types import Example


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """What is fine-tuned on what: answers as tokens, and the numbers of its parts."""

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
    """Encodes the answers and keeps a validation part out of training."""
    check_one_process(lm.params, "tuning")
    sequences = encode(lm, examples)
    for number, example in enumerate(examples):
        if example.label is None:
            raise ValueError(
                f"example {quoted(example.id or number)} has no label; give 'label' or "
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
        share = tuning.validation_share
        try:
            train, validation = holdout(labels, groups, share, tuning.seed)
        except SplitError as error:
            raise ValueError(
                f"no validation part of {share} can be kept out of training: "
                f"{error.args[0]}; give more labelled sources of each class, another "
                "share, or 0 for none"
            ) from error
    return Task(lm, tuning, sequences, labels, train, validation)


class TrainingState(NamedTuple):
    """Where a fine-tuning stands; all of it is in a checkpoint.

    Attributes:
      best: what had the least validation loss, ``None`` without a validation part.
      unseen: scores of the validation part by ``best``.
      stale: epochs since.
      losses: training loss of each step, NaN for those to come.
    """

    step: Any
    learned: Learned
    optimizer: Any
    best: Learned | None
    best_loss: Any
    unseen: Any
    stale: Any
    losses: Any
    validation_losses: Any


def fit(
    lm: LM,
    examples: Sequence[Example],
    tuning: Tuning,
    folder: str | os.PathLike | None = None,
    progress: bool | None = None,
) -> Tuned:
    """Fine-tunes a reader to tell hallucinated from grounded answers.

    The model stays as it is.  In ``folder`` checkpoints are kept: a run that was killed
    goes on from there and ends with the weights it would have had.

    Raises:
      ValueError: on examples without labels, of one class or over the model's context,
        too few sources for a validation part, an unknown target, a folder of another
        fine-tuning, or a loss that is no number.
      FileExistsError: when the folder holds something else.
    """
    task = prepare(lm, examples, tuning)
    state = _begin(task)
    place = contextlib.nullcontext() if folder is None else opened(folder, task.about())
    with place as checkpoints:
        if checkpoints is not None:
            state = checkpoints.restored(state)
        state = _train(task, state, checkpoints, progress)
    learned, epochs = state.learned, 0
    if state.best is not None:
        learned, epochs = state.best, int(state.step) // task.steps_per_epoch
    return Tuned(
        tuning,
        lm.name,
        learned,
        np.asarray(state.losses)[: int(state.step)],
        np.asarray(state.validation_losses)[:epochs],
        task.validation,
        np.asarray(state.unseen),
        fingerprint(lm),
    )


def _begin(task: Task) -> TrainingState:
    learned = start(task.lm, task.tuning, jax.random.key(task.tuning.seed))
    unknown: Any = learned
    return TrainingState(
        np.int32(0),
        learned,
        optax.adamw(0.0).init(unknown),
        learned if len(task.validation) else None,
        np.float32(np.inf),
        np.zeros(len(task.validation), learned.head.w.dtype),
        np.int32(0),
        np.full(task.steps, np.nan, np.float32),
        np.full(task.tuning.epochs, np.nan, np.float32),
    )


def learning_rate(tuning: Tuning, steps: int) -> optax.Schedule:
    """After a linear warm-up, whose first step is not lost to a rate of 0."""
    rate = tuning.learning_rate
    rising = min(round(tuning.warmup * steps), steps - 1)
    if tuning.schedule == "cosine":
        after = optax.cosine_decay_schedule(rate, steps - rising)
    else:
        after = optax.constant_schedule(rate)
    before = optax.linear_schedule(rate / (rising + 1), rate, rising)
    return optax.join_schedules([before, after], [rising])


def _train(
    task: Task,
    state: TrainingState,
    checkpoints: Checkpoints | None,
    progress: bool | None,
) -> TrainingState:
    tuning, rate = task.tuning, learning_rate(task.tuning, task.steps)
    step = int(state.step)
    full, part = divmod(step, task.steps_per_epoch)
    done = full * len(task.train) + part * tuning.batch_size
    total = tuning.epochs * len(task.train)
    with progress_bar(total, "tuning", "answer", progress, done) as bar:
        while step < task.steps and int(state.stale) < tuning.patience:
            numbers = task.batch(step)
            loss, gradient = _gradient(task, state.learned, numbers, bar)
            learned, inner = _updated(
                state.learned,
                state.optimizer,
                gradient,
                float(rate(step)),
                tuning.weight_decay,
            )
            losses = _with(state.losses, step, float(loss))
            step += 1
            state = state._replace(
                step=np.int32(step), learned=learned, optimizer=inner, losses=losses
            )
            bar.set_postfix(loss=f"{float(loss):.3f}")
            if step % task.steps_per_epoch == 0 and len(task.validation):
                state = _validated(task, state, step // task.steps_per_epoch - 1)
            ended = step == task.steps or int(state.stale) >= tuning.patience
            if ended and not len(task.validation):
                _check_scores(task, learned, numbers)  # no loss comes after these
            if checkpoints is not None and (ended or step % tuning.save_every == 0):
                checkpoints.save(step, state)
    return state


def _gradient(
    task: Task, learned: Learned, numbers: list[int], bar: Bar
) -> tuple[Float[Array, ""], Learned]:
    """Mean loss of a batch and its gradient, a micro-batch at a time."""
    params, dtype = task.lm.params, learned.head.w.dtype
    ways = rows_at_once(params)
    size = ways * min(task.tuning.micro_batch, -(-len(numbers) // ways))
    total = jnp.zeros((), dtype), jax.tree.map(jnp.zeros_like, learned)
    pad_id = task.lm.require_tokenizer().pad_id
    for part, rows in batches(task.sequences, numbers, size, pad_id):
        labels, weight = np.zeros((2, size), dtype)
        labels[: len(part)] = task.labels[part]
        weight[: len(part)] = 1 / len(numbers)
        scale, remat = task.tuning.scale, task.tuning.remat
        laid = spread((rows, labels, weight), params)
        total = _accumulated(remat, total, learned, task.lm.bare, *laid, scale)
        bar.update(len(part))
    if not np.isfinite(total[0]):
        raise _diverged(task.tuning, "loss", float(total[0]))
    return total


def _check_scores(task: Task, learned: Learned, numbers: list[int]) -> None:
    some = [task.sequences[number] for number in numbers]
    found = scores(task.lm, task.tuning, learned, some, progress=False)
    if not np.isfinite(found).all():
        raise _diverged(task.tuning, "last score", math.nan)


def _diverged(tuning: Tuning, what: str, found: float) -> ValueError:
    return ValueError(
        f"the {what} of the training became {found}; give a lower learning_rate than "
        f"{tuning.learning_rate}"
    )


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _accumulated(remat, total, learned, *arguments):
    found = jax.value_and_grad(log_loss)(learned, *arguments, remat)
    return jax.tree.map(jnp.add, total, found)


@jax.jit
def _updated(learned, inner, gradient, rate, weight_decay):
    adamw = optax.adamw(rate, weight_decay=weight_decay)
    updates, inner = adamw.update(gradient, inner, learned)
    return optax.apply_updates(learned, updates), inner


def _with(losses: Any, at: int, loss: float) -> Float[np.ndarray, " losses"]:
    losses = np.array(losses)
    losses[at] = loss
    return losses


def _validated(task: Task, state: TrainingState, epoch: int) -> TrainingState:
    """The state after an epoch, which is kept when its validation loss is the least."""
    chosen = [task.sequences[number] for number in task.validation]
    found = scores(task.lm, task.tuning, state.learned, chosen, progress=False)
    sign = 2 * task.labels[task.validation] - 1
    with np.errstate(invalid="ignore"):
        loss = np.float32(np.logaddexp(0, -sign * found).mean())
    if not np.isfinite(loss):
        raise _diverged(task.tuning, "validation loss", float(loss))
    better = bool(loss < state.best_loss)
    return state._replace(
        best=state.learned if better else state.best,
        best_loss=loss if better else state.best_loss,
        unseen=found if better else state.unseen,
        stale=np.int32(0 if better else state.stale + 1),
        validation_losses=_with(state.validation_losses, epoch, float(loss)),
    )
