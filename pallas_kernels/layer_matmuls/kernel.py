"""The body of the kernel: the work of its CTAs. See sm90.py.

A matmul's outputs are divided into tiles of equal width; in a round, each CTA processes one. If there are more rows
than a tile would be wide, the two CTAs of a cluster process one tile of twice the width together, each with every other
step of K, and exchange half of their sums.

In a CTA, one warpgroup streams the weights of all its tiles through a ring in shared memory and never waits for other
CTAs; one copies rows, as soon as other CTAs have finished them; one multiplies. If the kernel attends, the ring first
receives the CTA's split of contexts, to which the last warpgroup attends.

Code that runs once per layer should have few instructions: those that are not cached from one layer to the next are
read from memory, see NOTES.md.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.device.products import Norm, wait_until_free
from pallas_kernels.device.registers import written
from pallas_kernels.hopper import NUM_SMS
from pallas_kernels.layer_matmuls import attention, device

MAX_ROUNDS = 16
"""Maximum rounds of a matmul: each has a counter for those who wait for it."""

COMPUTE_REGISTERS, COPY_REGISTERS = 240, 128

_ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)
_int = jnp.int32


class Matmul(NamedTuple):
    """One of the four matmuls, and how it is divided."""

    name: str
    """Name of the matmul and of its weight; `x` and `y` name arrays in global memory too."""
    x: str
    """Rows that it multiplies."""
    y: str
    norm: Norm | None
    """The norm that follows."""
    squares: str | None
    """Name of the sums of squares of x, if x has not been divided by its norm yet."""
    depth: int
    outputs: int
    halves: int
    """Gate and up, or one."""
    width: int
    """Outputs of each half (gate, up) that one CTA finishes per round."""
    split: int
    """CTAs that process a tile together: 1, or the 2 of a cluster (if there is one half and one round).

    A tile is `split * width` wide, and each CTA adds up every `split`-th step of K.
    """
    block_k: int
    """Columns of K per step."""
    x_slots: int
    """Number of steps whose rows fit into shared memory."""
    in_flight: int
    """Steps whose weights are on their way at most."""
    first_in_flight: int
    """Steps in flight for the matmul's first steps, as many as the ring holds: meanwhile CTAs wait for other
    results.
    """
    begins_apart: bool
    """True if each CTA begins with another part of K, because otherwise all would read the same rows at a time."""

    @property
    def tile(self) -> int:
        """Outputs of each half of a tile."""
        return self.split * self.width

    @property
    def steps(self) -> int:
        """Steps of a CTA per tile."""
        return -(-self.depth // (self.split * self.block_k))

    @property
    def num_tiles(self) -> int:
        """Number of tiles over all CTAs."""
        return -(-self.outputs // self.tile)

    @property
    def tiles_of_round(self) -> int:
        """Number of tiles that all CTAs process per round."""
        return NUM_SMS // self.split

    @property
    def rounds(self) -> int:
        """Number of rounds of tiles."""
        return -(-self.num_tiles // self.tiles_of_round)


class Problem(NamedTuple):
    """Compile-time parameters of the kernel."""

    matmuls: tuple[Matmul, ...]
    """The matmuls in order; the rows of each but the first are the results of the one before."""
    rows: int
    """Rows of x, padded to a multiple of 8."""
    slot_bytes: int
    """Bytes of a slot of the ring of weights."""
    w_slots: int
    activation: Callable[[Array], Array]
    eps: float
    attention: attention.Problem | None
    """The attention that computes the first matmul's rows; None if they are given."""
    interpret: bool

    @property
    def cluster(self) -> int:
        """Number of CTAs per cluster."""
        return max((matmul.split for matmul in self.matmuls), default=1)


class Shared(NamedTuple):
    """Views of shared memory by matmul, and barriers."""

    weights: Mapping[str, Any]
    rows: Mapping[str, Any]
    blocks: Any
    """Blocks of keys or values, in the ring of weights."""
    kv_full: Any
    w_full: Any
    w_free: Any
    x_full: Any
    x_free: Any
    sums: Any
    """The other CTA's sums of this one's outputs; None without clusters."""
    sums_full: Any


