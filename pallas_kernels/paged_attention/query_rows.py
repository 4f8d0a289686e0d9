"""Operations of a stream with queries as rows, padded to the 64 of wgmma."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import registers
from pallas_kernels.device.registers import written
from pallas_kernels.paging.tiles import LOWEST, ROWS

LAYOUT = plgpu.Layout.WGMMA
VECTOR_LAYOUT = LAYOUT.reduce(1)
KEYS, QUERIES = 1, 0
"""Dimensions of scores."""


def nothing_yet(problem):
    """Return the running softmax before the first block: sums of values, maxima and totals."""
    return (
        problem.cast(jnp.zeros((ROWS, problem.head_dim), jnp.float32), LAYOUT),
        problem.cast(jnp.full((ROWS,), LOWEST, jnp.float32), VECTOR_LAYOUT),
        problem.cast(jnp.zeros((ROWS,), jnp.float32), VECTOR_LAYOUT),
    )


def take_queries(problem, scratch, queries):
    """Put the tile's queries to where wgmma reads them."""
    scratch.q[...] = problem.load(queries, LAYOUT)


def scores(problem, keys, scratch, _):
    """Return a score for each query and key: [queries, keys]."""
    if problem.interpret:
        result = jnp.dot(scratch.q[...].astype(jnp.float32), keys[...].astype(jnp.float32).T)
        plgpu.commit_smem()
        return result

    def product(scores_ref):
        plgpu.wgmma(scores_ref, scratch.q, keys.transpose((1, 0)))
        return written(scores_ref[...])

    return pl.run_scoped(product, plgpu.ACC((ROWS, keys.shape[0]), jnp.float32))


def maxima(_, x, __):
    """Return the maximum of each row."""
    return x.max(axis=1)


def add_weights(_, total, keep, weights):
    """Return the new total of each row."""
    return total * keep + weights.sum(axis=1)


def totals(_, total, __):
    """Return the totals unchanged: they are complete."""
    return total


def spread(_, x, shape):
    """Broadcast one value per row along the rows."""
    return lax.broadcast_in_dim(x, shape, [0])


def put_weights(_, __, ___):
    """Do nothing: wgmma reads weights from registers."""


def add_values(problem, acc, weights, values, _):
    """Add weights values to the sums; weights are [queries, keys]."""
    if problem.interpret:
        acc = acc + jnp.dot(weights.astype(jnp.float32), values[...].astype(jnp.float32))
        plgpu.commit_smem()
        return acc

    def add_product(acc_ref):
        plgpu.wgmma(acc_ref, weights, values)

    return written(pl.run_state(add_product)(plgpu.ACC.init(acc)))


def write_result(problem, out, acc, factor):
    """Store the sums times a factor in `out` in shared memory."""
    # All at once needs more registers than there are for 256 columns. Only then: of narrower rows, Mosaic has been seen
    # to store slices to the wrong place (jax 0.11.2, 64 of 128 columns, 32 of 80).
    width = 32 if problem.head_dim == 256 else problem.head_dim
    for column in range(0, problem.head_dim, width):
        part = acc[:, column : column + width]
        part = (part * spread(problem, factor, part.shape)).astype(out.dtype)
        out.at[:, pl.ds(column, width)][...] = part


def write_part(problem, part, acc):
    """Put the sums into global memory."""
    registers.store_first_rows(part, acc, interpret=problem.interpret)


def write_vector(_, ref, x):
    """Put a value a query into global memory."""
    ref[...] = x
