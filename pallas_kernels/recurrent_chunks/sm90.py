"""`recurrent_chunks` for Hopper (sm_90a), in Mosaic GPU: two kernels.

The first solves each chunk's triangular system, for all chunks and heads at once: its CTAs give T, the inverse times
the strengths of updates, and the scores A of queries with keys, decays included. The second goes through the chunks of
a row, a CTA for 64 values of a head, with its part of the transposed state S' in registers:

    R = v' - since S' k',   U = R T',   o' = since S' q' + U A',   S' <- total S' + (until U) k

where ' is the transpose. All four products have what changes from chunk to chunk in registers, and what the chunks'
loads bring in shared memory, so that nothing that depends on the state waits for memory. Mamba-2 has beta v' for U.
"""

import dataclasses
import functools
import operator
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.device.clearing import clear_rows
from pallas_kernels.device.registers import written
from pallas_kernels.hopper import BY_LANES
from pallas_kernels.recurrent_chunks.decays import decayed
from pallas_kernels.recurrent_chunks.device import (
    CHUNK,
    LAYOUT,
    NUM_TERMS,
    PAIRS,
    TILES,
    Product,
    load_transposed,
    products,
    split,
    split_by_xla,
    store_transposed,
    zeros,
)
from pallas_kernels.recurrent_chunks.outputs import no_outputs
from pallas_kernels.recurrent_step import DECAYS_BY_CHANNEL, Tokens

MAX_BYTES = 2**28
"""Bytes of inverses and scores that are in memory at once, whatever the number of a step's tokens."""

ROWS_AT_ONCE = 16
"""Most rows of a step that have CTAs of their own."""

# Accesses to shared memory are ordered by barriers of this code.
_PARAMETERS = dataclasses.replace(BY_LANES, unsafe_no_auto_barriers=True)
_int = jnp.int32


class Problem(NamedTuple):
    """Compile-time parameters of both kernels."""

    group_size: int
    key_size: int
    corrects: bool
    stages: int
    """Chunks that are in shared memory."""
    rows_at_once: int
    """Rows that have CTAs of their own. Each of these takes a row, then the one that is so many further."""
    interpret: bool

    @property
    def parts(self) -> int:
        """The number of tiles of a chunk's keys."""
        return self.key_size // CHUNK


class Plan(NamedTuple):
    """Chunks of a step's rows, one row after the other: those of one turn."""

    chunks: Int[Array, "2 N"]
    """First token of each chunk, and the number of its tokens, 0 for none."""
    num_chunks: Int[Array, " 1"]
    rows: Int[Array, "5 B"]
    """The first chunk of each row, its first token, how many tokens it has, its slot, whether it begins."""
    span: Int[Array, " 2"]
    """The first row with chunks, and the one after the last."""


class Vectors(NamedTuple):
    """Indices of what a chunk has for each of its tokens, in the order of `_vectors`."""

    since: int = 0
    until: int = 1
    beta: int = 2
    coarse: int = 3
    rest: int = 4


_OF = Vectors()
_NUM_SCANNED = 3
"""The second kernel needs the first ones."""


def why_not(key_size: int, value_size: int, *, decays_by_channel: bool = False) -> str | None:
    """Return why the kernels cannot have heads of these sizes, or None if they can."""
    if decays_by_channel:
        return DECAYS_BY_CHANNEL
    if key_size in (CHUNK, 2 * CHUNK) and value_size % CHUNK == 0:
        return None
    return f"keys must be 64 or 128 and values a multiple of 64, got {key_size} and {value_size}"


