"""Device operations of the Hopper kernel that Pallas lacks: masking scores without a register per column, and storing
the first rows of a matrix from registers.

Each is executed by one warpgroup. The interpreter supports none of them: `interpret` replaces them.
"""

import functools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.mlir import REF, SCALAR, as_index, const_i32, inline, splat, value_of
from pallas_kernels.device.registers import at, matrix_of, row_and_quarter
from pallas_kernels.jax_internals import arith, ir, vector

_LAYOUT = plgpu.Layout.WGMMA


def mask_after(scores, last, *, interpret: bool):
    """-inf for scores[i, j] with j > last[i], of a float32 matrix in WGMMA layout."""
    last = lax.broadcast_in_dim(last, scores.shape, [0])
    if interpret:
        return jnp.where(lax.broadcasted_iota(jnp.int32, scores.shape, 1) <= last, scores, -jnp.inf)
    out = plgpu.ShapeDtypeStruct(scores.shape, scores.dtype, layout=_LAYOUT)
    return inline(_mask_after, _LAYOUT, _LAYOUT, out=out)(scores, last)


def store_first_rows(ref, x, *, row, num_rows, column: int, interpret: bool) -> None:
    """Store the first `num_rows` of [64, columns] float32 in WGMMA layout to global memory of any dtype at [row,
    column].
    """
    if interpret:
        x = x.astype(ref.dtype)

        def store_row(i, _):
            ref[row + i, column : column + x.shape[1]] = lax.dynamic_index_in_dim(x, i, keepdims=False)

        lax.fori_loop(jnp.int32(0), num_rows, store_row, None)
        return
    store = functools.partial(_store_first_rows, column=column)
    inline(store, REF, _LAYOUT, SCALAR, SCALAR)(ref, x, splat(row), splat(num_rows))


def _mask_after(_, scores, last):
    first_column = _first_row_and_column()[1]
    out = mgpu.c(-math.inf, ir.F32Type.get())
    registers = scores.registers.copy()
    for index in np.ndindex(registers.shape):
        # From the lane's first column, so that LLVM has no numbers of columns to keep in registers.
        ahead = arith.subi(vector.extract(last.registers[index], [], [0]), first_column)
        for i in range(2):
            is_in = arith.cmpi(arith.CmpIPredicate.sge, ahead, const_i32(8 * index[1] + i))
            score = vector.extract(registers[index], [], [i])
            registers[index] = vector.insert(arith.select(is_in, score, out), registers[index], [], [i])
    return matrix_of(registers)


def _store_first_rows(_, ref, x, row, num_rows, *, column: int) -> None:
    dtype = ir.VectorType.get((2,), ref.type.element_type)
    row, num_rows = value_of(row), value_of(num_rows)
    first_row, first_column = _first_row_and_column()
    for half in range(2):
        own_row = arith.addi(first_row, const_i32(8 * half))
        with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.slt, own_row, num_rows)):
            for matrix in range(x.shape[1] // 8):
                own_column = arith.addi(first_column, const_i32(column + 8 * matrix))
                indices = [as_index(arith.addi(row, own_row)), as_index(own_column)]
                values = x.registers[at(matrix, half)]
                # Narrowed here rather than all before the first store, for which there are not enough registers.
                vector.store(values if values.type == dtype else arith.truncf(dtype, values), ref, indices)


def _first_row_and_column():
    """Row and column of a lane's first value."""
    row, quarter = row_and_quarter()
    return row, arith.muli(quarter, const_i32(2))
