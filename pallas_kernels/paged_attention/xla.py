"""Paged attention in plain XLA: what runs on a CPU, and on a GPU if asked for by name.

Static shapes, data-dependent trip counts: loops over groups of decode rows and over tiles of the other rows' tokens,
each with an inner loop over chunks of the context that keeps a running softmax (Milakov and Gimelshein 2018, "Online
normalizer calculation for softmax"). So the cost follows the tokens and contexts in use.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

# Measured on CPU with python -m pallas_kernels.bench paged_attention. A group shares the overhead of a chunk's visit
# among its rows, but runs as long as its longest row.
DECODE_GROUP, DECODE_CHUNK = 4, 128
PREFILL_TILE, PREFILL_CHUNK = 64, 128

# Finite: a row whose chunk is masked as a whole gives exp(0), not exp(-inf + inf) = NaN. What such a chunk adds is
# finite, and exp(MASKED - maximum) = 0 takes it away again with the first chunk that has something to attend to.
MASKED = -1e30

EXACT = lax.Precision.HIGHEST  # on a GPU the default would round float32 factors to 10 bits


class _Scores(NamedTuple):
    """How a score comes from a dot product."""

    scale: float
    sliding_window: int | None
    soft_cap: float | None


def paged_attention_xla(
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
    sliding_window: int | None,
    soft_cap: float | None,
) -> Float[Array, "T H D"]:
    """See `paged_attention`."""
    scores = _Scores(scale, sliding_window, soft_cap)
    num_tokens = q.shape[0]
    max_decode_rows = min(num_tokens, seq_lens.shape[0])
    group = min(DECODE_GROUP, max_decode_rows)

    def decode_group(i: Array, out: Array) -> Array:
        # Decode rows are the first and have one token each: row b is token b. The last group of the arrays is moved
        # down to fit into them; the rows it shares with the group before get the same result twice.
        first = jnp.minimum(i * group, max_decode_rows - group)
        row = first + jnp.arange(group)
        lens = jnp.where(row < num_decode_rows, lax.dynamic_slice_in_dim(seq_lens, first, group), 0)
        result = _attend(
            lax.dynamic_slice_in_dim(q, first, group)[:, None],
            (lens - 1)[:, None],
            k_pages,
            v_pages,
            block_tables=lax.dynamic_slice_in_dim(block_tables, first, group),
            lens=lens,
            chunk=DECODE_CHUNK,
            scores=scores,
        )
        return lax.dynamic_update_slice_in_dim(out, result[:, 0].astype(out.dtype), first, 0)

    tile = min(PREFILL_TILE, num_tokens)

    def prefill_row(b: Array, out: Array) -> Array:
        start, end, seq_len = query_starts[b], query_starts[b + 1], seq_lens[b]

        def query_tile(i: Array, out: Array) -> Array:
            # As above; here the tile may also reach into the tokens of the rows beside, which must not be written.
            first = jnp.minimum(start + i * tile, num_tokens - tile)
            token = first + jnp.arange(tile)
            is_own = (token >= start) & (token < end)
            position = jnp.where(is_own, seq_len - end + token, -1)
            result = _attend(
                lax.dynamic_slice_in_dim(q, first, tile)[None],
                position[None],
                k_pages,
                v_pages,
                block_tables=block_tables[b][None],
                lens=(jnp.max(position) + 1)[None],
                chunk=PREFILL_CHUNK,
                scores=scores,
            )
            beside = lax.dynamic_slice_in_dim(out, first, tile)
            result = jnp.where(is_own[:, None, None], result[0].astype(out.dtype), beside)
            return lax.dynamic_update_slice_in_dim(out, result, first, 0)

        return lax.fori_loop(0, _ceil_div(end - start, tile), query_tile, out)

    out = lax.fori_loop(0, _ceil_div(num_decode_rows, group), decode_group, jnp.zeros_like(q))
    if num_tokens == 1:  # no row can have more
        return out
    return lax.fori_loop(num_decode_rows, num_rows, prefill_row, out)


def _attend(
    q: Float[Array, "G Q H D"],
    positions: Int[Array, "G Q"],
    k_pages: Float[Array, "P K S D"],
    v_pages: Float[Array, "P K S D"],
    *,
    block_tables: Int[Array, "G N"],
    lens: Int[Array, " G"],
    chunk: int,
    scores: _Scores,
) -> Float[Array, "G Q H D"]:
    """Q queries of each of G rows against the first `lens` positions of their contexts; float32.

    A query at position -1 attends to nothing and gets 0.
    """
    num_kv_heads, block_size = k_pages.shape[1:3]
    group, num_queries, num_heads, head_dim = q.shape
    pages_per_chunk = max(1, chunk // block_size)
    chunk = pages_per_chunk * block_size
    # The queries that share a KV head become rows of one matrix product.
    q = q.astype(jnp.float32) * scores.scale
    q = q.reshape(group, num_queries, num_kv_heads, -1, head_dim).transpose(0, 2, 1, 3, 4)
    q = q.reshape(group, num_kv_heads, -1, head_dim)
    position = jnp.repeat(positions, num_heads // num_kv_heads, axis=1)[:, None, :, None]

    def visit(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        maximum, total, acc = carry
        column = jnp.minimum(i * pages_per_chunk + jnp.arange(pages_per_chunk), block_tables.shape[1] - 1)
        pages = jnp.take(block_tables, column, axis=1, mode="clip")
        key_position = i * chunk + jnp.arange(chunk)
        logits = jnp.einsum("gkqd,gkcd->gkqc", q, _gather(k_pages, pages), precision=EXACT)
        if scores.soft_cap is not None:
            logits = scores.soft_cap * jnp.tanh(logits / scores.soft_cap)
        logits = jnp.where(_may_attend(position, key_position, scores.sliding_window), logits, MASKED)
        new_maximum = jnp.maximum(maximum, jnp.max(logits, axis=-1, keepdims=True))
        weights = jnp.exp(logits - new_maximum)
        keep = jnp.exp(maximum - new_maximum)
        # Whatever lies past the context may be NaN, which a weight of 0 would not take away.
        is_held = (key_position[None] < lens[:, None])[:, None, :, None]
        values = jnp.where(is_held, _gather(v_pages, pages), 0.0)
        acc = acc * keep + jnp.einsum("gkqc,gkcd->gkqd", weights, values, precision=EXACT)
        return new_maximum, total * keep + jnp.sum(weights, axis=-1, keepdims=True), acc

    # Made from q, so that inside shard_map they vary over the same mesh axes as what the loop makes of them.
    zeros = jnp.zeros_like(q)
    first, last = jnp.int32(0), _ceil_div(jnp.max(lens), chunk)
    if scores.sliding_window is not None:
        oldest = jnp.min(jnp.where(positions < 0, jnp.iinfo(jnp.int32).max, positions)) - scores.sliding_window + 1
        first = jnp.maximum(oldest, 0) // chunk
    _, total, acc = lax.fori_loop(first, last, visit, (zeros[..., :1] + MASKED, zeros[..., :1], zeros))
    # A query at -1 has summed masked weights over values of other queries. Any other attends to itself at least, so its
    # total is not 0; a NaN in its context goes on into its result, for the engine to see.
    acc = jnp.where(position >= 0, acc / total, 0.0)
    acc = acc.reshape(group, num_kv_heads, num_queries, -1, head_dim).transpose(0, 2, 1, 3, 4)
    return acc.reshape(group, num_queries, num_heads, head_dim)


def _may_attend(
    position: Int[Array, "G 1 Q 1"], key_position: Int[Array, " C"], sliding_window: int | None
) -> Bool[Array, "G 1 Q C"]:
    key_position = key_position[None, None, None]
    allowed = key_position <= position
    if sliding_window is not None:
        allowed &= key_position > position - sliding_window
    return allowed


def _gather(pages: Float[Array, "P K S D"], index: Int[Array, "G M"]) -> Float[Array, "G K C D"]:
    """Pages of G rows, joined along their positions; one gather does the transposition to heads first too."""
    num_pages, num_kv_heads, block_size, head_dim = pages.shape
    tiles = pages.reshape(num_pages * num_kv_heads, block_size, head_dim)
    index = index[:, None] * num_kv_heads + jnp.arange(num_kv_heads)[None, :, None]
    gathered = tiles.at[index].get(mode="promise_in_bounds").astype(jnp.float32)
    return gathered.reshape(*index.shape[:2], -1, head_dim)


def _ceil_div(a: Int[Array, ""], b: int) -> Int[Array, ""]:
    return (a + b - 1) // b
