"""Experiments: one YAML file in, one run directory out; sweeps that read once."""

import itertools
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxhal.experiments import folder, running
from jaxhal.experiments.config import PRESETS as PRESETS
from jaxhal.experiments.config import Data as Data
from jaxhal.experiments.config import Experiment as Experiment
from jaxhal.experiments.config import load_config as load_config
from jaxhal.experiments.crossing import across_models as across_models
from jaxhal.experiments.distributed import together
from jaxhal.experiments.guiding import Guiding as Guiding
from jaxhal.experiments.making import Making as Making
from jaxhal.experiments.running import Result as Result
from jaxhal.experiments.writing import Writing as Writing
from jaxhal.io.checks import check_name
from jaxhal.reading.sharing import Share as Share
from jaxhal.scoring.collection import FittedDetectors

if TYPE_CHECKING:
    import pandas as pd


# What the values of a sweep may hold and a folder's name should not.
_UNFIT = r"[\s/\\\x00]+"


def run(
    config: Any,
    overrides: Iterable[str] = (),
    *,
    force: bool = False,
    progress: bool | None = None,
) -> Result:
    """Runs an experiment and writes its directory.

    The directory is built beside its name and takes it when the run is done: one that
    fails or is stopped leaves what was there.

    Args:
      config: as :func:`load_config` takes it, overrides as well.
      force: replace what another configuration or seed made under the same name.
      progress: show progress bars; ``None`` shows them on a terminal.

    Raises:
      FileNotFoundError: when the configuration or its data is not there.
      FileExistsError: when the directory holds what no run made.
      ValueError: on a bad configuration, data that its protocol cannot split, or a
        directory that holds what another configuration made.
      OSError: when the run's folder cannot be written.
    """
    return _run(load_config(config, overrides), force, progress)


def run_distributed(
    config: Any,
    overrides: Iterable[str] = (),
    *,
    force: bool = False,
    progress: bool | None = None,
) -> Result | Share:
    """One of the processes that run an experiment together, sharing its store.

    Each draws samples and reads answers on its own devices; process 0 also asks judges,
    fits, and writes the directory.  Processes are found as
    ``jax.distributed.initialize`` finds them, or by the variables
    ``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES`` and ``JAX_PROCESS_ID``; call it
    before anything else is computed.

    Args:
      config, overrides, force, progress: as :func:`run` takes them; bars are those of
        process 0.

    Returns:
      What was found in process 0, in the others what they did.

    Raises:
      ValueError: as :func:`run`; where no job of several processes is found, when they
        have other settings, or when they do not share the store.
      RuntimeError: when the others do not come in 5 minutes.
    """
    config = load_config(config, overrides)
    folder.check_free(Path(config.out) / config.name, config, force)
    with together(config, running.store_of(config)) as share:
        if share.process == 0:
            return _run(config, force, progress, share)
        running.prepare(config, share)
        return share


def _run(
    config: Experiment,
    force: bool,
    progress: bool | None,
    share: Share | None = None,
) -> Result:
    running.detectors_of(config)  # a wrong name should cost no download
    target = Path(config.out) / config.name
    with folder.building(target, config, force) as place:  # before hours go by
        began = time.perf_counter()
        lm = running.model(config.model, config.dtype, config.mesh)
        detectors = running.detectors_of(config, lm)
        data = running.read_data(config, detectors, progress, share)
        read = time.perf_counter()
        found = running.judge(config, detectors, data, progress)
        seconds = {"reading": read - began}
        seconds["fitting and judging"] = time.perf_counter() - read
        costs = running.costs(config, data, detectors, progress)
        found = running.tabled(found, costs)
        folder.write(place, found, lm, seconds)
    return found


def fit(
    config: Any, overrides: Iterable[str] = (), *, progress: bool | None = None
) -> FittedDetectors:
    """The detectors of an experiment, for its reader alone and without a directory.

    ``fit("ragtruth", ["model=..."])`` makes for any reader what the package ships for
    smollm2-135m.  Parameters, calibration and thresholds come from the first training
    part, and the test part says what they are worth.  Warns about a fit that learnt
    nothing, and about answers that could not be read.

    Args:
      config, overrides, progress: as :func:`run` takes them.

    Raises:
      ValueError: as :func:`run`, and on several data sets, another unit or a tuning.
    """
    config = load_config(config, overrides)
    if len(config.data) > 1 or config.unit != "response" or config.tuning is not None:
        raise ValueError(
            "detectors to use are fitted to one data set, to whole answers and without "
            "a tuning; change data, unit or tuning, or use run"
        )
    running.detectors_of(config)  # a wrong name should cost no download
    lm = running.model(config.model, config.dtype, config.mesh)
    detectors = running.detectors_of(config, lm)
    data = running.read_data(config, detectors, progress)
    ((label, read),) = data.items()
    read.warn_of_errors()
    found = running.tabled(running.judge(config, detectors, data, progress), {})
    return found.ready(label).for_reader(lm)


def sweep(
    config: Any,
    grid: Mapping[str, Sequence[Any]],
    overrides: Iterable[str] = (),
    *,
    force: bool = False,
    progress: bool | None = None,
) -> "pd.DataFrame":
    """Runs every combination of a grid; the model is loaded and read once.

    Beside the folders of the runs stand ``sweep.csv`` and, where the values of a single
    key are numbers, ``sweep.png``.

    Args:
      config: as the other arguments, what :func:`run` takes.
      grid: dotted key -> values.

    Returns:
      A row per setting and detector: the grid's keys, then the columns of the table; a
      column that has the name of a key is followed by ``" (metric)"``.

    Raises:
      ValueError: on an empty grid, and as :func:`run` does.
    """
    import pandas as pd

    if not grid or not all(len(values) for values in grid.values()):
        raise ValueError(f"grid is {dict(grid)!r}; give each key at least one value")
    tables, target = [], Path()
    for values in itertools.product(*grid.values()):
        setting = dict(zip(grid, values, strict=True))
        texts = {k: "null" if v is None else str(v) for k, v in setting.items()}
        pairs = [f"{key}={text}" for key, text in texts.items()]
        base = load_config(config, [*overrides, *pairs])
        suffix = ",".join(f"{key.split('.')[-1]}={v}" for key, v in texts.items())
        target = Path(base.out) / base.name
        folder.check_sweep(target)
        base.out, base.name = str(target), re.sub(_UNFIT, "_", suffix)
        check_name(base.name)
        table = _run(base, force, progress).table
        # Of the precision reached when the one asked for is swept.
        table = table.rename(columns={k: f"{k} (metric)" for k in setting})
        for position, (key, value) in enumerate(setting.items()):
            table.insert(position, key, [value] * len(table))
        tables.append(table)
    whole = pd.concat(tables, ignore_index=True)
    folder.write_sweep(target, whole, list(grid))
    return whole
