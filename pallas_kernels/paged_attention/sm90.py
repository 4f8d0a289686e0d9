"""`paged_attention` for Hopper (sm_90a), in Mosaic GPU: persistent CTAs that each stream their split of all contexts.

A tile is the work for a row's queries of one KV head. A tile that is cut between splits (see `plan`) is combined by the
split with its first block: the others store their partial results in global memory and increment its `arrivals`. It
only waits for splits that were started before it, so the kernel terminates even if not all of them fit onto the GPU at
once.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.device import vectors_of_8_bits
from pallas_kernels.device.swizzled import tiled
from pallas_kernels.hopper import SHARED_MEMORY
from pallas_kernels.paged_attention import device
from pallas_kernels.paged_attention.kernel import Refs, Scratch, compute, copy
from pallas_kernels.paging import Pages, Scores
from pallas_kernels.paging.checks import check_pages
from pallas_kernels.paging.plan import make_plan
from pallas_kernels.paging.tiles import (
    MAX_COLUMNS,
    MAX_COLUMNS_OF_8_BITS,
    MAX_COPIED,
    ROWS,
    Config,
    Problem,
    part_rows,
)

_COMPUTING = {
    (False, 1): 256,
    (False, 2): 216,
    (True, 1): 256,
    (True, 2): 200,
    (True, 3): 104,
}
"""Registers of a computing thread, by whether pages have scales and the number of streams."""


def heuristic(head_dim: int, num_tiles: int) -> Config:
    """Return the first of the configurations, from fast to slow, that fits. `num_tiles` counts those of all rows.

    With two streams, one computes while the other copies. With few tiles, each of which is cut into many parts, fewer
    parts and blocks are better.
    """
    few = ((1, 128, 4), (1, 128, 2)) if num_tiles <= 16 else ()
    for streams, block_kv, stages in (*few, (2, 64, 4), (2, 64, 3), (2, 64, 2), (1, 64, 2)):
        config = Config(block_kv=block_kv, stages=stages, streams=streams)
        if config.shared_memory(head_dim) <= SHARED_MEMORY:
            return config
    raise NotImplementedError(f"head_dim {head_dim} does not fit into shared memory")


def heuristic_of_8_bits(head_dim: int, width: int) -> Config:
    """Return the first of the configurations that fits, for pages of 8 bits and tiles of `width` queries."""
    # Keys of more than 128 numbers take so many registers that only one stream has enough.
    two = ((2, 64, 4), (2, 64, 3), (2, 64, 2)) if head_dim <= 128 else ()
    for streams, block_kv, stages in (*two, (1, 64, 4), (1, 64, 3), (1, 64, 2)):
        config = Config(block_kv=block_kv, stages=stages, streams=streams)
        if config.shared_memory_of_8_bits(head_dim, width) <= SHARED_MEMORY:
            return config
    raise NotImplementedError(f"head_dim {head_dim} does not fit into shared memory")


def heuristic_of_large_heads(head_dim: int, width: int) -> Config:
    """Return the configuration with the most slots, for heads whose queries are not copied and tiles of `width`
    queries.
    """
    for stages in (6, 5, 4, 3, 2):
        config = Config(block_kv=64, stages=stages, streams=1, has_one_ring=True)
        if config.shared_memory_of_one_ring(head_dim, width) <= SHARED_MEMORY:
            return config
    raise NotImplementedError(f"head_dim {head_dim} does not fit into shared memory")


def paged_attention_sm90(
    q: Float[Array, "B Q H D"],
    pages: Pages,
    *,
    block_tables: Int[Array, "B N"],
    seq_lens: Int[Array, " B"],
    scores: Scores,
    room: int,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "R Q H D"], Float[Array, "B Q H"]]:
    """Run the kernel, see `paged_attention`. Raises NotImplementedError for what it does not support.

    `interpret` replaces what the interpreter of `plgpu.force_gpu_interpret_mode` lacks.
    """
    num_rows, num_queries, num_heads, head_dim = q.shape
    num_kv_heads, block_size = pages.k.shape[1:3]
    queries_per_token = num_heads // num_kv_heads
    head_rows = num_queries * queries_per_token
    check_pages(q, pages, num_queries=head_rows)
    tiles_per_head = -(-head_rows // ROWS)
    tile_rows = head_rows if tiles_per_head == 1 else ROWS
    is_large = head_dim > MAX_COPIED
    if is_large:
        tile_rows = part_rows(tile_rows)  # parts are put together where the results are
    has_scales = pages.scales is not None
    most = MAX_COLUMNS_OF_8_BITS if has_scales else MAX_COLUMNS
    step = 8 if tile_rows <= 16 else 16  # as parts are put together
    columns = -(-tile_rows // step) * step if head_dim % 64 == 0 and tile_rows <= most else 0
    width = columns or ROWS
    if config is None:
        num_tiles = num_rows * num_kv_heads * tiles_per_head
        if has_scales:
            config = heuristic_of_8_bits(head_dim, width)
        else:
            config = heuristic_of_large_heads(head_dim, width) if is_large else heuristic(head_dim, num_tiles)
    problem = Problem(
        config=config,
        head_dim=head_dim,
        block_size=block_size,
        num_tiles=num_kv_heads * tiles_per_head,
        tiles_per_head=tiles_per_head,
        tile_rows=tile_rows,
        columns=columns,
        queries_per_token=queries_per_token,
        num_queries=num_queries,
        scale=scores.scale,
        sliding_window=scores.sliding_window,
        soft_cap=scores.soft_cap,
        interpret=interpret,
        has_scales=has_scales,
    )
    plan = make_plan(
        seq_lens,
        jnp.full_like(seq_lens, num_queries),
        num_tiles=problem.num_tiles,
        num_splits=config.num_splits,
        block_kv=config.block_kv,
        sliding_window=scores.sliding_window,
    )
    # [B * K * tile rows, D]; for one query this is q as it is stored.
    tiles = q.reshape(num_rows, num_queries, num_kv_heads, queries_per_token, head_dim).swapaxes(1, 2)
    tiles = tiles.reshape(num_rows * num_kv_heads, head_rows, head_dim)
    padded_rows = tiles_per_head * problem.tile_rows
    tiles = jnp.pad(tiles, ((0, 0), (0, padded_rows - head_rows), (0, 0))).reshape(-1, head_dim)
    tiles = jnp.pad(tiles, ((0, max(0, 4 - tiles.shape[0])), (0, 0)))  # a copy is 4 rows or more

    def by_row(of_heads: Float[Array, " H"] | None) -> Float[Array, "tiles rows"] | None:
        """Return a per-head value for each row of a tile."""
        if of_heads is None:
            return None
        rows = jnp.tile(of_heads.astype(jnp.float32).reshape(num_kv_heads, -1), (1, num_queries))
        rows = jnp.pad(rows, ((0, 0), (0, tiles_per_head * width - head_rows)))
        return rows.reshape(problem.num_tiles, width)

    operands = [tiles, pages.k, pages.v, block_tables, *plan, by_row(scores.sinks)]
    operands += [by_row(scores.alibi_slopes), pages.scales]
    num_out_rows = max(tiles.shape[0], room * num_kv_heads * padded_rows)
    out, lse = _call(problem, num_rows * problem.num_tiles, num_out_rows, q.dtype, operands)

    def by_query(x: Array) -> Array:
        x = x.reshape(-1, num_kv_heads, padded_rows, x.shape[-1])[:, :, :head_rows]
        x = x.reshape(-1, num_kv_heads, num_queries, queries_per_token, x.shape[-1])
        return x.swapaxes(1, 2).reshape(-1, num_queries, num_heads, x.shape[-1])

    lse = lse.reshape(num_rows * num_kv_heads, -1)[:, :padded_rows]
    return by_query(out[: room * num_kv_heads * padded_rows]), by_query(lse[..., None])[..., 0]


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _call(problem, num_items, num_out_rows, dtype, operands):
    """Run the kernel. Jitted, so that the layers of a model use one lowering."""
    config, head_dim = problem.config, problem.head_dim
    multiplied = jnp.float16 if problem.has_scales else dtype
    given, structure = jax.tree.flatten(operands)

    def body(*refs):
        inputs, outputs, shared = refs[: len(given)], refs[len(given) :][:4], refs[len(given) + 4 :]
        gmem = Refs(*structure.unflatten(inputs), *outputs)
        scratch = Scratch(*shared, stream=None)
        warpgroup = lax.axis_index("warpgroup")
        stream = lax.rem(warpgroup, jnp.int32(config.streams))
        own = {"q": scratch.q}
        if problem.copies_queries:
            own |= {"q_in": scratch.q_in, "out": scratch.out}
        if problem.has_scales:
            own |= {"converted": scratch.converted}
        if problem.columns:
            own |= {"weights": scratch.weights, "exchanged": scratch.exchanged}
        scratch = scratch._replace(stream=stream, **{name: ref.at[stream] for name, ref in own.items()})
        if config.has_one_ring:
            scratch = scratch._replace(v=scratch.k, v_full=scratch.k_full, v_free=scratch.k_free)

        def own_split():
            # Started first: those whose parts others wait for.
            return config.num_splits - 1 - (lax.axis_index("cta") * config.streams + stream)

        def computing(split):
            plgpu.set_max_registers(_COMPUTING[problem.has_scales, config.streams], action="increase")
            compute(problem, split, gmem, scratch)

        def copying(split):
            plgpu.set_max_registers(56 if problem.has_scales else 40, action="decrease")
            copy(problem, split, gmem, scratch)

        if problem.num_queries == 1:
            split = own_split()
            pl.when(warpgroup < config.streams)(lambda: computing(split))
            pl.when(warpgroup >= config.streams)(lambda: copying(split))
        else:
            # All blocks are masked, which takes so many registers that a computing warpgroup has none left for a branch
            # after its own.
            lax.cond(warpgroup < config.streams, lambda: computing(own_split()), lambda: copying(own_split()))

    transforms = tiled(head_dim)
    pages_per_block = max(1, config.block_kv // problem.block_size)
    streams, slots = config.streams, config.streams * config.stages
    blocks = plgpu.SMEM((slots, config.block_kv, head_dim), multiplied, transforms=transforms)
    width = problem.columns or ROWS
    rows = plgpu.SMEM((streams, width, head_dim), dtype) if problem.copies_queries else None
    of_queries = plgpu.Barrier(num_barriers=streams) if problem.copies_queries else None
    weights = exchanged = None
    if problem.columns:
        shape = streams, problem.columns, config.block_kv
        weights = plgpu.SMEM(shape, multiplied, transforms=device.SWIZZLED)
        exchanged = plgpu.SMEM((streams, device.EXCHANGED), jnp.float32)
    full = k_full = plgpu.Barrier(num_barriers=slots, num_arrivals=pages_per_block)
    scales = converted = None
    if problem.has_scales:
        blocks = plgpu.SMEM(
            (slots, config.block_kv, head_dim),
            operands[1].dtype,
            transforms=vectors_of_8_bits.transforms(head_dim, itemsize=1),
        )
        rows_per_copy = config.block_kv // pages_per_block
        scales = plgpu.SMEM((slots, pages_per_block, 2, rows_per_copy), jnp.float32)
        converted = plgpu.SMEM((streams, config.block_kv, head_dim), multiplied, transforms=transforms)
        k_full = plgpu.Barrier(num_barriers=slots, num_arrivals=2 * pages_per_block)
    free = plgpu.Barrier(num_barriers=slots)
    scratch = Scratch(
        q_in=rows,
        q=plgpu.SMEM((streams, width, head_dim), multiplied, transforms=transforms),
        k=blocks,
        v=None if config.has_one_ring else blocks,
        out=rows,
        weights=weights,
        exchanged=exchanged,
        scales=scales,
        converted=converted,
        q_full=of_queries,
        q_free=of_queries,
        k_full=k_full,
        k_free=free,
        v_full=None if config.has_one_ring else full,
        v_free=None if config.has_one_ring else free,
        stream=None,
    )
    run = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((num_out_rows, head_dim), dtype),
            jax.ShapeDtypeStruct((num_items, width), jnp.float32),
            jax.ShapeDtypeStruct((2 * config.num_splits, part_rows(problem.tile_rows), head_dim), jnp.float32),
            jax.ShapeDtypeStruct((2 * config.num_splits, 2, max(16, width)), jnp.float32),
        ),
        scratch_types=tuple(scratch)[:-1],
        grid=(config.num_ctas,),
        grid_names=("cta",),
        num_threads=2 * streams,
        thread_name="warpgroup",
        kernel_name="paged_attention",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=128, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )
    out, lse, _, _ = run(*given)
    return out, lse
