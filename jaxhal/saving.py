"""Fitted detectors on disk: parameters by Orbax, and a card that people can read."""

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxhal import hosts
from jaxhal.classifiers.linear import Linear
from jaxhal.classifiers.lstm import LSTM, Cell
from jaxhal.classifiers.mlp import MLP
from jaxhal.classifiers.nested import Tuned
from jaxhal.classifiers.pooling import Pooling
from jaxhal.classifiers.selection import Chosen
from jaxhal.classifiers.svm import SVM
from jaxhal.classifiers.trees import Forest
from jaxhal.detectors import Detector, build
from jaxhal.detectors.controls import TfIdf
from jaxhal.detectors.ensemble import Stack
from jaxhal.detectors.trained import Heads
from jaxhal.evaluation.calibration import Isotonic, Platt
from jaxhal.files import replacing
from jaxhal.fitting import Fitted

# What parameters may be made of, by the name the card gives it.
_KINDS = {
    kind.__name__: kind
    for kind in (
        *(Linear, Chosen, MLP, Pooling, Heads, TfIdf, Stack),
        *(SVM, Forest, LSTM, Cell, Tuned),
    )
}


def save(
    path: str | os.PathLike,
    fitted: Fitted,
    spec: str | Mapping[str, Any],
    card: Mapping[str, Any] | None = None,
) -> None:
    """Writes a fitted detector to a folder: ``params/`` and ``card.json``.

    Args:
      path: the folder, which must not exist yet or be empty.
      fitted: what to keep.
      spec: how :func:`jaxhal.detectors.build` makes the detector again.
      card: what else people should know: the model, its data and their hash, metrics.

    Raises:
      ValueError: when ``spec`` makes another detector, the detector was shown no
        labelled answers, or ``card`` has a key that loading needs.
      FileExistsError: when the folder holds something.
    """
    import orbax.checkpoint as ocp

    _check_same(spec, build(spec), fitted.detector)
    if fitted.threshold is None or fitted.calibration is None:
        name = fitted.detector.name
        raise ValueError(f"{name!r} was not fitted; there is nothing to save")
    names = ("jaxhal", "jax", "flax", "optax", "orbax-checkpoint")
    about = {
        "detector": spec,
        "threshold": float(fitted.threshold),
        "calibration": dataclasses.asdict(fitted.calibration),
        "beats controls": fitted.beats,
        "params": _shape(fitted.params),
        "versions": {name: version(name) for name in names},
    }
    if taken := sorted(set(about) & set(card or {})):
        raise ValueError(
            f"card has {', '.join(map(repr, taken))}, which save writes itself; give "
            "that another key"
        )
    folder = Path(path).resolve()
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; give a new folder")
    leaves = {f"leaf{n}": x for n, x in enumerate(jax.tree.leaves(fitted.params))}
    if leaves:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / "params", leaves)
        # It only names the scratch folder of the machine; reading does without it.
        (folder / "params" / "commit_success.txt").unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "card.json") as file:
        json.dump({**about, **(card or {})}, file, indent=1)


def load(path: str | os.PathLike, *, endpoints: Iterable[str] = ()) -> Fitted:
    """A detector that :func:`save` wrote.

    Args:
      path: the folder.
      endpoints: hosts that it may ask and, over https, show $OPENAI_API_KEY to, beside
        those that the environment names, such as ``"api.openai.com"``.

    Raises:
      jaxhal.hosts.Refused: when it would ask another one.
      FileNotFoundError: when there is no card.
      ValueError: when the card cannot be read or does not fit the parameters.
    """
    folder = Path(path).resolve()
    if not (folder / "card.json").is_file():
        raise FileNotFoundError(f"{folder} has no card.json; give a saved detector")
    try:
        with hosts.brought(str(folder), endpoints, trusted=False):
            return _load(folder)
    # What Python says of a missing key or a wrong type does not say which folder.
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder} holds no whole detector; copy it again, or save the detector "
            f"anew ({type(error).__name__}: {error})"
        ) from error


