"""The body of the kernel: the work of its CTAs. See sm90.py.

The work of a matmul is divided into units: a tile of 256 outputs by a step of K. Each CTA takes an equal run of them,
in the order of tiles and then of K, so that it has a fragment of one or two tiles and all units in between. CTAs that
have added up a part of a tile store it in memory; one of them, or for many rows each of them for some rows, waits for
all parts, adds them up in order and finishes that piece of the tile.

In a CTA, one warpgroup streams the weights of all its units through a ring in shared memory and never waits for other
CTAs; one copies rows, as soon as the matmul before has finished them all; four multiply, each 64 outputs of a tile.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layer_matmuls.device import clear, signal, wait
from pallas_kernels.quantized_matmuls import device
from pallas_kernels.quantized_matmuls.codes import Code, codes_per_byte
from pallas_kernels.quantized_matmuls.product import BYTES, OUTPUTS, add_product

NUM_COMPUTE = 4
"""Warpgroups that multiply."""
TILE = NUM_COMPUTE * OUTPUTS
COMPUTE_REGISTERS, COPY_REGISTERS = 104, 32
"""Registers per thread. A CTA of 768 threads is launched with 480 for its six warpgroups' threads together."""
MAX_ROWS_IN_REGISTERS = 16
"""With more rows the sums of a whole tile, too, are finished from memory: there are too few registers."""
PARTS_AT_A_TIME = 12
"""Parts of a tile that are loaded before the first is added, as registers allow."""

_int = jnp.int32


class Norm(NamedTuple):
    """The addition to the residual stream and the norm that follow a matmul: names of arrays in global memory."""

    residual: str
    gain: str
    normed: str
    """The sum times the gain, which still lacks the division by its root mean square."""
    squares: str
    """Sums of the squares of the sum's parts, [parts, rows]."""


