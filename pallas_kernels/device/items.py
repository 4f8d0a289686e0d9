"""The items of a persistent grouped matmul: tiles of a plan's rows times tiles of outputs, in an order for the L2."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

BAND = 8
"""Row tiles that are processed together before the next ones, so that concurrent CTAs use the same weights and rows."""

_int = jnp.int32


class Item(NamedTuple):
    """A tile of rows and one of outputs."""

    group: Any
    row: Any
    num_rows: Any
    output: Any
    """The first."""


def item_at(gmem: Any, index: Any, num_tiles: Any, problem: Any) -> Item:
    """Return an item of a plan: a band of tiles of rows goes through all outputs before the next band."""
    band = lax.div(index, _int(BAND * problem.output_tiles))
    within = index - band * (BAND * problem.output_tiles)
    band_size = lax.clamp(_int(1), num_tiles - band * BAND, _int(BAND))
    tile, output = band * BAND + lax.rem(within, band_size), lax.div(within, band_size)
    return Item(gmem.group[tile], gmem.row[tile], gmem.num_rows[tile], output * problem.tile)
