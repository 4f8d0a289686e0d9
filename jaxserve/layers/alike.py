"""Layers that are alike are traced once: a program calls one function for each kind of layer, which XLA inlines.

Without that Python takes tens of milliseconds for each layer of each program, to trace it and to lower it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


class Alike:
    """Call the functions of layers; trace those that are alike once."""

    def __init__(self) -> None:
        """Create an empty cache for one program. It keeps captured arrays alive until it is dropped."""
        self._functions: dict[Any, tuple[Callable[..., Any], list[Any]]] = {}

    def __call__[Result](self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Return the function's result for pytrees of arrays; it must depend on nothing else.

        Functions are alike if they are partials of the same one with equal values and the same arrays, and their
        arguments are of the same structure, shapes and types. Static fields of pytrees are compared by `==`.
        """
        captured: list[Any] = []
        key = _key(function, captured)
        try:
            known = self._functions.get(key)
        except TypeError:  # a value has no hash
            return function(*arguments)
        if known is None:
            known = self._functions[key] = jax.jit(function), captured
        return known[0](*arguments)


def _key(value: Any, captured: list[Any]) -> Any:
    """Return a key; if keys are equal, tracing gives the same program.

    What is in it is appended to `captured`: an id is that of one array only while that lives.
    """
    if isinstance(value, functools.partial):
        keywords = ((name, _key(each, captured)) for name, each in sorted(value.keywords.items()))
        return _key(value.func, captured), tuple(_key(each, captured) for each in value.args), tuple(keywords)
    leaves, structure = jax.tree.flatten(value)
    captured += leaves
    of_leaves = (id(leaf) if isinstance(leaf, jax.Array | np.ndarray) else (type(leaf), leaf) for leaf in leaves)
    return structure, tuple(of_leaves)
