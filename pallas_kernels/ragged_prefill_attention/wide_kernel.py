"""The body of the Hopper kernel of prefill attention for heads of more than 256: the work of a cluster's warpgroups.

Sums of 64 tokens and 512 columns are half of a multiprocessor's registers, so the two computing warpgroups of a CTA
share 64 tokens, and each adds up half of the values' columns: the first one makes the weights as well, and passes them
on in shared memory, as in `latent_attention`. What such a tile reads for its 64 tokens would come from the L2 cache
slower than it is multiplied. Hence a cluster of two CTAs has an item, each the part that a computing warpgroup has in
sm90_kernel.py: keys and values are the same, and each CTA fetches half of them for both.

Blocks of keys and of values are copied, and given back, in two halves of their columns.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.clearing import clear_rows
from pallas_kernels.device.registers import written
from pallas_kernels.paging.tiles import LOG2E, LOWEST, ROWS
from pallas_kernels.ragged_prefill_attention.device import store_rows
from pallas_kernels.ragged_prefill_attention.sm90_kernel import (
    Blocks,
    Global,
    Items,
    Problem,
    Tile,
    begin_item,
    own_part,
    softmax,
)

CLUSTER = 2
"""CTAs of a cluster, which are the parts of a tile (`own_part`)."""

BLOCK_KV = 64
"""Keys of a block."""

HALVES = 2

REGISTERS = (248, 192, 64)
"""Registers per thread of the warpgroups that make the weights, that follow and that copy: together what a CTA is
launched with, 3 * 168.
"""

_LAYOUT = plgpu.Layout.WGMMA
_ROW_LAYOUT = _LAYOUT.reduce(1)

_int = jnp.int32


class Shared(NamedTuple):
    """Arrays and barriers in the shared memory of a CTA.

    The queries have two views of the same bytes: one as wgmma uses them, and one as boxes of 64 tokens and a few
    columns, which may be copied from any token. Keys and values have `HALVES` slots for each block.
    """

    q: Any
    q_boxes: Any
    tile: Any
    """Messages to the computing warpgroups, in two slots in turns, so that they outlast the queries."""
    k: Any
    v: Any
    weights: Any
    fade: Any
    """Factor of earlier sums, for the warpgroup that follows; at the end, the factor of the result."""
    q_full: Any
    q_free: Any
    k_full: Any
    k_free: Any
    v_full: Any
    v_free: Any
    """Those of `free` wait for both CTAs' arrivals: a copy writes into both."""
    weights_full: Any
    weights_free: Any


