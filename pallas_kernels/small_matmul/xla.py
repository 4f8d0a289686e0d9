"""The small matmul in plain JAX: runs anywhere, and wins on a GPU from some 100 rows on."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def matmul_xla(
    x: Float[Array, "M K"],
    weight: Float[Array, "*outputs K"],
    *,
    squares: Float[Array, "R P"] | None,
    eps: float,
    activation: Callable[[Array], Array] | None,
    residual: Float[Array, "M N"] | None,
    output_dtype: DTypeLike | None,
) -> Float[Array, "M N"]:
    """See `matmul`; `squares` and `eps` are those of a `Normed`. float32 operands are multiplied in full float32."""
    output_dtype = output_dtype or x.dtype
    outputs = weight.shape[:-1]
    y = jax.lax.dot_general(
        x,
        weight.reshape(-1, weight.shape[-1]),
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=output_dtype if squares is None else jnp.float32,
    )
    if squares is not None:
        mean_square = jnp.sum(squares[: x.shape[0]], axis=1, keepdims=True) / x.shape[1]
        y = (y * jax.lax.rsqrt(mean_square + eps)).astype(output_dtype)
    if activation is not None:
        gate, up = jnp.split(y, outputs[0], axis=1)
        y = activation(gate) * up
    return y if residual is None else residual.astype(y.dtype) + y


def rms_norm(x: Float[Array, "M N"], gain: Float[Array, " N"], eps: float) -> Float[Array, "M N"]:
    """Rows scaled to a root mean square of 1 and times `gain`; computed in float32."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=1, keepdims=True) + eps)
    return (wide * scale * gain[None].astype(jnp.float32)).astype(x.dtype)
