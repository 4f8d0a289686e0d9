"""The body of the Hopper kernel: the work of a CTA's warpgroups. See sm90.py.

Items are the tiles of a split (a CTA's part of the work), or the parts of tiles within it. The copying warpgroup runs
ahead, limited only by the room in shared memory. The first of the two computing warpgroups computes the weights of a
block of keys, with a running softmax, and adds up the first half of the values' columns; the second adds up the other
half, with the same weights.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.registers import written
from pallas_kernels.latent_attention.device import mask_after, store_first_rows
from pallas_kernels.latent_attention.plan import BLOCK_COST, BLOCK_KV, ROWS
from pallas_kernels.paging.tiles import LOG2E, LOWEST

REGISTERS = (256, 208, 40)
"""Registers per thread in each warpgroup."""

_LAYOUT = plgpu.Layout.WGMMA
_ROW_LAYOUT = _LAYOUT.reduce(1)

_int = jnp.int32


class Problem(NamedTuple):
    """Compile-time parameters of the kernels."""

    num_heads: int
    latent_size: int
    block_size: int
    stages: int
    num_splits: int
    part_rows: int
    """Maximum rows of a tile, at most ROWS."""
    columns: int
    """Columns per swizzled row."""
    scale: float
    interpret: bool

    @property
    def half(self) -> int:
        """Columns of the values that a computing warpgroup adds up."""
        return self.latent_size // 2


class Global(NamedTuple):
    """Arrays in global memory."""

    q: Any
    """[T * H, D]"""
    pages: Any
    block_tables: Any
    tiles: Any
    splits: Any
    out: Any
    """[T * H, R]"""
    parts: Any
    """Partial results [2 * num_splits, part_rows, R] in float32: one per `part_index`, then the part of each split's
    last tile.
    """
    part_lse: Any


class Shared(NamedTuple):
    """Arrays and barriers in shared memory.

    The queries have two views of the same bytes: one as wgmma uses them, and one as boxes of 64 rows and a few columns,
    which may be copied from any row. Vectors are split into two arrays: the left half of the latent, and the rest of
    the vector.
    """

    q: Any
    q_boxes: Any
    item: Any
    left: Any
    right: Any
    weights: Any
    fade: Any
    """Factor of earlier sums, for the second warpgroup; at the end, the factor of the result."""
    q_full: Any
    q_free: Any
    left_full: Any
    left_free: Any
    right_full: Any
    right_free: Any
    weights_full: Any
    weights_free: Any


class Item(NamedTuple):
    """The copying warpgroup's message to the others, in one of the two slots of `Shared.item`."""

    seen: Any
    context: Any
    first: Any
    end: Any
    """End of the item's blocks of keys."""
    query: Any
    num_queries: Any
    """0 if there is nothing to do."""
    part_index: Any
    """Index of the partial result; -1 if this is the whole tile, which is written to the result."""


def kernel(problem: Problem, gmem: Global, smem: Shared) -> None:
    """Run each warpgroup (mesh axis "wg") of each CTA (axis "split")."""
    split = lax.axis_index("split")

    def for_each_item(visit) -> None:
        """Call `n = visit(i, item slot, n)` for each item; n counts blocks of keys."""
        num_tiles = gmem.splits[3, split]
        lax.fori_loop(_int(0), num_tiles, lambda i, n: visit(i, smem.item.at[lax.rem(i, _int(2))], n), _int(0))

    def slots_of(barrier):
        return [barrier.at[slot] for slot in range(problem.stages)]

    def weigh():
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        for barrier in (smem.q_free, *slots_of(smem.left_free)):
            plgpu.barrier_arrive(barrier)
        for_each_item(lambda _, item, n: _weigh(problem, gmem, smem, item, n))
        plgpu.barrier_wait(smem.weights_free)

    def follow():
        plgpu.set_max_registers(REGISTERS[1], action="increase")
        for barrier in (smem.q_free, smem.weights_free, *slots_of(smem.right_free)):
            plgpu.barrier_arrive(barrier)
        for_each_item(lambda _, item, n: _follow(problem, gmem, smem, item, n))

    def copy():
        plgpu.set_max_registers(REGISTERS[2], action="decrease")
        begin, end, first_tile, _, part_index = (gmem.splits[field, split] for field in range(5))

        def visit(i, item, n):
            part_indices = part_index, problem.num_splits + split
            return _copy(problem, gmem, smem, item, first_tile + i, begin, end, part_indices, n)

        for_each_item(visit)
        for barrier in (smem.q_free, *slots_of(smem.left_free), *slots_of(smem.right_free)):
            plgpu.barrier_wait(barrier)  # none ends unobserved

    # One switch, so that no warpgroup needs registers for the code of another.
    lax.switch(lax.axis_index("wg"), (weigh, follow, copy))


