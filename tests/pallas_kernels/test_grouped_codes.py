"""The grouped matmul of codes: its Hopper kernel interpreted on a CPU, all but what is inlined Mosaic GPU code, with
race detection; compiled for an H200 that is not there, and run where there is one.
"""

import functools

import emulated_codes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from depths import quick_first
from interpreting import interpret

from pallas_kernels.device.codes import codes_per_byte, values_of
from pallas_kernels.deviceless import compile_for_h200
from pallas_kernels.grouped_codes import grouped_matmul_of_codes, tile_rows, why_not
from pallas_kernels.grouped_codes.sm90 import Config, grouped_codes_sm90, heuristic
from pallas_kernels.grouped_matmul import grouped_matmul_reference, plan
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


INTERPRETED = {
    # Parts of K of which one ends early; tiles of 8 that begin anywhere; outputs that are not whole tiles; padding.
    "fp8 of blocks": (
        {"code": "fp8", "group": 64, "sizes": [3, 0, 20], "num_rows": 27, "outputs": 72, "depth": 192}
        | {"is_gated": True, "has_bias": True},
        Config(rows=8, across=2, num_blocks=2),
    ),
    # Powers of two as scales, four warpgroups with the same outputs, several steps, one of which has no columns left.
    "mxfp4": (
        {"code": "e2m1", "group": 32, "exponents": True, "sizes": [0, 5], "num_rows": 5, "outputs": 64, "depth": 1120},
        Config(rows=8, across=1, num_blocks=1),
    ),
    # Zero points, warpgroups with outputs of their own, two chunks of rows of which the second has none at times.
    "uint4": (
        {"code": "uint4", "group": 128, "sizes": [9, 2], "num_rows": 16, "outputs": 264, "depth": 512},
        Config(rows=16, across=4, num_blocks=2),
    ),
}


@pytest.mark.parametrize("case", quick_first(INTERPRETED))
def test_interpreted_without_races(capsys, case):
    problem, config = INTERPRETED[case]
    arguments, options, want = make_case(**problem)
    tiles = plan(arguments[2], num_rows=problem["num_rows"], tile_rows=config.rows)
    run = functools.partial(grouped_codes_sm90, tiles=tiles, config=config, ops=emulated_codes, **options)
    check(interpret(capsys, run, *arguments), want)


def test_no_rows():
    (x, weight, sizes), _, _ = make_case([0, 0], num_rows=1, outputs=64, depth=128, code="fp8", group=None)
    assert grouped_matmul_of_codes(x[:0], weight, sizes).shape == (0, 64)


@pytest.mark.parametrize(("num_rows", "rows"), [(1, 8), (8, 8), (512, 8), (1024, 16), (2048, 32), (65_536, 64)])
def test_most_groups_have_one_tile(num_rows, rows):
    assert tile_rows(num_rows, 128) == rows


