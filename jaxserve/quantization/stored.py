"""Matrices as checkpoints store them quantized: codes, scales, zero points, and the scale that applies to each input.

The tensors of each are joined to a StoredMatrix, which a Format reads.

The values are computed here in NumPy as by each format's own package, with its order of roundings: (code - zero point)
is exact, and its product with the scale is rounded to the scale's type.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import msgspec
import numpy as np
from jaxtyping import Float, Float32, Int32, Integer, Shaped

from jaxserve.errors import CheckpointError
from jaxserve.quantization.scheme import CodeName, Parts, Scheme, pack


class Header(NamedTuple):
    """The description of a tensor in a file's header: its type as safetensors call it, and its shape."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray] | None = None
    """Returns the tensor, None if it is not there."""

    @property
    def content(self) -> bytes:
        """The contents of a tensor that describes others."""
        return b"" if self.read is None else self.read().tobytes()


@runtime_checkable
class Stored(Protocol):
    """A matrix [outputs, inputs], read from a checkpoint."""

    def dequantize(self) -> Float[np.ndarray, "N K"]:
        """Return the dequantized values, as the format's own package computes them."""
        ...

    def values_in_float32(self) -> Float32[np.ndarray, "N K"]:
        """Return the dequantized values with no product rounded to a narrower type, as if codes were held."""
        ...

    def parts(self, scheme: Scheme) -> Parts:
        """Return the arrays that `scheme`, one that the format has given, stores a matrix as."""
        ...


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
        """Return the dequantized values, in the type of the scales."""
        num_inputs, num_groups = self.values.shape[1], self.scales.shape[1]
        groups = np.arange(num_inputs) // (num_inputs // num_groups) if self.groups is None else self.groups
        values = self.values
        if self.zeros is not None:
            values = values.astype(np.int16) - self.zeros.astype(np.int16)[:, groups]
        return values.astype(self.scales.dtype) * self.scales[:, groups]

    def values_in_float32(self) -> Float32[np.ndarray, "N K"]:
        """Return the dequantized values, computed in float32."""
        return dataclasses.replace(self, scales=self.scales.astype(np.float32)).dequantize()

    def parts(self, scheme: Scheme) -> Parts:
        """Return the arrays that `scheme`, one that the format has given, stores a matrix as.

        If it has an order, inputs are in that of `order_of`.
        """
        num_inputs = self.values.shape[1]
        scales, values, zeros, groups = self.scales, self.values, self.zeros, self.groups
        if groups is not None and scheme.has_order:
            order = order_of(groups)
            values, groups = values[:, order], groups[order]
        if groups is not None:  # which may be larger than those of the scheme
            first_inputs = np.arange(scheme.num_groups(num_inputs)) * (scheme.group_size or num_inputs)
            scales = scales[:, groups[first_inputs]]
            zeros = None if zeros is None else zeros[:, groups[first_inputs]]
        if scheme.codes == "fp8":
            return Parts(values, scales)
        if scheme.has_zeros:
            to_kind = {"uint4": 0, "int8": -128} if values.dtype == np.uint8 else {"uint4": 8, "int8": 0}
            shift = to_kind[scheme.codes]
        else:  # zero points are all the same, those of a symmetric code without a sign
            shift = 0 if zeros is None else -int(zeros.flat[0])
            shift += 8 if scheme.codes == "int4" else 0
        shifted = values.astype(np.int16) + np.int16(shift)
        codes = pack(shifted.astype(np.uint8)) if scheme.kind.per_byte == 2 else shifted.astype(np.int8)
        if not scheme.has_zeros:
            return Parts(codes, scales)
        assert zeros is not None
        return Parts(codes, scales, (zeros.astype(np.int16) + np.int16(shift)).astype(scales.dtype))


def order_of(groups: Integer[np.ndarray, " K"]) -> Int32[np.ndarray, " K"]:
    """Return the inputs sorted by their groups, in the order that they have within a group."""
    return np.argsort(groups, kind="stable").astype(np.int32)


FLOAT_NAMES: dict[str, Literal["float32", "bfloat16", "float16"]] = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
}
"""Types of floats, as which weights and scales are read, by their names in safetensors."""


def scheme_of_integers(bits: int, *, has_zeros: bool, scales: Header, num_inputs: int, num_groups: int) -> Scheme | str:
    """Return the scheme of integers whose inputs are in equal groups, or why there is none."""
    codes: CodeName = "int8" if bits == 8 else "uint4" if has_zeros else "int4"
    return scheme_of_groups(codes, scales, num_inputs, num_groups=num_groups, has_zeros=has_zeros)


def scheme_of_groups(
    codes: CodeName, scales: Header, num_inputs: int, *, num_groups: int, has_zeros: bool = False
) -> Scheme | str:
    """Return the scheme of codes whose inputs are in equal groups, or why there is none."""
    if scales.dtype not in FLOAT_NAMES:
        return f"scales are {scales.dtype}"
    if num_inputs % num_groups:
        return f"{num_inputs} inputs are not in {num_groups} equal groups"
    return Scheme(
        codes=codes,
        group_size=None if num_groups == 1 else num_inputs // num_groups,
        scale_dtype=FLOAT_NAMES[scales.dtype],
        has_zeros=has_zeros,
    )


@runtime_checkable
class Format(Protocol):
    """How one kind of checkpoint stores a matrix, as tensors that are named after its module."""

    def parts(self, leaves: Mapping[str, Header]) -> tuple[str, ...] | None:
        """Return the tensors of a module that its matrix is composed of, by the last part of their names.

        None if they are not a quantized matrix.
        """
        ...

    def shape(self, module: str, headers: Mapping[str, Header]) -> tuple[int, int]:
        """Return the shape [outputs, inputs] of a matrix. Raises CheckpointError for tensors that do not fit."""
        ...

    def scheme(self, module: str, headers: Mapping[str, Header]) -> Scheme | str:
        """Return the scheme in which an engine can hold the codes of a valid matrix, in groups of equal runs of inputs.

        A text says why it has to hold the dequantized values.
        """
        ...

    def read(self, module: str, tensors: Mapping[str, np.ndarray]) -> Stored:
        """Return the codes. Raises CheckpointError for contents that make no sense."""
        ...


UNUSED = ("input_scale", "activation_scale", "input_zero_point", "activation_scale_ub", "input_scale_ub")
"""Scales of activations, which stay in 16 bits here."""


def unpack(words: Shaped[np.ndarray, "..."], bits: int, *, axis: int) -> Shaped[np.ndarray, "..."]:
    """Return the unsigned `bits`-bit integers in 32-bit words, the lowest first, along an axis of them."""
    count = 32 // bits
    shifts = np.arange(count, dtype=np.uint32) * np.uint32(bits)
    moved = np.moveaxis(words.view(np.uint32), axis, -1)
    codes = (moved[..., None] >> shifts) & np.uint32(2**bits - 1)
    return np.moveaxis(codes.astype(np.uint8).reshape(*moved.shape[:-1], -1), -1, axis)


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
        if len(shape) > 1 and found in ((shape[0], math.prod(shape[1:])), (math.prod(shape[:-1]), shape[-1])):
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
    return {name: tensor.header() for name, tensor in tensors.items()}
