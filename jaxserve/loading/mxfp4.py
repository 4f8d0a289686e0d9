"""Weights of experts stored as MXFP4, as in GPT-OSS: 32 4-bit floats have a common scale, a power of two.

OCP Microscaling Formats 1.0. `huggingface` reads each such pair of tensors as the tensor that it encodes.
"""

import concurrent.futures
import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import BFloat16, UInt8

from jaxserve.cpus import num_usable_cpus
from jaxserve.quantization.mxfp4 import SCHEME
from jaxserve.quantization.scheme import Parts, Scheme

BLOCK = 32
PIECE = 2**13
"""Blocks that a thread dequantizes at a time: 512 KiB of bfloat16, which stay in its cache."""


@dataclasses.dataclass(frozen=True)
class Mxfp4Tensor:
    """A tensor [X, in, out] of X experts, stored as `blocks` [X, out, in / 32, 16] and `scales` [X, out, in / 32]."""

    blocks: Any
    scales: Any

    def complaint(self, shape: tuple[int, ...]) -> str | None:
        """Return why these are not blocks and scales of a tensor of such a shape, or None if they are."""
        found = {name: tensor.header()[:2] for name, tensor in (("blocks", self.blocks), ("scales", self.scales))}
        grid = (shape[0], shape[2], shape[1] // BLOCK) if len(shape) == 3 and shape[1] % BLOCK == 0 else None
        if grid is not None and found == {"blocks": ("U8", (*grid, BLOCK // 2)), "scales": ("U8", grid)}:
            return None
        described = " and ".join(f"{name} {dtype} {list(sizes)}" for name, (dtype, sizes) in found.items())
        return f"is MXFP4 of {described} and not of {list(shape)}"

    def scheme(self) -> Scheme:
        """Return how an engine holds the codes as they are."""
        return SCHEME

    def read_parts(self) -> Parts:
        """Return codes and scales as they are, outputs before inputs."""
        blocks, scales = self.blocks.read(), self.scales.read()
        return Parts(blocks.reshape(*blocks.shape[:2], -1), scales.view(ml_dtypes.float8_e8m0fnu))

    def read(self) -> np.ndarray:
        """Return the values in bfloat16, which holds them all exactly; outputs before inputs in memory."""
        return dequantize(self.blocks.read(), self.scales.read()).transpose(0, 2, 1)


def join_pairs(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors of a checkpoint by name; each NAME_blocks and NAME_scales become one Mxfp4Tensor, NAME."""
    names = {name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")}
    pairs = {name: (f"{name}_blocks", f"{name}_scales") for name in names if f"{name}_scales" in tensors}
    parts = {part for pair in pairs.values() for part in pair}
    whole = {name: Mxfp4Tensor(tensors[blocks], tensors[scales]) for name, (blocks, scales) in pairs.items()}
    return {name: tensor for name, tensor in tensors.items() if name not in parts} | whole


def dequantize(
    blocks: UInt8[np.ndarray, "*rows groups 16"], scales: UInt8[np.ndarray, "*rows groups"]
) -> BFloat16[np.ndarray, "*rows values"]:
    """Return the values of all blocks: in each byte the lower half comes first; a scale of s means 2^(s - 127)."""
    num_blocks = scales.size
    pairs = np.empty((num_blocks, BLOCK // 2), np.uint32)  # of bfloat16
    bytes_of, scale_of = blocks.reshape(num_blocks, BLOCK // 2), scales.reshape(num_blocks, 1)
    table = _pairs()

    def run(first: int) -> None:
        piece = slice(first, first + PIECE)
        index = (scale_of[piece].astype(np.intp) << 8) + bytes_of[piece]
        np.take(table, index, out=pairs[piece], mode="clip")  # other modes would copy `out`

    with concurrent.futures.ThreadPoolExecutor(min(8, num_usable_cpus())) as pool:
        for _ in pool.map(run, range(0, num_blocks, PIECE)):  # raises what a thread has raised
            pass
    *rows, groups = scales.shape
    return pairs.view(ml_dtypes.bfloat16).reshape(*rows, groups * BLOCK)


def _pairs() -> np.ndarray:
    """Return two bfloat16 for each byte of a block with each scale, as [256 * 256] uint32: lookups are faster than
    arithmetic.
    """
    codes = np.arange(256, dtype=np.uint8)
    scales = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    halves = np.stack([codes & 15, codes >> 4], axis=-1).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    with np.errstate(over="ignore"):  # the two greatest scales leave bfloat16's range
        values = scales[:, None, None] * halves[None]
    return values.astype(ml_dtypes.bfloat16).view(np.uint32).ravel()