def test_few_experts_keep_most_multiprocessors_reading():
    def items(num_rows, shape):
        across = heuristic(num_rows, shape_of("e2m1", 32, *shape)).across
        return 4 * -(-shape[-2] * (2 if len(shape) == 4 else 1) // (64 * across))

    # One token of gpt-oss-20b: 4 experts.
    assert items(4, (32, 2, 2880, 2880)) > 132
    assert items(4, (32, 2880, 2880)) > 90


def shape_of(code, group, *shape, scales=jnp.bfloat16):
    of = jax.ShapeDtypeStruct
    *outputs, depth = shape
    scale = of((*outputs, depth // group if group else 1), scales)
    codes = of((*outputs, depth // codes_per_byte(code)), STORED[code])
    return QuantizedMatrix(codes=codes, scales=scale, zeros=scale if code == "uint4" else None, code=code)


@pytest.mark.parametrize(
    ("matrix", "dtype", "reason"),
    [
        (("int8", None, 2, 64, 128), jnp.float32, "rows of bfloat16, got float32"),
        (("int8", None, 2, 68, 128), jnp.bfloat16, "outputs in multiples of 8, at least 64"),
        (("int8", None, 2, 56, 128), jnp.bfloat16, "outputs in multiples of 8, at least 64"),
        (("int8", None, 2, 64, 120), jnp.bfloat16, "K in multiples of 16"),
        (("int4", None, 2, 64, 112), jnp.bfloat16, "K in multiples of 32"),
        (("e2m1", 16, 2, 64, 256), jnp.bfloat16, "scales of all columns, or of 32 to 256 that are a power of two"),
        (("fp8", 96, 2, 64, 192), jnp.bfloat16, "scales of all columns, or of 32 to 128 that are a power of two"),
        (("uint4", None, 2, 64, 256), jnp.bfloat16, "zero points of groups of columns"),
    ],
)
def test_what_the_kernel_cannot_do_is_said(matrix, dtype, reason):
    weight = shape_of(*matrix)
    x = jax.ShapeDtypeStruct((4, weight.shape[-1]), dtype)
    assert reason in (why_not(x, weight) or "")
    with pytest.raises(NotImplementedError, match="the grouped matmul of codes takes"):
        jax.eval_shape(grouped_matmul_of_codes, x, weight, jax.ShapeDtypeStruct((2,), jnp.int32))


@pytest.mark.parametrize(
    ("shape", "activation", "reason"),
    [
        ((2, 64, 128), swiglu, r"weight must be \[X, 2, N, K\], gate and up"),
        ((2, 2, 64, 128), None, r"weight must be \[X, N, K\]"),
        ((2, 64, 256), None, "does not fit a weight of shape"),
        ((3, 64, 128), None, "group_sizes must have 3 entries"),
    ],
)
def test_what_does_not_fit_is_refused(shape, activation, reason):
    of = jax.ShapeDtypeStruct
    run = functools.partial(grouped_matmul_of_codes, activation=activation)
    with pytest.raises(ValueError, match=reason):
        jax.eval_shape(run, of((4, 128), jnp.bfloat16), shape_of("int8", None, *shape), of((2,), jnp.int32))


QWEN_UP, QWEN_DOWN = (128, 2, 768, 2048), (128, 2048, 768)
OSS_UP, OSS_DOWN = (32, 2, 2880, 2880), (32, 2880, 2880)
E8M0 = jnp.float8_e8m0fnu
COMPILED = [
    (4, "e2m1", 32, OSS_UP, E8M0),
    (8, "fp8", 128, QWEN_UP, jnp.bfloat16),
    (32_768, "e2m1", 32, OSS_UP, E8M0),
    (65_536, "fp8", 128, QWEN_UP, jnp.float32),
    (4, "e2m1", 32, OSS_DOWN, E8M0),
    (256, "e2m1", 32, OSS_UP, E8M0),
    (8, "int4", 128, QWEN_UP, jnp.bfloat16),
    (65_536, "int4", 128, QWEN_DOWN, jnp.bfloat16),
    (8, "uint4", 32, QWEN_DOWN, jnp.bfloat16),
    (2048, "uint4", 128, QWEN_UP, jnp.bfloat16),
    (512, "int8", None, QWEN_UP, jnp.float32),
    (1024, "int8", 32, QWEN_UP, jnp.bfloat16),
]


@pytest.mark.parametrize(("num_rows", "code", "group", "shape", "scales"), quick_first(COMPILED, 2))
def test_compiles_without_spilling(num_rows, code, group, shape, scales):
    of = jax.ShapeDtypeStruct
    weight = shape_of(code, group, *shape, scales=scales)
    is_gated = len(shape) == 4

    def layer(x, weight, bias, sizes, tiles):
        options = {"bias": bias, "activation": swiglu if is_gated else None, "tiles": tiles}
        return grouped_matmul_of_codes(x, weight, sizes, **options)

    sizes = of((shape[0],), jnp.int32)
    make_plan = functools.partial(plan, num_rows=num_rows, tile_rows=tile_rows(num_rows, shape[0]))
    tiles = jax.eval_shape(make_plan, sizes)
    x, bias = of((num_rows, shape[-1]), jnp.bfloat16), of(shape[:-1], jnp.bfloat16)
    program = compile_for_h200(layer, x, weight, bias, sizes, tiles)
    [kernel] = program.kernels
    assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0)
    assert program.temp_bytes < 200_000  # no copy of weights


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
    {
        "code": "e2m1",
        "group": 32,
        "exponents": True,
        "outputs": 2880,
        "depth": 2880,
        "is_gated": True,
        "has_bias": True,
    },
    {"code": "e2m1", "group": 32, "exponents": True, "outputs": 2880, "depth": 2880, "has_bias": True},
    {"code": "fp8", "group": 128, "outputs": 768, "depth": 2048, "is_gated": True},
    {"code": "fp8", "group": None, "outputs": 2048, "depth": 768},
    {"code": "int4", "group": 128, "outputs": 768, "depth": 2048, "is_gated": True},
    {"code": "uint4", "group": 128, "outputs": 2048, "depth": 768},
    {"code": "int8", "group": None, "outputs": 200, "depth": 320, "is_gated": True, "has_bias": True},
    {"code": "int8", "group": 32, "outputs": 72, "depth": 64, "has_bias": True},
]


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("across", [None, 1, 2, 4])
@pytest.mark.parametrize("weight", WEIGHTS_ON_A_GPU, ids=str)
@pytest.mark.parametrize("case", ON_A_GPU)
def test_on_a_gpu(case, weight, across):
    arguments, options, want = make_case(**ON_A_GPU[case], **weight)
    config = heuristic(len(arguments[0]), arguments[1])
    if across is not None:
        config = Config(rows=8 if across < 4 else config.rows, across=across)
    got, again = (grouped_codes_sm90(*arguments, config=config, **options) for _ in range(2))
    check(got, want)
    assert (got[: len(want)] == again[: len(want)]).all()
