"""The two warpgroups of a stream of the Hopper kernel.

One copies queries and pages into shared memory, tile after tile without a pause between them; the other computes, with
a running softmax (Dao et al. 2023, arXiv:2307.08691). The queries of a KV head are the columns of the products
(`query_columns`) or, if there are many, their rows (`query_rows`).
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import counters, vectors_of_8_bits
from pallas_kernels.paged_attention import query_columns, query_rows
from pallas_kernels.paging.tiles import LOG2E, LOWEST, ROWS, for_each_tile, normalize, put_together

_LAYOUT = plgpu.Layout.WGMMA
HEADROOM = 15.0
"""Weights times the scales of their values are at most 2^15, so that float16, which has no room for more, rounds those
of 2^-29 of the largest as well as that, and loses none of more than 2^-40 of it.
"""
SMALLEST_SCALE = 2.0**-64
"""Scales of values that are smaller, of vectors of zeros, count as this one, so that totals stay finite."""


def copy(problem, split, refs, scratch):
    """Run the copying warpgroup: queries and blocks of one tile after another, as far ahead as there is room."""
    config = problem.config
    pages_per_block = max(1, config.block_kv // problem.block_size)
    blocks_per_page = max(1, problem.block_size // config.block_kv)
    rows_per_copy = min(config.block_kv, problem.block_size)
    q_rows = -(-problem.tile_rows // 4) * 4  # whole multiples of 128 bytes

    def visit(tile, carry):
        num_tiles, num_blocks = carry
        head = lax.div(tile.index, jnp.int32(problem.tiles_per_head))

        def copy_queries():
            @pl.when(num_tiles > 0)
            def _():
                plgpu.barrier_wait(scratch.q_free.at[scratch.stream])

            # Rows beyond the tile's belong to others, or are zeros: their results are not written.
            start = (tile.row * problem.num_tiles + tile.index) * problem.tile_rows
            plgpu.copy_gmem_to_smem(
                refs.q.at[pl.ds(start, q_rows)], scratch.q_in.at[pl.ds(0, q_rows)], scratch.q_full.at[scratch.stream]
            )

        if problem.copies_queries:
            pl.when(tile.end > tile.first)(copy_queries)

        def copy_block(block, _):
            k_place, v_place = _places(problem, scratch, num_blocks + block - tile.first)
            last_page = lax.div(tile.seq_len - 1, jnp.int32(problem.block_size))
            offset = lax.rem(block, jnp.int32(blocks_per_page)) * config.block_kv if blocks_per_page > 1 else 0

            def page_of(part):
                if blocks_per_page > 1:
                    return refs.tables[tile.row, lax.div(block, jnp.int32(blocks_per_page))]
                # Beyond the end the last page is copied again, which costs no memory traffic.
                return refs.tables[tile.row, lax.min(block * pages_per_block + part, last_page)]

            def wait_for(free, place):
                turn, slot = place

                @pl.when(turn >= config.stages)
                def _():
                    plgpu.barrier_wait(free.at[slot])

            def copy_rows(pool, held, full, place, part, page):
                _, slot = place
                plgpu.copy_gmem_to_smem(
                    pool.at[page, head, pl.ds(offset, rows_per_copy)],
                    held.at[slot, pl.ds(part * rows_per_copy, rows_per_copy)],
                    full.at[slot],
                )

            def copy_scales(part, page):
                _, slot = k_place
                plgpu.copy_gmem_to_smem(
                    refs.scales.at[page, head, :, pl.ds(offset, rows_per_copy)],
                    scratch.scales.at[slot, part],
                    scratch.k_full.at[slot],
                )

            copy_keys = functools.partial(copy_rows, refs.k, scratch.k, scratch.k_full, k_place)
            copy_values = functools.partial(copy_rows, refs.v, scratch.v, scratch.v_full, v_place)
            wait_for(scratch.k_free, k_place)
            if problem.has_scales:  # places of scales and values are free with that of the keys
                wait_for(scratch.v_free, v_place)
                in_warps(pages_per_block, page_of, [copy_keys, copy_scales, copy_values], interpret=problem.interpret)
            else:
                in_warps(pages_per_block, page_of, [copy_keys], interpret=problem.interpret)
                wait_for(scratch.v_free, v_place)
                in_warps(pages_per_block, page_of, [copy_values], interpret=problem.interpret)

        lax.fori_loop(tile.first, tile.end, copy_block, None)
        return num_tiles + (tile.end > tile.first).astype(jnp.int32), num_blocks + tile.end - tile.first

    nothing = (jnp.int32(0), jnp.int32(0))
    num_tiles, num_blocks = for_each_tile(problem, refs.splits, refs.rows, split, visit, nothing)

    # A barrier must not be left with an arrival that nobody has waited for.
    if problem.copies_queries:
        pl.when(num_tiles > 0)(lambda: plgpu.barrier_wait(scratch.q_free.at[scratch.stream]))

    def drain(turn, _):
        _, slot = _place(problem, scratch, turn)
        plgpu.barrier_wait(scratch.k_free.at[slot])
        if not config.has_one_ring:
            plgpu.barrier_wait(scratch.v_free.at[slot])

    num_turns = 2 * num_blocks if config.has_one_ring else num_blocks
    lax.fori_loop(lax.max(num_turns - config.stages, jnp.int32(0)), num_turns, drain, None)


def in_warps(num_parts, page_of, copies, *, interpret):
    """Make the copies of each part of a block in one of the warpgroup's warps, so that no barrier stands between copies
    and each scheduler has its share.
    """

    def make_copies(part):
        page = page_of(part)
        for copy_part in copies:
            copy_part(part, page)

    def run(warp):
        for number in range(min(num_parts, 4)):

            @pl.when(warp == number)
            def _(number=number):
                for part in range(number, num_parts, 4):
                    make_copies(part)

    if interpret:
        for part in range(num_parts):
            make_copies(part)
    else:
        plgpu.warp_map(run)


def _places(problem, scratch, index):
    """Return the places of the keys and of the values of a stream's block, see `_place`."""
    if problem.config.has_one_ring:
        return _place(problem, scratch, 2 * index), _place(problem, scratch, 2 * index + 1)
    return (_place(problem, scratch, index),) * 2


