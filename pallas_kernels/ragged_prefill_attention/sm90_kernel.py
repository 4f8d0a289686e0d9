"""The body of the Hopper kernel of prefill attention: the work of a CTA's warpgroups. See sm90.py.

An item is a tile of the plan in a set of heads. Groups of heads are computed one after another, so that the L2 cache
holds a group's keys and values until the last tile has used them. The items of a group are assigned to the CTAs in a
snake order, the longest first, so that all get equal work. The copying warpgroup runs ahead, limited only by the room
in shared memory.

Mosaic is told to put no barriers around accesses to shared memory, which are ordered without them: reads wait at a
`full` barrier, writes at a `free` one, and all warpgroups that have written or read arrive there.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.clearing import clear_rows
from pallas_kernels.device.registers import written
from pallas_kernels.device.vectors_of_8_bits import convert
from pallas_kernels.paging.tiles import LOG2E, LOWEST, ROWS
from pallas_kernels.ragged_prefill_attention.device import (
    mask_after,
    mask_window,
    reciprocal,
    scale_and_add_alibi,
    store_rows,
    widen,
)

_LAYOUT = plgpu.Layout.WGMMA
_ROW_LAYOUT = _LAYOUT.reduce(1)

_int = jnp.int32


class Problem(NamedTuple):
    """Compile-time parameters of the kernel."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    block_kv: int
    k_stages: int
    v_stages: int
    q_slots: int
    num_ctas: int
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    interpret: bool
    has_scales: bool
    """Keys and values have 8 bits, and a scale each: the copying warpgroup converts them."""

    @property
    def heads(self) -> int:
        """Heads of a tile. With two of them each computing warpgroup has one, else each has half of the tokens."""
        return 1 if (self.num_heads // self.num_kv_heads) % 2 else 2

    @property
    def tile_size(self) -> int:
        """Number of tokens of a tile."""
        return 2 * ROWS // self.heads

    @property
    def head_groups(self) -> int:
        """Computed one after the other. With 4, keys and values of one are 8 MB for 8192 tokens of Llama 3 8B."""
        return math.gcd(4, self.num_heads // self.heads)

    @property
    def sets(self) -> int:
        """Sets of heads in a group."""
        return self.num_heads // self.heads // self.head_groups

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a copying and of a computing thread. Small heads need less to compute, small pages more to copy.

        All three warpgroups together have what the CTA is launched with, 3 * 168 per thread: with more it would wait
        forever.
        """
        needs_more = self.head_dim <= 64 or self.block_size < 16 or self.has_scales
        return (56, 224) if needs_more else (40, 232)

    def first_key(self, tile: "Tile") -> Any:
        """Return the first position that a token of the tile attends to."""
        return _int(0) if self.sliding_window is None else lax.max(tile.position - (self.sliding_window - 1), _int(0))

    def key_blocks(self, tile: "Tile") -> tuple[Any, Any]:
        """Return the first block of keys that a token of the tile attends to, and the one after the last."""
        first = lax.div(self.first_key(tile), _int(self.block_kv))
        return first, lax.div(tile.end + (self.block_kv - 1), _int(self.block_kv))


class Global(NamedTuple):
    """Arrays in global memory."""

    q: Any
    k_pages: Any
    v_pages: Any
    block_tables: Any
    tiles: Any
    num_tiles: Any
    sinks: Any
    alibi_slopes: Any
    scales: Any
    out: Any


class Shared(NamedTuple):
    """Arrays and barriers in shared memory.

    The queries have two views of the same bytes: one as wgmma uses them, and one as boxes of 64 tokens and a few
    columns, which may be copied from any token.
    """

    q: Any
    q_boxes: Any
    tile: Any
    k: Any
    v: Any
    q_full: Any
    q_free: Any
    k_full: Any
    k_free: Any
    v_full: Any
    v_free: Any
    cleaned: Any
    staged: Any
    scales: Any
    staged_k_full: Any
    staged_v_full: Any
    """Blocks of 8 bits before they are converted, scales of two blocks, and barriers; None for 16 bits."""


class Tile(NamedTuple):
    """The copying warpgroup's message to the others about an item, in `Shared.tile`. See `Plan`."""

    head: Any
    """The first of the set."""
    token: Any
    num_tokens: Any
    end: Any
    context: Any

    @property
    def position(self) -> Any:
        """Position of the first token."""
        return self.end - self.num_tokens


class Items:
    """The items of one of `num_workers`, which are CTAs or clusters: in which order, and how many."""

    def __init__(self, problem: Problem, gmem: Global, worker, num_workers: int) -> None:
        self._problem, self._worker, self._num_workers = problem, worker, num_workers
        self._num_items = gmem.num_tiles[0] * problem.sets  # of a group of heads
        rounds = (self._num_rounds(_int(group)) for group in range(1, problem.head_groups))
        self.number = sum(rounds, self._num_rounds(_int(0)))

    def _item_of(self, group, round_index):
        """Return the index of the worker's item in a round of a group. Each group begins at another worker."""
        num_workers = _int(self._num_workers)
        shift = group * (self._num_workers // self._problem.head_groups)
        shifted = lax.rem(self._worker + shift, num_workers)
        return lax.select(lax.rem(round_index, _int(2)) == 0, shifted, num_workers - 1 - shifted)

    def _num_rounds(self, group):
        num_workers = _int(self._num_workers)
        full = lax.div(self._num_items, num_workers)
        return full + (self._item_of(group, full) < self._num_items - full * num_workers).astype(_int)

    def for_each(self, visit: Callable[[Any, Any, Any, Any], Any]) -> None:
        """Call `n = visit(group, item, left, n)` for each item, of which `left` are left with this one. `n` is 0 at
        first.
        """

        def one_item(group, round_index, state):
            left, n = state
            item = round_index * _int(self._num_workers) + self._item_of(group, round_index)
            return left - 1, visit(group, item, left, n)

        def one_group(group, state):
            return lax.fori_loop(_int(0), self._num_rounds(group), functools.partial(one_item, group), state)

        lax.fori_loop(_int(0), _int(self._problem.head_groups), one_group, (self.number, _int(0)))

    def count_down(self, visit: Callable[[Any, Any], Any]) -> None:
        """Call `n = visit(left, n)` for each item, as `for_each` does. A number to count with and one to compare it to
        would take two registers.
        """

        def one_item(state):
            left, n = state
            return left - 1, visit(left, n)

        lax.while_loop(lambda state: state[0] > 0, one_item, (self.number, _int(0)))


def kernel(problem: Problem, gmem: Global, smem: Shared) -> None:
    """Run each warpgroup (mesh axis "wg") of each CTA (axis "cta")."""
    items = Items(problem, gmem, lax.axis_index("cta"), problem.num_ctas)
    wg = lax.axis_index("wg")
    barriers = (
        *(smem.q_free.at[slot] for slot in range(problem.q_slots)),
        *(smem.k_free.at[slot] for slot in range(problem.k_stages)),
        *(smem.v_free.at[slot] for slot in range(problem.v_stages)),
    )

    def q_slot(left):
        return lax.rem(left, _int(problem.q_slots))

    @pl.when(wg == 2)
    def _():
        plgpu.set_max_registers(problem.registers[0], action="decrease")
        items.for_each(lambda group, item, left, n: _copy(problem, gmem, smem, group, item, q_slot(left), n))
        for barrier in barriers:
            plgpu.barrier_wait(barrier)

    @pl.when(wg < 2)
    def _():
        plgpu.set_max_registers(problem.registers[1], action="increase")
        for barrier in barriers:
            plgpu.barrier_arrive(barrier)
        items.count_down(lambda left, n: _compute(problem, gmem, smem, wg, q_slot(left), n))


def begin_item(problem: Problem, gmem: Global, message, group, item, q_free, q_full) -> tuple[Any, Tile]:
    """Return the row and the tile of an item of a group of heads, once there is room for the queries. The others get
    the tile as `message`.
    """
    sets = _int(problem.sets)
    index, head = lax.div(item, sets), (group * sets + lax.rem(item, sets)) * problem.heads
    row, *fields = (gmem.tiles[field, index] for field in range(5))
    tile = Tile(head, *fields)
    plgpu.barrier_wait(q_free)
    for field, value in enumerate(tile):
        message[field] = value
    plgpu.barrier_arrive(q_full)
    return row, tile


class Blocks:
    """The blocks of keys of a tile of a row, as they are copied: from the last to the first."""

    def __init__(self, problem: Problem, gmem: Global, row, tile: Tile) -> None:
        self._problem, self._tables, self._row = problem, gmem.block_tables, row
        self.kv_head = lax.div(tile.head, _int(problem.num_heads // problem.num_kv_heads))
        # Pages outside the context may contain anything: their positions are masked, so any finite page will do.
        self._last_page = lax.max(lax.div(tile.context - 1, _int(problem.block_size)), _int(0))
        self._first_page = lax.div(problem.first_key(tile), _int(problem.block_size))
        self.chunk = min(problem.block_kv, problem.block_size)
        """Keys that are copied from a page."""
        self._first, self._last = problem.key_blocks(tile)
        self.number = self._last - self._first

    def counted(self, n):
        """Return `n` and their number."""
        return n + self._last - self._first

    def pages(self, j) -> tuple[list[Any], Any]:
        """Return the pages of a block of keys, and the offset in them."""
        block_size = self._problem.block_size
        position = (self._last - 1 - j) * self._problem.block_kv
        pages = [
            self._tables[
                self._row,
                lax.clamp(self._first_page, lax.div(position + key, _int(block_size)), self._last_page),
            ]
            for key in range(0, self._problem.block_kv, self.chunk)
        ]
        offset = 0
        if block_size > self.chunk:
            offset = pl.multiple_of(lax.rem(position, _int(block_size)), self.chunk)
        return pages, offset


def _copy(problem: Problem, gmem: Global, smem: Shared, group, item, q_slot, n):
    """Copy queries, keys and values of an item of a group of heads. `n` counts the blocks of keys."""
    q_full = smem.q_full.at[q_slot]
    row, tile = begin_item(problem, gmem, smem.tile.at[q_slot], group, item, smem.q_free.at[q_slot], q_full)
    for wg in range(2):
        own_head, skipped = own_part(problem, wg)
        for part, columns in enumerate(_parts(smem)):
            queries = gmem.q.at[pl.ds(tile.token + skipped, ROWS), tile.head + own_head, columns]
            plgpu.copy_gmem_to_smem(queries, smem.q_boxes.at[q_slot, wg, part], q_full)

    blocks = Blocks(problem, gmem, row, tile)
    if problem.has_scales:
        _copy_and_convert(problem, gmem, smem, blocks, n)
        return blocks.counted(n)

    def one_block(j, _):
        pages, offset = blocks.pages(j)
        for source, target, full, free, stages in (
            (gmem.k_pages, smem.k, smem.k_full, smem.k_free, problem.k_stages),
            (gmem.v_pages, smem.v, smem.v_full, smem.v_free, problem.v_stages),
        ):
            slot = lax.rem(n + j, _int(stages))
            plgpu.barrier_wait(free.at[slot])
            for i, page in enumerate(pages):
                plgpu.copy_gmem_to_smem(
                    source.at[page, blocks.kv_head, pl.ds(offset, blocks.chunk)],
                    target.at[slot, pl.ds(i * blocks.chunk, blocks.chunk)],
                    full.at[slot],
                )

    lax.fori_loop(_int(0), blocks.number, one_block, None)
    return blocks.counted(n)


def _copy_and_convert(problem: Problem, gmem: Global, smem: Shared, blocks: Blocks, n):
    """Copy blocks of 8 bits, and convert each, multiplied by its scales, while the next one is on its way."""
    kinds = (
        (gmem.k_pages, smem.staged_k_full, smem.k, smem.k_full, smem.k_free, problem.k_stages),
        (gmem.v_pages, smem.staged_v_full, smem.v, smem.v_full, smem.v_free, problem.v_stages),
    )

    def scales_of(j):
        return smem.scales.at[lax.rem(n + j, _int(2))]

    def begin(j, kind):
        pages, offset = blocks.pages(j)
        pool, arrived, *_ = kinds[kind]
        for i, page in enumerate(pages):
            keys = pl.ds(offset, blocks.chunk)
            staged = smem.staged.at[kind, pl.ds(i * blocks.chunk, blocks.chunk)]
            plgpu.copy_gmem_to_smem(pool.at[page, blocks.kv_head, keys], staged, arrived)
            if kind == 0:  # they are there before the keys are used, and until the values are
                scales = gmem.scales.at[page, blocks.kv_head, :, keys]
                plgpu.copy_gmem_to_smem(scales, scales_of(j).at[i], arrived)

    def end(j, kind):
        _, arrived, target, full, free, stages = kinds[kind]
        slot = lax.rem(n + j, _int(stages))
        plgpu.barrier_wait(arrived)
        plgpu.barrier_wait(free.at[slot])
        convert(target.at[slot], smem.staged.at[kind], scales_of(j), kind, interpret=problem.interpret)
        plgpu.commit_smem()
        plgpu.barrier_arrive(full.at[slot])

    def one_block(j, _):
        begin(j, 1)
        end(j, 0)
        pl.when(j + 1 < blocks.number)(lambda: begin(j + 1, 0))
        end(j, 1)

    pl.when(blocks.number > 0)(lambda: begin(_int(0), 0))
    lax.fori_loop(_int(0), blocks.number, one_block, None)


def own_part(problem: Problem, wg) -> tuple[Any, Any]:
    """Return a computing warpgroup's part of a tile: the head of its set, and the number of tokens before its own."""
    return (wg, 0) if problem.heads == 2 else (0, wg * ROWS)


def _parts(smem: Shared) -> list[Any]:
    """Return the ranges of a head's columns that are copied at a time."""
    num_parts, _, columns = smem.q.shape[2:]
    return [pl.ds(part * columns, columns) for part in range(num_parts)]


def _compute(problem: Problem, gmem: Global, smem: Shared, wg, q_slot, n):
    """Compute a warpgroup's part of an item."""
    plgpu.barrier_wait(smem.q_full.at[q_slot])

    def give_queries_back():
        """Release the queries; return the count of blocks of keys until then, and where the result goes."""
        own_head, skipped = own_part(problem, wg)
        tile = _tile(smem, q_slot)
        plgpu.barrier_arrive(smem.q_free.at[q_slot])
        first, last = problem.key_blocks(tile)
        num_rows = lax.clamp(_int(0), tile.num_tokens - skipped, _int(ROWS))
        return n + last - first, tile.token + skipped, tile.head + own_head, num_rows

    def attend():
        acc, total, weights = _attend(problem, gmem, smem, wg, q_slot, n)
        n_after, *output = give_queries_back()
        slot = lax.rem(n_after - 1, _int(problem.v_stages))
        acc = _products(problem, smem).values(acc, weights, slot)
        plgpu.barrier_arrive(smem.v_free.at[slot])
        return acc * lax.broadcast_in_dim(1.0 / total, acc.shape, [0]), n_after, *output

    def nothing_to_attend_to():
        return _zeros(problem.head_dim), *give_queries_back()

    result, n, *output = lax.cond(_tile(smem, q_slot).end > 0, attend, nothing_to_attend_to)
    store_rows(gmem.out, result.astype(gmem.out.dtype), *output, interpret=problem.interpret)
    return n


def _tile(smem: Shared, q_slot) -> Tile:
    """Read where it is used: that is cheaper than registers."""
    return Tile(*(smem.tile[q_slot, field] for field in range(5)))


def _attend(problem: Problem, gmem: Global, smem: Shared, wg, q_slot, n):
    """All but the last product with values: sums and totals so far, and the last weights."""
    own_head, skipped = own_part(problem, wg)
    block_kv, q = problem.block_kv, smem.q.at[q_slot, wg]
    tile = _tile(smem, q_slot)
    first, last = problem.key_blocks(tile)
    distance = tile.position + skipped - (last - 1) * block_kv

    slope = None
    if gmem.alibi_slopes is not None:
        slope = gmem.alibi_slopes[tile.head + own_head].astype(jnp.float32) * LOG2E
    weigh = functools.partial(softmax, problem, slope)
    maximum, total = LOWEST, 0.0
    if gmem.sinks is not None:  # like a key without a value
        maximum, total = gmem.sinks[tile.head + own_head].astype(jnp.float32) * LOG2E, 1.0
    maximum, total = (plgpu.layout_cast(jnp.full((ROWS,), 1.0, jnp.float32) * x, _ROW_LAYOUT) for x in (maximum, total))

    def begin(num_keys):
        """Do the first step, with only the first keys of the last block."""
        k_slot, v_slot = lax.rem(n, _int(problem.k_stages)), lax.rem(n, _int(problem.v_stages))
        plgpu.barrier_wait(smem.k_full.at[k_slot])
        scores = _products(problem, smem, num_keys=num_keys).scores(q, k_slot)
        plgpu.barrier_arrive(smem.k_free.at[k_slot])
        plgpu.barrier_wait(smem.v_full.at[v_slot])
        num_held = tile.context - (last - 1) * block_kv
        pl.when(num_held < block_kv)(lambda: _clean(problem, smem, wg, v_slot, num_held))
        state = weigh(scores, distance, maximum, total, is_causal=True, is_windowed=True)
        new_maximum, _, new_total, weights = state
        return _zeros(problem.head_dim), new_maximum, new_total, weights.astype(q.dtype)

    def step(j, carry, **masks):
        acc, maximum, total, weights = carry
        k_slot = lax.rem(n + j, _int(problem.k_stages))
        v_slot, v_slot_before = (lax.rem(n + i, _int(problem.v_stages)) for i in (j, j - 1))
        plgpu.barrier_wait(smem.k_full.at[k_slot])

        def meanwhile(scores):
            plgpu.barrier_arrive(smem.k_free.at[k_slot])
            state = weigh(scores, distance + j * block_kv, maximum, total, **masks)
            plgpu.barrier_wait(smem.v_full.at[v_slot])
            return state

        products = _products(problem, smem, num_values=weights.shape[1])
        acc, (maximum, fade, total, weights) = products.both(acc, weights, v_slot_before, q, k_slot, meanwhile)
        plgpu.barrier_arrive(smem.v_free.at[v_slot_before])
        # Not narrowed earlier: such registers are operands of a product in flight, and ptxas would wait for it.
        return acc * lax.broadcast_in_dim(fade, acc.shape, [0]), maximum, total, weights.astype(q.dtype)

    def begin_with_half():
        """Do the first step for a tile that reaches into only half of its last block, and the next step if there is
        one.
        """
        carry = begin(block_kv // 2)

        def next_step():
            return _int(2), step(1, carry, is_causal=False, is_windowed=True)

        def no_step():
            *others, weights = carry
            return _int(1), (*others, widen(weights, interpret=problem.interpret))

        return lax.cond(last - first > 1, next_step, no_step)

    # From the last block to the first: those that the tile itself reaches into, those that all of its tokens attend to,
    # those of which the window leaves only a part for some tokens.
    if problem.tile_size < block_kv:
        is_half = tile.end <= last * block_kv - block_kv // 2
        begun, carry = lax.cond(is_half, begin_with_half, lambda: (_int(1), begin(block_kv)))
    else:
        begun, carry = _int(1), begin(block_kv)
    if problem.tile_size > block_kv:
        num_own = last - lax.div(tile.position, _int(block_kv))
        carry = lax.fori_loop(begun, num_own, functools.partial(step, is_causal=True, is_windowed=True), carry)
        begun = num_own
    num_seen = last - first
    if problem.sliding_window is not None:
        oldest = lax.max(tile.end - problem.sliding_window, _int(0))
        num_seen = lax.clamp(begun, last - lax.div(oldest + (block_kv - 1), _int(block_kv)), num_seen)
    carry = lax.fori_loop(begun, num_seen, functools.partial(step, is_causal=False, is_windowed=False), carry)
    if problem.sliding_window is not None:
        by_window = functools.partial(step, is_causal=False, is_windowed=True)
        first, last = problem.key_blocks(_tile(smem, q_slot))
        carry = lax.fori_loop(num_seen, last - first, by_window, carry)
    acc, _, total, weights = carry
    return acc, total, weights


def _zeros(num_columns: int):
    return plgpu.layout_cast(jnp.zeros((ROWS, num_columns), jnp.float32), _LAYOUT)


def _clean(problem: Problem, smem: Shared, wg, slot, num_held) -> None:
    """Zeros for the values past the context: they may be NaN, which a weight of 0 would not take away."""
    pl.when(wg == 0)(lambda: clear_rows(smem.v.at[slot], num_held, interpret=problem.interpret))
    plgpu.commit_smem()
    plgpu.barrier_arrive(smem.cleaned)
    plgpu.barrier_wait(smem.cleaned)


def softmax(problem: Problem, slope, scores, distance, maximum, total, *, is_causal: bool, is_windowed: bool):
    """Return the new maximum, the factor for earlier sums, the new total, and the weights. Logarithms are to base 2.

    `distance` is from the first key to the first query.
    """
    unit = problem.scale * LOG2E
    if problem.soft_cap is not None:
        # c * tanh(x / c), by exponentials: the hardware's tanh has 11 bits. A division scales values near an end of the
        # range, which takes registers that some heads with a window do not have.
        cap = problem.soft_cap * LOG2E
        growth = jnp.exp2(scores * (2 * unit / problem.soft_cap))
        scores, unit = cap - (2 * cap) * reciprocal(growth + 1.0, interpret=problem.interpret), 1.0
    if slope is not None:
        scores, unit = scale_and_add_alibi(scores, unit, slope, distance, interpret=problem.interpret), 1.0
    if is_windowed and problem.sliding_window is not None:
        window, interpret = problem.sliding_window, problem.interpret
        scores = mask_window(scores, window, distance, is_causal=is_causal, interpret=interpret)
    elif is_causal:
        scores = mask_after(scores, distance, interpret=problem.interpret)
    new_maximum = jnp.maximum(maximum, scores.max(axis=1) * unit)
    fade = jnp.exp2(maximum - new_maximum)
    weights = jnp.exp2(scores * unit - lax.broadcast_in_dim(new_maximum, scores.shape, [0]))
    return new_maximum, fade, total * fade + weights.sum(axis=1), weights


def _products(
    problem: Problem, smem: Shared, *, num_keys: int | None = None, num_values: int | None = None
) -> "_Products":
    """Return the products with the first keys and values of a block, by default with all."""
    keys, values = (pl.ds(0, num or problem.block_kv) for num in (num_keys, num_values))
    return (_InterpretedProducts if problem.interpret else _Products)(smem.k.at[:, keys], smem.v.at[:, values])


class _Products(NamedTuple):
    """The matrix products of a computing warpgroup, with blocks of keys and values in slots."""

    k: Any
    v: Any

    def scores(self, q, slot):
        """Return the scores of queries with keys."""

        def product(scores_ref):
            self._add_scores(scores_ref, q, slot)
            return written(scores_ref[...])

        return pl.run_scoped(product, plgpu.ACC((ROWS, self.k.shape[1]), jnp.float32))

    def values(self, acc, weights, slot):
        """`acc` and the sums of values by weights."""
        add: Any = pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, weights, self.v.at[slot]))
        return written(add(plgpu.ACC.init(acc)))

    def both(
        self, acc, weights, values_slot, q, keys_slot, meanwhile: Callable[[Any], tuple[Any, ...]]
    ) -> tuple[Any, Sequence[Any]]:
        """Add the product with values as `values` does; also return the result of `meanwhile` for the scores, computed
        concurrently.
        """

        def product(refs):
            scores_ref, acc_ref, *result_refs = refs
            self._add_scores(scores_ref, q, keys_slot)
            plgpu.wgmma(acc_ref, weights, self.v.at[values_slot])
            scores = written(plgpu.wgmma_accumulator_load(scores_ref, wait_n=1))
            for ref, result in zip(result_refs, meanwhile(scores), strict=True):
                ref[...] = result

        zeros = _zeros(self.k.shape[1])
        row = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), _ROW_LAYOUT)
        state = (plgpu.ACC.init(zeros), plgpu.ACC.init(acc), row, row, row, zeros)
        run: Any = pl.run_state(product)
        _, acc, *results = run(state)
        return written(acc), results

    def _add_scores(self, scores_ref, q, slot):
        num_parts, _, columns = q.shape
        for part in range(num_parts):
            keys = self.k.at[slot, :, pl.ds(part * columns, columns)]
            plgpu.wgmma(scores_ref, q.at[part], keys.transpose((1, 0)))


class _InterpretedProducts(_Products):
    """The products for interpret mode, which has none with an operand in registers."""

    def scores(self, q, slot):
        num_parts, _, columns = q.shape
        keys = self.k[slot].astype(jnp.float32)
        scores = jnp.zeros((ROWS, keys.shape[0]), jnp.float32)
        for part in range(num_parts):
            queries = q[part].astype(jnp.float32)
            scores += jnp.dot(queries, keys[:, part * columns : (part + 1) * columns].T)
        plgpu.commit_smem()  # as wgmma reads: ordered before copies that follow
        return scores

    def values(self, acc, weights, slot):
        acc = acc + jnp.dot(weights.astype(jnp.float32), self.v[slot].astype(jnp.float32))
        plgpu.commit_smem()
        return acc

    def both(self, acc, weights, values_slot, q, keys_slot, meanwhile):
        acc = self.values(acc, weights, values_slot)
        return acc, meanwhile(self.scores(q, keys_slot))
