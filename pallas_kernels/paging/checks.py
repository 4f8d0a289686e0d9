"""What every kernel for Hopper that attends over pages asks of its arguments."""

from typing import Any

import jax.numpy as jnp


def why_not_pages(dtype: Any, k_pages: Any, v_pages: Any) -> str | None:
    """Return why no kernel for Hopper attends with queries of `dtype` over such pages, or their shapes; None if one
    does.
    """
    if dtype not in (jnp.bfloat16, jnp.float16) or not dtype == k_pages.dtype == v_pages.dtype:
        return f"q and pages must all be bfloat16 or all float16, got {dtype}, {k_pages.dtype} and {v_pages.dtype}"
    block_size, head_dim = k_pages.shape[2:]
    if head_dim % 16 or head_dim > 256:
        return f"head_dim must be a multiple of 16 up to 256, got {head_dim}"
    if block_size not in (8, 16, 32, 64, 128, 256):
        return f"the block size must be a power of two from 8 to 256, got {block_size}"
    return None


def check_pages(q: Any, k_pages: Any, v_pages: Any) -> None:
    """Raise NotImplementedError with the reason of `why_not_pages`, if there is one."""
    if (reason := why_not_pages(q.dtype, k_pages, v_pages)) is not None:
        raise NotImplementedError(reason)