def _place(problem, scratch, turn):
    """Return the turn, how many were before in the ring, and the slot."""
    return turn, scratch.stream * problem.config.stages + lax.rem(turn, jnp.int32(problem.config.stages))


def compute(problem, split, refs, scratch):
    """Run the computing warpgroup."""
    config = problem.config

    def visit(tile, carry):
        num_tiles, num_blocks = carry
        has_blocks = tile.end > tile.first

        @pl.when(tile.is_begun | has_blocks)
        def _():
            slopes = None
            if refs.alibi_slopes is not None:
                slopes = problem.load(refs.alibi_slopes.at[tile.index], _form(problem).VECTOR_LAYOUT) * LOG2E

            @pl.when(has_blocks)
            def _():
                if problem.copies_queries:
                    plgpu.barrier_wait(scratch.q_full.at[scratch.stream])
                    queries = scratch.q_in
                else:
                    queries = refs.q.at[_rows_of(problem, tile.row * problem.num_tiles + tile.index)]
                _form(problem).take_queries(problem, scratch, queries)
                plgpu.commit_smem()
                if problem.copies_queries:
                    plgpu.barrier_arrive(scratch.q_free.at[scratch.stream])

            def attend(block, state, *, is_masked):
                index = num_blocks + block - tile.first
                return _attend(problem, tile, block, index, state, scratch, slopes, is_masked)

            # Only the last block has positions that are not attended to, if there is one query and no window.
            all_masked = problem.num_queries > 1 or problem.sliding_window is not None
            full_end = (
                tile.first if all_masked else lax.min(tile.end, lax.div(tile.seq_len, jnp.int32(config.block_kv)))
            )
            state = _form(problem).nothing_yet(problem)
            if not all_masked:
                state = lax.fori_loop(tile.first, full_end, functools.partial(attend, is_masked=False), state)
            state = lax.fori_loop(
                lax.max(full_end, tile.first), tile.end, functools.partial(attend, is_masked=True), state
            )

            acc, maximum, total = state
            state = acc, maximum, _form(problem).totals(problem, total, scratch)

            is_whole = tile.is_begun & (tile.end == tile.row_end)

            @pl.when(is_whole)
            def _():
                _write_result(problem, tile, refs, scratch, *state)

            @pl.when(~is_whole)
            def _():
                own_part_index = config.num_splits + split
                part_index = jnp.where(tile.is_begun, own_part_index, refs.splits[split, 6])
                _leave_part(problem, part_index, refs, *state)

                @pl.when(~tile.is_begun)
                def _():
                    counters.signal(refs.arrivals.at[refs.splits[split, 5]], interpret=problem.interpret)

                @pl.when(tile.is_begun)
                def _():
                    num_others = refs.splits[split, 7]
                    counters.take(refs.arrivals.at[split], num_others, interpret=problem.interpret)
                    item = tile.row * problem.num_tiles + tile.index
                    out = _results(problem, item, refs, scratch)

                    def write(rows, acc, lse):
                        out.at[rows][...] = acc.astype(out.dtype)
                        refs.lse.at[item, rows][...] = lse

                    put_together(problem, tile.index, split, num_others, refs.parts, refs.stats, refs.sinks, write)
                    _copy_out(problem, item, refs, scratch)

        return num_tiles + has_blocks.astype(jnp.int32), num_blocks + tile.end - tile.first

    for_each_tile(problem, refs.splits, refs.rows, split, visit, (jnp.int32(0), jnp.int32(0)))
    if problem.copies_queries:
        plgpu.wait_smem_to_gmem(0)


