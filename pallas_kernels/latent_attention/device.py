"""Device operations of the Hopper kernel that Pallas lacks: masking scores without a register per column, and storing
the first rows of a matrix from registers.

Each is executed by one warpgroup. The interpreter supports none of them: `interpret` replaces them.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.registers import row_and_quarter
from pallas_kernels.jax_internals import arith, ir, vector

_REF = plgpu.RefType()
_LAYOUT = plgpu.Layout.WGMMA
_SCALAR = plgpu.Layout.WG_SPLAT((128,))


def mask_after(scores, last, *, interpret: bool):
    """-inf for scores[i, j] with j > last[i], of a float32 matrix in WGMMA layout."""
    last = lax.broadcast_in_dim(last, scores.shape, [0])
    if interpret:
        return jnp.where(lax.broadcasted_iota(jnp.int32, scores.shape, 1) <= last, scores, -jnp.inf)
    out = plgpu.ShapeDtypeStruct(scores.shape, scores.dtype, layout=_LAYOUT)
    return _inline(_LAYOUT, _LAYOUT, return_type=out)(_mask_after)(scores, last)


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
    _inline(_REF, _LAYOUT, _SCALAR, _SCALAR)(store)(ref, x, jnp.full((128,), row), jnp.full((128,), num_rows))


def _inline(*arg_types: Any, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return cast(Any, plgpu.inline_mgpu(arg_types=arg_types, **options))


def _mask_after(_, scores, last):
    i32 = ir.IntegerType.get_signless(32)
    first_column = _first_row_and_column()[1]
    out = mgpu.c(-math.inf, ir.F32Type.get())
    registers = scores.registers.copy()
    for index in np.ndindex(registers.shape):
        # From the lane's first column, so that LLVM has no numbers of columns to keep in registers.
        ahead = arith.subi(vector.extract(last.registers[index], [], [0]), first_column)
        for i in range(2):
            is_in = arith.cmpi(arith.CmpIPredicate.sge, ahead, mgpu.c(8 * index[1] + i, i32))
            score = vector.extract(registers[index], [], [i])
            registers[index] = vector.insert(arith.select(is_in, score, out), registers[index], [], [i])
    return mgpu.FragmentedArray(_registers=registers, _layout=scores.layout, _is_signed=scores.is_signed)


def _store_first_rows(_, ref, x, row, num_rows, *, column: int) -> None:
    i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
    dtype = ir.VectorType.get((2,), ref.type.element_type)
    [row], [num_rows] = row.registers.flat, num_rows.registers.flat
    first_row, first_column = _first_row_and_column()
    for half in range(2):
        own_row = arith.addi(first_row, mgpu.c(8 * half, i32))
        with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.slt, own_row, num_rows)):
            for matrix in range(x.shape[1] // 8):
                own_column = arith.addi(first_column, mgpu.c(column + 8 * matrix, i32))
                indices = [arith.index_cast(index, i) for i in (arith.addi(row, own_row), own_column)]
                values = x.registers[0, matrix, 0, 0, half, 0, 0, 0, 0]
                # Narrowed here rather than all before the first store, for which there are not enough registers.
                vector.store(values if values.type == dtype else arith.truncf(dtype, values), ref, indices)


def _first_row_and_column():
    """Row and column of a lane's first value."""
    row, quarter = row_and_quarter()
    return row, arith.muli(quarter, mgpu.c(2, ir.IntegerType.get_signless(32)))
