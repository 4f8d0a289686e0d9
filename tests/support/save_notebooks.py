"""Run the notebooks of notebooks/ and save them with their outputs: `make notebooks`, with ONLY= those of a name."""

import os
import pathlib
import sys
import tempfile

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
TIMEOUT = 600
"""Seconds that a start or a cell may take: cells with several models take half a minute on two cores."""

_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def run(name: str, folder: str) -> nbformat.NotebookNode:
    """Return a notebook with the outputs of a run in a folder. Raises CellExecutionError."""
    notebook = jupytext.read(FOLDER / f"{name}.py")
    environment = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=TIMEOUT,
        startup_timeout=TIMEOUT,
        resources={"metadata": {"path": folder}},
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute(env=environment)
    return notebook


def _save(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        notebook = run(name, folder)
    notebook.metadata = nbformat.from_dict(_METADATA)
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", nbformat.from_dict({})
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    nbformat.write(notebook, FOLDER / f"{name}.ipynb")


if __name__ == "__main__":
    only = sys.argv[1] if len(sys.argv) > 1 else ""
    for name in NAMES:
        if name.startswith(only):
            _save(name)
