"""Figures and tables of what runs found, read from configs/results."""

import collections
import contextlib
import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "configs" / "results"
_NUMBERS = re.compile(r"([\d.]+) \[([\d.]+), ([\d.]+)\]")


class Table(NamedTuple):
    """One table of a results file.

    Attributes:
      title: the heading above it.
      header: names of its columns.
      rows: method, or first cell -> its cells by column.
    """

    title: str
    header: list[str]
    rows: dict[str, dict[str, str]]

    def cell(self, row: str, column: str) -> str:
        """A cell; of columns with an interval, the name alone will do.

        Raises:
          KeyError: on a row or column that is not there, with those that are.
        """
        if row not in self.rows:
            raise KeyError(f"no row {row!r}, only {', '.join(self.rows)}")
        for name, text in self.rows[row].items():
            if column in (name, name.partition(" [")[0]):
                return text
        raise KeyError(f"no column {column!r}, only {', '.join(self.header)}")


def tables(name: str) -> list[Table]:
    """Every table of ``configs/results/{name}.md``, in order."""
    found: list[Table] = []
    title, above = "", ""
    for line in (RESULTS / f"{name}.md").read_text("utf-8").splitlines():
        if line.startswith("#"):
            title = line.lstrip("# ")
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if not above.startswith("|"):
                found.append(Table(title, cells, {}))
            elif not set(line) <= set("|- "):
                row = dict(zip(found[-1].header, cells, strict=True))
                called = row.get("method", cells[0])
                if promised := row.get("promise"):
                    called = f"{row['data']}, {called}: {promised}"
                key = re.sub(r"\*(.+)\* \(control\)", r"\1", called)
                found[-1].rows[key] = row
        above = line
    return found


def judged(name: str) -> tuple[str, int, int]:
    """The model that read, how many texts it read, and how many are hallucinated.

    Raises:
      ValueError: where the file does not say so.
    """
    text = (RESULTS / f"{name}.md").read_text("utf-8")
    model = re.search(r"^(?:Reader|Agent): ([^\s,]+)", text, re.MULTILINE)
    counts = [
        *re.findall(r"^- .+: (\d+) \w+, \d+ sources, (\d+) hallu", text, re.MULTILINE),
        *re.findall(
            r"^Held out: (\d+) questions, (\d+) answered wrongly", text, re.MULTILINE
        ),
    ]
    if model is None or not counts:
        raise ValueError(f"{name}.md does not say what was read by whom")
    count, bad = (sum(map(int, column)) for column in zip(*counts, strict=True))
    return model[1], count, bad


def held_out(name: str, count: int) -> str:
    """How many of so many texts methods were judged on: all, where folds part them.

    Raises:
      ValueError: where test parts differ in size and leave some out.
    """
    text = (RESULTS / f"{name}.md").read_text("utf-8")
    found = re.search(
        r"^Judged in each test part: ([\d, ]+) \w+\.$", text, re.MULTILINE
    )
    parts = [count] if found is None else [*map(int, found[1].split(", "))]
    if sum(parts) == count:
        return f"{count:,}"
    (part,) = {*parts}
    times = f"{len(parts)} x " if len(parts) > 1 else ""
    return f"{times}{part:,} of {count:,}"


def cell(name: str, row: str, column: str = "AUROC", title: str = "") -> str:
    """A cell of the first table, under such a title, that has the row and the column.

    Raises:
      KeyError: where no table has both.
    """
    for table in tables(name):
        if table.title.startswith(title):
            with contextlib.suppress(KeyError):
                return table.cell(row, column)
    raise KeyError(f"{name} has no {column!r} of {row!r}")


def first_column(name: str, title: str = "") -> str:
    """What the rows of the first table under such a title are called by."""
    one = next(table for table in tables(name) if table.title.startswith(title))
    return "method" if "method" in one.header else one.header[0]


# What tests show of a family, in the order of the table.
_SHOWN = "states attention logits greedy relevance mesh GGUF blocks detectors".split()


def families() -> list[str]:
    """What the tests showed of each family."""
    from jaxhal.models.families import shown

    heads = (f"`{name}`" for name in ("model_type", *_SHOWN))
    lines = ["| " + " | ".join(heads) + " |"]
    lines.append("|---" * (len(_SHOWN) + 1) + "|")
    for family, what in shown().items():
        cells = ("✓" if name in what else "" for name in _SHOWN)
        lines.append(f"| `{family}` | " + " | ".join(cells) + " |")
    return lines


