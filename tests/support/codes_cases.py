"""Experts whose weights are codes: random ones, their shapes, and what rows of groups multiplied by them should be."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.device.codes import codes_per_byte, values_of
from pallas_kernels.grouped_matmul import grouped_matmul_reference
from pallas_kernels.quantized_matmuls import QuantizedMatrix

STORED = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn, "int4": jnp.uint8, "uint4": jnp.uint8, "e2m1": jnp.uint8}
TOLERANCE = 6e-3
"""Largest error relative to the norm: of a result in bfloat16, and of scales that are rounded to it."""


def swiglu(gate, up):
    return jax.nn.silu(gate) * up


def in_float(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


def make_codes(shape, code, group, *, exponents=False, seed=0):
    """Return a weight, and its values in float64."""
    rng = np.random.default_rng(seed)
    *outputs, depth = shape
    groups = depth // group if group else 1
    if codes_per_byte(code) == 2:
        stored = jnp.asarray(rng.integers(0, 256, (*outputs, depth // 2)), jnp.uint8)
    elif code == "int8":
        stored = jnp.asarray(rng.integers(-128, 128, shape), jnp.int8)
    else:
        stored = jnp.asarray(rng.standard_normal(shape), jnp.float8_e4m3fn)
    spread = {"int8": 74.0, "fp8": 1.0}.get(code, 5.0) * depth**0.5
    if exponents:
        bits = rng.integers(119, 123, (*outputs, groups)).astype(np.uint8)
        scales = jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.float8_e8m0fnu)
    else:
        scales = jnp.asarray(rng.uniform(0.5, 1.5, (*outputs, groups)) / spread, jnp.bfloat16)
    zeros = jnp.asarray(rng.integers(0, 17, scales.shape), jnp.bfloat16) if code == "uint4" else None
    values = np.asarray(values_of(stored, code), np.float64)
    if zeros is not None:
        values -= np.repeat(in_float(zeros), depth // groups, axis=-1)
    values *= np.repeat(in_float(scales), depth // groups, axis=-1)
    return QuantizedMatrix(codes=stored, scales=scales, zeros=zeros, code=code), values


def make_case(sizes, *, num_rows, outputs, depth, code, group, exponents=False, is_gated=False, has_bias=False):
    """x, weight, sizes, options, and the rows that are in a group as they should be."""
    rng = np.random.default_rng(num_rows)
    of_weight = (len(sizes), 2, outputs) if is_gated else (len(sizes), outputs)
    x = jnp.asarray(rng.standard_normal((num_rows, depth)), jnp.bfloat16)
    bias = jnp.asarray(rng.standard_normal(of_weight), jnp.bfloat16) if has_bias else None
    weight, values = make_codes((*of_weight, depth), code, group, exponents=exponents)
    total = sum(sizes)

    def multiply(values, bias):
        y = grouped_matmul_reference(in_float(x), values, np.array(sizes))[:total]
        return y if bias is None else y + np.repeat(bias, sizes, axis=0)

    exact_bias = None if bias is None else in_float(bias)
    if is_gated:
        halves = [multiply(values[:, half], None if bias is None else exact_bias[:, half]) for half in range(2)]
        want = halves[0] / (1 + np.exp(-halves[0])) * halves[1]
    else:
        want = multiply(values, exact_bias)
    options = {"bias": bias, "activation": swiglu if is_gated else None}
    return (x.at[total:].set(jnp.nan), weight, jnp.asarray(sizes, jnp.int32)), options, want


def check(got, want):
    got = in_float(got[: len(want)])  # rows of no group are whatever memory held
    assert np.linalg.norm(got - want) <= TOLERANCE * np.linalg.norm(want)
    size = np.linalg.norm(want, axis=1)
    assert (np.linalg.norm(got - want, axis=1) <= 3 * TOLERANCE * size).all()


def shape_of(code, group, *shape, scales=jnp.bfloat16):
    of = jax.ShapeDtypeStruct
    *outputs, depth = shape
    scale = of((*outputs, depth // group if group else 1), scales)
    codes = of((*outputs, depth // codes_per_byte(code)), STORED[code])
    return QuantizedMatrix(codes=codes, scales=scale, zeros=scale if code == "uint4" else None, code=code)


QWEN_UP, QWEN_DOWN = (128, 2, 768, 2048), (128, 2048, 768)
OSS_UP, OSS_DOWN = (32, 2, 2880, 2880), (32, 2880, 2880)
E8M0 = jnp.float8_e8m0fnu

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
