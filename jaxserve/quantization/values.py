"""What the arrays of a quantized weight stand for, on devices: the reference for kernels."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from jaxserve.quantization.scheme import CodeKind, Parts, Scheme


def dequantize(scheme: Scheme, parts: Parts, dtype: jnp.dtype) -> Float[Array, "..."]:
    """Return the values, computed in float32. Scales may be of smaller groups than those of the scheme, too."""
    values = _values(parts.codes, scheme.kind)
    grouped = values.reshape(*parts.scales.shape, -1)
    if parts.zeros is not None:
        grouped = grouped - parts.zeros.astype(jnp.float32)[..., None]
    scaled = grouped * parts.scales.astype(jnp.float32)[..., None]
    return scaled.reshape(values.shape).astype(dtype)


def _values(codes: Shaped[Array, "..."], kind: CodeKind) -> Float[Array, "..."]:
    """What the codes stand for, before zero points and scales."""
    if kind.per_byte == 1:
        return codes.astype(jnp.float32)
    halves = jnp.stack([codes & jnp.uint8(15), codes >> jnp.uint8(4)], axis=-1)
    halves = halves.reshape(*codes.shape[:-1], 2 * codes.shape[-1])
    if kind.values is None:
        return halves.astype(jnp.float32) + jnp.float32(kind.first)
    return jnp.asarray(kind.values, jnp.float32)[halves]
