"""Matrices of 4-bit floats (e2m1) as NVFP4 has them: an FP8 scale for 16 inputs, and one more for the whole matrix.

compressed-tensors divides by the latter, weight_global_scale; modelopt multiplies by weight_scale_2.
"""

import dataclasses
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.quantization.stored import UNUSED, Codes, Header

GROUP = 16
_UNUSED = (*UNUSED, "input_global_scale")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NVFP4:
    """Two codes in a byte, the first in its lower half, under the names of one of the two packages."""

    codes: str
    """Leaf of the codes."""
    matrix_scale: str
    """Leaf of the scale of the whole matrix."""
    is_divisor: bool
    """Whether that divides the scales of groups, and does not multiply them."""

    def parts(self, leaves: Mapping[str, Header]) -> tuple[str, ...] | None:
        """Return the names of codes, scales and what is not used."""
        if self.codes not in leaves or leaves[self.codes].dtype != "U8":
            return None
        return tuple(name for name in (self.codes, "weight_scale", self.matrix_scale, *_UNUSED) if name in leaves)

    def shape(self, module: str, headers: Mapping[str, Header]) -> tuple[int, int]:
        """Return the shape that the codes have room for."""
        if missing := [name for name in ("weight_scale", self.matrix_scale) if name not in headers]:
            raise CheckpointError(f"{module}: tensors missing beside {self.codes}: {', '.join(missing)}")
        codes, scales, scale = headers[self.codes].shape, headers["weight_scale"], headers[self.matrix_scale]
        fits = len(codes) == 2 and scales == ("F8_E4M3", (codes[0], 2 * codes[1] // GROUP)) and codes[1] % 8 == 0
        if not fits or scale.dtype != "F32" or scale.shape not in ((), (1,)):
            raise CheckpointError(
                f"{module}: codes of {list(codes)}, scales {scales.dtype} {list(scales.shape)} and a scale of "
                f"the matrix {scale.dtype} {list(scale.shape)} do not fit"
            )
        return codes[0], 2 * codes[1]

    def scheme(self, headers: Mapping[str, Header]) -> None:  # noqa: ARG002
        """Return None: two scales a group have no scheme yet."""
        return

    def read(self, module: str, tensors: Mapping[str, np.ndarray]) -> Codes:
        """Return the values of codes, and float32 scales of groups."""
        scale = tensors[self.matrix_scale].reshape(1)
        if not (np.isfinite(scale).all() and (scale > 0).all()):
            raise CheckpointError(f"{module}.{self.matrix_scale} must be positive, got {scale[0]}")
        scales = tensors["weight_scale"].astype(np.float32)
        pairs = tensors[self.codes]
        codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(pairs), -1)
        return Codes(
            values=codes.view(ml_dtypes.float4_e2m1fn), scales=scales / scale if self.is_divisor else scales * scale
        )


COMPRESSED_TENSORS = NVFP4(codes="weight_packed", matrix_scale="weight_global_scale", is_divisor=True)
MODELOPT = NVFP4(codes="weight", matrix_scale="weight_scale_2", is_divisor=False)
