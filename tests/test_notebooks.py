"""Every notebook runs from top to bottom and is stored without output."""

from pathlib import Path

import children
import forked
import nbclient
import nbformat
import pytest
import thorough
from jupyter_client import AsyncKernelManager

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


class Forked(AsyncKernelManager):
    """A kernel that need not import all that a notebook does."""

    async def start_kernel(self, **options):
        self.write_connection_file()
        self.process, _ = children.start(forked.kernel, self.connection_file)

    async def _async_is_alive(self):  # by this name a client asks, too
        return self.process.is_alive()

    is_alive = _async_is_alive

    async def shutdown_kernel(self, now=False, restart=False):
        self.process.kill()
        self.process.join()


def test_there_are_notebooks():
    assert len(NOTEBOOKS) >= 7


LONG = "02_heads_and_transfer", "03_probe_sweep", "06_ask_again", "07_watch_an_agent"


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=thorough.mark) if path.stem in LONG else path
        for path in NOTEBOOKS
    ],
    ids=lambda path: path.stem,
)
def test_notebook(path, narrow):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert not any(cell.outputs or cell.execution_count for cell in code), (
        f"strip the outputs of {path.name} before committing it"
    )
    if path.stem != REAL:
        swap = nbformat.v4.new_code_cell(SWAP.format(repr(str(narrow))))
        notebook.cells.insert(0, swap)
    how = {"timeout": 600, "kernel_manager_class": Forked}
    nbclient.NotebookClient(notebook, **how).execute()
