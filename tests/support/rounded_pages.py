"""Pages of floats in 8 bits, as `kv_write` makes them."""

import jax.numpy as jnp

from pallas_kernels.paging import Pages, round_vectors


def rounded_pages(pages, dtype, *, kinds=2):
    """Return pages of floats in a dtype of 8 bits, with scales for keys and values, or one for both."""
    (k, k_scales), (v, v_scales) = (round_vectors(jnp.asarray(pool), dtype) for pool in pages[:2])
    return Pages(k, v, jnp.stack([k_scales, v_scales][:kinds], axis=2))
