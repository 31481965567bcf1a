"""The run directory: what a run leaves for people and for programs."""

import contextlib
import dataclasses
import io
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxhal import plotting
from jaxhal.experiments import finetuning, page
from jaxhal.experiments.answers import PAGE, reports
from jaxhal.experiments.config import Experiment
from jaxhal.experiments.figures import figures
from jaxhal.experiments.running import Result
from jaxhal.io.configuration import structured, write_config
from jaxhal.io.files import replacing, staged
from jaxhal.models.lm import LM
from jaxhal.reporting.markdown import picture
from jaxhal.reporting.page import write_html
from jaxhal.reporting.report import Report

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
# What a sweep writes beside its runs.
_SWEPT = ("sweep.csv", "sweep.png")


@contextlib.contextmanager
def building(target: Path, config: Experiment, force: bool) -> Iterator[Path]:
    """The folder of a run, which takes its name ``target`` when the run is done.

    A run that fails leaves what is there as it is.  What a finished run of the same
    configuration made is replaced, with ``force`` that of another one too; all else in
    its folder stays.

    Raises:
      FileExistsError: when the folder holds what no run made.
      ValueError: when it holds what another configuration made, naming what differs.
      OSError: when it cannot be written.
    """
    check_free(target, config, force)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with staged(target, own=_own) as place:
            write_config(place, config)
            yield place
            check_free(target, config, force)  # a run takes hours
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(  # of the subclass that belongs to the number
            error.errno,
            f"cannot write the run: {error.strerror}; choose another 'out'",
            str(target),
        ) from error


def check_free(target: Path, config: Experiment, force: bool) -> None:
    """Raises as :func:`building` where a run would replace what it should not."""
    if not target.exists():
        return
    if not target.is_dir():
        raise FileExistsError(f"{target} is no folder; give another 'name' or 'out'")
    if _finished(target) is None:
        strange = [
            entry.name
            for entry in sorted(target.iterdir())
            if not _beside(entry) and (entry.name in _FILES or _finished(entry) is None)
        ]
        if strange:
            raise FileExistsError(
                f"{target} holds what no run made, such as {strange[0]!r}; give "
                "another 'name' or 'out'"
            )
        return
    kept = structured(Experiment, target / "config.yaml")
    other = [
        field.name
        for field in dataclasses.fields(config)
        if field.name not in ("out", "store", "notes", "mesh")
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


def _beside(entry: Path) -> bool:
    """Whether it stands in a run's folder before the run is finished, or beside it."""
    return entry.name in _SWEPT or finetuning.holds_checkpoints(entry)


def _own(folder: Path) -> list[str]:
    """What the run in a folder wrote, and what it went on from."""
    found, own = _finished(folder), []
    if found is not None:
        own = [*_FILES, *(f"{name}.png" for name in found.get("figures", ()))]
    checkpoints = folder / finetuning.CHECKPOINTS
    if finetuning.holds_checkpoints(checkpoints):
        own.append(checkpoints.name)
    return own


def write(folder: Path, found: Result, lm: LM, seconds: Mapping[str, float]) -> None:
    """Writes everything a run found.

    ``scores.parquet results.json results.md report.html``, figures, and the detectors
    fitted on the first split in ``fitted/<data set>/<detector>/``.
    """
    import pandas as pd

    config, tables = found.config, page.tables(found)
    drawn = dict(figures(found, lm))
    drawn |= finetuning.figures(found.tuned)
    drawn["timing"] = plotting.timing_bars(seconds)
    text = page.markdown(found, tables)
    frames = [
        part.frame.assign(train=part.train, test=part.test, fold=part.fold)
        for part in found.judged
    ]
    with replacing(folder / "scores.parquet", binary=True) as file:
        pd.concat(frames).to_parquet(file, index=False)
    names = ("jaxhal", "jax", "flax", "optax", "numpy", "scikit-learn")
    versions = {name: version(name) for name in names}
    everything = {
        "name": config.name,
        "rows": found.rows,
        **tables,
        "seconds": dict(seconds),
        "figures": list(drawn),
        "versions": {"python": platform.python_version(), **versions},
    }
    with replacing(folder / "results.json") as file:
        json.dump(everything, file, indent=1)
    with replacing(folder / "results.md") as file:
        file.write("\n".join([text, *map(picture, drawn), ""]))
    pictures = {name: _png(figure) for name, figure in drawn.items()}
    for name, png in pictures.items():
        with replacing(folder / f"{name}.png", binary=True) as file:
            file.write(png)
    shown = _shown(found) if config.unit == "response" else []
    body = page.html(text, pictures, len(shown))
    write_html(folder / "report.html", shown, config.name, body=body)
    _save(folder / "fitted", found)


def check_sweep(folder: Path) -> None:
    """FileExistsError where a sweep would replace a table that no sweep wrote."""
    there = [folder / name for name in _SWEPT if (folder / name).exists()]
    if there and not any(_finished(entry) for entry in folder.iterdir()):
        raise FileExistsError(
            f"{there[0]} stands beside no run, so no sweep wrote it; give another "
            "'name' or 'out'"
        )


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


def _shown(found: Result) -> list[Report]:
    """The first test part of the first data set, or evenly spaced answers of it."""
    label, one = next(iter(found.data.items()))
    test = found.splits[label][0].test
    test = test[np.unique(np.linspace(0, len(test) - 1, PAGE).astype(int))]
    return reports(one, found.fitted[label], test.tolist())


def _save(folder: Path, found: Result) -> None:
    """What was fitted on the first split, each detector with a card."""
    folder.mkdir()
    for label in found.data:
        found.ready(label).save_pretrained(folder / label)
        if label in found.tuned:
            found.tuned[label].save(folder / label / finetuning.FINE_TUNED.name)


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=150)
    return buffer.getvalue()
