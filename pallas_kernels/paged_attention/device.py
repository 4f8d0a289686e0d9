"""Device operations of the Hopper kernel that Pallas lacks: some columns of a matrix in registers, and making a small
matrix an operand of wgmma.

Each is executed by one warpgroup. The interpreter supports none of them: `interpret` replaces them.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.mlir import REF, as_index, const_i32, inline, thread
from pallas_kernels.device.registers import at, row_and_quarter
from pallas_kernels.device.swizzled import tiled
from pallas_kernels.jax_internals import arith, ir, memref, vector

SWIZZLED = tiled(64)
"""Layout of 16-bit values in shared memory: 8 rows of 64, whose chunks of 8 are permuted differently in each."""

EXCHANGED = 256
"""Floats through which the warps of a warpgroup reduce rows."""

_SWIZZLED_REF = plgpu.RefType(SWIZZLED)
_WGMMA = plgpu.Layout.WGMMA


def store_columns(ref, x, *, interpret: bool) -> None:
    """Store the first columns of a matrix in WGMMA layout as the rows of a ref, as many as it has, in its dtype."""
    x = x.astype(ref.dtype)
    if interpret:
        ref[...] = x.T[: ref.shape[0]]
    else:
        inline(_store_columns, REF, _WGMMA)(ref, x)


def store_vector(ref, x) -> None:
    """Store a row of a matrix in WGMMA layout, whose rows are all equal, as the first elements of a ref in global
    memory.
    """
    inline(_store_vector, REF, _WGMMA)(ref, x)


def copy_rows(swizzled, rows, *, interpret: bool) -> None:
    """Copy rows from plain memory to the first of as many or more in swizzled shared memory."""
    if interpret:
        swizzled.at[pl.ds(0, rows.shape[0])][...] = rows[...]
    else:
        inline(_copy_rows, _SWIZZLED_REF, REF)(swizzled, rows)


def store_transposed(swizzled, x) -> None:
    """Store a matrix of 16-bit values in WGMMA layout, transposed, in swizzled shared memory."""
    inline(_store_transposed, _SWIZZLED_REF, _WGMMA)(swizzled, x)


def maxima(x, exchanged, *, interpret: bool):
    """Return the maximum of each column of a float32 matrix in WGMMA layout; `exchanged` is shared memory for EXCHANGED
    floats.
    """
    return x.max(axis=0) if interpret else _reduced(x, exchanged, "max")


def sums(x, exchanged, *, interpret: bool):
    """Return the sum of each column, as `maxima` does."""
    return x.sum(axis=0) if interpret else _reduced(x, exchanged, "add")


def _reduced(x, exchanged, op: str):
    def reduce(_, x, exchanged):
        return x.reduce(op, 0, exchanged)

    out = plgpu.ShapeDtypeStruct((x.shape[1],), jnp.float32, layout=_WGMMA.reduce(0))
    return inline(reduce, _WGMMA, REF, out=out)(x, exchanged)


def _indices(*values: Any) -> list[Any]:
    return list(map(as_index, values))


def _copy_rows(_, tiled, rows) -> None:
    """[rows / 8, columns / 64, 8, 64] from [rows, columns]: 8 values (16 bytes) a lane and step."""
    num_rows, num_columns = rows.type.shape
    chunks = num_columns // 8
    own = thread()
    kind = ir.VectorType.get((8,), rows.type.element_type)
    for step in range(-(-num_rows * chunks // 128)):
        number = arith.addi(own, const_i32(128 * step))

        def move(number=number):
            row, chunk = arith.divui(number, const_i32(chunks)), arith.remui(number, const_i32(chunks))
            value = vector.load(kind, rows, _indices(row, arith.muli(chunk, const_i32(8))))
            within = arith.remui(row, const_i32(8))
            swizzled_chunk = arith.xori(arith.remui(chunk, const_i32(8)), within)
            vector.store(
                value,
                tiled,
                _indices(
                    arith.divui(row, const_i32(8)),
                    arith.divui(chunk, const_i32(8)),
                    within,
                    arith.muli(swizzled_chunk, const_i32(8)),
                ),
            )

        if (step + 1) * 128 <= num_rows * chunks:
            move()
        else:
            with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.ult, number, const_i32(num_rows * chunks))):
                move()


def _elements(x):
    """(row, column, value) of a lane's values of a matrix in WGMMA layout."""
    first_row, quarter = row_and_quarter()
    first_column = arith.muli(quarter, const_i32(2))
    for index in np.ndindex(x.registers.shape):
        tile, group, half = index[0], index[1], index[4]
        row = arith.addi(first_row, const_i32(64 * tile + 8 * half))
        for i in range(2):
            column = arith.addi(first_column, const_i32(8 * group + i))
            yield row, column, vector.extract(x.registers[index], [], [i])


def _store_transposed(_, tiled, x) -> None:
    """[columns / 8, keys / 64, 8, 64] from [keys, columns], a value at a time."""
    for row, column, value in _elements(x):
        within = arith.remui(column, const_i32(8))
        swizzled_row = arith.xori(arith.remui(row, const_i32(64)), arith.muli(within, const_i32(8)))
        memref.store(
            value,
            tiled,
            _indices(arith.divui(column, const_i32(8)), arith.divui(row, const_i32(64)), within, swizzled_row),
        )


def _store_columns(_, ref, x) -> None:
    num_rows = ref.type.shape[0]
    for row, column, value in _elements(x):
        with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.ult, column, const_i32(num_rows))):
            memref.store(value, ref, _indices(column, row))


def _store_vector(_, ref, x) -> None:
    [number] = ref.type.shape
    first_row, quarter = row_and_quarter()
    with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.eq, first_row, const_i32(0))):
        for group in range(x.registers.shape[1]):
            for i in range(2):
                column = arith.addi(arith.muli(quarter, const_i32(2)), const_i32(8 * group + i))
                value = vector.extract(x.registers[at(group, 0)], [], [i])
                with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.ult, column, const_i32(number))):
                    memref.store(value, ref, _indices(column))
