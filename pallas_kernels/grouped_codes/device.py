"""Device operations on transposed sums, [outputs, rows] in registers, that Pallas lacks: inlined Mosaic GPU code.

A warpgroup has 64 outputs, the rows of WGMMA layout, or 32 of gate and the same of up in turns of eight. Rows that are
multiplied are its columns, eight at a time.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import product_of_mxfp4, scaling
from pallas_kernels.device.mlir import (
    REF,
    SCALAR,
    as_index,
    const_i32,
    elements_of,
    inline,
    splat,
    thread,
    value_of,
    vector_of,
)
from pallas_kernels.device.ordered_rows import load_rows, put_rows
from pallas_kernels.device.product_of_codes import OUTPUTS, add_product
from pallas_kernels.device.product_of_mxfp4 import add_product as add_mxfp4
from pallas_kernels.device.product_of_mxfp4 import load_codes
from pallas_kernels.device.registers import at, halves, matrix_of, registers_for, row_and_quarter
from pallas_kernels.device.scaling import vectors_of
from pallas_kernels.jax_internals import arith, ir, vector

__all__ = [
    "add_mxfp4",
    "add_product",
    "halves",
    "load_codes",
    "load_exponents",
    "load_rows",
    "load_sums",
    "load_words",
    "put_rows",
    "store_rows",
    "store_sums",
    "vectors_of",
    "zeros",
]

COLUMNS = 8
_LAYOUT = plgpu.Layout.WGMMA


def zeros(rows: int) -> Any:
    """Return sums [64, rows] of nothing."""
    return plgpu.layout_cast(jnp.zeros((OUTPUTS, rows), jnp.float32), _LAYOUT)


def load_words(
    ref: Any, places: tuple[Any, Any], column: Any, *, count: int, num_outputs: int, is_gated: bool
) -> tuple[Any, ...]:
    """Return ref[base + outputs, column : column + count], see `scaling.load_words`.

    `places` are the base and the first output of a matrix. Up is `num_outputs` behind gate, if there is one. Beyond the
    last output that is repeated.
    """

    def output(half: int, base: Any, first: Any) -> Any:
        return arith.addi(base, output_of(first, half, num_outputs=num_outputs, is_gated=is_gated))

    return scaling.load_words(ref, places, column, count=count, output=output)


def load_exponents(ref: Any, places: tuple[Any, Any], block: Any, *, num_outputs: int, is_gated: bool) -> Any:
    """Return the exponents of a block of columns, see `product_of_mxfp4.load_exponents` and `load_words`."""

    def output(half: int, base: Any, first: Any) -> Any:
        return arith.addi(base, output_of(first, half, num_outputs=num_outputs, is_gated=is_gated))

    return product_of_mxfp4.load_exponents(ref, places, block, output=output)


def output_of(first: Any, half: int, *, num_outputs: int, is_gated: bool) -> Any:
    """Return the index of a thread's output of a matrix, or of gate and up, in a half of its registers."""
    output = arith.minsi(arith.addi(first, own_output(half, is_gated=is_gated)), const_i32(num_outputs - 1))
    return arith.addi(output, const_i32(num_outputs * half if is_gated else 0))


def store_sums(ref: Any, sums: Any, part: Any) -> None:
    """Store sums [64, M] in shared memory as ref[part], [M / 8, 128, 4], as the threads have them."""

    def run(_, ref, sums, part) -> None:
        for chunk in range(sums.shape[1] // COLUMNS):
            values = [value for half in range(2) for value in elements_of(sums.registers[at(chunk, half)], 2)]
            vector.store(vector_of(values), ref, _place(part, chunk))

    inline(run, REF, _LAYOUT, SCALAR)(ref, sums, splat(part))


def load_sums(ref: Any, part: Any, *, rows: int) -> Any:
    """Return sums [64, rows] that `store_sums` has stored."""
    out = plgpu.ShapeDtypeStruct((OUTPUTS, rows), jnp.float32, layout=_LAYOUT)

    def run(_, ref, part):
        registers = registers_for(rows)
        for chunk in range(rows // COLUMNS):
            found = vector.load(ir.VectorType.get((4,), ir.F32Type.get()), ref, _place(part, chunk))
            values = elements_of(found, 4)
            for half in range(2):
                registers[at(chunk, half)] = vector_of(values[2 * half : 2 * half + 2])
        return matrix_of(registers)

    return inline(run, REF, SCALAR, out=out)(ref, splat(part))


def _place(part: Any, chunk: int) -> list[Any]:
    return [as_index(i) for i in (value_of(part), const_i32(chunk), thread(), const_i32(0))]


def store_rows(ref: Any, y: Any, row: Any, num_rows: Any, first: Any, *, is_gated: bool) -> None:
    """Store y [64, 8], transposed, into ref[row : row + num_rows, outputs from `first` on], as far as ref has them.

    With `is_gated` the first of both halves is stored.
    """

    def run(_, ref, y, row, num_rows, first) -> None:
        _, quarter = row_and_quarter()
        for half in range(1 if is_gated else 2):
            output = arith.addi(value_of(first), own_output(half, is_gated=is_gated))
            has_output = arith.cmpi(arith.CmpIPredicate.slt, output, const_i32(ref.type.shape[1]))
            values = y.registers[at(0, half)]
            for i in range(2):
                own = arith.addi(arith.muli(quarter, const_i32(2)), const_i32(i))
                is_there = arith.andi(has_output, arith.cmpi(arith.CmpIPredicate.slt, own, value_of(num_rows)))
                with utils.when(is_there):
                    value = vector_of([vector.extract(values, [], [i])])
                    vector.store(value, ref, [as_index(arith.addi(value_of(row), own)), as_index(output)])

    arguments = map(splat, (row, num_rows, first))
    inline(run, REF, _LAYOUT, *[SCALAR] * 3)(ref, y.astype(ref.dtype), *arguments)


def own_output(half: int, *, is_gated: bool) -> Any:
    """Return a lane's output among those of its warpgroup, in a half of its registers."""
    row, _ = row_and_quarter()
    if not is_gated:
        return arith.addi(row, const_i32(8 * half))
    return arith.addi(arith.muli(arith.divui(row, const_i32(16)), const_i32(8)), arith.remui(row, const_i32(16)))
