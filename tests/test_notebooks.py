"""Every notebook runs from top to bottom and is stored without output."""

from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
# The notebook that the real model reads in; in others a narrow one has its name.
REAL = "01_read_once"
# It leaves no name behind: what a notebook uses, it imports.
SWAP = """
def swap(folder):
    from pathlib import Path
    from jaxhal.models import registry

    known = registry.fetch
    narrow = {{"smollm2-135m": Path(folder)}}
    registry.fetch = lambda name: narrow.get(name) or known(name)

swap({})
del swap
"""


def test_there_are_notebooks():
    assert len(NOTEBOOKS) >= 7


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path, narrow, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert not any(cell.outputs or cell.execution_count for cell in code), (
        f"strip the outputs of {path.name} before committing it"
    )
    if path.stem != REAL:
        swap = nbformat.v4.new_code_cell(SWAP.format(repr(str(narrow))))
        notebook.cells.insert(0, swap)
    nbclient.NotebookClient(notebook, timeout=600).execute()
