"""The work of a persistent prefill kernel: its rows' tokens, and those after them, divided into tiles, the costly ones
first.

The plan is made on the device from the layout of the step; layers make equal plans, of which XLA keeps one.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int


class Plan(NamedTuple):
    """The tiles of a step. Entries after the first `num_tiles` are undefined."""

    row: Int[Array, " W"]
    token: Int[Array, " W"]
    """First token of the tile, an index of q."""
    num_tokens: Int[Array, " W"]
    """From 1 to the size of a tile."""
    end: Int[Array, " W"]
    """The position after that of the last token, up to which the tile attends. 0 if its tokens are after the rows, and
    get 0.
    """
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
    """Return tiles that cover the tokens of the rows and those after them, up to `num_tokens`, in order of falling
    `end`.

    A tile's tokens belong to one row, and their positions to one aligned run of `tile_size`: so a tile attends to all
    of every earlier run.
    """
    # Segments: each row, and the tokens after them.
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
