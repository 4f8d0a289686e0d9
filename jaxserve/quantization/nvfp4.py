"""Matrices of 4-bit floats (e2m1) as NVFP4 has them: an FP8 scale for 16 inputs, and one more for the whole matrix.

compressed-tensors divides by the latter, weight_global_scale; modelopt multiplies by weight_scale_2.
"""

import dataclasses
from collections.abc import Mapping

import ml_dtypes
import numpy as np
from jaxtyping import Float, Float32, UInt8

from jaxserve.errors import CheckpointError
from jaxserve.quantization.common import unpack_pairs
from jaxserve.quantization.scheme import Parts, Scheme
from jaxserve.quantization.stored import UNUSED, Header

GROUP = 16
SCHEME = Scheme(codes="e2m1", group_size=GROUP, scale_dtype="float8_e4m3fn", factor_dtype="float32")
"""Scales are held in two levels, as they are stored."""
_UNUSED = (*UNUSED, "input_global_scale")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NVFP4:
    """Two codes in a byte, the first in its lower half, under the names of one of the two packages."""

    codes: str
    """Leaf of the codes."""
    matrix_scale: str
    """Leaf of the scale of the whole matrix."""
    is_divisor: bool
    """If true, the scale of the matrix divides the scales of groups instead of multiplying them."""

    def parts(self, leaves: Mapping[str, Header]) -> tuple[str, ...] | None:
        """Return the names of codes, scales and tensors that are not used."""
        scales = leaves.get("weight_scale", Header("F8_E4M3", ()))
        if self.codes not in leaves or (leaves[self.codes].dtype, scales.dtype) != ("U8", "F8_E4M3"):
            return None
        return tuple(name for name in (self.codes, "weight_scale", self.matrix_scale, *_UNUSED) if name in leaves)

    def shape(self, module: str, headers: Mapping[str, Header]) -> tuple[int, int]:
        """Return the shape implied by the sizes of the codes."""
        if missing := [name for name in ("weight_scale", self.matrix_scale) if name not in headers]:
            raise CheckpointError(f"{module}: tensors missing beside {self.codes}: {', '.join(missing)}")
        codes, scales, scale = headers[self.codes].shape, headers["weight_scale"], headers[self.matrix_scale]
        fits = len(codes) == 2 and scales[:2] == ("F8_E4M3", (codes[0], 2 * codes[1] // GROUP)) and codes[1] % 8 == 0
        if not fits or scale.dtype != "F32" or scale.shape not in ((), (1,)):
            raise CheckpointError(
                f"{module}: codes of {list(codes)}, scales {scales.dtype} {list(scales.shape)} and a scale of "
                f"the matrix {scale.dtype} {list(scale.shape)} do not fit"
            )
        return codes[0], 2 * codes[1]

    def scheme(self, module: str, headers: Mapping[str, Header]) -> Scheme | str:  # noqa: ARG002 (there is one)
        """Return the scheme of codes whose scales are stored in two levels, as here."""
        return SCHEME

    def read(self, module: str, tensors: Mapping[str, np.ndarray]) -> "FloatPairs":
        """Return codes and the scales of both levels."""
        scale = tensors[self.matrix_scale].reshape(1)
        if not (np.isfinite(scale).all() and (scale > 0).all()):
            raise CheckpointError(f"{module}.{self.matrix_scale} must be positive, got {scale[0]}")
        return FloatPairs(
            codes=tensors[self.codes], scales=tensors["weight_scale"], matrix_scale=scale, is_divisor=self.is_divisor
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FloatPairs:
    """A matrix of pairs of codes, read from a checkpoint."""

    codes: UInt8[np.ndarray, "N half"]
    scales: Float[np.ndarray, "N G"]
    matrix_scale: Float32[np.ndarray, "1"]
    is_divisor: bool

    def dequantize(self) -> Float32[np.ndarray, "N K"]:
        """Return the dequantized values."""
        scales = self.scales.astype(np.float32)
        scales = scales / self.matrix_scale if self.is_divisor else scales * self.matrix_scale
        values = unpack_pairs(self.codes).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        return values * np.repeat(scales, GROUP, axis=1)

    values_in_float32 = dequantize

    def parts(self, scheme: Scheme) -> Parts:  # noqa: ARG002 (there is one)
        """Return the arrays as they are, with a factor for each output."""
        factor = np.float32(1) / self.matrix_scale if self.is_divisor else self.matrix_scale
        return Parts(self.codes, self.scales, factors=np.repeat(factor[None], len(self.codes), axis=0))


COMPRESSED_TENSORS = NVFP4(codes="weight_packed", matrix_scale="weight_global_scale", is_divisor=True)
MODELOPT = NVFP4(codes="weight", matrix_scale="weight_scale_2", is_divisor=False)
