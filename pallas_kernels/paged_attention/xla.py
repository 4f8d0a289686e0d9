"""`paged_attention` in plain XLA: the implementation on a CPU, and on a GPU without kernels of its own or on request.

Static shapes, data-dependent trip counts: a loop over groups of rows around one over chunks of their contexts.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.paging import Pages, Scores
from pallas_kernels.paging.xla import attend, ceil_div, chunk_on_a_gpu, runs_on_a_gpu

# Measured on CPU with python -m pallas_kernels.bench paged_attention. The rows of a group divide the overhead per
# chunk, but a group runs as long as its longest row.
GROUP, CHUNK = 4, 128


def paged_attention_xla(
    q: Float[Array, "B Q H D"],
    pages: Pages,
    *,
    block_tables: Int[Array, "B N"],
    seq_lens: Int[Array, " B"],
    scores: Scores,
    room: int,
) -> tuple[Float[Array, "R Q H D"], Float[Array, "B Q H"]]:
    """See `paged_attention`."""
    num_rows, num_queries = q.shape[:2]
    # Fewer turns of loops on a GPU: all rows at once.
    is_on_gpu = runs_on_a_gpu()
    group = num_rows if is_on_gpu else min(GROUP, num_rows)
    chunk = chunk_on_a_gpu(pages, num_rows=num_rows, chunk=CHUNK) if is_on_gpu else CHUNK
    positions = (seq_lens - num_queries)[:, None] + jnp.arange(num_queries)[None]
    positions = jnp.where((seq_lens > 0)[:, None], positions, -1)

    def row_group(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        # The last group is moved down to fit into the arrays; the rows that also belong to the previous group get the
        # same result twice.
        first = jnp.minimum(i * group, num_rows - group)
        result = attend(
            lax.dynamic_slice_in_dim(q, first, group),
            lax.dynamic_slice_in_dim(positions, first, group),
            pages,
            block_tables=lax.dynamic_slice_in_dim(block_tables, first, group),
            lens=lax.dynamic_slice_in_dim(seq_lens, first, group),
            chunk=chunk,
            scores=scores,
        )
        out, lse = (
            lax.dynamic_update_slice_in_dim(whole, part.astype(whole.dtype), first, 0)
            for whole, part in zip(carry, result, strict=True)
        )
        return out, lse

    nothing = jnp.zeros_like(q), jnp.full_like(q, -jnp.inf, dtype=jnp.float32)[..., 0]
    if is_on_gpu:
        out, lse = row_group(jnp.int32(0), nothing)
    else:
        in_use = jnp.max(jnp.where(seq_lens > 0, jnp.arange(1, num_rows + 1), 0))
        out, lse = lax.fori_loop(0, ceil_div(in_use, group), row_group, nothing)
    return jnp.pad(out, ((0, room - num_rows), (0, 0), (0, 0), (0, 0))), lse
