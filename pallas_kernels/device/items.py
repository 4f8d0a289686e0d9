"""The items of a persistent grouped matmul: tiles of a plan's rows times tiles of outputs, in an order for the L2."""

from collections.abc import Callable
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


class Block(NamedTuple):
    """A CTA, which has every `problem.num_blocks`-th item, and one of its warpgroups."""

    problem: Any
    gmem: Any
    """Arrays in global memory, the plan among them."""
    smem: Any
    cta: Any
    warpgroup: Any
    num_tiles: Any
    """Number of tiles of rows."""
    parts: int = 1
    """Number of items of a tile of outputs."""

    @property
    def num_items(self) -> Any:
        """Number of items of all CTAs."""
        num_items = self.num_tiles * self.problem.output_tiles
        return num_items * self.parts if self.parts > 1 else num_items

    @property
    def num_own(self) -> Any:
        """Number of items of this CTA."""
        blocks = self.problem.num_blocks
        return lax.div(lax.max(self.num_items - self.cta + (blocks - 1), _int(0)), _int(blocks))

    def own_index(self, turn: Any) -> Any:
        """Return the index of an item of this CTA; `turn` may also be one past the last."""
        return lax.max(lax.min(self.cta + turn * self.problem.num_blocks, self.num_items - 1), _int(0))

    def item_at(self, index: Any) -> Item:
        """Return an item: a band of tiles of rows goes through all outputs before the next band."""
        band_items = BAND * self.problem.output_tiles
        band = lax.div(index, _int(band_items))
        within = index - band * band_items
        band_size = lax.clamp(_int(1), self.num_tiles - band * BAND, _int(BAND))
        tile, output = band * BAND + lax.rem(within, band_size), lax.div(within, band_size)
        plan = self.gmem.plan
        return Item(plan.group[tile], plan.row[tile], plan.num_rows[tile], output * self.problem.tile)

    def for_each_item(self, visit: Callable[[Item, Any], None], num_own: Any = None) -> None:
        """Call `visit(item, step)`, `step` being the first in the count of all steps. The next item is read ahead.

        `num_own` is what has that name, if it has been computed already.
        """

        def turn(index, item):
            following = self.item_at(self.own_index(index + 1))
            visit(item, index * self.problem.steps)
            return following

        num_own = self.num_own if num_own is None else num_own
        lax.fori_loop(_int(0), num_own, turn, self.item_at(self.own_index(_int(0))))
