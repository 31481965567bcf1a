"""The README's table, and the pages of the site that are made of code and results."""

import ast
import importlib
import inspect
import runpy
from pathlib import Path
from typing import Any, get_origin

from results import RESULTS, ROOT, figures, held_out, judged, tables, unbroken

README = ROOT / "README.md"
# A page that the sidebar leaves out: with all of them it would be unreadable, and slow.
_ORPHAN = ["---", "orphan: true", "---", ""]
_BEGIN, _END = "<!-- results -->", "<!-- end of results -->"
# Rows of the README: what was judged, and who had written it.
_SHOWN = {
    "ragtruth": ("RAGTruth QA, official test", "Llama-2-7b, 70b"),
    "ragtruth_qwen05b": ("the same", "Llama-2-7b, 70b"),
    "ragtruth_qwen15b": ("the same test", "Llama-2-7b, 70b"),
    "toha_coqa": ("CoQA", "Mistral-7B"),
    "toha_squad": ("SQuAD", "Mistral-7B"),
    "lookback_window": ("8-token windows of RAGTruth QA", "Llama-2-7b"),
    "halueval": ("HaluEval QA", "people, ChatGPT"),
    "selfmade_squad_qwen15b_whitebox": ("SQuAD", "its reader"),
    "selfmade_coqa_qwen15b_whitebox": ("CoQA", "its reader"),
    "selfmade_coqa_detectors": ("the same questions", "its reader"),
    "halmit_treatment": ("MedQuAD, by a watchdog", "its reader"),
}