class _Block(NamedTuple):
    """One CTA."""

    problem: Problem
    gmem: Mapping[str, Any]
    smem: Shared
    cta: Any

    def num_tiles(self, matmul: Matmul) -> Any:
        return lax.div(
            matmul.num_tiles - lax.div(self.cta, _int(matmul.split)) + (matmul.tiles_of_round - 1),
            _int(matmul.tiles_of_round),
        )

    def tile(self, matmul: Matmul, round_: Any) -> Any:
        """Return the tile that this CTA processes in a round, maybe together with another."""
        return lax.div(self.cta, _int(matmul.split)) + round_ * matmul.tiles_of_round

    def rank(self, matmul: Matmul) -> Any:
        """Return the CTA's rank among those that process a tile together."""
        return lax.rem(self.cta, _int(matmul.split))

    def k(self, matmul: Matmul, step: Any) -> Any:
        """Return the first column of K of a tile's step."""
        if matmul.begins_apart:
            step = lax.rem(step + self.cta, _int(matmul.steps))
        return (step * matmul.split + self.rank(matmul)) * matmul.block_k

    def first_step(self, index: int) -> Any:
        """Return the number of this CTA's steps before those of a matmul."""
        steps = _int(0)
        for matmul in self.problem.matmuls[:index]:
            steps += self.num_tiles(matmul) * matmul.steps
        return steps

    def counter(self, index: int, round_: Any) -> Any:
        """Return the counter of CTAs that have finished their part of a round, awaited by those that multiply by it.

        Counters are zero before and after the kernel, except for those that the last matmul waits for, because no CTA
        knows when all have read them. Those are an output, cleared at the start of the kernel, which all CTAs know to
        have happened once they have waited for the first counter.
        """
        if index == len(self.problem.matmuls) - 2:
            return self.gmem["last_counters"].at[round_]
        return self.gmem["counters"].at[index * MAX_ROUNDS + round_]

    @property
    def heads_counter(self) -> Any:
        """Counter of the CTAs that have attended to their split. CTA 0 clears it when all have done the first
        matmul.
        """
        return self.gmem["counters"].at[2 * MAX_ROUNDS]

    def context(self, problem: attention.Problem) -> attention.Context:
        """Return the context of the attention."""
        smem, split = self.smem, attention.split_of(self.cta)
        return attention.Context(problem, self.gmem, smem.blocks, smem.kv_full, smem.w_free, split)


def kernel(problem: Problem, gmem: Mapping[str, Any], smem: Shared) -> None:
    """Run each warpgroup (mesh axis "wg") of each CTA (axis "cta")."""
    cta = lax.axis_index("cta")
    if problem.cluster > 1:
        cta = cta * problem.cluster + lax.axis_index("rank")
    block = _Block(problem, gmem, smem, cta)
    warpgroup = lax.axis_index("wg")

    @pl.when(warpgroup == 0)
    def _():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        num_blocks = _int(0)
        if problem.attention is not None:
            context = block.context(problem.attention)
            num_blocks = attention.attend(context)
            if problem.matmuls:
                device.signal(block.heads_counter, interpret=problem.interpret)
            attention.write_newest(context)
        for index, matmul in enumerate(problem.matmuls):
            _compute(block, index, matmul, num_blocks)

    @pl.when(warpgroup == 1)
    def _():
        plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
        num_blocks = _int(0)
        if problem.attention is not None:
            num_blocks = attention.copy_contexts(block.context(problem.attention))
        there = num_blocks
        for index, matmul in enumerate(problem.matmuls):
            there = _copy_weights(block, index, matmul, num_blocks, there)
        end = num_blocks + block.first_step(len(problem.matmuls))
        _wait_until_there(block, there, end)
        wait_until_free(smem.w_free, problem.w_slots, end, end + problem.w_slots)

    @pl.when(warpgroup == 2)
    def _():
        plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
        _clear_counters(block, len(problem.matmuls) - 2)
        if problem.matmuls and problem.attention is not None:
            device.wait(block.heads_counter, NUM_SMS, interpret=problem.interpret)
        for index, matmul in enumerate(problem.matmuls):
            _copy_rows(block, index, matmul)


