"""The second Hopper kernel of latent attention: combine the partial results of tiles that were cut between splits."""

import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import NUM_SMS
from pallas_kernels.latent_attention.kernel import Problem
from pallas_kernels.paging.tiles import LOWEST

NUM_CTAS, WARPGROUPS = NUM_SMS, 4
"""CTAs, and warpgroups per CTA: a warpgroup combines one query after another."""

_AT_ONCE = 16  # parts whose loads are in flight

_int = jnp.int32


def merge(problem: Problem, cuts, parts, part_lse, out) -> None:
    """Run each warpgroup (mesh axis "wg") of each CTA (axis "cta")."""
    first = lax.axis_index("wg") * NUM_CTAS + lax.axis_index("cta")
    size = problem.latent_size
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=math.gcd(size // 128, 4))

    def full(value):
        return jnp.full((size,), value, jnp.float32)

    def put_query(query, row, split, num_others):
        def add(step, state):
            acc, maximum, total = state
            found = []
            for j in range(_AT_ONCE):
                number = step * _AT_ONCE + j
                # Beyond the last one, the first split's part is loaded again with weight 0.
                is_there = number <= num_others
                part_index = split + lax.select(is_there & (number > 0), number, _int(problem.num_splits))
                lse = lax.select(is_there, part_lse[part_index, row], jnp.float32(LOWEST))
                values = parts.at[part_index, row]
                found.append((full(lse), values[...] if problem.interpret else plgpu.load(values, layout=layout)))
            found = lax.optimization_barrier(found)  # so that the loads are not moved to where they are waited for
            new_maximum = maximum
            for lse, _ in found:
                new_maximum = jnp.maximum(new_maximum, lse)
            fade = jnp.exp2(maximum - new_maximum)
            acc, total = acc * fade, total * fade
            for lse, values in found:
                weight = jnp.exp2(lse - new_maximum)
                acc, total = acc + values * weight, total + weight
            return acc, new_maximum, total

        zeros = plgpu.layout_cast(full(0.0), layout)
        start = (zeros, zeros + LOWEST, zeros)
        acc, _, total = lax.fori_loop(_int(0), lax.div(num_others, _int(_AT_ONCE)) + 1, add, start)
        out.at[query + row][...] = (acc / total).astype(out.dtype)

    def turn(i, _):
        index = first + i * (NUM_CTAS * WARPGROUPS)
        cut, row = lax.div(index, _int(problem.part_rows)), lax.rem(index, _int(problem.part_rows))
        query, num_queries, split, num_others = (cuts[field, cut] for field in range(4))
        pl.when(row < num_queries)(lambda: put_query(query, row, split, num_others))

    num_rows = cuts[4, 0] * problem.part_rows
    num_turns = lax.div(lax.max(num_rows - first, _int(0)) + (NUM_CTAS * WARPGROUPS - 1), _int(NUM_CTAS * WARPGROUPS))
    lax.fori_loop(_int(0), num_turns, turn, None)