def readme_table() -> str:
    """Of some results the best method, the best control, and what stands between."""
    lines = [
        "| what | written by | read by | judged | hallucinated | best method "
        "| best control | clearly above it |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, (what, writer) in _SHOWN.items():
        table = next(t for t in tables(name) if "vs best control" in t.header)
        area = {key: table.cell(key, "AUROC") for key in table.rows}
        # In the order of the table: of equals the first is the best.
        controls = [k for k, row in table.rows.items() if "(control)" in row["method"]]
        methods = [key for key in area if key not in controls]
        best, bar = (
            max(names, key=lambda key: float(area[key].split()[0]))
            for names in (methods, controls)
        )
        said = [table.cell(key, "vs best control") for key in methods]
        clear = sum(text.endswith("yes") for text in said)
        reader, count, bad = judged(name)
        lines.append(
            f"| [{what}](configs/results/{name}.md) | {writer} | {reader} "
            f"| {held_out(name, count)} | {bad / count:.0%} | `{best}` {area[best]} "
            f"| `{bar}` {area[bar]} | {clear} of {len(said)} |"
        )
    return "\n".join(lines)


def readme(text: str) -> str:
    """The README with its table of results as it has to be."""
    head, begin, rest = text.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    return f"{head}{begin}\n{readme_table()}\n{end}{tail}"


def pages(folder: Path) -> None:
    """Writes the generated pages of the site, and removes those of what is gone."""
    results = sorted(RESULTS.glob("*.md"))
    made = {f"detectors/{name}.md": _detector(name) for name in detector_names()}
    made |= {f"{kind}.txt": text for kind, text in _detectors().items()}
    made |= {f"api/{package}.md": _package(package) for package in api_packages()}
    made |= {f"results/{p.name}": _result(p, folder / "results") for p in results}
    links = [f"- [{path.stem}]({path.name})" for path in results]
    made["results/index.md"] = "\n".join(["# Whole tables", "", *links])
    tree = ["# API", "", "```{toctree}", *api_packages(), "```", ""]
    made["api/index.md"] = "\n".join(tree)
    made["datasets.txt"] = _datasets()
    for name, text in made.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # An unchanged page keeps its time, so Sphinx does not read it again.
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
    for path in folder.rglob("*.md"):
        if path.relative_to(folder).as_posix() not in made:
            path.unlink()


def _datasets() -> str:
    from jaxhal.datasets import DATASETS

    lines = ["| name | what | licence | from |", "|---|---|---|---|"]
    for name, one in DATASETS.items():
        lines.append(f"| `{name}` | {one.summary} | {one.licence} | {one.reference} |")
    return "\n".join([*lines, ""])


def detector_names() -> list[str]:
    """Names of the catalogue, and the ensemble, which needs members to be made."""
    from jaxhal.detectors import CATALOGUE

    return [*CATALOGUE, "ensemble"]


def _made(name: str) -> Any:
    from jaxhal import detectors

    if name == "ensemble":
        return detectors.ensemble(detectors.get(["linear_probe", "novel_words"]))
    return detectors.CATALOGUE[name]()


def _kind(detector: Any) -> str:
    from jaxhal.detectors import AT_ONCE

    if detector.fit is not None:
        return "fitted"
    return "at_once" if detector.name in AT_ONCE else "when_asked"


def _ships(name: str) -> bool:
    return (ROOT / "jaxhal/scoring/shipped/smollm2-135m" / name).exists()


def _detectors() -> dict[str, str]:
    """A table of every kind of detector; of those that are fitted, which ship so."""
    head = ["| name | score | from |", "|---|---|---|"]
    lines = {kind: [*head] for kind in ("at_once", "when_asked", "fitted")}
    for name in detector_names():
        detector = _made(name)
        kind, info = _kind(detector), detector
        tick = " ✓" if kind == "fitted" and _ships(name) else ""
        said = f"{info.summary}; *a control*" if info.control else info.summary
        link = f"[`{name}`](generated/detectors/{name}.md){tick}"
        lines[kind].append(f"| {link} | {said} | {info.reference} |")
    return {kind: "\n".join([*rows, ""]) for kind, rows in lines.items()}


def _detector(name: str) -> str:
    detector = _made(name)
    info = detector
    kind = {
        "at_once": "scores at once, and by default",
        "when_asked": "not trained; computed when asked for",
        "fitted": "fitted to labelled answers"
        + "; ships with the package for `smollm2-135m`" * _ships(name),
    }[_kind(detector)]
    lines = [
        *_ORPHAN,
        f"# {name}",
        "",
        f"{info.summary[0].upper()}{info.summary[1:]}.",
        "",
        f"| score | {info.unit}; higher is more likely hallucinated |",
        "|---|---|",
        f"| from | {info.reference} |",
        f"| kind | {kind}{'; a control' * info.control} |",
        f"| tokens | {'have scores' if detector.tokens else 'have no scores'} |",
        "",
        "## What it looks at",
        "",
        "| feature | computed by | axes of one answer |",
        "|---|---|---|",
    ]
    for label, feature in (*detector.features, *detector.taught):
        when = "" if label in dict(detector.features) else ", while it is fitted"
        # Names of measures go on with their settings, which the options have.
        label = label.partition("(")[0]
        how = f"{_computed(feature)}{when}"
        lines.append(f"| `{label}` | {how} | {_axes(feature.axes)} |")
    return "\n".join(
        [
            *lines,
            "",
            "## Options",
            "",
            "```{eval-rst}",
            f".. autofunction:: jaxhal.detectors.{name}",
            "```",
            "",
        ]
    )


def _computed(feature: Any) -> str:
    from jaxhal import OfRewrite

    if isinstance(feature, OfRewrite):
        return (
            f"of another text that is made of the answer, {_computed(feature.reducer)}"
        )
    doc = (inspect.getdoc(type(feature)) or "").partition("\n\n")[0].replace("\n", " ")
    return f"`{type(feature).__name__}`: {doc}".replace("|", "\\|")


def _axes(axes: Any) -> str:
    if isinstance(axes, dict):
        return "; ".join(f"`{key}` {_axes(value)}" for key, value in axes.items())
    return ", ".join(f"`{axis}`" for axis in axes) or "one number"


def api_packages() -> list[str]:
    """``jaxhal`` and every package of it that lists names of its own."""
    folders = sorted(path.parent for path in (ROOT / "jaxhal").rglob("__init__.py"))
    names = [".".join(folder.relative_to(ROOT).parts) for folder in folders]
    return [name for name in names if _public(name)]


def _public(package: str) -> dict[str, Any]:
    """What an ``__init__`` lists: names it gives on, and those it defines itself."""
    module = importlib.import_module(package)
    if package == "jaxhal":
        names = [n for n in module.__all__ if not inspect.ismodule(getattr(module, n))]
        return {name: getattr(module, name) for name in names}
    names = []
    for node in ast.parse(Path(module.__file__).read_text("utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            names += [a.name for a in node.names if a.asname == a.name]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [one.id for one in targets if isinstance(one, ast.Name)]
    listed = {n: getattr(module, n) for n in names if not n.startswith("_")}
    return {n: one for n, one in listed.items() if not inspect.ismodule(one)}


def _package(package: str) -> str:
    """One page: a summary, then everything that has no page elsewhere."""
    listed = _public(package)
    parts = package.split(".")
    above = [".".join(parts[:count]) for count in range(1, len(parts))]
    top = {name: (home, x) for home in above[::-1] for name, x in _public(home).items()}
    own = detector_names() if package == "jaxhal.detectors" else []
    here = {
        name: x
        for name, x in listed.items()
        if name not in own and (name not in top or top[name][1] is not x)
    }
    lines = [f"# {package}", "", "```{eval-rst}"]
    lines += [f".. automodule:: {package}", "   :no-members:", ""]
    if own:
        lines += [":doc:`Every detector </detectors>` has a page.", ""]
    elif elsewhere := [name for name in listed if name not in here]:
        links = ", ".join(f":py:obj:`{top[name][0]}.{name}`" for name in elsewhere)
        lines += [f"It also lists {links}.", ""]
    routines = [n for n, x in here.items() if callable(x) and not get_origin(x)]
    lines += [".. autosummary::", "", *(f"   {name}" for name in routines)]
    for name, one in here.items():
        if inspect.isclass(one):
            lines += ["", f".. autoclass:: {name}", "   :members:"]
        elif name in routines:
            lines += ["", f".. autofunction:: {name}"]
        else:
            held = ", ".join(f"``{x}``" for x in one) if isinstance(one, dict) else ""
            lines += ["", f".. py:data:: {name}", "", f"   {held or f'``{one!r}``'}"]
    return "\n".join([*lines, "```", ""])


def _result(path: Path, folder: Path) -> str:
    """A results file, with the figures that its own tables give."""
    lines = [*_ORPHAN, path.read_text("utf-8").rstrip(), ""]
    for number, (what, figure) in enumerate(figures(path.stem).items()):
        picture = f"{path.stem}_{number}.svg"
        _drawn(figure, folder / picture)
        lines += [f"![{what}]({picture})", ""]
    return unbroken("\n".join(lines))


def _drawn(figure: Any, path: Path) -> None:
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


def rooms() -> str:
    """The packages by rank as a drawing, from the test that walks the imports."""
    ranks = runpy.run_path(str(ROOT / "tests" / "test_imports.py"))["RANK"]
    levels: dict[int, list[str]] = {}
    for name, rank in ranks.items():
        levels.setdefault(rank, []).append(name)
    width, step, box = 640, 44, 150
    height = step * len(levels) + 8
    parts = [
        f'<svg class="rooms" viewBox="0 0 {width} {height}" role="img" '
        'aria-label="Packages of jaxhal, top to bottom; each imports those below">'
    ]
    for row, rank in enumerate(sorted(levels, reverse=True)):
        names = levels[rank]
        left = (width - len(names) * (box + 10) + 10) / 2
        for column, name in enumerate(names):
            x, y = left + column * (box + 10), 6 + row * step
            parts.append(f'<rect x="{x}" y="{y}" width="{box}" height="30" rx="6"/>')
            parts.append(f'<text x="{x + box / 2}" y="{y + 20}">{name}</text>')
        if row + 1 < len(levels):
            at = 6 + row * step + 32
            parts.append(f'<path d="M{width / 2} {at} v9 m-4 -4 l4 4 l4 -4"/>')
    return "".join([*parts, "</svg>"])


if __name__ == "__main__":
    README.write_text(readme(README.read_text("utf-8")), "utf-8")
