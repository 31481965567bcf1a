"""The run directory: what a run leaves for people and for programs."""

import base64
import html
import io
import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from jaxhal import plotting
from jaxhal.detectors import Detector
from jaxhal.experiments import results
from jaxhal.experiments.config import Config, to_yaml
from jaxhal.experiments.results import Judged
from jaxhal.files import replacing
from jaxhal.fitting import Fitted
from jaxhal.inputs import Inputs
from jaxhal.models.config import Config as ModelConfig
from jaxhal.summary import verdict

# Curves of more methods than this cannot be told apart.
_CURVES = 8


def write(
    folder: Path,
    config: Config,
    detectors: Sequence[Detector],
    data: Mapping[str, Inputs],
    judged: Sequence[Judged],
    fitted: Mapping[str, Mapping[str, Fitted]],
    geometry: ModelConfig,
    seconds: Mapping[str, float],
) -> list[dict[str, Any]]:
    """Writes everything a run found and returns the rows of its table.

    ``config.yaml scores.parquet results.json results.md report.html`` and figures.
    """
    import pandas as pd

    folder.mkdir(parents=True, exist_ok=True)
    names = [detector.name for detector in detectors]
    controls = [detector.name for detector in detectors if detector.control]
    several = len(data) > 1
    rows = [] if several else results.table(judged, names, controls)
    matrices = results.transfer(judged, names) if several else {}
    figures = dict(_figures(judged, rows, matrices, controls, fitted, geometry))
    figures["timing"] = plotting.timing_bars(seconds)
    text = _markdown(config, data, judged, rows, matrices, figures)
    with replacing(folder / "config.yaml") as file:
        file.write(to_yaml(config))
    frames = [
        part.frame.assign(train=part.train, test=part.test, fold=part.fold)
        for part in judged
    ]
    with replacing(folder / "scores.parquet", binary=True) as file:
        pd.concat(frames).to_parquet(file, index=False)
    found = {
        "name": config.name,
        "rows": rows,
        "transfer": {n: m.to_dict("index") for n, m in matrices.items()},
        "seconds": dict(seconds),
        "versions": _versions(),
    }
    with replacing(folder / "results.json") as file:
        json.dump(found, file, indent=1)
    with replacing(folder / "results.md") as file:
        file.write(text)
    pictures = {name: _png(figure) for name, figure in figures.items()}
    for name, png in pictures.items():
        with replacing(folder / f"{name}.png", binary=True) as file:
            file.write(png)
    with replacing(folder / "report.html") as file:
        file.write(_html(config.name, text, pictures))
    return rows


def _figures(
    judged: Sequence[Judged],
    rows: Sequence[Mapping[str, Any]],
    matrices: Mapping[str, Any],
    controls: Sequence[str],
    fitted: Mapping[str, Mapping[str, Fitted]],
    geometry: ModelConfig,
):
    for name, matrix in matrices.items():
        labels = [str(label) for label in matrix.index]
        figure = plotting.transfer_map(matrix.to_numpy(), labels, [*matrix.columns])
        figure.suptitle(name)
        yield f"transfer_{name}", figure
    if rows:
        areas = {r["method"]: (r["AUROC"], r["low"], r["high"]) for r in rows}
        yield "auroc", plotting.auroc_intervals(areas, controls)
        best = [r["method"] for r in rows if not r["control"]][: _CURVES - 2]
        best += [r["method"] for r in rows if r["control"]][:2]
        shown = [name for name in controls if name in best]
        first = judged[0].frame
        scores = {name: first[name].to_numpy() for name in best}
        labels = first["label"].to_numpy()
        yield "roc", plotting.roc_curves(scores, labels, controls=shown)
        yield "pr", plotting.precision_recall_curves(scores, labels, controls=shown)
        yield "scores", plotting.score_histograms(scores, labels)
        yield (
            "calibration",
            plotting.calibration_curve(first[f"{best[0]}.probability"], labels),
        )
    for label, found in fitted.items():
        if "toha" in found:
            yield f"heads_{label}", _toha_heads(found["toha"], geometry)


