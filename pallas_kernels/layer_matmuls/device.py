"""Device operations of the Hopper kernel that Pallas lacks: columns of a few rows between global memory and registers,
beside the counters that CTAs wait for.

Each is executed by one warpgroup. Matrices in registers are [64, columns] in WGMMA layout, of which only the first rows
are meaningful. The interpreter supports none of the operations: `interpret` replaces them.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.counters import clear, signal, wait
from pallas_kernels.device.mlir import REF, SCALAR, as_index, const_i32, inline, splat, value_of
from pallas_kernels.device.registers import at, matrix_of, registers_for, row_and_quarter
from pallas_kernels.jax_internals import arith, ir, vector
from pallas_kernels.paging.tiles import part_layout

__all__ = [
    "ROWS",
    "clear",
    "load_columns",
    "load_row_sums",
    "signal",
    "store_columns",
    "store_heads",
    "store_row_sums",
    "store_vector",
    "wait",
]

ROWS = 64
"""Rows of one wgmma."""

_LAYOUT = plgpu.Layout.WGMMA
_GROUP = 8
"""Columns of a matrix that WGMMA layout is made of."""


def load_columns(ref, first, num_columns: int, *, interpret: bool):
    """Load ref[:, first : first + num_columns] as float32, with zeros beyond its last column and repeated rows below
    it.
    """
    if interpret:
        return _load_columns_interpreted(ref, first, num_columns)
    out = plgpu.ShapeDtypeStruct((ROWS, num_columns), ref.dtype, layout=_LAYOUT)

    def run(_, ref, first):
        return _load_columns(ref, first, num_columns)

    return inline(run, REF, SCALAR, out=out)(ref, splat(first)).astype(jnp.float32)


def store_columns(ref, x, first, *, interpret: bool) -> None:
    """Store x in ref[:, first:], as many rows and columns of it as the ref has."""
    x = x.astype(ref.dtype)
    if not interpret:
        inline(_store_columns, REF, _LAYOUT, SCALAR)(ref, x, splat(first))
        return
    for start in range(0, x.shape[1], _GROUP):

        @pl.when(first + start < ref.shape[1])
        def _(start=start):
            ref[:, pl.ds(first + start, _GROUP)] = x[: ref.shape[0], start : start + _GROUP]


def load_row_sums(ref, *, interpret: bool):
    """Return a matrix whose rows contain the sums of the rows of ref[:, parts], float32 with parts a multiple of 16."""
    if interpret:
        return _pad_rows(ref[...])
    out = plgpu.ShapeDtypeStruct((ROWS, _GROUP), jnp.float32, layout=_LAYOUT)
    return inline(_load_row_sums, REF, out=out)(ref)


def store_row_sums(ref, sums, column, *, interpret: bool) -> None:
    """Store a vector of 64 rows in ref[:, column], as many of them as the ref has."""
    if interpret:
        ref[:, column] = sums[: ref.shape[0]]
        return
    inline(_store_first_column, REF, _LAYOUT, SCALAR)(
        ref, lax.broadcast_in_dim(sums, (ROWS, _GROUP), (0,)), splat(column)
    )


def store_vector(ref, x, *, interpret: bool) -> None:
    """Store the first of 64 rows' values in ref[:], as many as it has."""
    if interpret:
        ref[...] = x[: ref.shape[0]]
    else:
        inline(_store_vector, REF, _LAYOUT)(ref, lax.broadcast_in_dim(x, (ROWS, _GROUP), (0,)))


def store_heads(ref, x, row, first, start, number: int, *, interpret: bool) -> None:
    """Store rows of x[rows, D] side by side in ref[row, first:], as row `start` and following ones of `number` rows."""
    x = x.astype(ref.dtype)
    size = x.shape[1]
    if interpret:
        for i in range(min(x.shape[0], number)):

            @pl.when(start + i < number)
            def _(i=i):
                ref[row, pl.ds(first + (start + i) * size, size)] = x[i]

        return
    run = functools.partial(_store_heads, number=number)
    layout = _LAYOUT if x.shape[0] == ROWS else part_layout(size)
    inline(run, REF, layout, SCALAR, SCALAR, SCALAR)(ref, x, splat(row), splat(first), splat(start))


def _pad_rows(x):
    return jnp.pad(x.astype(jnp.float32), ((0, ROWS - x.shape[0]), (0, 0)), mode="edge")


def _load_columns_interpreted(ref, first, num_columns: int):
    groups = []
    for start in range(0, num_columns, _GROUP):
        offset = jnp.minimum(first + start, ref.shape[1] - _GROUP)
        groups.append(jnp.where(first + start < ref.shape[1], ref[:, pl.ds(offset, _GROUP)], 0))
    return _pad_rows(jnp.concatenate(groups, axis=1))


def _load_columns(ref, first, num_columns: int):
    pair = ir.VectorType.get((2,), ref.type.element_type)
    zeros = vector.broadcast(pair, mgpu.c(0.0, ref.type.element_type))
    registers = registers_for(num_columns)
    for half, row, _ in _own_rows(ref):
        for group, column, is_there in _own_columns(ref, first, num_columns):
            safe_column = column if is_there is None else arith.select(is_there, column, const_i32(0))
            values = vector.load(pair, ref, [as_index(row), as_index(safe_column)])
            registers[at(group, half)] = values if is_there is None else arith.select(is_there, values, zeros)
    return _filled(registers, ref)


