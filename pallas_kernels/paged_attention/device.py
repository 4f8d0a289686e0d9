"""Device operations of the Hopper kernel that Pallas lacks: some columns of a matrix in registers, and making a small
matrix an operand of wgmma.

Each is executed by one warpgroup. The interpreter supports none of them: `interpret` replaces them.
"""

from collections.abc import Callable
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.registers import row_and_quarter
from pallas_kernels.jax_internals import arith, ir, memref, vector

# pyright takes them for abstract classes.
SWIZZLED = cast(Any, plgpu.TilingTransform)((8, 64)), cast(Any, plgpu.SwizzleTransform)(128)
"""Layout of 16-bit values in shared memory: 8 rows of 64, whose chunks of 8 are permuted differently in each."""

EXCHANGED = 256
"""Floats through which the warps of a warpgroup reduce rows."""

_REF = plgpu.RefType()
_SWIZZLED_REF = plgpu.RefType(SWIZZLED)
_WGMMA = plgpu.Layout.WGMMA
_SCALAR = plgpu.Layout.WG_SPLAT((128,))


def store_columns(ref, x, *, interpret: bool) -> None:
    """Store the first columns of a matrix in WGMMA layout as the rows of a ref, as many as it has, in its dtype."""
    x = x.astype(ref.dtype)
    if interpret:
        ref[...] = x.T[: ref.shape[0]]
    else:
        _store_columns(ref, x)


def store_vector(ref, x) -> None:
    """Store a row of a matrix in WGMMA layout, whose rows are all equal, as the first elements of a ref in global
    memory.
    """
    _store_vector(ref, x)


def copy_rows(swizzled, rows, *, interpret: bool) -> None:
    """Copy rows from plain to swizzled shared memory."""
    if interpret:
        swizzled[...] = rows[...]
    else:
        _copy_rows(swizzled, rows)


def store_transposed(swizzled, x) -> None:
    """Store a matrix of 16-bit values in WGMMA layout, transposed, in swizzled shared memory."""
    _store_transposed(swizzled, x)


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
    return _inline(_WGMMA, _REF, out=out)(reduce)(x, exchanged)


def _inline(*arg_types: Any, out: Any = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return cast(Any, plgpu.inline_mgpu(arg_types=arg_types, return_type=out))


def _c(value: int):
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def _index(values):
    return [arith.index_cast(ir.IndexType.get(), value) for value in values]


@_inline(_SWIZZLED_REF, _REF)
def _copy_rows(_, tiled, rows) -> None:
    """[rows / 8, columns / 64, 8, 64] from [rows, columns]: 8 values (16 bytes) a lane and step."""
    num_rows, num_columns = rows.type.shape
    chunks = num_columns // 8
    thread = arith.remui(mgpu.utils.thread_idx(), _c(128))
    kind = ir.VectorType.get((8,), rows.type.element_type)
    for step in range(-(-num_rows * chunks // 128)):
        number = arith.addi(thread, _c(128 * step))

        def move(number=number):
            row, chunk = arith.divui(number, _c(chunks)), arith.remui(number, _c(chunks))
            value = vector.load(kind, rows, _index([row, arith.muli(chunk, _c(8))]))
            within = arith.remui(row, _c(8))
            swizzled_chunk = arith.xori(arith.remui(chunk, _c(8)), within)
            vector.store(
                value,
                tiled,
                _index([arith.divui(row, _c(8)), arith.divui(chunk, _c(8)), within, arith.muli(swizzled_chunk, _c(8))]),
            )

        if (step + 1) * 128 <= num_rows * chunks:
            move()
        else:
            with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.ult, number, _c(num_rows * chunks))):
                move()


def _elements(x):
    """(row, column, value) of a lane's values of a matrix in WGMMA layout."""
    first_row, quarter = row_and_quarter()
    first_column = arith.muli(quarter, _c(2))
    for index in np.ndindex(x.registers.shape):
        tile, group, half = index[0], index[1], index[4]
        row = arith.addi(first_row, _c(64 * tile + 8 * half))
        for i in range(2):
            column = arith.addi(first_column, _c(8 * group + i))
            yield row, column, vector.extract(x.registers[index], dynamic_position=[], static_position=[i])


@_inline(_SWIZZLED_REF, _WGMMA)
def _store_transposed(_, tiled, x) -> None:
    """[columns / 8, keys / 64, 8, 64] from [keys, columns], a value at a time."""
    for row, column, value in _elements(x):
        within = arith.remui(column, _c(8))
        swizzled_row = arith.xori(arith.remui(row, _c(64)), arith.muli(within, _c(8)))
        memref.store(value, tiled, _index([arith.divui(column, _c(8)), arith.divui(row, _c(64)), within, swizzled_row]))


@_inline(_REF, _WGMMA)
def _store_columns(_, ref, x) -> None:
    num_rows = ref.type.shape[0]
    for row, column, value in _elements(x):
        with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.ult, column, _c(num_rows))):
            memref.store(value, ref, _index([column, row]))


@_inline(_REF, _WGMMA)
def _store_vector(_, ref, x) -> None:
    [number] = ref.type.shape
    first_row, quarter = row_and_quarter()
    with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.eq, first_row, _c(0))):
        for group in range(x.registers.shape[1]):
            for i in range(2):
                column = arith.addi(arith.muli(quarter, _c(2)), _c(8 * group + i))
                value = vector.extract(
                    x.registers[0, group, 0, 0, 0, 0, 0, 0, 0], dynamic_position=[], static_position=[i]
                )
                with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.ult, column, _c(number))):
                    memref.store(value, ref, _index([column]))
