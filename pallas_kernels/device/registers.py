"""Registers of a matrix in WGMMA layout: which values are a lane's, when a wgmma has written them, storing some."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.mlir import REF, inline
from pallas_kernels.jax_internals import arith, ir, vector

CHUNK = plgpu.ShapeDtypeStruct((64, 8), jnp.float32, layout=plgpu.Layout.WGMMA)
"""Eight columns of such a matrix."""


def written[Sums](sums: Sums) -> Sums:
    """Return the sums of wgmmas right after a wait for them, such that nothing reads them before.

    The wait touches no register: without this LLVM may move later reads above it, as `ptx.used_in_flight` explains.
    """
    return lax.optimization_barrier(sums)


def row_and_quarter() -> tuple[Any, Any]:
    """Return a lane's first row, and which quarter of a row it has.

    A warp has 16 rows in 8 x 8 matrices, and a lane two columns of a row in each of them.
    """
    i32 = ir.IntegerType.get_signless(32)

    def c(value: int):
        return mgpu.c(value, i32)

    thread = mgpu.utils.thread_idx()
    warp = arith.remui(arith.divui(thread, c(32)), c(4))
    lane = arith.remui(thread, c(32))
    return arith.addi(arith.muli(warp, c(16)), arith.divui(lane, c(4))), arith.remui(lane, c(4))


def store_first_rows(ref, x, *, interpret: bool) -> None:
    """Store the first rows of a [64, columns] float32 matrix in WGMMA layout, as many as the ref in global memory
    has.
    """
    if interpret:
        ref[...] = x[: ref.shape[0]]
    else:
        inline(_store_first_rows, REF, plgpu.Layout.WGMMA)(ref, x)


def _store_first_rows(_, ref, x) -> None:
    num_rows, num_columns = ref.type.shape
    i32 = ir.IntegerType.get_signless(32)

    def c(value: int):
        return mgpu.c(value, i32)

    first_row, quarter = row_and_quarter()
    first_column = arith.muli(quarter, c(2))
    for half in range(2):
        row = arith.addi(first_row, c(8 * half))
        with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.ult, row, c(num_rows))):
            for matrix in range(num_columns // 8):
                indices = (row, arith.addi(first_column, c(8 * matrix)))
                values = x.registers[0, matrix, 0, 0, half, 0, 0, 0, 0]
                vector.store(values, ref, [arith.index_cast(ir.IndexType.get(), index) for index in indices])


def halves(x: Any) -> tuple[Any, Any]:
    """Return [64, 8] of x's first halves, each twice, and of its second halves."""

    def run(_, x):
        return tuple(chunk_of([x.registers[at(0, half)]] * 2) for half in range(2))

    return inline(run, plgpu.Layout.WGMMA, out=(CHUNK, CHUNK))(x)


def chunk_of(registers: list[Any]) -> Any:
    """Return eight columns of which a thread has these pairs of values, in its first and its second row."""
    values = np.empty((1, 1, 1, 1, 2, 1, 1, 1, 1), dtype=object)
    for half, register in enumerate(registers):
        values[at(0, half)] = register
    return mgpu.FragmentedArray(_registers=values, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def at(chunk: int, half: int) -> tuple[int, ...]:
    """Return where the registers have a thread's values of its first or second row, of eight columns."""
    return 0, chunk, 0, 0, half, 0, 0, 0, 0
