"""Random experts, their shapes, and what rows of groups multiplied by them should be; weights are codes, or floats."""

import jax
import jax.numpy as jnp
import numpy as np
from kernel_results import check_rows, in_float, silu

from pallas_kernels.device.codes import codes_per_byte, values_of
from pallas_kernels.grouped_matmul import grouped_matmul_reference
from pallas_kernels.inputs import swiglu
from pallas_kernels.quantized_matmuls import QuantizedMatrix

STORED = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn} | dict.fromkeys(
    ["int4", "uint4", "e2m1", "nf4", "fp4"], jnp.uint8
)
TOLERANCE = 6e-3
"""Largest error relative to the norm: of a result in bfloat16, and of scales that are rounded to it."""


def make_codes(shape, code, group, *, exponents=False, levels=None, factored=256, has_minimums=False, seed=0):
    """Return a weight, and its values in float64.

    `levels` is what factors multiply: e4m3 by one of each output, or int8 by those of `factored` columns. Minimums are
    about what makes the mean 0.
    """
    rng = np.random.default_rng(seed)
    *outputs, depth = shape
    groups = depth // group if group else 1
    if codes_per_byte(code) == 2:
        stored = jnp.asarray(rng.integers(0, 256, (*outputs, depth // 2)), jnp.uint8)
    elif code == "int8":
        stored = jnp.asarray(rng.integers(-128, 128, shape), jnp.int8)
    else:
        stored = jnp.asarray(rng.standard_normal(shape), jnp.float8_e4m3fn)
    spread = {"int8": 74.0, "fp8": 1.0, "nf4": 0.6, "fp4": 0.5}.get(code, 5.0) * depth**0.5
    if exponents:
        bits = rng.integers(119, 123, (*outputs, groups)).astype(np.uint8)
        scales = jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.float8_e8m0fnu)
    else:
        scales = jnp.asarray(rng.uniform(0.5, 1.5, (*outputs, groups)) / spread, jnp.bfloat16)
    zeros = minimums = factors = minimum_factors = None
    if levels is not None:
        size = (*outputs, depth // factored if levels == jnp.int8 else 1)
        small = rng.integers(16, 64, scales.shape) if levels == jnp.int8 else rng.uniform(8, 448, scales.shape)
        scales = jnp.asarray(small, jnp.float32).astype(levels)
        factors = jnp.asarray(rng.uniform(0.5, 1.5, size) / spread / np.mean(small), jnp.float32)
    if has_minimums:
        middle = 7.5 if code == "uint4" else 1
        if levels is None:
            minimums = (scales.astype(jnp.float32) * rng.uniform(0.8, 1.2, scales.shape) * middle).astype(scales.dtype)
        else:
            minimums = jnp.asarray(rng.integers(0, 64, scales.shape), levels)
            minimum_factors = (factors * middle).astype(jnp.float32)
    elif code == "uint4":
        zeros = jnp.asarray(rng.integers(0, 17, scales.shape), jnp.bfloat16)
    values = np.asarray(values_of(stored, code), np.float64)
    if zeros is not None:
        values -= np.repeat(in_float(zeros), depth // groups, axis=-1)

    def of_columns(small, factors):
        product = in_float(small)
        if factors is not None:
            product = product * np.repeat(in_float(factors), groups // factors.shape[-1], axis=-1)
        return np.repeat(product, depth // groups, axis=-1)

    values *= of_columns(scales, factors)
    if minimums is not None:
        values -= of_columns(minimums, minimum_factors)
    parts = {"minimums": minimums, "factors": factors, "minimum_factors": minimum_factors}
    return QuantizedMatrix(codes=stored, scales=scales, zeros=zeros, **parts, code=code), values


def make_case(
    sizes, *, num_rows, outputs, depth, is_gated=False, has_bias=False, dtype=jnp.bfloat16, code=None, **more
):
    """x, weight, sizes, options, and the rows that are in a group as they should be; without a `code` the weight is of
    floats.
    """
    rng = np.random.default_rng(num_rows)
    of_weight = (len(sizes), 2, outputs) if is_gated else (len(sizes), outputs)
    x = jnp.asarray(rng.standard_normal((num_rows, depth)), dtype)
    bias = jnp.asarray(rng.standard_normal(of_weight), dtype) if has_bias else None
    if code is None:
        weight = jnp.asarray(rng.standard_normal((*of_weight, depth)) * depth**-0.5, dtype)
        values = in_float(weight)
    else:
        weight, values = make_codes((*of_weight, depth), code, **more)
    want = expected(in_float(x), values, sizes, in_float(bias), is_gated=is_gated)
    options = {"bias": bias, "activation": swiglu if is_gated else None}
    return (x.at[sum(sizes) :].set(jnp.nan), weight, jnp.asarray(sizes, jnp.int32)), options, want


def expected(x, weight, sizes, bias, *, is_gated):
    """Return the rows that are in a group as they should be, all in float64; `bias` may be None."""

    def multiply(weight, bias):
        y = grouped_matmul_reference(x, weight, np.array(sizes))[: sum(sizes)]
        return y if bias is None else y + np.repeat(bias, sizes, axis=0)

    if not is_gated:
        return multiply(weight, bias)
    gate, up = (multiply(weight[:, half], None if bias is None else bias[:, half]) for half in range(2))
    return silu(gate) * up


def check(got, want):
    check_rows(got[: len(want)], want, TOLERANCE)  # rows of no group are whatever memory held


def shape_of(code, group, *shape, scales=jnp.bfloat16, has_minimums=False):
    """Return the shapes of a weight; scales of 8 bits that are no exponents have factors."""
    of = jax.ShapeDtypeStruct
    *outputs, depth = shape
    scale = of((*outputs, depth // group if group else 1), scales)
    codes = of((*outputs, depth // codes_per_byte(code)), STORED[code])
    minimums = scale if has_minimums else None
    zeros = scale if code == "uint4" and minimums is None else None
    of_columns = of((*outputs, max(1, depth // 256)), jnp.float16)
    factor = {jnp.int8: of_columns, E4M3: of((*outputs, 1), jnp.float32)}.get(scales)
    factors = {"factors": factor, "minimum_factors": factor if has_minimums else None}
    return QuantizedMatrix(codes=codes, scales=scale, zeros=zeros, minimums=minimums, **factors, code=code)


QWEN_UP, QWEN_DOWN = (128, 2, 768, 2048), (128, 2048, 768)
OSS_UP, OSS_DOWN = (32, 2, 2880, 2880), (32, 2880, 2880)
E8M0, E4M3 = jnp.float8_e8m0fnu, jnp.float8_e4m3fn

ON_A_GPU = {
    "one token": {"sizes": [0, 1, 0, 0, 1, 0, 1, 1], "num_rows": 4},
    "decode": {"sizes": [3, 0, 9, 1, 64, 17, 8, 2], "num_rows": 120},
    "ends inside a box": {"sizes": [0, 1, 63, 0, 5, 0, 0, 33], "num_rows": 102},
    "many": {"sizes": [700, 65, 1, 129, 128, 127, 64, 486], "num_rows": 1705},
    "one group": {"sizes": [0, 0, 0, 2049, 0, 0, 0, 0], "num_rows": 2049},
    "none": {"sizes": [0] * 8, "num_rows": 64},
}
OSS = {"code": "e2m1", "group": 32, "exponents": True, "outputs": 2880, "depth": 2880, "has_bias": True}
WEIGHTS_ON_A_GPU = [
    OSS | {"is_gated": True},
    OSS,
    {"code": "fp8", "group": 128, "outputs": 768, "depth": 2048, "is_gated": True},
    {"code": "fp8", "group": None, "outputs": 2048, "depth": 768},
    {"code": "int4", "group": 128, "outputs": 768, "depth": 2048, "is_gated": True},
    {"code": "uint4", "group": 128, "outputs": 2048, "depth": 768},
    {"code": "int8", "group": None, "outputs": 200, "depth": 320, "is_gated": True, "has_bias": True},
    {"code": "int8", "group": 32, "outputs": 72, "depth": 64, "has_bias": True},
]
_K = {"levels": jnp.int8, "outputs": 768, "depth": 2048}
_SHARDED = {"levels": jnp.int8, "is_gated": True}
WEIGHTS_IN_LEVELS = [
    {"code": "e2m1", "group": 16, "levels": E4M3, "outputs": 768, "depth": 2048, "is_gated": True, "has_bias": True},
    {"code": "uint4", "group": 32, "has_minimums": True, "is_gated": True} | _K,
    {"code": "uint4", "group": 16, "has_minimums": True} | _K,
    {"code": "int4", "group": 16} | _K,
    {"code": "int8", "group": 32, "has_minimums": True} | _K,
    {"code": "int8", "group": 16} | _K,
    {"code": "uint4", "group": 32, "has_minimums": True, "outputs": 2048, "depth": 768},
    {"code": "nf4", "group": 64, "outputs": 768, "depth": 2048, "is_gated": True},
    {"code": "fp4", "group": 64, "outputs": 200, "depth": 320},
    {"code": "e2m1", "group": 16, "levels": E4M3, "outputs": 200, "depth": 2880},
    {"code": "uint4", "group": 32, "has_minimums": True, "outputs": 200, "depth": 128} | _SHARDED | {"factored": 128},
    {"code": "uint4", "group": 32, "has_minimums": True, "outputs": 200, "depth": 384} | _SHARDED | {"factored": 128},
    {"code": "int8", "group": 16, "outputs": 200, "depth": 192} | _SHARDED | {"factored": 64},
]
"""NVFP4, Q4_K, Q2_K, Q3_K, Q5_K, Q6_K, 4.1, NF4, FP4; then blocks that end early, and factors of parts of a block, as
devices that share an expert have them.
"""
