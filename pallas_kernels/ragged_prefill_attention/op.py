"""The public operation: what an attention layer calls for the rows with chunks of a prompt, after `kv_write` has stored
their keys and values; rows with a token or a few go to `paged_attention`.
"""

from typing import Literal, get_args

from jaxtyping import Array, Float, Int

from pallas_kernels.paging.checks import check_attention
from pallas_kernels.ragged_prefill_attention.sm90 import ragged_prefill_attention_sm90
from pallas_kernels.ragged_prefill_attention.xla import ragged_prefill_attention_xla

Implementation = Literal["xla", "sm90"]


def ragged_prefill_attention(
    q: Float[Array, "T H D"],
    k_pages: Float[Array, "P K S D"],
    v_pages: Float[Array, "P K S D"],
    before: Float[Array, "T H D"] | None = None,
    *,
    block_tables: Int[Array, "B N"],
    seq_lens: Int[Array, " B"],
    query_starts: Int[Array, " B+1"],
    first_row: Int[Array, ""],
    num_rows: Int[Array, ""],
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    alibi_slopes: Float[Array, " H"] | None = None,
    implementation: Implementation = "xla",
) -> Float[Array, "T H D"]:
    """Causal attention of T tokens of B sequences, ragged, over keys and values that lie in pages.

    Row b owns the tokens [query_starts[b], query_starts[b + 1]); only the rows [first_row, num_rows) are computed. Its
    context are the first `seq_lens[b]` positions (this step's tokens included), page `block_tables[b, n]` holding the
    positions [n * S, (n + 1) * S). Its query i stands at position seq_lens[b] - query_len[b] + i and attends to that
    position and those before it; with a `sliding_window` of W to the last W of them only. H is a multiple of K: each
    run of H // K query heads shares a KV head. `scale` multiplies the scores; `soft_cap` c then bends them to
    c * tanh(score / c); of `alibi_slopes`, one a head, the head's slope times (key's position - query's position) is
    added to that (ALiBi, Press et al. 2021, arXiv:2108.12409). `sinks` are logits, one a head, that join the softmax's
    denominator and nothing else (Xiao et al. 2023, arXiv:2309.17453, as in gpt-oss).

    Scores and softmax are float32 whatever the dtype of q and the pages; the result has q's dtype. Tokens before those
    rows have the results in `before`, 0 if it is None; "sm90" writes the others into that array, in place where nothing
    else reads it afterwards, so that none is copied. Tokens behind the rows get 0. Pages and positions outside a row's
    context are never let into its result, whatever they hold (NaN too). Cost follows the tokens and contexts in use,
    not T, B, N or P.

    Heads are local: with a sharded head axis, call it inside `jax.shard_map`. Raises ValueError for an unknown
    implementation, shapes that do not fit together, or a window or cap that is not positive; NotImplementedError for
    dtypes and shapes that "sm90", the kernel for Hopper GPUs, cannot do.
    """
    if implementation not in get_args(Implementation):
        known = ", ".join(map(repr, get_args(Implementation)))
        raise ValueError(f"unknown implementation {implementation!r}, there is {known}")
    if before is not None and (before.shape, before.dtype) != (q.shape, q.dtype):
        raise ValueError(f"before must be like q, {q.dtype}{list(q.shape)}, got {before.dtype}{list(before.shape)}")
    check_attention(
        num_heads=q.shape[1],
        num_kv_heads=k_pages.shape[1],
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
    )
    run = {"xla": ragged_prefill_attention_xla, "sm90": ragged_prefill_attention_sm90}[implementation]
    return run(
        q,
        k_pages,
        v_pages,
        before,
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_starts=query_starts,
        first_row=first_row,
        num_rows=num_rows,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
    )
