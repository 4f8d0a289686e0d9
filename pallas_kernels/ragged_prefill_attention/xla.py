"""`ragged_prefill_attention` in plain XLA: the implementation on a CPU, and on a GPU without kernels of its own or on
request.

Static shapes, data-dependent trip counts: loops over rows and tiles of their tokens around one over chunks of the
context.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.paging import Pages, Scores
from pallas_kernels.paging.xla import attend, ceil_div, chunk_on_a_gpu, runs_on_a_gpu

TILE, CHUNK = 64, 128  # measured on CPU with python -m pallas_kernels.bench ragged_prefill_attention
TILE_ON_A_GPU = 256  # not measured: fewer turns, each of which the host waits for


def ragged_prefill_attention_xla(
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
) -> Float[Array, "T H D"]:
    """See `ragged_prefill_attention`."""
    num_tokens = q.shape[0]
    is_on_gpu = runs_on_a_gpu()
    tile = min(TILE_ON_A_GPU if is_on_gpu else TILE, num_tokens)
    chunk = chunk_on_a_gpu(pages, num_rows=1, chunk=CHUNK) if is_on_gpu else CHUNK

    def row(b: Array, out: Array) -> Array:
        start, end, seq_len = query_starts[b], query_starts[b + 1], seq_lens[b]

        def query_tile(i: Array, out: Array) -> Array:
            # The last tile is moved down to fit into the arrays, where it repeats results of the previous tile. Any
            # tile may include tokens of neighbouring rows, which must not be written.
            first = jnp.minimum(start + i * tile, num_tokens - tile)
            token = first + jnp.arange(tile)
            is_own = (token >= start) & (token < end)
            position = jnp.where(is_own, seq_len - end + token, -1)
            result, _ = attend(
                lax.dynamic_slice_in_dim(q, first, tile)[None],
                position[None],
                pages,
                block_tables=block_tables[b][None],
                lens=(jnp.max(position) + 1)[None],
                chunk=chunk,
                scores=scores,
            )
            beside = lax.dynamic_slice_in_dim(out, first, tile)
            result = jnp.where(is_own[:, None, None], result[0].astype(out.dtype), beside)
            return lax.dynamic_update_slice_in_dim(out, result, first, 0)

        return lax.fori_loop(0, ceil_div(end - start, tile), query_tile, out)

    out = jnp.zeros_like(q)
    if before is not None:
        is_before = jnp.arange(num_tokens) < query_starts[jnp.minimum(first_row, num_rows)]
        out = jnp.where(is_before[:, None, None], before, out)
    return lax.fori_loop(first_row, num_rows, row, out)