def _wait_until_there(block: _Block, first: Any, end: Any) -> Any:
    """Wait for the weights of the ring's steps from `first` to `end`; return `end`, or `first` if it is larger."""

    def wait(step, _):
        plgpu.barrier_wait(block.smem.w_full.at[lax.rem(step, _int(block.problem.w_slots))])

    lax.fori_loop(first, end, wait, None)
    return lax.max(first, end)


def _copy_weights(block: _Block, index: int, matmul: Matmul, num_blocks: Any, there: Any) -> Any:
    """Copy all tiles of a matmul, as far ahead as there is room. `there` is the first ring step that has not been
    awaited.
    """
    problem, smem, weight = block.problem, block.smem, block.gmem[matmul.name]
    view, first_step = smem.weights[matmul.name], num_blocks + block.first_step(index)

    def copy(number, there):
        step = first_step + number
        slot = lax.rem(step, _int(problem.w_slots))
        wait_until_free(smem.w_free, problem.w_slots, step, step + 1)
        in_flight = _int(matmul.in_flight)
        if index > 0 and matmul.first_in_flight < matmul.in_flight:
            in_flight = jnp.where(number < problem.w_slots, matmul.first_in_flight, in_flight)
        there = _wait_until_there(block, there, step + 1 - in_flight)
        first = block.tile(matmul, lax.div(number, _int(matmul.steps))) * matmul.tile
        columns = pl.ds(block.k(matmul, lax.rem(number, _int(matmul.steps))), matmul.block_k)
        # Two arrivals per step for every matmul, since they use the same barrier.
        if matmul.halves == 2:
            for half in range(2):
                own = view.at[slot, pl.ds(half * matmul.width, matmul.width)]
                plgpu.copy_gmem_to_smem(weight.at[half, pl.ds(first, matmul.width), columns], own, smem.w_full.at[slot])
        elif matmul.tile > 8:
            middle = matmul.tile // 16 * 8
            for start, size in ((0, middle), (middle, matmul.tile - middle)):
                source = weight.at[pl.ds(first + start, size), columns]
                plgpu.copy_gmem_to_smem(source, view.at[slot, pl.ds(start, size)], smem.w_full.at[slot])
        else:
            source = weight.at[pl.ds(first, matmul.tile), columns]
            plgpu.copy_gmem_to_smem(source, view.at[slot, pl.ds(0, matmul.tile)], smem.w_full.at[slot])
            plgpu.barrier_arrive(smem.w_full.at[slot])
        return there

    return lax.fori_loop(_int(0), block.num_tiles(matmul) * matmul.steps, copy, there)


def _copy_rows(block: _Block, index: int, matmul: Matmul) -> None:
    """Copy the rows for each tile of a matmul, once other CTAs have finished their first columns."""
    problem, smem = block.problem, block.smem
    x = block.gmem[matmul.x]

    def copy(step, _):
        slot = lax.rem(step, _int(matmul.x_slots))
        wait_until_free(smem.x_free, matmul.x_slots, step, step + 1)
        k = pl.ds(block.k(matmul, lax.rem(step, _int(matmul.steps))), matmul.block_k)
        # A start that is not static makes TMA fill in the rows that pad x to a multiple of 8.
        rows = pl.ds(block.cta * 0, problem.rows)
        plgpu.copy_gmem_to_smem(x.at[rows, k], _rows(problem, smem, matmul, slot, problem.rows), smem.x_full.at[slot])

    num_tiles = block.num_tiles(matmul)
    num_steps = num_tiles * matmul.steps
    if index == 0:
        lax.fori_loop(_int(0), num_steps, copy, None)
    else:
        before = problem.matmuls[index - 1]

        def copy_finished(round_, done):
            """Copy what the CTAs have finished at the end of a round: everything if it is the last."""
            device.wait(block.counter(index - 1, round_), NUM_SMS, interpret=problem.interpret)
            columns = lax.min((round_ + 1) * before.tiles_of_round, _int(before.num_tiles)) * before.tile
            own = lax.div(columns, _int(matmul.block_k)) - block.rank(matmul) + (matmul.split - 1)
            end = lax.min(lax.div(own, _int(matmul.split)), num_steps)
            # After the last rows of a tile all of x has arrived, including the sums of squares.
            end = jnp.where(round_ == before.rounds - 1, num_steps, lax.min(end, _int(matmul.steps - 1)))
            lax.fori_loop(done, end, copy, None)
            return end

        lax.fori_loop(_int(0), _int(before.rounds), copy_finished, _int(0))
    if index == 1 and problem.attention is not None:

        @pl.when(block.cta == 0)
        def _():
            device.clear(block.heads_counter, interpret=problem.interpret)

    if index >= 2:  # All CTAs have signalled something that follows their wait for those counters.
        _clear_counters(block, index - 2)
    if index < len(problem.matmuls) - 1:

        @pl.when(num_tiles < matmul.rounds)  # The CTA has nothing to finish in the last round.
        def _():
            device.signal(block.counter(index, matmul.rounds - 1), interpret=problem.interpret)

    wait_until_free(smem.x_free, matmul.x_slots, num_steps, num_steps + matmul.x_slots)


