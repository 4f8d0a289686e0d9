"""Codes of weights without kernels: their values, the reference for kernels, and products with them on a CPU.

XLA would write all values of a matrix to memory and read them. On a CPU 8-bit integers with one scale an output are
multiplied as they are, by activations that are split into 8-bit integers too, where it is fast at that. Of other codes
a tile of outputs at a time becomes floats, which stay in the cache.
"""

import functools
import math
import os
import pathlib

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int8, Shaped, UInt8

from jaxserve.quantization.scheme import CodeKind, Parts, Scheme


def _has_narrow_products() -> bool:
    """Return true if the CPU has instructions for products of bfloat16; each x86 CPU that does has those of int8, too.

    For other CPUs XLA makes float32 of bfloat16 in each product.
    """
    processors = pathlib.Path("/proc/cpuinfo")  # absent where the system is not Linux
    return processors.exists() and "avx512_bf16" in processors.read_text()


HAS_NARROW_PRODUCTS = _has_narrow_products()
TILE = 2 ** min(20, 17 + ((os.cpu_count() or 1) - 1).bit_length()) if HAS_NARROW_PRODUCTS else 2**20
"""Values of a tile: half of a core's second-level cache, as 16-bit floats, for each of 2 or more cores.

In float32, larger tiles in the third-level cache are faster: on 2 cores, 2^20 values take 0.8 of the time of 2^18.
"""
FEW_ROWS = 64
"""Up to so many rows, the matrix is the left operand: XLA's library rearranges the right one in every call."""
MANY_ROWS = 257 if HAS_NARROW_PRODUCTS else 9
"""From so many rows on, making floats of integers takes less time than multiplying by two pieces of rows.

Those of float32 are in three pieces, and with narrow products are still faster than floats with any number of rows.
"""
FLOAT32 = jnp.dtype(jnp.float32)
MOST_INPUTS = 2**17 - 1
"""Products of so many pairs of 8-bit integers add up to less than 2^31."""


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


def multiply_codes(
    x: Float[Array, "T K"], scheme: Scheme, rows: Parts, *, dtype: jnp.dtype, output_dtype: jnp.dtype
) -> Float[Array, "T N"]:
    """Return x @ weight^T of a weight [N, K] whose values are rounded to `dtype`, if they become floats at all.

    Sums are in float32, or exact.
    """
    if not _takes_integers(x, scheme, rows):
        return _multiply_in_tiles(x, scheme, rows, dtype=dtype, output_dtype=output_dtype)
    y = _multiply_integers(x, rows.codes) * rows.scales[:, 0].astype(jnp.float32)[None]
    return y.astype(output_dtype)


def _takes_integers(x: Float[Array, "T K"], scheme: Scheme, rows: Parts) -> bool:
    """Return true if integers are multiplied as they are."""
    is_plain = scheme.codes == "int8" and rows.zeros is None and rows.minimums is None and rows.factors is None
    fits = rows.scales.shape[-1] == 1 and x.shape[1] <= MOST_INPUTS
    return is_plain and fits and (len(x) < MANY_ROWS or (HAS_NARROW_PRODUCTS and x.dtype == FLOAT32))


def _multiply_integers(x: Float[Array, "T K"], codes: Int8[Array, "N K"]) -> Float32[Array, "T N"]:
    """Return x @ codes^T with each row of `x` rounded to a multiple of a fraction of its largest magnitude.

    The fraction is 2^-15 for activations of 16 bits and 2^-23 for float32. The root of the mean square of a row is at
    least its largest magnitude over sqrt(K), so even with K = 16,384 and a single large value the rounding changes a
    product by less, relative to the norms of its factors, than rounding the result to bfloat16 does.
    """
    count, num_rows = 2 if x.dtype.itemsize == 2 else 3, len(x)
    values = x.astype(jnp.float32)
    unit = jnp.max(jnp.abs(values), axis=1, keepdims=True) / jnp.float32(127 * 256 ** (count - 1))
    unit = jnp.where(unit == 0, jnp.float32(1), unit)
    left, pieces = jnp.rint(values / unit).astype(jnp.int32), []
    for _ in range(count - 1):
        above = (left + 128) >> 8
        pieces.append(left - (above << 8))
        left = above
    stacked = jnp.concatenate([*pieces, left]).astype(jnp.int8)
    products = _dot(stacked, codes, jnp.dtype(jnp.int32))
    if len(stacked) <= FEW_ROWS:
        products = jax.lax.optimization_barrier(products).T  # without it XLA swaps the operands again
    products = products.reshape(count, num_rows, len(codes))
    y = sum(products[index].astype(jnp.float32) * jnp.float32(256**index) for index in range(count))
    return y * unit


