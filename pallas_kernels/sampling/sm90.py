"""Sampling on Hopper: a CTA, or a cluster of them, turns a row of logits into a token, without a sort.

A threshold is found as by a radix sort that only looks into the bucket containing it: each pass over the row, which
stays in the L2 cache, adds each token's contribution (1 for top-k, its weight for top-p) to one of 64 buckets of
distance, and the bucket in which the sum reaches the target becomes the next pass's range. Each thread has its own
column of the histogram, so there are no atomics, and the order of summation is always the same. A row only pays for the
filters it uses: without any there is one pass for the maximum and one for the draw.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.sampling.kernel import BLOCK, BUCKETS, GROUPS, THREADS, Global, Problem, Shared, kernel
from pallas_kernels.sampling.thread_ops import COMPILED, INTERPRETED


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
    problem = Problem(vocab_size=vocab_size, num_parts=num_parts, ops=INTERPRETED if interpret else COMPILED)
    num_arrays = len(Global._fields)

    def body(*refs):
        kernel(problem, Global(*refs[:num_arrays]), Shared(*refs[num_arrays:]))

    sample = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((num_rows,), jnp.int32),
            jax.ShapeDtypeStruct((num_rows,), jnp.float32),
        ),
        scratch_types=(
            plgpu.SMEM((BUCKETS, THREADS), jnp.float32),
            plgpu.SMEM((num_parts, BUCKETS), jnp.float32),
            plgpu.SMEM((GROUPS, 5), jnp.float32),
            plgpu.SMEM((num_parts, THREADS // 32), jnp.float32),
            plgpu.SMEM((4, summed_blocks), jnp.float32),
            plgpu.SMEM((BLOCK,), jnp.float32),
            plgpu.SMEM((1, 4), jnp.float32),
            plgpu.Barrier(num_arrivals=GROUPS),
        ),
        grid=(num_rows,),
        grid_names=("row",),
        cluster=(num_parts,),
        cluster_names=("part",),
        num_threads=GROUPS,
        thread_name="group",
        kernel_name="sample",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    # Not below 1e-30, by which all but the largest logits are lost too: 1 / 1e-40 would be infinite.
    inverse_temperature = jnp.where(temperature > 0, 1.0 / jnp.maximum(temperature, 1e-30), 0.0)
    return sample(logits, inverse_temperature, top_k, top_p, min_p, uniform)