def kernel(problem: Problem, gmem: Global, smem: Shared) -> None:
    """Run each warpgroup (mesh axis "wg") of each CTA (axis "rank") of each cluster (axis "pair")."""
    items = Items(problem, gmem, lax.axis_index("pair"), problem.num_ctas // CLUSTER)
    rank = lax.axis_index("rank")
    of_keys = [smem.k_free.at[slot] for slot in range(HALVES * problem.k_stages)]
    left, right = (
        [smem.v_free.at[HALVES * stage + half] for stage in range(problem.v_stages)] for half in range(HALVES)
    )

    def tile_slot(number_left):
        return lax.rem(number_left, _int(2))

    def weigh():
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        for barrier in (smem.q_free, *of_keys, *left):
            plgpu.barrier_arrive(barrier)
        items.count_down(lambda number, n: _weigh(problem, gmem, smem, rank, tile_slot(number), n))
        plgpu.barrier_wait(smem.weights_free)

    def follow():
        plgpu.set_max_registers(REGISTERS[1], action="increase")
        for barrier in (smem.q_free, smem.weights_free, *right):
            plgpu.barrier_arrive(barrier)
        items.count_down(lambda number, n: _follow(problem, gmem, smem, rank, tile_slot(number), n))

    def copy():
        plgpu.set_max_registers(REGISTERS[2], action="decrease")
        items.for_each(
            lambda group, item, number, n: _copy(problem, gmem, smem, rank, group, item, tile_slot(number), n)
        )
        for barrier in (smem.q_free, *of_keys, *left, *right):  # none ends unobserved, no CTA before its peer
            plgpu.barrier_wait(barrier)

    # One switch, so that no warpgroup needs registers for the code of another.
    lax.switch(lax.axis_index("wg"), (weigh, follow, copy))


def _copy(problem: Problem, gmem: Global, smem: Shared, rank, group, item, tile_slot, n):
    """Copy the CTA's queries and, for both CTAs, its parts of the keys and values of an item. `n` counts the blocks."""
    row, tile = begin_item(problem, gmem, smem.tile.at[tile_slot], group, item, smem.q_free, smem.q_full)
    own_head, skipped = own_part(problem, rank)
    _, num_parts, _, columns = smem.q.shape
    for part in range(num_parts):
        queries = gmem.q.at[pl.ds(tile.token + skipped, ROWS), tile.head + own_head, pl.ds(part * columns, columns)]
        plgpu.copy_gmem_to_smem(queries, smem.q_boxes.at[0, part], smem.q_full)

    blocks = Blocks(problem, gmem, row, tile)
    half_size = problem.head_dim // HALVES
    # The interpreter copies nothing into another CTA: there each copies all.
    shared = None if problem.interpret else "rank"

    def one_block(j, _):
        pages, offset = blocks.pages(j)
        for source, target, full, free, stages in (
            (gmem.k_pages, smem.k, smem.k_full, smem.k_free, problem.k_stages),
            (gmem.v_pages, smem.v, smem.v_full, smem.v_free, problem.v_stages),
        ):
            for half in range(HALVES):
                slot, columns = _slot(n + j, half, stages), pl.ds(half * half_size, half_size)
                plgpu.barrier_wait(free.at[slot])
                for i, page in enumerate(pages):
                    plgpu.copy_gmem_to_smem(
                        source.at[page, blocks.kv_head, pl.ds(offset, blocks.chunk), columns],
                        target.at[slot, pl.ds(i * blocks.chunk, blocks.chunk)],
                        full.at[slot],
                        collective_axes=shared,
                    )

    lax.fori_loop(_int(0), blocks.number, one_block, None)
    return blocks.counted(n)


def _slot(n, half: int, stages: int):
    """Return the slot of half of a block, of which there were `n` before."""
    return lax.rem(n, _int(stages)) * HALVES + half


def _tile(smem: Shared, tile_slot) -> Tile:
    return Tile(*(smem.tile[tile_slot, field] for field in range(len(Tile._fields))))


def _weigh(problem: Problem, gmem: Global, smem: Shared, rank, tile_slot, n):
    """Run the warpgroup that makes the weights, and adds up the first half of the values' columns, on an item."""
    plgpu.barrier_wait(smem.q_full)
    tile = _tile(smem, tile_slot)
    own_head, skipped = own_part(problem, rank)
    first, last = problem.key_blocks(tile)
    num_blocks = last - first
    nearest = tile.position + skipped - (last - 1) * BLOCK_KV  # from the last block's first key to the first query
    num_held = tile.context - (last - 1) * BLOCK_KV

    slope = None
    if gmem.alibi_slopes is not None:
        slope = gmem.alibi_slopes[tile.head + own_head].astype(jnp.float32) * LOG2E
    maximum, total = LOWEST, 0.0
    if gmem.sinks is not None:  # like a key without a value
        maximum, total = gmem.sinks[tile.head + own_head].astype(jnp.float32) * LOG2E, 1.0
    maximum, total = (plgpu.layout_cast(jnp.full((ROWS,), 1.0, jnp.float32) * x, _ROW_LAYOUT) for x in (maximum, total))

    def step(j, carry):
        acc, maximum, total = carry
        scores = _scores(problem, smem, n + j)
        pl.when(j == num_blocks - 1)(lambda: plgpu.barrier_arrive(smem.q_free))
        distance = nearest + j * BLOCK_KV
        is_cut = distance < BLOCK_KV - 1
        if problem.sliding_window is not None:
            is_cut = is_cut | (distance + (ROWS - 1) >= problem.sliding_window)
        weigh = functools.partial(softmax, problem, slope, scores, distance, maximum, total)
        new_maximum, fade, total, weights = lax.cond(
            is_cut,
            lambda: weigh(is_causal=True, is_windowed=True),
            lambda: weigh(is_causal=False, is_windowed=False),
        )
        plgpu.barrier_wait(smem.weights_free)
        plgpu.commit_smem()  # all warps have multiplied by the weights before
        smem.weights[...] = weights.astype(smem.weights.dtype)
        smem.fade[...] = fade
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem.weights_full)
        acc = acc * lax.broadcast_in_dim(fade, acc.shape, [0])
        acc = _add_values(problem, smem, acc, _slot(n + j, 0, problem.v_stages), num_held + j * BLOCK_KV)
        return acc, new_maximum, total

    acc, _, total = lax.fori_loop(_int(0), num_blocks, step, (_zeros(problem), maximum, total))
    pl.when(num_blocks == 0)(lambda: plgpu.barrier_arrive(smem.q_free))

    # Of tokens after the rows, which have attended to nothing, the result is 0.
    factor = jnp.where(total == 0.0, jnp.zeros_like(total), 1.0 / total)
    plgpu.barrier_wait(smem.weights_free)
    smem.fade[...] = factor
    plgpu.commit_smem()
    plgpu.barrier_arrive(smem.weights_full)
    _store(problem, gmem, smem, rank, tile_slot, acc, factor, half=0)
    return n + num_blocks


