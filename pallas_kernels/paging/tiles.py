"""Tiles of the Hopper kernels that attend to pages: iterate over those of a split, and combine the parts of a cut one.

A tile is the queries of a row with the same KV head. The splits of a step are in plan.py.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import NUM_SMS
from pallas_kernels.paging.plan import BLOCK_COST, TILE_COST, block_range

ROWS = 64  # of a tile: what one wgmma instruction multiplies
LOG2E = math.log2(math.e)
# Maxima start here rather than at -inf, so that keys that are masked so far have weights of 1, which the first key that
# is not masked rescales to 0, instead of NaN.
LOWEST = -1e30
MAX_COLUMNS = 16
"""Queries of a tile up to which they are columns (`query_columns`); heads of no multiple of 64 have them as rows."""
MAX_COLUMNS_OF_8_BITS = 32
"""Queries of a tile up to which they are columns over pages of 8 bits, where they are never rows."""
MAX_COPIED = 256
"""Numbers of a row that one copy by TMA has room for. Larger heads have queries as columns only."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the kernel divides its work; `heuristic` picks one."""

    block_kv: int
    """Keys a step."""
    stages: int
    """Number of blocks of keys, and of values, in shared memory."""
    streams: int
    """Streams per CTA: pairs of a copying and a computing warpgroup, each with its own split."""
    num_ctas: int = NUM_SMS
    """Number of CTAs."""
    has_one_ring: bool = False
    """Blocks of keys and of values are in `stages` slots in turns, instead of in so many each."""

    @property
    def num_splits(self) -> int:
        """Into which a step's work is cut."""
        return self.num_ctas * self.streams

    def shared_memory(self, head_dim: int) -> int:
        """Bytes a CTA."""
        queries_and_result = 3 * ROWS * head_dim * 2
        return self.streams * (queries_and_result + 2 * self.stages * self.block_kv * head_dim * 2)

    def shared_memory_of_8_bits(self, head_dim: int, width: int) -> int:
        """Bytes a CTA for pages of 8 bits and tiles of `width` queries: a block of values is converted too."""
        copies = 3 if head_dim <= MAX_COPIED else 1
        queries, weights = copies * width * head_dim * 2, width * self.block_kv * 2 + 1024
        blocks = self.stages * self.block_kv * (2 * head_dim + 8)
        return self.streams * (queries + weights + self.block_kv * head_dim * 2 + blocks) + 1024

    def shared_memory_of_one_ring(self, head_dim: int, width: int) -> int:
        """Bytes a CTA for tiles of `width` queries that are not copied, and one ring of blocks."""
        queries, weights = width * head_dim * 2, width * self.block_kv * 2 + 1024
        return self.streams * (queries + weights + self.stages * self.block_kv * head_dim * 2)


class Problem(NamedTuple):
    """Compile-time parameters of the kernel."""

    config: Config
    head_dim: int
    block_size: int
    num_tiles: int
    """Tiles per row."""
    tiles_per_head: int
    tile_rows: int
    """Used rows of a tile, of ROWS or of columns."""
    columns: int
    """0 where queries are rows."""
    queries_per_token: int
    """Number of query heads per KV head."""
    num_queries: int
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    interpret: bool
    has_scales: bool = False
    """Keys and values have 8 bits, and a scale each."""

    @property
    def copies_queries(self) -> bool:
        """Return true if queries and results go through shared memory. Those of larger heads do not fit into a copy,
        and their room is used for blocks.
        """
        return self.head_dim <= MAX_COPIED

    def cast(self, x, layout):
        """With a layout, which the interpreter has none of; so are the next two."""
        return x if self.interpret else plgpu.layout_cast(x, layout)

    def iota(self, shape, dimension):
        """Return indices along a dimension."""
        if self.interpret:
            return lax.broadcasted_iota(jnp.int32, shape, dimension)
        return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=plgpu.Layout.WGMMA)

    def load(self, ref, layout):
        """Load the contents of a ref."""
        return ref[...] if self.interpret else plgpu.load(ref, layout=layout, optimized=False)


class Tile(NamedTuple):
    """The part of a tile that this CTA computes: the blocks [first, end) of the context, out of [row_first,
    row_end).
    """

    row: Any
    index: Any
    begin: Any
    seq_len: Any
    query_len: Any
    row_first: Any
    row_end: Any
    first: Any
    end: Any
    is_begun: Any
    """True if the part has the tile's first block, or there are no blocks: this CTA then writes the result."""


