"""The run directory: what a run leaves for people and for programs."""

import contextlib
import dataclasses
import hashlib
import io
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
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
    running,
    sentences,
)
from jaxhal.experiments.answers import PAGE, reports, token_table
from jaxhal.experiments.config import Config
from jaxhal.experiments.figures import figures
from jaxhal.experiments.running import Found
from jaxhal.io.configuration import structured, to_yaml
from jaxhal.io.files import replacing, staged
from jaxhal.models.lm import LM
from jaxhal.reporting import results
from jaxhal.reporting.markdown import picture
from jaxhal.reporting.page import write_html
from jaxhal.reporting.report import Report
from jaxhal.scoring.inputs import Inputs
from jaxhal.scoring.saving import save

if TYPE_CHECKING:
    import pandas as pd

# What every run writes; pictures come with their names in results.json.
_FILES = (
    "config.yaml",
    "scores.parquet",
    "results.json",
    "results.md",
    "report.html",
    "fitted",
)
# What stands in a run's folder before it is finished, or beside it.
_BESIDE = (finetuning.CHECKPOINTS, "sweep.csv", "sweep.png")


@contextlib.contextmanager
def building(target: Path, config: Config, force: bool) -> Iterator[Path]:
    """The folder of a run, which takes its name when the run is done.

    A run that fails leaves what is there as it is.  What a finished run of the same
    configuration made is replaced; all else in its folder stays.

    Args:
      target: its name.
      config: of the run.
      force: replace what another configuration made, too.

    Raises:
      FileExistsError: when the folder holds what no run made.
      ValueError: when it holds what another configuration made, naming what differs.
      OSError: when it cannot be written.
    """
    _check_free(target, config, force)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with staged(target, own=_own) as place:
            with replacing(place / "config.yaml") as file:
                file.write(to_yaml(config))
            yield place
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(  # of the subclass that belongs to the number
            error.errno,
            f"cannot write the run: {error.strerror}; choose another 'out'",
            str(target),
        ) from error


def _check_free(target: Path, config: Config, force: bool) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise FileExistsError(f"{target} is no folder; give another 'name' or 'out'")
    if _finished(target) is None:
        strange = [
            entry.name
            for entry in sorted(target.iterdir())
            if entry.name not in _BESIDE
            and (entry.name in _FILES or _finished(entry) is None)
        ]
        if strange:
            raise FileExistsError(
                f"{target} holds what no run made, such as {strange[0]!r}; give "
                "another 'name' or 'out'"
            )
        return
    kept = structured(Config, target / "config.yaml")
    other = [
        field.name
        for field in dataclasses.fields(config)
        if field.name not in ("out", "store", "notes")
        and getattr(kept, field.name) != getattr(config, field.name)
    ]
    if other and not force:
        raise ValueError(
            f"{target} holds a finished run with another {', '.join(other)}; give this "
            "one another 'name', or replace that one with --force (force=True)"
        )


def _finished(folder: Path) -> dict[str, Any] | None:
    """What a run that ended well said of itself; ``None`` where there is none."""
    path = folder / "results.json"
    if not path.is_file() or not (folder / "config.yaml").is_file():
        return None
    try:
        found = json.loads(path.read_text("utf-8"))
        return found if "jaxhal" in found["versions"] else None
    except (KeyError, TypeError, ValueError):
        return None


def _own(folder: Path) -> list[str]:
    """What the run in a folder wrote, and what it went on from."""
    found = _finished(folder) or {}
    pictures = [f"{name}.png" for name in found.get("figures", ())]
    return [*_FILES, *pictures, finetuning.CHECKPOINTS]


def methods_of(detectors: Sequence[Detector], found: Found) -> list[Detector]:
    """The detectors, and the tuned reader where there is one."""
    return [*detectors, *([finetuning.FINE_TUNED] if found.tuned else [])]


def table(
    detectors: Sequence[Detector], found: Found, costs: Mapping[str, float]
) -> list[dict[str, Any]]:
    """The rows of a run's table, with the milliseconds an answer that are known."""
    make = results.transfer if len(found.fitted) > 1 else results.table
    rows = make(found.judged, methods_of(detectors, found))
    for row in rows:
        if row["method"] in costs:
            row[results.COST] = costs[row["method"]]
    return rows


def write(
    folder: Path,
    config: Config,
    detectors: Sequence[Detector],
    data: Mapping[str, Inputs],
    found: Found,
    rows: Sequence[Mapping[str, Any]],
    lm: LM,
    seconds: Mapping[str, float],
) -> None:
    """Writes everything a run found.

    ``scores.parquet results.json results.md report.html``, figures, and the detectors
    fitted on the first split in ``fitted/<data set>/<detector>/``.
    """
    import pandas as pd

    methods = methods_of(detectors, found)
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
    text = page.markdown(noted, data, methods, found.judged, *tables)
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
        "figures": list(drawn),
        "versions": _versions(),
    }
    with replacing(folder / "results.json") as file:
        json.dump(everything, file, indent=1)
    with replacing(folder / "results.md") as file:
        file.write("\n".join([text, *map(picture, drawn), ""]))
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
