"""`latent_attention` in plain XLA: one KV head of which keys are values too, and the rest of the result dropped."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paging import Pages, Scores
from pallas_kernels.ragged_prefill_attention import ragged_prefill_attention


def latent_attention_xla(
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
) -> Float[Array, "T H R"]:
    """See `latent_attention`."""
    num_tokens, max_rows = q.shape[0], seq_lens.shape[0]
    scores = Scores(scale=scale)
    # Row b of those with one token is token b.
    decodes = slice(0, min(num_tokens, max_rows))
    is_decode = jnp.arange(decodes.stop) < num_decode_rows
    out, _ = paged_attention(
        q[decodes, None],
        pages,
        block_tables=block_tables[decodes],
        seq_lens=jnp.where(is_decode, seq_lens[decodes], 0),
        room=num_tokens,
        scores=scores,
    )
    if not is_decode_only and num_tokens > 1:
        out = ragged_prefill_attention(
            q,
            pages,
            out[:, 0],
            block_tables=block_tables,
            seq_lens=seq_lens,
            query_starts=query_starts,
            first_row=num_decode_rows,
            num_rows=num_rows,
            scores=scores,
        )
        return out[..., :latent_size]
    return out[:, 0, :, :latent_size]
