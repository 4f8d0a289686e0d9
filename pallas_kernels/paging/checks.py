"""What every kernel for Hopper that attends over pages asks of its arguments."""

from typing import Any

import jax.numpy as jnp

from pallas_kernels.paging.tiles import MAX_COLUMNS, MAX_COLUMNS_OF_8_BITS, MAX_COPIED

MAX_HEAD_DIM = MAX_COPIED
"""The largest heads of decoding rows with any number of queries; those of prompts have a kernel of their own beyond."""
LARGEST_HEAD_DIM = 512
"""The largest heads of prompts, and of decoding rows whose queries are columns."""


def why_not_pages(dtype: Any, pages: Any, *, num_queries: int = 1) -> str | None:
    """Return why no kernel for Hopper attends with decoding rows of `dtype` over such pages, or their shapes; None if
    one does. A row has `num_queries` for each KV head.
    """
    head_dim = pages.k.shape[3]
    if MAX_HEAD_DIM < head_dim <= LARGEST_HEAD_DIM and num_queries > MAX_COLUMNS:
        return f"at most {MAX_COLUMNS} queries of a KV head in heads of more than {MAX_HEAD_DIM}, got {num_queries}"
    if pages.scales is not None:
        return _why_not_8_bits(dtype, pages, num_queries)
    if dtype not in (jnp.bfloat16, jnp.float16) or not dtype == pages.k.dtype == pages.v.dtype:
        return f"q and pages must all be bfloat16 or all float16, got {dtype}, {pages.k.dtype} and {pages.v.dtype}"
    block_size = pages.k.shape[2]
    if head_dim % (16 if head_dim <= MAX_HEAD_DIM else 64) or head_dim > LARGEST_HEAD_DIM:
        largest = f"{MAX_HEAD_DIM}, or of 64 up to {LARGEST_HEAD_DIM}"
        return f"head_dim must be a multiple of 16 up to {largest}, got {head_dim}"
    if block_size not in (8, 16, 32, 64, 128, 256):
        return f"the block size must be a power of two from 8 to 256, got {block_size}"
    return None


def _why_not_8_bits(dtype: Any, pages: Any, num_queries: int) -> str | None:
    block_size, head_dim = pages.k.shape[2:]
    if dtype != jnp.bfloat16:
        return f"q must be bfloat16 where pages have 8 bits, got {dtype}"
    if head_dim % 64 or head_dim > LARGEST_HEAD_DIM:
        largest = LARGEST_HEAD_DIM
        return f"head_dim must be a multiple of 64 up to {largest} where pages have 8 bits, got {head_dim}"
    if block_size not in (16, 32, 64, 128, 256):
        return f"the block size must be a power of two from 16 to 256 where pages have 8 bits, got {block_size}"
    if num_queries > MAX_COLUMNS_OF_8_BITS:
        return f"at most {MAX_COLUMNS_OF_8_BITS} queries of a KV head where pages have 8 bits, got {num_queries}"
    return None


def why_not_prompts(dtype: Any, pages: Any) -> str | None:
    """Return why no kernel for Hopper attends with prompts, rows of more tokens; None if one does."""
    head_dim, step = pages.k.shape[3], 16 if pages.scales is None else 64
    if head_dim % (step if head_dim <= MAX_HEAD_DIM else 128) or head_dim > LARGEST_HEAD_DIM:
        sizes = f"{step} up to {MAX_HEAD_DIM}, or of 128 up to {LARGEST_HEAD_DIM}"
        return f"head_dim must be a multiple of {sizes}, in prompts, got {head_dim}"
    return why_not_pages(dtype, pages)


def check_prompts(q: Any, pages: Any) -> None:
    """Raise NotImplementedError with the reason of `why_not_prompts`, if there is one."""
    if (reason := why_not_prompts(q.dtype, pages)) is not None:
        raise NotImplementedError(reason)


def check_pages(q: Any, pages: Any, *, num_queries: int = 1) -> None:
    """Raise NotImplementedError with the reason of `why_not_pages`, if there is one."""
    if (reason := why_not_pages(q.dtype, pages, num_queries=num_queries)) is not None:
        raise NotImplementedError(reason)
