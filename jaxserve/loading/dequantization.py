"""Convert blocks of ggml's quantized types to float32, by the `gguf` package, or to codes, in pieces and on several
threads.

The package makes several copies of its input at once; pieces keep them small and in the cache.
"""

import concurrent.futures
import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, UInt8, UInt64

from jaxserve.cpus import num_usable_cpus
from jaxserve.errors import CheckpointError
from jaxserve.quantization import ggml
from jaxserve.quantization.scheme import Parts

QUANTIZED_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
PIECE = 2**18
"""Values that a thread dequantizes at a time: 1 MiB of float32."""


class BlockType(NamedTuple):
    """A type of tensors: what ggml calls it, and the values and bytes of a block."""

    name: str
    num_values: int
    num_bytes: int


@functools.cache
def block_types() -> dict[int, BlockType]:
    """Return all types of tensors by their numbers in files."""
    from gguf import GGML_QUANT_SIZES  # takes a while, for which starts with other files do not wait

    return {int(kind): BlockType(kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}


@functools.cache
def block_type(name: str) -> BlockType:
    """Return a type of tensors by its name."""
    return next(kind for kind in block_types().values() if kind.name == name)


def dequantize(blocks: UInt8[np.ndarray, " bytes"], kind: str) -> Float[np.ndarray, " values"]:
    """Return the values of whole blocks of one of QUANTIZED_TYPES, bit-equal to those of the `gguf` package."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize as dequantize_at_once

    _, values_per_block, bytes_per_block = block_type(kind)
    num_blocks = len(blocks) // bytes_per_block
    values = np.empty(num_blocks * values_per_block, np.float32)

    def run(first: int, last: int) -> None:
        piece = blocks[first * bytes_per_block : last * bytes_per_block]
        into = values[first * values_per_block : last * values_per_block]
        if kind == "MXFP4":
            _dequantize_mxfp4(piece, into)
        else:
            into[:] = dequantize_at_once(piece[None], GGMLQuantizationType[kind])[0]

    _in_pieces(run, num_blocks, PIECE // values_per_block)
    return values


@functools.cache
def _mxfp4_pairs() -> UInt64[np.ndarray, "256"]:
    """Return the two float32 of each byte of a block of MXFP4, still to be scaled."""
    from gguf.quants import MXFP4

    codes = np.arange(256)
    return np.array(MXFP4.kvalues, np.float32)[np.stack([codes & 15, codes >> 4], axis=-1)].view(np.uint64)[:, 0]


def split(blocks: UInt8[np.ndarray, " bytes"], kind: str) -> Parts:
    """Return the arrays in which whole blocks of a key of `ggml.SCHEMES` are held, each with one row per block.

    Raises CheckpointError for blocks with scales that are not numbers.
    """
    bytes_per_block = block_type(kind).num_bytes
    rows = blocks.reshape(-1, bytes_per_block)
    first = ggml.split(kind, rows[:1])
    arrays = Parts(*(None if part is None else np.empty((len(rows), part.shape[1]), part.dtype) for part in first))

    def run(first: int, last: int) -> None:
        for array, part in zip(arrays, ggml.split(kind, rows[first:last]), strict=True):
            if array is not None:
                array[first:last] = part

    try:
        _in_pieces(run, len(rows), PIECE // bytes_per_block)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    return arrays


def _in_pieces(run: Callable[[int, int], None], count: int, step: int) -> None:
    """Call `run` for the bounds of each piece, on several threads. Raises what a thread has raised."""
    with concurrent.futures.ThreadPoolExecutor(min(8, num_usable_cpus())) as pool:
        for _ in pool.map(lambda first: run(first, min(first + step, count)), range(0, count, step)):
            pass


def _dequantize_mxfp4(blocks: UInt8[np.ndarray, " bytes"], into: Float[np.ndarray, " values"]) -> None:
    """Compute what the package does, by lookups of two values at once, which take half the time or less.

    A block is a scale, then 16 bytes: their lower halves are the first 16 values, the upper halves the others.
    """
    scales, codes = np.split(blocks.reshape(-1, 17), [1], axis=1)
    from gguf.quants import MXFP4

    pairs = _mxfp4_pairs()[codes].view(np.float32).reshape(-1, 16, 2)
    with np.errstate(over="ignore"):  # the greatest scales leave float32's range
        np.multiply(pairs.transpose(0, 2, 1), MXFP4.e8m0_to_fp32_half(scales)[..., None], out=into.reshape(-1, 2, 16))
