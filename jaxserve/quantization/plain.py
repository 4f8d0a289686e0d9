"""Matrices of 8-bit codes in the order of the matrix, [outputs, inputs], with separate scales.

`fp8` of DeepSeek, Qwen and MiniMax (scales of blocks, called weight_scale_inv, which nevertheless multiply) and of
GPTQModel (whose weight_scale_inv divide, as its config says),
`fbgemm_fp8`, FP8 and MXFP8 of modelopt, and float-quantized, int-quantized and mxfp8-quantized of compressed-tensors.
"""

import dataclasses
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.quantization.common import regrouped
from jaxserve.quantization.method import Config, Method, block_of, require
from jaxserve.quantization.scheme import ScaleName, Scheme
from jaxserve.quantization.stored import FLOAT_NAMES, UNUSED, Codes, Format, Header

MXFP8 = Scheme(codes="fp8", group_size=32, scale_dtype="bfloat16")
SCALES = ("weight_scale", "weight_scale_inv")
TYPES = ("F8_E4M3", "I8")
SCALE_TYPES: dict[str, ScaleName] = {**FLOAT_NAMES, "F8_E8M0": "bfloat16", "U8": "bfloat16"}
"""Types of scales, and what they are held as: powers of two (e8m0, MXFP8 stores them as bytes) in bfloat16, which has
them all.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plain:
    """8-bit codes with one scale per tensor, output, run of inputs or block."""

    block: tuple[int, int] | None = None
    """Outputs and inputs of a block, if there is one scale per block."""
    is_divisor: bool = False
    """If true, codes are divided by the stored scales, as GPTQModel's are."""

    def parts(self, leaves: Mapping[str, Header]) -> tuple[str, ...] | None:
        """Return the names of codes, scale, zero point and tensors that are not used."""
        if "weight" not in leaves or leaves["weight"].dtype not in TYPES:
            return None
        return tuple(name for name in ("weight", *SCALES, "weight_zero_point", *UNUSED) if name in leaves)

    def shape(self, module: str, headers: Mapping[str, Header]) -> tuple[int, int]:
        """Return the shape of the codes, with the matrices of experts one below the other."""
        shape, found = self._shapes(headers)
        scales = [headers[name] for name in SCALES if name in headers]
        if len(shape) != 2 or len(scales) != 1:
            raise CheckpointError(f"{module}: 8-bit codes need two axes and one of {' and '.join(SCALES)}")
        if "weight_zero_point" in headers:
            raise CheckpointError(f"{module}.weight_zero_point: zero points of 8-bit weights are not supported")
        dtype = scales[0].dtype
        if dtype not in SCALE_TYPES or self._per_group(found, shape) is None:
            raise CheckpointError(f"{module}: scales are {dtype} {list(found)}, which fits no codes of {list(shape)}")
        return shape[0], shape[1]

    def scheme(self, module: str, headers: Mapping[str, Header]) -> Scheme | str:  # noqa: ARG002 (all are alike)
        """Return the scheme of the codes, each output with scales of its own."""
        codes, [scales] = headers["weight"], [headers[name] for name in SCALES if name in headers]
        shape, found = self._shapes(headers)
        per_group = self._per_group(found, shape)
        assert per_group is not None
        num_inputs, size = shape[1], per_group[1]
        scheme = Scheme(
            codes="fp8" if codes.dtype == "F8_E4M3" else "int8",
            group_size=None if size >= num_inputs else size,
            scale_dtype=SCALE_TYPES[scales.dtype],
        )
        return regrouped(scheme, num_inputs)

    def read(self, module: str, tensors: Mapping[str, np.ndarray]) -> Codes:  # noqa: ARG002 (nothing can be wrong)
        """Return the codes, with a row of scales for each output."""
        [scales] = [tensors[name] for name in SCALES if name in tensors]
        if scales.dtype.itemsize == 1:
            scales = scales.view(ml_dtypes.float8_e8m0fnu).astype(ml_dtypes.bfloat16)
        if self.is_divisor:
            scales = np.divide(1, scales)
        codes = tensors["weight"]
        if codes.ndim == 3:
            codes, scales = codes.reshape(-1, codes.shape[-1]), scales.reshape(-1, scales.shape[-1])
        outputs, inputs = codes.shape
        per_group = self._per_group(scales.shape, codes.shape)
        assert per_group is not None
        grid = scales.reshape(-(-outputs // per_group[0]), -(-inputs // per_group[1]))
        rows = np.repeat(grid, per_group[0], axis=0)[:outputs]
        return Codes(values=codes, scales=rows, groups=np.arange(inputs) // per_group[1])

    def _shapes(self, headers: Mapping[str, Header]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of codes and scales; each output of Granite's experts [X, N, K] has a scale, [X, N, 1]."""
        shape, scales = headers["weight"].shape, [headers[name].shape for name in SCALES if name in headers]
        found = scales[0] if scales else ()
        if len(shape) == 3 and found == (*shape[:2], 1):
            return (shape[0] * shape[1], shape[2]), (shape[0] * shape[1], 1)
        return shape, found

    def _per_group(self, scales: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Return how many outputs and inputs have a scale in common, None if scales of such a shape fit no matrix."""
        outputs, inputs = shape
        if scales in ((), (1,), (1, 1)):
            return outputs, inputs
        if scales in ((outputs,), (outputs, 1)):
            return 1, inputs
        if self.block is not None:
            grid = tuple(-(-size // count) for size, count in zip(shape, self.block, strict=True))
            return self.block if scales == grid else None
        if len(scales) == 2 and scales[0] == outputs and scales[1] and inputs % scales[1] == 0:
            return 1, inputs // scales[1]
        return None


def _formats(config: Config, where: str) -> tuple[Format, ...]:
    require(config, where, fmt=(None, "e4m3", "float8_e4m3fn"), activation_scheme=(None, "dynamic", "static"))
    semantics = "weight_scale_semantics"
    require(config, where, expert_dtype=(None, "fp8"), **{semantics: (None, "inverse")})
    block = block_of(config.get("weight_block_size"), where)
    return (Plain(block=block, is_divisor=config.get(semantics) == "inverse"),)


def _scheme(config: Config, module: str) -> Scheme:  # noqa: ARG001 (all are alike)
    block = config.get("weight_block_size")
    return Scheme(codes="fp8", group_size=block[1] if block else None)


FP8 = Method(formats=_formats, scheme=_scheme)
FBGEMM_FP8 = Method(formats=lambda *_: (Plain(),), scheme=lambda *_: Scheme(codes="fp8"))
