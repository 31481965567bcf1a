"""Performance as ratios, measured side by side in one run; never in timed tests."""

import datetime
import importlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxhal.io.checks import one_of
from jaxhal.io.extras import need
from jaxhal.io.files import replacing
from jaxhal.models.devices import device_name

# Each module has `rows() -> Iterator[dict]`, and that of versions takes the other one;
# its docstring says what it answers.
_BY_DEFAULT = (
    *("read", "extract", "probes", "fit", "relevance", "generate"),
    *("nli", "encoders", "serve", "start", "watchdog"),
)
# The rest takes twenty minutes, needs gigabytes of models, an accelerator or a compiler
# for one, or another version to compare with.
BENCHES = (
    *_BY_DEFAULT,
    *("mixture", "soak", "stored", "compiled", "accelerator", "versions"),
)
# What some need that not everyone installs.
_EXTRAS = {"nli": "sentences", "serve": "serve", "soak": "serve", "start": "serve"}
_EXTRAS["watchdog"] = "watchdog"


def run(
    names: Sequence[str] = (),
    json_path: str | Path | None = None,
    against: str | Path | None = None,
) -> list[dict]:
    """Runs benches, prints a table and writes the rows as JSON.

    By default all but the longest, and those that need an accelerator or its compiler.
    Rows go to ``json_path`` as one array; ``"-"`` is standard output.  ``against`` is a
    checkout of an earlier version, for the bench ``versions``.

    Raises:
      ValueError: on an unknown name, or ``versions`` without ``against`` or
        the reverse.
      FileNotFoundError: where ``against`` is no checkout.
      MissingExtra: where one needs what is not installed.
    """
    for name in names or _BY_DEFAULT:
        one_of(BENCHES, bench=name)
        if name in _EXTRAS:
            need(_EXTRAS[name])
    if ("versions" in names) != (against is not None):
        raise ValueError(
            f"bench versions compares with an earlier checkout: give both, not "
            f"names={list(names)} and against={against}"
        )
    rows, standard = [], str(json_path) == "-"
    for name in names or _BY_DEFAULT:
        module = importlib.import_module(f"jaxhal.bench.{name}")
        for row in module.rows(against) if name == "versions" else module.rows():
            rows.append(row)
            print(_line(row), file=sys.stderr, flush=True)
            if json_path and not standard:  # at each row: a later bench may fail
                with replacing(json_path) as file:
                    file.write(json.dumps(rows, indent=1) + "\n")
    if standard:
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
    return rows


def row(
    bench: str,
    case: str,
    metric: str,
    value: float,
    target: float | None = None,
    better: str = "lower",
    spread: Sequence[float] = (),
) -> dict[str, Any]:
    """One result of today on this device; ``spread`` is the interquartile range."""
    return {
        "bench": bench,
        "case": case,
        "metric": metric,
        "value": round(float(value), 4),
        "target": target,
        "better": better,
        "device": device_name(),
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
        "spread": [round(float(x), 4) for x in spread],
    }


class Timed(NamedTuple):
    """Seconds of functions that took turns, by name, in one case of a bench."""

    bench: str
    case: str
    seconds: dict[str, list[float]]

    def ratio(
        self,
        metric: str,
        over: str,
        under: str,
        target: float | None = None,
        better: str = "lower",
        scale: float = 1.0,
    ) -> dict[str, Any]:
        """The median of the ratios ``over / under`` of all rounds, times ``scale``."""
        rounds = np.divide(self.seconds[over], self.seconds[under]) * scale
        low, middle, high = np.percentile(rounds, [25, 50, 75])
        return row(self.bench, self.case, metric, middle, target, better, (low, high))

    def pace(self, metric: str, name: str, count: int | float) -> dict[str, Any]:
        """How many of ``count`` things a round are done in a second, in the median."""
        high, middle, low = count / np.percentile(self.seconds[name], [25, 50, 75])
        about = self.bench, self.case, metric
        return row(*about, middle, None, "higher", (low, high))


def peer(make: Callable[..., Any], *arguments: Any) -> Any:
    """What to compare with; ``None``, and a line on standard error, without it."""
    try:
        return make(*arguments)
    except ImportError as error:
        print(f"no peers are measured: {error}", file=sys.stderr)
        return None


def interleave(
    bench: str,
    case: str,
    functions: Mapping[str, Callable[[], Any]],
    repeats: int,
    warm_up: bool = True,
) -> Timed:
    """Calls functions in turn ``repeats`` times, after one warm-up of each.

    Taking turns shows every function the same machine, so a round's ratios are fair.
    """
    found = Timed(bench, case, {name: [] for name in functions})
    for function in functions.values() if warm_up else ():
        jax.block_until_ready(function())
    for _ in range(repeats):
        for name, function in functions.items():
            begin = time.perf_counter()
            jax.block_until_ready(function())
            found.seconds[name].append(time.perf_counter() - begin)
    return found


def _line(row: dict[str, Any]) -> str:
    verdict = ""
    if row["target"] is not None:
        lower = row["better"] == "lower"
        met = row["value"] <= row["target"] if lower else row["value"] >= row["target"]
        sign = "<=" if lower else ">="
        verdict = f"  target {sign} {row['target']}: {'met' if met else 'MISSED'}"
    spread = f"  [{row['spread'][0]}, {row['spread'][1]}]" if row["spread"] else ""
    return f"{row['case']:<16} {row['metric']:<52} {row['value']:>9}{spread}{verdict}"
