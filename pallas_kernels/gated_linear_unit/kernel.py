"""The body of the Hopper kernel of the gated linear unit: the work of a CTA's warpgroups. See sm90.py.

An item is a tile of rows for each CTA of a cluster, times a tile of outputs common to them. The last warpgroup copies
rows and weights into a ring in shared memory, as far ahead as it has room; each of the others multiplies half of the
tile's rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.device.registers import written

UNITS = 2
"""Computing warpgroups."""
COLUMNS = 64
"""Columns of K per step of the ring: 16-bit values in the 128 bytes of the swizzle."""
ROWS = 64
"""Rows of a tile per computing warpgroup, as multiplied by one wgmma instruction."""
STAGES = 4
"""Steps that the ring holds."""

_int = jnp.int32


class Problem(NamedTuple):
    """Compile-time parameters of the kernel."""

    outputs: int
    """Outputs of a tile, of gate and of up each."""
    cluster: int
    band: int
    piece: int
    """Columns of the result that are stored at a time."""
    num_rows: int
    num_outputs: int
    depth: int
    num_groups: int
    """Clusters that run."""
    activation: Callable[[Array], Array]
    interpret: bool

    @property
    def pieces(self) -> int:
        """Number of pieces of a warpgroup's result."""
        return self.outputs // self.piece

    @property
    def row_tiles(self) -> int:
        """Number of row tiles of clusters."""
        return -(-self.num_rows // (UNITS * ROWS * self.cluster))

    @property
    def output_tiles(self) -> int:
        """Tiles that a row's outputs are cut into."""
        return -(-self.num_outputs // self.outputs)

    @property
    def steps(self) -> int:
        """Number of steps per item."""
        return self.depth // COLUMNS


class Global(NamedTuple):
    """Arrays in global memory."""

    x: Any
    weight: Any
    """[2, N, K]"""
    y: Any


class Shared(NamedTuple):
    """Arrays and barriers in shared memory.

    The rows and the result have two views of the same bytes each: one as wgmma and registers use them, and one as
    boxes, which may end at any row and column.
    """

    x: Any
    x_boxes: Any
    weight: Any
    out: Any
    out_boxes: Any
    full: Any
    free: Any


def kernel(problem: Problem, gmem: Global, smem: Shared) -> None:
    """Run each warpgroup (mesh axis "wg") of CTA "rank" of cluster "group"."""
    group, rank, wg = (lax.axis_index(name) for name in ("group", "rank", "wg"))
    num_items = problem.row_tiles * problem.output_tiles
    num_own = lax.div(num_items - group + (problem.num_groups - 1), _int(problem.num_groups))

    def for_each_item(visit) -> None:
        """`visit(row, output, step)`: the tile's first ones, and how many steps there were before."""

        def turn(index, _):
            row_tile, output_tile = _item(problem, group + index * problem.num_groups)
            row = (row_tile * problem.cluster + rank) * (UNITS * ROWS)
            visit(row, output_tile * problem.outputs, index * problem.steps)

        lax.fori_loop(_int(0), num_own, turn, None)

    @pl.when(wg == UNITS)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        for_each_item(lambda row, output, step: _copy(problem, gmem, smem, row, output, step))
        for slot in range(STAGES):
            # no barrier may be left pending, and no CTA may end before its peers
            plgpu.barrier_wait(smem.free.at[slot])

    @pl.when(wg < UNITS)
    def _():
        plgpu.set_max_registers(232, action="increase")
        for slot in range(STAGES):
            plgpu.barrier_arrive(smem.free.at[slot])
        for_each_item(lambda row, output, step: _compute(problem, gmem, smem, wg, row, output, step))
        plgpu.wait_smem_to_gmem(0)


def _item(problem: Problem, index) -> tuple[Any, Any]:
    """Tile of rows and tile of outputs: a band of rows goes through all outputs before the next band.

    So what runs at a time is about as high as wide, and its rows and weights are read from the L2.
    """
    band_items = problem.band * problem.output_tiles
    band = lax.div(index, _int(band_items))
    within = index - band * band_items
    band_size = lax.min(_int(problem.row_tiles) - band * problem.band, _int(problem.band))
    return band * problem.band + lax.rem(within, band_size), lax.div(within, band_size)


def _copy(problem: Problem, gmem: Global, smem: Shared, row, output, first_step) -> None:
    """Copy the rows and weights of an item. TMA fills in zeros beyond the last row or output."""
    shared = None if problem.cluster == 1 or problem.interpret else "rank"

    def one_step(k, _):
        slot = lax.rem(first_step + k, _int(STAGES))
        full, columns = smem.full.at[slot], pl.ds(k * COLUMNS, COLUMNS)
        plgpu.barrier_wait(smem.free.at[slot])
        for unit in range(UNITS):
            rows = pl.ds(row + unit * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(gmem.x.at[rows, columns], smem.x_boxes.at[slot, unit], full)
        for half in range(2):
            plgpu.copy_gmem_to_smem(
                gmem.weight.at[half, pl.ds(output, problem.outputs), columns],
                smem.weight.at[slot, pl.ds(half * problem.outputs, problem.outputs)],
                full,
                collective_axes=shared,
            )

    lax.fori_loop(_int(0), _int(problem.steps), one_step, None)


def _compute(problem: Problem, gmem: Global, smem: Shared, wg, row, output, first_step) -> None:
    """Compute a warpgroup's half of an item."""

    def multiply(acc):
        return _multiply(problem, smem, wg, first_step, acc)

    sums = pl.run_scoped(multiply, plgpu.ACC((ROWS, 2 * problem.outputs), jnp.float32))
    _store(problem, gmem, smem, sums, wg, row + wg * ROWS, output)


def _multiply(problem: Problem, smem: Shared, wg, first_step, acc) -> Float[Array, "rows N"]:
    """Compute the sums of an item. A step's slot is released when the products of the next step have been issued."""

    def one_step(k, _):
        step = first_step + k
        slot = lax.rem(step, _int(STAGES))
        plgpu.barrier_wait(smem.full.at[slot])
        plgpu.wgmma(acc, smem.x.at[slot, wg], smem.weight.at[slot].transpose((1, 0)))
        plgpu.wgmma_wait(1)

        @pl.when(k > 0)
        def _():
            plgpu.barrier_arrive(smem.free.at[lax.rem(step + (STAGES - 1), _int(STAGES))])

    lax.fori_loop(_int(0), _int(problem.steps), one_step, None)
    sums = written(acc[...])
    plgpu.barrier_arrive(smem.free.at[lax.rem(first_step + (problem.steps - 1), _int(STAGES))])
    return sums


def _store(problem: Problem, gmem: Global, smem: Shared, sums, wg, row, output) -> None:
    """Store a warpgroup's result, piece by piece. TMA omits what is beyond the last row or output."""
    for index in range(problem.pieces):
        right = index * problem.piece
        gate, up = (sums[:, start : start + problem.piece] for start in (right, problem.outputs + right))
        plgpu.wait_smem_to_gmem(problem.pieces - 1, wait_read_only=True)  # of this piece of the item before
        smem.out[wg, index] = (problem.activation(gate) * up).astype(gmem.y.dtype)
        plgpu.commit_smem()
        window = gmem.y.at[pl.ds(row, ROWS), pl.ds(output + right, problem.piece)]
        plgpu.copy_smem_to_gmem(smem.out_boxes.at[wg, index], window)
