import os
import pathlib

import jupytext
import nbformat
import pytest
from depths import quick_first
from nbclient import NotebookClient

import jaxserve

FOLDER = pathlib.Path(jaxserve.__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.py"))


def test_every_notebook_is_a_pair():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NOTEBOOKS
    assert NOTEBOOKS


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_pair_agrees_and_has_no_outputs(name):
    text, notebook = jupytext.read(FOLDER / f"{name}.py"), nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    assert [(cell.cell_type, cell.source) for cell in text.cells] == [
        (cell.cell_type, cell.source) for cell in notebook.cells
    ], f"run: jupytext --sync notebooks/{name}.py"
    assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if "outputs" in cell)


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_runs(name, tmp_path):
    notebook = jupytext.read(FOLDER / f"{name}.py")
    environment = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    client = NotebookClient(notebook, kernel_name="python3", timeout=300, resources={"metadata": {"path": tmp_path}})
    client.execute(env=environment)
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
