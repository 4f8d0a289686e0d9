"""Layers that are alike are traced once: a program calls one function for each kind of layer, which XLA puts in line.

Without that Python takes tens of milliseconds for each layer of each program, to trace it and to lower it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


class Alike:
    """Calls the functions of layers, of which those that are alike are traced once."""

    def __init__(self) -> None:
        """Create it for the layers of one program: it keeps what their functions hold."""
        self._functions: dict[Any, Callable[..., Any]] = {}

    def __call__[Result](self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Return the function's result for pytrees of arrays.

        Functions are alike if they are partials of the same one with equal values and the same arrays, and their
        arguments are of the same structure, shapes and types.
        """
        key = _key(function)
        if key not in self._functions:
            self._functions[key] = jax.jit(function)
        return self._functions[key](*arguments)


def _key(value: Any) -> Any:
    """Return what is equal for values that are the same to whoever traces them."""
    if isinstance(value, functools.partial):
        keywords = ((name, _key(each)) for name, each in sorted(value.keywords.items()))
        return _key(value.func), tuple(map(_key, value.args)), tuple(keywords)
    leaves, structure = jax.tree.flatten(value)
    return structure, tuple(id(leaf) if isinstance(leaf, jax.Array | np.ndarray) else leaf for leaf in leaves)