class Matmul(NamedTuple):
    """One of the matmuls of a kernel, and how it is divided."""

    name: str
    """Name of its weight's values among the arrays in global memory, as are the next ones."""
    x: str
    y: str
    depth: int
    outputs: int
    """Outputs of the weight, gate and up together."""
    code: Code
    num_scales: int
    """Scales of an output."""
    is_gated: bool
    zeros: bool
    """True if scales have zero points."""
    bias: str | None
    norm: Norm | None
    squares: str | None
    """Name of the squares of x, if x lacks a norm's division."""
    num_ctas: int
    """Number of CTAs that have units."""

    @property
    def block_k(self) -> int:
        """Columns of K a step."""
        return BYTES * codes_per_byte(self.code)

    @property
    def scales(self) -> str:
        """Name of the scales [outputs, num_scales]."""
        return f"scales_{self.name}"

    @property
    def zero_points(self) -> str:
        """Name of the zero points, as `scales`."""
        return f"zeros_{self.name}"

    @property
    def scales_of_block(self) -> int:
        """Scales of the columns of a step; 0 if an output has only one, which its sum is multiplied by."""
        return 0 if self.num_scales == 1 else self.block_k * self.num_scales // self.depth

    @property
    def up(self) -> int | None:
        """First output of up, if the weight is gate and up."""
        return self.outputs // 2 if self.is_gated else None

    @property
    def steps(self) -> int:
        """Steps of K of a tile."""
        return -(-self.depth // self.block_k)

    @property
    def num_tiles(self) -> int:
        """Number of tiles."""
        return -(-self.outputs // TILE)

    @property
    def num_units(self) -> int:
        """Units of work of all CTAs."""
        return self.num_tiles * self.steps

    @property
    def max_parts(self) -> int:
        """Maximum number of CTAs that have a part of the same tile."""

        def parts(tile: int) -> int:
            return self.owner((tile + 1) * self.steps - 1) - self.owner(tile * self.steps) + 1

        return max(map(parts, range(self.num_tiles)))

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
    def num_chunks(self) -> int:
        """Groups of 8 rows."""
        return self.rows // device.COLUMNS

    def counters_of(self, index: int) -> int:
        """Return where the counters of a matmul's tiles begin: one for each of their pieces."""
        return sum(matmul.num_tiles * NUM_COMPUTE * self.num_chunks for matmul in self.matmuls[:index])


class Shared(NamedTuple):
    """Shared memory and barriers."""

    weights: Any
    rows: Any
    factors: Any
    """For each matmul whose rows have not been divided by their norm, one factor per row."""
    scratch: Any
    w_full: Any
    w_free: Any
    x_full: Any
    x_free: Any
    ready: Any
    """Barriers that signal that everything a matmul reads besides its weight and rows is available."""


class _Block(NamedTuple):
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
        wait(self.finished(index), self.problem.matmuls[index].num_pieces(self.problem.num_chunks), interpret=False)


def kernel(problem: Problem, gmem: Mapping[str, Any], smem: Shared) -> None:
    """Run each warpgroup (mesh axis "wg") of each CTA (axis "cta")."""
    warpgroup = lax.axis_index("wg")
    block = _Block(problem, gmem, smem, lax.axis_index("cta"), warpgroup)

    @pl.when(warpgroup < NUM_COMPUTE)
    def _():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        first = _int(0)
        for index, matmul in enumerate(problem.matmuls):
            first = _compute(block, index, matmul, first)

    @pl.when(warpgroup == NUM_COMPUTE)
    def _():
        plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
        first = _int(0)
        for matmul in problem.matmuls:
            first = _copy_weights(block, matmul, first)
        _wait_until_free(smem.w_free, problem.w_slots, first, first + problem.w_slots)

    @pl.when(warpgroup == NUM_COMPUTE + 1)
    def _():
        plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
        first = _int(0)
        if len(problem.matmuls) > 1:

            @pl.when(block.cta == 0)
            def _():
                clear(gmem["last_counter"].at[0], interpret=False)

        for index, matmul in enumerate(problem.matmuls):
            first = _copy_rows(block, index, matmul, first)
        _wait_until_free(smem.x_free, problem.x_slots, first, first + problem.x_slots)


def _units(block: _Block, matmul: Matmul) -> tuple[Any, Any]:
    return matmul.first_unit(block.cta), matmul.first_unit(block.cta + 1)


def _wait_until_free(free: Any, num_slots: int, first: Any, end: Any) -> None:
    """Wait for those of the ring's steps from `first` to `end` whose slot was in use before."""

    def step(index, _):
        @pl.when(index >= num_slots)
        def _():
            plgpu.barrier_wait(free.at[lax.rem(index, _int(num_slots))])

    lax.fori_loop(first, end, step, None)


def _copy_weights(block: _Block, matmul: Matmul, first: Any) -> Any:
    problem, smem, weight = block.problem, block.smem, block.gmem[matmul.name]
    start, end = _units(block, matmul)

    def copy(unit, _):
        step = first + unit - start
        slot = lax.rem(step, _int(problem.w_slots))
        _wait_until_free(smem.w_free, problem.w_slots, step, step + 1)
        tile, k = lax.div(unit, _int(matmul.steps)), lax.rem(unit, _int(matmul.steps))
        ring, full = smem.weights.at[slot], smem.w_full.at[slot]
        half = TILE // 2  # two copies a step, whatever the matmul, since they arrive at the same barrier
        columns = pl.ds(k * BYTES, BYTES)
        for part in range(2):
            if matmul.is_gated:
                source = weight.at[part, pl.ds(tile * half, half), columns]
            else:
                source = weight.at[pl.ds(tile * TILE + part * half, half), columns]
            plgpu.copy_gmem_to_smem(source, ring.at[pl.ds(part * half, half)], full)

    lax.fori_loop(start, end, copy, None)
    return first + end - start


def _copy_rows(block: _Block, index: int, matmul: Matmul, first: Any) -> Any:
    """Copy the rows of all units, once the matmul before is finished, and compute the factors that they need."""
    problem, smem, x = block.problem, block.smem, block.gmem[matmul.x]
    start, end = _units(block, matmul)

    def copy(unit, _):
        step = first + unit - start
        slot = lax.rem(step, _int(problem.x_slots))
        _wait_until_free(smem.x_free, problem.x_slots, step, step + 1)
        k = pl.ds(lax.rem(unit, _int(matmul.steps)) * matmul.block_k, matmul.block_k)
        # A start that is not static makes TMA fill in the rows that pad x to a multiple of 8.
        rows = pl.ds(block.cta * 0, problem.rows)
        plgpu.copy_gmem_to_smem(x.at[rows, k], smem.rows.at[slot], smem.x_full.at[slot])

    if not index:
        lax.fori_loop(start, end, copy, None)
        return first + end - start

    @pl.when(start < end)
    def _():
        block.wait_for(index - 1)

    middle = lax.min(start + problem.x_slots, end)
    lax.fori_loop(start, middle, copy, None)

    @pl.when(start < end)
    def _():
        if matmul.squares is not None:
            squares = block.gmem[matmul.squares]

            @pl.loop(0, problem.num_chunks)
            def _(chunk):
                device.store_reciprocal_roots(
                    smem.factors.at[index],
                    squares,
                    chunk,
                    smem.scratch.at[NUM_COMPUTE],
                    size=matmul.depth,
                    eps=problem.eps,
                )

        plgpu.barrier_arrive(smem.ready.at[index])

    if index > 1:

        @pl.when(block.cta == 0)
        def _():  # all that waited have seen it, or the matmul before this one would not be finished
            clear(block.finished(index - 2), interpret=False)

    lax.fori_loop(middle, end, copy, None)
    return first + end - start


def _compute(block: _Block, index: int, matmul: Matmul, first: Any) -> Any:
    """Multiply a CTA's units and finish the pieces that it owns."""
    start, end = _units(block, matmul)
    steps = _int(matmul.steps)
    first_tile = lax.div(start, steps)
    num_tiles = lax.div(end + (matmul.steps - 1), steps) - first_tile
    max_parts, num_chunks = matmul.max_parts, block.problem.num_chunks
    finishes_in_registers = block.problem.rows <= MAX_ROWS_IN_REGISTERS
    fewest_parts = 1 if finishes_in_registers else 0
    parts, counters = block.gmem[f"parts_{matmul.name}"], block.gmem["counters"]

    def part_index(tile, part):
        return (tile * max_parts + part) * NUM_COMPUTE + block.warpgroup

    def counter(tile, chunk):
        piece = (tile * NUM_COMPUTE + block.warpgroup) * num_chunks + chunk
        return counters.at[block.problem.counters_of(index) + piece]

    def owners(tile):
        first_owner = matmul.owner(tile * steps)
        return first_owner, matmul.owner((tile + 1) * steps - 1) - first_owner + 1

    @pl.loop(0, num_tiles)
    def _(number):
        tile = first_tile + number
        low, high = lax.max(start, tile * steps), lax.min(end, (tile + 1) * steps)
        sums = _multiply(block, matmul, tile, low - tile * steps, first + low - start, high - low)
        if index:

            @pl.when(number == 0)
            def _():
                plgpu.barrier_wait(block.smem.ready.at[index])

        first_owner, num_parts = owners(tile)

        if finishes_in_registers:

            @pl.when(num_parts == 1)
            def _():
                for chunk in range(num_chunks):
                    columns = sums[:, chunk * device.COLUMNS : (chunk + 1) * device.COLUMNS]
                    operands = _load_operands(block, index, matmul, tile, _int(chunk))
                    _finish(block, index, matmul, tile, _int(chunk), columns, operands)

        @pl.when(num_parts > fewest_parts)
        def _():
            device.store_part(parts, sums, part_index(tile, block.cta - first_owner))
            for chunk in range(num_chunks):
                signal(counter(tile, chunk), interpret=False)

    @pl.loop(0, num_tiles)
    def _(number):
        tile = first_tile + number
        first_owner, num_parts = owners(tile)
        own = block.cta - first_owner

        @pl.when(num_parts > fewest_parts)
        def _():
            @pl.loop(0, num_chunks)
            def _(chunk):
                @pl.when(own == lax.rem(chunk, num_parts))
                def _():
                    operands = _load_operands(block, index, matmul, tile, chunk)
                    _wait_and_clear(counter(tile, chunk), num_parts)
                    total = _sum_of_parts(parts, part_index(tile, 0), num_parts, chunk)
                    _finish(block, index, matmul, tile, chunk, total, operands)

    return first + end - start


def _sum_of_parts(parts: Any, first: Any, number: Any, chunk: Any) -> Any:
    """Return [64, 8], the sum of a tile's parts in their order."""

    def add(batch, total):
        start = batch * PARTS_AT_A_TIME
        own = lax.min(number - start, _int(PARTS_AT_A_TIME))
        place = first + start * NUM_COMPUTE
        return total + device.load_sum(parts, place, own, chunk, stride=NUM_COMPUTE, most=PARTS_AT_A_TIME)

    zeros = plgpu.layout_cast(jnp.zeros((OUTPUTS, device.COLUMNS), jnp.float32), plgpu.Layout.WGMMA)
    return lax.fori_loop(_int(0), lax.div(number + (PARTS_AT_A_TIME - 1), _int(PARTS_AT_A_TIME)), add, zeros)


def _wait_and_clear(counter: Any, value: Any) -> None:
    wait(counter, value, interpret=False)
    clear(counter, interpret=False)


def _multiply(block: _Block, matmul: Matmul, tile: Any, first_k: Any, first: Any, num_steps: Any) -> Any:
    """Return this warpgroup's sums [64, rows] of a tile, over steps of the ring from `first`, of K from `first_k`."""
    problem, smem, gmem = block.problem, block.smem, block.gmem
    piece = _piece(block, matmul, tile)
    num_scales = matmul.scales_of_block
    has_zeros = matmul.zeros
    add = add_product(
        matmul.code,
        rows=problem.rows,
        is_gated=matmul.is_gated,
        num_scales=num_scales,
        has_zeros=has_zeros,
    )

    def step(number, sums):
        vectors = []
        for name in (matmul.scales, *((matmul.zero_points,) if has_zeros else ())):
            for index in range(num_scales):
                column = lax.min((first_k + number) * num_scales + index, _int(matmul.num_scales - 1))
                vectors.append(device.outputs_vector(gmem[name], piece, column, up=matmul.up))
        position = first + number
        w_slot, x_slot = lax.rem(position, _int(problem.w_slots)), lax.rem(position, _int(problem.x_slots))
        plgpu.barrier_wait(smem.w_full.at[w_slot])
        plgpu.barrier_wait(smem.x_full.at[x_slot])
        slot, warpgroup, rows_slot = (jnp.full((128,), x, jnp.int32) for x in (w_slot, block.warpgroup, x_slot))
        sums = add(sums, smem.weights, slot, warpgroup, smem.rows, rows_slot, *vectors)
        plgpu.barrier_arrive(smem.w_free.at[w_slot])
        plgpu.barrier_arrive(smem.x_free.at[x_slot])
        return sums

    zeros = plgpu.layout_cast(jnp.zeros((OUTPUTS, problem.rows), jnp.float32), plgpu.Layout.WGMMA)
    return lax.fori_loop(_int(0), num_steps, step, zeros)


def _piece(block: _Block, matmul: Matmul, tile: Any) -> Any:
    """Return which 64 of the outputs are this warpgroup's of a tile: of those past the last one, the last 64."""
    return lax.min(tile * NUM_COMPUTE + block.warpgroup, _int(matmul.outputs // OUTPUTS - 1))


class _Operands(NamedTuple):
    """The operands of a piece besides its sums, [64, 8] each; None for those that the matmul does not have."""

    scale: Any
    factor: Any
    bias: Any
    residual: Any
    gain: Any


def _load_operands(block: _Block, index: int, matmul: Matmul, tile: Any, chunk: Any) -> _Operands:
    """Load the operands of a piece besides its sums; the last outputs are repeated for those beyond them."""
    gmem, norm = block.gmem, matmul.norm
    piece = _piece(block, matmul, tile)
    has_scale = not matmul.scales_of_block
    return _Operands(
        scale=device.outputs_vector(gmem[matmul.scales], piece, up=matmul.up) if has_scale else None,
        factor=None if matmul.squares is None else device.rows_vector(block.smem.factors.at[index], chunk),
        bias=None if matmul.bias is None else device.outputs_vector(gmem[matmul.bias], piece, up=matmul.up),
        residual=None if norm is None else device.load_transposed(gmem[norm.residual], piece * OUTPUTS, chunk),
        gain=None if norm is None else device.outputs_vector(gmem[norm.gain], piece),
    )


def _finish(block: _Block, index: int, matmul: Matmul, tile: Any, chunk: Any, sums: Any, operands: _Operands) -> None:
    """Compute 64 outputs of 8 rows from their sums: everything after the product."""
    gmem, norm = block.gmem, matmul.norm
    piece = tile * NUM_COMPUTE + block.warpgroup
    first = piece * OUTPUTS

    @pl.when(first < matmul.outputs)
    def _():
        y = sums
        for factor in (operands.scale, operands.factor):
            y = y if factor is None else y * factor
        if operands.bias is not None:
            y = y + operands.bias
        if norm is not None:
            y = (y + operands.residual).astype(gmem[matmul.y].dtype).astype(jnp.float32)  # as it is stored
            device.store_transposed(gmem[norm.normed], y * operands.gain, first, chunk)
            device.store_squares(gmem[norm.squares], y, piece, chunk, block.smem.scratch.at[block.warpgroup])
            device.store_transposed(gmem[matmul.y], y, first, chunk)
        elif matmul.is_gated:
            assert block.problem.activation is not None
            gate, up = device.halves(y)
            y = block.problem.activation(gate) * up
            device.store_transposed(gmem[matmul.y], y, lax.div(first, _int(2)), chunk, half=0)
        else:
            device.store_transposed(gmem[matmul.y], y, first, chunk)
        if index < len(block.problem.matmuls) - 1:
            signal(block.finished(index), interpret=False)