# Jitted, so that the layers of a model use one trace and one compilation.
@functools.partial(jax.jit, static_argnames=("corrects", "stages", "max_bytes", "interpret"))
def recurrent_chunks_sm90(
    tokens: Tokens,
    states: Float[Array, "S H G K V"],
    slots: Int[Array, " B"],
    query_starts: Int[Array, " B+1"],
    begins: Bool[Array, " B"],
    first_row: Int[Array, ""],
    num_rows: Int[Array, ""],
    *,
    corrects: bool,
    stages: int = 2,
    max_bytes: int = MAX_BYTES,
    interpret: bool = False,
) -> tuple[Float[Array, "T H G V"], Float[Array, "S H G K V"]]:
    """See `recurrent_chunks`; `interpret` swaps in what the interpreter of `plgpu.force_gpu_interpret_mode` lacks."""
    num_tokens, H, key_size = tokens.k.shape
    G, V = tokens.v.shape[2:]
    if (reason := why_not(key_size, V, decays_by_channel=tokens.decays_by_channel)) is not None:
        raise NotImplementedError(reason)
    problem = Problem(G, key_size, corrects, stages, min(ROWS_AT_ONCE, len(slots)), interpret)
    q, k = (split_by_xla(x) for x in (tokens.q, tokens.k))
    # A copy takes that many tokens at least.
    q, k = (jnp.pad(x, ((0, 0), (0, max(0, CHUNK - num_tokens)), (0, 0), (0, 0))) for x in (q, k))
    # Of so many chunks at most: each row ends with one that may have less than 64 tokens.
    max_chunks = min(num_tokens, num_tokens // CHUNK + len(slots))
    at_once = min(max_chunks, max(1, max_bytes // ((1 + corrects) * H * G * NUM_TERMS * CHUNK**2 * 2)))
    starts, ends = query_starts[:-1], query_starts[1:]
    index = jnp.arange(len(slots), dtype=jnp.int32)
    lengths = jnp.where((index >= first_row) & (index < num_rows), ends - starts, 0)
    counts = (lengths + CHUNK - 1) // CHUNK
    counted = jnp.cumsum(counts)

    def turn(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        first = counted - counts
        here = jnp.maximum(first, index * at_once)
        num_here = jnp.maximum(jnp.minimum(counted, (index + 1) * at_once) - here, 0)
        skipped = (here - first) * CHUNK
        begins_here = (begins & (skipped == 0)).astype(jnp.int32)
        num_tokens_here = jnp.minimum(lengths - skipped, num_here * CHUNK)
        rows = jnp.stack([here - index * at_once, starts + skipped, num_tokens_here, slots, begins_here])
        number = index * at_once + jnp.arange(at_once, dtype=jnp.int32)
        row = jnp.searchsorted(counted, number, side="right", method="compare_all")
        row = jnp.minimum(row, len(counts) - 1)
        token = starts[row] + (number - first[row]) * CHUNK
        length = jnp.where(number < counted[-1], jnp.minimum(ends[row] - token, CHUNK), 0)
        plan = Plan(jnp.stack([token, length]), counted[-1:] - index * at_once, rows, jnp.stack([first_row, num_rows]))
        return _turn(q, k, tokens.v, _vectors(tokens, plan), plan, carry, problem)

    carry = no_outputs(tokens.v, counted[-1]), states
    if at_once == max_chunks:
        return turn(jnp.int32(0), carry)
    return lax.fori_loop(0, (counted[-1] + at_once - 1) // at_once, turn, carry)


def _vectors(tokens: Tokens, plan: Plan) -> Float[Array, "N heads 5 C"]:
    """Return `Vectors`."""
    starts, lengths = plan.chunks
    within = jnp.arange(CHUNK, dtype=jnp.int32)[None]
    token = jnp.where(within < lengths[:, None], starts[:, None] + within, len(tokens.v))

    def chunked(x: Float[Array, "T H G"]) -> Float[Array, "N heads C"]:
        return jnp.moveaxis(x.reshape(len(x), -1).at[token].get(mode="fill", fill_value=0), 1, 2)

    coarse, rest = decayed(chunked(tokens.log_decay))
    since = jnp.exp(coarse + rest)
    until = jnp.exp((coarse[..., -1:] - coarse) + (rest[..., -1:] - rest))
    return jnp.stack([since, until, chunked(tokens.beta), coarse, rest], axis=2)


def _turn(
    q: Array, k: Array, v: Array, vectors: Array, plan: Plan, carry: tuple[Array, Array], problem: Problem
) -> tuple[Float[Array, "T H G V"], Float[Array, "S H G K V"]]:
    """Return outputs and states after the chunks of a turn."""
    H, G, V = v.shape[1:]
    scores, *solved = _solve(q, k, vectors, plan, problem)
    by_heads = (carry[0].reshape(-1, H * G, V), carry[1].reshape(len(carry[1]), H * G, -1, V))
    out, states = map(jax.new_ref, by_heads)  # changed in place by the kernel
    operands = (q, k, v.reshape(-1, H * G, V), vectors, plan.rows, plan.span, out, states, scores, *solved)
    boxes = (problem.stages, NUM_TERMS, problem.parts, 2 * CHUNK, CHUNK)
    num_tiles = 1 + problem.corrects

    def body(*refs: Any) -> None:
        inputs, ((tiles, boxes), *others) = refs[: len(operands)], refs[len(operands) :]
        boxes = tiles if problem.interpret else boxes  # in which views do not alias
        cast(Any, _scan_kernel)(problem, *inputs[:8], inputs[8:], tiles, boxes, *others)

    plgpu.kernel(
        body,
        kernel_name="recurrent_chunks",
        out_type=(),
        scratch_types=(
            _views(boxes),
            plgpu.SMEM((problem.stages, num_tiles, NUM_TERMS, CHUNK, CHUNK), jnp.bfloat16, transforms=TILES),
            plgpu.SMEM((1, problem.parts, NUM_TERMS, CHUNK, CHUNK), jnp.bfloat16, transforms=TILES),
            plgpu.SMEM((problem.stages, _NUM_SCANNED, CHUNK), jnp.float32),
            plgpu.Barrier(num_barriers=problem.stages, num_arrivals=1 + (2 * problem.parts + num_tiles) * NUM_TERMS),
        ),
        grid=(problem.rows_at_once, H * G, V // CHUNK),
        grid_names=("row", "head", "part"),
        compiler_params=_PARAMETERS,
    )(*operands)
    return jax.freeze(out).reshape(carry[0].shape), jax.freeze(states).reshape(carry[1].shape)


def _views(shape: tuple[int, ...], *others: Any) -> Any:
    """Return tiles as wgmma uses them, and as they can be copied from any token, in the same bytes."""
    views = (plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms) for transforms in (TILES, TILES[1:]))
    return plgpu.RefUnion(*views, *others)


def _copy_tokens(problem: Problem, k: Any, q: Any, token: Any, head: Any, boxes: Any, full: Any) -> None:
    """Copy a chunk of keys, and of queries behind them. Behind the last token TMA fills in zeros."""
    for term in range(NUM_TERMS):
        for part in range(problem.parts):
            columns = pl.ds(part * CHUNK, CHUNK)
            for index, source in enumerate((k, q)):
                target = boxes.at[term, part, pl.ds(index * CHUNK, CHUNK)]
                plgpu.copy_gmem_to_smem(source.at[term, pl.ds(token, CHUNK), head, columns], target, full)


_KEYS, _QUERIES = pl.ds(0, CHUNK), pl.ds(CHUNK, CHUNK)
"""Rows of such a copy."""


def _of_rows(x: Any) -> Any:
    return lax.broadcast_in_dim(x, (CHUNK, CHUNK), (0,))


def _of_columns(x: Any) -> Any:
    return lax.broadcast_in_dim(x, (CHUNK, CHUNK), (1,))


def _load(ref: Any, axis: int) -> Any:
    """Return a vector of which each row or, with axis 0, each column of a matrix has a number."""
    return plgpu.load(ref, layout=LAYOUT.reduce(axis), optimized=False)


# The first kernel.


def _solve(q: Array, k: Array, vectors: Array, plan: Plan, problem: Problem) -> list[Array]:
    """Return the scores of each chunk, and the solution of its system if there is one."""
    num_chunks, num_heads = vectors.shape[:2]
    shape = jax.ShapeDtypeStruct((num_chunks, num_heads, NUM_TERMS, CHUNK, CHUNK), jnp.bfloat16)
    boxes = (NUM_TERMS, problem.parts, 2 * CHUNK, CHUNK)
    work = plgpu.SMEM((3, NUM_TERMS, CHUNK, CHUNK), jnp.bfloat16, transforms=TILES)

    def body(q: Any, k: Any, vectors: Any, chunks: Any, num_chunks: Any, *others: Any) -> None:
        *results, (tiles, boxes, work), full = others
        boxes = tiles if problem.interpret else boxes  # in which views do not alias

        @pl.when(lax.axis_index("chunk") < num_chunks[0])
        def _() -> None:
            _solve_kernel(problem, q, k, vectors, chunks, results, tiles, boxes, work, full)

    return plgpu.kernel(
        body,
        kernel_name="recurrent_chunks_solve",
        out_type=[shape] * (1 + problem.corrects),
        scratch_types=(_views(boxes, work), plgpu.Barrier(num_arrivals=2 * NUM_TERMS * problem.parts)),
        grid=(num_chunks, num_heads),
        grid_names=("chunk", "head"),
        compiler_params=_PARAMETERS,
    )(q, k, vectors, plan.chunks, plan.num_chunks)


def _clear_keys(problem: Problem, tiles: Any, num: Any) -> None:
    """Write zeros over what a chunk has copied of the next row's keys, which may be NaN."""

    @pl.when(num < CHUNK)
    def _() -> None:
        for term in range(NUM_TERMS):
            for part in range(problem.parts):
                clear_rows(tiles.at[term, part, _KEYS], num, interpret=problem.interpret)
        plgpu.commit_smem()


def _solve_kernel(problem, q, k, vectors, chunks, results, tiles, boxes, work, full):
    chunk, head = lax.axis_index("chunk"), lax.axis_index("head")
    key_head = lax.div(head, _int(problem.group_size))
    _copy_tokens(problem, k, q, chunks[0, chunk], key_head, boxes, full)
    of_chunk = vectors.at[chunk, head]
    logarithms = [of_chunk.at[index] for index in (_OF.coarse, _OF.rest)]
    between = sum(_of_rows(_load(each, 1)) - _of_columns(_load(each, 0)) for each in logarithms)
    row, column = (plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=LAYOUT.reduce(axis)) for axis in (1, 0))

    def where(of_row: Any, of_column: Any, compare: Any, x: Any, other: Any = 0.0) -> Any:
        """Return x where what rows and columns have compare so, else `other`."""
        return jnp.where(compare(_of_rows(of_row), _of_columns(of_column)), x, other)

    between = where(row, column, operator.ge, jnp.exp(between))
    plgpu.barrier_wait(full)
    _clear_keys(problem, tiles, chunks[1, chunk])

    def with_keys(rows: Any) -> Any:
        """Return the products of queries or keys with keys."""

        def run(acc: Any) -> Any:
            for i, j in PAIRS:
                for part in range(problem.parts):
                    plgpu.wgmma(acc, tiles.at[i, part, rows], tiles.at[j, part, _KEYS].transpose((1, 0)))
            return written(acc[...])

        return pl.run_scoped(run, plgpu.ACC((CHUNK, CHUNK), jnp.float32))

    def put(index: int, x: Any) -> Any:
        """Write a matrix into shared memory; return its terms."""
        terms = split(x)
        for i, term in enumerate(terms):
            work[index, i] = term
        return terms

    def give(index: int, target: Any) -> None:
        """Copy a matrix in shared memory into the result."""
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(work.at[index], target.at[chunk, head])

    read, system = with_keys(_QUERIES) * between, None
    if problem.corrects:
        beta = _load(of_chunk.at[_OF.beta], 1)
        system = where(row, column, operator.gt, with_keys(_KEYS) * between * _of_rows(beta))
    plgpu.commit_smem()  # all warps have read what is overwritten next
    put(2, read)
    give(2, results[0])
    if problem.corrects:
        put(1, system)

        def below(x: Any, size: int) -> Any:
            """Return the blocks of x that stand below the first one of each two on the diagonal."""
            of_row, of_column = (lax.div(i, _int(size)) for i in (row, column))
            # Even blocks of rows stand below none: they are compared with a block that is not there.
            of_row = jnp.where(lax.rem(of_row, _int(2)) == 1, of_row, 2 * CHUNK)
            return where(of_row, of_column + 1, operator.eq, x)

        def times(x: Any, index: int, init: Any = None) -> Any:
            right = [[work.at[index, i] for i in range(NUM_TERMS)]]
            return products(Product([x], right, init), interpret=problem.interpret)[0]

        # Blocks along the diagonal are inverted, each from those of half its size: powers of the matrix are as large
        # as binomial coefficients where keys are alike.
        inverse = where(row, column, operator.eq, 1.0, -below(system, 1))
        for size in (2, 4, 8, 16, 32):
            terms = put(0, inverse)
            plgpu.commit_smem()
            corner = below(times(terms, 1), size)
            inverse = times(split(-corner), 0, inverse)
            plgpu.commit_smem()  # all warps have read the old one
        put(0, inverse * _of_columns(_load(of_chunk.at[_OF.beta], 0)))
        give(0, results[1])
    plgpu.wait_smem_to_gmem(0)


# The second kernel.


def _zero(num_tokens: Any) -> Any:
    """Return 0, given a number of tokens up to 64. LLVM does not see that: it would keep places that are the same in
    all turns of a loop in registers.
    """
    return lax.div(num_tokens, _int(CHUNK + 1))


def _scan_kernel(problem, q, k, v, vectors, rows, span, out, states, *others):
    """Go through the chunks of some of the rows, of which the first and the one after the last are given."""

    def one_row(row: Any) -> Any:
        _scan_row(problem, q, k, v, vectors, rows, row, out, states, *others)
        return row + problem.rows_at_once

    lax.while_loop(lambda row: row < span[1], one_row, span[0] + lax.axis_index("row"))


def _scan_row(
    problem, q, k, v, vectors, rows, row, out, states, chunk_tiles, tiles, boxes, of_chunk, held, vector_boxes, full
):
    num_slots = states.shape[0]
    interpret, terms, parts = (problem.interpret, range(NUM_TERMS), range(problem.parts))
    head = lax.axis_index("head")
    part = pl.ds(lax.axis_index("part") * CHUNK, CHUNK)
    first, token, num_tokens = (rows[i, row] for i in range(3))
    end, token = token + num_tokens, token - first * CHUNK  # of a chunk 0

    def is_there(i: Any) -> Any:
        return token + i * CHUNK < end

    def copy(i: Any) -> None:
        stage = lax.rem(i, _int(problem.stages))
        key_head = lax.div(head, _int(problem.group_size))
        _copy_tokens(problem, k, q, token + i * CHUNK, key_head, boxes.at[stage], full.at[stage])
        for index, source in enumerate(chunk_tiles):
            for term in terms:
                target = of_chunk.at[stage, index, term]
                plgpu.copy_gmem_to_smem(source.at[i, head, term], target, full.at[stage])
        source = vectors.at[i, head, pl.ds(0, _NUM_SCANNED)]
        plgpu.copy_gmem_to_smem(source, vector_boxes.at[stage], full.at[stage])

    def one_chunk(carry: Any) -> Any:
        i, *state = carry
        stage = lax.rem(i, _int(problem.stages))
        left = lax.min(end - (token + i * CHUNK), _int(CHUNK))
        here = pl.ds(token + i * CHUNK, CHUNK)
        zero = _zero(left)

        def of_tokens(index: int) -> list[Any]:
            return [[of_chunk.at[stage, index, term].transpose((1, 0)) for term in terms]]

        def scaled(x: Any, index: int) -> Any:
            return x * _of_columns(plgpu.load(vector_boxes.at[stage, index], layout=LAYOUT.reduce(0)))

        def values() -> Any:
            return load_transposed(v.at[here, head, part], left - 1, interpret=interpret)

        plgpu.barrier_wait(full.at[stage])
        _clear_keys(problem, tiles.at[stage], left)
        rows_read = pl.ds(0, 2 * CHUNK) if problem.corrects else _QUERIES
        rows_read = [[tiles.at[stage, term, p, rows_read].transpose((1, 0)) for term in terms] for p in parts]
        of_state = Product([[held.at[zero, p, term] for term in terms] for p in parts], rows_read)
        old, new = products(of_state, interpret=interpret, meanwhile=values)
        if problem.corrects:
            known, old = old[:, :CHUNK], old[:, CHUNK:]
            new = split(new - scaled(known, _OF.since))
            [new] = products(Product([new], of_tokens(1)), interpret=interpret)
        else:
            new = written(scaled(new, _OF.beta))  # or LLVM would keep both factors for the terms
        read = Product([split(new)], of_tokens(0), scaled(old, _OF.since))
        result, fading = products(read, interpret=interpret, meanwhile=functools.partial(scaled, new, _OF.until))
        total, writing = (vector_boxes[stage, _OF.since, CHUNK - 1], [split(fading)])
        writes = (
            Product(writing, [[tiles.at[stage, term, p, _KEYS] for term in terms]], x * total)
            for p, x in enumerate(state)
        )
        state = products(*writes, interpret=interpret)
        put(state, zero)  # and all warps have read the chunk
        pl.when(is_there(i + problem.stages))(lambda: copy(i + problem.stages))
        store_transposed(out.at[here, head, part], result, left, interpret=interpret)
        return i + 1, *state

    def put(state: Any, zero: Any) -> None:
        """Write the terms of the state into shared memory."""
        for p, x in enumerate(state):
            for i, term in enumerate(split(x)):
                held[zero, p, i] = term
        plgpu.commit_smem()

    def places() -> tuple[Any, list[Any]]:
        """Return the row's slot and where its state is. Read where it is used: that is cheaper than registers."""
        slot = rows[3, row]
        place = states.at[lax.min(slot, _int(num_slots - 1)), head]
        return slot, [place.at[pl.ds(p * CHUNK, CHUNK), part] for p in parts]

    @pl.when(num_tokens > 0)
    def _() -> None:
        for i in range(problem.stages):
            pl.when(is_there(first + i))(lambda i=i: copy(first + i))
        old = [load_transposed(each, _int(CHUNK - 1), interpret=interpret) for each in places()[1]]
        begins = rows[4, row] != 0
        state = tuple(jnp.where(begins, zeros(), x) for x in old)  # an old state may have anything
        put(state, _zero(lax.min(num_tokens, _int(CHUNK))))
        _, *state = lax.while_loop(lambda carry: is_there(carry[0]), one_chunk, (first, *state))
        slot, targets = places()

        @pl.when(slot < num_slots)
        def _() -> None:
            for target, x in zip(targets, state, strict=True):
                store_transposed(target, x, _int(CHUNK), interpret=interpret)
