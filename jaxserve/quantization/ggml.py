"""Convert blocks of ggml's quantized types to codes, scales, minimums and factors, without any loss.

5- and 6-bit codes become 8-bit codes, 2- and 3-bit codes 4-bit; scales of K-quants stay integers times the factor of
their 256 values.
"""

from collections.abc import Callable

import ml_dtypes
import numpy as np
from jaxtyping import UInt8

from jaxserve.quantization.common import repack_halves
from jaxserve.quantization.scheme import Parts, Scheme, pack

Blocks = UInt8[np.ndarray, "blocks bytes"]

_K = {"scale_dtype": "int8", "factor_dtype": "float16", "factor_size": 256}
SCHEMES: dict[str, Scheme] = {
    "Q8_0": Scheme(codes="int8", group_size=32, scale_dtype="float16"),
    "Q4_0": Scheme(codes="int4", group_size=32, scale_dtype="float16"),
    "Q4_1": Scheme(codes="uint4", group_size=32, scale_dtype="float16", has_minimums=True),
    "Q5_0": Scheme(codes="int8", group_size=32, scale_dtype="float16"),
    "Q5_1": Scheme(codes="int8", group_size=32, scale_dtype="float16", has_minimums=True),
    "Q2_K": Scheme(codes="uint4", group_size=16, has_minimums=True, **_K),
    "Q3_K": Scheme(codes="int4", group_size=16, **_K),
    "Q4_K": Scheme(codes="uint4", group_size=32, has_minimums=True, **_K),
    "Q5_K": Scheme(codes="int8", group_size=32, has_minimums=True, **_K),
    "Q6_K": Scheme(codes="int8", group_size=16, **_K),
    "MXFP4": Scheme(codes="e2m1", group_size=32, scale_dtype="float8_e8m0fnu"),
}
"""How an engine holds each type."""


def split(kind: str, blocks: Blocks) -> Parts:
    """Return the arrays in which whole blocks of a key of SCHEMES are held, each with one row per block.

    Raises ValueError for a scale that is not a number.
    """
    return _SPLITTERS[kind](blocks)


def _halves(blocks: Blocks) -> np.ndarray:
    """Return scales or minimums of two bytes each."""
    return np.ascontiguousarray(blocks).view(np.float16)


def _nibbles_of_halves(blocks: Blocks) -> np.ndarray:
    """Return codes, those of the bytes' lower halves first."""
    return np.concatenate([blocks & 15, blocks >> 4], axis=1)


def _q8_0(blocks: Blocks) -> Parts:
    return Parts(blocks[:, 2:].view(np.int8), _halves(blocks[:, :2]))


def _q4_0(blocks: Blocks) -> Parts:
    return Parts(repack_halves(blocks[:, 2:]), _halves(blocks[:, :2]))


def _q4_1(blocks: Blocks) -> Parts:
    return Parts(repack_halves(blocks[:, 4:]), _halves(blocks[:, :2]), minimums=-_halves(blocks[:, 2:4]))


def _five_bits(high: UInt8[np.ndarray, "blocks 4"], low: UInt8[np.ndarray, "blocks 16"]) -> np.ndarray:
    """Return codes of 32 values: their highest bits, in order, and bytes of the others."""
    return _nibbles_of_halves(low) | (np.unpackbits(high, axis=1, bitorder="little") << 4)


def _q5_0(blocks: Blocks) -> Parts:
    codes = _five_bits(blocks[:, 2:6], blocks[:, 6:]).view(np.int8) - np.int8(16)
    return Parts(codes, _halves(blocks[:, :2]))


def _q5_1(blocks: Blocks) -> Parts:
    codes = _five_bits(blocks[:, 4:8], blocks[:, 8:]).view(np.int8)
    return Parts(codes, _halves(blocks[:, :2]), minimums=-_halves(blocks[:, 2:4]))


def _mxfp4(blocks: Blocks) -> Parts:
    scales = np.ascontiguousarray(blocks[:, :1])
    if (scales == 255).any():
        raise ValueError("a scale of MXFP4 is 255, which is no number")
    return Parts(repack_halves(blocks[:, 1:]), scales.view(ml_dtypes.float8_e8m0fnu))


def _planes(packed: Blocks, bits: int, run: int) -> np.ndarray:
    """Return the `bits`-bit codes of 256 values: of each `run` of bytes first the lowest bits, then the next ones."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return ((packed.reshape(len(packed), -1, 1, run) >> shifts) & np.uint8(2**bits - 1)).reshape(len(packed), -1)


def _six_bit_scales(packed: Blocks) -> tuple[np.ndarray, np.ndarray]:
    """Return scales and minimums [blocks, 8] of Q4_K and Q5_K; the last four of each are stored in two pieces."""
    scales, minimums, rest = np.split(packed, 3, axis=1)
    last_scales = (rest & 15) | ((scales >> 2) & 0x30)
    last_minimums = (rest >> 4) | ((minimums >> 2) & 0x30)
    return (
        np.concatenate([scales & 63, last_scales], axis=1).view(np.int8),
        np.concatenate([minimums & 63, last_minimums], axis=1).view(np.int8),
    )


def _q2_k(blocks: Blocks) -> Parts:
    scales = blocks[:, :16]
    return Parts(
        pack(_planes(blocks[:, 16:80], 2, 32)),
        (scales & 15).view(np.int8),
        minimums=(scales >> 4).view(np.int8),
        factors=_halves(blocks[:, 80:82]),
        minimum_factors=_halves(blocks[:, 82:84]),
    )


def _q3_k(blocks: Blocks) -> Parts:
    low, packed = _planes(blocks[:, 32:96], 2, 32), blocks[:, 96:108]
    high = _planes(blocks[:, :32], 1, 32)
    low_scales = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    high_scales = _planes(packed[:, 8:], 2, 4)
    scales = (low_scales | (high_scales << 4)).view(np.int8) - np.int8(32)
    # A value is low - 4 where its high bit is not set, and the stored code of int4 is 8 more.
    return Parts(pack(low + np.uint8(4) + (high << 2)), scales, factors=_halves(blocks[:, 108:110]))


def _q4_k(blocks: Blocks) -> Parts:
    scales, minimums = _six_bit_scales(blocks[:, 4:16])
    return Parts(
        pack(_planes(blocks[:, 16:], 4, 32)),
        scales,
        minimums=minimums,
        factors=_halves(blocks[:, :2]),
        minimum_factors=_halves(blocks[:, 2:4]),
    )


def _q5_k(blocks: Blocks) -> Parts:
    scales, minimums = _six_bit_scales(blocks[:, 4:16])
    codes = _planes(blocks[:, 48:], 4, 32) | (_planes(blocks[:, 16:48], 1, 32) << 4)
    return Parts(
        codes.view(np.int8),
        scales,
        minimums=minimums,
        factors=_halves(blocks[:, :2]),
        minimum_factors=_halves(blocks[:, 2:4]),
    )


def _q6_k(blocks: Blocks) -> Parts:
    codes = _planes(blocks[:, :128], 4, 64) | (_planes(blocks[:, 128:192], 2, 32) << 4)
    scales = blocks[:, 192:208].view(np.int8)
    return Parts(codes.view(np.int8) - np.int8(32), scales, factors=_halves(blocks[:, 208:210]))


_SPLITTERS: dict[str, Callable[[Blocks], Parts]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
