"""The body of the Hopper kernel of prefill attention: what the warpgroups of a thread block do. See sm90.py.

An item is a tile of the plan in a set of heads. Items go to the thread blocks in a snake, the longest first, so that
all get as much. The copying warpgroup runs ahead, held only by the room that there is in shared memory.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ragged_prefill_attention.device import mask_window, scale_and_add_alibi

ROWS = 64  # of a compute warpgroup: what one wgmma instruction multiplies
LOG2E = math.log2(math.e)
# Maxima begin here and not at -inf, so that a row whose keys are all masked so far has weights of 0, not of NaN.
LOWEST = -1e30

_LAYOUT = plgpu.Layout.WGMMA
_ROW_LAYOUT = _LAYOUT.reduce(1)

_int = jnp.int32


class Problem(NamedTuple):
    """What is known when the kernel is compiled."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    block_kv: int
    stages: int
    prefetch: bool
    num_blocks: int
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    interpret: bool

    @property
    def heads(self) -> int:
        """Of a tile. With two of them each compute warpgroup has one, else each has half of the tokens."""
        return 1 if (self.num_heads // self.num_kv_heads) % 2 else 2

    @property
    def tile_size(self) -> int:
        """Tokens."""
        return 2 * ROWS // self.heads

    @property
    def q_slots(self) -> int:
        """Tiles of which the queries are in shared memory."""
        return 2 if self.prefetch else 1

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that copies and one that computes. Windows take more to copy, small heads less to compute."""
        return (48, 224) if self.sliding_window is not None and self.head_dim <= 64 else (40, 232)

    def first_key(self, tile: "Tile") -> Any:
        """The first position that a token of the tile looks at."""
        return _int(0) if self.sliding_window is None else lax.max(tile.position - (self.sliding_window - 1), _int(0))

    def key_blocks(self, tile: "Tile") -> tuple[Any, Any]:
        """The first block of keys that a token of the tile looks at, and the one behind the last."""
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
    out: Any


class Shared(NamedTuple):
    """Arrays and barriers in shared memory.

    The queries' and the result's have two views each, of the same bytes: as wgmma and registers take them, and as boxes
    of 64 tokens and a few columns, which may be copied from and to any token.
    """

    q: Any
    q_boxes: Any
    out: Any
    out_boxes: Any
    out_rows: Any
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


class Tile(NamedTuple):
    """What the copying warpgroup tells the others of an item, in `Shared.tile`. See `Plan`."""

    head: Any
    """The first of the set."""
    token: Any
    num_tokens: Any
    end: Any
    context: Any

    @property
    def position(self) -> Any:
        """Of the first token."""
        return self.end - self.num_tokens


def kernel(problem: Problem, gmem: Global, smem: Shared) -> None:
    """Each warpgroup of the mesh axis "wg", of each thread block of the axis "block"."""
    block = lax.axis_index("block")
    num_items = gmem.num_tiles[0] * (problem.num_heads // problem.heads)
    full_rounds = lax.div(num_items, _int(problem.num_blocks))

    def place(round_index):
        is_even = lax.rem(round_index, _int(2)) == 0
        return lax.select(is_even, block, problem.num_blocks - 1 - block)

    has_rest = place(full_rounds) < num_items - full_rounds * problem.num_blocks
    num_rounds = full_rounds + has_rest.astype(_int)

    def for_each_item(visit):
        """`n = visit(left, slot, n)` with the rounds that are left, and the slot of the queries.

        Counted down: a number to count with and one to compare it to would take two registers.
        """

        def visit_next(state):
            left, n = state
            return left - 1, visit(left, lax.rem(left, _int(problem.q_slots)), n)

        lax.while_loop(lambda state: state[0] > 0, visit_next, (num_rounds, _int(0)))

    wg = lax.axis_index("wg")

    @pl.when(wg == 2)
    def _():
        plgpu.set_max_registers(problem.registers[0], action="decrease")

        def visit(left, slot, n):
            round_index = num_rounds - left
            return _copy(problem, gmem, smem, round_index * problem.num_blocks + place(round_index), slot, n)

        for_each_item(visit)
        for barrier, slots in (
            (smem.q_free, problem.q_slots),
            (smem.k_free, problem.stages),
            (smem.v_free, problem.stages),
        ):
            for slot in range(slots):
                plgpu.barrier_wait(barrier.at[slot])

    @pl.when(wg < 2)
    def _():
        plgpu.set_max_registers(problem.registers[1], action="increase")
        for barrier, slots in (
            (smem.q_free, problem.q_slots),
            (smem.k_free, problem.stages),
            (smem.v_free, problem.stages),
        ):
            for slot in range(slots):
                plgpu.barrier_arrive(barrier.at[slot])
        for_each_item(lambda _, slot, n: _compute(problem, gmem, smem, wg, slot, n))
        plgpu.wait_smem_to_gmem(0)


def _copy(problem: Problem, gmem: Global, smem: Shared, item, q_slot, n):
    """Queries, keys and values of an item. `n` counts the blocks of keys."""
    sets = _int(problem.num_heads // problem.heads)
    index, head = lax.div(item, sets), lax.rem(item, sets) * problem.heads
    row, *fields = (gmem.tiles[field, index] for field in range(5))
    tile = Tile(head, *fields)
    plgpu.barrier_wait(smem.q_free.at[q_slot])
    for field, value in enumerate(tile):
        smem.tile[q_slot, field] = value
    plgpu.barrier_arrive(smem.q_full.at[q_slot])
    for wg in range(2):
        own_head, skipped = _share(problem, wg)
        for part, columns in enumerate(_parts(smem)):
            queries = gmem.q.at[pl.ds(tile.token + skipped, ROWS), head + own_head, columns]
            plgpu.copy_gmem_to_smem(queries, smem.q_boxes.at[q_slot, wg, part], smem.q_full.at[q_slot])

    kv_head = lax.div(head, _int(problem.num_heads // problem.num_kv_heads))
    # Pages outside of the context may be anything: what they are to hold is masked, any page that is finite will do.
    last_page = lax.max(lax.div(tile.context - 1, _int(problem.block_size)), _int(0))
    first_page = lax.div(problem.first_key(tile), _int(problem.block_size))
    chunk = min(problem.block_kv, problem.block_size)
    first, last = problem.key_blocks(tile)

    def one_block(j, _):
        slot, position = lax.rem(n + j, _int(problem.stages)), (last - 1 - j) * problem.block_kv
        pages = [
            gmem.block_tables[row, lax.clamp(first_page, lax.div(position + key, _int(problem.block_size)), last_page)]
            for key in range(0, problem.block_kv, chunk)
        ]
        offset = 0
        if problem.block_size > chunk:
            offset = pl.multiple_of(lax.rem(position, _int(problem.block_size)), chunk)
        for source, target, full, free in (
            (gmem.k_pages, smem.k, smem.k_full, smem.k_free),
            (gmem.v_pages, smem.v, smem.v_full, smem.v_free),
        ):
            plgpu.barrier_wait(free.at[slot])
            for i, page in enumerate(pages):
                plgpu.copy_gmem_to_smem(
                    source.at[page, kv_head, pl.ds(offset, chunk)],
                    target.at[slot, pl.ds(i * chunk, chunk)],
                    full.at[slot],
                )

    lax.fori_loop(_int(0), last - first, one_block, None)
    return n + last - first


def _share(problem: Problem, wg) -> tuple[Any, Any]:
    """What a compute warpgroup has of a tile: the head of its set, and the tokens before its own."""
    return (wg, 0) if problem.heads == 2 else (0, wg * ROWS)


def _parts(smem: Shared) -> list[Any]:
    """The columns of a head that are copied at a time."""
    num_parts, _, columns = smem.out.shape[1:]
    return [pl.ds(part * columns, columns) for part in range(num_parts)]


def _compute(problem: Problem, gmem: Global, smem: Shared, wg, q_slot, n):
    """A compute warpgroup's share of an item."""
    plgpu.barrier_wait(smem.q_full.at[q_slot])
    tile = Tile(*(smem.tile[q_slot, field] for field in range(5)))
    first, last = problem.key_blocks(tile)

    def store(values):
        """Store and give the queries' slot back. The tile is read again, which is cheaper than registers."""
        own_head, skipped = _share(problem, wg)
        tile = Tile(*(smem.tile[q_slot, field] for field in range(5)))
        num_rows = lax.clamp(_int(0), tile.num_tokens - skipped, _int(ROWS))
        token, head = tile.token + skipped, tile.head + own_head
        if problem.prefetch:
            plgpu.barrier_arrive(smem.q_free.at[q_slot])
        _store(gmem, smem, values(), wg, token, num_rows, head)
        if not problem.prefetch:  # the result lies where the queries lay
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(smem.q_free.at[q_slot])

    @pl.when(tile.end == 0)
    def _nothing_to_attend_to():
        store(lambda: plgpu.layout_cast(jnp.zeros((ROWS, problem.head_dim), jnp.float32), _LAYOUT))

    @pl.when(tile.end > 0)
    def _attend_and_store():
        acc, total, weights = _attend(problem, gmem, smem, wg, q_slot, n, tile, first, last)

        def finish():
            slot = lax.rem(n + last - first - 1, _int(problem.stages))
            result = _products(problem, smem).values(acc, weights, slot)
            plgpu.barrier_arrive(smem.v_free.at[slot])
            return result * lax.broadcast_in_dim(1.0 / total, result.shape, [0])

        store(finish)

    return n + last - first


def _attend(problem: Problem, gmem: Global, smem: Shared, wg, q_slot, n, tile: Tile, first, last):
    """All but the last product with values: sums and totals so far, and the last weights."""
    own_head, skipped = _share(problem, wg)
    block_kv, position = problem.block_kv, tile.position + skipped
    q, products = smem.q.at[q_slot, wg], _products(problem, smem)

    slope = None
    if gmem.alibi_slopes is not None:
        slope = gmem.alibi_slopes[tile.head + own_head].astype(jnp.float32) * LOG2E
    maximum, total = LOWEST, 0.0
    if gmem.sinks is not None:  # like a key without a value
        maximum, total = gmem.sinks[tile.head + own_head].astype(jnp.float32) * LOG2E, 1.0
    maximum, total = (plgpu.layout_cast(jnp.full((ROWS,), 1.0, jnp.float32) * x, _ROW_LAYOUT) for x in (maximum, total))
    acc = plgpu.layout_cast(jnp.zeros((ROWS, problem.head_dim), jnp.float32), _LAYOUT)

    slot = lax.rem(n, _int(problem.stages))
    plgpu.barrier_wait(smem.k_full.at[slot])
    scores = products.scores(q, slot)
    plgpu.barrier_arrive(smem.k_free.at[slot])
    plgpu.barrier_wait(smem.v_full.at[slot])
    pl.when(last * block_kv > tile.context)(lambda: _clean(smem, wg, slot, tile.context - (last - 1) * block_kv))
    softmax = functools.partial(_softmax, problem, slope)
    distance = position - (last - 1) * block_kv
    maximum, _, total, weights = softmax(scores, distance, maximum, total, is_causal=True, is_windowed=True)
    weights = weights.astype(q.dtype)

    def step(j, carry, **masks):
        acc, maximum, total, weights = carry
        slot, slot_before = (lax.rem(n + i, _int(problem.stages)) for i in (j, j - 1))
        plgpu.barrier_wait(smem.k_full.at[slot])

        def meanwhile(scores):
            plgpu.barrier_arrive(smem.k_free.at[slot])
            state = softmax(scores, distance + j * block_kv, maximum, total, **masks)
            plgpu.barrier_wait(smem.v_full.at[slot])
            return state

        acc, (maximum, fade, total, weights) = products.both(acc, weights, slot_before, q, slot, meanwhile)
        plgpu.barrier_arrive(smem.v_free.at[slot_before])
        # Not narrowed before: a product in flight has such registers as operands, ptxas would wait for it.
        return acc * lax.broadcast_in_dim(fade, acc.shape, [0]), maximum, total, weights.astype(q.dtype)

    # From the last block to the first: those that the tile itself reaches into, those that all of its tokens see, those
    # that the window has left for some of them.
    num_own = last - lax.div(tile.position, _int(block_kv))
    num_seen = last - first
    if problem.sliding_window is not None:
        oldest = lax.max(tile.end - problem.sliding_window, _int(0))
        num_seen = lax.clamp(num_own, last - lax.div(oldest + (block_kv - 1), _int(block_kv)), num_seen)
    carry = (acc, maximum, total, weights)
    if problem.tile_size > block_kv:
        both_masks = functools.partial(step, is_causal=True, is_windowed=True)
        carry = lax.fori_loop(_int(1), num_own, both_masks, carry)
    carry = lax.fori_loop(num_own, num_seen, functools.partial(step, is_causal=False, is_windowed=False), carry)
    if problem.sliding_window is not None:
        by_window = functools.partial(step, is_causal=False, is_windowed=True)
        carry = lax.fori_loop(num_seen, last - first, by_window, carry)
    acc, _, total, weights = carry
    return acc, total, weights


def _clean(smem: Shared, wg, slot, num_held) -> None:
    """Zeros for the values past the context: they may be NaN, which a weight of 0 would not take away."""

    @pl.when(wg == 0)
    def _():
        for first in range(0, smem.v.shape[1], ROWS):
            rows = smem.v.at[slot, pl.ds(first, ROWS)]
            values = plgpu.load(rows, layout=_LAYOUT)
            key = plgpu.broadcasted_iota(_int, values.shape, 0, layout=_LAYOUT)
            rows[...] = jnp.where(key < num_held - first, values, jnp.zeros((), values.dtype))

    plgpu.commit_smem()
    plgpu.barrier_arrive(smem.cleaned)
    plgpu.barrier_wait(smem.cleaned)


def _softmax(problem: Problem, slope, scores, distance, maximum, total, *, is_causal: bool, is_windowed: bool):
    """New maximum, what its change leaves of earlier sums, new total, weights. Logarithms are to base 2.

    `distance` is from the first key to the first query.
    """
    unit = problem.scale * LOG2E
    if problem.soft_cap is not None:
        # c * tanh(x / c), by exponentials: the hardware's tanh has 11 bits.
        cap = problem.soft_cap * LOG2E
        growth = jnp.exp2(scores * (2 * unit / problem.soft_cap))
        scores, unit = cap - (2 * cap) / (growth + 1.0), 1.0
    if slope is not None:
        scores, unit = scale_and_add_alibi(scores, unit, slope, distance, interpret=problem.interpret), 1.0
    if is_windowed and problem.sliding_window is not None:
        window, interpret = problem.sliding_window, problem.interpret
        scores = mask_window(scores, window, distance, is_causal=is_causal, interpret=interpret)
    elif is_causal:  # of a tile's first block alone, where an iota does not stay in registers
        iota = functools.partial(plgpu.broadcasted_iota, _int, scores.shape, layout=_LAYOUT)
        own = iota(0) + distance
        scores = jnp.where(iota(1) <= own, scores, -jnp.inf)
    new_maximum = jnp.maximum(maximum, scores.max(axis=1) * unit)
    fade = jnp.exp2(maximum - new_maximum)
    weights = jnp.exp2(scores * unit - lax.broadcast_in_dim(new_maximum, scores.shape, [0]))
    return new_maximum, fade, total * fade + weights.sum(axis=1), weights


def _store(gmem: Global, smem: Shared, values, wg, token, num_rows, head) -> None:
    """The first rows of a compute warpgroup's result. Copies of all are boxes, copies of some go row by row."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile before
    values = values.astype(gmem.out.dtype)

    @pl.when(num_rows == ROWS)
    def _():
        for part, columns in enumerate(_parts(smem)):
            smem.out[wg, part] = values[:, columns.start : columns.start + columns.size]
        plgpu.commit_smem()
        for part, columns in enumerate(_parts(smem)):
            plgpu.copy_smem_to_gmem(smem.out_boxes.at[wg, part], gmem.out.at[pl.ds(token, ROWS), head, columns])

    @pl.when(num_rows < ROWS)
    def _():
        columns = pl.ds(0, values.shape[1])
        smem.out_rows[wg, :, columns] = values
        plgpu.commit_smem()

        def one_row(i, _):
            plgpu.copy_smem_to_gmem(smem.out_rows.at[wg, i, columns], gmem.out.at[token + i, head])

        lax.fori_loop(_int(0), num_rows, one_row, None)


def _products(problem: Problem, smem: Shared) -> "_Products":
    return (_InterpretedProducts if problem.interpret else _Products)(smem.k, smem.v)


class _Products(NamedTuple):
    """The matrix products of a compute warpgroup, with blocks of keys and values in slots."""

    k: Any
    v: Any

    def scores(self, q, slot):
        """Of queries with keys."""

        def product(scores_ref):
            self._add_scores(scores_ref, q, slot)
            return scores_ref[...]

        return pl.run_scoped(product, plgpu.ACC((ROWS, self.k.shape[1]), jnp.float32))

    def values(self, acc, weights, slot):
        """`acc` and the sums of values by weights."""
        add: Any = pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, weights, self.v.at[slot]))
        return add(plgpu.ACC.init(acc))

    def both(
        self, acc, weights, values_slot, q, keys_slot, meanwhile: Callable[[Any], tuple[Any, ...]]
    ) -> tuple[Any, Sequence[Any]]:
        """As `values`; and what `meanwhile` makes of the scores while that goes on."""

        def product(refs):
            scores_ref, acc_ref, *result_refs = refs
            self._add_scores(scores_ref, q, keys_slot)
            plgpu.wgmma(acc_ref, weights, self.v.at[values_slot])
            scores = lax.optimization_barrier(plgpu.wgmma_accumulator_load(scores_ref, wait_n=1))
            for ref, result in zip(result_refs, meanwhile(scores), strict=True):
                ref[...] = result

        zeros = plgpu.layout_cast(jnp.zeros((ROWS, self.k.shape[1]), jnp.float32), _LAYOUT)
        row = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), _ROW_LAYOUT)
        state = (plgpu.ACC.init(zeros), plgpu.ACC.init(acc), row, row, row, zeros)
        run: Any = pl.run_state(product)
        _, acc, *results = run(state)
        return acc, results

    def _add_scores(self, scores_ref, q, slot):
        num_parts, _, columns = q.shape
        for part in range(num_parts):
            keys = self.k.at[slot, :, pl.ds(part * columns, columns)]
            plgpu.wgmma(scores_ref, q.at[part], keys.transpose((1, 0)))


class _InterpretedProducts(_Products):
    """As interpret mode can do them: it has no products with an operand in registers."""

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
