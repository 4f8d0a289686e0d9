"""The product of a block of MXFP4 weights, e2m1 with a power of two for 32 columns, and a few rows: inlined Mosaic GPU
code.

As in `product_of_codes`, but for the columns: a thread has 64 in a row of either output, which are two loads of 16
bytes and two exponents, instead of a word and an exponent of each 32. `put_rows` gives rows the same order.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import mma_utils, utils
from jax.experimental.mosaic.gpu.wgmma import wgmma_m64
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.codes import scales_of_exponents, small_pairs_of_e2m1, times_half
from pallas_kernels.device.mlir import (
    REF,
    SCALAR,
    as_index,
    const_i32,
    elements_of,
    inline,
    splat,
    strided,
    value_of,
    vector_of,
)
from pallas_kernels.device.product_of_codes import BYTES, PIECE, own_tiles
from pallas_kernels.device.registers import at, matrix_of, registers_for, row_and_quarter
from pallas_kernels.device.swizzled import tiled
from pallas_kernels.jax_internals import arith, ir, llvm, nvvm

GROUP = 32
"""Columns that have an exponent."""
BLOCK = 2 * BYTES
"""Columns of a block."""
OWN_GROUPS = 2
"""Groups of columns of a block that a thread has."""
CODES = plgpu.Layout.WG_STRIDED((128 * BYTES // 8,), 4)
"""Layout of a thread's 16 words of codes, 4 of each load."""
EXPONENTS = plgpu.Layout.WG_STRIDED((2 * 128,), 2)
"""Layout of a thread's exponents: a word of either output, the one of lower columns in its lowest byte."""

_LAYOUT = plgpu.Layout.WGMMA
_ROWS = plgpu.RefType(tiled(PIECE))
_CHUNK_BYTES = 16