def _multiply_in_tiles(
    x: Float[Array, "T K"], scheme: Scheme, rows: Parts, *, dtype: jnp.dtype, output_dtype: jnp.dtype
) -> Float[Array, "T N"]:
    num_rows, num_inputs = len(rows.codes), x.shape[1]
    size = min(num_rows, max(16, TILE // num_inputs // 16 * 16))
    if scheme.codes == "fp8":  # which XLA on a CPU would make float16 of before it takes a tile
        rows = rows._replace(codes=jax.lax.bitcast_convert_type(rows.codes, jnp.int8))
    factor_dtype = jnp.dtype(jnp.bfloat16) if HAS_NARROW_PRODUCTS and dtype == jnp.bfloat16 else FLOAT32
    parts = [x.astype(factor_dtype)]
    if len(x) == 1 and factor_dtype != FLOAT32:
        # XLA's library for CPUs has no products with a vector; XLA's own take ten times as long.
        parts = [jnp.concatenate([x, jnp.zeros_like(x)])]
    has_pairs = scheme.kind.per_byte == 2 and num_inputs // rows.scales.shape[-1] % 2 == 0
    if has_pairs:
        parts = [parts[0][:, ::2], parts[0][:, 1::2]]
    parts = jax.lax.optimization_barrier(parts)
    few = len(parts[0]) <= FEW_ROWS

    def add_tile(index: Int[Array, ""], y: Float[Array, "..."]) -> Float[Array, "..."]:
        # The last tile overlaps the one before if the number of rows is not a multiple of a tile's.
        first = jnp.minimum(index * size, num_rows - size)
        tile = jax.tree.map(lambda part: jax.lax.dynamic_slice_in_dim(part, first, size), rows)
        values = dequantize_pairs(scheme, tile, FLOAT32) if has_pairs else (dequantize(scheme, tile, FLOAT32),)
        factors = (_rounded(each, dtype).astype(factor_dtype) for each in values)
        products = (_dot(part, factor, FLOAT32) for part, factor in zip(parts, factors, strict=True))
        added = functools.reduce(jnp.add, products).astype(output_dtype)
        return jax.lax.dynamic_update_slice_in_dim(y, added, first, axis=0 if few else 1)

    shape = (num_rows, len(parts[0])) if few else (len(x), num_rows)
    y = jax.lax.fori_loop(0, math.ceil(num_rows / size), add_tile, jnp.zeros(shape, output_dtype))
    return y.T[: len(x)] if few else y


def _rounded(values: Float32[Array, "..."], dtype: jnp.dtype) -> Float[Array, "..."]:
    """Return values in `dtype`. Those in the middle of two of bfloat16 become the larger, which XLA does faster."""
    if dtype != jnp.bfloat16:
        return values.astype(dtype)
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32) + jnp.uint32(0x8000)
    return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)


def _dot(x: Array, matrix: Array, sums: jnp.dtype) -> Array:
    """Return x @ matrix^T, or with at most FEW_ROWS its transpose; sums are of type `sums`."""
    return jax.lax.dot_general(
        *((matrix, x) if len(x) <= FEW_ROWS else (x, matrix)),
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=sums,
    )