def _toha_heads(toha: Fitted, geometry: ModelConfig) -> Any:
    """The separation of every head, the chosen ones framed."""
    shape = (geometry.num_hidden_layers, geometry.num_attention_heads)
    delta = np.asarray(toha.params.separation).reshape(shape)
    weights = np.asarray(toha.params.weights).reshape(shape)
    framed = [(int(layer), int(head)) for layer, head in np.argwhere(weights > 0)]
    return plotting.head_map(
        delta, "MTop-Div, hallucinated minus grounded", "difference", framed=framed
    )


def _markdown(
    config: Config,
    data: Mapping[str, Inputs],
    judged: Sequence[Judged],
    rows: Sequence[Mapping[str, Any]],
    matrices: Mapping[str, Any],
    figures: Mapping[str, Any],
) -> str:
    text = [f"# {config.name}", ""]
    text += [f"Reader: {config.model} ({config.dtype}). Protocol: {config.protocol}."]
    if config.unit != "response":
        text += [
            f"Each answer is cut into parts; one {config.unit} is judged at a time."
        ]
    text += [f"Seed {config.seed}. Higher scores mean more likely hallucinated.", ""]
    for label, one in data.items():
        labels = one.labels
        sources = len(set(one.groups.tolist()))
        text.append(
            f"- {label}: {len(labels)} answers to {sources} sources, "
            f"{int(labels.sum())} hallucinated; {len(one.errors)} could not be read"
        )
        text += [f"  - row {n}: {why}" for n, why in one.errors.items()]
    tested = [f"{p.train} to {p.test}: {len(p.frame)}" for p in judged]
    text += ["", f"Answers judged ({'; '.join(tested)}).", ""]
    if rows:
        named = [{**row, "detector": row["method"]} for row in rows]
        text += [results.markdown(rows, len(judged) > 1), "", verdict(named)]
        text += [
            "",
            "The last column is the paired difference in AUROC to the best control, "
            "with its 95 % interval. Thresholds and calibration come from the training "
            "part.",
        ]
        if len(judged) > 1:
            text += [
                "",
                "Parts are pooled by calibrated probability, which is constant (AUROC "
                "0.5) for a score that ranked the training part the wrong way round; "
                "the AUROC of folds is that of the score itself.",
            ]
    for name, matrix in matrices.items():
        text += ["", f"## {name}: AUROC, trained on rows, tested on columns", ""]
        text += [_matrix(matrix)]
    if config.notes:
        text += ["", "## Notes", "", *[f"- {note}" for note in config.notes]]
    text += ["", *[f"![{name}]({name}.png)" for name in figures], ""]
    return "\n".join(text)


def _matrix(matrix: Any) -> str:
    head = ["", *map(str, matrix.columns)]
    lines = [head, ["---"] * len(head)]
    for label, row in matrix.iterrows():
        lines.append([str(label), *(f"{value:.3f}" for value in row)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=150)
    return buffer.getvalue()


def _html(title: str, text: str, pictures: Mapping[str, bytes]) -> str:
    """The markdown as one page that needs nothing beside it."""
    from markdown_it import MarkdownIt

    body = MarkdownIt("commonmark").enable("table").render(text)
    for name, png in pictures.items():
        data = base64.b64encode(png).decode()
        body = body.replace(f'src="{name}.png"', f'src="data:image/png;base64,{data}"')
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width'>"
        f"<title>{html.escape(title)}</title><style>"
        ":root{color-scheme:light dark}body{font:16px/1.5 system-ui;max-width:62rem;"
        "margin:2rem auto;padding:0 1rem}table{border-collapse:collapse;display:block;"
        "overflow-x:auto}td,th{padding:.25rem .6rem;border-bottom:1px solid #8884;"
        "text-align:right;white-space:nowrap}td:first-child,th:first-child{text-align:"
        "left}img{max-width:100%;background:#fff;margin:1rem 0}"
        f"</style>{body}</html>\n"
    )


def _versions() -> dict[str, str]:
    names = ("jaxhal", "jax", "flax", "optax", "numpy", "scikit-learn")
    return {"python": platform.python_version(), **{n: version(n) for n in names}}