def _clear_counters(block: _Block, index: int) -> None:
    if index >= 0:

        @pl.when(block.cta == 0)
        def _():
            for round_ in range(block.problem.matmuls[index].rounds):
                device.clear(block.counter(index, round_), interpret=block.problem.interpret)


def _rows(problem: Problem, smem: Shared, matmul: Matmul, slot: Any, num_rows: int) -> Any:
    """Return the rows of a slot. wgmma reads 64: the slot's own, then others whose results are not used."""
    view = smem.rows[matmul.name]
    if problem.interpret:
        return view.at[slot, pl.ds(0, num_rows)]
    return view.at[pl.ds(pl.multiple_of(slot * problem.rows, 8), num_rows)]


def _compute(block: _Block, index: int, matmul: Matmul, num_blocks: Any) -> None:
    """All tiles of a matmul."""
    first_step = num_blocks + block.first_step(index)

    def compute_tile(round_, _):
        def signal() -> None:
            if index < len(block.problem.matmuls) - 1:
                device.signal(block.counter(index, round_), interpret=block.problem.interpret)

        step = round_ * matmul.steps
        multiply = functools.partial(_multiply, block, matmul, step, first_step + step)
        part = block.tile(matmul, round_) * matmul.split + block.rank(matmul)  # of the outputs, `width` each
        if matmul.norm is not None:
            _finish_sum(block, matmul, matmul.norm, part, multiply, signal)
        else:
            _finish_product(block, matmul, part, multiply, signal)

    lax.fori_loop(_int(0), block.num_tiles(matmul), compute_tile, None)


def _multiply(block: _Block, matmul: Matmul, x_step: Any, w_step: Any, acc: Any) -> tuple[Any, Any]:
    """Return this CTA's sums of a tile, and the reciprocal root mean square of its rows if they need it."""
    problem, smem, squares = block.problem, block.smem, matmul.squares
    weights = smem.weights[matmul.name]

    def free(k) -> None:
        plgpu.barrier_arrive(smem.w_free.at[lax.rem(w_step + k, _int(problem.w_slots))])
        plgpu.barrier_arrive(smem.x_free.at[lax.rem(x_step + k, _int(matmul.x_slots))])

    def step(k, rstd):
        w_slot, x_slot = lax.rem(w_step + k, _int(problem.w_slots)), lax.rem(x_step + k, _int(matmul.x_slots))
        plgpu.barrier_wait(smem.x_full.at[x_slot])
        if squares is not None:
            # With its last rows all the squares of x are there.
            load = functools.partial(_reciprocal_root_mean_square, block, squares, matmul.depth)
            rstd = lax.cond(k == matmul.steps - 1, load, lambda: rstd)
        plgpu.barrier_wait(smem.w_full.at[w_slot])
        rows = _rows(problem, smem, matmul, x_slot, device.ROWS)
        plgpu.wgmma(acc, rows, weights.at[w_slot, pl.ds(0, matmul.halves * matmul.tile)].transpose((1, 0)))
        plgpu.wgmma_wait(1)

        @pl.when(k > 0)  # The one before is done.
        def _():
            free(k - 1)

        return rstd

    rstd = None
    if squares is not None:
        rstd = plgpu.layout_cast(jnp.zeros((device.ROWS,), jnp.float32), _ROW_LAYOUT)
    rstd = lax.fori_loop(_int(0), _int(matmul.steps), step, rstd)
    sums = written(acc[...])
    free(_int(matmul.steps - 1))
    if matmul.split > 1:
        sums = _exchange(block, matmul, sums)
    return sums, rstd


