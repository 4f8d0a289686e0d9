"""What both kernels of `recurrent_chunks` do on the device: matrices as sums of bfloat16, their products, and
transposed loads and stores.

A float32 matrix is taken as the sum of two bfloat16 ones, so that products have some 16 bits at a third of the tensor
cores' rate.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.mlir import REF, SCALAR, as_index, const_i32, inline, splat, value_of
from pallas_kernels.device.registers import at, matrix_of, registers_for, row_and_quarter, written
from pallas_kernels.device.swizzled import tiled
from pallas_kernels.jax_internals import arith, ir, llvm, memref, scf, vector

CHUNK = 64
"""Tokens of a chunk, and the values of a head that a CTA has: what one wgmma multiplies."""
LAYOUT = plgpu.Layout.WGMMA
TILES = tiled(CHUNK)
"""Transforms of [64, 64] of 16 bits in shared memory for wgmma; without the first the same bytes can be copied from any
token."""


NUM_TERMS = 2
"""Bfloat16 matrices whose sum is a float32 one."""

PAIRS = ((0, 0), (0, 1), (1, 0))
"""The terms of two matrices that are multiplied: not the small ones with each other."""


def split(x: Any) -> list[Any]:
    """Return the terms of x: x rounded, and what is left of it."""
    large = x.astype(jnp.bfloat16)
    return [large, (x - large.astype(jnp.float32)).astype(jnp.bfloat16)]


def split_by_xla(x: jax.Array) -> jax.Array:
    """Return `split`, stacked. XLA would drop a conversion forth and back, but not `reduce_precision`."""
    terms = []
    for _ in range(NUM_TERMS):
        term = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        terms.append(term.astype(jnp.bfloat16))
        x = x - term
    return jnp.stack(terms)


def zeros(num_columns: int = CHUNK) -> Any:
    """Return 64 rows of zeros in registers."""
    return plgpu.layout_cast(jnp.zeros((CHUNK, num_columns), jnp.float32), LAYOUT)


class Product(NamedTuple):
    """A sum of products of [64, 64], in registers or shared memory, and 64 rows in shared memory, one for each part of
    what is summed over.

    Attributes:
        left: the terms of each part, or refs to them.
        right: refs to the terms of each part.
        init: what the sum is added to; None is zeros.
    """

    left: Sequence[Sequence[Any]]
    right: Sequence[Sequence[Any]]
    init: Any = None


def products(*wanted: Product, interpret: bool, meanwhile: Callable[[], Any] | None = None) -> list[Any]:
    """Return sums of products, which are computed one behind the other without a wait between them, and behind them the
    matrix that `meanwhile` makes while they are computed.
    """
    if interpret:
        return [*map(_interpreted, wanted), *([] if meanwhile is None else [meanwhile()])]

    def run(refs: Any) -> None:
        for ref, each in zip(refs, wanted, strict=False):
            for left, right in zip(each.left, each.right, strict=True):
                for i, j in PAIRS:
                    plgpu.wgmma(ref, left[i], right[j])
        if meanwhile is not None:
            refs[-1][...] = meanwhile()

    inits = [plgpu.ACC.init(zeros(each.right[0][0].shape[1]) if each.init is None else each.init) for each in wanted]
    results = cast(Any, pl.run_state(run))((*inits, *([] if meanwhile is None else [zeros()])))
    return list(written(results))


def _interpreted(wanted: Product) -> Any:
    """Return a sum of products for the interpreter, which has no wgmma with an operand in registers."""
    total = zeros(wanted.right[0][0].shape[1]) if wanted.init is None else wanted.init
    for left, right in zip(wanted.left, wanted.right, strict=True):
        for i, j in PAIRS:
            rows = right[j][...].astype(jnp.float32)
            total = total + jnp.dot(left[i][...].astype(jnp.float32), rows, precision=lax.Precision.HIGHEST)
    plgpu.commit_smem()  # as wgmma reads: ordered before copies that follow
    return total


def load_transposed(ref: Any, last: Any, *, interpret: bool) -> Any:
    """Return [64, 64] of which column i is ref[min(i, last)], a row of 64 numbers in global memory.

    The eight lanes with the same column read 32 bytes together.
    """
    if interpret:
        return jnp.stack([ref[lax.min(jnp.int32(i), last)] for i in range(CHUNK)], axis=1)
    out = plgpu.ShapeDtypeStruct((CHUNK, CHUNK), jnp.float32, layout=LAYOUT)
    return inline(_load_transposed, REF, SCALAR, out=out)(ref, splat(last))


def store_transposed(ref: Any, x: Any, num: Any, *, interpret: bool) -> None:
    """Store the first `num` columns of x[64, 64] as rows of the ref in global memory."""
    if interpret:

        def store(i: Any, _: Any) -> None:
            ref[i] = lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False)

        lax.fori_loop(jnp.int32(0), num, store, None)
    else:
        inline(_store_transposed, REF, LAYOUT, SCALAR)(ref, x, splat(num))


def _places() -> Any:
    """Yield the index of each register of a thread, its row, its columns if the thread had the first ones of eight, and
    how far on they are.
    """
    first_row, quarter = row_and_quarter()
    ahead = _opaque(arith.muli(quarter, const_i32(2)))
    for matrix in range(CHUNK // 8):
        for half in range(2):
            columns = [8 * matrix + i for i in range(2)]
            yield at(matrix, half), arith.addi(first_row, const_i32(8 * half)), columns, ahead


def _opaque(value: Any) -> Any:
    """Return a number of which LLVM knows nothing: it would keep what is computed from it in registers in a loop."""
    return llvm.inline_asm(value.type, [value], "mov.b32 $0, $1;", "=r,r", has_side_effects=True)


def _load_transposed(_: Any, ref: Any, last: Any) -> Any:
    """Columns of a whole chunk are at constant distances, which takes no registers for where they are."""
    last = value_of(last)
    pair = ir.VectorType.get((2,), ir.F32Type.get())

    def load(is_whole: bool) -> list[Any]:
        loaded = []
        for _, row, columns, ahead in _places():
            places = [arith.addi(ahead, const_i32(column)) for column in columns]
            if not is_whole:
                places = [arith.minsi(place, last) for place in places]
            values = [memref.load(ref, [as_index(place), as_index(row)]) for place in places]
            loaded.append(vector.from_elements(pair, values))
        return loaded

    is_whole = arith.cmpi(arith.CmpIPredicate.sge, last, const_i32(CHUNK - 1))
    branch = cast(Any, scf.IfOp(is_whole, [pair] * (CHUNK // 4), has_else=True))
    for block, of_whole in ((branch.then_block, True), (branch.else_block, False)):
        with ir.InsertionPoint(block):
            scf.yield_(load(of_whole))
    registers = registers_for(CHUNK)
    for (index, *_), value in zip(_places(), branch.results, strict=True):
        registers[index] = value
    return matrix_of(registers)


def _store_transposed(_: Any, ref: Any, x: Any, num: Any) -> None:
    num = value_of(num)

    def store(is_whole: bool) -> None:
        for index, row, columns, ahead in _places():
            for i, column in enumerate(columns):
                place = arith.addi(ahead, const_i32(column))
                value = vector.extract(x.registers[index], [], [i])
                if is_whole:
                    memref.store(value, ref, [as_index(place), as_index(row)])
                    continue
                with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.slt, place, num)):
                    memref.store(value, ref, [as_index(place), as_index(row)])

    is_whole = arith.cmpi(arith.CmpIPredicate.sge, num, const_i32(CHUNK))
    branch = cast(Any, scf.IfOp(is_whole, has_else=True))
    for block, of_whole in ((branch.then_block, True), (branch.else_block, False)):
        with ir.InsertionPoint(block):
            store(of_whole)
            scf.yield_([])