def _form(problem):
    """Return the module with the stream's operations."""
    return query_columns if problem.columns else query_rows


def _attend(problem, tile, block, index, state, scratch, slopes, is_masked):
    """Return the running softmax's `state` after one more block."""
    form = _form(problem)
    block_kv = problem.config.block_kv
    acc, maximum, total = state
    (_, slot), (_, v_slot) = _places(problem, scratch, index)
    first_held = _first_held(problem, tile)
    values = scratch.converted if problem.has_scales else scratch.v.at[v_slot]

    def take_values():
        plgpu.barrier_wait(scratch.v_full.at[v_slot])
        if problem.has_scales:
            # wgmma takes no values of 8 bits, whose rows are keys. All have done with those of the block before.
            vectors_of_8_bits.wait_for_all(interpret=problem.interpret)
            held = (first_held - block * block_kv, tile.seq_len - block * block_kv) if is_masked else None
            vectors_of_8_bits.convert(values, scratch.v.at[v_slot], held=held, interpret=problem.interpret)

    if is_masked and not problem.has_scales:
        take_values()
        is_cut = (block * block_kv < first_held) | ((block + 1) * block_kv > tile.seq_len)

        @pl.when(is_cut)
        def _():
            _clear_outside(problem, values, block, first_held, tile.seq_len)

    plgpu.barrier_wait(scratch.k_full.at[slot])
    k_scales: Any = None
    v_scales: Any = None
    if problem.has_scales:
        k_scales, v_scales = (
            vectors_of_8_bits.scales(
                scratch.scales.at[slot],
                kind,
                (block_kv, problem.columns),
                axis=form.KEYS,
                interpret=problem.interpret,
            )
            for kind in (0, 1)
        )
    meanwhile = take_values if problem.has_scales else lambda: None
    scores = form.scores(problem, scratch.k.at[slot], scratch, meanwhile)
    plgpu.barrier_arrive(scratch.k_free.at[slot])
    if problem.has_scales:
        plgpu.barrier_arrive(scratch.v_free.at[v_slot])  # they have been converted meanwhile
        scores = scores * k_scales
        v_scales = jnp.log2(jnp.maximum(v_scales, SMALLEST_SCALE))

    if problem.soft_cap is None:
        scores = scores * (problem.scale * LOG2E)
    else:
        # tanh from exp: the hardware's own is good for 11 bits only.
        grown = jnp.exp2(scores * (2 * LOG2E * problem.scale / problem.soft_cap))
        scores = (problem.soft_cap * LOG2E) * (1.0 - 2.0 / (grown + 1.0))
    key = problem.iota(scores.shape, form.KEYS) + block * block_kv
    position = _query_position(problem, tile, key)
    if slopes is not None:
        distance = (key - position).astype(jnp.float32)
        scores = scores + form.spread(problem, slopes, scores.shape) * distance
    allowed: Any = None
    if is_masked:
        if problem.num_queries == 1:
            allowed = (key < tile.seq_len) & (key >= first_held)
        else:
            allowed = (key <= position) & (position < tile.seq_len)
            if problem.sliding_window is not None:
                allowed = allowed & (key > position - problem.sliding_window)
        scores = jnp.where(allowed, scores, LOWEST)

    scaled = scores
    if problem.has_scales:
        scaled = scores + v_scales
        if is_masked:  # scales outside the context may be NaN
            scaled = jnp.where(allowed, scaled, LOWEST)
    reference = form.maxima(problem, scaled, scratch)
    if problem.has_scales:
        reference = reference - HEADROOM
    new_maximum = jnp.maximum(maximum, reference)
    keep = jnp.exp2(maximum - new_maximum)
    spread_maximum = form.spread(problem, new_maximum, scores.shape)
    weights = jnp.exp2(scaled - spread_maximum)
    in_total = jnp.exp2(scores - spread_maximum) if problem.has_scales else weights
    total = form.add_weights(problem, total, keep, in_total)
    acc = acc * form.spread(problem, keep, acc.shape)
    weights = weights.astype(values.dtype)

    if not (is_masked or problem.has_scales):
        take_values()
    form.put_weights(problem, weights, scratch)
    if problem.columns:
        plgpu.commit_smem()
    acc = form.add_values(problem, acc, weights, values, scratch)
    if not problem.has_scales:
        plgpu.barrier_arrive(scratch.v_free.at[v_slot])
    return acc, new_maximum, total


