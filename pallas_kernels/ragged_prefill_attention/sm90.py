"""`ragged_prefill_attention` for Hopper (sm_90a), in Mosaic GPU: FlashAttention-3 over pages, in persistent CTAs.

As in Shah et al. 2024, "FlashAttention-3" (arXiv:2407.08608), one warpgroup copies queries and pages into shared
memory, and two compute. A computing warpgroup starts the scores of its next keys together with the product of its
current weights and their values, and computes the softmax of the scores while the product continues.

A tile is 64 tokens of two query heads with the same KV head, one for each computing warpgroup, or 128 tokens of one
head if a KV head has an odd number of query heads. Each CTA takes its part of the plan's tiles, and copies for the next
tile while it finishes the last. Keys are processed from the last block of a tile's context to the first, so that masked
blocks come first.

Heads of more than 256 have the same tiles, of which each CTA of a pair has the part that a computing warpgroup has
else: see wide_kernel.py.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.device import vectors_of_8_bits
from pallas_kernels.device.swizzled import tiled, views
from pallas_kernels.hopper import NUM_SMS, SHARED_MEMORY
from pallas_kernels.paging import MAX_HEAD_DIM, Pages, Scores
from pallas_kernels.paging.checks import check_prompts
from pallas_kernels.ragged_prefill_attention import wide_kernel
from pallas_kernels.ragged_prefill_attention.plan import plan
from pallas_kernels.ragged_prefill_attention.sm90_kernel import ROWS, Global, Problem, Shared, Tile, kernel
from pallas_kernels.ragged_prefill_attention.xla import ragged_prefill_attention_xla

FEWEST_TOKENS_TO_CONVERT_FOR = 1024
"""With fewer, a second call for rows that have no room takes longer than tiles take to convert pages."""

CONVERTED_PER_TOKEN = 4
"""Room for converted pages, in tokens of contexts for each token of a step: a quarter of them are a step's own at the
end of a prompt of four chunks.
"""

FEWEST_CONVERTED_FOR_LARGE_HEADS = 8192
"""Room for converted pages of heads of more than 256, in tokens, at least: XLA attends for rows that have none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the kernel divides its work; `heuristic` picks one."""

    block_kv: int
    """Keys a step: 64 or 128."""
    k_stages: int
    """Blocks of keys in shared memory."""
    v_stages: int
    """Blocks of values in shared memory."""
    q_slots: int
    """Tiles whose queries are in shared memory: with 2 the next tile's are copied while one is computed."""
    num_ctas: int = NUM_SMS
    """Number of CTAs."""

    def shared_memory(self, head_dim: int) -> int:
        """Return the shared memory of a CTA in bytes."""
        blocks = (self.k_stages + self.v_stages) * self.block_kv
        if head_dim <= MAX_HEAD_DIM:
            return (self.q_slots * 2 * ROWS + blocks) * head_dim * 2
        weights = ROWS * (2 * self.block_kv + 4)
        return (self.q_slots * ROWS + blocks) * head_dim * 2 + weights + 1024

    def shared_memory_of_8_bits(self, head_dim: int) -> int:
        """Return the shared memory of a CTA in bytes for pages of 8 bits, of which a block each is converted."""
        return self.shared_memory(head_dim) + 2 * self.block_kv * (head_dim + 8) + 1024


def heuristic(head_dim: int, *, has_scales: bool = False) -> Config:
    """Return the first of the configurations, from fast to slow, that fits."""
    if head_dim > MAX_HEAD_DIM:
        stages = (2, 1) if head_dim <= 384 else (1, 1)
        return Config(block_kv=wide_kernel.BLOCK_KV, k_stages=stages[0], v_stages=stages[1], q_slots=1)
    for block_kv, k_stages, v_stages, q_slots in (
        (128, 4, 4, 2),
        (128, 3, 3, 2),
        (128, 3, 2, 2),
        *([(128, 2, 2, 2)] if has_scales else []),
        (64, 3, 2, 2),
        (64, 3, 2, 1),
        *([(64, 2, 2, 1)] if has_scales else []),
    ):
        config = Config(block_kv=block_kv, k_stages=k_stages, v_stages=v_stages, q_slots=q_slots)
        needed = config.shared_memory_of_8_bits(head_dim) if has_scales else config.shared_memory(head_dim)
        if needed <= SHARED_MEMORY:
            return config
    raise NotImplementedError(f"head_dim {head_dim} does not fit into shared memory")


