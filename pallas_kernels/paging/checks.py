"""The checks that every attention over pages makes of its arguments, before it knows which implementation runs."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def check_attention(
    *,
    num_heads: int,
    num_kv_heads: int,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " sinks"] | None,
    alibi_slopes: Float[Array, " slopes"] | None,
) -> None:
    """Raise ValueError for heads that do not fit together, or a window or cap that is not positive."""
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, got {sliding_window}")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap must be positive, got {soft_cap}")
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"sinks must have one logit for each of {num_heads} query heads, got shape {sinks.shape}")
    if alibi_slopes is not None and alibi_slopes.shape != (num_heads,):
        raise ValueError(
            f"alibi_slopes must have one slope for each of {num_heads} query heads, got shape {alibi_slopes.shape}"
        )


def check_pages_for_sm90(
    q: Float[Array, "*tokens H D"], k_pages: Float[Array, "P K S D"], v_pages: Float[Array, "P K S D"]
) -> None:
    """Raise NotImplementedError, with the reason, for dtypes and shapes that no kernel for Hopper is made for."""
    if q.dtype not in (jnp.bfloat16, jnp.float16) or not q.dtype == k_pages.dtype == v_pages.dtype:
        raise NotImplementedError(
            f"q and pages must all be bfloat16 or all float16, got {q.dtype}, {k_pages.dtype} and {v_pages.dtype}"
        )
    block_size, head_dim = k_pages.shape[2:]
    if head_dim % 16 or head_dim > 256:
        raise NotImplementedError(f"head_dim must be a multiple of 16 up to 256, got {head_dim}")
    if block_size not in (8, 16, 32, 64, 128, 256):
        raise NotImplementedError(f"the block size must be a power of two from 8 to 256, got {block_size}")
