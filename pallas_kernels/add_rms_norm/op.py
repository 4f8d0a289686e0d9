"""The public operation: everything between two blocks of a layer, up to the next block's weights."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.add_rms_norm.sm90 import add_rms_norm_sm90
from pallas_kernels.implementation import Implementation, is_sm90


def add_rms_norm(
    x: Float[Array, "T E"],
    update: Float[Array, "T E"],
    weight: Float[Array, " E"],
    *,
    eps: float,
    update_gain: Float[Array, " E"] | None = None,
    update_scale: float = 1.0,
    implementation: Implementation = "xla",
) -> tuple[Float[Array, "T E"], Float[Array, "T E"]]:
    """Return x + update in the dtype of x, and its RMS norm (Zhang and Sennrich 2019, arXiv:1910.07467).

    The norm is computed in float32 from the rounded sum: a vector of E values, scaled to a root mean square of 1 and
    multiplied by `weight`. With `update_gain` the update is first replaced by its own RMS norm with that gain, then
    multiplied by the static `update_scale`; both results are rounded to the dtype of x. Raises ValueError for an
    unknown implementation; NotImplementedError for dtypes and sizes that "sm90", the kernel for Hopper GPUs, does not
    support.
    """
    if is_sm90(implementation):
        total, normed = add_rms_norm_sm90(x, update, weight, update_gain, eps=eps, update_scale=update_scale)
        return total, normed
    total = x + _finished(update, update_gain, eps, update_scale)
    return total, _rms_norm(total, weight, eps)


def add_normed_update(
    x: Float[Array, "T E"],
    update: Float[Array, "T E"],
    update_gain: Float[Array, " E"],
    *,
    eps: float,
    update_scale: float = 1.0,
    implementation: Implementation = "xla",
) -> Float[Array, "T E"]:
    """Return the sum that `add_rms_norm` does, of an update that is normalised; arguments and errors are the same."""
    if is_sm90(implementation):
        [total] = add_rms_norm_sm90(x, update, None, update_gain, eps=eps, update_scale=update_scale)
        return total
    return x + _finished(update, update_gain, eps, update_scale)


def _finished(
    update: Float[Array, "T E"], gain: Float[Array, " E"] | None, eps: float, scale: float
) -> Float[Array, "T E"]:
    update = update if gain is None else _rms_norm(update, gain, eps)
    return update if scale == 1.0 else (update.astype(jnp.float32) * scale).astype(update.dtype)


def _rms_norm(x: Float[Array, "T E"], weight: Float[Array, " E"], eps: float) -> Float[Array, "T E"]:
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight.astype(jnp.float32)[None]).astype(x.dtype)
