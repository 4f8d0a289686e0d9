"""`latent_attention` for Hopper (sm_90a), in Mosaic GPU: one kernel for decode and prefill, with persistent CTAs.

As in FlashMLA's first version (DeepSeek 2025), 64 queries of a sequence, which are heads and tokens, are the rows of a
tile; 64 vectors in shared memory are keys first, then values. A result of 64 x 512 floats does not fit into a
warpgroup's registers, so two warpgroups have half of the columns each. Contexts are divided into equal splits for the
CTAs; a second kernel combines tiles that were cut.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.device.swizzled import tiled, views
from pallas_kernels.hopper import BY_LANES, NUM_SMS, SHARED_MEMORY
from pallas_kernels.latent_attention.kernel import Global, Item, Problem, Shared, kernel
from pallas_kernels.latent_attention.merge import NUM_CTAS, WARPGROUPS, merge
from pallas_kernels.latent_attention.plan import BLOCK_KV, ROWS, Plan, make_plan
from pallas_kernels.paging import Pages


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the kernel divides its work; `heuristic` picks one."""

    stages: int
    """Number of blocks of keys in shared memory."""
    min_blocks: int
    """Minimum blocks of keys in a part of a context for which a cut is worthwhile."""
    num_ctas: int = NUM_SMS
    """Number of CTAs."""

    def shared_memory(self, size: int) -> int:
        """Return the shared memory of a CTA in bytes, for vectors of `size`."""
        return 2 * (ROWS * size + self.stages * BLOCK_KV * size + ROWS * BLOCK_KV) + ROWS * 4


def heuristic(size: int) -> Config:
    """Return the first of the configurations, from fast to slow, that fits vectors of `size`."""
    for stages in (4, 3, 2):
        config = Config(stages=stages, min_blocks=2)
        if config.shared_memory(size) <= SHARED_MEMORY:
            return config
    raise NotImplementedError(f"vectors of {size} do not fit into shared memory")


def latent_attention_sm90(
    q: Float[Array, "T H D"],
    pages: Pages,
    *,
    block_tables: Int[Array, "B N"],
    seq_lens: Int[Array, " B"],
    query_starts: Int[Array, " B+1"],
    num_decode_rows: Int[Array, ""],
    num_rows: Int[Array, ""],
    latent_size: int,
    scale: float,
    is_decode_only: bool,
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "T H R"]:
    """Run the kernels, see `latent_attention`. Raises NotImplementedError for what they do not support.

    `interpret` replaces what the interpreter of `plgpu.force_gpu_interpret_mode` lacks.
    """
    del num_decode_rows  # rows with one token are as all others
    _check(q, pages.k, latent_size, scale)
    num_tokens, num_heads, size = q.shape
    config = config or heuristic(size)
    problem = Problem(
        num_heads=num_heads,
        latent_size=latent_size,
        block_size=pages.k.shape[2],
        stages=config.stages,
        num_splits=config.num_ctas,
        part_rows=min(ROWS, num_heads) if is_decode_only else ROWS,
        columns=plgpu.find_swizzle(size * 16) // 2,
        scale=scale,
        interpret=interpret,
    )
    plan = make_plan(
        seq_lens,
        query_starts,
        num_rows=num_rows,
        num_tokens=num_tokens,
        num_heads=num_heads,
        num_splits=config.num_ctas,
        min_blocks=config.min_blocks,
    )
    queries = q.reshape(num_tokens * num_heads, size)
    queries = jnp.pad(queries, ((0, max(0, ROWS - len(queries))), (0, 0)))  # a copy takes that many at least
    out = _call(queries, pages.k, block_tables, plan, problem=problem)
    return out[: num_tokens * num_heads].reshape(num_tokens, num_heads, latent_size)


