"""The goldens as checkpoints in a temporary folder: their weights follow from a rule, and are not stored."""

import os
import pathlib
import shutil
import tempfile
import weakref

from golden_weights import WEIGHTS, write_checkpoint
from safetensors.numpy import load_file, save_file

TESTS = pathlib.Path(__file__).parents[1]


class _Checkpoints:
    """A temporary folder, which ends with the process that has made it and not with a fork of it."""

    def __init__(self):
        self.path, pid = pathlib.Path(tempfile.mkdtemp(prefix="goldens-")), os.getpid()
        weakref.finalize(self, lambda path: os.getpid() == pid and shutil.rmtree(path, ignore_errors=True), self.path)
        for weights in sorted(TESTS.glob(f"**/{WEIGHTS}")):
            write_checkpoint(weights.parent, self.path / weights.parent.relative_to(TESTS))


def with_tensors(folder, tensors, name="llama_biases_linear_rope"):
    """Copy a golden of two layers to an empty folder, with more tensors; return the folder."""
    for file in (GOLDENS / name).iterdir():
        shutil.copy(file, folder)
    save_file(load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors")
    return folder


_CHECKPOINTS = _Checkpoints()
GOLDENS = _CHECKPOINTS.path / "goldens"
"""A folder for each golden: config.json, model.safetensors (or several files) and golden.npz."""
CLASSIFIERS = _CHECKPOINTS.path / "engine" / "classifiers"
"""A folder for each classifier: config.json and model.safetensors."""
