"""Matrices of 4-bit floats (e2m1) with a power of two for 32 inputs: MXFP4 of OCP Microscaling Formats 1.0.

GPT-OSS has experts so (`loading.mxfp4`), compressed-tensors any matrix (mxfp4-pack-quantized).
"""

import dataclasses
from collections.abc import Mapping

import ml_dtypes
import numpy as np
from jaxtyping import BFloat16, Float32, UInt8

from jaxserve.errors import CheckpointError
from jaxserve.quantization.common import values_of
from jaxserve.quantization.method import Config, Method
from jaxserve.quantization.scheme import Parts, Scheme
from jaxserve.quantization.stored import UNUSED, Header

GROUP = 32
SCHEME = Scheme(codes="e2m1", group_size=GROUP, scale_dtype="float8_e8m0fnu")
_REQUIRED = ("weight_packed", "weight_scale")


@dataclasses.dataclass(frozen=True)
class MXFP4:
    """Two codes in a byte, the first in its lower half, as compressed-tensors names them."""

    def parts(self, leaves: Mapping[str, Header]) -> tuple[str, ...] | None:
        """Return the names of codes, scales and tensors that are not used."""
        if any(name not in leaves or leaves[name].dtype != "U8" for name in _REQUIRED):
            return None
        return tuple(name for name in (*_REQUIRED, *UNUSED, "input_global_scale") if name in leaves)

    def shape(self, module: str, headers: Mapping[str, Header]) -> tuple[int, int]:
        """Return the shape implied by the sizes of the codes."""
        codes, scales = headers["weight_packed"].shape, headers["weight_scale"].shape
        if len(codes) != 2 or codes[1] % (GROUP // 2) or scales != (codes[0], 2 * codes[1] // GROUP):
            raise CheckpointError(f"{module}: codes of {list(codes)} and scales of {list(scales)} do not fit")
        return codes[0], 2 * codes[1]

    def scheme(self, module: str, headers: Mapping[str, Header]) -> Scheme | str:  # noqa: ARG002 (there is one)
        """Return the scheme of the codes as they are."""
        return SCHEME

    def read(self, module: str, tensors: Mapping[str, np.ndarray]) -> "Pairs":  # noqa: ARG002 (nothing can be wrong)
        """Return codes and scales."""
        return Pairs(codes=tensors["weight_packed"], scales=tensors["weight_scale"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs:
    """A matrix of pairs of codes, read from a checkpoint; a scale of s means 2^(s - 127)."""

    codes: UInt8[np.ndarray, "N half"]
    scales: UInt8[np.ndarray, "N G"]

    def dequantize(self) -> BFloat16[np.ndarray, "N K"]:
        """Return the values in bfloat16, which holds them all exactly."""
        return self.values_in_float32().astype(ml_dtypes.bfloat16)

    def values_in_float32(self) -> Float32[np.ndarray, "N K"]:
        """Return the same values in float32."""
        return values_of(SCHEME, self.parts(SCHEME))

    def parts(self, scheme: Scheme) -> Parts:  # noqa: ARG002 (there is one)
        """Return the arrays as they are."""
        return Parts(self.codes, self.scales.view(ml_dtypes.float8_e8m0fnu))


def _scheme(config: Config, module: str) -> Scheme | None:  # noqa: ARG001 (it is always the same)
    return SCHEME if ".experts." in module else None


METHOD = Method(formats=None, scheme=_scheme)
"""GPT-OSS, whose experts are found by the names of their tensors."""
