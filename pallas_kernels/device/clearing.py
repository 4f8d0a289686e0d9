"""Rows of 16 bits in shared memory that are cleared: those behind the end of what was copied."""

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.mlir import SCALAR, const_i32, inline, splat, thread, value_of
from pallas_kernels.device.swizzled import tiled
from pallas_kernels.jax_internals import arith, ir, llvm, vector


def clear_rows(ref, first, *, interpret: bool) -> None:
    """Clear the rows from `first` on of a [rows, columns] matrix in shared memory that `tiled` has transformed."""
    if interpret:

        def clear_row(row, _):
            ref[row] = jnp.zeros(ref.shape[1:], ref.dtype)

        lax.fori_loop(first, jnp.int32(ref.shape[0]), clear_row, None)
        return
    inline(_clear_rows, plgpu.RefType(tiled(ref.shape[1])), SCALAR)(ref, splat(first))


def _clear_rows(_, ref, first) -> None:
    """Clear 16 bytes per lane. Swizzling does not move data between a tile's rows, so that zeros may ignore it."""
    c, first = const_i32, value_of(first)
    num_tiles, num_parts, tile_rows, columns = ref.type.shape
    lanes = columns // 8  # of a row
    own = thread()
    own_row, own_column = arith.divui(own, c(lanes)), arith.muli(arith.remui(own, c(lanes)), c(8))
    tile, row = arith.divui(own_row, c(tile_rows)), arith.remui(own_row, c(tile_rows))
    offset = arith.addi(arith.muli(arith.addi(arith.muli(tile, c(num_parts * tile_rows)), row), c(columns)), own_column)
    own = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [offset], ref.type.element_type)
    zeros = vector.broadcast(ir.VectorType.get((4,), ir.IntegerType.get_signless(32)), c(0))
    for skipped in range(0, num_tiles * tile_rows, 128 // lanes):
        is_in = arith.cmpi(arith.CmpIPredicate.sge, own_row, arith.subi(first, c(skipped)))
        with mgpu.utils.when(is_in):
            for part in range(num_parts):
                start = (skipped * num_parts + part * tile_rows) * columns
                pointer = mgpu.utils.getelementptr(own, [start], ref.type.element_type)
                llvm.store(zeros, pointer, alignment=16)
