"""Matrices as checkpoints store them in few bits: codes, scales, zero points, and which inputs a scale is for.

What a format's own package makes of them is computed here in NumPy, with its order of roundings: (code - zero point) is
exact, and its product with the scale is rounded to the scale's type.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Integer, Shaped


class Header(NamedTuple):
    """What the header of a file says about a tensor: its type as safetensors call it, and its shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codes:
    """A matrix [outputs, inputs], read from a checkpoint."""

    values: Shaped[np.ndarray, "N K"]
    """Integers or floats of 8 bits, one for each value."""
    scales: Float[np.ndarray, "N G"]
    zeros: Integer[np.ndarray, "N G"] | None = None
    """Zero points, in the units of `values`; None if all are 0."""
    groups: Integer[np.ndarray, " K"] | None = None
    """Group of each input; None if groups are equal runs of inputs."""

    def dequantize(self) -> Float[np.ndarray, "N K"]:
        """Return the values that the codes stand for, in the type of the scales."""
        num_inputs, num_groups = self.values.shape[1], self.scales.shape[1]
        groups = np.arange(num_inputs) // (num_inputs // num_groups) if self.groups is None else self.groups
        values = self.values
        if self.zeros is not None:
            values = values.astype(np.int16) - self.zeros.astype(np.int16)[:, groups]
        return values.astype(self.scales.dtype) * self.scales[:, groups]


@runtime_checkable
class Format(Protocol):
    """How one kind of checkpoint stores a matrix, as tensors that are named after its module."""

    def parts(self, leaves: Mapping[str, Header]) -> tuple[str, ...] | None:
        """Return those of a module's tensors that its matrix is made of, by the last part of their names.

        None if they are no quantized matrix.
        """
        ...

    def shape(self, module: str, headers: Mapping[str, Header]) -> tuple[int, int]:
        """Return the shape [outputs, inputs] of a matrix. Raises CheckpointError for tensors that do not fit."""
        ...

    def read(self, module: str, tensors: Mapping[str, np.ndarray]) -> Codes:
        """Return the codes. Raises CheckpointError for contents that make no sense."""
        ...


UNUSED = ("input_scale", "activation_scale", "input_zero_point", "activation_scale_ub", "input_scale_ub")
"""Scales of activations, which stay in 16 bits here."""


def unpack(words: Shaped[np.ndarray, "..."], bits: int, *, axis: int) -> Shaped[np.ndarray, "..."]:
    """Return the unsigned integers of so many bits in 32-bit words, the lowest first, along an axis of them."""
    count = 32 // bits
    shifts = np.arange(count, dtype=np.uint32) * np.uint32(bits)
    moved = np.moveaxis(words.view(np.uint32), axis, -1)
    codes = (moved[..., None] >> shifts) & np.uint32(2**bits - 1)
    return np.moveaxis(codes.astype(np.uint8).reshape(*moved.shape[:-1], -1), -1, axis)
