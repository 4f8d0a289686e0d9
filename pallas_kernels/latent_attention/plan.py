"""The work distribution of the Hopper kernel: a step's tiles, divided into equal splits, one per CTA.

A tile is up to 64 queries of one row: its tokens' heads, one token after another. The blocks of keys that tiles attend
to are laid out in a line, tile after tile, and a split is an interval of it, wherever the cuts fall (as in Osama et al.
2023, "Stream-K", arXiv:2301.03598). The plan is made on the device; layers make equal plans, of which XLA keeps one.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

ROWS = 64
"""Rows of a tile, as multiplied by one wgmma instruction."""
BLOCK_KV = 64
"""Keys a step."""

BLOCK_COST, TILE_COST, CUT_COST = 4, 4, 8
"""Costs in units of work: of a block of keys, of beginning and ending a tile, and of combining a tile that was cut."""


class Tiles(NamedTuple):
    """The tiles of a step, in the order of its tokens. Entries after the last one cost nothing."""

    row: Int[Array, " W"]
    query: Int[Array, " W"]
    """The first, counted over all heads of all tokens."""
    num_queries: Int[Array, " W"]
    seen: Int[Array, " W"]
    """Positions that the first query attends to."""
    end: Int[Array, " W"]
    """Positions that the last one attends to. 0: they are of no row, and get 0."""
    context: Int[Array, " W"]
    """Positions that the row holds."""
    unit: Int[Array, " W"]
    """First unit of the tile in the line."""


class Splits(NamedTuple):
    """The C splits of a step."""

    begin: Int[Array, " C"]
    end: Int[Array, " C"]
    """Units where splits begin and end."""
    tile: Int[Array, " C"]
    num_tiles: Int[Array, " C"]
    """Number of tiles that the split has a part of, from `tile` on."""
    part_index: Int[Array, " C"]
    """Index for the partial result of its first tile, if that began in an earlier split."""


class Cuts(NamedTuple):
    """The tiles that are cut between splits. Entries after the last one have 0 queries."""

    query: Int[Array, " C"]
    num_queries: Int[Array, " C"]
    split: Int[Array, " C"]
    """Index of the split in which the tile begins."""
    num_others: Int[Array, " C"]
    """Number of parts of other splits, stored at the indices from that split's number on."""
    num_cuts: Int[Array, " C"]
    """The number of such tiles, in each entry."""


class Plan(NamedTuple):
    """All of it."""

    tiles: Tiles
    splits: Splits
    cuts: Cuts


