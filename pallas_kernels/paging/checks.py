"""What every kernel for Hopper that attends over pages asks of its arguments."""

import jax.numpy as jnp
from jaxtyping import Array, Float


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
