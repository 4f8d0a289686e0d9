"""The work distribution of the Hopper kernel: a step's contexts, divided into equal splits, one per stream.

All blocks of all contexts are laid out in a line, row after row, each row's KV heads one after another, and a split is
an interval of it, wherever the cuts fall: one long context among short ones spans many splits, and many short ones are
in one (as in Osama et al. 2023, "Stream-K", arXiv:2301.03598).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

BLOCK_COST, TILE_COST, CUT_COST = 4, 4, 12
"""Costs in units of work: of a block of the context, of beginning and ending a tile (a row's queries of one KV head),
and of combining a tile that was cut. A unit is some 0.25 us on an H200.
"""

MIN_PART = 12
"""Units below which a part does not pay for the cut."""


class Plan(NamedTuple):
    """The C splits of a step: equal for all layers with the same sliding window and heads, hence computed once."""

    splits: Int[Array, "C 8"]
    """For each split: the row and tile where it begins and the unit where that tile begins; the units where the split
    begins and ends; the split with the beginning of that tile, and the index for the tile's partial result; and how
    many other splits have parts of the tile where this split ends.
    """
    rows: Int[Array, "B 2"]
    """For each row: the lengths of its context and of its queries, both 0 if it has no queries."""
    arrivals: Int[Array, "C 1"]
    """Zeros, which the kernel counts up and down again: how many parts of a tile have arrived."""


def block_range(seq_len, query_len, *, block_kv: int, sliding_window: int | None):
    """Return the first and last + 1 of the blocks that a row's queries attend to."""
    end = (seq_len + (block_kv - 1)) // block_kv
    if sliding_window is None:
        return jnp.int32(0), end
    oldest = jnp.maximum(seq_len - query_len - (sliding_window - 1), 0)
    return oldest // block_kv, end


def make_plan(
    seq_lens: Int[Array, " B"],
    query_lens: Int[Array, " B"],
    *,
    num_tiles: int,
    num_splits: int,
    block_kv: int,
    sliding_window: int | None,
) -> Plan:
    """Return the `num_splits` splits of a step with rows of `num_tiles` tiles each."""
    query_lens = jnp.where(seq_lens > 0, query_lens, 0)
    seq_lens = jnp.where(query_lens > 0, seq_lens, 0)
    first, end = block_range(seq_lens, query_lens, block_kv=block_kv, sliding_window=sliding_window)
    costs = BLOCK_COST * (end - first) + TILE_COST
    row_ends = jnp.cumsum(costs * num_tiles, dtype=jnp.int32)
    total = row_ends[-1]

    def find(unit: Int[Array, " C"]) -> tuple[Int[Array, " C"], ...]:
        """Return the row and tile that contain a unit, and that tile's first unit."""
        # Compares with all, which is one small kernel where a binary search would be several.
        row = jnp.sum(unit[:, None] >= row_ends[None], axis=1, dtype=jnp.int32)
        row = jnp.minimum(row, seq_lens.shape[0] - 1)
        row_begin = row_ends[row] - costs[row] * num_tiles
        tile = jnp.minimum((unit - row_begin) // costs[row], num_tiles - 1)
        return row, tile, row_begin + tile * costs[row]

    size = -(-total // num_splits)
    # The beginnings of the splits and the end of the last one, so that ends are a slice: XLA fuses that.
    cuts = jnp.minimum(jnp.arange(num_splits + 1, dtype=jnp.int32) * size, total)
    # Better than splits of equal size are those that cut tiles into equal parts or not at all, unless one becomes much
    # larger.
    row, _, tile_begin = find(cuts)
    cost = costs[row]
    num_parts = jnp.maximum((cost + size // 2) // jnp.maximum(size, MIN_PART), 1)
    part = (2 * (cuts - tile_begin) * num_parts + cost) // (2 * cost)
    rounded = jnp.where(cuts < total, tile_begin + part * cost // num_parts, total)
    largest = jnp.max(rounded[1:] - rounded[:-1])
    cuts = jnp.where(largest <= jnp.maximum(size, MIN_PART) + CUT_COST, rounded, cuts)
    begin, end = cuts[:-1], cuts[1:]

    row, tile, tile_begin = find(begin)
    tile_begin = jnp.where(begin < total, tile_begin, total)
    num_blocks = (costs[row] - TILE_COST) // BLOCK_COST
    first_block, end_block = ((x - tile_begin + (BLOCK_COST - 1)) // BLOCK_COST for x in (begin, end))
    is_part = (tile_begin < begin) & (first_block < jnp.minimum(end_block, num_blocks))
    split = jnp.arange(num_splits, dtype=jnp.int32)

    def count(pairs: Bool[Array, "C C"]) -> Int[Array, " C"]:
        return jnp.sum(pairs, axis=1, dtype=jnp.int32)

    owner = count(begin[None] <= tile_begin[:, None]) - 1
    is_before = is_part[None] & (tile_begin[None] == tile_begin[:, None]) & (split[None] < split[:, None])
    part_index = owner + 1 + count(is_before)
    num_others = count(is_part[None] & (begin[:, None] <= tile_begin[None]) & (tile_begin[None] < end[:, None]))
    return Plan(
        splits=jnp.stack([row, tile, tile_begin, begin, end, owner, part_index, num_others], axis=1),
        rows=jnp.stack([seq_lens, query_lens], axis=1),
        arrivals=jnp.zeros((num_splits, 1), jnp.int32),
    )
