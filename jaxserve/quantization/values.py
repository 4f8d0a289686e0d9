"""The values of a quantized weight's arrays, on devices: the reference for kernels."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped, UInt8

from jaxserve.quantization.scheme import CodeKind, Parts, Scheme


def dequantize(scheme: Scheme, parts: Parts, dtype: jnp.dtype) -> Float[Array, "..."]:
    """Return the values, computed in float32. Groups may be smaller than those of the scheme, too."""
    kind = scheme.kind
    if kind.per_byte == 1:
        return _scaled(parts.codes.astype(jnp.float32), parts, dtype)
    halves = jnp.stack([parts.codes & jnp.uint8(15), parts.codes >> jnp.uint8(4)], axis=-1)
    return _scaled(_values(halves.reshape(*parts.codes.shape[:-1], -1), kind), parts, dtype)


def dequantize_pairs(
    scheme: Scheme, parts: Parts, dtype: jnp.dtype
) -> tuple[Float[Array, "... half"], Float[Array, "... half"]]:
    """Return the values of even and of odd inputs separately, for codes of which two share a byte and groups of even
    size.

    Nothing is interleaved, which takes a CPU longer than the rest.
    """
    low, high = parts.codes & jnp.uint8(15), parts.codes >> jnp.uint8(4)
    return _scaled(_values(low, scheme.kind), parts, dtype), _scaled(_values(high, scheme.kind), parts, dtype)


def _values(codes: UInt8[Array, "..."], kind: CodeKind) -> Float[Array, "..."]:
    """Return the values of 4-bit codes, before zero points and scales."""
    if kind.values is None:
        return codes.astype(jnp.float32) + jnp.float32(kind.first)
    return jnp.asarray(kind.values, jnp.float32)[codes]


def _scaled(values: Float[Array, "..."], parts: Parts, dtype: jnp.dtype) -> Float[Array, "..."]:
    """Return values less zero points, times scales, less minimums; each group has equally many of them."""
    grouped = values.reshape(*parts.scales.shape, -1)
    if parts.zeros is not None:
        grouped = grouped - parts.zeros.astype(jnp.float32)[..., None]
    scaled = grouped * _factored(parts.scales, parts.factors)[..., None]
    if parts.minimums is not None:
        scaled = scaled - _factored(parts.minimums, parts.minimum_factors)[..., None]
    return scaled.reshape(values.shape).astype(dtype)


def _factored(small: Shaped[Array, "... groups"], factors: Float[Array, "... larger"] | None) -> Float[Array, "..."]:
    """Return scales or minimums in float32, times the factors of the larger groups that they are in."""
    values = small.astype(jnp.float32)
    if factors is None:
        return values
    return (values.reshape(*factors.shape, -1) * factors.astype(jnp.float32)[..., None]).reshape(values.shape)
