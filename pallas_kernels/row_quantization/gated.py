"""The body of the kernel that scales, gates and rounds the sums of gate and up. See sm90.py.

The warpgroups of a thread block divide the columns of a row. The next row is on its way while this one is computed; the
scales of outputs, which are twice as large as a row of sums, stay in shared memory if a block has several rows.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.device.codes import Code
from pallas_kernels.device.rows import kept, row_layout, store_warp_maxima
from pallas_kernels.row_quantization.rounding import codes_of, scale_of

COLUMNS = 256
"""Columns of which a row has a multiple: two values for each thread of a warpgroup."""
MAX_WARPGROUPS = 4
MAX_VALUES = 96
"""Columns of a thread, three rows of which are in its registers at a time."""
MAX_GATED = 128 * 56 * MAX_WARPGROUPS
"""Columns of a row at most."""


class Problem(NamedTuple):
    """What is known when the kernel is compiled."""

    num_rows: int
    size: int
    """Columns of gate, and of up."""
    warpgroups: int
    num_blocks: int
    holds_scales: bool
    """True if shared memory has the scales of outputs."""
    code: Code
    activation: Callable[[Array], Array]
    dtype: Any
    """Type that values are rounded to before they become codes."""
    interpret: bool

    @property
    def holds_two_rows(self) -> bool:
        """True if registers have room for the sums of the next row while this one's are multiplied."""
        return self.size <= 160 * 128


def num_warpgroups(size: int) -> int | None:
    """Return how many warpgroups divide a row of so many columns, or None if the kernel does not take it."""
    fits = [
        warpgroups
        for warpgroups, most in ((4, 56), (2, MAX_VALUES), (1, MAX_VALUES))
        if size % (COLUMNS * warpgroups) == 0 and size // (128 * warpgroups) <= most
    ]
    return max(fits, default=None)


def kernel(problem: Problem, sums, row_scales, output_scales, codes, scales, held_scales, maxima, barrier) -> None:
    """Run each warpgroup of the mesh axis "wg", of each thread block of "block".

    `sums` is [M, 2, F], `output_scales` and `held_scales` are [2, F], `maxima` is [2, warps]: of rows in turns, so that
    one barrier a row is enough.
    """
    wg, block = lax.axis_index("wg"), lax.axis_index("block")
    piece = problem.size // problem.warpgroups
    columns, load = pl.ds(wg * piece, piece), functools.partial(plgpu.load, layout=row_layout(piece))
    keep = functools.partial(kept, interpret=problem.interpret)
    num_turns = lax.div(problem.num_rows - 1 - block, problem.num_blocks) + 1

    if problem.holds_scales:
        for half in range(2):
            held_scales[half, columns] = load(output_scales.at[half, columns])

    def sums_of(row) -> tuple[Any, Any]:
        return load(sums.at[row, 0, columns]), load(sums.at[row, 1, columns])

    def one_row(turn, loaded):
        row = block + turn * problem.num_blocks
        next_row = lax.min(row + problem.num_blocks, problem.num_rows - 1)
        following = sums_of(next_row) if problem.holds_two_rows else None
        row_scale = row_scales[row]

        def scaled(half: int):
            factors = load((held_scales if problem.holds_scales else output_scales).at[half, columns])
            return loaded[half].astype(jnp.float32) * row_scale * factors

        values = keep((problem.activation(scaled(0)) * scaled(1)).astype(problem.dtype))  # they are widened twice
        following = sums_of(next_row) if following is None else following
        own = maxima.at[lax.rem(turn, 2)]
        store_warp_maxima(own, jnp.abs(values.astype(jnp.float32)), wg, interpret=problem.interpret)
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        values = keep(values)
        scale = scale_of(functools.reduce(jnp.maximum, [own[i] for i in range(4 * problem.warpgroups)]), problem.code)
        codes[row, columns] = codes_of(values.astype(jnp.float32), scale, problem.code)

        @pl.when(wg == 0)
        def _():
            scales[row] = scale

        return following

    lax.fori_loop(0, num_turns, one_row, sums_of(block))
