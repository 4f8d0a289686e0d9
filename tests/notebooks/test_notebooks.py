"""Notebooks are pairs of files, saved with the outputs of a whole run, and they run: here every second one, the others
in test_other_notebooks.py, which another process can take.
"""

import pathlib

import jupytext
import nbformat
import pytest
from save_notebooks import FOLDER, NAMES, run

MAX_SIZE = 100_000
"""Bytes of a saved notebook: its pictures are drawings, not photographs."""


def test_every_notebook_is_a_pair():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NAMES
    assert NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_pair_agrees_and_has_the_outputs_of_a_whole_run(name):
    path = FOLDER / f"{name}.ipynb"
    text, notebook = jupytext.read(FOLDER / f"{name}.py"), nbformat.read(path, as_version=4)
    assert [(cell.cell_type, cell.source) for cell in text.cells] == [
        (cell.cell_type, cell.source) for cell in notebook.cells
    ], f"run: make notebooks ONLY={name}"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [output for cell in code for output in cell.outputs if output.output_type == "error"]
    assert path.stat().st_size < MAX_SIZE
    assert str(pathlib.Path.home()) not in path.read_text(), "a path of the machine that ran it"
    assert str(FOLDER.parent) not in path.read_text(), "a path of the machine that ran it"


@pytest.mark.parametrize("name", NAMES)
def test_it_installs_what_is_missing_and_opens_in_colab(name):
    first, install = jupytext.read(FOLDER / f"{name}.py").cells[:2]
    assert "colab-badge.svg" in first.source
    assert 'find_spec("jaxserve") is None' in install.source


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NAMES[::2])
def test_it_runs(name, tmp_path):
    assert all(cell.execution_count for cell in run(name, str(tmp_path)).cells if cell.cell_type == "code")
