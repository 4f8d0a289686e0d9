"""Matrices as checkpoints store them in few bits: codes, scales, zero points, and which inputs a scale is for.

What a format's own package makes of them is computed here in NumPy, with its order of roundings: (code - zero point) is
exact, and its product with the scale is rounded to the scale's type.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Integer, Shaped

from jaxserve.quantization.scheme import CodeName, Parts, Scheme, pack


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

    def has_runs(self) -> bool:
        """Whether groups are equal runs of inputs, in their order."""
        num_inputs, num_groups = self.values.shape[1], self.scales.shape[1]
        if self.groups is None:
            return True
        runs = np.arange(num_inputs) // max(num_inputs // num_groups, 1)
        return num_inputs % num_groups == 0 and np.array_equal(self.groups, runs)

    def parts(self, scheme: Scheme) -> Parts:
        """Return the arrays that `scheme`, one that the format has given, stores a matrix as."""
        values, zeros = self.values.astype(np.int16, copy=False), self.zeros
        match scheme.codes:
            case "fp8":
                return Parts(self.values, self.scales)
            case "int8":  # zero points are all the same, those of a symmetric code without a sign
                return Parts((values if zeros is None else values - zeros.flat[0]).astype(np.int8), self.scales)
            case "int4":
                signed = values if zeros is None else values - zeros.flat[0]
                return Parts(pack((signed + 8).astype(np.uint8)), self.scales)
        assert scheme.codes == "uint4"
        assert zeros is not None
        offset = 8 if self.values.dtype == np.int8 else 0
        shifted = (zeros.astype(np.int16) + offset).astype(self.scales.dtype)
        return Parts(pack((values + offset).astype(np.uint8)), self.scales, shifted)


SCALE_NAMES: dict[str, Literal["float32", "bfloat16", "float16"]] = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
}
"""Types of scales by their names in safetensors."""


def scheme_of_groups(codes: CodeName, scales: Header, num_inputs: int, *, num_groups: int) -> Scheme | None:
    """Return the scheme of codes whose inputs are in equal groups, or None if there is none."""
    if scales.dtype not in SCALE_NAMES or num_inputs % num_groups:
        return None
    return Scheme(
        codes=codes,
        group_size=None if num_groups == 1 else num_inputs // num_groups,
        scale_dtype=SCALE_NAMES[scales.dtype],
        has_zeros=codes == "uint4",
    )


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

    def scheme(self, headers: Mapping[str, Header]) -> Scheme | None:
        """Return how an engine can hold the codes of a matrix that fits, in groups of equal runs of inputs.

        None if it has to hold the values that they stand for.
        """
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
