"""Which work a persistent prefill kernel does: its rows' tokens, and those behind them, cut into tiles, the costly ones
first.

Made on the device from the layout of the step; layers make equal plans, of which XLA keeps one.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int


class Plan(NamedTuple):
    """The tiles of a step. What lies behind the first `num_tiles` of them means nothing."""

    row: Int[Array, " W"]
    token: Int[Array, " W"]
    """Of q: the tile's first."""
    num_tokens: Int[Array, " W"]
    """From 1 to the size of a tile."""
    end: Int[Array, " W"]
    """The position after that of the last token: so much of the context the tile looks at. 0: its tokens are behind the
    rows, and get 0."""
    context: Int[Array, " W"]
    """Positions that the row holds."""
    num_tiles: Int[Array, " 1"]


def plan(
    seq_lens: Int[Array, " B"],
    query_starts: Int[Array, " B+1"],
    *,
    first_row: Int[Array, ""],
    num_rows: Int[Array, ""],
    num_tokens: int,
    tile_size: int,
) -> Plan:
    """Tiles that cover the tokens of the rows and those behind them, up to `num_tokens`, in order of falling `end`.

    A tile's tokens are of one row, and their positions of one aligned run of `tile_size`: so a tile sees all of every
    such run before its own.
    """
    # Segments: each row, the tokens behind them.
    row = jnp.arange(seq_lens.shape[0], dtype=jnp.int32)
    first_row = jnp.minimum(first_row, num_rows)
    counts = jnp.where((row >= first_row) & (row < num_rows), query_starts[1:] - query_starts[:-1], 0)
    end_of_rows = query_starts[num_rows]
    rows = _and_behind(row, 0)
    starts = _and_behind(query_starts[:-1], end_of_rows)
    counts = _and_behind(counts, num_tokens - end_of_rows)
    contexts = _and_behind(seq_lens, 0)

    positions = jnp.maximum(contexts - counts, 0)
    skipped = positions % tile_size  # of the first tile: before the row's first token
    tiles = jnp.where(counts > 0, (skipped + counts + tile_size - 1) // tile_size, 0)
    tiles_until = jnp.cumsum(tiles)
    tile = jnp.arange(num_tokens // tile_size + 2 * rows.shape[0], dtype=jnp.int32)
    segment = jnp.sum(tiles_until[None, :] <= tile[:, None], axis=1, dtype=jnp.int32)
    segment = jnp.minimum(segment, rows.shape[0] - 1)
    begin = (tile - (tiles_until - tiles)[segment]) * tile_size - skipped[segment]
    stop = jnp.minimum(begin + tile_size, counts[segment])
    begin = jnp.maximum(begin, 0)
    end = positions[segment] + stop
    end = jnp.where(segment == rows.shape[0] - 1, 0, end)
    num_tiles = tiles_until[-1:]
    order = jnp.argsort(jnp.where(tile < num_tiles, -end, 1))
    return Plan(
        row=rows[segment][order],
        token=(starts[segment] + begin)[order],
        num_tokens=(stop - begin)[order],
        end=end[order],
        context=contexts[segment][order],
        num_tiles=num_tiles,
    )


def _and_behind(values: Int[Array, " B"], last: Array | int) -> Int[Array, " B+1"]:
    return jnp.concatenate([values, jnp.asarray(last, jnp.int32).reshape(1)])
