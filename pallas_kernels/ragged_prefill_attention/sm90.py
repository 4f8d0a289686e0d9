"""`ragged_prefill_attention` for Hopper (sm_90a), in Mosaic GPU: FlashAttention-3 over pages, in persistent blocks.

After Shah et al. 2024, "FlashAttention-3" (arXiv:2407.08608): one warpgroup copies queries and pages into shared
memory, two compute. A compute warpgroup begins the scores of its next keys together with the product of its present
weights and their values, and works on the softmax of the scores while the product goes on.

A tile is 64 tokens of two query heads that share a KV head, one for each compute warpgroup, or 128 tokens of one head
where an odd number shares it. Each thread block takes its part of the plan's tiles, and copies for the next tile while
it finishes the last. Keys go by from the last block of a tile's context to the first, so that masks come first.
"""

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.hopper import NUM_SMS, SHARED_MEMORY
from pallas_kernels.paging.checks import check_pages_for_sm90
from pallas_kernels.ragged_prefill_attention.plan import Plan, plan
from pallas_kernels.ragged_prefill_attention.sm90_kernel import ROWS, Global, Problem, Shared, Tile, kernel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the kernel is cut; `heuristic` picks one."""

    block_kv: int
    """Keys a step: 64 or 128."""
    stages: int
    """Blocks of keys, and as many of values, in shared memory."""
    prefetch: bool
    """Whether a tile's queries are copied while the tile before is computed; else results go where they lay."""
    num_blocks: int = NUM_SMS
    """Thread blocks."""

    def shared_memory(self, head_dim: int) -> int:
        """Bytes of a thread block."""
        tile, rows = (2 * ROWS * columns * 2 for columns in (head_dim, _row_stride(head_dim)))
        result = (tile if self.prefetch else 0) + (0 if rows == tile else rows)
        return (2 if self.prefetch else 1) * tile + result + 2 * self.stages * self.block_kv * head_dim * 2


def heuristic(head_dim: int) -> Config:
    """The first of the configurations, from fast to slow, that fits."""
    for block_kv, stages, prefetch in ((128, 4, True), (128, 3, True), (128, 2, True), (64, 2, False)):
        config = Config(block_kv=block_kv, stages=stages, prefetch=prefetch)
        if config.shared_memory(head_dim) <= SHARED_MEMORY:
            return config
    raise NotImplementedError(f"head_dim {head_dim} does not fit into shared memory")


def ragged_prefill_attention_sm90(
    q: Float[Array, "T H D"],
    k_pages: Float[Array, "P K S D"],
    v_pages: Float[Array, "P K S D"],
    *,
    block_tables: Int[Array, "B N"],
    seq_lens: Int[Array, " B"],
    query_starts: Int[Array, " B+1"],
    first_row: Int[Array, ""],
    num_rows: Int[Array, ""],
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " H"] | None,
    alibi_slopes: Float[Array, " H"] | None,
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "T H D"]:
    """See `ragged_prefill_attention`. Raises NotImplementedError for what the kernel cannot do.

    `interpret` swaps in what the interpreter of `plgpu.force_gpu_interpret_mode` lacks.
    """
    check_pages_for_sm90(q, k_pages, v_pages)
    if scale <= 0:
        raise NotImplementedError(f"scale must be positive, got {scale}")
    num_tokens, num_heads, head_dim = q.shape
    config = config or heuristic(head_dim)
    problem = Problem(
        num_heads=num_heads,
        num_kv_heads=k_pages.shape[1],
        head_dim=head_dim,
        block_size=k_pages.shape[2],
        block_kv=config.block_kv,
        stages=config.stages,
        prefetch=config.prefetch,
        num_blocks=config.num_blocks,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        interpret=interpret,
    )
    tiles = plan(
        seq_lens,
        query_starts,
        first_row=first_row,
        num_rows=num_rows,
        num_tokens=num_tokens,
        tile_size=problem.tile_size,
    )
    # A copy takes that many tokens at least.
    q = jnp.pad(q, ((0, max(0, ROWS - num_tokens)), (0, 0), (0, 0)))
    return _call(q, k_pages, v_pages, block_tables, tiles, sinks, alibi_slopes, problem=problem)[:num_tokens]


