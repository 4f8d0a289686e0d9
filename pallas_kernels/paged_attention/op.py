"""The public operations: what every attention layer calls once a step, after it has made q, k and v.

`write_kv` puts this step's keys and values into the pages, `paged_attention` then reads the whole context from there,
so that prefill, chunked prefill and decode are one and the same call.
"""

from typing import Literal, get_args

from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.xla import paged_attention_xla

Implementation = Literal["xla"]


def paged_attention(
    q: Float[Array, "T H D"],
    k_pages: Float[Array, "P K S D"],
    v_pages: Float[Array, "P K S D"],
    *,
    block_tables: Int[Array, "B N"],
    seq_lens: Int[Array, " B"],
    query_starts: Int[Array, " B+1"],
    num_decode_rows: Int[Array, ""],
    num_rows: Int[Array, ""],
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    implementation: Implementation = "xla",
) -> Float[Array, "T H D"]:
    """Causal attention of T tokens of B requests, ragged, over keys and values that lie in pages.

    Row b owns the tokens [query_starts[b], query_starts[b + 1]); the rows with one token come first and are
    `num_decode_rows` many, then the others up to `num_rows`, then padding. Its context are the first `seq_lens[b]`
    positions (this step's tokens included), page `block_tables[b, n]` holding the positions [n * S, (n + 1) * S). Its
    query i stands at position seq_lens[b] - query_len[b] + i and attends to that position and those before it; with a
    `sliding_window` of W to the last W of them only. H is a multiple of K: each run of H // K query heads shares a KV
    head. `scale` multiplies the scores; `soft_cap` c then bends them to c * tanh(score / c).

    Scores and softmax are float32 whatever the dtype of q and the pages; the result has q's dtype. Tokens of no row
    get 0. Pages and positions outside a row's context are never let into its result, whatever they hold (NaN too).
    Cost follows the tokens and contexts in use, not T, B, N or P.

    Heads are local: with a sharded head axis, call it inside `jax.shard_map`. Raises ValueError for an unknown
    implementation, shapes that do not fit together, or a window or cap that is not positive.
    """
    if implementation not in get_args(Implementation):
        known = ", ".join(map(repr, get_args(Implementation)))
        raise ValueError(f"unknown implementation {implementation!r}, there is {known}")
    if q.shape[1] % k_pages.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k_pages.shape[1]} KV heads evenly")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, got {sliding_window}")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap must be positive, got {soft_cap}")
    return paged_attention_xla(
        q,
        k_pages,
        v_pages,
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_starts=query_starts,
        num_decode_rows=num_decode_rows,
        num_rows=num_rows,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )


def write_kv(
    k_pages: Float[Array, "P K S D"],
    v_pages: Float[Array, "P K S D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    write_index: Int[Array, " T"],
) -> tuple[Float[Array, "P K S D"], Float[Array, "P K S D"]]:
    """Write T tokens' keys and values to their places; in place where the caller donates the pages.

    `write_index` is page * S + offset. The indices must all differ, and those of padding tokens be P * S or more:
    these are dropped. Values are cast to the dtype of the pages.
    """
    block_size = k_pages.shape[2]
    page, offset = write_index // block_size, write_index % block_size

    def write(pages: Array, values: Array) -> Array:
        # unique_indices: else XLA orders the writes (on a GPU by compare-and-swap loops).
        target = pages.at[page, :, offset]
        return target.set(values.astype(pages.dtype), mode="drop", unique_indices=True)

    return write(k_pages, k), write(v_pages, v)
