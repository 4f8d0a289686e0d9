"""The public operation: attention of rows with chunks of a prompt, after `kv_write` has stored their keys and values.

Rows with one token or a few use `paged_attention`.
"""

from jaxtyping import Array, Float, Int

from pallas_kernels.implementation import Implementation, check_implementation
from pallas_kernels.paging import Pages, Scores
from pallas_kernels.ragged_prefill_attention.sm90 import ragged_prefill_attention_sm90
from pallas_kernels.ragged_prefill_attention.xla import ragged_prefill_attention_xla


def ragged_prefill_attention(
    q: Float[Array, "T H D"],
    pages: Pages,
    before: Float[Array, "T H D"] | None = None,
    *,
    block_tables: Int[Array, "B N"],
    seq_lens: Int[Array, " B"],
    query_starts: Int[Array, " B+1"],
    first_row: Int[Array, ""],
    num_rows: Int[Array, ""],
    scores: Scores,
    implementation: Implementation = "xla",
) -> Float[Array, "T H D"]:
    """Compute causal attention of T tokens of B sequences, ragged, over keys and values in pages.

    Row b owns the tokens [query_starts[b], query_starts[b + 1]); only the rows [first_row, num_rows) are computed. Its
    context is the first `seq_lens[b]` positions (this step's tokens included), with page `block_tables[b, n]` holding
    the positions [n * S, (n + 1) * S). Its query i has position seq_lens[b] - query_len[b] + i and attends to that
    position and those before it, as far as `scores` says. H is a multiple of K: each run of H // K query heads uses the
    same KV head.

    Scores and softmax are float32 whatever the dtype of q and the pages; the result has q's dtype. Tokens before those
    rows get the results in `before`, 0 if it is None; "sm90" writes the others into that array, in place if nothing
    else reads it afterwards, so that none is copied. Tokens after the rows get 0. Pages and positions outside a row's
    context never affect its result, whatever they contain (NaN too). Cost follows the tokens and contexts in use, not
    T, B, N or P.

    Heads are local: with a sharded head axis, call it inside `jax.shard_map`. Raises ValueError for an unknown
    implementation, shapes that do not match, or a window or cap that is not positive; NotImplementedError for dtypes
    and shapes that "sm90", the kernel for Hopper GPUs, does not support.
    """
    check_implementation(implementation)
    if before is not None and (before.shape, before.dtype) != (q.shape, q.dtype):
        raise ValueError(f"before must be like q, {q.dtype}{list(q.shape)}, got {before.dtype}{list(before.shape)}")
    scores.check(num_heads=q.shape[1], num_kv_heads=pages.k.shape[1])
    run = {"xla": ragged_prefill_attention_xla, "sm90": ragged_prefill_attention_sm90}[implementation]
    return run(
        q,
        pages,
        before,
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_starts=query_starts,
        first_row=first_row,
        num_rows=num_rows,
        scores=scores,
    )
