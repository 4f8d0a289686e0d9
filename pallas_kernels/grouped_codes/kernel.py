"""The body of the Hopper kernel: the work of a thread block's warpgroups. See sm90.py.

An item is a tile of a group's rows times a tile of outputs. Four warpgroups multiply: each has 64 outputs, or the same
ones as others and another part of K, whose sums are added up in shared memory. One warpgroup copies codes into a ring
in shared memory; one loads rows, and stores them into another with their columns in the order of codes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.items import Block, Item
from pallas_kernels.device.ordered_rows import RowTiles
from pallas_kernels.device.product_of_codes import BYTES, OUTPUTS, PIECE
from pallas_kernels.device.scaling import ScaledProduct, Scaling
from pallas_kernels.grouped_matmul import Plan

NUM_COMPUTE = 4
"""Warpgroups that multiply."""
RING_ROWS = NUM_COMPUTE * OUTPUTS
"""Outputs whose codes a slot of the ring has; the same ones several times if warpgroups have parts of K."""
LAUNCH_REGISTERS = 80
"""Registers per thread at first; six warpgroups may have six times as many together."""
COMPUTE_REGISTERS, WEIGHT_REGISTERS, ROW_REGISTERS = 96, 24, 72
"""Registers per thread of the warpgroups that multiply, copy weights and load rows."""
MXFP4_REGISTERS = 88, 40, 88
"""Those for MXFP4."""
CHUNK = 8
"""Rows that are finished at a time."""
WORDS_AHEAD, WORDS_OF_32_ROWS = 4, 2
"""Words of scales that are loaded a step ahead, of up to 16 rows and of 32; with zero points or minimums there are no
registers for any.
"""

_int = jnp.int32


class Problem(NamedTuple):
    """Compile-time parameters of the kernel."""

    scaling: Scaling
    """What codes are scaled by, with the names of arrays in `Global.vectors`."""
    rows: int
    """Rows of a tile: 8, 16, 32 or 64."""
    across: int
    """Warpgroups that have outputs of their own: 1, 2 or 4."""
    halves: int
    """Gate and up, or one."""
    num_outputs: int
    """Outputs of each half."""
    w_slots: int
    x_slots: int
    num_blocks: int
    activation: Callable[[Any, Any], Any] | None
    ops: Any
    """Operations on registers that Pallas lacks: the module `device`, or what a test emulates them by."""

    @property
    def deep(self) -> int:
        """Number of parts of K that warpgroups multiply at a time."""
        return NUM_COMPUTE // self.across

    @property
    def block_k(self) -> int:
        """Columns that a warpgroup multiplies in a step."""
        return self.scaling.block_k

    @property
    def steps(self) -> int:
        """Number of steps per item."""
        return -(-self.scaling.depth // (self.block_k * self.deep))

    @property
    def pieces(self) -> int:
        """Number of pieces of 64 columns in which the rows of a step are stored."""
        return self.deep * self.block_k // PIECE

    @property
    def registers(self) -> tuple[int, int, int]:
        """Registers per thread of the warpgroups that multiply, copy weights and load rows."""
        return MXFP4_REGISTERS if self.scaling.is_mxfp4 else (COMPUTE_REGISTERS, WEIGHT_REGISTERS, ROW_REGISTERS)

    @property
    def row_tiles(self) -> RowTiles:
        """How rows are stored."""
        block = self.block_k if self.scaling.is_mxfp4 else None
        return RowTiles(self.rows, self.pieces, self.scaling.code, block)

    @property
    def copied(self) -> int:
        """Outputs that one copy has: those of a tile, of one half."""
        return self.across * OUTPUTS // self.halves

    @property
    def tile(self) -> int:
        """Outputs of a tile, of each half."""
        return self.copied

    @property
    def output_tiles(self) -> int:
        """Tiles that a row's outputs are cut into."""
        return -(-self.num_outputs // self.tile)

    @property
    def num_parts(self) -> int:
        """Number of sums that are added to those of other warpgroups."""
        return NUM_COMPUTE - self.across


class Global(NamedTuple):
    """Arrays in global memory."""

    plan: Plan
    x: Any
    weight: Any
    """Codes, [X * halves, N, bytes of K]."""
    vectors: dict[str, Any]
    """The arrays of `scaling`, [X * halves * N, numbers of an output]."""
    bias: Any
    """[X * halves * N, 1], or None."""
    y: Any


class Shared(NamedTuple):
    """Arrays and barriers in shared memory.

    Codes have two views of the same bytes: one as they are multiplied, one as boxes that may be copied from any row.
    """

    weights: Any
    weight_boxes: Any
    x: Any
    """[slots * pieces, rows, 64]."""
    parts: Any
    """Sums of warpgroups that others add to theirs."""
    w_full: Any
    w_free: Any
    x_ready: Any
    x_free: Any
    parts_full: Any
    parts_free: Any


def kernel(problem: Problem, gmem: Global, smem: Shared) -> None:
    """Run each warpgroup (mesh axis "wg") of each thread block (axis "block")."""
    warpgroup = lax.axis_index("wg")

    def make_block():
        """Read the number of tiles, which would be spilled if all warpgroups had it from before they part."""
        num_tiles = gmem.plan.first[1, gmem.plan.first.shape[1] - 1]
        return Block(problem, gmem, smem, lax.axis_index("block"), warpgroup, num_tiles)

    @pl.when(warpgroup < NUM_COMPUTE)
    def _():
        _set_registers(problem.registers[0])
        for free, slots in ((smem.w_free, problem.w_slots), (smem.x_free, problem.x_slots)):
            for slot in range(slots):
                plgpu.barrier_arrive(free.at[slot])
        if problem.num_parts:
            pl.when(warpgroup < problem.across)(lambda: plgpu.barrier_arrive(smem.parts_free))
        block = make_block()
        block.for_each_item(lambda item, step: _compute(block, item, step))
        if problem.num_parts:
            pl.when(warpgroup >= problem.across)(lambda: plgpu.barrier_wait(smem.parts_free))

    @pl.when(warpgroup == NUM_COMPUTE)
    def _():
        _set_registers(problem.registers[1])
        block = make_block()
        block.for_each_item(lambda item, step: _copy_weights(block, item, step))
        for slot in range(problem.w_slots):
            plgpu.barrier_wait(smem.w_free.at[slot])  # no barrier ends unobserved

    @pl.when(warpgroup == NUM_COMPUTE + 1)
    def _():
        _set_registers(problem.registers[2])
        block = make_block()
        block.for_each_item(lambda item, step: _store_rows(block, item, step))
        for slot in range(problem.x_slots):
            plgpu.barrier_wait(smem.x_free.at[slot])


def _set_registers(number: int) -> None:
    plgpu.set_max_registers(number, action="increase" if number > LAUNCH_REGISTERS else "decrease")


def _copy_weights(block: Block, item: Item, first_step: Any) -> None:
    """Copy the codes of an item: those of each part of K behind one another, gate and up in halves of the slot."""
    problem, smem = block.problem, block.smem
    copied = problem.copied

    def one_step(k, _):
        slot = lax.rem(first_step + k, _int(problem.w_slots))
        full = smem.w_full.at[slot]
        plgpu.barrier_wait(smem.w_free.at[slot])

        @pl.loop(0, problem.halves * problem.deep)
        def _(copy):
            part, half = lax.div(copy, _int(problem.halves)), lax.rem(copy, _int(problem.halves))
            columns = pl.ds((k * problem.deep + part) * BYTES, BYTES)
            matrix, place = item.group * problem.halves + half, half * (RING_ROWS // 2) + part * copied
            source = block.gmem.weight.at[matrix, pl.ds(item.output, copied), columns]
            plgpu.copy_gmem_to_smem(source, smem.weight_boxes.at[slot, pl.ds(place, copied)], full)

    lax.fori_loop(_int(0), _int(problem.steps), one_step, None)


def _store_rows(block: Block, item: Item, first_step: Any) -> None:
    """Store the rows of an item in the order of codes; those of the next step are loaded before there is a slot.

    Whatever follows the group's last row: a row of x only affects the same row of the result.
    """
    problem, smem, ops, tiles = block.problem, block.smem, block.problem.ops, block.problem.row_tiles

    def load(k, turn):
        return ops.load_rows(block.gmem.x, item.row, k, turn, tiles)

    def one_step(k, loaded):
        slot = lax.rem(first_step + k, _int(problem.x_slots))
        plgpu.barrier_wait(smem.x_free.at[slot])
        ops.put_rows(loaded, smem.x, slot * problem.pieces, 0, tiles)
        for turn in range(1, tiles.turns):
            ops.put_rows(load(k, turn), smem.x, slot * problem.pieces, turn, tiles)
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem.x_ready.at[slot])
        return load(k + 1, 0)

    lax.fori_loop(_int(0), _int(problem.steps), one_step, load(_int(0), 0))


def _compute(block: Block, item: Item, first_step: Any) -> None:
    """Multiply a warpgroup's part of an item; the first ones along K add up the sums and finish them."""
    problem, smem, ops = block.problem, block.smem, block.problem.ops
    own = lax.rem(block.warpgroup, _int(problem.across))
    first_output = item.output + own * (OUTPUTS // problem.halves)
    sums = _multiply(block, item, first_output, first_step)
    if not problem.num_parts:
        _finish(block, item, first_output, sums)
        return

    @pl.when(block.warpgroup >= problem.across)
    def _():
        plgpu.barrier_wait(smem.parts_free)
        ops.store_sums(smem.parts, sums, block.warpgroup - problem.across)
        plgpu.barrier_arrive(smem.parts_full)

    @pl.when(block.warpgroup < problem.across)
    def _():
        plgpu.barrier_wait(smem.parts_full)
        total = sums
        for part in range(problem.deep - 1):
            total = total + ops.load_sums(smem.parts, own + part * problem.across, rows=problem.rows)
        plgpu.barrier_arrive(smem.parts_free)
        _finish(block, item, first_output, total)


def _multiply(block: Block, item: Item, first_output: Any, first_step: Any) -> Any:
    """Return this warpgroup's sums [64, rows]."""
    problem, ops = block.problem, block.problem.ops
    if problem.scaling.is_mxfp4:
        return _multiply_mxfp4(block, item, first_output, first_step)
    is_gated = problem.halves == 2
    words_ahead = WORDS_AHEAD if problem.rows <= 16 else WORDS_OF_32_ROWS
    if problem.scaling.has_minimums or problem.scaling.zeros is not None:
        words_ahead = 0
    product = ScaledProduct(
        problem.scaling,
        rows=problem.rows,
        is_gated=is_gated,
        has_pieces_apart=True,
        words_ahead=words_ahead,
        add_product=ops.add_product,
        vectors_of=ops.vectors_of,
    )
    part_of_k = lax.div(block.warpgroup, _int(problem.across))
    base = item.group * (problem.halves * problem.num_outputs)

    def load_words(vectors, column, count):
        places, options = (base, first_output), {"num_outputs": problem.num_outputs, "is_gated": is_gated}
        return ops.load_words(block.gmem.vectors[vectors.name], places, column, count=count, **options)

    def load(k, part=None):
        """Load the scales of a step or a part of it, and what belongs to them."""
        return product.load(load_words, k * problem.deep + part_of_k, part)

    def place(slot):
        return slot * problem.pieces + part_of_k * (problem.block_k // PIECE)

    zeros = ops.zeros(problem.rows)
    return product.sums(zeros, load, block.smem.x, place, at=block, first=first_step, steps=_int(problem.steps))


def _multiply_mxfp4(block: Block, item: Item, first_output: Any, first_step: Any) -> Any:
    """Do what `_multiply` does for weights of e2m1 with exponents of 32 columns."""
    problem, smem, ops = block.problem, block.smem, block.problem.ops
    part_of_k = lax.div(block.warpgroup, _int(problem.across))
    places = item.group * (problem.halves * problem.num_outputs), first_output
    exponents_of = block.gmem.vectors[problem.scaling.scales.name]
    is_gated = problem.halves == 2

    def load(k):
        step = k * problem.deep + part_of_k
        return ops.load_exponents(exponents_of, places, step, num_outputs=problem.num_outputs, is_gated=is_gated)

    def one_step(k, carry):
        sums, exponents, w_slot, x_slot = carry
        following = load(k + 1)
        plgpu.barrier_wait(smem.w_full.at[w_slot])
        codes = ops.load_codes(smem.weights, w_slot, block.warpgroup, is_gated=is_gated)
        plgpu.barrier_wait(smem.x_ready.at[x_slot])
        first_piece = x_slot * problem.pieces + part_of_k * (problem.block_k // PIECE)
        sums = ops.add_mxfp4(sums, codes, exponents, smem.x, first_piece)
        # Not right after the loads: they may still be on their way when the next codes arrive, which no barrier orders.
        plgpu.barrier_arrive(smem.w_free.at[w_slot])
        plgpu.barrier_arrive(smem.x_free.at[x_slot])
        w_slot, x_slot = (
            lax.select(slot + 1 == slots, _int(0), slot + 1)
            for slot, slots in ((w_slot, problem.w_slots), (x_slot, problem.x_slots))
        )
        return sums, following, w_slot, x_slot

    slots = (lax.rem(first_step, _int(slots)) for slots in (problem.w_slots, problem.x_slots))
    carry = (ops.zeros(problem.rows), load(_int(0)), *slots)
    return lax.fori_loop(_int(0), _int(problem.steps), one_step, carry)[0]


def _finish(block: Block, item: Item, first_output: Any, sums: Any) -> None:
    """Scale the sums of 64 outputs, add the bias, apply the activation and store the rows that the item has."""
    problem, gmem, ops = block.problem, block.gmem, block.problem.ops

    places = item.group * (problem.halves * problem.num_outputs), first_output
    options = {"num_outputs": problem.num_outputs, "is_gated": problem.halves == 2}

    def vector(ref, dtype):
        [found] = ops.vectors_of(ops.load_words(ref, places, _int(0), count=1, **options), range(1), dtype)
        return found

    scales, factor = problem.scaling.output_scales, problem.scaling.factor_of_sums(problem.rows)
    scale = None if scales is None else vector(gmem.vectors[scales.name], scales.dtype)
    bias = None if gmem.bias is None else vector(gmem.bias, jnp.dtype(gmem.bias.dtype).name)
    for chunk in range(problem.rows // CHUNK):

        @pl.when(chunk * CHUNK < item.num_rows)
        def _(chunk=chunk):
            y = sums[:, chunk * CHUNK : (chunk + 1) * CHUNK]
            y = y if factor == 1 else y * factor
            y = y if scale is None else y * scale
            y = y if bias is None else y + bias
            if problem.activation is not None:
                y = problem.activation(*ops.halves(y))
            ops.store_rows(
                gmem.y,
                y,
                item.row + chunk * CHUNK,
                item.num_rows - chunk * CHUNK,
                first_output,
                is_gated=problem.halves == 2,
            )
