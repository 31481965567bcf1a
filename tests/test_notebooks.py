"""Every notebook runs from top to bottom and is stored without output."""

from pathlib import Path

import nbclient
import nbformat
import pytest

from jaxhal.models.gguf import GGUFSource, config_from_gguf
from jaxhal.models.tokenizer import Tokenizer
from tiny_lm import write_lm

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


@pytest.fixture(scope="module")
def narrow(smollm2_gguf, tmp_path_factory):
    """A cell that puts a random model of few channels in the place of the real one.

    It has the real one's tokens, and on two layers as many heads: detectors of heads
    that come with the package fit it.
    """
    source = GGUFSource(smollm2_gguf)
    real = config_from_gguf(source)
    layers = 2
    share = real.num_hidden_layers // layers
    folder = write_lm(
        tmp_path_factory.mktemp("narrow") / "model",
        context=real.context_length,
        tokenizer=Tokenizer.from_gguf(source).hf,
        vocab_size=real.vocab_size,
        head_dim=4,
        num_hidden_layers=layers,
        num_attention_heads=share * real.num_attention_heads,
        num_key_value_heads=share * real.num_key_value_heads,
    )
    return nbformat.v4.new_code_cell(SWAP.format(repr(str(folder))))


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
        notebook.cells.insert(0, narrow)
    nbclient.NotebookClient(notebook, timeout=600).execute()
