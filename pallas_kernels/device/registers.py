"""Registers of a matrix in WGMMA layout: which values are a lane's, and when a wgmma has written them."""

from typing import Any

from jax import lax
from jax.experimental.mosaic import gpu as mgpu

from pallas_kernels.jax_internals import arith, ir


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
