"""The public operation: everything between two blocks of a layer, up to the next block's weights."""

from typing import Literal, get_args

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.add_rms_norm.sm90 import add_rms_norm_sm90

Implementation = Literal["xla", "sm90"]


def add_rms_norm(
    x: Float[Array, "T E"],
    update: Float[Array, "T E"],
    weight: Float[Array, " E"],
    *,
    eps: float,
    implementation: Implementation = "xla",
) -> tuple[Float[Array, "T E"], Float[Array, "T E"]]:
    """Return x + update in the dtype of x, and its RMS norm (Zhang and Sennrich 2019, arXiv:1910.07467).

    The norm is computed in float32 from the rounded sum: a vector of E values, scaled to a root mean square of 1 and
    multiplied by `weight`. Raises ValueError for an unknown implementation; NotImplementedError for dtypes and sizes
    that "sm90", the kernel for Hopper GPUs, does not support.
    """
    if implementation not in get_args(Implementation):
        known = ", ".join(map(repr, get_args(Implementation)))
        raise ValueError(f"unknown implementation {implementation!r}, there is {known}")
    if implementation == "sm90":
        return add_rms_norm_sm90(x, update, weight, eps=eps)
    total = x + update
    wide = total.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return total, (wide * scale * weight.astype(jnp.float32)[None]).astype(x.dtype)