def _follow(problem: Problem, gmem: Global, smem: Shared, rank, tile_slot, n):
    """Run the warpgroup that adds up the second half of the values' columns on an item."""
    plgpu.barrier_wait(smem.q_full)
    tile = _tile(smem, tile_slot)
    first, last = problem.key_blocks(tile)
    num_blocks = last - first
    num_held = tile.context - (last - 1) * BLOCK_KV
    plgpu.barrier_arrive(smem.q_free)  # the tile's slot lasts until this warpgroup has been here for the next item

    def load_fade():
        return smem.fade[...] if problem.interpret else plgpu.load(smem.fade, layout=_ROW_LAYOUT, optimized=False)

    def step(j, acc):
        plgpu.barrier_wait(smem.weights_full)
        acc = acc * lax.broadcast_in_dim(load_fade(), acc.shape, [0])
        acc = _add_values(problem, smem, acc, _slot(n + j, 1, problem.v_stages), num_held + j * BLOCK_KV)
        plgpu.barrier_arrive(smem.weights_free)
        return acc

    acc = lax.fori_loop(_int(0), num_blocks, step, _zeros(problem))
    plgpu.barrier_wait(smem.weights_full)
    factor = load_fade()
    plgpu.barrier_arrive(smem.weights_free)
    _store(problem, gmem, smem, rank, tile_slot, acc, factor, half=1)
    return n + num_blocks


def _zeros(problem: Problem):
    return plgpu.layout_cast(jnp.zeros((ROWS, problem.head_dim // HALVES), jnp.float32), _LAYOUT)


def _scores(problem: Problem, smem: Shared, n):
    """Return the scores of the queries with a block of keys; each half is given back when it has been multiplied."""
    # Which the compiler does not know, or it would keep the descriptors of all parts in registers and spill others.
    zero = lax.optimization_barrier(_int(0))
    queries = smem.q.at[zero]
    num_parts, _, columns = queries.shape
    slots = [_slot(n, half, problem.k_stages) + zero for half in range(HALVES)]
    parts_of_half = num_parts // HALVES

    def keys(part: int):
        half, of_half = divmod(part, parts_of_half)
        return smem.k.at[slots[half], :, pl.ds(of_half * columns, columns)]

    if problem.interpret:
        for slot in slots:
            plgpu.barrier_wait(smem.k_full.at[slot])
        products = [jnp.dot(_float(queries[part]), _float(keys(part)[...]).T) for part in range(num_parts)]
        plgpu.commit_smem()  # as wgmma reads: ordered before copies that follow
        for slot in slots:
            plgpu.barrier_arrive(smem.k_free.at[slot])
        return sum(products[1:], products[0])

    def multiply(scores_ref):
        for part in range(num_parts):
            if part % parts_of_half == 0:
                plgpu.barrier_wait(smem.k_full.at[slots[part // parts_of_half]])
            plgpu.wgmma(scores_ref, queries.at[part], keys(part).transpose((1, 0)))
        plgpu.wgmma_wait(parts_of_half)
        plgpu.barrier_arrive(smem.k_free.at[slots[0]])
        scores = written(scores_ref[...])
        plgpu.barrier_arrive(smem.k_free.at[slots[1]])
        return scores

    return pl.run_scoped(multiply, plgpu.ACC((ROWS, BLOCK_KV), jnp.float32))


def _add_values(problem: Problem, smem: Shared, acc, slot, num_held):
    """Add the sums of half of a block's values by the weights to `acc`, and give the values back.

    Only the first `num_held` positions are in the context: the others may be NaN, which a weight of 0 would not take
    away.
    """
    values = smem.v.at[slot]
    plgpu.barrier_wait(smem.v_full.at[slot])

    @pl.when(num_held < BLOCK_KV)
    def _():
        clear_rows(values, num_held, interpret=problem.interpret)
        plgpu.commit_smem()

    if problem.interpret:
        acc = acc + jnp.dot(_float(smem.weights[...]), _float(values[...]))
        plgpu.commit_smem()
    else:
        add: Any = pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, smem.weights, values))
        acc = written(add(plgpu.ACC.init(acc)))
    plgpu.barrier_arrive(smem.v_free.at[slot])
    return acc


def _float(x):
    return x.astype(jnp.float32)


def _store(problem: Problem, gmem: Global, smem: Shared, rank, tile_slot, acc, factor, *, half: int) -> None:
    """Store a warpgroup's half of the columns of a result."""
    tile = _tile(smem, tile_slot)
    own_head, skipped = own_part(problem, rank)
    num_rows = lax.clamp(_int(0), tile.num_tokens - skipped, _int(ROWS))
    acc = (acc * lax.broadcast_in_dim(factor, acc.shape, [0])).astype(gmem.out.dtype)
    first_column = half * (problem.head_dim // HALVES)
    store_rows(
        gmem.out,
        acc,
        tile.token + skipped,
        tile.head + own_head,
        num_rows,
        first_column=first_column,
        interpret=problem.interpret,
    )
