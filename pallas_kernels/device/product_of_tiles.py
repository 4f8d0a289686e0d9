"""The Hopper kernel of the scaled matmul and of the gated linear unit: what the warpgroups of a thread block do.

See sm90.py of both.

An item is a tile of rows, one for each thread block of a cluster, times a tile of outputs that they have in common. The
last warpgroup copies rows and weights into a ring in shared memory, as far ahead as there is room; each of the others
multiplies half of the tile's rows. A tile of outputs has two halves: gate and up, or neighbours.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Shaped

from pallas_kernels.device.registers import written
from pallas_kernels.device.swizzled import tiled, views
from pallas_kernels.hopper import BY_LANES, NUM_SMS

UNITS = 2
"""Number of computing warpgroups."""
BYTES = 128
"""Bytes of K in a step of the ring, which the swizzle mixes; after those of FP8 codes sums are promoted."""
ROWS = 64
"""Rows of a computing warpgroup in a tile: what one wgmma instruction multiplies."""
STAGES = 4
"""Steps that the ring holds."""
SCALE_STAGES = 2 * STAGES
"""Steps whose scales shared memory has room for.

All warps load scales, but one thread gives a slot back for its warpgroup when it has waited for the last product: then
another warp may still be loading. When scales are overwritten, a turn of the ring later, all have multiplied again.
"""
_LAYOUT = plgpu.Layout.WGMMA
_int = jnp.int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the work is cut."""

    outputs: int
    """Outputs of a half of a tile: a multiple of 16, of 32 for codes, and at most 128."""
    cluster: int
    """Thread blocks that have weights in common: 1 or 2."""
    band: int = 16
    """Tiles of rows that are taken together before the next ones, counted as a thread block has them."""
    num_blocks: int = NUM_SMS
    """Thread blocks."""


