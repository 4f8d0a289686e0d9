"""The body of the Hopper kernel of the grouped matmul: the work of a CTA's warpgroups. See sm90.py.

An item is a tile of the plan's rows times a tile of outputs. The last warpgroup copies weights and rows into a ring in
shared memory, as far ahead as it has room; each of the others multiplies 64 of the tile's rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.device.items import Block, Item
from pallas_kernels.device.registers import written
from pallas_kernels.grouped_matmul.tiles import ROWS, Plan

COLUMNS = 64  # 16-bit values in the 128 bytes that the swizzle mixes
_LAYOUT = plgpu.Layout.WGMMA

_int = jnp.int32


class Problem(NamedTuple):
    """Compile-time parameters of the kernel."""

    outputs: int
    """Outputs of each half (gate, up) of a tile."""
    halves: int
    """Gate and up, or one."""
    block_k: int
    stages: int
    units: int
    """Computing warpgroups."""
    depth: int
    num_outputs: int
    boxes: tuple[int, ...]
    """Numbers of rows that are copied at a time, the fewest that hold all that a warpgroup needs."""
    num_blocks: int
    activation: Callable[[Array, Array], Array] | None
    interpret: bool

    @property
    def tile(self) -> int:
        """Outputs of a tile, of each half."""
        return self.outputs

    @property
    def output_tiles(self) -> int:
        """Tiles that a row's outputs are cut into."""
        return -(-self.num_outputs // self.outputs)

    @property
    def steps(self) -> int:
        """Number of steps per item."""
        return -(-self.depth // self.block_k)

    @property
    def parts(self) -> int:
        """Number of parts in which the rows of a step are copied."""
        return self.block_k // COLUMNS


class Global(NamedTuple):
    """Arrays in global memory."""

    plan: Plan
    x: Any
    weight: Any
    """Weights, [X * halves, N, K]."""
    bias: Any
    """Bias, [X * halves, N] with N padded to whole tiles, or None."""
    y: Any


class Shared(NamedTuple):
    """Arrays and barriers in shared memory.

    The rows and the result have two views of the same bytes each: one as wgmma and registers use them, and one as boxes
    of 64 columns, which may be copied from and to any row.
    """

    x: Any
    x_boxes: Any
    weight: Any
    out: Any
    out_boxes: Any
    full: Any
    free: Any


def kernel(problem: Problem, gmem: Global, smem: Shared) -> None:
    """Run each warpgroup (mesh axis "wg") of each CTA (axis "block")."""
    cta, wg = lax.axis_index("block"), lax.axis_index("wg")
    block = Block(problem, gmem, smem, cta, wg, num_tiles=gmem.plan.first[1, gmem.plan.first.shape[1] - 1])
    num_own = block.num_own

    @pl.when(wg == problem.units)
    def _():
        if problem.units > 1:
            plgpu.set_max_registers(40, action="decrease")
        block.for_each_item(lambda item, step: _copy(problem, gmem, smem, item, step), num_own)
        for slot in range(problem.stages):
            plgpu.barrier_wait(smem.free.at[slot])  # no barrier ends unobserved

    @pl.when(wg < problem.units)
    def _():
        if problem.units > 1:
            plgpu.set_max_registers(232, action="increase")
        for slot in range(problem.stages):
            plgpu.barrier_arrive(smem.free.at[slot])
        block.for_each_item(lambda item, step: _compute(problem, gmem, smem, wg, item, step), num_own)
        plgpu.wait_smem_to_gmem(0)


def _copy(problem: Problem, gmem: Global, smem: Shared, item: Item, first_step) -> None:
    """Copy the weights and rows of an item."""

    def one_step(k, _):
        slot = lax.rem(first_step + k, _int(problem.stages))
        full = smem.full.at[slot]
        plgpu.barrier_wait(smem.free.at[slot])
        for half in range(problem.halves):
            plgpu.copy_gmem_to_smem(
                gmem.weight.at[
                    item.group * problem.halves + half,
                    pl.ds(item.output, problem.outputs),
                    pl.ds(k * problem.block_k, problem.block_k),
                ],
                smem.weight.at[slot, pl.ds(half * problem.outputs, problem.outputs)],
                full,
            )
        for unit in range(problem.units):
            # Whatever follows the group's last row: a row of x only affects the same row of the result. A warpgroup
            # without rows gets the item's first ones, because it waits for a copy.
            has_rows = item.num_rows > unit * ROWS
            row = item.row + lax.select(has_rows, _int(unit * ROWS), _int(0))
            num_rows = lax.select(has_rows, item.num_rows - unit * ROWS, _int(1))
            for fewer, box in zip((0, *problem.boxes), problem.boxes, strict=False):
                is_best = (num_rows > fewer) & (num_rows <= box)

                @pl.when(num_rows > fewer if box == problem.boxes[-1] else is_best)
                def _(box=box, row=row, unit=unit):
                    for part in range(problem.parts):
                        columns = pl.ds(k * problem.block_k + part * COLUMNS, COLUMNS)
                        rows = smem.x_boxes.at[slot, unit, part, pl.ds(0, box)]
                        plgpu.copy_gmem_to_smem(gmem.x.at[pl.ds(row, box), columns], rows, full)

    lax.fori_loop(_int(0), _int(problem.steps), one_step, None)


def _compute(problem: Problem, gmem: Global, smem: Shared, wg, item: Item, first_step) -> None:
    """Compute a warpgroup's part of an item: 64 of its rows, or fewer, or none."""
    num_rows = item.num_rows - wg * ROWS

    @pl.when(num_rows <= 0)
    def _nothing_to_compute():
        def skip(k, _):
            slot = lax.rem(first_step + k, _int(problem.stages))
            plgpu.barrier_wait(smem.full.at[slot])
            plgpu.barrier_arrive(smem.free.at[slot])

        lax.fori_loop(_int(0), _int(problem.steps), skip, None)

    @pl.when(num_rows > 0)
    def _compute_and_store():
        def multiply(acc):
            return _multiply(problem, smem, wg, first_step, acc)

        sums = pl.run_scoped(multiply, plgpu.ACC((ROWS, problem.halves * problem.outputs), jnp.float32))
        halves = [sums[:, h * problem.outputs : (h + 1) * problem.outputs] for h in range(problem.halves)]
        if gmem.bias is not None:
            halves = [half + _bias(problem, gmem, item, index) for index, half in enumerate(halves)]
        y = halves[0] if problem.activation is None else problem.activation(*halves)
        _store(problem, gmem, smem, y, wg, item, num_rows)


def _multiply(problem: Problem, smem: Shared, wg, first_step, acc) -> Float[Array, "64 N"]:
    """Compute the sums of an item. A step's slot is released when the products of the next step have been issued."""

    def one_step(k, _):
        step = first_step + k
        slot = lax.rem(step, _int(problem.stages))
        plgpu.barrier_wait(smem.full.at[slot])
        for part in range(problem.parts):
            weight = smem.weight.at[slot, :, pl.ds(part * COLUMNS, COLUMNS)]
            plgpu.wgmma(acc, smem.x.at[slot, wg, part], weight.transpose((1, 0)))
        plgpu.wgmma_wait(problem.parts)

        @pl.when(k > 0)
        def _():
            plgpu.barrier_arrive(smem.free.at[lax.rem(step + (problem.stages - 1), _int(problem.stages))])

    lax.fori_loop(_int(0), _int(problem.steps), one_step, None)
    sums = written(acc[...])
    plgpu.barrier_arrive(smem.free.at[lax.rem(first_step + (problem.steps - 1), _int(problem.stages))])
    return sums


def _bias(problem: Problem, gmem: Global, item: Item, half: int) -> Float[Array, "64 N"]:
    values = gmem.bias.at[item.group * problem.halves + half, pl.ds(item.output, problem.outputs)]
    values = plgpu.load(values, layout=_LAYOUT.reduce(0), optimized=False).astype(jnp.float32)
    return lax.broadcast_in_dim(values, (ROWS, problem.outputs), (1,))


def _store(problem: Problem, gmem: Global, smem: Shared, values, wg, item: Item, num_rows) -> None:
    """Store the first rows of a warpgroup's result: as one box of 64, or as boxes of 8 and of the remaining rows."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the item before
    values = values.astype(gmem.y.dtype)
    parts = range(problem.outputs // COLUMNS)
    for part in parts:
        smem.out[wg, part] = values[:, part * COLUMNS : (part + 1) * COLUMNS]
    plgpu.commit_smem()

    def copy(first, count: int) -> None:
        """`first` in multiples of 8, by which the swizzle repeats."""
        rows = pl.ds(item.row + wg * ROWS + first, count)
        for part in parts:
            columns = pl.ds(item.output + part * COLUMNS, COLUMNS)
            source = smem.out_boxes.at[wg, part, pl.ds(first, count)]
            plgpu.copy_smem_to_gmem(source, gmem.y.at[rows, columns])

    num_eights = lax.div(num_rows, _int(8))
    if gmem.y.shape[0] >= ROWS:
        pl.when(num_rows >= ROWS)(lambda: copy(0, ROWS))
        num_eights = lax.select(num_rows >= ROWS, _int(0), num_eights)
    lax.fori_loop(_int(0), num_eights, lambda i, _: copy(i * 8, 8), None)
    rest = lax.select(num_rows >= ROWS, _int(0), lax.rem(num_rows, _int(8)))
    for count in range(1, 8):
        pl.when(rest == count)(lambda count=count: copy(num_eights * 8, count))
