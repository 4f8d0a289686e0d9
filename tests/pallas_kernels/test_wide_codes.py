"""The wide kernel of grouped codes, for many rows a group: interpreted on a CPU, all but what is inlined Mosaic GPU
code, with race detection; compiled for an H200 that is not there, and run where there is one.
"""

import functools

import emulated_wide_codes
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
from pallas_kernels.grouped_codes import grouped_matmul_of_codes, why_not
from pallas_kernels.grouped_codes.sm90 import tile_rows
from pallas_kernels.grouped_codes.sm90_wide import Config, heuristic, wide_sm90
from pallas_kernels.inputs import swiglu

INTERPRETED = {
    # Both blocks of a warpgroup; a scale a piece; tiles of 16 that begin anywhere; outputs that are not whole tiles.
    "fp8 of blocks": (
        {"code": "fp8", "group": 64, "sizes": [3, 0, 20], "num_rows": 27, "outputs": 72, "depth": 192}
        | {"is_gated": True, "has_bias": True},
        Config(rows=16, blocks=2, num_blocks=2),
    ),
    # Powers of two as scales, two in a piece; five pieces, the last of them half; sums stored from registers.
    "mxfp4": (
        {"code": "e2m1", "group": 32, "exponents": True, "sizes": [0, 5], "num_rows": 5, "outputs": 64, "depth": 288},
        Config(rows=8, blocks=1, num_blocks=1),
    ),
    # Four scales a piece, the last piece half; a factor of sums, which two parts of K are multiplied by.
    "nvfp4": (
        {"code": "e2m1", "group": 16, "levels": E4M3, "sizes": [13], "num_rows": 13, "outputs": 72, "depth": 544}
        | {"is_gated": True, "has_bias": True},
        Config(rows=16, blocks=2, num_blocks=2, parts=2),
    ),
    "Q4_K": (
        {"code": "uint4", "group": 32, "levels": jnp.int8, "has_minimums": True, "sizes": [3, 0, 20], "num_rows": 27}
        | {"outputs": 72, "depth": 512, "is_gated": True},
        Config(rows=16, blocks=2, num_blocks=2),
    ),
    "Q2_K": (
        {"code": "uint4", "group": 16, "levels": jnp.int8, "has_minimums": True, "sizes": [5], "num_rows": 5}
        | {"outputs": 64, "depth": 512},
        Config(rows=8, blocks=1, num_blocks=1),
    ),
    "Q6_K": (
        {"code": "int8", "group": 16, "levels": jnp.int8, "sizes": [5], "num_rows": 5, "outputs": 64, "depth": 512},
        Config(rows=8, blocks=1, num_blocks=1),
    ),
    # Minimums of 16 bits in one level, with 8-bit codes.
    "Q5_1": (
        {"code": "int8", "group": 32, "has_minimums": True, "sizes": [5], "num_rows": 5, "outputs": 64, "depth": 288},
        Config(rows=8, blocks=1, num_blocks=1),
    ),
    # Zero points, parts of K of which one is shorter, whose sums XLA finishes; rows that are padded.
    "uint4": (
        {"code": "uint4", "group": 128, "sizes": [13], "num_rows": 13, "outputs": 72, "depth": 768}
        | {"is_gated": True, "has_bias": True},
        Config(rows=16, blocks=1, num_blocks=2, parts=2),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", INTERPRETED)
def test_interpreted_without_races(capsys, case):
    problem, config = INTERPRETED[case]
    arguments, options, want = make_case(**problem)
    dtype = jnp.float32 if case == "mxfp4" else None
    run = functools.partial(wide_sm90, config=config, ops=emulated_wide_codes, output_dtype=dtype, **options)
    check(interpret(capsys, run, *arguments), want)


UP, DOWN = (1, 2, 14336, 4096), (1, 4096, 14336)
COMPILED = [
    (8192, "int4", 128, UP, jnp.bfloat16),
    (128, "int8", None, DOWN, jnp.float32),
    (32_768, "e2m1", 32, OSS_UP, E8M0),
    (65_536, "fp8", 128, QWEN_UP, jnp.float32),
    (96, "uint4", 32, DOWN, jnp.float16),
    (72, "int8", 32, UP, jnp.bfloat16),
    (32_768, "e2m1", 32, OSS_DOWN, E8M0),
    (8192, "int4", 128, QWEN_DOWN, jnp.bfloat16),
    (65_536, "uint4", 32, QWEN_UP, jnp.float32),
    (1024, "e2m1", 32, OSS_UP, E8M0),
    (3000, "e2m1", 32, OSS_UP, E8M0),
    (4000, "e2m1", 32, OSS_DOWN, E8M0),
    (264, "int8", 32, UP, jnp.bfloat16),
    (200, "uint4", 32, UP, jnp.float16),
]


@pytest.mark.slow
@pytest.mark.parametrize(("num_rows", "code", "group", "shape", "scales"), quick_first(COMPILED))
def test_compiles_without_spilling(num_rows, code, group, shape, scales):
    of = jax.ShapeDtypeStruct
    weight = shape_of(code, group, *shape, scales=scales)

    def layer(x, weight, sizes):
        return grouped_matmul_of_codes(x, weight, sizes, activation=swiglu if len(shape) == 4 else None)

    program = compile_for_h200(layer, of((num_rows, shape[-1]), jnp.bfloat16), weight, of(shape[:1], jnp.int32))
    [kernel] = program.kernels
    assert kernel.name == "wide_grouped_codes"
    assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0)
    parts = heuristic(num_rows, weight, rows=tile_rows(num_rows, shape[0])).parts
    sums = 4 * num_rows * shape[-2] * parts if parts > 1 else 0
    assert program.temp_bytes < 200_000 + 2 * sums  # no copy of weights


FORMATS = {
    "MXFP4": ("e2m1", 32, E8M0, False),
    "NVFP4": ("e2m1", 16, E4M3, False),
    "NF4": ("nf4", 64, jnp.float32, False),
    "FP4": ("fp4", 64, jnp.float32, False),
    "Q4_1": ("uint4", 32, jnp.float16, True),
    "Q5_1": ("int8", 32, jnp.float16, True),
    "Q4_K": ("uint4", 32, jnp.int8, True),
    "Q2_K": ("uint4", 16, jnp.int8, True),
    "Q3_K": ("int4", 16, jnp.int8, False),
    "Q5_K": ("int8", 32, jnp.int8, True),
    "Q6_K": ("int8", 16, jnp.int8, False),
}


# Few rows of gate and up, or many of down: formats with levels and minimums have both, others one of them in turn.
@pytest.mark.parametrize(
    ("name", "num_rows", "shape"),
    quick_first(
        [
            (name, num_rows, shape)
            for i, name in enumerate(FORMATS)
            for j, (num_rows, shape) in enumerate(((65, UP), (512, DOWN)))
            if name in ("NVFP4", "Q4_K", "Q2_K") or (i + j) % 2 == 0
        ]
    ),
)
def test_formats_of_dense_matrices_compile_without_spilling(name, num_rows, shape):
    of = jax.ShapeDtypeStruct
    code, group, scales, has_minimums = FORMATS[name]
    weight = shape_of(code, group, *shape, scales=scales, has_minimums=has_minimums)
    activation = swiglu if len(shape) == 4 else None
    run = functools.partial(grouped_matmul_of_codes, activation=activation)
    program = compile_for_h200(run, of((num_rows, shape[-1]), jnp.bfloat16), weight, of((1,), jnp.int32))
    [kernel] = program.kernels
    assert kernel.name == "wide_grouped_codes"
    assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("num_rows", "matrix", "options", "reason"),
    [
        (100, ("fp8", 96, 1, 64, 192), {}, "scales of all columns, or of 16 to 128 that are a power of two"),
        (100, ("int8", 16, 1, 64, 144), {}, "K in multiples of 32 with scales of 16"),
        (100, ("uint4", None, 1, 64, 256), {}, "zero points and minimums of groups of columns"),
        (513, ("int4", 16, 1, 64, 256), {}, "at most 512 rows with tables, minimums, scales in two levels"),
        (513, ("e2m1", 16, 1, 64, 256), {"scales": E4M3}, "at most 512 rows"),
        (513, ("int8", 32, 1, 64, 256), {"scales": jnp.int8}, "at most 512 rows"),
        (513, ("uint4", 32, 1, 64, 256), {"has_minimums": True}, "at most 512 rows"),
        (513, ("nf4", 64, 1, 64, 256), {}, "at most 512 rows"),
    ],
)
def test_what_the_kernel_cannot_do_is_said(num_rows, matrix, options, reason):
    weight = shape_of(*matrix, **options)
    assert reason in (why_not(jax.ShapeDtypeStruct((num_rows, weight.shape[-1]), jnp.bfloat16), weight) or "")
    if num_rows == 513:
        assert why_not(jax.ShapeDtypeStruct((512, weight.shape[-1]), jnp.bfloat16), weight) is None


