"""The values of a quantized weight's arrays, on devices: the reference for kernels."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int8, Shaped, UInt8

from jaxserve.quantization.scheme import CodeKind, Parts, Scheme


def dequantize(scheme: Scheme, parts: Parts, dtype: jnp.dtype) -> Float[Array, "..."]:
    """Return the values, computed in float32. Groups may be smaller than those of the scheme, too."""
    kind = scheme.kind
    if kind.per_byte == 1:
        is_bits = kind.is_float and parts.codes.dtype == jnp.int8
        codes = _e4m3(parts.codes) if is_bits else parts.codes.astype(jnp.float32)
        return _scaled(codes, parts, dtype)
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


def _e4m3(bits: Int8[Array, "..."]) -> Float32[Array, "..."]:
    """Return the values of FP8 codes, given as their bits, in operations of which a CPU does many at once.

    Such a code is a float16 of a 256th of its value without the last 7 bits, but for those that are not numbers.
    """
    halves = jax.lax.bitcast_convert_type((bits.astype(jnp.int16) << 7) & jnp.int16(-0x4080), jnp.float16)
    return jnp.where((bits & 127) == 127, jnp.nan, halves.astype(jnp.float32) * 256)


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
    values = jnp.where(jnp.isnan(values), jnp.nan, values)  # of which rounding by adding to the bits makes no number
    if factors is None:
        return values
    return (values.reshape(*factors.shape, -1) * factors.astype(jnp.float32)[..., None]).reshape(values.shape)
