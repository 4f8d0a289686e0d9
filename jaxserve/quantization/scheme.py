"""Scheme: how one quantized weight is stored, as plain data, and how its codes, scales and zero points encode values.

A value is (code - zero point) * scale - minimum. These belong to a group of consecutive inputs of one output, or to all
inputs of it. Scales and minimums may be stored in two levels, as small numbers times a factor of a larger group. Two
4-bit codes are in a byte along the last axis, the first of them in the lower half.
"""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import ml_dtypes
import msgspec
import numpy as np
from jaxtyping import Float, Shaped

from pallas_kernels.device.code_values import E2M1, FP4, NF4

CodeName = Literal["int8", "fp8", "int4", "uint4", "e2m1", "nf4", "fp4"]
Init = Literal["normal", "constant", "bits", "int8", "int4"]
ScaleName = Literal["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e8m0fnu", "int8"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodeKind:
    """How one kind of codes is stored, and the values of the codes."""

    dtype: np.dtype
    per_byte: int = 1
    first: int = 0
    """Value of code 0, where values are consecutive integers."""
    values: tuple[float, ...] | None = None
    """Value of each 4-bit code, where they are not."""
    largest: float
    """The largest magnitude of a group is scaled to this value when it is rounded to these codes."""
    init: Init = "bits"
    """How random codes are drawn: see LeafSpec."""
    mean: float = 0.0
    """Mean of the values of random codes: taken off by random zero points or minimums, as a mean that is not zero adds
    the same to all outputs, which in a few layers makes all tokens alike."""
    typical: float
    """Standard deviation of the values of random codes."""

    @property
    def is_float(self) -> bool:
        """True if the codes are floats, some of whose bit patterns are not numbers."""
        return self.per_byte == 1 and self.dtype != np.int8


KINDS: dict[str, CodeKind] = {
    "int8": CodeKind(dtype=np.dtype(np.int8), largest=127.5, init="int8", typical=73.6),
    "fp8": CodeKind(dtype=np.dtype(ml_dtypes.float8_e4m3fn), largest=448.0, init="normal", typical=1.0),
    "int4": CodeKind(dtype=np.dtype(np.uint8), per_byte=2, first=-8, largest=7.5, init="int4", typical=4.2),
    "uint4": CodeKind(dtype=np.dtype(np.uint8), per_byte=2, largest=15.0, mean=7.5, typical=4.6),
    "e2m1": CodeKind(dtype=np.dtype(np.uint8), per_byte=2, values=E2M1, largest=max(E2M1), typical=2.9),
    "nf4": CodeKind(dtype=np.dtype(np.uint8), per_byte=2, values=NF4, largest=NF4[-1], typical=0.55),
    "fp4": CodeKind(dtype=np.dtype(np.uint8), per_byte=2, values=FP4, largest=max(FP4), typical=0.47),
}
"""The kinds of codes by name. Half a step beyond the last integer still rounds to it, hence 127.5 and 7.5."""


class Parts(NamedTuple):
    """The arrays that a quantized matrix [*outputs, *inputs] is stored as; None for those that its scheme has not."""

    codes: Any
    """[*outputs, *inputs], the last axis halved if two codes share a byte."""
    scales: Any
    """[*outputs, groups]: of consecutive inputs, all axes of which count as one."""
    zeros: Any = None
    """Shaped as `scales`; subtracted from codes."""
    minimums: Any = None
    """Shaped as `scales`; subtracted from the products of codes and scales."""
    factors: Any = None
    """[*outputs, larger groups], which multiply scales."""
    minimum_factors: Any = None
    """Shaped as `factors`; they multiply minimums."""


class RoundedActivations(msgspec.Struct, frozen=True):
    """Matmuls round activations to codes of the weight's kind, each row with a scale of its own.

    Attributes:
        min_rows: fewest rows that are rounded; fewer are multiplied as they are, since reading the weight takes longer.
        by_xla: whether XLA multiplies, as on a CPU; else the faster of it and our kernels for Hopper GPUs.
    """

    min_rows: int
    by_xla: bool = False


ROUNDED_ON_HOPPER = RoundedActivations(65)
ROUNDED_EARLY_ON_HOPPER = RoundedActivations(33)
"""For FP8 with one scale an output: on an H100, the matmuls and norms of a layer of 4,096 x 14,336 take 115 us with 32
rows rounded and 127 with rows as they are; 115 and 140 with 48 rows.
"""
ROUNDED_ON_CPU = RoundedActivations(8, by_xla=True)
"""On 2 cores with AVX-512, a matrix of 3,072 x 3,072 in int8: 1 row takes 37 ms and 1.7 as floats made in tiles, 8 rows
1.0 and 8, 64 rows 2.1 and 22, 256 rows 10 and 69.
"""


class Scheme(msgspec.Struct, frozen=True, kw_only=True):
    """How one weight is stored.

    Attributes:
        codes: a key of KINDS.
        group_size: number of inputs with a common scale; None means all inputs of an output.
        scale_dtype: dtype of scales, zero points and minimums.
        has_zeros: whether there are zero points.
        has_minimums: whether there are minimums.
        factor_dtype: dtype of the factors of scales and minimums; None if there are none.
        factor_size: number of inputs with a common factor; None means all inputs of an output.
        has_order: whether codes, and so groups, have the inputs in an order of their own (GPTQ's act-order).
        rounds_activations: whether and when matmuls round activations to codes of the same kind; None means never.
    """

    codes: CodeName
    group_size: int | None = None
    scale_dtype: ScaleName = "float32"
    has_zeros: bool = False
    has_minimums: bool = False
    factor_dtype: Literal["float32", "float16"] | None = None
    factor_size: int | None = None
    has_order: bool = False
    rounds_activations: RoundedActivations | None = None

    def __str__(self) -> str:
        groups = "" if self.group_size is None else f" in groups of {self.group_size}"
        return f"{self.codes}{groups}{' with inputs in an order of their own' if self.has_order else ''}"

    @property
    def kind(self) -> CodeKind:
        """The properties of the codes."""
        return KINDS[self.codes]

    @property
    def stored(self) -> "Scheme":
        """The scheme as a checkpoint has it, whatever is done to activations."""
        return msgspec.structs.replace(self, rounds_activations=None)

    def num_groups(self, num_inputs: int) -> int:
        """Return the number of scales of an output with `num_inputs` inputs."""
        return 1 if self.group_size is None else num_inputs // self.group_size

    def num_factors(self, num_inputs: int) -> int:
        """Return the number of factors of an output with `num_inputs` inputs, if there are any."""
        return 1 if self.factor_size is None else num_inputs // self.factor_size

    def fitted(self, shape: tuple[int, ...], num_inputs: int) -> "Scheme | None":
        """Return the scheme for a matrix of this shape with `num_inputs` axes of inputs, or None if there is none.

        If groups do not divide the inputs, they become the largest part of a group that does, if that is worth a scale.
        """
        if shape[-1] % self.kind.per_byte:
            return None
        if self.group_size is None:
            return self
        size = math.gcd(self.group_size, math.prod(shape[len(shape) - num_inputs :]))
        return msgspec.structs.replace(self, group_size=size if size >= min(SMALLEST_GROUP, self.group_size) else None)

    def quantize(self, rows: Float[np.ndarray, "N K"]) -> Parts:
        """Round a matrix to the nearest codes, without zero points; the largest magnitude of a group sets its scale.

        Raises ValueError if it has values that are not finite, or for codes that cannot be rounded to.
        """
        kind = self.kind
        is_more = self.has_zeros or self.has_minimums or self.factor_dtype or self.has_order
        if kind.values is not None or is_more or self.codes == "uint4":
            raise ValueError(f"there is no rounding to {self}")
        num_rows, num_inputs = rows.shape
        groups = rows.astype(np.float32).reshape(num_rows, self.num_groups(num_inputs), -1)
        largest = np.abs(groups).max(axis=-1)
        if not np.isfinite(largest).all():
            raise ValueError("there are values that are not finite")
        scales = (largest / np.float32(kind.largest)).astype(dtype_of(self.scale_dtype))
        scales = np.where(scales == 0, np.ones_like(scales), scales)
        groups /= scales.astype(np.float32)[..., None]
        values = groups.reshape(num_rows, num_inputs)
        if self.codes == "fp8":
            return Parts(np.clip(values, -kind.largest, kind.largest).astype(kind.dtype), scales)
        low, high = (-128, 127) if kind.per_byte == 1 else (-8, 7)
        codes = np.clip(np.rint(values), low, high).astype(np.int8)
        if kind.per_byte == 1:
            return Parts(codes, scales)
        return Parts(pack((codes - kind.first).astype(np.uint8)), scales)


def pack(codes: Shaped[np.ndarray, "... K"]) -> Shaped[np.ndarray, "... half"]:
    """Put two 4-bit codes in a byte, the first of them in the lower half."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


SMALLEST_GROUP = 32
"""Inputs that a scale of their own is worth: a 16-bit scale for 16 of 4 bits would be a quarter of their bytes."""

SCHEMES: dict[str, Scheme] = {
    "int8": Scheme(codes="int8"),
    "fp8": Scheme(codes="fp8"),
    "int4": Scheme(codes="int4", group_size=128, scale_dtype="bfloat16"),
}
"""The schemes that `--quantization` accepts: how a checkpoint of floats is rounded while it is loaded."""


def dtype_of(name: str) -> np.dtype:
    """Return a NumPy dtype by its name, those of 16 and 8 bits that NumPy itself has not too."""
    return np.dtype(getattr(ml_dtypes, name, name))
