"""Registers of a matrix in WGMMA layout: which values are a lane's, when a wgmma has written them, storing some."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.mlir import REF, as_index, const_i32, inline
from pallas_kernels.jax_internals import arith, vector

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
    c, thread = const_i32, mgpu.utils.thread_idx()
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
    first_row, quarter = row_and_quarter()
    first_column = arith.muli(quarter, const_i32(2))
    for half in range(2):
        row = arith.addi(first_row, const_i32(8 * half))
        with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.ult, row, const_i32(num_rows))):
            for matrix in range(num_columns // 8):
                indices = (row, arith.addi(first_column, const_i32(8 * matrix)))
                vector.store(x.registers[at(matrix, half)], ref, list(map(as_index, indices)))


def halves(x: Any) -> tuple[Any, Any]:
    """Return [64, 8] of x's first halves, each twice, and of its second halves."""

    def run(_, x):
        return tuple(chunk_of([x.registers[at(0, half)]] * 2) for half in range(2))

    return inline(run, plgpu.Layout.WGMMA, out=(CHUNK, CHUNK))(x)


def chunk_of(registers: list[Any]) -> Any:
    """Return eight columns of which a thread has these pairs of values, in its first and its second row."""
    values = registers_for(8)
    for half, register in enumerate(registers):
        values[at(0, half)] = register
    return matrix_of(values)


def registers_for(columns: int, *, rows: int = 64) -> np.ndarray:
    """Return room for a thread's registers of a matrix, see `at`."""
    return np.empty((rows // 64, columns // 8, 1, 1, 2, 1, 1, 1, 1), dtype=object)


def matrix_of(registers: np.ndarray, *, is_signed: bool | None = None) -> Any:
    """Return the matrix of these registers; `is_signed` is that of integers, None for floats."""
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=is_signed)


def at(chunk: int, half: int) -> tuple[int, ...]:
    """Return where the registers have a thread's values of its first or second row, of eight columns."""
    return 0, chunk, 0, 0, half, 0, 0, 0, 0