def _store_columns(_, ref, x, first) -> None:
    for half, row, is_row in _own_rows(ref):
        for group, column, is_column in _own_columns(ref, first, x.shape[1]):
            is_there = is_row if is_column is None else arith.andi(is_row, is_column)
            with mgpu.utils.when(is_there):
                vector.store(x.registers[at(group, half)], ref, [as_index(row), as_index(column)])


def _load_row_sums(_, ref):
    """Sum up, in each lane, every fourth group of four elements of its rows."""
    f32 = ir.F32Type.get()
    four, pair = (ir.VectorType.get((size,), f32) for size in (4, 2))
    _, quarter = row_and_quarter()
    registers = registers_for(_GROUP)
    for half, row, _ in _own_rows(ref):
        total = vector.broadcast(four, mgpu.c(0.0, f32))
        for start in range(0, ref.type.shape[1], 16):
            column = arith.addi(arith.muli(quarter, const_i32(4)), const_i32(start))
            total = arith.addf(total, vector.load(four, ref, [as_index(row), as_index(column)]))
        a, b, c, d = (vector.extract(total, [], [i]) for i in range(4))
        registers[at(0, half)] = vector.from_elements(pair, [arith.addf(a, b), arith.addf(c, d)])
    return _filled(registers, ref)


def _store_first_column(_, ref, x, column) -> None:
    column = value_of(column)
    _, quarter = row_and_quarter()
    is_first = arith.cmpi(arith.CmpIPredicate.eq, quarter, const_i32(0))
    one = ir.VectorType.get((1,), ir.F32Type.get())
    for half, row, is_row in _own_rows(ref):
        with mgpu.utils.when(arith.andi(is_first, is_row)):
            value = vector.extract(x.registers[at(0, half)], [], [0])
            vector.store(vector.from_elements(one, [value]), ref, [as_index(row), as_index(column)])


def _store_vector(_, ref, x) -> None:
    _, quarter = row_and_quarter()
    is_first = arith.cmpi(arith.CmpIPredicate.eq, quarter, const_i32(0))
    one = ir.VectorType.get((1,), ir.F32Type.get())
    [size] = ref.type.shape
    first, _ = row_and_quarter()
    for half in range(_num_halves(size)):
        row = arith.addi(first, const_i32(8 * half))
        is_there = arith.cmpi(arith.CmpIPredicate.ult, row, const_i32(size))
        with mgpu.utils.when(arith.andi(is_first, is_there)):
            value = vector.extract(x.registers[at(0, half)], [], [0])
            vector.store(vector.from_elements(one, [value]), ref, [as_index(row)])


def _store_heads(_, ref, x, row, first, start, *, number: int) -> None:
    row, first, start = map(value_of, (row, first, start))
    for (x_row, column), (index, register) in zip(
        x.layout.thread_idxs(x.shape), np.ndenumerate(x.registers), strict=True
    ):
        if x.shape[0] == ROWS and index[4] >= _num_halves(number):
            continue
        i32 = ir.IntegerType.get_signless(32)
        x_row, column = (arith.index_cast(i32, index) for index in (x_row, column))
        head = arith.addi(start, x_row)
        with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.ult, head, const_i32(number))):
            offset = arith.addi(first, arith.addi(arith.muli(head, const_i32(x.shape[1])), column))
            vector.store(register, ref, [as_index(row), as_index(offset)])


def _own_rows(ref) -> Iterator[tuple[int, Any, Any]]:
    """Yield the two rows of a lane: half, the row or else the ref's last one, and whether the ref has it.

    The second one is omitted if no lane's second row is in the ref.
    """
    num_rows = const_i32(ref.type.shape[0])
    first, _ = row_and_quarter()
    for half in range(_num_halves(ref.type.shape[0])):
        row = arith.addi(first, const_i32(8 * half))
        is_there = arith.cmpi(arith.CmpIPredicate.ult, row, num_rows)
        yield half, arith.select(is_there, row, arith.subi(num_rows, const_i32(1))), is_there


def _num_halves(num_rows: int) -> int:
    return 1 if num_rows <= 8 else 2


def _own_columns(ref, first, num_columns: int) -> Iterator[tuple[int, Any, Any]]:
    """Yield the first of a lane's two columns in each group, and whether the ref has it (None if it always does)."""
    _, quarter = row_and_quarter()
    size = ref.type.shape[1]
    own = arith.addi(value_of(first), arith.muli(quarter, const_i32(2)))
    for group in range(num_columns // _GROUP):
        column = arith.addi(own, const_i32(group * _GROUP))
        is_there = None if size % num_columns == 0 else arith.cmpi(arith.CmpIPredicate.ult, column, const_i32(size))
        yield group, column, is_there


def _filled(registers, ref):
    """Return a matrix whose second halves, if they were omitted, repeat the first ones."""
    if _num_halves(ref.type.shape[0]) == 1:
        registers[0, :, 0, 0, 1] = registers[0, :, 0, 0, 0]
    return matrix_of(registers)
