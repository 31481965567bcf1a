"""Where a fine-tuning stands, on disk: written whole or not at all, by Orbax."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxhal.io import sealing
from jaxhal.io.files import alone
from jaxhal.io.interrupts import uninterrupted
from jaxhal.io.showing import shown

Tree = TypeVar("Tree")

#: What says which fine-tuning a folder of checkpoints belongs to.
CARD = "tuning.json"


class Checkpoints:
    """The latest state of one fine-tuning; :func:`opened` makes it."""

    def __init__(self, manager: Any):
        self._manager = manager

    def restored(self, state: Tree) -> Tree:
        """The state that was saved last, or the one given when none was."""
        import orbax.checkpoint as ocp

        step = self._manager.latest_step()
        if step is None:
            return state
        # On the device that is here, not on the one that wrote it.
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shapes = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here)
            for name, leaf in _leaves(state).items()
        }
        try:
            found = self._manager.restore(step, args=ocp.args.StandardRestore(shapes))
            known = found.pop(_DIGEST)
            if not np.array_equal(known, _digest(found)):
                raise ValueError("the state does not have the checksum saved with it")
        except Exception as error:  # what Orbax raises has no class in common
            raise ValueError(
                f"checkpoint {step} in {self._manager.directory} is damaged, or of an "
                "earlier version; delete its folder, and the fine-tuning begins anew "
                f"({type(error).__name__}: {shown(str(error))})"
            ) from error
        # As those of a new state they go wherever the model lies.
        leaves = [
            jnp.asarray(np.asarray(found[name])) for name in shapes if name != _DIGEST
        ]
        return jax.tree.unflatten(jax.tree.structure(state), leaves)

    def save(self, step: int, state: Any) -> None:
        """Replaces what was saved before; a kill leaves the one or the other.

        Orbax writes with threads of its own, which would go on in a folder that is
        being swept: Ctrl-C waits until they have ended.
        """
        import orbax.checkpoint as ocp

        leaves = ocp.args.StandardSave(_leaves(state))
        with uninterrupted():
            self._manager.save(step, args=leaves)


_DIGEST = "sha256"


def _leaves(state: Any) -> dict[str, jax.Array]:
    """A state by number of leaf, and the checksum of it."""
    numbered = enumerate(jax.tree.leaves(state))
    leaves = {f"leaf{number}": jax.device_put(leaf) for number, leaf in numbered}
    return leaves | {_DIGEST: jax.device_put(_digest(leaves))}


def _digest(leaves: Mapping[str, jax.Array]) -> np.ndarray:
    found = hashlib.sha256()
    for name in sorted(leaves):
        found.update(np.asarray(leaves[name]).tobytes())
    return np.frombuffer(found.digest(), np.uint8)


@contextlib.contextmanager
def opened(
    folder: str | os.PathLike, about: Mapping[str, Any]
) -> Iterator[Checkpoints]:
    """The checkpoints in a folder, which belongs to one fine-tuning.

    ``about`` is what decides its result: model, settings and data, as JSON.

    Raises:
      ValueError: when the folder holds another fine-tuning, naming what differs, or
        is damaged.
      FileExistsError: when it holds something else.
      RuntimeError: while another process has it open.
    """
    import orbax.checkpoint as ocp

    path = Path(folder).resolve()
    _claim(path, json.loads(json.dumps(about)))
    options = ocp.CheckpointManagerOptions(
        max_to_keep=1, enable_async_checkpointing=False
    )
    with alone(path):
        try:
            _sweep(path)
            with ocp.CheckpointManager(path / "steps", options=options) as manager:
                yield Checkpoints(manager)
        finally:
            _sweep(path)


def _sweep(path: Path) -> None:
    """Deletes what was not written to its end."""
    for half in path.glob("steps/*.orbax-checkpoint-tmp*"):
        shutil.rmtree(half)


def _claim(path: Path, about: dict[str, Any]) -> None:
    card = path / CARD
    if not card.is_file():
        if path.is_dir() and any(path.iterdir()):
            raise FileExistsError(f"{path} is no checkpoint folder; give a new folder")
        path.mkdir(parents=True, exist_ok=True)
        sealing.write(card, about)
        return
    try:
        found = sealing.read(card)
    except ValueError as error:
        raise ValueError(
            f"{path} holds no whole checkpoint ({error}); delete it or give a new "
            "folder"
        ) from error
    differing = [
        f"{name} is {value!r} here and {found.get(name)!r} there"
        for name, value in about.items()
        if found.get(name) != value
    ]
    if differing:
        raise ValueError(
            f"{path} holds the checkpoint of another fine-tuning: "
            f"{'; '.join(differing)}; delete it or give a new folder"
        )
