"""The body of the Hopper kernel that samples: what the warpgroups of a row's CTAs do. See sm90.py.

First the largest logit of the row is found, which is all that a row without randomness needs. Where there is some,
top-k and top-p each become a distance from it below which tokens are kept, found by histograms that narrow a range;
then the sums of the kept weights of blocks are inverted, and those of the block that is found.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sampling.thread_ops import GROUP_THREADS

BLOCK = 512
"""Tokens per block, four for each thread of a warpgroup; the first of the two draws chooses a block."""
GROUPS = 4
"""Warpgroups of a CTA."""
THREADS = GROUP_THREADS * GROUPS
BUCKETS = 64
"""Buckets of a histogram."""
AT_ONCE = 4
"""Blocks whose loads a warpgroup has in flight."""

_FIRST_SCALE = 4.0  # buckets of 1/4: of 64, the last ends where weights are below 1e-6 of the largest


class Problem(NamedTuple):
    """What is known when the kernel is compiled."""

    vocab_size: int
    num_parts: int
    """CTAs that divide a row."""
    ops: Any
    """What Pallas lacks, compiled or interpreted."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks of a row."""
        return -(-self.vocab_size // BLOCK)

    @property
    def blocks_a_round(self) -> int:
        """Number of blocks that all warpgroups of a row load at once."""
        return self.num_parts * GROUPS * AT_ONCE


class Global(NamedTuple):
    """Arrays in global memory."""

    logits: Any
    inverse_temperatures: Any
    top_ks: Any
    top_ps: Any
    min_ps: Any
    uniforms: Any
    tokens: Any
    maxima: Any


class Shared(NamedTuple):
    """Arrays and the barrier in shared memory."""

    histogram: Any
    totals: Any
    found: Any
    partials: Any
    sums: Any
    chosen: Any
    scratch: Any
    barrier: Any


class _Group(NamedTuple):
    """One warpgroup, and the part of a row that it has."""

    problem: Problem
    gmem: Global
    smem: Shared
    row: Any
    part: Any
    group: Any
    is_first: Any
    """True for the CTA that writes what all have found."""
    layout: Any

    def start_of(self, block):
        """Return the first token of a block, whose last one is moved down to fit into the row."""
        return lax.min(block * BLOCK, self.problem.vocab_size - BLOCK)

    def ids_of(self, block):
        """Return the tokens of a block."""
        return self.problem.ops.iota(BLOCK, self.layout) + self.start_of(block)

    def load(self, block, is_whole=False):
        """Load a block's logits; tokens of a moved one that are not its own, and those of later blocks, are -inf."""
        x = plgpu.load(self.gmem.logits.at[self.row, pl.ds(self.start_of(block), BLOCK)], layout=self.layout)
        return x if is_whole else jnp.where(self.ids_of(block) >= block * BLOCK, x, -jnp.inf)

    def visit_blocks(self, visit, init):
        """Fold `visit(carry, block, x)` over the warpgroup's part of the row."""
        problem = self.problem
        rounds = -(-problem.num_blocks // problem.blocks_a_round)
        # Rounds without a block that is moved or empty.
        whole_rounds = problem.vocab_size // BLOCK // problem.blocks_a_round

        def visit_some(i, carry, *, is_whole):
            first = ((i * problem.num_parts + self.part) * GROUPS + self.group) * AT_ONCE
            blocks = [first + j for j in range(AT_ONCE)]
            # The barrier keeps LLVM from moving each load to where it is used, where its latency would be waited for.
            loaded = lax.optimization_barrier([self.load(block, is_whole) for block in blocks])
            for block, x in zip(blocks, loaded, strict=True):
                carry = visit(carry, block, x)
            return carry

        carry = lax.fori_loop(0, whole_rounds, functools.partial(visit_some, is_whole=True), init)
        return lax.fori_loop(whole_rounds, rounds, functools.partial(visit_some, is_whole=False), carry)

    def full(self, value):
        """Return a block of equal values."""
        return self.problem.ops.full(BLOCK, value, self.layout)

    def sync(self) -> None:
        """Wait for all warpgroups of the row."""
        if self.problem.num_parts > 1:
            self.problem.ops.sync_cluster()
        else:
            plgpu.barrier_arrive(self.smem.barrier)
            plgpu.barrier_wait(self.smem.barrier)

    def largest(self, x):
        """Return the maximum of all threads' values."""
        self.problem.ops.warp_maxima(self.smem.partials, x, self.group, self.layout)
        self.sync()
        return _reduce(jnp.maximum, self.smem.partials)


class _Weights(NamedTuple):
    """What makes weights of logits: exp2 of their distance from the largest one, times a rate."""

    maximum: Any
    inverse_temperature: Any
    rate: Any

    def weigh(self, distance):
        """Return the weight of a token so far from the likeliest one."""
        return jnp.exp2(distance * self.rate)


def kernel(problem: Problem, gmem: Global, smem: Shared) -> None:
    """Run each warpgroup of the mesh axis "group", of each CTA "part" of each cluster "row"."""
    row, part, group = lax.axis_index("row"), lax.axis_index("part"), lax.axis_index("group")
    is_first = (part == 0) & (group == 0)
    layout = plgpu.Layout.WG_STRIDED((BLOCK,), vec_size=4 if problem.vocab_size % 4 == 0 else 1)
    own = _Group(problem, gmem, smem, row, part, group, is_first, layout)
    if problem.num_parts > 1:
        own.sync()  # a CTA must have started before others write into its memory
    values, negative_ids = own.visit_blocks(
        functools.partial(_keep_larger, own.ids_of), (own.full(-jnp.inf), own.full(0.0))
    )
    maximum = own.largest(values)
    inverse_temperature = gmem.inverse_temperatures[row]
    is_usable = jnp.abs(maximum) < jnp.inf
    is_random = is_usable & (inverse_temperature > 0)

    @pl.when(is_first)
    def _():
        gmem.maxima[row] = maximum

    @pl.when(is_usable & (inverse_temperature <= 0))
    def _():
        own.sync()  # everybody has read the maximum
        negative = own.largest(jnp.where(values == maximum, negative_ids, -jnp.inf))

        @pl.when(is_first)
        def _():
            gmem.tokens[row] = (-negative).astype(jnp.int32)

    @pl.when(jnp.logical_not(is_usable) & is_first)
    def _():
        gmem.tokens[row] = jnp.int32(0)

    weights = _Weights(maximum, inverse_temperature, inverse_temperature * -math.log2(math.e))

    @pl.when(is_random)
    def _():
        top_k, top_p, min_p = gmem.top_ks[row], gmem.top_ps[row], gmem.min_ps[row]
        own.sync()  # everybody has read the maximum
        problem.ops.total_rows(smem.histogram, smem.totals, group, GROUPS)  # clears it
        own.sync()
        limit = _limit(own, weights, top_k, top_p)
        _draw(own, weights, limit, min_p)


def _keep_larger(ids_of: Callable[[Any], Any], carry, block, x):
    """Keep the larger of each thread's values, and the negative of the token that has it."""
    value, negative_id = carry
    negative_id = jnp.where(x > value, -ids_of(block).astype(jnp.float32), negative_id)
    return jnp.maximum(value, x), negative_id


def _limit(own: _Group, weights: _Weights, top_k, top_p):
    """Return the distance below which top-k and top-p keep tokens."""
    search = functools.partial(_search, own, weights)
    limit = jnp.float32(jnp.inf)
    limit = lax.cond(
        top_k > 0,
        lambda: search(limit, top_k.astype(jnp.float32), jnp.float32(1.0), by_weight=False),
        lambda: limit,
    )
    return lax.cond(top_p < 1, lambda: search(limit, jnp.float32(-1), top_p, by_weight=True), lambda: limit)


def _search(own: _Group, weights: _Weights, limit, target, fraction, *, by_weight: bool):
    """Return the distance below which tokens are kept, such that they are the fewest whose sum reaches the target.

    A negative target is the `fraction` of the whole. Tokens at `limit` or farther are excluded.
    """
    finest_distance = jnp.abs(weights.maximum) * 2.0**-25
    if by_weight:
        finest_distance = jnp.maximum(finest_distance, 2.0**-25 / weights.inverse_temperature)

    def narrow(state):
        return _narrow(own, weights, state, fraction, finest_distance, by_weight=by_weight)

    scale = _power_of_two(jnp.clip(_FIRST_SCALE * weights.inverse_temperature, 1e-30, 1e30))
    state = (jnp.float32(0.0), limit, scale, jnp.float32(0.0), target, jnp.int32(0))
    return lax.while_loop(lambda state: state[-1] == 0, narrow, state)[1]


def _narrow(own: _Group, weights: _Weights, state, fraction, finest_distance, *, by_weight: bool):
    """Return the state of a search with its range narrowed to one bucket of a histogram of it."""
    low, high, scale, below, target, _ = state
    smem, ops = own.smem, own.problem.ops

    def visit(carry, _, x):
        rate_if_any = weights.rate if by_weight else None
        ops.add_to_histogram(smem.histogram, weights.maximum - x, low, high, scale, rate_if_any, own.group, own.layout)
        return carry

    own.visit_blocks(visit, jnp.int32(0))
    own.sync()
    ops.total_rows(smem.histogram, smem.totals, own.group, GROUPS)
    own.sync()
    ops.find_bucket(smem.totals, smem.found.at[own.group], below, target, fraction)
    bucket, before, reached, target, total = [smem.found[own.group, i] for i in range(5)]
    # None can be reached: fewer tokens than top-k asks for, or rounding.
    is_last = total < target
    width = _reciprocal(scale)
    # The first range is open: if the target is in its last bucket, larger buckets are needed.
    is_coarse = jnp.logical_not(is_last) & (bucket == BUCKETS - 1.0) & (low + BUCKETS * width < high)
    new_low = low + bucket * width
    next_after = _next_after(new_low)
    new_high = jnp.minimum(jnp.maximum(new_low + width, next_after), high)
    least = weights.weigh(new_high) if by_weight else jnp.float32(1.0)
    # No two distances, or no two weights, are closer together.
    finest = jnp.maximum(next_after - new_low, finest_distance)
    is_decided = (reached - target < least) | (width <= finest) | (scale > 1e36)
    is_done = is_last | (jnp.logical_not(is_coarse) & is_decided)
    is_kept = is_coarse | is_last
    low = jnp.where(is_kept, low, new_low)
    high = jnp.where(is_kept, high, new_high)
    scale = scale * jnp.where(is_coarse, 1.0 / BUCKETS, 1.0 * BUCKETS)
    below = jnp.where(is_coarse, 0.0, before)
    return low, high, scale, below, target, is_done.astype(jnp.int32)


def _draw(own: _Group, weights: _Weights, limit, min_p) -> None:
    """Draw a token among those nearer than `limit` and write it: first its block, then the token in it."""
    problem, gmem, smem, ops = own.problem, own.gmem, own.smem, own.problem.ops

    def kept_weights(x):
        distance = weights.maximum - x
        weight = weights.weigh(distance)
        return jnp.where((distance < limit) & (weight >= min_p), weight, 0.0)

    def sum_block(carry, block, x):
        ops.sum_warps(smem.sums, block, kept_weights(x), own.layout, problem.num_parts)
        return carry

    own.visit_blocks(sum_block, jnp.int32(0))
    own.sync()

    @pl.when(own.is_first)
    def _():
        sums = smem.sums
        wide = plgpu.Layout.WG_STRIDED((sums.shape[1],), vec_size=sums.shape[1] // 128)
        of_blocks = functools.reduce(jnp.add, [plgpu.load(sums.at[warp], layout=wide) for warp in range(4)])
        ids = ops.iota(sums.shape[1], wide)
        of_blocks = jnp.where(ids < problem.num_blocks, of_blocks, 0.0)
        block = _invert(own, of_blocks, ids, gmem.uniforms[own.row, 0], wide)
        smem.chosen[...] = kept_weights(own.load(block))
        narrow = plgpu.Layout.WG_STRIDED((BLOCK,), vec_size=4)
        of_tokens, ids = plgpu.load(smem.chosen, layout=narrow), ops.iota(BLOCK, narrow)
        token = _invert(own, of_tokens, ids, gmem.uniforms[own.row, 1], narrow)
        gmem.tokens[own.row] = own.start_of(block) + token


def _invert(own: _Group, weights, ids, uniform, layout):
    """Return the first entry with weight whose running sum exceeds the fraction `uniform` of the whole."""
    ops, scratch = own.problem.ops, own.smem.scratch

    def largest_of_group(x):
        ops.warp_maxima(scratch, x, own.group, layout)
        return _reduce(jnp.maximum, scratch)

    running = ops.running_sums(scratch.at[0], weights, layout)
    has_weight, float_ids = weights > 0, ids.astype(jnp.float32)
    is_reached = has_weight & (running > uniform * largest_of_group(running))
    first = -largest_of_group(jnp.where(is_reached, -float_ids, -jnp.inf))
    last = largest_of_group(jnp.where(has_weight, float_ids, 0.0))
    # Rounding may have kept all from being reached.
    return jnp.where(first < jnp.inf, first, last).astype(jnp.int32)


def _reduce(combine, ref):
    return functools.reduce(combine, [ref[i, j] for i in range(ref.shape[0]) for j in range(ref.shape[1])])


def _next_after(x):
    """Return the next larger float of a non-negative one."""
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) + 1, jnp.float32)


def _reciprocal(x):
    """Return the exact reciprocal of a power of two, which the division of `approx_math` does not guarantee."""
    return lax.bitcast_convert_type(0x7F000000 - lax.bitcast_convert_type(x, jnp.int32), jnp.float32)


def _power_of_two(x):
    """Return the largest power of two that is not larger than x."""
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & 0x7F800000, jnp.float32)
