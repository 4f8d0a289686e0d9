"""The body of the wide kernel, for tiles of many rows: the work of a thread block's warpgroups. See sm90_wide.py.

An item is a tile of a group's rows times a tile of outputs, or a part of K of it. Two warpgroups multiply, each one or
two blocks of 64 outputs: while products of one piece of 64 columns are computed, the codes of the next are converted.
The third copies codes and rows into rings in shared memory.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.codes import Code, codes_per_byte
from pallas_kernels.device.items import Block, Item
from pallas_kernels.device.product_of_codes import BYTES, OUTPUTS, PIECE
from pallas_kernels.device.registers import written
from pallas_kernels.grouped_codes.kernel import CHUNK
from pallas_kernels.grouped_matmul import Plan

UNITS = 2
"""Warpgroups that multiply."""
STAGED_ROWS = 64
"""Rows of a result that are stored at a time."""
STAGED_PITCH = OUTPUTS + 8
"""Outputs between two staged rows: 16 bytes of eight rows are then in different banks."""

_int = jnp.int32


class Problem(NamedTuple):
    """Compile-time parameters of the kernel."""

    code: Code
    rows: int
    """Rows of a tile, a multiple of 8 up to 256."""
    blocks: int
    """Blocks of 64 outputs of a warpgroup: 1 or 2."""
    parts: int
    """Parts that K is cut into. With several their sums are stored, and not finished."""
    halves: int
    """Gate and up, or one."""
    depth: int
    num_outputs: int
    """Outputs of each half."""
    num_scales: int
    """Scales of an output."""
    w_slots: int
    x_slots: int
    num_blocks: int
    activation: Callable[[Any, Any], Any] | None
    ops: Any
    """Operations on registers that Pallas lacks: the module `wide_device`, or what a test emulates them by."""

    @property
    def block_k(self) -> int:
        """Columns of a slot of codes."""
        return BYTES * codes_per_byte(self.code)

    @property
    def pieces(self) -> int:
        """Number of pieces of a slot of codes."""
        return self.block_k // PIECE

    @property
    def steps(self) -> int:
        """Number of slots of codes that K takes."""
        return -(-self.depth // self.block_k)

    @property
    def all_pieces(self) -> int:
        """Number of pieces that K takes."""
        return -(-self.depth // PIECE)

    @property
    def ring_outputs(self) -> int:
        """Outputs of a slot of codes, of both halves."""
        return UNITS * self.blocks * OUTPUTS

    @property
    def tile(self) -> int:
        """Outputs of a tile, of each half."""
        return self.ring_outputs // self.halves

    @property
    def output_tiles(self) -> int:
        """Tiles that a row's outputs are cut into."""
        return -(-self.num_outputs // self.tile)

    @property
    def groups(self) -> int:
        """Scales of the columns of a piece; 0 if an output has only one, which its sum is multiplied by."""
        return 0 if self.num_scales == 1 else max(1, PIECE * self.num_scales // self.depth)

    @property
    def pieces_of_group(self) -> int:
        """Number of pieces that have a scale in common."""
        return max(1, self.depth // (self.num_scales * PIECE))


class Global(NamedTuple):
    """Arrays in global memory."""

    plan: Plan
    x: Any
    weight: Any
    """Codes, [X * halves, N, bytes of K]."""
    scales: Any
    """[X * halves * N, scales of an output], as are zero points and minimums; None without."""
    zeros: Any
    minimums: Any
    factors: Any
    """[X * halves * N, 1], which sums are multiplied by, or None."""
    bias: Any
    """[X * halves * N, 1], or None."""
    y: Any
    """[parts * M, N]."""


class Shared(NamedTuple):
    """Arrays and barriers in shared memory. Rows have two views of the same bytes, see `kernel.Shared`."""

    weights: Any
    """[slots, outputs, 128] of bytes."""
    x: Any
    """[slots, rows, 64]."""
    x_boxes: Any
    staged: Any
    """[warpgroups, rows, outputs] of the result; None if it is stored from registers."""
    w_full: Any
    w_free: Any
    x_full: Any
    x_free: Any


class Work(NamedTuple):
    """An item, and where it begins in the rings."""

    item: Item
    part: Any
    first: Any
    """First slot of K of its part."""
    num_pieces: Any
    slots_before: Any
    """Number of slots of codes before in the ring."""
    pieces_before: Any


def _work(block: Block, turn: Any, slots_before: Any, pieces_before: Any) -> Work:
    """Return an item of this thread block; `turn` may also be one past the last."""
    problem, index = block.problem, block.own_index(turn)
    part = lax.rem(index, _int(problem.parts))
    item = block.item_at(lax.div(index, _int(problem.parts)))
    first, end = (lax.div(_int(problem.steps) * each, _int(problem.parts)) for each in (part, part + 1))
    num_pieces = lax.min(end * problem.pieces, _int(problem.all_pieces)) - first * problem.pieces
    num_pieces = lax.optimization_barrier(num_pieces)  # unrolled loops would take more registers
    return Work(item, part, first, num_pieces, slots_before, pieces_before)


def _for_each_item(block: Block, visit: Callable[[Work], None]) -> None:
    """Call `visit(work)`. The next item is read ahead."""
    pieces = block.problem.pieces

    def turn(index, work):
        slots = lax.div(work.num_pieces + (pieces - 1), _int(pieces))
        following = _work(block, index + 1, work.slots_before + slots, work.pieces_before + work.num_pieces)
        visit(work)
        return following

    lax.fori_loop(_int(0), block.num_own, turn, _work(block, _int(0), _int(0), _int(0)))


def kernel(problem: Problem, gmem: Global, smem: Shared) -> None:
    """Run each warpgroup (mesh axis "wg") of each thread block (axis "block")."""
    warpgroup = lax.axis_index("wg")
    num_tiles = gmem.plan.first[1, gmem.plan.first.shape[1] - 1]
    block = Block(problem, gmem, smem, lax.axis_index("block"), warpgroup, num_tiles, problem.parts)
    rings = ((smem.w_free, problem.w_slots), (smem.x_free, problem.x_slots))

    @pl.when(warpgroup == UNITS)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        _for_each_item(block, lambda work: _copy(block, work))
        for free, slots in rings:
            for slot in range(slots):
                plgpu.barrier_wait(free.at[slot])  # no barrier ends unobserved

    @pl.when(warpgroup < UNITS)
    def _():
        plgpu.set_max_registers(232, action="increase")
        for free, slots in rings:
            for slot in range(slots):
                plgpu.barrier_arrive(free.at[slot])
        _for_each_item(block, lambda work: _compute(block, work))


def _copy(block: Block, work: Work) -> None:
    """Copy the codes of an item, gate and up in halves of the slot, and its rows.

    Whatever follows the group's last row: a row of x only affects the same row of the result. TMA fills in zeros beyond
    the last column.
    """
    problem, smem, item = block.problem, block.smem, work.item
    copied = problem.ring_outputs // problem.halves

    def one_slot(k, _):
        slot = lax.rem(work.slots_before + k, _int(problem.w_slots))
        plgpu.barrier_wait(smem.w_free.at[slot])
        columns = pl.ds((work.first + k) * BYTES, BYTES)
        for half in range(problem.halves):
            source = block.gmem.weight.at[item.group * problem.halves + half, pl.ds(item.output, copied), columns]
            place = smem.weights.at[slot, pl.ds(half * copied, copied)]
            plgpu.copy_gmem_to_smem(source, place, smem.w_full.at[slot])

        def one_piece(index, _):
            slot = lax.rem(work.pieces_before + index, _int(problem.x_slots))
            plgpu.barrier_wait(smem.x_free.at[slot])
            columns = pl.ds((work.first * problem.pieces + index) * PIECE, PIECE)
            source = block.gmem.x.at[pl.ds(item.row, problem.rows), columns]
            plgpu.copy_gmem_to_smem(source, smem.x_boxes.at[slot], smem.x_full.at[slot])

        first = k * problem.pieces
        lax.fori_loop(first, lax.min(first + problem.pieces, work.num_pieces), one_piece, None)

    num_slots = lax.div(work.num_pieces + (problem.pieces - 1), _int(problem.pieces))
    lax.fori_loop(_int(0), num_slots, one_slot, None)


def _compute(block: Block, work: Work) -> None:
    """Multiply a warpgroup's blocks of outputs of an item, and finish or store their sums."""
    for index, sums in enumerate(_multiply(block, work)):
        _finish(block, work, _first_output(block, work, index), sums)


def _first_output(block: Block, work: Work, index: int) -> Any:
    """Return the first output of one of the warpgroup's blocks."""
    own = block.warpgroup * block.problem.blocks + index
    return work.item.output + own * (OUTPUTS // block.problem.halves)


def _multiply(block: Block, work: Work) -> tuple[Any, ...]:
    """Return the sums of the warpgroup's blocks.

    Rows of a piece are released when the first product of the next one has been issued, codes when they are converted.
    """
    problem, smem, ops = block.problem, block.smem, block.problem.ops
    of_groups = {"scales": block.gmem.scales, "zeros": block.gmem.zeros, "minimums": block.gmem.minimums}
    matrices = {name: matrix for name, matrix in of_groups.items() if problem.groups and matrix is not None}

    def vectors_of(index):
        """Load the scales, zero points and minimums of a piece."""
        piece = work.first * problem.pieces + index
        column = lax.div(piece, _int(problem.pieces_of_group)) * max(1, problem.groups)
        return [
            [
                ops.load_scales(
                    matrix,
                    work.item.group * (problem.halves * problem.num_outputs),
                    _first_output(block, work, own),
                    column,
                    num_outputs=problem.num_outputs,
                    is_gated=problem.halves == 2,
                    groups=problem.groups,
                )
                for matrix in matrices.values()
            ]
            for own in range(problem.blocks)
        ]

    def one_piece(index, carry):
        sums, vectors = carry
        following = vectors_of(index + 1)
        in_slot = lax.rem(index, _int(problem.pieces))
        w_slot = lax.rem(work.slots_before + lax.div(index, _int(problem.pieces)), _int(problem.w_slots))
        x_slot = lax.rem(work.pieces_before + index, _int(problem.x_slots))
        pl.when(in_slot == 0)(lambda: plgpu.barrier_wait(smem.w_full.at[w_slot]))
        for own in range(problem.blocks):
            values = ops.operand(
                smem.weights,
                w_slot,
                block.warpgroup * problem.blocks + own,
                in_slot,
                **dict(zip(matrices, vectors[own], strict=True)),
                code=problem.code,
                is_gated=problem.halves == 2,
                groups=problem.groups,
                num_columns=problem.num_scales,
                dtypes={name: matrix.dtype for name, matrix in matrices.items()},
            )
            if own == 0:
                plgpu.barrier_wait(smem.x_full.at[x_slot])
            product = ops.multiply(sums[own], values, smem.x, x_slot)
            sums = (*sums[:own], product, *sums[own + 1 :])
            ops.wait(1)
            if own == 0:
                before = lax.rem(work.pieces_before + index + (problem.x_slots - 1), _int(problem.x_slots))
                pl.when(index > 0)(lambda before=before: plgpu.barrier_arrive(smem.x_free.at[before]))
        is_last = (in_slot == problem.pieces - 1) | (index == work.num_pieces - 1)
        pl.when(is_last)(lambda: plgpu.barrier_arrive(smem.w_free.at[w_slot]))
        return sums, following

    # A wgmma reads values from the registers of its turn until it is done, when that of the next values was issued:
    # those must not have the same registers.
    in_turn = 2 // problem.blocks

    def turn(number, carry):
        for own in range(in_turn):
            carry = one_piece(number * in_turn + own, carry)
        return carry

    def finished(carry):
        ops.wait(0)
        sums, vectors = carry
        return written(sums), vectors

    zeros = tuple(written(ops.zeros(problem.rows)) for _ in range(problem.blocks))
    num_turns = lax.div(work.num_pieces, _int(in_turn))
    carry = finished(lax.fori_loop(_int(0), num_turns, turn, (zeros, vectors_of(_int(0)))))
    if problem.all_pieces % in_turn:  # the last part has one more
        last_turn = num_turns * in_turn
        carry = lax.fori_loop(last_turn, work.num_pieces, lambda *args: finished(one_piece(*args)), carry)
    last = lax.rem(work.pieces_before + work.num_pieces - 1, _int(problem.x_slots))
    plgpu.barrier_arrive(smem.x_free.at[last])
    return carry[0]


def _finish(block: Block, work: Work, first_output: Any, sums: Any) -> None:
    """Scale the sums of 64 outputs, add the bias, apply the activation and store the rows that the item has."""
    problem, gmem, ops, item = block.problem, block.gmem, block.problem.ops, work.item
    is_gated = problem.halves == 2

    places = item.group * (problem.halves * problem.num_outputs), first_output
    options = {"num_outputs": problem.num_outputs, "is_gated": is_gated}

    def vector(ref):
        dtype = jnp.dtype(ref.dtype)
        name = "float8_e8m0fnu" if dtype.itemsize == 1 else dtype.name  # bytes are exponents
        [found] = ops.vectors_of(ops.load_words(ref, places, _int(0), count=1, **options), range(1), name)
        return found

    scales = gmem.factors if problem.groups else gmem.scales
    scale = None if scales is None else vector(scales)
    bias = None if gmem.bias is None else vector(gmem.bias)
    width = OUTPUTS // problem.halves

    def finished(row: int) -> Any:
        y = sums[:, row : row + CHUNK]
        y = y if scale is None else y * scale
        y = y if bias is None else y + bias
        return y if problem.activation is None else problem.activation(*ops.halves(y))

    for start in range(0, problem.rows, STAGED_ROWS):
        rows = min(STAGED_ROWS, problem.rows - start)
        target, num_rows = item.row + start, item.num_rows - start

        @pl.when(num_rows > 0)
        def _(start=start, rows=rows, target=target, num_rows=num_rows):
            for row in range(0, rows, CHUNK):
                y = finished(start + row)
                if block.smem.staged is None:
                    of_part = target + work.part * gmem.x.shape[0] + row
                    ops.store_rows(gmem.y, y, of_part, num_rows - row, first_output, is_gated=is_gated)
                else:
                    ops.stage(block.smem.staged, y, block.warpgroup, row, is_gated=is_gated)
            if block.smem.staged is not None:
                ops.copy_staged(
                    gmem.y,
                    block.smem.staged,
                    block.warpgroup,
                    target,
                    num_rows,
                    first_output,
                    rows=rows,
                    width=width,
                )