def make_plan(
    seq_lens: Int[Array, " B"],
    query_starts: Int[Array, " B+1"],
    *,
    num_rows: Int[Array, ""],
    num_tokens: int,
    num_heads: int,
    num_splits: int,
    min_blocks: int,
) -> Plan:
    """Return tiles that cover all queries of `num_tokens` tokens, in splits whose part of a context, if it is cut, has
    at least `min_blocks` blocks of keys.
    """
    tiles = _tiles(seq_lens, query_starts, num_rows=num_rows, num_tokens=num_tokens, num_heads=num_heads)
    costs = jnp.where(tiles.num_queries > 0, BLOCK_COST * ((tiles.end + BLOCK_KV - 1) // BLOCK_KV) + TILE_COST, 0)
    tile_ends = jnp.cumsum(costs, dtype=jnp.int32)
    tiles = tiles._replace(unit=tile_ends - costs)
    total = tile_ends[-1]

    def find(unit: Int[Array, " C"]) -> Int[Array, " C"]:
        """Return the tile that contains a unit."""
        # Compares with all, which is one small kernel where a binary search would be several.
        index = jnp.sum(unit[:, None] >= tile_ends[None], axis=1, dtype=jnp.int32)
        return jnp.minimum(index, len(tile_ends) - 1)

    size = -(-total // num_splits)
    smallest = BLOCK_COST * min_blocks
    begin = jnp.minimum(jnp.arange(num_splits, dtype=jnp.int32) * size, total)
    # Better than splits of equal size are those that cut tiles into equal parts or not at all, unless one becomes much
    # larger.
    tile = find(begin)
    cost, unit = jnp.maximum(costs[tile], 1), tiles.unit[tile]
    num_parts = jnp.maximum((cost + size // 2) // jnp.maximum(size, smallest), 1)
    part = (2 * (begin - unit) * num_parts + cost) // (2 * cost)
    rounded = jnp.where(begin < total, unit + part * cost // num_parts, total)
    largest = jnp.max(jnp.append(rounded[1:], total) - rounded)
    begin = jnp.where(largest <= jnp.maximum(size, smallest) + CUT_COST, rounded, begin)
    end = jnp.append(begin[1:], total)

    tile = find(begin)
    unit = tiles.unit[tile]
    num_blocks = (costs[tile] - TILE_COST) // BLOCK_COST
    first_block, end_block = ((x - unit + (BLOCK_COST - 1)) // BLOCK_COST for x in (begin, end))
    is_part = (unit < begin) & (first_block < jnp.minimum(end_block, num_blocks))
    owner = jnp.sum(begin[None] <= unit[:, None], axis=1, dtype=jnp.int32) - 1
    split = jnp.arange(num_splits, dtype=jnp.int32)
    is_before = (owner[:, None] == owner[None]) & is_part[None] & (split[None] < split[:, None])
    is_mine = (split[:, None] == owner[None]) & is_part[None]
    num_others = jnp.sum(is_mine, axis=1, dtype=jnp.int32)
    number = jnp.cumsum(num_others > 0, dtype=jnp.int32)
    # The splits with such a tile, in order.
    is_number = (number[None] == split[:, None] + 1) & (num_others[None] > 0)
    cut_split = jnp.sum(jnp.where(is_number, split[None], 0), axis=1)
    cut_tile = jnp.max(jnp.where(is_mine, tile[None], 0), axis=1)[cut_split]
    is_cut = split < number[-1]
    return Plan(
        tiles=tiles,
        splits=Splits(
            begin=begin,
            end=end,
            tile=tile,
            num_tiles=jnp.where(begin < end, find(end - 1) - tile + 1, 0),
            part_index=owner + 1 + jnp.sum(is_before, axis=1, dtype=jnp.int32),
        ),
        cuts=Cuts(
            query=tiles.query[cut_tile],
            num_queries=jnp.where(is_cut, tiles.num_queries[cut_tile], 0),
            split=cut_split,
            num_others=num_others[cut_split],
            num_cuts=jnp.broadcast_to(number[-1], split.shape),
        ),
    )


def _tiles(
    seq_lens: Int[Array, " B"],
    query_starts: Int[Array, " B+1"],
    *,
    num_rows: Int[Array, ""],
    num_tokens: int,
    num_heads: int,
) -> Tiles:
    """All but where they begin in the line."""
    # The tokens after the rows are as one more row, without a context.
    is_row = jnp.arange(seq_lens.shape[0]) < num_rows
    counts = jnp.where(is_row, query_starts[1:] - query_starts[:-1], 0)
    end_of_rows = query_starts[num_rows]
    counts = jnp.append(counts, num_tokens - end_of_rows)
    starts = jnp.append(query_starts[:-1], end_of_rows)
    contexts = jnp.append(jnp.where(is_row, seq_lens, 0), 0)

    tiles = (counts * num_heads + ROWS - 1) // ROWS
    tiles_until = jnp.cumsum(tiles, dtype=jnp.int32)
    tile = jnp.arange(num_tokens * num_heads // ROWS + len(counts), dtype=jnp.int32)
    row = jnp.sum(tiles_until[None] <= tile[:, None], axis=1, dtype=jnp.int32)
    is_tile = row < len(counts)
    row = jnp.minimum(row, len(counts) - 1)
    first = (tile - (tiles_until - tiles)[row]) * ROWS  # query of the row
    num_queries = jnp.where(is_tile, jnp.minimum(counts[row] * num_heads - first, ROWS), 0)
    before = contexts[row] - counts[row]
    has_context = is_tile & (contexts[row] > 0)
    return Tiles(
        row=row,
        query=starts[row] * num_heads + first,
        num_queries=num_queries,
        seen=jnp.where(has_context, before + first // num_heads + 1, 0),
        end=jnp.where(has_context, before + (first + num_queries - 1) // num_heads + 1, 0),
        context=contexts[row],
        unit=jnp.zeros_like(tile),
    )
