"""Root mean square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.layers.params import ParamSpec


def norm_spec(source: str, size: int) -> ParamSpec:
    """The gain of one norm; `source` is its module's name in the checkpoint."""
    return ParamSpec(shape=(size,), axes=(None,), source=(f"{source}.weight",), init_scale=None)


def rms_norm(x: Float[Array, "*batch N"], weight: Float[Array, " N"], eps: float) -> Float[Array, "*batch N"]:
    """The vectors of the last axis, scaled to a root mean square of 1 and times `weight`; computed in float32."""
    with jax.named_scope("norm"):
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
        gain = jnp.expand_dims(weight.astype(jnp.float32), tuple(range(x.ndim - 1)))
        return (wide * scale * gain).astype(x.dtype)