def _exchange(block: _Block, matmul: Matmul, sums: Any) -> Any:
    """Exchange partial sums with the CTA that processes the same tile; return the complete sums of this CTA's outputs.

    One buffer is enough: the other CTA writes into it again for its next such tile, of a later matmul, for whose rows
    it has waited until all CTAs had counted. This one counts after its load below; if it has no tile of a matmul, its
    copying warpgroup counts, but only after waiting for the counter before.
    """
    rank, smem = block.rank(matmul), block.smem
    left, right = sums[:, : matmul.width], sums[:, matmul.width :]
    own, others = jnp.where(rank == 0, left, right), jnp.where(rank == 0, right, left)
    received = smem.sums.at[pl.ds(0, device.ROWS), pl.ds(0, matmul.width)]
    plgpu.async_store_smem(others, received, smem.sums_full, cluster_idx=1 - rank, cluster_dim="rank", optimized=False)
    plgpu.barrier_wait(smem.sums_full)
    return own + plgpu.load(received, layout=plgpu.Layout.WGMMA, optimized=False)


def _reciprocal_root_mean_square(block: _Block, squares: str, depth: int) -> Float[Array, " 64"]:
    sums = device.load_row_sums(block.gmem[squares], interpret=block.problem.interpret)
    return lax.rsqrt(jnp.sum(sums, axis=1) / depth + block.problem.eps)


def _finish_sum(
    block: _Block, matmul: Matmul, norm: Norm, part: Any, multiply: Callable[..., Any], signal: Callable[[], None]
) -> None:
    """Finish the residual stream and, first, what the next matmul needs of it."""
    interpret, gmem, first = block.problem.interpret, block.gmem, part * matmul.width
    residual, gain = (
        device.load_columns(gmem[name], first, matmul.width, interpret=interpret) for name in (norm.residual, norm.gain)
    )
    sums, _ = pl.run_scoped(multiply, plgpu.ACC((device.ROWS, matmul.tile), jnp.float32))
    y = sums + residual
    y = y.astype(gmem[matmul.y].dtype).astype(jnp.float32)  # as it is stored
    device.store_columns(gmem[norm.normed], y * gain, first, interpret=interpret)
    squares = gmem[norm.squares]
    row_sums = jnp.sum(y * y, axis=1)
    device.store_row_sums(squares, row_sums, part, interpret=interpret)
    for padding in range(matmul.num_tiles * matmul.split, squares.shape[1]):

        @pl.when(part == 0)
        def _(padding=padding):
            zeros = plgpu.layout_cast(jnp.zeros((device.ROWS,), jnp.float32), _ROW_LAYOUT)
            device.store_row_sums(squares, zeros, _int(padding), interpret=interpret)

    signal()
    device.store_columns(gmem[matmul.y], y, first, interpret=interpret)


def _finish_product(
    block: _Block, matmul: Matmul, part: Any, multiply: Callable[..., Any], signal: Callable[[], None]
) -> None:
    """Finish the product with x after its norm, through the activation if it is gate and up."""
    acc = plgpu.ACC((device.ROWS, matmul.halves * matmul.tile), jnp.float32)
    sums, rstd = pl.run_scoped(multiply, acc)
    parts = [sums[:, half * matmul.width : (half + 1) * matmul.width] for half in range(matmul.halves)]
    y, *up = (part * lax.broadcast_in_dim(rstd, part.shape, (0,)) for part in parts)
    if up:
        y = block.problem.activation(y) * up[0]
    device.store_columns(block.gmem[matmul.y], y, part * matmul.width, interpret=block.problem.interpret)
    signal()
