"""The run directory: what a run leaves for people and for programs."""

import hashlib
import io
import json
import platform
import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from jaxhal import plotting
from jaxhal.detectors import Detector
from jaxhal.experiments import page, results, running
from jaxhal.experiments.answers import PAGE, reports, token_table
from jaxhal.experiments.config import Config, to_yaml
from jaxhal.experiments.running import Found
from jaxhal.files import replacing
from jaxhal.fitting import Fitted
from jaxhal.inputs import Inputs
from jaxhal.models.config import Config as ModelConfig
from jaxhal.report import Report, write_html
from jaxhal.saving import save

# Curves of more methods than this cannot be told apart.
_CURVES = 8


def write(
    folder: Path,
    config: Config,
    detectors: Sequence[Detector],
    data: Mapping[str, Inputs],
    found: Found,
    geometry: ModelConfig,
    seconds: Mapping[str, float],
) -> list[dict[str, Any]]:
    """Writes everything a run found and returns the rows of its table.

    ``config.yaml scores.parquet results.json results.md report.html``, figures, and the
    detectors fitted on the first split in ``fitted/<data set>/<detector>/``.
    """
    import pandas as pd

    folder.mkdir(parents=True, exist_ok=True)
    names = [detector.name for detector in detectors]
    controls = [detector.name for detector in detectors if detector.control]
    make = results.transfer if len(data) > 1 else results.table
    rows = make(found.judged, names, controls)
    tokens = [] if config.unit != "response" else _tokens(data, found)
    figures = dict(_figures(found, rows, controls, geometry))
    figures["timing"] = plotting.timing_bars(seconds)
    text = page.markdown(config, data, found.judged, rows, tokens, list(figures))
    with replacing(folder / "config.yaml") as file:
        file.write(to_yaml(config))
    frames = [
        part.frame.assign(train=part.train, test=part.test, fold=part.fold)
        for part in found.judged
    ]
    with replacing(folder / "scores.parquet", binary=True) as file:
        pd.concat(frames).to_parquet(file, index=False)
    everything = {
        "name": config.name,
        "rows": rows,
        "tokens": tokens,
        "seconds": dict(seconds),
        "versions": _versions(),
    }
    with replacing(folder / "results.json") as file:
        json.dump(everything, file, indent=1)
    with replacing(folder / "results.md") as file:
        file.write(text)
    pictures = {name: _png(figure) for name, figure in figures.items()}
    for name, png in pictures.items():
        with replacing(folder / f"{name}.png", binary=True) as file:
            file.write(png)
    shown = [] if config.unit != "response" else _shown(config, data, found)
    body = page.html(text, pictures, len(shown))
    write_html(folder / "report.html", shown, config.name, body=body)
    _save(folder / "fitted", config, detectors, data, found, rows)
    return rows


def _tokens(data: Mapping[str, Inputs], found: Found) -> list[dict[str, Any]]:
    return [
        {"data": label, **row}
        for label, one in data.items()
        for row in token_table(one, found.fitted[label], *found.splits[label][0])
    ]


def _shown(config: Config, data: Mapping[str, Inputs], found: Found) -> list[Report]:
    """The first test part of the first data set, or evenly spaced answers of it."""
    label, one = next(iter(data.items()))
    test = found.splits[label][0].test
    test = test[np.unique(np.linspace(0, len(test) - 1, PAGE).astype(int))]
    return reports(config.model, one, found.fitted[label], test.tolist())


def _save(
    folder: Path,
    config: Config,
    detectors: Sequence[Detector],
    data: Mapping[str, Inputs],
    found: Found,
    rows: Sequence[Mapping[str, Any]],
) -> None:
    """The detectors of the first split, each with a card."""
    specs = running.specs_of(config)
    for label, one in data.items():
        train = found.splits[label][0].train
        texts = [(one.examples[n].id, one.examples[n].response) for n in train]
        about = {
            "model": config.model,
            "data": {
                "name": label,
                "answers": len(train),
                "hallucinated": int(one.labels[train].sum()),
                "sha256": hashlib.sha256(json.dumps(texts).encode()).hexdigest(),
            },
        }
        for detector in detectors:
            metrics = [row for row in rows if row["method"] == detector.name]
            place = folder / label / detector.name
            if place.exists():
                shutil.rmtree(place)
            card = {**about, "metrics": metrics}
            save(place, found.fitted[label][detector.name], specs[detector.name], card)


def _figures(
    found: Found,
    rows: Sequence[Mapping[str, Any]],
    controls: Sequence[str],
    geometry: ModelConfig,
):
    several = "train" in rows[0]
    for name, matrix in results.matrices(rows).items() if several else ():
        labels = [str(label) for label in matrix.index]
        figure = plotting.transfer_map(matrix.to_numpy(), labels, [*matrix.columns])
        figure.suptitle(name)
        yield f"transfer_{name}", figure
    if not several:
        areas = {r["method"]: (r["AUROC"], r["low"], r["high"]) for r in rows}
        yield "auroc", plotting.auroc_intervals(areas, controls)
        best = [r["method"] for r in rows if not r["control"]][: _CURVES - 2]
        best += [r["method"] for r in rows if r["control"]][:2]
        shown = [name for name in controls if name in best]
        first = found.judged[0].frame
        scores = {name: first[name].to_numpy() for name in best}
        labels = first["label"].to_numpy()
        yield "roc", plotting.roc_curves(scores, labels, controls=shown)
        yield "pr", plotting.precision_recall_curves(scores, labels, controls=shown)
        yield "scores", plotting.score_histograms(scores, labels)
        yield (
            "calibration",
            plotting.calibration_curve(first[f"{best[0]}.probability"], labels),
        )
    for label, fitted in found.fitted.items():
        if "toha" in fitted:
            yield f"heads_{label}", _toha_heads(fitted["toha"], geometry)


def _toha_heads(toha: Fitted, geometry: ModelConfig) -> Any:
    """The separation of every head, the chosen ones framed."""
    shape = (geometry.num_hidden_layers, geometry.num_attention_heads)
    delta = np.asarray(toha.params.separation).reshape(shape)
    weights = np.asarray(toha.params.weights).reshape(shape)
    framed = [(int(layer), int(head)) for layer, head in np.argwhere(weights > 0)]
    return plotting.head_map(
        delta, "MTop-Div, hallucinated minus grounded", "difference", framed=framed
    )


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=150)
    return buffer.getvalue()


def _versions() -> dict[str, str]:
    names = ("jaxhal", "jax", "flax", "optax", "numpy", "scikit-learn")
    return {"python": platform.python_version(), **{n: version(n) for n in names}}
