"""What the kernel is compiled for: its matmuls and how they are divided, its memory, and where a CTA is."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.device import counters
from pallas_kernels.device.product_of_codes import OUTPUTS
from pallas_kernels.device.products import Norm
from pallas_kernels.device.scaling import Scaling
from pallas_kernels.quantized_matmuls import device

NUM_COMPUTE = 4
"""Warpgroups that multiply."""
TILE = NUM_COMPUTE * OUTPUTS
COMPUTE_REGISTERS, WEIGHT_REGISTERS, ROW_REGISTERS = 104, 24, 40
"""Registers per thread of the warpgroups that multiply, copy weights and copy rows. A CTA of 768 threads is launched
with 480 for its six warpgroups' threads together.
"""
MAX_ROWS_IN_REGISTERS = 16
"""With more rows the sums of a whole tile, too, are finished from memory: there are too few registers."""
PARTS_AT_A_TIME, PARTS_OF_MANY_ROWS = 6, 3
"""Parts of a tile that are loaded before the first is added, as registers allow: there are fewer with many rows."""

_int = jnp.int32


class Matmul(NamedTuple):
    """One of the matmuls of a kernel, and how it is divided."""

    name: str
    """Name of its weight's values among the arrays in global memory, as are the next ones."""
    x: str
    y: str
    outputs: int
    """Outputs of the weight, gate and up together."""
    is_gated: bool
    scaling: Scaling
    """What its codes are scaled by: these arrays are in global memory, too."""
    norm: Norm | None
    squares: str | None
    """Name of the squares of x, if x lacks a norm's division."""
    num_ctas: int
    """Number of CTAs that have units."""

    @property
    def block_k(self) -> int:
        """Columns of K a step."""
        return self.scaling.block_k

    @property
    def up(self) -> int | None:
        """First output of up, if the weight is gate and up."""
        return self.outputs // 2 if self.is_gated else None

    @property
    def steps(self) -> int:
        """Steps of K of a tile."""
        return -(-self.scaling.depth // self.block_k)

    @property
    def num_tiles(self) -> int:
        """Number of tiles."""
        return -(-self.outputs // TILE)

    @property
    def max_tiles(self) -> int:
        """Number of tiles that a block has a part of, at most."""
        return max(
            -(-self.first_unit(cta + 1) // self.steps) - self.first_unit(cta) // self.steps
            for cta in range(self.num_ctas)
        )

    @property
    def num_units(self) -> int:
        """Units of work of all CTAs."""
        return self.num_tiles * self.steps

    def owner(self, unit: Any) -> Any:
        """Return the CTA that has a unit."""
        if isinstance(unit, int):
            return ((unit + 1) * self.num_ctas - 1) // self.num_units
        return lax.div((unit + 1) * self.num_ctas - 1, _int(self.num_units))

    def first_unit(self, cta: Any) -> Any:
        """Return the first unit of a CTA; CTAs without units come last."""
        if isinstance(cta, int):
            return min(cta, self.num_ctas) * self.num_units // self.num_ctas
        return lax.div(lax.min(cta, _int(self.num_ctas)) * self.num_units, _int(self.num_ctas))

    def num_pieces(self, num_chunks: int) -> int:
        """Return how many pieces (64 outputs by 8 rows) have to be finished."""
        return self.outputs // OUTPUTS * num_chunks


class Problem(NamedTuple):
    """Compile-time parameters of the kernel."""

    matmuls: tuple[Matmul, ...]
    rows: int
    """Rows of x, padded to a multiple of 8."""
    w_slots: int
    x_slots: int
    activation: Callable[[Any], Any] | None
    eps: float

    @property
    def max_tiles(self) -> int:
        """Number of a matmul's tiles that a block has a part of, at most."""
        return max(matmul.max_tiles for matmul in self.matmuls)

    @property
    def num_chunks(self) -> int:
        """Groups of 8 rows."""
        return self.rows // device.COLUMNS


class Shared(NamedTuple):
    """Shared memory and barriers."""

    weights: Any
    weight_boxes: Any
    """View of the same bytes as boxes, of which any columns may be missing."""
    rows: Any
    factors: Any
    """For each matmul whose rows have not been divided by their norm, one factor per row."""
    scratch: Any
    w_full: Any
    w_free: Any
    x_full: Any
    x_ready: Any
    """Filled when the columns of rows are in the order of codes."""
    x_free: Any
    ready: Any
    """Barriers that signal that everything a matmul reads besides its weight and rows is available."""


class Block(NamedTuple):
    """A CTA: what it works on, and its memory."""

    problem: Problem
    gmem: Mapping[str, Any]
    smem: Shared
    cta: Any
    warpgroup: Any

    def finished(self, index: int) -> Any:
        """Return the counter of a matmul's finished pieces.

        The one that the last matmul waits for is an output, since no CTA knows when all have read it: it is cleared at
        the start of the kernel.
        """
        if index == len(self.problem.matmuls) - 2:
            return self.gmem["last_counter"].at[0]
        return self.gmem["finished"].at[index]

    def wait_for(self, index: int) -> None:
        """Wait until a matmul is finished."""
        counters.wait(
            self.finished(index), self.problem.matmuls[index].num_pieces(self.problem.num_chunks), interpret=False
        )


def units(block: Block, matmul: Matmul) -> tuple[Any, Any]:
    """Return the first unit of a matmul that is the CTA's, and the first after them."""
    return matmul.first_unit(block.cta), matmul.first_unit(block.cta + 1)