def bench(name: str) -> list[str]:
    """What a bench measured, as a table, and on what: ``configs/results/bench.json``.

    Raises:
      KeyError: where that bench is not there.
    """
    whole = json.loads((RESULTS / "bench.json").read_text("utf-8"))
    rows = [row for row in whole if row["bench"] == name]
    if not rows:
        raise KeyError(f"no bench {name!r}, only {sorted({r['bench'] for r in whole})}")
    count = collections.Counter(row["case"] for row in rows)
    # Cases of the same metrics stand side by side, if there are a few.
    alike = [case for case in count if 2 * count[case] > max(count.values()) > 6]
    beside = [row for row in rows if len(alike) > 1 and row["case"] in alike]
    lines = []
    for row in rows:
        if row not in beside:
            target, value = _target(row, _value(row))
            line = f"| {row['case']} | {row['metric']} | {value} | {target} |"
            lines.append(unbroken(line))
    if lines:
        lines = ["| case | | | target |", "|---|---|---|---|", *lines, ""]
    # No more of them than a page is wide.
    tables = math.ceil(len(alike) / 4) if beside else 0
    for at in range(tables):
        some = alike[at * len(alike) // tables : (at + 1) * len(alike) // tables]
        rows_of = [row for row in beside if row["case"] in some]
        lines += [*_side_by_side(rows_of, some), ""]
    on = dict.fromkeys(
        f"{row['device']}, jax {row['jax']}, {row['date']}" for row in rows
    )
    return [*lines, f"Measured on {'; '.join(on)}."]


def _side_by_side(rows: list[dict[str, Any]], cases: list[str]) -> list[str]:
    """A row for each metric, a column for each case."""
    metrics = dict.fromkeys(row["metric"] for row in rows)
    lines = [f"| | {' | '.join(cases)} | target |", "|---" * (len(cases) + 2) + "|"]
    for metric in metrics:
        found = {row["case"]: row for row in rows if row["metric"] == metric}
        cells = {case: _target(row, _value(row)) for case, row in found.items()}
        values = [cells[case][1] if case in cells else "" for case in cases]
        target = next(iter(cells.values()))[0]
        lines.append(f"| {metric} | {' | '.join(values)} | {target} |")
    return lines


def _value(row: dict[str, Any]) -> str:
    low, *_, high = row["spread"] or (row["value"], row["value"])
    spread = f" [{_number(low)}, {_number(high)}]" if low < high else ""
    return _number(row["value"]) + spread


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _target(row: dict[str, Any], value: str) -> tuple[str, str]:
    """A target in words, and the value, marked where it is missed."""
    if row["target"] is None:
        return "", value
    lower = row["better"] == "lower"
    met = row["value"] <= row["target"] if lower else row["value"] >= row["target"]
    words = f"at {'most' if lower else 'least'} {row['target']:g}"
    return words, value if met else f"**{value}, missed**"


def unbroken(text: str) -> str:
    """The same with intervals that stay on one line."""
    return re.sub(
        r"(\d) \[([-+\d.,]+), ([-+\d.,]+)\]", "\\1\u00a0[\\2,\u00a0\\3]", text
    )


def figures(name: str) -> dict[str, Any]:
    """Figures that the tables of a file hold the numbers of, by what they show."""
    from jaxhal import plotting
    from jaxhal.plotting.series import ablations

    found = tables(name)
    if name == "lrp4rag_resampling_sweep":
        frame = _sweep(found[0])
        return {"AUROC and accuracy by length": plotting.sweep_curves(frame, "length")}
    if name == "transfer_qa":
        drawn = {}
        for table in found:
            if table.title.startswith("lookback_probe: AUROC"):
                names = list(table.rows)
                cells = [[float(row[n]) for n in names] for row in table.rows.values()]
                drawn[table.title] = plotting.transfer_map(cells, names, names)
        return drawn
    drawn = {}
    areas, controls = {}, set()
    for key, row in found[0].rows.items():
        if found[0].header[0] == "method":
            areas[key] = _interval(row)
            controls |= {key} if "(control)" in row["method"] else set()
    if areas:
        drawn["AUROC with intervals"] = plotting.auroc_intervals(areas, controls)
    over = {
        table.title.removeprefix("Over "): [
            {"value": float(key)} | {c: float(row[c]) for c in ("AUROC", "accuracy")}
            for key, row in table.rows.items()
        ]
        for table in found
        if table.title.startswith("Over ")
    }
    if over:
        drawn["AUROC and accuracy over settings"] = ablations(over)
    return drawn


def _interval(row: dict[str, str]) -> list[float]:
    found = _NUMBERS.match(row["AUROC [95 %]"])
    assert found, row
    return [float(number) for number in found.groups()]


def _sweep(table: Table) -> Any:
    """The table as a sweep gives it: controls, the same at every length, at each."""
    import pandas as pd

    lengths = [key for key in table.rows if key.isdigit()]
    rows = []
    for key, row in table.rows.items():
        control = not key.isdigit()
        value, low, high = _interval(row)
        entry = {"method": key if control else "lrp4rag_svm", "control": control}
        entry |= {"AUROC": value, "low": low, "high": high, "accuracy": row["accuracy"]}
        rows += [entry | {"length": at} for at in (lengths if control else [key])]
    return pd.DataFrame(rows)