def _copy(problem: Problem, gmem: Global, smem: Shared, item_slot, tile, begin, end, part_indices, n):
    """Copy the queries and vectors of an item. Its partial result, if it is one, goes to the first of `part_indices` if
    the tile began in an earlier split, else to the second.
    """
    row, query, num_queries, seen, last_seen, context, unit = (gmem.tiles[field, tile] for field in range(7))
    num_blocks = lax.div(last_seen + (BLOCK_KV - 1), _int(BLOCK_KV))

    def blocks_before(x):
        return lax.clamp(_int(0), lax.div(lax.max(x - unit, _int(0)) + (BLOCK_COST - 1), _int(BLOCK_COST)), num_blocks)

    first, stop = blocks_before(begin), blocks_before(end)
    is_begun = unit >= begin
    is_whole = is_begun & (stop == num_blocks)
    has_nothing = ~is_begun & (first == stop)
    item = Item(
        query=query,
        num_queries=lax.select(has_nothing, _int(0), num_queries),
        seen=seen,
        context=context,
        first=first,
        end=stop,
        part_index=lax.select(is_whole | has_nothing, _int(-1), lax.select(is_begun, part_indices[1], part_indices[0])),
    )
    plgpu.barrier_wait(smem.q_free)
    for field, value in enumerate(item):
        item_slot[field] = value
    plgpu.barrier_arrive(smem.q_full)
    for part in range(smem.q.shape[0]):
        # Rows beyond the tile's belong to other tiles: their results are not written.
        columns = pl.ds(part * problem.columns, problem.columns)
        plgpu.copy_gmem_to_smem(gmem.q.at[pl.ds(query, ROWS), columns], smem.q_boxes.at[part], smem.q_full)

    # Beyond the context the last page is copied again.
    last_page = lax.max(lax.div(context - 1, _int(problem.block_size)), _int(0))
    chunk = min(BLOCK_KV, problem.block_size)

    def one_block(block, n):
        slot, position = lax.rem(n, _int(problem.stages)), block * BLOCK_KV
        pages = [
            gmem.block_tables[row, lax.min(lax.div(position + key, _int(problem.block_size)), last_page)]
            for key in range(0, BLOCK_KV, chunk)
        ]
        offset = 0
        if problem.block_size > chunk:
            offset = pl.multiple_of(lax.rem(position, _int(problem.block_size)), chunk)
        for target, column, full, free in (
            (smem.left, 0, smem.left_full, smem.left_free),
            (smem.right, problem.half, smem.right_full, smem.right_free),
        ):
            plgpu.barrier_wait(free.at[slot])
            for i, page in enumerate(pages):
                plgpu.copy_gmem_to_smem(
                    gmem.pages.at[page, 0, pl.ds(offset, chunk), pl.ds(column, target.shape[2])],
                    target.at[slot, pl.ds(i * chunk, chunk)],
                    full.at[slot],
                )
        return n + 1

    return lax.fori_loop(first, stop, one_block, n)


