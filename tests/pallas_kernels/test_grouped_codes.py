"""The grouped matmul of codes: its Hopper kernel interpreted on a CPU, all but what is inlined Mosaic GPU code, with
race detection; compiled for an H200 that is not there, and run where there is one.
"""

import functools

import emulated_codes
import jax
import jax.numpy as jnp
import pytest
from codes_cases import (
    E4M3,
    E8M0,
    ON_A_GPU,
    OSS_DOWN,
    OSS_UP,
    QWEN_DOWN,
    QWEN_UP,
    WEIGHTS_IN_LEVELS,
    WEIGHTS_ON_A_GPU,
    check,
    make_case,
    shape_of,
)
from depths import quick_first
from interpreting import interpret

from pallas_kernels.deviceless import compile_for_h200
from pallas_kernels.grouped_codes import grouped_matmul_of_codes, tile_rows, why_not
from pallas_kernels.grouped_codes.sm90 import Config, grouped_codes_sm90, heuristic
from pallas_kernels.grouped_matmul import plan
from pallas_kernels.inputs import swiglu

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
    # Q4_K: minimums, and scales in two levels, parts of whose columns are multiplied one after the other.
    "minimums": (
        {"code": "uint4", "group": 32, "has_minimums": True, "levels": jnp.int8, "sizes": [9, 2], "num_rows": 11}
        | {"outputs": 64, "depth": 512},
        Config(rows=8, across=2, num_blocks=1),
    ),
    # A device's part of an expert: factors of half a block of columns.
    "parts of blocks": (
        {"code": "uint4", "group": 32, "has_minimums": True, "levels": jnp.int8, "sizes": [2, 0, 3], "num_rows": 5}
        | {"outputs": 64, "depth": 384, "factored": 128},
        Config(rows=8, across=2, num_blocks=1),
    ),
    "less than a block": (
        {"code": "uint4", "group": 32, "has_minimums": True, "levels": jnp.int8, "sizes": [4], "num_rows": 4}
        | {"outputs": 64, "depth": 128, "factored": 128},
        Config(rows=8, across=4, num_blocks=1),
    ),
    # NVFP4: scales of 16 columns, and a factor of each output, which its sum is multiplied by.
    "two levels": (
        {"code": "e2m1", "group": 16, "levels": E4M3, "sizes": [0, 3], "num_rows": 3, "outputs": 64, "depth": 288}
        | {"is_gated": True},
        Config(rows=8, across=1, num_blocks=1),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", INTERPRETED)
def test_interpreted_without_races(capsys, case):
    problem, config = INTERPRETED[case]
    arguments, options, want = make_case(**problem)
    tiles = plan(arguments[2], num_rows=problem["num_rows"], tile_rows=config.rows)
    run = functools.partial(grouped_codes_sm90, tiles=tiles, config=config, ops=emulated_codes, **options)
    check(interpret(capsys, run, *arguments), want)


def test_no_rows():
    (x, weight, sizes), _, _ = make_case([0, 0], num_rows=1, outputs=64, depth=128, code="fp8", group=None)
    assert grouped_matmul_of_codes(x[:0], weight, sizes).shape == (0, 64)


@pytest.mark.parametrize(
    ("num_rows", "rows"), [(1, 8), (8, 8), (512, 8), (1024, 16), (2048, 32), (4096, 48), (8192, 96), (65_536, 256)]
)
def test_most_groups_have_one_tile(num_rows, rows):
    assert tile_rows(num_rows, 128) == rows


@pytest.mark.parametrize(
    ("num_rows", "rows"), [(7, 8), (60, 64), (65, 72), (128, 128), (129, 136), (257, 136), (512, 256)]
)
def test_rows_of_a_dense_matrix_are_padded_to_eight(num_rows, rows):
    assert tile_rows(num_rows, 1) == rows


def test_few_experts_keep_most_multiprocessors_reading():
    def items(num_rows, shape):
        across = heuristic(num_rows, shape_of("e2m1", 32, *shape)).across
        return 4 * -(-shape[-2] * (2 if len(shape) == 4 else 1) // (64 * across))

    # One token of gpt-oss-20b: 4 experts.
    assert items(4, (32, 2, 2880, 2880)) > 132
    assert items(4, (32, 2880, 2880)) > 90


@pytest.mark.parametrize(
    ("matrix", "dtype", "reason"),
    [
        (("int8", None, 2, 64, 128), jnp.float32, "rows of bfloat16, got float32"),
        (("int8", None, 2, 68, 128), jnp.bfloat16, "outputs in multiples of 8, at least 64"),
        (("int8", None, 2, 56, 128), jnp.bfloat16, "outputs in multiples of 8, at least 64"),
        (("int8", None, 2, 64, 120), jnp.bfloat16, "K in multiples of 16"),
        (("int4", None, 2, 64, 112), jnp.bfloat16, "K in multiples of 32"),
        (("e2m1", 8, 2, 64, 256), jnp.bfloat16, "scales of all columns, or of 16 to 256 that are a power of two"),
        (("fp8", 96, 2, 64, 192), jnp.bfloat16, "scales of all columns, or of 16 to 128 that are a power of two"),
        (("uint4", None, 2, 64, 256), jnp.bfloat16, "zero points and minimums of groups of columns"),
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


COMPILED = [
    (8, "nf4", 64, QWEN_UP, jnp.float32, False),
    (2048, "nf4", 64, QWEN_DOWN, jnp.float32, False),
    (8, "fp4", 64, QWEN_UP, jnp.float32, False),
    (1024, "uint4", 128, QWEN_UP, jnp.float16, False),
    (2048, "uint4", 32, QWEN_UP, jnp.float16, False),
    (2048, "int4", 32, QWEN_UP, jnp.float16, False),
    (8, "uint4", 32, QWEN_UP, jnp.int8, True),
    (8, "e2m1", 16, QWEN_UP, E4M3, False),
    (8, "int8", 16, QWEN_DOWN, jnp.int8, False),
    (8, "uint4", 16, QWEN_DOWN, jnp.int8, True),
    (8, "int4", 16, QWEN_UP, jnp.int8, False),
    (8, "int8", 32, QWEN_UP, jnp.int8, True),
    (8, "uint4", 32, QWEN_UP, jnp.float16, True),
    (2048, "uint4", 32, QWEN_DOWN, jnp.int8, True),
    (2048, "e2m1", 16, QWEN_UP, E4M3, False),
    (2048, "int8", 16, QWEN_UP, jnp.int8, False),
    (2048, "int8", 32, QWEN_UP, jnp.int8, True),
    (4, "e2m1", 32, OSS_UP, E8M0, False),
    (8, "fp8", 128, QWEN_UP, jnp.bfloat16, False),
    (2048, "fp8", 128, QWEN_UP, jnp.float32, False),
    (4, "e2m1", 32, OSS_DOWN, E8M0, False),
    (256, "e2m1", 32, OSS_UP, E8M0, False),
    (8, "int4", 128, QWEN_UP, jnp.bfloat16, False),
    (4096, "int4", 128, QWEN_DOWN, jnp.bfloat16, False),
    (8, "uint4", 32, QWEN_DOWN, jnp.bfloat16, False),
    (2048, "uint4", 128, QWEN_UP, jnp.bfloat16, False),
    (512, "int8", None, QWEN_UP, jnp.float32, False),
    (1024, "int8", 32, QWEN_UP, jnp.bfloat16, False),
]


@pytest.mark.parametrize(("num_rows", "code", "group", "shape", "scales", "has_minimums"), quick_first(COMPILED, 2))
def test_compiles_without_spilling(num_rows, code, group, shape, scales, has_minimums):
    of = jax.ShapeDtypeStruct
    weight = shape_of(code, group, *shape, scales=scales, has_minimums=has_minimums)
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


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("across", [None, 1, 2, 4])
@pytest.mark.parametrize("weight", WEIGHTS_ON_A_GPU + WEIGHTS_IN_LEVELS, ids=str)
@pytest.mark.parametrize("case", ON_A_GPU)
def test_on_a_gpu(case, weight, across):
    arguments, options, want = make_case(**ON_A_GPU[case], **weight)
    config = heuristic(len(arguments[0]), arguments[1])
    if across is not None:
        config = Config(rows=8 if across < 4 else config.rows, across=across)
    got, again = (grouped_codes_sm90(*arguments, config=config, **options) for _ in range(2))
    check(got, want)
    assert (got[: len(want)] == again[: len(want)]).all()
