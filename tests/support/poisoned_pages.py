"""Contexts scattered over a pool of pages in which everything else is NaN."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paging import Pages, Scores, has_scales

SINKS = np.array([-1.0, 0.5, 3.0, 30.0], np.float32)
SLOPES = np.array([0.5, 0.01, 0.0, 2.0], np.float32)
OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 7},
    "cap": {"soft_cap": 1.5, "sliding_window": 1},
    "sinks": {"sinks": SINKS},
    "ALiBi": {"alibi_slopes": SLOPES},
    "everything": {"sliding_window": 20, "soft_cap": 2.0, "sinks": SINKS, "alibi_slopes": SLOPES},
}
"""Options of `Scores`, for four heads."""
HEAD_LAYOUTS = [
    *((heads, jnp.float32) for heads in [(1, 1, 1), (3, 1, 5), (4, 4, 8), (6, 2, 7), (10, 2, 33), (14, 2, 64)]),
    ((6, 2, 7), jnp.bfloat16),
    ((6, 2, 7), jnp.float16),
]


def make_pages(rng, lens, num_kv_heads, head_dim, *, block_size, max_blocks=None):
    """k_pages and v_pages [P, K, S, D] float32 and block_tables [B, max_blocks], for contexts of `lens` tokens; by
    default two more blocks than the longest needs.
    """
    max_blocks = max_blocks or -(-max(lens) // block_size) + 2
    num_blocks = len(lens) * max_blocks + 1
    free = list(rng.permutation(num_blocks))
    k, v = (np.full((num_blocks, num_kv_heads, block_size, head_dim), np.nan, np.float32) for _ in range(2))
    tables = np.zeros((len(lens), max_blocks), np.int32)
    for row, length in enumerate(lens):
        for first in range(0, int(length), block_size):
            block = tables[row, first // block_size] = free.pop()
            held = min(block_size, int(length) - first)
            for pages in (k, v):
                pages[block, :, :held] = rng.standard_normal((num_kv_heads, held, head_dim))
    return k, v, tables


def make_scores(rng, num_heads, *, has_sinks=False, has_alibi=False, **options):
    """Return Scores with these options, and random sinks and slopes for each head."""
    return Scores(
        sinks=2 * rng.standard_normal(num_heads).astype(np.float32) if has_sinks else None,
        alibi_slopes=np.logspace(0, -3, num_heads, dtype=np.float32) if has_alibi else None,
        **options,
    )


def shapes_of_pages(heads, *, block_size, dtype):
    """Return the shapes of pages for heads of queries, of keys, and their size; with scales if they have 8 bits."""
    _, num_kv_heads, head_dim = heads
    pool = jax.ShapeDtypeStruct((1024, num_kv_heads, block_size, head_dim), dtype)
    scales = jax.ShapeDtypeStruct((1024, num_kv_heads, 2, block_size), jnp.float32) if has_scales(dtype) else None
    return Pages(pool, pool, scales)


def shapes_of_scores(num_heads, *, has_alibi=False, **options):
    """Return Scores with these options, and shapes of slopes for each head."""
    slopes = jax.ShapeDtypeStruct((num_heads,), jnp.float32) if has_alibi else None
    return Scores(scale=0.1, alibi_slopes=slopes, **options)
