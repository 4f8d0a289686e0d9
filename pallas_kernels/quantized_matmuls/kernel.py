"""The body of the kernel: the work of its CTAs. See sm90.py.

The work of a matmul is divided into units: a tile of 256 outputs by a step of K. Each CTA takes an equal run of them,
in the order of tiles and then of K, so that it has a fragment of one or two tiles and all units in between. CTAs that
have added up a part of a tile store it in memory; one of them, or for many rows each of them for some rows, waits for
all parts, adds them up in order and finishes that piece of the tile. A word that is not there yet has a value that no
sum has, so that waiting for parts is nothing but loading them.

In a CTA, one warpgroup streams the weights of all its units through a ring in shared memory and never waits for other
CTAs; one copies rows, as soon as the matmul before has finished them all; four multiply, each 64 outputs of a tile.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import counters
from pallas_kernels.device.codes import Code, codes_per_byte
from pallas_kernels.device.product_of_codes import BYTES, OUTPUTS, add_product, interleave_rows
from pallas_kernels.device.registers import halves
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
MAX_ROWS_TO_LOAD_AHEAD, MAX_VECTORS_TO_LOAD_AHEAD = 32, 4
"""With more rows, or more scales and zero points a step, there are no registers for those of the next step."""
MAX_VECTORS, VECTORS_OF_A_PART = 8, 4
"""With more scales and zero points a step, parts of its columns are multiplied one after the other."""
PARTS_AT_A_TIME, PARTS_OF_MANY_ROWS = 6, 3
"""Parts of a tile that are loaded before the first is added, as registers allow: there are fewer with many rows."""

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
        counters.wait(
            self.finished(index), self.problem.matmuls[index].num_pieces(self.problem.num_chunks), interpret=False
        )


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
        plgpu.set_max_registers(WEIGHT_REGISTERS, action="decrease")
        first = _int(0)
        for matmul in problem.matmuls:
            first = _copy_weights(block, matmul, first)
        _wait_until_free(smem.w_free, problem.w_slots, first, first + problem.w_slots)

    @pl.when(warpgroup == NUM_COMPUTE + 1)
    def _():
        plgpu.set_max_registers(ROW_REGISTERS, action="decrease")
        first = _int(0)
        if len(problem.matmuls) > 1:

            @pl.when(block.cta == 0)
            def _():
                counters.clear(gmem["last_counter"].at[0], interpret=False)

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

    ahead = problem.x_slots - 1
    widest = smem.rows.shape[-1]

    def ring(slot):
        """Return the columns of a slot that the matmul uses; a slice of all would not be padded by TMA."""
        return smem.rows.at[slot] if widest == matmul.block_k else smem.rows.at[slot, :, pl.ds(0, matmul.block_k)]

    def copy(unit, _):
        step = first + unit - start
        slot = lax.rem(step, _int(problem.x_slots))
        _wait_until_free(smem.x_free, problem.x_slots, step, step + 1)
        k = pl.ds(lax.rem(unit, _int(matmul.steps)) * matmul.block_k, matmul.block_k)
        # A start that is not static makes TMA fill in the rows that pad x to a multiple of 8.
        rows = pl.ds(block.cta * 0, problem.rows)
        plgpu.copy_gmem_to_smem(x.at[rows, k], ring(slot), smem.x_full.at[slot])

    def interleave(unit, _):
        slot = lax.rem(first + unit - start, _int(problem.x_slots))
        plgpu.barrier_wait(smem.x_full.at[slot])
        interleave_rows(smem.rows, slot, matmul.code)
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem.x_ready.at[slot])

        @pl.when(unit + ahead < end)
        def _():
            copy(unit + ahead, None)

    if index:

        @pl.when(start < end)
        def _():
            block.wait_for(index - 1)

    lax.fori_loop(start, lax.min(start + ahead, end), copy, None)
    if index:

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
            counters.clear(block.finished(index - 2), interpret=False)

    lax.fori_loop(start, end, interleave, None)
    return first + end - start


def _compute(block: _Block, index: int, matmul: Matmul, first: Any) -> Any:
    """Multiply a block's units and finish the pieces that are its own."""
    start, end = _units(block, matmul)
    steps = _int(matmul.steps)
    first_tile = lax.div(start, steps)
    num_tiles = lax.div(end + (matmul.steps - 1), steps) - first_tile
    num_chunks = block.problem.num_chunks
    finishes_in_registers = block.problem.rows <= MAX_ROWS_IN_REGISTERS
    parts = block.gmem["parts"]

    def finished(tile, number) -> None:
        """Tell others of so many chunks, if the tile has outputs of this warpgroup."""
        if index < len(block.problem.matmuls) - 1:

            @pl.when((number > 0) & ((tile * NUM_COMPUTE + block.warpgroup) * OUTPUTS < matmul.outputs))
            def _():
                counters.add(block.finished(index), number)

    @pl.loop(0, num_tiles)
    def _(number):
        tile = first_tile + number
        low, high = lax.max(start, tile * steps), lax.min(end, (tile + 1) * steps)
        sums = _multiply(block, matmul, tile, low - tile * steps, first + low - start, high - low)
        if index:

            @pl.when(number == 0)
            def _():
                plgpu.barrier_wait(block.smem.ready.at[index])

        _, num_parts = _owners(matmul, tile)
        part = _part(block, matmul, block.cta, tile)
        if finishes_in_registers:

            @pl.when(num_parts == 1)
            def _():
                for chunk in range(num_chunks):
                    columns = sums[:, chunk * device.COLUMNS : (chunk + 1) * device.COLUMNS]
                    operands = _load_operands(block, index, matmul, tile, _int(chunk))
                    _finish(block, matmul, tile, _int(chunk), columns, operands)
                finished(tile, num_chunks)

            @pl.when(num_parts > 1)
            def _():
                device.store_part(parts, sums, part)

        else:
            device.store_part(parts, sums, part)

    @pl.loop(0, num_tiles)
    def _(number):
        tile = first_tile + number
        first_owner, num_parts = _owners(matmul, tile)
        own = block.cta - first_owner

        @pl.when(num_parts > (1 if finishes_in_registers else 0))
        def _():
            places = tuple(_part(block, matmul, first_owner + part, tile) for part in range(2))
            most = PARTS_AT_A_TIME if finishes_in_registers else PARTS_OF_MANY_ROWS

            @pl.loop(0, num_chunks)
            def _(chunk):
                @pl.when(own == lax.rem(chunk, num_parts))
                def _():
                    operands = _load_operands(block, index, matmul, tile, chunk)
                    total = _sum_of_parts(block, places, num_parts, chunk, most=most)
                    _finish(block, matmul, tile, chunk, total, operands)

            finished(tile, lax.div(num_chunks - own + (num_parts - 1), num_parts))

    return first + end - start