def ragged_prefill_attention_sm90(
    q: Float[Array, "T H D"],
    pages: Pages,
    before: Float[Array, "T H D"] | None,
    *,
    block_tables: Int[Array, "B N"],
    seq_lens: Int[Array, " B"],
    query_starts: Int[Array, " B+1"],
    first_row: Int[Array, ""],
    num_rows: Int[Array, ""],
    scores: Scores,
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "T H D"]:
    """Run the kernel, see `ragged_prefill_attention`. Raises NotImplementedError for what it does not support.

    A tile converts pages of 8 bits block by block, which takes as long as all the rest: with many tokens the pages of
    the first rows, as many as there is room for, are converted once instead. With heads of more than 256 tiles convert
    none, and XLA attends for rows without room. `interpret` replaces what the interpreter of
    `plgpu.force_gpu_interpret_mode` lacks.
    """
    of_rows: dict[str, Any] = {"seq_lens": seq_lens, "query_starts": query_starts, "scores": scores}
    run = functools.partial(_attend, **of_rows, config=config, interpret=interpret)
    run_on_8_bits, room = run, CONVERTED_PER_TOKEN * len(q)
    if q.shape[2] > MAX_HEAD_DIM:
        run_on_8_bits = functools.partial(ragged_prefill_attention_xla, **of_rows)
        room = max(room, FEWEST_CONVERTED_FOR_LARGE_HEADS)
    elif len(q) < FEWEST_TOKENS_TO_CONVERT_FOR:
        room = 0
    if pages.scales is None or room == 0:
        return run(q, pages, before, block_tables=block_tables, first_row=first_row, num_rows=num_rows)
    check_prompts(q, pages)
    converted, tables, end = _converted(pages, q.dtype, block_tables, seq_lens, first_row, num_rows, num_tokens=room)
    out = run(q, converted, before, block_tables=tables, first_row=first_row, num_rows=end)
    return run_on_8_bits(q, pages, out, block_tables=block_tables, first_row=end, num_rows=num_rows)