def load_codes(codes: Any, slot: Any, warpgroup: Any, *, is_gated: bool) -> Any:
    """Return the codes of a warpgroup's block in the ring of `add_product`, in registers."""
    out = plgpu.ShapeDtypeStruct((128 * BYTES // 8,), jnp.int32, layout=CODES)

    def run(_, codes, slot, warpgroup):
        row, quarter = row_and_quarter()
        tiles, row = own_tiles(value_of(warpgroup), row, is_gated=is_gated)
        chunk = arith.xori(arith.muli(quarter, const_i32(2)), row)
        within = arith.addi(arith.muli(row, const_i32(BYTES)), arith.muli(chunk, const_i32(_CHUNK_BYTES)))
        pointer = utils.memref_ptr(codes)
        slot = arith.muli(value_of(slot), const_i32(math.prod(codes.type.shape[1:])))
        loaded = []
        for index in range(2):
            for tile in tiles:
                start = arith.addi(arith.muli(tile, const_i32(8 * BYTES)), within)
                offset = arith.addi(arith.xori(start, const_i32(index * _CHUNK_BYTES)), slot)
                loaded.append(_load(pointer, offset, 4))
        return strided(loaded, CODES)

    return inline(run, plgpu.RefType(tiled(BYTES, itemsize=1)), SCALAR, SCALAR, out=out)(
        codes, splat(slot), splat(warpgroup)
    )


def load_exponents(ref: Any, places: tuple[Any, ...], block: Any, *, output: Callable[..., Any]) -> Any:
    """Return a thread's exponents of a block of columns, of ref, [outputs, groups]: those beyond the last repeat it.

    `output(half, *places)` is the index of a thread's output in a half of its registers.
    """
    out = plgpu.ShapeDtypeStruct((2 * 128,), jnp.int32, layout=EXPONENTS)
    row_bytes = ref.shape[1]
    size = 1 if row_bytes % OWN_GROUPS else OWN_GROUPS

    def run(_, ref, block, *places):
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        _, quarter = row_and_quarter()
        groups = arith.muli(value_of(block), const_i32(BLOCK // GROUP))
        own = arith.addi(groups, arith.muli(quarter, const_i32(OWN_GROUPS)))
        start = utils.memref_ptr(ref)
        words = []
        for half in range(2):
            own_output = output(half, *map(value_of, places))
            row = arith.muli(arith.extui(i64, own_output), mgpu.c(row_bytes, i64))
            row = utils.getelementptr(start, [row], ir.IntegerType.get_signless(8))
            word = const_i32(0)
            for byte in range(0, OWN_GROUPS, size):
                column = arith.minsi(arith.addi(own, const_i32(byte)), const_i32(row_bytes - size))
                pointer = utils.getelementptr(row, [column], ir.IntegerType.get_signless(8))
                found = llvm.load(ir.IntegerType.get_signless(8 * size), pointer, alignment=size)
                word = arith.ori(word, arith.shli(arith.extui(i32, found), const_i32(8 * byte)))
            words.append(word)
        return strided([vector_of(words)], EXPONENTS)

    return inline(run, REF, *[SCALAR] * (1 + len(places)), out=out)(ref, splat(block), *map(splat, places))


def add_product(sums: Any, codes: Any, exponents: Any, x: Any, first_piece: Any) -> Any:
    """Return sums [64, rows] of float32 plus a block's product, of what `load_codes` and `load_exponents` return.

    x is the ring of rows, [slots * pieces, rows, PIECE] of bfloat16, with columns in the order of `put_rows`. The sums
    are to be multiplied by `factor_of_sums` in the end.
    """
    out = plgpu.ShapeDtypeStruct(sums.shape, jnp.float32, layout=_LAYOUT)
    rows = sums.shape[1]

    def run(_, sums, codes, exponents, x, first_piece):
        found = elements_of(exponents.registers[0], 2)
        scales = [scales_of_exponents(word) for word in found]

        def operand(piece: int) -> Any:
            a = registers_for(PIECE)
            for half in range(2):
                for index in range(2):
                    load, place = divmod(2 * piece + index, 4)
                    word = elements_of(codes.registers[2 * load + half], 4)[place]
                    for chunk, pair in enumerate(small_pairs_of_e2m1(word)):
                        value = times_half(pair, scales[half], load)
                        a[at(4 * index + chunk, half)] = utils.bitcast(
                            value, ir.VectorType.get((2,), ir.BF16Type.get())
                        )
            return mgpu.optimization_barrier(matrix_of(a))

        pieces = utils.memref_slice(x, (utils.ds(as_index(value_of(first_piece)), BLOCK // PIECE), slice(None), 0))
        acc = mgpu.WGMMAAccumulator.from_registers(sums)
        registers, layout = acc._value.registers.copy(), acc._value.layout
        (base, (_, (stride, *_))), (_, piece_stride), _ = mma_utils.create_descriptor(
            utils.memref_transpose(pieces, (0, 1, 3, 2)),
            swizzle=128,
            large_tile=(PIECE, PIECE),
            group_size=(PIECE, rows),
            logical_k_major=True,
        )
        for piece in range(BLOCK // PIECE):
            a = operand(piece)
            nvvm.wgmma_fence_aligned()
            offset = mgpu.c(mma_utils.encode_addr(piece * piece_stride), ir.IntegerType.get_signless(64))
            registers = wgmma_m64(
                registers,
                a,
                arith.addi(base, offset),
                a_transpose=None,
                a_k_stride=None,
                b_transpose=False,
                b_k_stride=stride,
                n=rows,
                swizzle=128,
                a_element_type=ir.BF16Type.get(),
                b_element_type=ir.BF16Type.get(),
            )
            nvvm.wgmma_commit_group_sync_aligned()
            nvvm.wgmma_wait_group_sync_aligned(1 if piece < BLOCK // PIECE - 1 else 0)
        value = mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
        return mgpu.optimization_barrier(value).to_layout(mgpu.WGMMA_LAYOUT)

    return inline(run, _LAYOUT, CODES, EXPONENTS, _ROWS, SCALAR, out=out)(sums, codes, exponents, x, splat(first_piece))


def _load(pointer: Any, offset: Any, words: int) -> Any:
    """Return words in shared memory, so many bytes behind a pointer."""
    i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
    place = utils.getelementptr(pointer, [offset], i8)
    return llvm.load(ir.VectorType.get((words,), i32), place, alignment=4 * words)