def _owners(matmul: Matmul, tile: Any) -> tuple[Any, Any]:
    """Return the first block that has a part of a tile, and how many have one."""
    steps = _int(matmul.steps)
    first_owner = matmul.owner(tile * steps)
    return first_owner, matmul.owner((tile + 1) * steps - 1) - first_owner + 1


def _part(block: _Block, matmul: Matmul, cta: Any, tile: Any) -> Any:
    """Return the index of what a block has summed up of a tile; its tiles follow one another."""
    own = tile - lax.div(matmul.first_unit(cta), _int(matmul.steps))
    return (cta * block.problem.max_tiles + own) * NUM_COMPUTE + block.warpgroup


def _sum_of_parts(block: _Block, places: tuple[Any, ...], number: Any, chunk: Any, *, most: int) -> Any:
    """Return [64, 8], the sum of a tile's parts in their order, of which `most` are loaded at a time.

    `places` are those of the first two parts. For all blocks but the first that has one it is their first tile, so that
    parts are equally far apart from the second on.
    """
    first, second = places
    stride = block.problem.max_tiles * NUM_COMPUTE
    parts = block.gmem["parts"]

    def add(batch, total):
        start = batch * most
        own = lax.min(number - start, _int(most))
        following = second + start * stride
        place = lax.select(batch == 0, first, following - stride)
        return total + device.load_sum(parts, place, following, own, chunk, stride=stride, most=most)

    zeros = plgpu.layout_cast(jnp.zeros((OUTPUTS, device.COLUMNS), jnp.float32), plgpu.Layout.WGMMA)
    return lax.fori_loop(_int(0), lax.div(number + (most - 1), _int(most)), add, zeros)


