"""A decode step's attention as the first part of the kernel: rotation, the new keys and values, and the heads.

Each CTA has a split of all contexts (see `pallas_kernels.paging.plan`), whose pages go through the ring of
weights, before them. So the weights of the first matmul arrive while the CTA waits for other work. A row's newest key
and value are not read from their page: they are the initial state of its running softmax.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import counters, registers
from pallas_kernels.device.registers import written
from pallas_kernels.hopper import NUM_SMS
from pallas_kernels.layer_matmuls import device
from pallas_kernels.paging.tiles import (
    LOG2E,
    LOWEST,
    ROWS,
    Problem,
    for_each_tile,
    normalize,
    put_together,
)

_LAYOUT = plgpu.Layout.WGMMA
_ROW_LAYOUT = _LAYOUT.reduce(1)
_int = jnp.int32


class Context(NamedTuple):
    """The state of a warpgroup in the attention."""

    problem: Problem
    gmem: Mapping[str, Any]
    blocks: Any
    """The ring of weights, viewed as blocks of keys or values."""
    full: Any
    """Barriers of the blocks, with one arrival per page."""
    free: Any
    split: Any

    @property
    def num_slots(self) -> int:
        """Number of slots of the ring."""
        return self.blocks.shape[0]

    def slot(self, step: Any) -> Any:
        """Return the slot of a step of the ring."""
        return lax.rem(step, _int(self.num_slots))

    def for_each_tile(self, visit: Any, *carry: Any) -> Any:
        """Call `carry = visit(tile, carry)` for each tile of the split."""
        return for_each_tile(self.problem, self.gmem["splits"], self.gmem["lens"], self.split, visit, carry)


def split_of(cta: Any) -> Any:
    """Return the split of a CTA, in reverse order.

    The parts of a tile are combined by the split with its beginning; in this order the interpreter has run the others
    by then.
    """
    return NUM_SMS - 1 - cta


def copy_contexts(context: Context) -> Any:
    """Copy all blocks of keys and values of the split; return the number of ring steps used."""
    problem, gmem = context.problem, context.gmem
    block_kv = problem.config.block_kv
    block_size = problem.block_size
    pages_per_block = block_kv // block_size

    def visit(tile, carry):
        [steps] = carry

        def copy_block(block, _):
            last_page = lax.div(tile.seq_len - 1, _int(block_size))
            # Beyond the end the last page is copied again, which costs no memory traffic.
            columns = [lax.min(block * pages_per_block + i, last_page) for i in range(pages_per_block)]
            pages = [gmem["tables"][tile.row, column] for column in columns]
            for which, pool in enumerate((gmem["k_pages"], gmem["v_pages"])):
                step = steps + 2 * (block - tile.first) + which
                slot = context.slot(step)

                @pl.when(step >= context.num_slots)
                def _(slot=slot):
                    plgpu.barrier_wait(context.free.at[slot])

                for i, page in enumerate(pages):
                    plgpu.copy_gmem_to_smem(
                        pool.at[page, tile.index],
                        context.blocks.at[slot, pl.ds(i * block_size, block_size)],
                        context.full.at[slot],
                    )

        lax.fori_loop(tile.first, tile.end, copy_block, None)
        return (steps + 2 * (tile.end - tile.first),)

    [steps] = context.for_each_tile(visit, _int(0))
    return steps


def attend(context: Context) -> Any:
    """Compute the heads of all tiles that begin in the split; return the number of ring steps used."""
    problem, gmem = context.problem, context.gmem
    split, num_splits = context.split, problem.config.num_splits

    def visit(tile, carry):
        [steps] = carry

        @pl.when(tile.is_begun | (tile.end > tile.first))
        def _():
            acc, maximum, total = _attend_to_blocks(context, tile, steps)
            is_whole = tile.is_begun & (tile.end == tile.row_end)
            first = tile.index * (problem.queries_per_token * problem.head_dim)

            def write(rows, acc, _):
                part_of = problem.queries_per_token
                start = 0 if rows is None else rows.start
                device.store_heads(gmem["heads"], acc, tile.row, first, start, part_of, interpret=problem.interpret)

            @pl.when(is_whole)
            def _():
                factor, _ = normalize(maximum, total, None)
                write(None, acc * lax.broadcast_in_dim(factor, acc.shape, [0]), None)

            @pl.when(~is_whole)
            def _():
                part_index = jnp.where(tile.is_begun, num_splits + split, gmem["splits"][split, 6])
                registers.store_first_rows(gmem["parts"].at[part_index], acc, interpret=problem.interpret)
                for i, values in enumerate((maximum, total)):
                    device.store_vector(gmem["stats"].at[part_index, i], values, interpret=problem.interpret)

                @pl.when(~tile.is_begun)
                def _():
                    owner = gmem["splits"][split, 5]
                    counters.signal(gmem["arrivals"].at[owner], interpret=problem.interpret)

                @pl.when(tile.is_begun)
                def _():
                    num_others = gmem["splits"][split, 7]
                    counters.take(gmem["arrivals"].at[split], num_others, interpret=problem.interpret)
                    parts, stats = gmem["parts"], gmem["stats"]
                    put_together(problem, tile.index, split, num_others, parts, stats, None, write)

        return (steps + 2 * (tile.end - tile.first),)

    [steps] = context.for_each_tile(visit, _int(0))
    return steps


def write_newest(context: Context) -> None:
    """Write the newest keys and values to their pages, for the tiles whose last block is in the split."""
    problem, gmem = context.problem, context.gmem

    def visit(tile, carry):
        write_index = gmem["write_index"][tile.row]
        k_pages, v_pages = gmem["k_pages"], gmem["v_pages"]
        num_pages, _, block_size, _ = k_pages.shape

        @pl.when(_has_newest(tile) & (write_index < num_pages * block_size))
        def _():
            page, offset = lax.div(write_index, _int(block_size)), pl.ds(lax.rem(write_index, _int(block_size)), 1)
            key, value = _newest_key(context, tile), _newest_value(context, tile)
            for pages, x in ((k_pages, key), (v_pages, value)):
                device.store_columns(pages.at[page, tile.index, offset], x, _int(0), interpret=problem.interpret)

        return carry

    context.for_each_tile(visit)


def _has_newest(tile: Any) -> Any:
    return (tile.end == tile.row_end) & (tile.end > tile.first)


def _attend_to_blocks(context: Context, tile: Any, steps: Any) -> tuple[Any, Any, Any]:
    """Return the running softmax's state after a tile's blocks in this split: the sum of values, maximum and total."""
    problem = context.problem
    queries = context.problem.queries_per_token
    q = _rotated(context, tile, 0, queries)
    key = _newest_key(context, tile)
    weight = _has_newest(tile).astype(jnp.float32)
    score = jnp.sum(q.astype(jnp.float32) * key, axis=1) * (problem.scale * LOG2E)
    state = (
        _newest_value(context, tile) * weight,
        score * weight + LOWEST * (1 - weight),
        problem.cast(jnp.full((ROWS,), weight), _ROW_LAYOUT),
    )
    return lax.fori_loop(tile.first, tile.end, functools.partial(_add_block, context, tile, q, steps), state)


def _add_block(context: Context, tile: Any, q: Any, steps: Any, block: Any, state: Any) -> Any:
    """Return the state after one more block, without the newest key.

    Every block is masked: a separate loop for those that need no mask would cost more in code than it saves in time,
    see NOTES.md.
    """
    problem = context.problem
    block_kv = problem.config.block_kv
    acc, maximum, total = state
    step = steps + 2 * (block - tile.first)
    k_slot, v_slot = context.slot(step), context.slot(step + 1)
    num_held = tile.seq_len - 1 - block * block_kv
    plgpu.barrier_wait(context.full.at[k_slot])
    keys = context.blocks.at[k_slot, pl.ds(0, block_kv)]

    def product(scores_ref):
        plgpu.wgmma(scores_ref, q, keys.transpose((1, 0)))
        return written(scores_ref[...])

    if problem.interpret:
        scores = jnp.dot(q.astype(jnp.float32), keys[...].astype(jnp.float32).T)
        plgpu.commit_smem()
    else:
        scores = pl.run_scoped(product, plgpu.ACC((ROWS, block_kv), jnp.float32))
    plgpu.barrier_arrive(context.free.at[k_slot])

    scores = scores * (problem.scale * LOG2E)
    scores = jnp.where(problem.iota((ROWS, block_kv), 1) < num_held, scores, LOWEST)
    new_maximum = jnp.maximum(maximum, scores.max(axis=1))
    keep = jnp.exp2(maximum - new_maximum)
    weights = jnp.exp2(scores - lax.broadcast_in_dim(new_maximum, scores.shape, [0]))
    total = total * keep + weights.sum(axis=1)
    acc = acc * lax.broadcast_in_dim(keep, acc.shape, [0])
    weights = weights.astype(q.dtype)
    values = context.blocks.at[v_slot, pl.ds(0, block_kv)]
    plgpu.barrier_wait(context.full.at[v_slot])

    @pl.when(num_held < block_kv)
    def _():
        _clear_from(context, v_slot, num_held)

    def add_product(acc_ref):
        plgpu.wgmma(acc_ref, weights, values)

    if problem.interpret:
        acc = acc + jnp.dot(weights.astype(jnp.float32), values[...].astype(jnp.float32))
        plgpu.commit_smem()
    else:
        acc = written(pl.run_state(add_product)(plgpu.ACC.init(acc)))
    plgpu.barrier_arrive(context.free.at[v_slot])
    return acc, new_maximum, total


def _clear_from(context: Context, slot: Any, first: Any) -> None:
    """Values from a key on: whatever is there may be NaN, which a weight of 0 would not take away."""
    problem = context.problem
    for column in range(0, problem.head_dim, 64):
        part = context.blocks.at[slot, pl.ds(0, problem.config.block_kv), pl.ds(column, 64)]
        held = problem.load(part, _LAYOUT)
        key = problem.iota(held.shape, 0)
        part[...] = jnp.where(key < first, held, jnp.zeros_like(held))
    plgpu.commit_smem()


def _newest_key(context: Context, tile: Any) -> Any:
    """Return the newest key as it is stored, in each row of a matrix."""
    return _rotated(context, tile, context.problem.queries_per_token, 1).astype(jnp.float32)


def _newest_value(context: Context, tile: Any) -> Any:
    problem = context.problem
    value = context.gmem["qkv_rows"].at[tile.row, tile.index, pl.ds(problem.queries_per_token + 1, 1)]
    return device.load_columns(value, _int(0), problem.head_dim, interpret=problem.interpret)


def _rotated(context: Context, tile: Any, first: int, number: int) -> Any:
    """Vectors of a row's KV head, turned and rounded; the matrix's other rows have some of them again."""
    problem, gmem = context.problem, context.gmem
    half = problem.head_dim // 2
    load = functools.partial(device.load_columns, num_columns=half, interpret=problem.interpret)
    vectors = gmem["qkv_rows"].at[tile.row, tile.index, pl.ds(first, number)]
    x, y = load(vectors, _int(0)), load(vectors, _int(half))
    c, s = (load(gmem[name].at[pl.ds(tile.row, 1)], _int(0)) for name in ("cos", "sin"))
    turned = jnp.concatenate([x * c - y * s, y * c + x * s], axis=1)
    return turned.astype(vectors.dtype)
