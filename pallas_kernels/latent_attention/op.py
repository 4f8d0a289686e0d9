"""The public operation: a latent attention layer calls it after `kv_write` has stored the step's latents and keys."""

from jaxtyping import Array, Float, Int

from pallas_kernels.implementation import Implementation, check_implementation
from pallas_kernels.latent_attention.sm90 import latent_attention_sm90
from pallas_kernels.latent_attention.xla import latent_attention_xla
from pallas_kernels.paging import Pages


def latent_attention(
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
    is_decode_only: bool = False,
    implementation: Implementation = "xla",
) -> Float[Array, "T H R"]:
    """Compute causal attention of T tokens of B sequences, ragged, over vectors that are keys and, in part, values.

    For each position, pages hold one vector for all heads, as `k` and as `v`: a latent of size `latent_size` R, then
    the rotated key. The whole vector is the position's key, the latent alone its value; queries are absorbed
    accordingly (Liu et al. 2024, arXiv:2405.04434). Row b owns the tokens [query_starts[b], query_starts[b + 1]): the
    first `num_decode_rows` rows have one token each, followed by others up to `num_rows`. A row's context is its first
    `seq_lens[b]` positions (this step's tokens included), with page `block_tables[b, n]` holding the positions [n * S,
    (n + 1) * S). Its query i has position seq_lens[b] - query_len[b] + i and attends to that position and those before
    it; `scale` multiplies the scores. `is_decode_only`: T is B, and no row has more than one token.

    Scores and softmax are float32 whatever the dtype of q and the pages; the result has q's dtype. Tokens of no row get
    0. Pages and positions outside a row's context never affect its result, whatever they contain (NaN too). Cost
    follows the tokens and contexts in use, not T, B, N or P.

    Heads are local: with a sharded head axis, call it inside `jax.shard_map`. Raises ValueError for an unknown
    implementation or a latent that is not part of the vectors; NotImplementedError for dtypes and shapes that "sm90",
    the kernel for Hopper GPUs, does not support.
    """
    check_implementation(implementation)
    if not 0 < latent_size <= q.shape[2]:
        raise ValueError(
            f"latent_size must be from 1 to {q.shape[2]}, the size of a position's vector, got {latent_size}"
        )
    run = {"xla": latent_attention_xla, "sm90": latent_attention_sm90}[implementation]
    return run(
        q,
        pages,
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_starts=query_starts,
        num_decode_rows=num_decode_rows,
        num_rows=num_rows,
        latent_size=latent_size,
        scale=scale,
        is_decode_only=is_decode_only,
    )
