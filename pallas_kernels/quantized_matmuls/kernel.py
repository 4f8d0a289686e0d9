"""The body of the kernel: the work of its CTAs. See sm90.py.

The work of a matmul is divided into units: a tile of 256 outputs by a step of K. Each CTA takes an equal run of them,
in the order of tiles and then of K, so that it has a fragment of one or two tiles and all units in between. CTAs that
have added up a part of a tile store it in memory; one of them, or for many rows each of them for some rows, waits for
all parts, adds them up in order and finishes that piece of the tile. A word that is not there yet has a value that no
sum has, so that waiting for parts is nothing but loading them.

In a CTA, one warpgroup streams the weights of all its units through a ring in shared memory and never waits for other
CTAs; one copies rows, as soon as the matmul before has finished them all; four multiply, each 64 outputs of a tile.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import counters
from pallas_kernels.device.products import wait_until_free
from pallas_kernels.quantized_matmuls.computing import compute
from pallas_kernels.quantized_matmuls.copying import copy_rows, copy_weights
from pallas_kernels.quantized_matmuls.problem import (
    COMPUTE_REGISTERS,
    NUM_COMPUTE,
    ROW_REGISTERS,
    WEIGHT_REGISTERS,
    Block,
    Problem,
    Shared,
)

_int = jnp.int32


def kernel(problem: Problem, gmem: Mapping[str, Any], smem: Shared) -> None:
    """Run each warpgroup (mesh axis "wg") of each CTA (axis "cta")."""
    warpgroup = lax.axis_index("wg")
    block = Block(problem, gmem, smem, lax.axis_index("cta"), warpgroup)

    @pl.when(warpgroup < NUM_COMPUTE)
    def _():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        first = _int(0)
        for index, matmul in enumerate(problem.matmuls):
            first = compute(block, index, matmul, first)

    @pl.when(warpgroup == NUM_COMPUTE)
    def _():
        plgpu.set_max_registers(WEIGHT_REGISTERS, action="decrease")
        first = _int(0)
        for matmul in problem.matmuls:
            first = copy_weights(block, matmul, first)
        wait_until_free(smem.w_free, problem.w_slots, first, first + problem.w_slots)

    @pl.when(warpgroup == NUM_COMPUTE + 1)
    def _():
        plgpu.set_max_registers(ROW_REGISTERS, action="decrease")
        first = _int(0)
        if len(problem.matmuls) > 1:

            @pl.when(block.cta == 0)
            def _():
                counters.clear(gmem["last_counter"].at[0], interpret=False)

        for index, matmul in enumerate(problem.matmuls):
            first = copy_rows(block, index, matmul, first)
        wait_until_free(smem.x_free, problem.x_slots, first, first + problem.x_slots)
