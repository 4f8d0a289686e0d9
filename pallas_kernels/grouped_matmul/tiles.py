"""The work of a persistent grouped matmul: the rows of each group divided into tiles, on the device, from the sizes."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

ROWS = 64
"""Rows of a tile if groups have few rows, as multiplied by one wgmma instruction."""
MANY_ROWS = 32
"""Average rows per group above which tiles have twice as many rows, because many groups then have more than 64."""


class Plan(NamedTuple):
    """Tiles of rows, in order. Entries after the last tile are undefined."""

    group: Int[Array, " W"]
    row: Int[Array, " W"]
    """The tile's first."""
    num_rows: Int[Array, " W"]
    """From 1 to the size of a tile."""
    first: Int[Array, "2 X+1"]
    """Each group's first row and first tile; after the last group, their totals."""


def plan(group_sizes: Int[Array, " X"], *, num_rows: int, tile_rows: int) -> Plan:
    """Return tiles that cover each group from its first row on; no tile has rows of two groups.

    Compares all groups with each other, in two fusions: cumulative sums or a search would take more kernels.
    """
    num_groups = group_sizes.shape[0]
    sizes = group_sizes.astype(jnp.int32)
    tiles = (sizes + (tile_rows - 1)) // tile_rows
    is_before = jnp.arange(num_groups)[None, :] < jnp.arange(num_groups + 1)[:, None]
    first = jnp.sum(jnp.where(is_before[None], jnp.stack([sizes, tiles])[:, None], 0), axis=2)

    tile = jnp.arange(max_tiles(num_groups, num_rows=num_rows, tile_rows=tile_rows), dtype=jnp.int32)[:, None]
    first_row, first_tile, end_tile = first[:1, :-1], first[1:, :-1], first[1:, 1:]
    is_own = (first_tile <= tile) & (tile < end_tile)
    skipped = (tile - first_tile) * tile_rows

    def of_own_group(values: Int[Array, "#W X"]) -> Int[Array, " W"]:
        return jnp.sum(jnp.where(is_own, values, 0), axis=1)

    return Plan(
        group=of_own_group(jnp.arange(num_groups, dtype=jnp.int32)[None]),
        row=of_own_group(first_row + skipped),
        num_rows=of_own_group(jnp.minimum(sizes[None] - skipped, tile_rows)),
        first=first,
    )


def tile_rows(num_rows: int, num_groups: int) -> int:
    """Return the rows of the kernel's tiles, a power of two."""
    return 2 * ROWS if num_rows > MANY_ROWS * num_groups else ROWS


def num_used(num_rows: int, num_groups: int) -> float:
    """Return how many groups have rows, if every row falls into any of them."""
    return num_groups * (1 - (1 - 1 / num_groups) ** num_rows)


def max_tiles(num_groups: int, *, num_rows: int, tile_rows: int) -> int:
    """Return the maximum number of tiles: the full ones, and one for each group that has rows."""
    return min(num_groups, num_rows) + num_rows // tile_rows
