"""Matrices that a checkpoint stores as several tensors of codes and scales, each read as the matrix that they
encode.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
from jaxtyping import Int32, Integer

from jaxserve.errors import CheckpointError
from jaxserve.quantization.bitsandbytes import STATE
from jaxserve.quantization.scheme import Parts, Scheme
from jaxserve.quantization.stored import Format, Header, Stored, order_of

DESCRIPTIONS = ("weight_shape", STATE)
"""Prefixes of the names of tensors that are read before others, because they describe them."""
ORDERS = ("g_idx", "weight_g_idx")
"""Tensors that say which group each input is in."""


@dataclasses.dataclass(frozen=True)
class StoredMatrix:
    """The weight of one module; `tensors` are its parts, by the last part of their names."""

    module: str
    format: Format
    tensors: Mapping[str, Any]

    def complaint(self, shape: tuple[int, ...]) -> str | None:
        """Return why these are not tensors of a matrix of such a shape, or None if they are."""
        try:
            found = self.format.shape(self.module, _headers(self.tensors))
        except CheckpointError as error:
            return f"cannot be read: {error}"
        if len(shape) > 1 and found == (shape[0], math.prod(shape[1:])):
            return None
        return f"is quantized, of {list(found)}, and not of {list(shape)}"

    def read(self) -> np.ndarray:
        """Return the values in the type of the scales. Raises CheckpointError for codes that make no sense."""
        return self._codes().dequantize()

    def read_in_float32(self) -> np.ndarray:
        """Return the values with no product rounded to the scales' type. Raises CheckpointError as `read` does."""
        return self._codes().values_in_float32()

    def scheme(self) -> Scheme | str:
        """Return how an engine can hold the codes as they are, or why it has to hold the values.

        The tensors must fit. Of those, only the order of groups is read, if there is one.
        """
        scheme, groups = self.format.scheme(self.module, _headers(self.tensors)), self._groups()
        if isinstance(scheme, str) or groups is None:
            return scheme
        runs = np.arange(len(groups)) // (scheme.group_size or len(groups))
        if np.array_equal(groups, runs):
            return scheme
        if not np.array_equal(np.sort(groups), runs):
            return "its groups are not of equal sizes"
        return msgspec.structs.replace(scheme, has_order=True)

    def order(self) -> Int32[np.ndarray, " K"] | None:
        """Return the inputs in the order in which `read_parts` has them if its scheme says that they have one."""
        groups = self._groups()
        return None if groups is None else order_of(groups)

    def _groups(self) -> Integer[np.ndarray, " K"] | None:
        """Return the group of each input, None if the checkpoint has them in order without saying so."""
        found = [tensor.read() for name, tensor in self.tensors.items() if name in ORDERS]
        return found[0] if found and (found[0] >= 0).any() else None

    def read_parts(self) -> Parts:
        """Return the arrays that `scheme` stores the matrix as. Raises CheckpointError as `read` does."""
        scheme = self.scheme()
        assert isinstance(scheme, Scheme)
        return self._codes().parts(scheme)

    def _codes(self) -> Stored:
        return self.format.read(self.module, {name: each.read() for name, each in self.tensors.items()})


def join_parts(tensors: Mapping[str, Any], formats: Iterable[Format]) -> dict[str, Any]:
    """Return the tensors by name, those of each quantized matrix as one StoredMatrix, MODULE.weight."""
    by_module: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        module, leaf = _module_and_leaf(name)
        by_module.setdefault(module, {})[leaf] = tensor
    joined = dict(tensors)
    for module, leaves in by_module.items():
        headers = _headers({leaf: tensor for leaf, tensor in leaves.items() if hasattr(tensor, "header")})
        fitting = {each: parts for each in formats if (parts := each.parts(headers))}
        if not fitting:
            continue
        fits = (each for each, parts in fitting.items() if _fits(each, module, {name: headers[name] for name in parts}))
        chosen = next(fits, next(iter(fitting)))
        parts = fitting[chosen]
        for leaf in parts:
            del joined[f"{module}.{leaf}"]
        if f"{module}.weight" in joined:
            raise CheckpointError(f"{module}.weight is there twice, as floats and as {', '.join(parts)}")
        joined[f"{module}.weight"] = StoredMatrix(module, chosen, {leaf: leaves[leaf] for leaf in parts})
    return joined


def _fits(stored: Format, module: str, headers: Mapping[str, Header]) -> bool:
    """Return whether tensors are such a matrix: a checkpoint may have several formats, such as of 4 and of 8 bits."""
    try:
        stored.shape(module, headers)
    except CheckpointError:
        return False
    return True


def _module_and_leaf(name: str) -> tuple[str, str]:
    """Split the name of a tensor. What describes a tensor, such as X.weight.absmax, is a leaf of its module, X."""
    module, separator, leaf = name.partition(".weight.")
    if separator:
        return module, f"weight.{leaf}"
    module, _, leaf = name.rpartition(".")
    return module, leaf


def _headers(tensors: Mapping[str, Any]) -> dict[str, Header]:
    """Return the headers of a module's tensors, with the contents of those that describe others."""
    return {name: _header(tensor, is_read=name.startswith(DESCRIPTIONS)) for name, tensor in tensors.items()}


def _header(tensor: Any, *, is_read: bool) -> Header:
    header = tensor.header()
    return Header(header.get_dtype(), tuple(header.get_shape()), tensor.read().tobytes() if is_read else None)
