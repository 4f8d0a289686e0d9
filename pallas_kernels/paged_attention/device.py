"""What the Hopper kernel needs and Pallas does not offer: counters in global memory that are no semaphores of Pallas's
(which a memset before every call would have to clear), and the first rows of a matrix that lies in registers.

Each acts as one warpgroup. The interpreter knows none of them: `interpret` swaps in what it can do.
"""

from collections.abc import Callable
from typing import Any, cast

import jax.numpy as jnp
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, vector
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.registers import row_and_quarter

_REF = plgpu.RefType()
_SCALAR = plgpu.Layout.WG_SPLAT((128,))


def signal(counter, *, interpret: bool) -> None:
    """Add 1 to a counter, after whatever this warpgroup has written to global memory."""
    if not interpret:
        _signal(counter)


def wait(counter, value, *, interpret: bool) -> None:
    """Until a counter has reached `value`, which is taken from it again; and what was written before it is seen."""
    if not interpret:  # it runs thread blocks one after the other
        _wait(counter, jnp.full((128,), value))


def store_first_rows(ref, x, *, interpret: bool) -> None:
    """The first rows of a [64, columns] float32 matrix in WGMMA layout, as many as the ref in global memory has."""
    if interpret:
        ref[...] = x[: ref.shape[0]]
    else:
        _store_first_rows(ref, x)


def _inline(*arg_types: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return cast(Any, plgpu.inline_mgpu(arg_types=arg_types))


@_inline(_REF)
def _signal(_, counter) -> None:
    mgpu.warpgroup_barrier()
    mgpu.utils.SemaphoreRef(mgpu.utils.memref_ptr(counter)).signal(1, memory_scope="gpu")


@_inline(_REF, _SCALAR)
def _wait(_, counter, value) -> None:
    [value] = value.registers.flat
    mgpu.utils.SemaphoreRef(mgpu.utils.memref_ptr(counter)).wait(value, memory_scope="gpu")


@_inline(_REF, plgpu.Layout.WGMMA)
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
                place = (row, arith.addi(first_column, c(8 * matrix)))
                values = x.registers[0, matrix, 0, 0, half, 0, 0, 0, 0]
                vector.store(values, ref, [arith.index_cast(ir.IndexType.get(), index) for index in place])
