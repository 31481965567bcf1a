"""Fitted detectors on disk: a safetensors file, and a card that people can read."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxhal.classifiers import (
    linear,
    lstm,
    mlp,
    multimax,
    pooling,
    selection,
    svm,
    trees,
)
from jaxhal.detectors import Detector, build
from jaxhal.detectors.controls import TfIdf
from jaxhal.detectors.ensemble import Stack
from jaxhal.detectors.toha import Heads
from jaxhal.evaluation.calibration import Isotonic, Platt
from jaxhal.evaluation.guarantees import Guarantee
from jaxhal.evaluation.held_out import CalibrationSet, Measured
from jaxhal.io import sealing
from jaxhal.io.files import replacing
from jaxhal.io.showing import shown
from jaxhal.llm import hosts
from jaxhal.scoring import encoders
from jaxhal.scoring.fitting import Fitted

#: Of a folder of a detector.
FILES = _CARD, _PARAMS = "card.json", "params.safetensors"

# What parameters may be made of, by the name the card gives it.
_KINDS = {
    kind.__name__: kind
    for kind in (
        *(linear.Linear, lstm.LSTM, lstm.Cell, mlp.MLP, pooling.Pooling, svm.SVM),
        multimax.MultiMax,
        *(trees.Forest, selection.Chosen, selection.Selected, Heads, TfIdf, Stack),
        CalibrationSet,
    )
}


def save(
    path: str | os.PathLike,
    fitted: Fitted,
    spec: str | Mapping[str, Any],
    card: Mapping[str, Any] | None = None,
) -> None:
    """Writes a fitted detector to a folder: ``params.safetensors`` and ``card.json``.

    Raises ValueError when ``spec`` makes another detector or nothing was fitted, and
    FileExistsError when the folder holds something.

    Args:
      path: the folder, which must not exist yet or be empty.
      spec: how :func:`jaxhal.detectors.build` makes the detector again.
      card: what else people should know: the model, its data and their hash, metrics.
    """
    from safetensors.numpy import save as serialized

    check_spec(spec)
    _check_same(spec, build(spec), fitted.detector)
    if fitted.threshold is None or fitted.calibration is None:
        name = fitted.detector.name
        raise ValueError(f"{name!r} was not fitted; there is nothing to save")
    names = ("jaxhal", "jax", "flax", "optax", "safetensors")
    leaves: dict[str, np.ndarray] = {}
    nesting = _nesting(fitted.params, "", leaves)
    kept, measured, promise = fitted.calibrated_on, fitted.measured, fitted.promise
    spans = fitted.highlights
    about = {
        "detector": encoders.whole(spec),
        "threshold": float(fitted.threshold),
        "calibration": dataclasses.asdict(fitted.calibration),
        "calibrated on": kept and _nesting(kept, "calibrated on", leaves),
        "highlights": None if spans is None else _nesting(spans, "highlights", leaves),
        "beats controls": fitted.beats,
        "layers": fitted.layers,
        "needs": dict(fitted.needs),
        "reader": fitted.reader,
        "encoders": dict(fitted.encoders),
        "dtype": fitted.dtype,
        "unit": fitted.unit,
        "measured": measured and measured.to_dict(),
        "promise": promise and dataclasses.asdict(promise),
        "rate": fitted.rate,
        "params": nesting,
        "versions": {name: version(name) for name in names},
    }
    params = serialized(leaves)
    about["sha256"] = hashlib.sha256(params).hexdigest()
    if taken := sorted({*about, sealing.SEAL} & set(card or {})):
        raise ValueError(
            f"card has {', '.join(map(repr, taken))}, which save writes itself; give "
            "that another key"
        )
    folder = Path(path).resolve()
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / _PARAMS, binary=True) as file:
        file.write(params)
    sealing.write(folder / _CARD, {**about, **(card or {})})


def check_spec(spec: Any) -> None:
    """ValueError where a detector is specified by what a card cannot hold."""
    try:
        json.dumps(spec)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"detector {shown(str(spec))} cannot be saved ({error}); give its options "
            "as numbers, text, lists and mappings"
        ) from error


def load(path: str | os.PathLike, *, endpoints: Iterable[str] = ()) -> Fitted:
    """A detector that :func:`save` wrote.

    Raises ValueError when card or parameters are not as they were saved, and
    :class:`jaxhal.llm.hosts.Refused` when it would ask another endpoint.

    Args:
      endpoints: hosts that it may ask and, over https, show $OPENAI_API_KEY to, beside
        those that the environment names, such as ``"api.openai.com"``.
    """
    folder = Path(path).resolve()
    if not (folder / _CARD).is_file():
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


def card_of(path: str | os.PathLike) -> dict[str, Any]:
    """The card of a detector that :func:`save` wrote."""
    return sealing.read(Path(path) / _CARD)


def _load(folder: Path) -> Fitted:
    from safetensors.numpy import load as deserialized

    card = card_of(folder)
    params = (folder / _PARAMS).read_bytes()
    if hashlib.sha256(params).hexdigest() != card["sha256"]:
        raise ValueError(f"{_PARAMS} does not have the sha256 that {_CARD} names")
    leaves, measured, kept = deserialized(params), card["measured"], None
    if (nesting := card["calibrated on"]) is not None:
        kept = CalibrationSet(*map(np.asarray, _rebuild(nesting, leaves)))
    # What earlier versions did not note is missing.
    spans, promise = card.get("highlights"), card.get("promise")
    return Fitted(
        build(card["detector"]),
        _rebuild(card["params"], leaves),
        _calibration(**card["calibration"]),
        card["threshold"],
        beats=card["beats controls"],
        layers=card["layers"],
        needs=card.get("needs", {}),
        reader=card["reader"],
        encoders=card.get("encoders", {}),
        dtype=card.get("dtype"),
        measured=None if measured is None else Measured(**measured),
        calibrated_on=kept,
        unit=card.get("unit", "response"),
        highlights=None if spans is None else np.asarray(_rebuild(spans, leaves)),
        promise=None if promise is None else Guarantee(**promise),
        rate=card.get("rate"),
    )


def _calibration(**fields: Any) -> Platt | Isotonic:
    if "slope" in fields:
        return Platt(**fields)
    return Isotonic(**{name: tuple(knots) for name, knots in fields.items()})


def _check_same(spec: Any, made: Detector, kept: Detector) -> None:
    """Makes sure that a spec makes what was fitted, as far as that can be seen.

    Functions cannot be compared; what they depend on shows in the settings that a spec
    can write, in what a detector reads, in its summary, or in its parameters.
    """
    if made.name != kept.name:
        raise ValueError(f"spec {spec!r} makes {made.name!r}, not {kept.name!r}")
    for field in ("kind", "summary", "features", "settings"):
        ours, theirs = getattr(made, field), getattr(kept, field)
        if field == "settings":
            ours, theirs = _written(ours, theirs), _written(theirs, ours)
        if ours != theirs:
            raise ValueError(
                f"spec {spec!r} makes another {made.name!r} than the one that was "
                f"fitted: its {field} is {ours!r}, not {theirs!r}; give the options it "
                "was built with"
            )
    for one, other in zip(made.members, kept.members, strict=True):
        _check_same(spec, one, other)


def _written(settings: Any, others: Any) -> dict[str, Any]:
    """Those that in both are numbers, words and lists of them, as a spec has them."""

    def plain(value: Any) -> bool:
        inside = type(value) is tuple and all(map(plain, value))
        return inside or value is None or isinstance(value, bool | int | float | str)

    known = {key for key, value in others if plain(value)}
    return {key: value for key, value in settings if key in known and plain(value)}


def _nesting(node: Any, name: str, leaves: dict[str, np.ndarray]) -> Any:
    """The nesting of parameters as JSON; arrays go to ``leaves``, their names stay."""

    def inside(parts: Mapping[str, Any]) -> dict[str, Any]:
        return {
            part: _nesting(child, f"{name}.{part}" if name else part, leaves)
            for part, child in parts.items()
        }

    if isinstance(node, dict):
        return {"dict": inside(node)}
    if hasattr(node, "_fields"):
        kind = type(node).__name__
        if kind not in _KINDS:
            raise ValueError(f"parameters hold a {kind}, which cannot be saved")
        return {kind: inside(node._asdict())}
    if isinstance(node, tuple) and not node:
        return {"dict": None}
    name = name or "params"
    while name in leaves:  # parts may have dots in their names
        name += "_"
    leaves[name] = np.asarray(jax.device_put(node), order="C")
    return name


def _rebuild(node: Any, leaves: Mapping[str, Any]) -> Any:
    if isinstance(node, str):
        return jax.device_put(leaves[node])
    ((kind, inside),) = node.items()
    if inside is None:
        return ()
    built = {name: _rebuild(child, leaves) for name, child in inside.items()}
    if kind == "dict":
        return built
    if kind not in _KINDS:
        raise ValueError(f"{_CARD} names parameters of kind {kind!r}; unknown here")
    return _KINDS[kind](**built)
