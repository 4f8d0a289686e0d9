"""The option that all operations have: which implementation runs them."""

import importlib
import inspect
import pathlib

import pytest

import pallas_kernels

MODULES = [
    importlib.import_module(f"pallas_kernels.{path.parent.name}.op")
    for path in sorted(pathlib.Path(pallas_kernels.__file__).parent.glob("*/op.py"))
]
OPERATIONS = [
    (module, name)
    for module in MODULES
    for name, function in inspect.getmembers(module, inspect.isfunction)
    if function.__module__ == module.__name__ and "implementation" in inspect.signature(function).parameters
]


@pytest.mark.parametrize(("module", "name"), OPERATIONS, ids=str)
def test_an_unknown_one_is_refused(monkeypatch, module, name):
    for each, function in inspect.getmembers(module, inspect.isfunction):
        monkeypatch.setattr(module, each, inspect.unwrap(function))  # the annotations would refuse the arguments first
    operation = getattr(module, name)
    arguments = dict.fromkeys(inspect.signature(operation).parameters) | {"implementation": "triton"}
    with pytest.raises(ValueError, match="unknown implementation 'triton', there is 'xla', 'sm90'"):
        operation(**arguments)
