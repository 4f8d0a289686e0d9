"""Sampling on Hopper: a CTA, or a cluster of them, turns a row of logits into a token, without a sort.

A threshold is found as by a radix sort that only looks into the bucket containing it: each pass over the row, which
stays in the L2 cache, adds each token's contribution (1 for top-k, its weight for top-p) to one of 64 buckets of
distance, and the bucket in which the sum reaches the target becomes the next pass's range. Each thread has its own
column of the histogram, so there are no atomics, and the order of summation is always the same. A row only pays for the
filters it uses: without any there is one pass for the maximum and one for the draw.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.sampling.thread_ops import COMPILED, GROUP_THREADS, INTERPRETED

BLOCK = 512
"""Tokens per block, four for each thread of a warpgroup; the first of the two draws chooses a block."""

_GROUPS = 4  # warpgroups
_THREADS = GROUP_THREADS * _GROUPS
_BUCKETS = 64
_AT_ONCE = 4  # blocks whose loads a warpgroup has in flight
_FIRST_SCALE = 4.0  # buckets of 1/4: of 64, the last ends where weights are below 1e-6 of the largest


def default_parts(num_rows: int) -> int:
    """Return the number of CTAs per row such that all rows run at once on the 132 multiprocessors of an H200 or
    H100.
    """
    return next((parts for parts in (8, 4, 2) if num_rows * parts <= 128), 1)


@functools.partial(jax.jit, static_argnames=("num_parts", "interpret"))
def sample_sm90(
    logits: Float[Array, "B V"],
    *,
    temperature: Float[Array, " B"],
    top_k: Int32[Array, " B"],
    top_p: Float[Array, " B"],
    min_p: Float[Array, " B"],
    uniform: Float[Array, "B 2"],
    num_parts: int | None = None,
    interpret: bool = False,
) -> tuple[Int32[Array, " B"], Float[Array, " B"]]:
    """Run the kernel, see `sample`.

    `num_parts` CTAs divide a row, by default as many as fit onto the GPU. `interpret` replaces what the interpreter on
    a CPU lacks.
    """
    num_rows, vocab_size = logits.shape
    if num_parts is None:
        num_parts = 1 if interpret else default_parts(num_rows)
    if vocab_size < BLOCK:
        logits = jnp.pad(logits, ((0, 0), (0, BLOCK - vocab_size)), constant_values=-jnp.inf)
        vocab_size = BLOCK
    num_blocks = -(-vocab_size // BLOCK)
    summed_blocks = -(-num_blocks // BLOCK) * BLOCK
    body = functools.partial(
        _body, vocab_size=vocab_size, num_parts=num_parts, ops=INTERPRETED if interpret else COMPILED
    )
    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((num_rows,), jnp.int32),
            jax.ShapeDtypeStruct((num_rows,), jnp.float32),
        ),
        scratch_types=(
            plgpu.SMEM((_BUCKETS, _THREADS), jnp.float32),
            plgpu.SMEM((num_parts, _BUCKETS), jnp.float32),
            plgpu.SMEM((_GROUPS, 5), jnp.float32),
            plgpu.SMEM((num_parts, _THREADS // 32), jnp.float32),
            plgpu.SMEM((4, summed_blocks), jnp.float32),
            plgpu.SMEM((BLOCK,), jnp.float32),
            plgpu.SMEM((1, 4), jnp.float32),
            plgpu.Barrier(num_arrivals=_GROUPS),
        ),
        grid=(num_rows,),
        grid_names=("row",),
        cluster=(num_parts,),
        cluster_names=("part",),
        num_threads=_GROUPS,
        thread_name="group",
        kernel_name="sample",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    # Not below 1e-30, by which all but the largest logits are lost too: 1 / 1e-40 would be infinite.
    inverse_temperature = jnp.where(temperature > 0, 1.0 / jnp.maximum(temperature, 1e-30), 0.0)
    return kernel(logits, inverse_temperature, top_k, top_p, min_p, uniform)


def _body(
    logits, inverse_temperatures, top_ks, top_ps, min_ps, uniforms, tokens, maxima,
    histogram, totals, found, partials, sums, chosen, scratch, barrier, *, vocab_size, num_parts, ops,
):  # fmt: skip
    row, part, group = lax.axis_index("row"), lax.axis_index("part"), lax.axis_index("group")
    is_first = (part == 0) & (group == 0)
    layout = plgpu.Layout.WG_STRIDED((BLOCK,), vec_size=4 if vocab_size % 4 == 0 else 1)
    num_blocks = -(-vocab_size // BLOCK)
    blocks_a_round = num_parts * _GROUPS * _AT_ONCE
    rounds = -(-num_blocks // blocks_a_round)
    whole_rounds = vocab_size // BLOCK // blocks_a_round  # rounds without a block that is moved or empty

    def start_of(block):
        return lax.min(block * BLOCK, vocab_size - BLOCK)

    def ids_of(block):
        return ops.iota(BLOCK, layout) + start_of(block)

    def load(block, is_whole=False):
        """Load a block's logits.

        The last block is moved down to fit into the row; tokens that are not its own, and those of blocks beyond it,
        are -inf.
        """
        x = plgpu.load(logits.at[row, pl.ds(start_of(block), BLOCK)], layout=layout)
        return x if is_whole else jnp.where(ids_of(block) >= block * BLOCK, x, -jnp.inf)

    def visit_blocks(visit, init):
        """Fold `visit(carry, block, x)` over the warpgroup's part of the row."""

        def visit_some(i, carry, *, is_whole):
            first = ((i * num_parts + part) * _GROUPS + group) * _AT_ONCE
            blocks = [first + j for j in range(_AT_ONCE)]
            # The barrier keeps LLVM from moving each load to where it is used, where its latency would be waited for.
            loaded = lax.optimization_barrier([load(block, is_whole) for block in blocks])
            for block, x in zip(blocks, loaded, strict=True):
                carry = visit(carry, block, x)
            return carry

        carry = lax.fori_loop(0, whole_rounds, functools.partial(visit_some, is_whole=True), init)
        return lax.fori_loop(whole_rounds, rounds, functools.partial(visit_some, is_whole=False), carry)

    def full(value):
        return ops.full(BLOCK, value, layout)

    def sync():
        if num_parts > 1:
            ops.sync_cluster()
        else:
            plgpu.barrier_arrive(barrier)
            plgpu.barrier_wait(barrier)

    def largest(x):
        """Return the maximum of all threads' values."""
        ops.warp_maxima(partials, x, group, layout)
        sync()
        return _reduce(jnp.maximum, partials)

    def keep_larger(carry, block, x):
        value, negative_id = carry
        negative_id = jnp.where(x > value, -ids_of(block).astype(jnp.float32), negative_id)
        return jnp.maximum(value, x), negative_id

    if num_parts > 1:
        sync()  # a CTA must have started before others write into its memory
    values, negative_ids = visit_blocks(keep_larger, (full(-jnp.inf), full(0.0)))
    maximum = largest(values)
    inverse_temperature = inverse_temperatures[row]
    is_usable = jnp.abs(maximum) < jnp.inf
    is_random = is_usable & (inverse_temperature > 0)

    @pl.when(is_first)
    def _():
        maxima[row] = maximum

    @pl.when(is_usable & (inverse_temperature <= 0))
    def _():
        sync()  # everybody has read the maximum
        negative = largest(jnp.where(values == maximum, negative_ids, -jnp.inf))

        @pl.when(is_first)
        def _():
            tokens[row] = (-negative).astype(jnp.int32)

    @pl.when(jnp.logical_not(is_usable) & is_first)
    def _():
        tokens[row] = jnp.int32(0)

    rate = inverse_temperature * -math.log2(math.e)

    def weigh(distance):
        return jnp.exp2(distance * rate)

    def search(limit, target, share, *, by_weight):
        """Return the distance below which tokens are kept, such that they are the fewest whose sum reaches the target.

        A negative target is the fraction `share` of the whole. Tokens at `limit` or farther are excluded.
        """

        def narrow(state):
            low, high, scale, below, target, _ = state

            def visit(carry, _, x):
                rate_if_any = rate if by_weight else None
                ops.add_to_histogram(histogram, maximum - x, low, high, scale, rate_if_any, group, layout)
                return carry

            visit_blocks(visit, jnp.int32(0))
            sync()
            ops.total_rows(histogram, totals, group, _GROUPS)
            sync()
            ops.find_bucket(totals, found.at[group], below, target, share)
            bucket, before, reached, target, total = [found[group, i] for i in range(5)]
            # None can be reached: fewer tokens than top-k asks for, or rounding.
            is_last = total < target
            width = _reciprocal(scale)
            # The first range is open: if the target is in its last bucket, larger buckets are needed.
            is_coarse = jnp.logical_not(is_last) & (bucket == _BUCKETS - 1.0) & (low + _BUCKETS * width < high)
            new_low = low + bucket * width
            next_after = _next_after(new_low)
            new_high = jnp.minimum(jnp.maximum(new_low + width, next_after), high)
            least = weigh(new_high) if by_weight else jnp.float32(1.0)
            # No two distances, or no two weights, are closer together.
            finest = jnp.maximum(next_after - new_low, finest_distance)
            is_decided = (reached - target < least) | (width <= finest) | (scale > 1e36)
            is_done = is_last | (jnp.logical_not(is_coarse) & is_decided)
            is_kept = is_coarse | is_last
            low = jnp.where(is_kept, low, new_low)
            high = jnp.where(is_kept, high, new_high)
            scale = scale * jnp.where(is_coarse, 1.0 / _BUCKETS, 1.0 * _BUCKETS)
            below = jnp.where(is_coarse, 0.0, before)
            return low, high, scale, below, target, is_done.astype(jnp.int32)

        finest_distance = jnp.abs(maximum) * 2.0**-25
        if by_weight:
            finest_distance = jnp.maximum(finest_distance, 2.0**-25 / inverse_temperature)
        scale = _power_of_two(jnp.clip(_FIRST_SCALE * inverse_temperature, 1e-30, 1e30))
        state = (jnp.float32(0.0), limit, scale, jnp.float32(0.0), target, jnp.int32(0))
        return lax.while_loop(lambda state: state[-1] == 0, narrow, state)[1]

    def invert(weights, ids, uniform, layout):
        """Return the first entry with weight whose running sum exceeds the fraction `uniform` of the whole."""

        def largest_of_group(x):
            ops.warp_maxima(scratch, x, group, layout)
            return _reduce(jnp.maximum, scratch)

        running = ops.running_sums(scratch.at[0], weights, layout)
        has_weight, places = weights > 0, ids.astype(jnp.float32)
        is_reached = has_weight & (running > uniform * largest_of_group(running))
        first = -largest_of_group(jnp.where(is_reached, -places, -jnp.inf))
        last = largest_of_group(jnp.where(has_weight, places, 0.0))
        # Rounding may have kept all from being reached.
        return jnp.where(first < jnp.inf, first, last).astype(jnp.int32)

    @pl.when(is_random)
    def _():
        top_k, top_p, min_p = top_ks[row], top_ps[row], min_ps[row]
        sync()  # everybody has read the maximum
        limit = jnp.float32(jnp.inf)
        ops.total_rows(histogram, totals, group, _GROUPS)  # clears it
        sync()
        limit = lax.cond(
            top_k > 0,
            lambda: search(limit, top_k.astype(jnp.float32), jnp.float32(1.0), by_weight=False),
            lambda: limit,
        )
        limit = lax.cond(top_p < 1, lambda: search(limit, jnp.float32(-1), top_p, by_weight=True), lambda: limit)

        def kept_weights(x):
            distance = maximum - x
            weight = weigh(distance)
            return jnp.where((distance < limit) & (weight >= min_p), weight, 0.0)

        def sum_block(carry, block, x):
            ops.sum_warps(sums, block, kept_weights(x), layout, num_parts)
            return carry

        visit_blocks(sum_block, jnp.int32(0))
        sync()

        @pl.when(is_first)
        def _():
            wide = plgpu.Layout.WG_STRIDED((sums.shape[1],), vec_size=sums.shape[1] // 128)
            of_blocks = functools.reduce(jnp.add, [plgpu.load(sums.at[warp], layout=wide) for warp in range(4)])
            ids = ops.iota(sums.shape[1], wide)
            of_blocks = jnp.where(ids < num_blocks, of_blocks, 0.0)
            block = invert(of_blocks, ids, uniforms[row, 0], wide)
            chosen[...] = kept_weights(load(block))
            narrow = plgpu.Layout.WG_STRIDED((BLOCK,), vec_size=4)
            weights, ids = plgpu.load(chosen, layout=narrow), ops.iota(BLOCK, narrow)
            token = invert(weights, ids, uniforms[row, 1], narrow)
            tokens[row] = start_of(block) + token


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