def _multiply(block: _Block, matmul: Matmul, tile: Any, first_k: Any, first: Any, num_steps: Any) -> Any:
    """Return this warpgroup's sums [64, rows] of a tile, over steps of the ring from `first`, of K from `first_k`."""
    problem, smem, gmem = block.problem, block.smem, block.gmem
    piece = _piece(block, matmul, tile)
    num_scales = matmul.scales_of_block
    has_zeros = matmul.zeros
    num_vectors = num_scales * (1 + has_zeros)
    num_parts = num_vectors // VECTORS_OF_A_PART if num_vectors > MAX_VECTORS else 1
    add = [
        add_product(
            matmul.code,
            rows=problem.rows,
            is_gated=matmul.is_gated,
            num_scales=num_scales // num_parts,
            has_zeros=has_zeros,
            part_of_k=(part, num_parts),
        )
        for part in range(num_parts)
    ]
    loads_ahead = problem.rows <= MAX_ROWS_TO_LOAD_AHEAD and num_vectors <= MAX_VECTORS_TO_LOAD_AHEAD

    def vectors_of(number, part=0):
        """Load the scales and zero points of a step or a part, in the types that they are stored in."""
        vectors = []
        count = num_scales // num_parts
        for name in (matmul.scales, *((matmul.zero_points,) if has_zeros else ())):
            for index in range(part * count, (part + 1) * count):
                column = lax.min((first_k + number) * num_scales + index, _int(matmul.num_scales - 1))
                vectors.append(device.outputs_vector(gmem[name], piece, column, up=matmul.up))
        return tuple(vectors)

    def step(number, carry):
        sums, *vectors = carry
        following = vectors_of(number + 1) if loads_ahead else ()
        vectors = vectors if loads_ahead else vectors_of(number)
        position = first + number
        w_slot, x_slot = lax.rem(position, _int(problem.w_slots)), lax.rem(position, _int(problem.x_slots))
        plgpu.barrier_wait(smem.w_full.at[w_slot])
        plgpu.barrier_wait(smem.x_ready.at[x_slot])
        slot, warpgroup, rows_slot = (jnp.full((128,), x, jnp.int32) for x in (w_slot, block.warpgroup, x_slot))
        for part in range(num_parts):
            vectors = vectors if part == 0 else vectors_of(number, part)
            in_float = [vector.astype(jnp.float32) for vector in vectors]
            sums = add[part](sums, smem.weights, slot, warpgroup, smem.rows, rows_slot, *in_float)
        plgpu.barrier_arrive(smem.w_free.at[w_slot])
        plgpu.barrier_arrive(smem.x_free.at[x_slot])
        return sums, *following

    zeros = plgpu.layout_cast(jnp.zeros((OUTPUTS, problem.rows), jnp.float32), plgpu.Layout.WGMMA)
    return lax.fori_loop(_int(0), num_steps, step, (zeros, *(vectors_of(0) if loads_ahead else ())))[0]


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

    def vector(name: str, up: int | None = None) -> Any:
        return device.outputs_vector(gmem[name], piece, up=up).astype(jnp.float32)

    return _Operands(
        scale=vector(matmul.scales, matmul.up) if has_scale else None,
        factor=None if matmul.squares is None else device.rows_vector(block.smem.factors.at[index], chunk),
        bias=None if matmul.bias is None else vector(matmul.bias, matmul.up),
        residual=None if norm is None else device.load_transposed(gmem[norm.residual], piece * OUTPUTS, chunk),
        gain=None if norm is None else vector(norm.gain),
    )


def _finish(block: _Block, matmul: Matmul, tile: Any, chunk: Any, sums: Any, operands: _Operands) -> None:
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
            gate, up = halves(y)
            y = block.problem.activation(gate) * up
            device.store_transposed(gmem[matmul.y], y, lax.div(first, _int(2)), chunk, half=0)
        else:
            device.store_transposed(gmem[matmul.y], y, first, chunk)