def _query_position(problem, tile, key):
    """Return the position of each row's query, in the shape of `key`; a number if there is one query."""
    if problem.num_queries == 1:
        return tile.seq_len - 1
    row = problem.iota(key.shape, _form(problem).QUERIES)
    row = row + lax.rem(tile.index, jnp.int32(problem.tiles_per_head)) * ROWS
    query = lax.div(row, jnp.full_like(row, problem.queries_per_token))
    return query + (tile.seq_len - tile.query_len)


def _clear_outside(problem, values, block, first_held, end_held):
    """Clear values outside the context, which may be NaN: a weight of 0 would not remove that."""
    columns = swizzle_bytes(problem.head_dim) // 2
    for column in range(0, problem.head_dim, columns):
        part = values.at[:, pl.ds(column, columns)]
        held = problem.load(part, _LAYOUT)
        key = problem.iota(held.shape, 0) + block * problem.config.block_kv
        part[...] = jnp.where((key < end_held) & (key >= first_held), held, jnp.zeros_like(held))
    plgpu.commit_smem()


def _first_held(problem, tile):
    """Return the first position that the row's oldest query attends to."""
    if problem.sliding_window is None:
        return jnp.int32(0)
    return lax.max(tile.seq_len - tile.query_len - (problem.sliding_window - 1), jnp.int32(0))


def _write_result(problem, tile, refs, scratch, acc, maximum, total):
    """Write the result of a finished tile."""
    item = tile.row * problem.num_tiles + tile.index
    sinks = None
    if refs.sinks is not None:
        sinks = problem.load(refs.sinks.at[tile.index], _form(problem).VECTOR_LAYOUT)
    factor, lse = normalize(maximum, total, sinks)
    form = _form(problem)
    form.write_result(problem, _results(problem, item, refs, scratch), acc, factor)
    form.write_vector(problem, refs.lse.at[item], lse)
    _copy_out(problem, item, refs, scratch)


def _results(problem, item, refs, scratch):
    """Return where results of a tile are put, of which `_copy_out` makes the kernel's."""
    if not problem.copies_queries:
        return refs.out.at[_rows_of(problem, item)]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the copy of the tile before
    return scratch.out


def _copy_out(problem, item, refs, scratch):
    if problem.copies_queries:
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scratch.out.at[pl.ds(0, problem.tile_rows)], refs.out.at[_rows_of(problem, item)])


def _rows_of(problem, item):
    """Return the rows of a tile in global memory."""
    return pl.ds(item * problem.tile_rows, problem.tile_rows)


def _leave_part(problem, part_index, refs, acc, maximum, total):
    """Put what this CTA has of a tile to where the CTA that has its beginning finds it."""
    form = _form(problem)
    form.write_part(problem, refs.parts.at[part_index], acc)
    form.write_vector(problem, refs.stats.at[part_index, 0], maximum)
    form.write_vector(problem, refs.stats.at[part_index, 1], total)


def swizzle_bytes(head_dim: int) -> int:
    """Return the widest swizzle in bytes that divides a row of the head."""
    return next(width for width in (128, 64, 32) if head_dim * 2 % width == 0)


class Refs(NamedTuple):
    """Arrays in global memory."""

    q: Any
    k: Any
    v: Any
    tables: Any
    splits: Any
    rows: Any
    arrivals: Any
    sinks: Any
    alibi_slopes: Any
    scales: Any
    out: Any
    lse: Any
    parts: Any
    stats: Any


class Scratch(NamedTuple):
    """Arrays in shared memory; q_in, q, out, weights and exchanged are this stream's, the others all streams'. Where
    queries are not copied there is no q_in, out, q_full and q_free; with one ring, v and its barriers are those of k.
    """

    q_in: Any
    q: Any
    k: Any
    v: Any
    out: Any
    weights: Any
    exchanged: Any
    scales: Any
    """[slots, pages, 2, keys a page], and of `converted` a block a stream; None for pages of 16 bits."""
    converted: Any
    q_full: Any
    q_free: Any
    k_full: Any
    k_free: Any
    v_full: Any
    v_free: Any
    stream: Any
