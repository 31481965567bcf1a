"""The run directory: what a run leaves for people and for programs."""

import dataclasses
import hashlib
import io
import json
import platform
import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxhal import plotting
from jaxhal.detectors import Detector
from jaxhal.experiments import (
    finetuning,
    page,
    relevance,
    results,
    running,
    sentences,
)
from jaxhal.experiments.answers import PAGE, reports, token_table
from jaxhal.experiments.config import Config, to_yaml
from jaxhal.experiments.figures import figures
from jaxhal.experiments.running import Found
from jaxhal.files import replacing
from jaxhal.inputs import Inputs
from jaxhal.models.lm import LM
from jaxhal.report import Report, write_html
from jaxhal.saving import save

if TYPE_CHECKING:
    import pandas as pd

_FILES = ("scores.parquet", "results.json", "results.md", "report.html")


def begin(folder: Path, config: Config) -> None:
    """Makes the folder of a run, without what another run left, and ``config.yaml``.

    Raises:
      OSError: when it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "fitted").is_dir():
            shutil.rmtree(folder / "fitted")
        for path in (*folder.glob("*.png"), *(folder / name for name in _FILES)):
            path.unlink(missing_ok=True)
        with replacing(folder / "config.yaml") as file:
            file.write(to_yaml(config))
    except OSError as error:
        raise OSError(  # of the subclass that belongs to the number
            error.errno,
            f"cannot write the run: {error.strerror}; choose another 'out'",
            str(folder),
        ) from error


def write(
    folder: Path,
    config: Config,
    detectors: Sequence[Detector],
    data: Mapping[str, Inputs],
    found: Found,
    lm: LM,
    seconds: Mapping[str, float],
    costs: Mapping[str, float],
) -> list[dict[str, Any]]:
    """Writes everything a run found and returns the rows of its table.

    ``scores.parquet results.json results.md report.html``, figures, and the detectors
    fitted on the first split in ``fitted/<data set>/<detector>/``.  The checkpoints of
    a tuning, which a run that is started again goes on from, are done with.
    """
    import pandas as pd

    make = results.transfer if len(data) > 1 else results.table
    methods = [*detectors, *([finetuning.FINE_TUNED] if found.tuned else [])]
    rows = make(found.judged, methods)
    for row in rows:
        if row["method"] in costs:
            row[results.COST] = costs[row["method"]]
    whole = config.unit == "response"
    tokens = _tokens(data, found) if whole else []
    differences = relevance.table(data) if whole else []
    cut = config.unit == "sentence"
    inside = sentences.table(data, found.judged, methods) if cut else []
    drawn = dict(figures(config, methods, data, found, rows, lm))
    drawn |= finetuning.figures(found.tuned)
    drawn["timing"] = plotting.timing_bars(seconds)
    tables = rows, tokens, inside, differences
    notes = [*config.notes, *finetuning.notes(found.tuned)]
    noted = dataclasses.replace(config, notes=notes)
    text = page.markdown(noted, data, methods, found.judged, *tables, list(drawn))
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
        "sentences": inside,
        "relevance": differences,
        "seconds": dict(seconds),
        "versions": _versions(),
    }
    with replacing(folder / "results.json") as file:
        json.dump(everything, file, indent=1)
    with replacing(folder / "results.md") as file:
        file.write(text)
    pictures = {name: _png(figure) for name, figure in drawn.items()}
    for name, png in pictures.items():
        with replacing(folder / f"{name}.png", binary=True) as file:
            file.write(png)
    shown = _shown(config, data, found) if whole else []
    body = page.html(text, pictures, len(shown))
    write_html(folder / "report.html", shown, config.name, body=body)
    _save(folder / "fitted", config, detectors, data, found, rows)
    for label, tuned in found.tuned.items():
        tuned.save(folder / "fitted" / label / finetuning.FINE_TUNED.name)
    if found.tuned:
        shutil.rmtree(folder / finetuning.CHECKPOINTS)
    return rows


def write_sweep(folder: Path, table: "pd.DataFrame", keys: Sequence[str]) -> None:
    """``sweep.csv`` and, of one key that takes numbers, ``sweep.png``."""
    import pandas as pd

    with replacing(folder / "sweep.csv") as file:
        table.to_csv(file, index=False)
    (folder / "sweep.png").unlink(missing_ok=True)
    values: Any = pd.to_numeric(table[keys[0]], errors="coerce")
    if len(keys) == 1 and values.notna().all() and "train" not in table:
        with replacing(folder / "sweep.png", binary=True) as file:
            file.write(_png(plotting.sweep_curves(table, keys[0])))


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
        own = results.own(rows, label)
        fits = {part.fit for part in found.judged if part.train == label}
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
        if len(fits) > 1:
            about["note"] = (
                f"metrics are over the test parts of {len(fits)} fits, this the first"
            )
        for detector in detectors:
            metrics = [row for row in own if row["method"] == detector.name]
            fitted = found.fitted[label][detector.name]
            card = {**about, "metrics": metrics}
            save(folder / label / detector.name, fitted, specs[detector.name], card)


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=150)
    return buffer.getvalue()


def _versions() -> dict[str, str]:
    names = ("jaxhal", "jax", "flax", "optax", "numpy", "scikit-learn")
    return {"python": platform.python_version(), **{n: version(n) for n in names}}