def test_a_device_with_one_expert_multiplies_any_number_of_rows_by_its_codes():
    of = jax.ShapeDtypeStruct
    weight = shape_of("e2m1", 16, 1, 64, 256, scales=E4M3)
    x = of((2048, 256), jnp.bfloat16)
    assert jax.eval_shape(grouped_matmul_of_codes, x, weight, of((1,), jnp.int32)).shape == (2048, 64)


def test_tiles():
    """The fastest on a GPU."""

    def config(num_rows, shape):
        found = heuristic(num_rows, shape_of("int4", 128, *shape), rows=tile_rows(num_rows, shape[0]))
        return found.rows, found.blocks, found.parts

    assert [config(rows, UP) for rows in (72, 128, 256, 264, 8192)] == [
        (72, 2, 1),
        (128, 2, 1),
        (256, 1, 1),
        (136, 1, 1),
        (256, 1, 1),
    ]
    assert [config(rows, DOWN) for rows in (128, 512, 2048, 8192)] == [
        (128, 2, 8),
        (256, 1, 2),
        (256, 1, 1),
        (256, 1, 1),
    ]
    assert [config(rows, OSS_DOWN) for rows in (1024, 4096, 32_768)] == [(48, 2, 1), (192, 1, 1), (256, 1, 1)]


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("config", [Config(rows=128, blocks=2), Config(rows=48, blocks=2), Config(rows=256, blocks=1)])
@pytest.mark.parametrize("weight", WEIGHTS_ON_A_GPU + WEIGHTS_IN_LEVELS, ids=str)
@pytest.mark.parametrize("case", ON_A_GPU)
def test_on_a_gpu(case, weight, config):
    arguments, options, want = make_case(**ON_A_GPU[case], **weight)
    got, again = (wide_sm90(*arguments, config=config, **options) for _ in range(2))
    check(got, want)
    assert (got[: len(want)] == again[: len(want)]).all()


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("num_rows", [72, 128, 200])
@pytest.mark.parametrize("weight", WEIGHTS_ON_A_GPU[:6] + WEIGHTS_IN_LEVELS, ids=str)
def test_parts_of_k_on_a_gpu(weight, num_rows):
    arguments, options, want = make_case([num_rows], num_rows=num_rows, **weight)
    config = Config(rows=num_rows, blocks=2 if num_rows <= 128 else 1, parts=3)
    check(wide_sm90(*arguments, config=config, **options), want)
    check(wide_sm90(*arguments, config=config, output_dtype=jnp.float32, **options), want)
