"""How the site is built: ``sphinx-build -W -b html notebooks build/site``."""

import os
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective, SphinxRole

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import generate  # noqa: E402
import results  # noqa: E402
from jaxhal.models.families import SHOWN  # noqa: E402

project = "jaxhal"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
]
html_theme = "furo"
html_title = "jaxhal"
html_static_path = ["images"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
exclude_patterns = ["jupyter_execute", ".ipynb_checkpoints"]
# Notebooks are run by tests/test_notebooks.py; here on demand.
nb_execution_mode = "cache" if os.environ.get("JAXHAL_DOCS_EXECUTE") == "1" else "off"
nb_execution_timeout = 600
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
autosummary_generate = False
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_use_ivar = True


class Results(SphinxDirective):
    """A table of chosen methods: ``method``, or ``method = what the paper has``."""

    has_content = True
    required_arguments = 1
    final_argument_whitespace = True
    option_spec = {"columns": str, "beside": str, "table": str, "called": str}

    def run(self) -> list[nodes.Node]:
        names = self.arguments[0].split()
        columns = [c.strip() for c in self.options.get("columns", "AUROC").split(",")]
        beside = [c.strip() for c in self.options.get("beside", "").split(";") if c]
        called = [c.strip() for c in self.options.get("called", "").split(";") if c]
        header = [
            f"{c}, {n}" if len(names) > 1 else c
            for n in (called or names)
            for c in columns
        ]
        title = self.options.get("table", "")
        first = results.first_column(names[0], title) if title else "method"
        lines = [first, *header, *beside]
        table = ["| " + " | ".join(lines) + " |", "|---" * len(lines) + "|"]
        for line in filter(None, self.content):
            method, _, said = (part.strip() for part in line.partition("="))
            found = [results.cell(n, method, c, title) for n in names for c in columns]
            paper = [part.strip() for part in said.split(";")]
            paper += [""] * (len(beside) - len(paper))
            shown = f"`{method}`" if first == "method" else method
            cells = [shown, *found, *paper[: len(beside)]]
            table.append(results.unbroken("| " + " | ".join(cells) + " |"))
        for name in names:
            self.env.note_dependency(str(results.RESULTS / f"{name}.md"))
        holder = nodes.container()
        self.state.nested_parse(StringList(table), self.content_offset, holder)
        return holder.children


class Bench(SphinxDirective):
    """What one bench measured, as a table."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(str(results.RESULTS / "bench.json"))
        holder = nodes.container()
        lines = StringList(results.bench(self.arguments[0]))
        self.state.nested_parse(lines, self.content_offset, holder)
        return holder.children


class Families(SphinxDirective):
    """What the tests showed of each family of models."""

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(str(SHOWN))
        holder = nodes.container(classes=["families"])
        lines = StringList(results.families())
        self.state.nested_parse(lines, self.content_offset, holder)
        return [holder]


class Cell(SphinxRole):
    """A figure of a results file: ``{cell}`halueval / linear_probe / AUROC```."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        return [nodes.Text(results.cell(*self.text.split(" / ")))], []


class Rooms(SphinxDirective):
    """The packages by rank, in the colours of the page."""

    def run(self) -> list[nodes.Node]:
        return [nodes.raw("", generate.rooms(), format="html")]


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("results", Results)
    app.add_directive("bench", Bench)
    app.add_directive("families", Families)
    app.add_directive("rooms", Rooms)
    app.add_role("cell", Cell())
    app.connect("builder-inited", lambda app: generate.pages(HERE / "generated"))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
