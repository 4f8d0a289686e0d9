"""The warpgroups that copy: one streams weights, one rows, see kernel.py."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import counters
from pallas_kernels.device.product_of_codes import BYTES, interleave_rows
from pallas_kernels.device.products import wait_until_free
from pallas_kernels.quantized_matmuls import device
from pallas_kernels.quantized_matmuls.problem import NUM_COMPUTE, TILE, Block, Matmul, units

_int = jnp.int32


def copy_weights(block: Block, matmul: Matmul, first: Any) -> Any:
    """Copy the weights of all units of the CTA, from step `first` of the ring on; return the step after them."""
    problem, smem, weight = block.problem, block.smem, block.gmem[matmul.name]
    start, end = units(block, matmul)

    def copy(unit, _):
        step = first + unit - start
        slot = lax.rem(step, _int(problem.w_slots))
        wait_until_free(smem.w_free, problem.w_slots, step, step + 1)
        tile, k = lax.div(unit, _int(matmul.steps)), lax.rem(unit, _int(matmul.steps))
        ring, full = smem.weight_boxes.at[slot], smem.w_full.at[slot]
        half = TILE // 2  # two copies a step, whatever the matmul, since they arrive at the same barrier
        columns = pl.ds(k * BYTES, BYTES)
        for part in range(2):
            if matmul.is_gated:
                source = weight.at[part, pl.ds(tile * half, half), columns]
            else:
                source = weight.at[pl.ds(tile * TILE + part * half, half), columns]
            plgpu.copy_gmem_to_smem(source, ring.at[pl.ds(part * half, half)], full)

    lax.fori_loop(start, end, copy, None)
    return first + end - start


def copy_rows(block: Block, index: int, matmul: Matmul, first: Any) -> Any:
    """Copy the rows of all units, once the matmul before is finished, and compute the factors that they need."""
    problem, smem, x = block.problem, block.smem, block.gmem[matmul.x]
    start, end = units(block, matmul)

    ahead = problem.x_slots - 1
    widest = smem.rows.shape[-1]

    def ring(slot):
        """Return the columns of a slot that the matmul uses; a slice of all would not be padded by TMA."""
        return smem.rows.at[slot] if widest == matmul.block_k else smem.rows.at[slot, :, pl.ds(0, matmul.block_k)]

    def copy(unit, _):
        step = first + unit - start
        slot = lax.rem(step, _int(problem.x_slots))
        wait_until_free(smem.x_free, problem.x_slots, step, step + 1)
        k = pl.ds(lax.rem(unit, _int(matmul.steps)) * matmul.block_k, matmul.block_k)
        # A start that is not static makes TMA fill in the rows that pad x to a multiple of 8.
        rows = pl.ds(block.cta * 0, problem.rows)
        plgpu.copy_gmem_to_smem(x.at[rows, k], ring(slot), smem.x_full.at[slot])

    def interleave(unit, _):
        slot = lax.rem(first + unit - start, _int(problem.x_slots))
        plgpu.barrier_wait(smem.x_full.at[slot])
        interleave_rows(smem.rows, slot, matmul.scaling.code)
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem.x_ready.at[slot])

        @pl.when(unit + ahead < end)
        def _():
            copy(unit + ahead, None)

    if index:

        @pl.when(start < end)
        def _():
            block.wait_for(index - 1)

    lax.fori_loop(start, lax.min(start + ahead, end), copy, None)
    if index:

        @pl.when(start < end)
        def _():
            if matmul.squares is not None:
                squares = block.gmem[matmul.squares]

                @pl.loop(0, problem.num_chunks)
                def _(chunk):
                    device.store_reciprocal_roots(
                        smem.factors.at[index],
                        squares,
                        chunk,
                        smem.scratch.at[NUM_COMPUTE],
                        size=matmul.scaling.depth,
                        eps=problem.eps,
                    )

            plgpu.barrier_arrive(smem.ready.at[index])

    if index > 1:

        @pl.when(block.cta == 0)
        def _():  # all that waited have seen it, or the matmul before this one would not be finished
            counters.clear(block.finished(index - 2), interpret=False)

    lax.fori_loop(start, end, interleave, None)
    return first + end - start