class Problem(NamedTuple):
    """What is known when the kernel is compiled."""

    outputs: int
    """Outputs of a half of a tile."""
    is_gated: bool
    cluster: int
    band: int
    columns: int
    """Columns of K in a step of the ring."""
    piece: int
    """Outputs that are stored at a time."""
    pieces_held: int
    """Pieces of a warpgroup's result that shared memory has room for."""
    num_rows: int
    num_outputs: int
    """Outputs of the weight, of gate and of up each."""
    depth: int
    steps_of_scale: int
    """Steps of the ring whose columns have a scale in common; all of them if an output has one scale."""
    num_groups: int
    """Clusters that run."""
    promotes: bool
    """Values are of FP8, the sums of whose products are added in float32 after each step."""
    activation: Callable[[Array], Array] | None
    interpret: bool

    @property
    def tile(self) -> int:
        """Outputs of gate, or of the weight, between the first ones of two tiles."""
        return self.outputs if self.is_gated else 2 * self.outputs

    @property
    def row_tiles(self) -> int:
        """Number of tiles of rows, of whole clusters."""
        return -(-self.num_rows // (UNITS * ROWS * self.cluster))

    @property
    def output_tiles(self) -> int:
        """Number of tiles that a row's outputs are cut into."""
        return -(-self.num_outputs // self.tile)

    @property
    def steps(self) -> int:
        """Steps of an item."""
        return self.depth // self.columns

    @property
    def has_scales_of_steps(self) -> bool:
        """True if scales change along K."""
        return self.steps_of_scale < self.steps


class Global(NamedTuple):
    """Arrays in global memory."""

    x: Any
    weight: Any
    """[2, N, K], or [1, N, K]"""
    y: Any
    x_scales: Any = None
    """[M], M padded to whole tiles; None if values are not codes."""
    scales: Any = None
    """[G, 2 or 1, N], N padded to whole tiles; None if values are not codes."""


class Shared(NamedTuple):
    """Arrays and barriers in shared memory.

    The rows' and the result's have two views each, of the same bytes: as wgmma and registers take them, and as boxes,
    which may end at any row and column.
    """

    x: Any
    x_boxes: Any
    weight: Any
    out: Any
    out_boxes: Any
    full: Any
    free: Any
    scales: Any = None
    """[SCALE_STAGES, 2, outputs], of a step each; None if scales do not change along K."""


def launch(
    problem: Problem,
    x: Shaped[Array, "M K"],
    weight: Shaped[Array, "halves N K"],
    *scales: Float[Array, "..."],
    name: str,
    output_dtype: Any,
) -> Float[Array, "M N"]:
    """Run the kernel; `scales` are none, or those of rows and of the weight as `Global` has them."""

    def body(x, weight, *refs):
        y, rows, weights, results, full, free, *step_scales = refs[len(scales) :]
        (x_smem, x_boxes), (out_smem, out_boxes) = rows, results
        if problem.interpret:  # where each view has bytes of its own
            x_boxes, out_boxes = x_smem, out_smem
        gmem = Global(x, weight, y, *refs[: len(scales)])
        kernel(problem, gmem, Shared(x_smem, x_boxes, weights, out_smem, out_boxes, full, free, *step_scales))

    has_scales = problem.has_scales_of_steps
    weights = (STAGES, 2 * problem.outputs, problem.columns)
    return plgpu.kernel(
        body,
        kernel_name=name,
        out_type=jax.ShapeDtypeStruct((problem.num_rows, problem.num_outputs), output_dtype),
        scratch_types=(
            views(STAGES, UNITS, ROWS, problem.columns, dtype=x.dtype),
            plgpu.SMEM(weights, x.dtype, transforms=tiled(problem.columns, itemsize=x.dtype.itemsize)),
            views(UNITS, problem.pieces_held, ROWS, problem.piece, dtype=output_dtype),
            plgpu.Barrier(num_barriers=STAGES, num_arrivals=UNITS + 2 * (1 + has_scales)),
            plgpu.ClusterBarrier(collective_axes=("rank",), num_barriers=STAGES, num_arrivals=UNITS),
            *([plgpu.SMEM((SCALE_STAGES, 2, problem.outputs), jnp.float32)] if has_scales else []),
        ),
        grid=(problem.num_groups,),
        grid_names=("group",),
        cluster=(problem.cluster,),
        cluster_names=("rank",),
        num_threads=UNITS + 1,
        thread_name="wg",
        compiler_params=BY_LANES,
    )(x, weight, *scales)


def kernel(problem: Problem, gmem: Global, smem: Shared) -> None:
    """Run each warpgroup of the mesh axis "wg", of each thread block "rank" of each cluster "group"."""
    group, rank, wg = (lax.axis_index(name) for name in ("group", "rank", "wg"))
    num_items = problem.row_tiles * problem.output_tiles
    num_own = lax.div(num_items - group + (problem.num_groups - 1), _int(problem.num_groups))

    def for_each_item(visit) -> None:
        """Call `visit(row, output, step)`: the tile's first ones, and how many steps there were before."""

        def turn(index, _):
            row_tile, output_tile = _item(problem, group + index * problem.num_groups)
            row = (row_tile * problem.cluster + rank) * (UNITS * ROWS)
            visit(row, output_tile * problem.tile, index * problem.steps)

        lax.fori_loop(_int(0), num_own, turn, None)

    @pl.when(wg == UNITS)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        for_each_item(lambda row, output, step: _copy(problem, gmem, smem, row, output, step))
        for slot in range(STAGES):
            plgpu.barrier_wait(smem.free.at[slot])  # no barrier ends unobserved, no block before its peers

    @pl.when(wg < UNITS)
    def _():
        plgpu.set_max_registers(232, action="increase")
        for slot in range(STAGES):
            plgpu.barrier_arrive(smem.free.at[slot])
        for_each_item(lambda row, output, step: _compute(problem, gmem, smem, wg, row, output, step))
        plgpu.wait_smem_to_gmem(0)


def _item(problem: Problem, index) -> tuple[Any, Any]:
    """Return a tile of rows and a tile of outputs: a band of rows goes through all outputs before the next band.

    So what runs at a time is about as high as wide, and its rows and weights are read from the L2.
    """
    band_items = problem.band * problem.output_tiles
    band = lax.div(index, _int(band_items))
    within = index - band * band_items
    band_size = lax.min(_int(problem.row_tiles) - band * problem.band, _int(problem.band))
    return band * problem.band + lax.rem(within, band_size), lax.div(within, band_size)


def _halves(problem: Problem, output) -> list[tuple[int, Any]]:
    """Return where each half of a tile of outputs lies in the weight: gate or up, and the first output."""
    if problem.is_gated:
        return [(0, output), (1, output)]
    return [(0, output), (0, output + problem.outputs)]


def _copy(problem: Problem, gmem: Global, smem: Shared, row, output, first_step) -> None:
    """Copy rows and weights of an item. Behind the last row or output TMA fills in zeros."""
    shared = None if problem.cluster == 1 or problem.interpret else "rank"

    def one_step(k, _):
        slot = lax.rem(first_step + k, _int(STAGES))
        full, columns = smem.full.at[slot], pl.ds(k * problem.columns, problem.columns)
        plgpu.barrier_wait(smem.free.at[slot])
        for unit in range(UNITS):
            rows = pl.ds(row + unit * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(gmem.x.at[rows, columns], smem.x_boxes.at[slot, unit], full)
        for half, (kind, first) in enumerate(_halves(problem, output)):
            plgpu.copy_gmem_to_smem(
                gmem.weight.at[kind, pl.ds(first, problem.outputs), columns],
                smem.weight.at[slot, pl.ds(half * problem.outputs, problem.outputs)],
                full,
                collective_axes=shared,
            )
            if problem.has_scales_of_steps:
                group = lax.div(k, _int(problem.steps_of_scale))
                scales = gmem.scales.at[group, kind, pl.ds(first, problem.outputs)]
                of_scales = lax.rem(first_step + k, _int(SCALE_STAGES))
                plgpu.copy_gmem_to_smem(scales, smem.scales.at[of_scales, half], full)

    lax.fori_loop(_int(0), _int(problem.steps), one_step, None)


def _compute(problem: Problem, gmem: Global, smem: Shared, wg, row, output, first_step) -> None:
    """Multiply a computing warpgroup's half of an item, and store it."""
    row = row + wg * ROWS
    multiply = _multiply_promoting if problem.promotes else _multiply_exactly
    halves = multiply(problem, smem, wg, first_step)
    _store(problem, gmem, smem, halves, wg, row, output)


def _multiply_promoting(problem: Problem, smem: Shared, wg, first_step) -> list[Float[Array, "rows N"]]:
    """Return the sums of an item's halves. The tensor cores keep some 14 bits of a sum of FP8 products, which is why
    each step's products are summed on their own and added in float32.
    """

    def one_step(k, sums):
        step = lax.optimization_barrier(first_step + k)
        slot, of_scales = lax.rem(step, _int(STAGES)), lax.rem(step, _int(SCALE_STAGES))

        def added(half, total):
            weight = smem.weight.at[slot, pl.ds(half * problem.outputs, problem.outputs)]

            def product(acc):
                plgpu.wgmma(acc, smem.x.at[slot, wg], weight.transpose((1, 0)))
                plgpu.wgmma_wait(0)
                return written(acc[...])

            part = pl.run_scoped(product, plgpu.ACC((ROWS, problem.outputs), jnp.float32))
            if problem.has_scales_of_steps:
                scales = plgpu.load(smem.scales.at[of_scales, half], layout=_LAYOUT.reduce(0))
                part = part * lax.broadcast_in_dim(scales, part.shape, (1,))
            return written(total + part)

        plgpu.barrier_wait(smem.full.at[slot])
        first, second = sums
        # Always so, which the compiler does not know: it would multiply both halves before it adds either, and spill.
        first = lax.cond(step >= 0, lambda total: added(0, total), lambda total: total, first)
        second = added(1, second)
        plgpu.barrier_arrive(smem.free.at[slot])
        return first, second

    zeros = plgpu.layout_cast(jnp.zeros((ROWS, problem.outputs), jnp.float32), _LAYOUT)
    return list(lax.fori_loop(_int(0), _int(problem.steps), one_step, (zeros, zeros)))


def _multiply_exactly(problem: Problem, smem: Shared, wg, first_step) -> list[Float[Array, "rows N"]]:
    """Return the sums of an item's halves: of products of integers, which int32 holds, or of 16-bit floats. A step's
    slot is given back when the products of the next one are on their way.
    """

    def multiply(acc):
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

    dtype = jnp.int32 if smem.x.dtype == jnp.int8 else jnp.float32
    sums = pl.run_scoped(multiply, plgpu.ACC((ROWS, 2 * problem.outputs), dtype))
    return [sums[:, half * problem.outputs : (half + 1) * problem.outputs].astype(jnp.float32) for half in range(2)]


def _store(problem: Problem, gmem: Global, smem: Shared, halves, wg, row, output) -> None:
    """Scale and store a warpgroup's result, piece by piece, since registers hold no more scales than those of a piece.

    TMA leaves out what lies behind the last row or output.
    """
    x_scales = None
    if gmem.x_scales is not None:
        x_scales = plgpu.load(gmem.x_scales.at[pl.ds(row, ROWS)], layout=_LAYOUT.reduce(1), optimized=False)

    def scaled(half: int, left: int) -> Float[Array, "rows N"]:
        values = halves[half][:, left : left + problem.piece]
        if x_scales is None:
            return values
        values = values * lax.broadcast_in_dim(x_scales, values.shape, (0,))
        if problem.has_scales_of_steps:
            return values
        kind, first = _halves(problem, output)[half]
        scales = gmem.scales.at[0, kind, pl.ds(first + left, problem.piece)]
        scales = plgpu.load(scales, layout=_LAYOUT.reduce(0), optimized=False)
        return values * lax.broadcast_in_dim(scales, values.shape, (1,))

    pieces = [(half, left) for half in range(2) for left in range(0, problem.outputs, problem.piece)]
    for number, (half, left) in enumerate(pieces[: len(pieces) // 2] if problem.is_gated else pieces):
        values = scaled(half, left)
        if problem.is_gated:
            assert problem.activation is not None
            values = problem.activation(values) * scaled(1, left)
        held = number % problem.pieces_held
        plgpu.wait_smem_to_gmem(problem.pieces_held - 1, wait_read_only=True)  # of the piece that had this room before
        smem.out[wg, held] = values.astype(gmem.y.dtype)
        plgpu.commit_smem()
        columns = pl.ds(output + half * problem.outputs + left, problem.piece)
        plgpu.copy_smem_to_gmem(smem.out_boxes.at[wg, held], gmem.y.at[pl.ds(row, ROWS), columns])