def for_each_tile(problem, splits, rows, split, visit, carry):
    """Call `carry = visit(tile, carry)` for each tile of a split."""
    split_begin, split_end = splits[split, 3], splits[split, 4]

    def blocks_before(unit):
        return lax.div(lax.max(unit, jnp.int32(0)) + (BLOCK_COST - 1), jnp.int32(BLOCK_COST))

    def step(state):
        row, index, begin, *carry = state
        seq_len, query_len = rows[row, 0], rows[row, 1]
        row_first, row_end = block_range(
            seq_len, query_len, block_kv=problem.config.block_kv, sliding_window=problem.sliding_window
        )
        first = lax.min(row_first + blocks_before(split_begin - begin), row_end)
        end = lax.min(row_first + blocks_before(split_end - begin), row_end)
        tile = Tile(
            row, index, begin, seq_len, query_len, row_first, row_end, first, end, is_begun=begin >= split_begin
        )
        carry = visit(tile, carry)
        is_last = index == problem.num_tiles - 1
        return (
            jnp.where(is_last, row + 1, row),
            jnp.where(is_last, jnp.int32(0), index + 1),
            begin + (row_end - row_first) * BLOCK_COST + TILE_COST,
            *carry,
        )

    start = (splits[split, 0], splits[split, 1], splits[split, 2], *carry)
    return lax.while_loop(lambda state: state[2] < split_end, step, start)[3:]


def normalize(maximum, total, sinks):
    """Return the factor for the sum of values, and the LSE."""
    is_nothing = maximum <= LOWEST / 2
    keep = jnp.ones_like(maximum)
    if sinks is not None:
        with_sink = jnp.maximum(maximum, sinks * LOG2E)
        keep = jnp.exp2(maximum - with_sink)
        maximum, total = with_sink, total * keep + jnp.exp2(sinks * LOG2E - with_sink)
    factor = jnp.where(is_nothing, jnp.zeros_like(total), keep / total)
    return factor, jnp.where(is_nothing, jnp.full_like(total, -jnp.inf), maximum * math.log(2) + jnp.log(total))


def put_together(problem, index, split, num_others, parts, stats, all_sinks, write):
    """Combine the parts of tile `index` of a row, from this split and the `num_others` splits after it.

    Calls `write(rows, result, lse)` for each chunk of its rows.
    """
    layout = part_layout(problem.head_dim)
    rows_layout = layout.reduce(1)
    chunk = min(16 if problem.head_dim <= MAX_COPIED else 4, parts.shape[1])  # rows
    unroll = min(20, 120 // (chunk * problem.head_dim // 128 + 2))  # parts on their way at the same time

    def spread(x):
        return problem.cast(lax.broadcast_in_dim(x, (chunk, problem.head_dim), [0]), layout)

    plgpu.commit_smem()  # all warps have left their part

    def put_rows(group, _):
        rows = pl.ds(group * chunk, chunk)

        def add(i, state):
            acc, maximum, total = state
            found = []
            for j in range(unroll):
                number = i * unroll + j
                is_there = number <= num_others
                # Beyond the last one, this split's own part is loaded again with weight 0.
                part_index = split + jnp.where(is_there & (number > 0), number, problem.config.num_splits)
                part = problem.load(parts.at[part_index, rows], layout)
                part_maximum = problem.load(stats.at[part_index, 0, rows], rows_layout)
                part_total = problem.load(stats.at[part_index, 1, rows], rows_layout)
                found.append((part, part_maximum, part_total, jnp.where(is_there, 1.0, 0.0)))
            new_maximum = maximum
            for _, part_maximum, _, _ in found:
                new_maximum = jnp.maximum(new_maximum, part_maximum)
            keep = jnp.exp2(maximum - new_maximum)
            acc, total = acc * spread(keep), total * keep
            for part, part_maximum, part_total, weight in found:
                keep = jnp.exp2(part_maximum - new_maximum) * weight
                acc = acc + part * spread(keep)
                total = total + part_total * keep
            return acc, new_maximum, total

        nothing = (
            problem.cast(jnp.zeros((chunk, problem.head_dim), jnp.float32), layout),
            problem.cast(jnp.full((chunk,), LOWEST, jnp.float32), rows_layout),
            problem.cast(jnp.zeros((chunk,), jnp.float32), rows_layout),
        )
        acc, maximum, total = lax.fori_loop(0, lax.div(num_others, jnp.int32(unroll)) + 1, add, nothing)
        sinks = None
        if all_sinks is not None:
            sinks = problem.load(all_sinks.at[index, rows], rows_layout)
        factor, lse = normalize(maximum, total, sinks)
        acc = acc * spread(factor)
        write(rows, acc, lse)

    lax.fori_loop(0, parts.shape[1] // chunk, put_rows, None)


def part_rows(tile_rows: int) -> int:
    """Return the number of rows stored for a part: chunks of 4, 8 or 16."""
    chunk = 4 if tile_rows <= 4 else 8 if tile_rows <= 8 else 16
    return -(-tile_rows // chunk) * chunk


def part_layout(head_dim: int):
    """Rows over warps, and columns over lanes, so that a warp reads long stretches of memory."""
    columns = next((n for n in (128, 64, 32) if head_dim % n == 0), 16)
    return plgpu.Layout.TILED(
        plgpu.Tiling(((4, columns), (max(1, columns // 32),))),
        warp_dims=(-3,),
        lane_dims=(-2,) if columns >= 32 else (-2, plgpu.Replicated(2)),
        vector_dim=-1,
    )