def _weigh(problem: Problem, gmem: Global, smem: Shared, item_slot, n):
    """Run the first computing warpgroup on an item."""
    plgpu.barrier_wait(smem.q_full)
    first, end = _read(item_slot, "first", "end")

    def step(block, carry):
        acc, maximum, total, n = carry
        slot = lax.rem(n, _int(problem.stages))
        plgpu.barrier_wait(smem.left_full.at[slot])
        first_key = block * BLOCK_KV
        seen, context = _read(item_slot, "seen", "context")  # read again, which is cheaper than registers
        _clean(problem, smem.left.at[slot], context - first_key)
        scores = lax.cond(
            first_key + BLOCK_KV > seen,
            lambda scores: mask_after(
                scores, _seen_beyond(problem, item_slot) + (seen - 1 - first_key), interpret=problem.interpret
            ),
            lambda scores: scores,
            _scores(problem, smem, slot),
        )
        unit = problem.scale * LOG2E
        new_maximum = jnp.maximum(maximum, scores.max(axis=1) * unit)
        fade = jnp.exp2(maximum - new_maximum)
        weights = jnp.exp2(scores * unit - lax.broadcast_in_dim(new_maximum, scores.shape, [0]))
        total = total * fade + weights.sum(axis=1)
        plgpu.barrier_wait(smem.weights_free)
        smem.weights[...] = weights.astype(smem.weights.dtype)
        smem.fade[...] = fade
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem.weights_full)
        acc = acc * lax.broadcast_in_dim(fade, acc.shape, [0])
        acc = _add_values(problem, acc, smem, smem.left.at[slot])
        plgpu.barrier_arrive(smem.left_free.at[slot])
        return acc, new_maximum, total, n + 1

    row = functools.partial(jnp.full, (ROWS,), dtype=jnp.float32)
    maximum, total = (plgpu.layout_cast(row(x), _ROW_LAYOUT) for x in (LOWEST, 0.0))
    acc, maximum, total, n = lax.fori_loop(first, end, step, (_zeros(problem), maximum, total, n))
    plgpu.barrier_arrive(smem.q_free)

    is_nothing = total == 0.0  # and not of NaN, which is to be seen
    factor = jnp.where(is_nothing, jnp.zeros_like(total), 1.0 / total)
    plgpu.barrier_wait(smem.weights_free)
    smem.fade[...] = factor
    plgpu.barrier_arrive(smem.weights_full)
    _store(problem, gmem, item_slot, acc, factor, column=0)
    [part_index] = _read(item_slot, "part_index")

    @pl.when(part_index >= 0)
    def _():
        lse = jnp.where(is_nothing, jnp.full_like(total, LOWEST), maximum + jnp.log2(total))
        gmem.part_lse.at[part_index][...] = lse

    return n


def _follow(problem: Problem, gmem: Global, smem: Shared, item_slot, n):
    """Run the second computing warpgroup on an item."""
    plgpu.barrier_wait(smem.q_full)
    context, first, end = _read(item_slot, "context", "first", "end")
    plgpu.barrier_arrive(smem.q_free)  # the slot lasts until this warpgroup has been here for the next item

    def load_fade():
        return smem.fade[...] if problem.interpret else plgpu.load(smem.fade, layout=_ROW_LAYOUT, optimized=False)

    def step(block, carry):
        acc, n = carry
        slot = lax.rem(n, _int(problem.stages))
        values = smem.right.at[slot, :, pl.ds(0, problem.half)]
        plgpu.barrier_wait(smem.right_full.at[slot])
        plgpu.barrier_wait(smem.weights_full)
        _clean(problem, values, context - block * BLOCK_KV)
        acc = acc * lax.broadcast_in_dim(load_fade(), acc.shape, [0])
        acc = _add_values(problem, acc, smem, values)
        plgpu.barrier_arrive(smem.weights_free)
        plgpu.barrier_arrive(smem.right_free.at[slot])
        return acc, n + 1

    acc, n = lax.fori_loop(first, end, step, (_zeros(problem), n))
    plgpu.barrier_wait(smem.weights_full)
    factor = load_fade()
    plgpu.barrier_arrive(smem.weights_free)
    _store(problem, gmem, item_slot, acc, factor, column=problem.half)
    return n