def _converted(
    pages: Pages,
    dtype: jnp.dtype,
    block_tables: Int[Array, "B N"],
    seq_lens: Int[Array, " B"],
    first_row: Int[Array, ""],
    num_rows: Int[Array, ""],
    *,
    num_tokens: int,
) -> tuple[Pages, Int[Array, "B N"], Int[Array, ""]]:
    """Return pages of 16 bits with the contexts of rows from `first_row` on, up to `num_tokens` in whole pages, tables
    of them, and the row after the last one that is there.
    """
    assert pages.scales is not None
    num_pages, _, size, _ = pages.k.shape
    capacity = -(-num_tokens // size)
    row = jnp.arange(len(seq_lens), dtype=jnp.int32)
    counts = jnp.where((row >= first_row) & (row < num_rows), -(-seq_lens // size), 0)
    until = jnp.cumsum(counts)
    end = jnp.sum((row < num_rows) & (until <= capacity), dtype=jnp.int32)
    begin = until - counts
    place = jnp.arange(capacity, dtype=jnp.int32)
    owner = jnp.minimum(jnp.sum(until[None] <= place[:, None], axis=1, dtype=jnp.int32), len(seq_lens) - 1)
    column = jnp.clip(place - begin[owner], 0, block_tables.shape[1] - 1)
    of = jnp.clip(block_tables[owner, column], 0, num_pages - 1)
    scales = pages.scales[of][..., None]  # [capacity, K, kinds, S, 1]
    k, v = (
        (pool[of].astype(jnp.float32) * scales[:, :, kind]).astype(dtype)
        for kind, pool in enumerate((pages.k, pages.v))
    )
    columns = jnp.arange(block_tables.shape[1], dtype=jnp.int32)
    tables = jnp.minimum(begin[:, None] + columns[None], capacity - 1)
    return Pages(k, v), tables, end


def _attend(
    q: Float[Array, "T H D"],
    pages: Pages,
    before: Float[Array, "T H D"] | None,
    *,
    block_tables: Int[Array, "B N"],
    seq_lens: Int[Array, " B"],
    query_starts: Int[Array, " B+1"],
    first_row: Int[Array, ""],
    num_rows: Int[Array, ""],
    scores: Scores,
    config: Config | None,
    interpret: bool,
) -> Float[Array, "T H D"]:
    check_prompts(q, pages)
    if scores.scale <= 0:
        raise NotImplementedError(f"scale must be positive, got {scores.scale}")
    num_tokens, num_heads, head_dim = q.shape
    has_scales = pages.scales is not None
    config = config or heuristic(head_dim, has_scales=has_scales)
    problem = Problem(
        num_heads=num_heads,
        num_kv_heads=pages.k.shape[1],
        head_dim=head_dim,
        block_size=pages.k.shape[2],
        block_kv=config.block_kv,
        k_stages=config.k_stages,
        v_stages=config.v_stages,
        q_slots=config.q_slots,
        num_ctas=config.num_ctas,
        scale=scores.scale,
        sliding_window=scores.sliding_window,
        soft_cap=scores.soft_cap,
        interpret=interpret,
        has_scales=has_scales,
    )
    tiles = plan(
        seq_lens,
        query_starts,
        first_row=first_row,
        num_rows=num_rows,
        num_tokens=num_tokens,
        tile_size=problem.tile_size,
    )
    if before is None:
        before = jnp.zeros_like(q)
    # A copy takes that many tokens at least.
    q = jnp.pad(q, ((0, max(0, ROWS - num_tokens)), (0, 0), (0, 0)))
    operands = q, pages.k, pages.v, block_tables, jnp.stack(tiles[:-1]), tiles.num_tiles
    operands += scores.sinks, scores.alibi_slopes, pages.scales, before
    return _call(Global(*operands), problem=problem)


# Jitted, so that the layers of a model use one trace and one compilation.
@functools.partial(jax.jit, static_argnames="problem")
def _call(gmem: Global, *, problem: Problem) -> Float[Array, "T H D"]:
    out_ref = jax.new_ref(gmem.out)  # changed in place by the kernel
    given, structure = jax.tree.flatten(gmem._replace(out=out_ref))
    run: Any = kernel
    shared: Any = Shared
    launch: dict[str, Any] = {
        "scratch_types": _scratch(gmem, problem),
        "grid": (problem.num_ctas,),
        "grid_names": ("cta",),
    }
    if problem.head_dim > MAX_HEAD_DIM:
        run, shared = wide_kernel.kernel, wide_kernel.Shared
        launch = {
            "scratch_types": _wide_scratch(gmem, problem),
            "grid": (problem.num_ctas // wide_kernel.CLUSTER,),
            "grid_names": ("pair",),
            "cluster": (wide_kernel.CLUSTER,),
            "cluster_names": ("rank",),
        }

    def body(*refs):
        refs, (queries, q_boxes), *others = refs[: len(given)], *refs[len(given) :]
        others += [None] * (len(shared._fields) - 2 - len(others))
        if problem.interpret:  # in which views do not alias
            q_boxes = queries
        run(problem, structure.unflatten(refs), shared(queries, q_boxes, *others))

    plgpu.kernel(
        body,
        kernel_name="ragged_prefill_attention",
        out_type=(),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,  # no reduction crosses warps
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,
        ),
        **launch,
    )(*given)
    return jax.freeze(out_ref)


def _scratch(gmem: Global, problem: Problem) -> tuple[Any, ...]:
    """Return the arrays and barriers of `Shared`."""
    head_dim, dtype = problem.head_dim, gmem.q.dtype
    transforms = tiled(head_dim)
    columns = transforms[1].swizzle // 2
    num_parts = head_dim // columns
    num_pages = max(1, problem.block_kv // problem.block_size)

    def array(*shape):
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    staged = ()
    if problem.has_scales:
        by_bytes = vectors_of_8_bits.transforms(head_dim, itemsize=1)
        staged = (
            plgpu.SMEM((2, problem.block_kv, head_dim), gmem.k_pages.dtype, transforms=by_bytes),
            plgpu.SMEM((2, num_pages, 2, problem.block_kv // num_pages), jnp.float32),
            plgpu.Barrier(num_arrivals=2 * num_pages),
            plgpu.Barrier(num_arrivals=num_pages),
        )
    return (
        views(problem.q_slots, 2, num_parts, ROWS, columns, dtype=dtype),
        plgpu.SMEM((problem.q_slots, len(Tile._fields)), jnp.int32),
        array(problem.k_stages, problem.block_kv, head_dim),
        array(problem.v_stages, problem.block_kv, head_dim),
        _barriers(2 * num_parts + 1, problem.q_slots),
        _barriers(2, problem.q_slots),
        _barriers(1 if problem.has_scales else num_pages, problem.k_stages),
        _barriers(2, problem.k_stages),
        _barriers(1 if problem.has_scales else num_pages, problem.v_stages),
        _barriers(2, problem.v_stages),
        plgpu.Barrier(num_arrivals=2),
        *staged,
    )


def _wide_scratch(gmem: Global, problem: Problem) -> tuple[Any, ...]:
    """Return the arrays and barriers of `wide_kernel.Shared`."""
    halves, dtype = wide_kernel.HALVES, gmem.q.dtype
    half_size = problem.head_dim // halves
    transforms = tiled(half_size)
    columns = transforms[1].swizzle // 2
    num_parts = problem.head_dim // columns
    num_pages = max(1, problem.block_kv // problem.block_size)

    def blocks(stages: int):
        return plgpu.SMEM((halves * stages, problem.block_kv, half_size), dtype, transforms=transforms)

    def full_and_free(stages: int):
        free = plgpu.ClusterBarrier(collective_axes=("rank",), num_barriers=halves * stages, num_arrivals=1)
        return _barriers(num_pages, halves * stages), free

    return (
        views(1, num_parts, ROWS, columns, dtype=dtype),
        plgpu.SMEM((2, len(Tile._fields)), jnp.int32),
        blocks(problem.k_stages),
        blocks(problem.v_stages),
        plgpu.SMEM((ROWS, problem.block_kv), dtype, transforms=tiled(problem.block_kv)),
        plgpu.SMEM((ROWS,), jnp.float32),
        plgpu.Barrier(num_arrivals=num_parts + 1),
        plgpu.Barrier(num_arrivals=2),
        *full_and_free(problem.k_stages),
        *full_and_free(problem.v_stages),
        plgpu.Barrier(),
        plgpu.Barrier(),
    )


def _barriers(num_arrivals: int, num_barriers: int) -> Any:
    return plgpu.Barrier(num_arrivals=num_arrivals, num_barriers=num_barriers)
