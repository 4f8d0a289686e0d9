"""Operations of a stream with queries as columns: keys are the 64 rows of wgmma, and so are the values' columns.

A tile of G query heads is padded to 8 columns rather than 64 rows: an eighth of the products and of the softmax.
Decoding on an H200 is limited by its power, and so by padding that is computed for nothing (NOTES.md, paged_attention).
The price is a maximum over warps, and weights that go through shared memory.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import vectors_of_8_bits
from pallas_kernels.device.registers import written
from pallas_kernels.paged_attention import device
from pallas_kernels.paging.tiles import LOWEST, MAX_COPIED, ROWS

LAYOUT = plgpu.Layout.WGMMA
VECTOR_LAYOUT = LAYOUT.reduce(0)
KEYS, QUERIES = 0, 1
"""Dimensions of scores."""


def nothing_yet(problem):
    """Return the running softmax before the first block: sums of values, maxima, and totals of each lane's rows."""
    columns = problem.columns
    return (
        problem.cast(jnp.zeros((problem.head_dim, columns), jnp.float32), LAYOUT),
        problem.cast(jnp.full((columns,), LOWEST, jnp.float32), VECTOR_LAYOUT),
        problem.cast(jnp.zeros((ROWS, columns), jnp.float32), LAYOUT),
    )


def take_queries(problem, scratch, queries):
    """Put the tile's queries to where wgmma reads them."""
    put = vectors_of_8_bits.put_queries if problem.has_scales else device.copy_rows
    put(scratch.q, queries, interpret=problem.interpret)


def scores(problem, keys, scratch, meanwhile):
    """Return a score for each key and query: [keys, columns]. `meanwhile` is called while they are computed."""
    if problem.interpret:
        held = vectors_of_8_bits.as_operand(keys, interpret=True) if problem.has_scales else keys[...]
        result = jnp.dot(held.astype(jnp.float32), scratch.q[...].astype(jnp.float32).T)
        meanwhile()
        plgpu.commit_smem()
        return result

    def product(scores_ref):
        if problem.has_scales:  # the queries are in the same order
            size = problem.head_dim if problem.head_dim <= MAX_COPIED else 128
            for first in range(0, problem.head_dim, size):
                if first:
                    plgpu.wgmma_wait(0)  # registers have no room for more
                last = min(first + size, problem.head_dim)
                keys_in_registers = vectors_of_8_bits.as_operand(keys, first, last, interpret=False)
                queries = scratch.q if size == problem.head_dim else scratch.q.at[:, pl.ds(first, last - first)]
                plgpu.wgmma(scores_ref, keys_in_registers, queries.transpose((1, 0)))
        else:
            plgpu.wgmma(scores_ref, keys, scratch.q.transpose((1, 0)))
        meanwhile()
        return written(scores_ref[...])

    return pl.run_scoped(product, plgpu.ACC((keys.shape[0], problem.columns), jnp.float32))


def maxima(problem, x, scratch):
    """Return the maximum of each column."""
    return device.maxima(x, scratch.exchanged, interpret=problem.interpret)


def totals(problem, total, scratch):
    """Return the total of each column, from those of each lane."""
    return device.sums(total, scratch.exchanged, interpret=problem.interpret)


def add_weights(problem, total, keep, weights):
    """Return the new total, not yet summed over the rows of different lanes."""
    total = total * spread(problem, keep, total.shape)
    for first in range(0, weights.shape[0], ROWS):
        total = total + weights[first : first + ROWS]
    return total


def spread(problem, x, shape):
    """Broadcast one value per column down the columns."""
    return problem.cast(lax.broadcast_in_dim(x, shape, [1]), LAYOUT)


def put_weights(problem, weights, scratch):
    """Put weights, [keys, columns], to where wgmma reads them; `commit_smem` shows them to it."""
    if not problem.interpret:
        device.store_transposed(scratch.weights, weights)


def add_values(problem, acc, weights, values, scratch):
    """Add values^T weights to the sums; `put_weights` has put the weights."""
    if problem.interpret:
        acc = acc + jnp.dot(values[...].astype(jnp.float32).T, weights.astype(jnp.float32))
        plgpu.commit_smem()
        return acc

    def add_product(acc_ref):
        plgpu.wgmma(acc_ref, values.transpose((1, 0)), scratch.weights.transpose((1, 0)))

    return written(pl.run_state(add_product)(plgpu.ACC.init(acc)))


def write_result(problem, out, acc, factor):
    """Store the sums times a factor in `out` in shared memory."""
    acc = acc * spread(problem, factor, acc.shape)
    device.store_columns(out, acc, interpret=problem.interpret)


def write_part(problem, part, acc):
    """Put the sums into global memory."""
    device.store_columns(part, acc, interpret=problem.interpret)


def write_vector(problem, ref, x):
    """Put a value a query into global memory."""
    if problem.interpret:
        ref.at[pl.ds(0, x.shape[0])][...] = x
    else:
        device.store_vector(ref, spread(problem, x, (ROWS, problem.columns)))