def _row_stride(head_dim: int) -> int:
    """Elements from row to row of a result that is copied row by row: a copy begins at a multiple of 128 bytes."""
    return -(-head_dim // 64) * 64


# Jitted: the layers of a model share one trace and one compilation.
@functools.partial(jax.jit, static_argnames="problem")
def _call(
    q: Float[Array, "T H D"],
    k_pages: Float[Array, "P K S D"],
    v_pages: Float[Array, "P K S D"],
    block_tables: Int[Array, "B N"],
    tiles: Plan,
    sinks: Float[Array, " H"] | None,
    alibi_slopes: Float[Array, " H"] | None,
    *,
    problem: Problem,
) -> Float[Array, "T H D"]:
    head_dim, stages = problem.head_dim, problem.stages
    swizzle = plgpu.find_swizzle(head_dim * 16)
    columns = swizzle // 2
    # Any: pyright takes them for abstract classes.
    by_rows = cast(Any, plgpu.SwizzleTransform)(swizzle)
    by_tiles = (cast(Any, plgpu.TilingTransform)((8, columns)), by_rows)

    def array(*shape, transforms=by_tiles):
        return plgpu.SMEM(shape, q.dtype, transforms=transforms)

    boxes = (2, head_dim // columns, ROWS, columns)
    q_views, out_views = (
        [array(*shape), array(*shape, transforms=(by_rows,))] for shape in ((problem.q_slots, *boxes), boxes)
    )
    out_rows = array(2, ROWS, _row_stride(head_dim), transforms=())
    # Views of the same memory. A result of another row length than the tile's would reach into the other warpgroup's.
    unions = [q_views, out_views] if problem.prefetch else [q_views + out_views]
    if _row_stride(head_dim) == head_dim:
        unions[-1].append(out_rows)
    else:
        unions.append([out_rows])

    barriers = functools.partial(plgpu.Barrier, num_barriers=stages)
    full = barriers(num_arrivals=max(1, problem.block_kv // problem.block_size))
    keys_or_values = array(stages, problem.block_kv, head_dim)

    operands = (q, k_pages, v_pages, block_tables, jnp.stack(tiles[:-1]), tiles.num_tiles, sinks, alibi_slopes)
    given = [operand for operand in operands if operand is not None]

    def body(*refs):
        *inputs, out, unions, tile, k, v, q_full, q_free, k_full, k_free, v_full, v_free, cleaned = refs
        q_smem, q_boxes, out_smem, out_boxes, out_rows = (view for union in unions for view in union)
        if problem.interpret:  # where each view has bytes of its own
            q_boxes, out_boxes = q_smem, out_smem
        inputs = iter(inputs)
        gmem = Global._make([*(None if operand is None else next(inputs) for operand in operands), out])
        smem = Shared(
            q_smem, q_boxes, out_smem, out_boxes, out_rows, tile, k, v,
            q_full, q_free, k_full, k_free, v_full, v_free, cleaned,
        )  # fmt: skip
        kernel(problem, gmem, smem)

    return plgpu.kernel(
        body,
        kernel_name="ragged_prefill_attention",
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=(
            [plgpu.RefUnion(*views) for views in unions],
            plgpu.SMEM((problem.q_slots, len(Tile._fields)), jnp.int32),
            keys_or_values,
            keys_or_values,
            plgpu.Barrier(num_arrivals=2 * boxes[1] + 1, num_barriers=problem.q_slots),
            plgpu.Barrier(num_arrivals=2, num_barriers=problem.q_slots),
            full,
            barriers(num_arrivals=2),
            full,
            barriers(num_arrivals=2),
            plgpu.Barrier(num_arrivals=2),
        ),
        grid=(problem.num_blocks,),
        grid_names=("block",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,  # no reduction crosses warps
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )(*given)
