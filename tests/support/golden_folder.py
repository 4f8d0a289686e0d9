"""The goldens as checkpoints in a temporary folder: their weights follow from a rule, and are not stored."""

import os
import pathlib
import shutil
import tempfile
import weakref

from golden_weights import WEIGHTS, write_checkpoint

TESTS = pathlib.Path(__file__).parents[1]


class _Checkpoints:
    """A temporary folder, which ends with the process that has made it and not with a fork of it."""

    def __init__(self):
        self.path, pid = pathlib.Path(tempfile.mkdtemp(prefix="goldens-")), os.getpid()
        weakref.finalize(self, lambda path: os.getpid() == pid and shutil.rmtree(path, ignore_errors=True), self.path)
        for weights in sorted(TESTS.glob(f"**/{WEIGHTS}")):
            write_checkpoint(weights.parent, self.path / weights.parent.relative_to(TESTS))


_CHECKPOINTS = _Checkpoints()
GOLDENS = _CHECKPOINTS.path / "goldens"
"""A folder for each golden: config.json, model.safetensors (or several files) and golden.npz."""
CLASSIFIERS = _CHECKPOINTS.path / "engine" / "classifiers"
"""A folder for each classifier: config.json and model.safetensors."""
