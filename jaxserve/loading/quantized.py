"""Matrices that a checkpoint stores as several tensors of codes and scales, each read as the matrix it stands for."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.quantization.scheme import Parts, Scheme
from jaxserve.quantization.stored import Codes, Format, Header

ORDERS = ("g_idx", "weight_g_idx")
"""Tensors that say which group each input is in."""


@dataclasses.dataclass(frozen=True)
class QuantizedMatrix:
    """The weight of one module; `tensors` are its parts, by the last part of their names."""

    module: str
    format: Format
    tensors: Mapping[str, Any]

    def complaint(self, shape: tuple[int, ...]) -> str | None:
        """Return why these are no tensors of a matrix of such a shape, or None if they are."""
        try:
            found = self.format.shape(self.module, {name: _header(tensor) for name, tensor in self.tensors.items()})
        except CheckpointError as error:
            return f"cannot be read: {error}"
        if len(shape) > 1 and found == (shape[0], math.prod(shape[1:])):
            return None
        return f"is quantized, of {list(found)}, and not of {list(shape)}"

    def read(self) -> np.ndarray:
        """Return the values in the type of the scales. Raises CheckpointError for codes that make no sense."""
        return self._codes().dequantize()

    def scheme(self) -> Scheme | None:
        """Return how an engine can hold the codes as they are, or None if it has to hold the values.

        The tensors must fit. Of those, only the order of groups is read, if there is one.
        """
        scheme = self.format.scheme({name: _header(tensor) for name, tensor in self.tensors.items()})
        has_order = any(name in self.tensors for name in ORDERS)
        return scheme if scheme is None or not has_order or self._codes().has_runs() else None

    def read_parts(self) -> Parts:
        """Return the arrays that `scheme` stores the matrix as. Raises CheckpointError as `read` does."""
        scheme = self.scheme()
        assert scheme is not None
        return self._codes().parts(scheme)

    def _codes(self) -> Codes:
        return self.format.read(self.module, {name: each.read() for name, each in self.tensors.items()})


def join_parts(tensors: Mapping[str, Any], formats: Iterable[Format]) -> dict[str, Any]:
    """Return the tensors by name, those of each quantized matrix as one QuantizedMatrix, MODULE.weight."""
    by_module: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        by_module.setdefault(module, {})[leaf] = tensor
    joined = dict(tensors)
    for module, leaves in by_module.items():
        headers = {leaf: _header(tensor) for leaf, tensor in leaves.items() if hasattr(tensor, "header")}
        for each in formats:
            if parts := each.parts(headers):
                for leaf in parts:
                    del joined[f"{module}.{leaf}"]
                if f"{module}.weight" in joined:
                    raise CheckpointError(f"{module}.weight is there twice, as floats and as {', '.join(parts)}")
                joined[f"{module}.weight"] = QuantizedMatrix(module, each, {leaf: leaves[leaf] for leaf in parts})
                break
    return joined


def _header(tensor: Any) -> Header:
    header = tensor.header()
    return Header(header.get_dtype(), tuple(header.get_shape()))
