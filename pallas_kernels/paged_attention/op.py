"""The public operation: attention of decoding rows, after `kv_write` has stored their keys and values.

Rows with longer chunks use `ragged_prefill_attention`.
"""

from jaxtyping import Array, Float, Int

from pallas_kernels.implementation import Implementation, check_implementation
from pallas_kernels.paged_attention.sm90 import paged_attention_sm90
from pallas_kernels.paged_attention.xla import paged_attention_xla
from pallas_kernels.paging import Pages, Scores


def paged_attention(
    q: Float[Array, "B Q H D"],
    pages: Pages,
    *,
    block_tables: Int[Array, "B N"],
    seq_lens: Int[Array, " B"],
    scores: Scores,
    room: int | None = None,
    implementation: Implementation = "xla",
) -> tuple[Float[Array, "R Q H D"], Float[Array, "B Q H"]]:
    """Compute causal attention of the last tokens of B sequences over keys and values in pages.

    The context of row b is its first `seq_lens[b]` positions (this step's tokens included), with page `block_tables[b,
    n]` holding the positions [n * S, (n + 1) * S). The last of its Q queries is at position seq_lens[b] - 1; each
    attends to its position and those before it, as far as `scores` says. H is a multiple of K: each run of H // K query
    heads uses the same KV head.

    Returns the attention in q's dtype, and the logarithm of the softmax's denominator (LSE) in float32, by which
    results over parts of a context can be combined. Scores and softmax are float32 whatever the dtype of q and the
    pages. Rows with sequence length 0 get 0 and -inf. With a `room` of
    R, at least B, the result has R - B undefined rows after those, into which other results may be written; otherwise R
    is B. Pages and positions outside a row's context never affect its result, whatever they contain (NaN too). Cost
    follows the contexts in use, not B, N or P.

    Heads are local: with a sharded head axis, call it inside `jax.shard_map`. Raises ValueError for an unknown
    implementation, shapes that do not match, too little room, or a window or cap that is not positive;
    NotImplementedError for dtypes and shapes that "sm90", the kernel for Hopper GPUs, does not support.
    """
    check_implementation(implementation)
    if room is not None and room < q.shape[0]:
        raise ValueError(f"room must be {q.shape[0]} or more, the number of rows, got {room}")
    scores.check(num_heads=q.shape[2], num_kv_heads=pages.k.shape[1])
    room = q.shape[0] if room is None else room
    run = {"xla": paged_attention_xla, "sm90": paged_attention_sm90}[implementation]
    return run(
        q,
        pages,
        block_tables=block_tables,
        seq_lens=seq_lens,
        scores=scores,
        room=room,
    )
