"""A reader that has been fine-tuned: scores, and its weights on disk."""

import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from jaxhal.io import sealing
from jaxhal.io.files import replacing
from jaxhal.io.progress import progress_bar
from jaxhal.models.lm import LM
from jaxhal.models.mesh import rows_at_once, spread
from jaxhal.models.weights import paths
from jaxhal.reading.keys import fingerprint
from jaxhal.tuning.adapters import Pair
from jaxhal.tuning.classifier import Head, Learned, batches, encode, log_odds
from jaxhal.tuning.settings import Tuning
from jaxhal.types import Example

_CARD, _WEIGHTS = "tuned.json", "tuned.safetensors"


@dataclasses.dataclass(frozen=True, eq=False)
class Tuned:
    """What fine-tuning of a model found.

    Attributes:
      losses: training loss of each step, in nats an answer.
      validation_losses: after each epoch; empty without a validation part.
      validation: numbers of the examples that only chose the epoch.
      unseen: their scores.
      weights: the model's fingerprint; earlier versions did not keep it.
    """

    tuning: Tuning
    model: str
    learned: Learned
    losses: Float[np.ndarray, " steps"]
    validation_losses: Float[np.ndarray, " epochs"]
    validation: Int[np.ndarray, " validation"]
    unseen: Float[np.ndarray, " validation"]
    weights: str = ""

    def score(
        self, lm: LM, examples: Sequence[Example], progress: bool | None = None
    ) -> Float[np.ndarray, " examples"]:
        """Log odds of a hallucination, higher = more likely hallucinated.

        ``lm`` is the model that was tuned, as it was before.

        Raises:
          ValueError: on no examples, one over the model's context, or another model.
        """
        leaves = dict(paths(lm.params))
        for name, value in self.learned.weights.items():
            kernel, shape = leaves.get(name), value.shape
            if kernel is None or kernel.shape != shape:
                found = "missing" if kernel is None else f"{list(kernel.shape)}"
                raise ValueError(
                    f"{name} is {found} in model {lm.name!r} and {list(shape)} in "
                    f"{self.model!r}, which was tuned; give that model"
                )
        if self.weights not in ("", fingerprint(lm)):
            raise ValueError(
                f"model {lm.name!r} has other weights than {self.model!r}, which was "
                "tuned; give that model"
            )
        sequences = encode(lm, examples)
        return scores(lm, self.tuning, self.learned, sequences, progress)

    def save(self, path: str | os.PathLike) -> None:
        """Writes ``tuned.json`` and ``tuned.safetensors`` into a new or empty folder.

        Raises:
          FileExistsError: when the folder holds something.
        """
        from safetensors.numpy import save

        folder = Path(path)
        if folder.exists() and any(folder.iterdir()):
            raise FileExistsError(f"{folder} is not empty; give a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {name: np.asarray(leaf) for name, leaf in _flat(self.learned).items()}
        weights = save(arrays)
        with replacing(folder / _WEIGHTS, binary=True) as file:
            file.write(weights)
        card = {
            "sha256": hashlib.sha256(weights).hexdigest(),
            "tuning": dataclasses.asdict(self.tuning),
            "model": self.model,
            "weights": self.weights,
            **{name: getattr(self, name).tolist() for name in _ARRAYS},
            "versions": {name: version(name) for name in ("jaxhal", "jax", "optax")},
        }
        sealing.write(folder / _CARD, card)


_ARRAYS = {
    "losses": np.float32,
    "validation_losses": np.float32,
    "validation": np.int64,
    "unseen": np.float32,
}


def load(path: str | os.PathLike) -> Tuned:
    """What :meth:`Tuned.save` wrote.

    Raises:
      FileNotFoundError: when there is none.
      ValueError: names the folder when anything is not as it was saved.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load as deserialized

    folder = Path(path)
    if not (folder / _CARD).is_file():
        raise FileNotFoundError(f"{folder} has no {_CARD}; give a saved fine-tuning")
    try:
        card = sealing.read(folder / _CARD)
        weights = (folder / _WEIGHTS).read_bytes()
        if hashlib.sha256(weights).hexdigest() != card["sha256"]:
            raise ValueError(f"{_WEIGHTS} does not have the sha256 that {_CARD} names")
        learned = _nested(deserialized(weights))
        settings = card["tuning"]
        tuning = Tuning(**{**settings, "targets": tuple(settings["targets"])})
        arrays = {name: np.array(card[name], kind) for name, kind in _ARRAYS.items()}
        weights_of = card.get("weights", "")
        return Tuned(tuning, card["model"], learned, **arrays, weights=weights_of)
    except (KeyError, OSError, SafetensorError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder} holds no whole fine-tuning; copy it again, or tune anew "
            f"({type(error).__name__}: {error})"
        ) from error


def scores(
    lm: LM,
    tuning: Tuning,
    learned: Learned,
    sequences: Sequence[np.ndarray],
    progress: bool | None = None,
) -> Float[np.ndarray, " answers"]:
    """Log odds of encoded answers, in their order."""
    out = np.zeros(len(sequences), learned.head.w.dtype)
    pad_id = lm.require_tokenizer().pad_id
    size = rows_at_once(lm.params) * tuning.micro_batch
    with progress_bar(len(sequences), "scoring", "answer", progress) as bar:
        for part, rows in batches(sequences, range(len(sequences)), size, pad_id):
            rows = spread(rows, lm.params)
            found = _log_odds(learned, lm.bare, rows, tuning.scale)
            out[part] = np.asarray(found)[: len(part)]
            bar.update(len(part))
    return out


_log_odds = jax.jit(log_odds)


def _flat(learned: Learned) -> dict[str, Any]:
    """Arrays by name: ``head.w``, ``<kernel>.down`` and ``<kernel>.up``, or whole."""
    flat: dict[str, Any] = {f"head.{k}": v for k, v in learned.head._asdict().items()}
    for name, value in learned.weights.items():
        if isinstance(value, Pair):
            flat |= {f"{name}.{part}": leaf for part, leaf in value._asdict().items()}
        else:
            flat[name] = value
    return flat


def _nested(flat: Mapping[str, np.ndarray]) -> Learned:
    leaves = {name: jax.device_put(leaf) for name, leaf in flat.items()}
    head = Head(leaves.pop("head.w"), leaves.pop("head.b"))
    pairs = [name.removesuffix(".down") for name in leaves if name.endswith(".down")]
    weights: dict[str, Any] = {
        name: Pair(leaves.pop(f"{name}.down"), leaves.pop(f"{name}.up"))
        for name in pairs
    }
    return Learned(head, weights | leaves)