def _read(item_slot, *names: str) -> list[Any]:
    """Fields of the Item in a slot."""
    return [item_slot[Item._fields.index(name)] for name in names]


def _zeros(problem: Problem):
    return plgpu.layout_cast(jnp.zeros((ROWS, problem.half), jnp.float32), _LAYOUT)


def _seen_beyond(problem: Problem, item_slot):
    """Return how many positions more than the first query each query of an item attends to."""
    query = plgpu.broadcasted_iota(_int, (ROWS,), 0, layout=_ROW_LAYOUT)
    [first] = _read(item_slot, "query")
    query = query + lax.rem(first, _int(problem.num_heads))
    return lax.div(query, jnp.full_like(query, problem.num_heads))


def _clean(problem: Problem, values, num_held) -> None:
    """Zeros for values past the context: they may be NaN, which a weight of 0 would not take away."""

    @pl.when(num_held < BLOCK_KV)
    def _():
        for column in range(0, problem.half, problem.columns):
            some = values.at[:, pl.ds(column, problem.columns)]
            held = plgpu.load(some, layout=_LAYOUT)
            key = plgpu.broadcasted_iota(_int, held.shape, 0, layout=_LAYOUT)
            some[...] = jnp.where(key < num_held, held, jnp.zeros((), held.dtype))
        plgpu.commit_smem()


def _scores(problem: Problem, smem: Shared, slot):
    """Return the scores of the queries with the keys in a slot, whose left half has arrived."""
    left, right = (
        [vectors.at[slot, :, pl.ds(column, problem.columns)] for column in range(0, vectors.shape[2], problem.columns)]
        for vectors in (smem.left, smem.right)
    )
    if problem.interpret:
        plgpu.barrier_wait(smem.right_full.at[slot])
        products = [jnp.dot(_float(smem.q[part]), _float(keys[...]).T) for part, keys in enumerate(left + right)]
        plgpu.commit_smem()  # as wgmma reads: ordered before copies that follow
        return sum(products[1:], products[0])

    def multiply(scores_ref):
        for part, keys in enumerate(left + right):
            if part == len(left):
                plgpu.barrier_wait(smem.right_full.at[slot])
            plgpu.wgmma(scores_ref, smem.q.at[part], keys.transpose((1, 0)))
        return written(scores_ref[...])

    return pl.run_scoped(multiply, plgpu.ACC((ROWS, BLOCK_KV), jnp.float32))


def _add_values(problem: Problem, acc, smem: Shared, values):
    """`acc` and the sums of values by the weights."""
    if problem.interpret:
        acc = acc + jnp.dot(_float(smem.weights[...]), _float(values[...]))
        plgpu.commit_smem()
        return acc
    add: Any = pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, smem.weights, values))
    return written(add(plgpu.ACC.init(acc)))


def _float(x):
    return x.astype(jnp.float32)


def _store(problem: Problem, gmem: Global, item_slot, acc, factor, *, column: int) -> None:
    """Store a warpgroup's half of the result, or of a partial result."""
    query, num_queries, part_index = _read(item_slot, "query", "num_queries", "part_index")
    acc = acc * lax.broadcast_in_dim(factor, acc.shape, [0])
    store = functools.partial(store_first_rows, num_rows=num_queries, column=column, interpret=problem.interpret)
    pl.when(part_index < 0)(lambda: store(gmem.out, acc, row=query))
    pl.when(part_index >= 0)(lambda: store(gmem.parts.at[part_index], acc, row=_int(0)))