def _load(folder: Path) -> Fitted:
    import orbax.checkpoint as ocp

    card = json.loads((folder / "card.json").read_text("utf-8"))
    leaves: dict[str, Any] = {}
    if (folder / "params").is_dir():
        with ocp.StandardCheckpointer() as checkpointer:
            leaves = checkpointer.restore(folder / "params", _abstract(card["params"]))
    params = _rebuild(card["params"], leaves)
    return Fitted(
        build(card["detector"]),
        params,
        _calibration(**card["calibration"]),
        card["threshold"],
        np.zeros(0, np.float32),
        _beats(card),
    )


def _beats(card: Mapping[str, Any]) -> str | None:
    """Whether it beat the controls: by the card, else by the run's metrics on it."""
    rows = card.get("metrics")
    metrics = rows[0] if isinstance(rows, list) and len(rows) == 1 else None
    found = metrics.get("beats controls") if isinstance(metrics, dict) else None
    return card.get("beats controls") or found


def _calibration(**fields: Any) -> Platt | Isotonic:
    if "slope" in fields:
        return Platt(**fields)
    return Isotonic(**{name: tuple(knots) for name, knots in fields.items()})


def _check_same(spec: Any, made: Detector, kept: Detector) -> None:
    """Makes sure that a spec makes what was fitted, as far as that can be seen.

    Functions cannot be compared; what they depend on shows in what a detector reads, in
    its summary, or in its parameters.
    """
    if made.name != kept.name:
        raise ValueError(f"spec {spec!r} makes {made.name!r}, not {kept.name!r}")
    for field in ("reads", "views", "text", "summary"):
        ours, theirs = getattr(made, field), getattr(kept, field)
        if field == "text":
            ours, theirs = ([name for name, _ in pairs] for pairs in (ours, theirs))
        if ours != theirs:
            raise ValueError(
                f"spec {spec!r} makes another {made.name!r} than the one that was "
                f"fitted: its {field} is {ours!r}, not {theirs!r}; give the options it "
                "was built with"
            )
    for one, other in zip(made.members, kept.members, strict=True):
        _check_same(spec, one, other)


def _shape(params: Any) -> Any:
    """The nesting of parameters as JSON, leaves as ``[number, shape, dtype]``."""
    numbers = iter(range(len(jax.tree.leaves(params))))

    def walk(node: Any) -> Any:
        if isinstance(node, dict):
            return {"dict": {name: walk(node[name]) for name in sorted(node)}}
        if hasattr(node, "_fields"):
            kind = type(node).__name__
            if kind not in _KINDS:
                raise ValueError(f"parameters hold a {kind}, which cannot be saved")
            return {kind: {name: walk(getattr(node, name)) for name in node._fields}}
        if isinstance(node, tuple) and not node:
            return {"dict": None}
        leaf = jnp.asarray(node)
        return [next(numbers), list(leaf.shape), str(leaf.dtype)]

    return walk(params)


def _abstract(node: Any) -> dict[str, jax.ShapeDtypeStruct]:
    if isinstance(node, list):
        number, shape, dtype = node
        # Here, not on the device that wrote it, which may not exist.
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        leaf = jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), sharding=here)
        return {f"leaf{number}": leaf}
    ((_, inside),) = node.items()
    merged: dict[str, jax.ShapeDtypeStruct] = {}
    for child in (inside or {}).values():
        merged |= _abstract(child)
    return merged


def _rebuild(node: Any, leaves: Mapping[str, Any]) -> Any:
    if isinstance(node, list):
        return jnp.asarray(leaves[f"leaf{node[0]}"])
    ((kind, inside),) = node.items()
    if inside is None:
        return ()
    built = {name: _rebuild(child, leaves) for name, child in inside.items()}
    if kind == "dict":
        return built
    if kind not in _KINDS:
        raise ValueError(f"card.json names parameters of kind {kind!r}; unknown here")
    return _KINDS[kind](**built)