def _check(q: Float[Array, "T H D"], pages: Float[Array, "P 1 S D"], latent_size: int, scale: float) -> None:
    """Raise NotImplementedError, with the reason, for operands that the kernel does not support."""
    if q.dtype not in (jnp.bfloat16, jnp.float16) or q.dtype != pages.dtype:
        raise NotImplementedError(f"q and pages must both be bfloat16 or both float16, got {q.dtype} and {pages.dtype}")
    if latent_size % 128 or latent_size > 512:
        raise NotImplementedError(f"the latent (kv_lora_rank) must be a multiple of 128 up to 512, got {latent_size}")
    rotated_size = q.shape[2] - latent_size
    if rotated_size not in (32, 64):
        raise NotImplementedError(f"the rotated key (qk_rope_head_dim) must be 32 or 64, got {rotated_size}")
    if pages.shape[2] not in (8, 16, 32, 64, 128, 256):
        raise NotImplementedError(f"the block size must be a power of two from 8 to 256, got {pages.shape[2]}")
    if scale <= 0:
        raise NotImplementedError(f"scale must be positive, got {scale}")


# Jitted, so that the layers of a model use one trace and one compilation.
@functools.partial(jax.jit, static_argnames="problem")
def _call(
    q: Float[Array, "M D"],
    pages: Float[Array, "P 1 S D"],
    block_tables: Int[Array, "B N"],
    plan: Plan,
    *,
    problem: Problem,
) -> Float[Array, "M R"]:
    num_queries, size = q.shape
    half, columns = problem.half, problem.columns

    def array(*shape):
        return plgpu.SMEM(shape, q.dtype, transforms=tiled(columns))

    boxes = (size // columns, ROWS, columns)
    barriers = functools.partial(plgpu.Barrier, num_barriers=problem.stages)
    full = barriers(num_arrivals=max(1, BLOCK_KV // problem.block_size))

    def body(*refs):
        *given, (q_smem, q_boxes) = refs[: len(Global._fields) + 1]
        if problem.interpret:  # in which views do not alias
            q_boxes = q_smem
        kernel(problem, Global(*given), Shared(q_smem, q_boxes, *refs[len(Global._fields) + 1 :]))

    parts = (2 * problem.num_splits, problem.part_rows, problem.latent_size)
    out, parts, part_lse = plgpu.kernel(
        body,
        kernel_name="latent_attention",
        out_type=(
            jax.ShapeDtypeStruct((num_queries, problem.latent_size), q.dtype),
            jax.ShapeDtypeStruct(parts, jnp.float32),
            jax.ShapeDtypeStruct((2 * problem.num_splits, ROWS), jnp.float32),
        ),
        scratch_types=(
            views(*boxes, dtype=q.dtype),
            plgpu.SMEM((2, len(Item._fields)), jnp.int32),
            array(problem.stages, BLOCK_KV, half),
            array(problem.stages, BLOCK_KV, size - half),
            array(ROWS, BLOCK_KV),
            plgpu.SMEM((ROWS,), jnp.float32),
            plgpu.Barrier(num_arrivals=boxes[0] + 1),
            plgpu.Barrier(num_arrivals=2),
            full,
            barriers(),
            full,
            barriers(),
            plgpu.Barrier(),
            plgpu.Barrier(),
        ),
        grid=(problem.num_splits,),
        grid_names=("split",),
        num_threads=3,
        thread_name="wg",
        compiler_params=BY_LANES,
    )(q, pages, block_tables, jnp.stack(plan.tiles), jnp.stack(plan.splits))
    out_ref = jax.new_ref(out)  # changed in place by the second kernel
    plgpu.kernel(
        functools.partial(merge, problem),
        kernel_name="merge_latent_attention",
        grid=(NUM_CTAS,),
        grid_names=("cta",),
        num_threads=WARPGROUPS,
        thread_name="wg",
        compiler_params=BY_LANES,
    )(jnp.stack(plan.cuts), parts, part_lse, out_ref)
    return jax.freeze(out_ref)
