"""Matmuls of quantized weights: packing and dequantization against their definitions, XLA's against float64, how work
is cut, the Hopper kernel compiled for an H200 that is not there, and run where there is one.
"""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from depths import examples, quick_first
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.device.codes import codes_per_byte
from pallas_kernels.deviceless import compile_for_h200
from pallas_kernels.layer_matmuls.reference import layer_matmuls_reference
from pallas_kernels.quantized_matmuls import (
    QuantizedMatrix,
    QuantizedWeights,
    quantized_layer_matmuls,
    quantized_matmul,
    why_no_layer,
    why_not,
)
from pallas_kernels.quantized_matmuls.sm90 import Product, cut

EPS = 1e-5
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
TOLERANCE = 6e-3
"""Largest error relative to the result's norm: activations between two matmuls are rounded to 8 bits."""


STORED = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn, "int4": jnp.uint8, "uint4": jnp.uint8, "e2m1": jnp.uint8}


def make_matrix(outputs, depth, code, group, seed=0):
    """Return a matrix, and its values in float64 by their definition."""
    rng = np.random.default_rng(seed)
    groups = depth // group if group else 1
    scales = jnp.asarray(rng.uniform(0.5, 1.5, (*outputs, groups)) * depth**-0.5, jnp.float32)
    zeros = None
    if codes_per_byte(code) == 2:
        scales = (scales / 4).astype(jnp.bfloat16)
        codes = rng.integers(0, 16, (*outputs, depth), np.uint8)
        stored = jnp.asarray(codes[..., ::2] | codes[..., 1::2] << 4)
        values = E2M1[codes] if code == "e2m1" else codes.astype(np.float64) - (8 if code == "int4" else 0)
        if code == "uint4":
            zeros = jnp.asarray(rng.integers(0, 17, scales.shape), jnp.bfloat16)
            values -= np.repeat(in_float(zeros), depth // groups, axis=-1)
    else:
        values = rng.standard_normal((*outputs, depth))
        if code == "int8":
            values, scales = np.clip(np.round(values * 40), -128, 127), scales / 40
        stored = jnp.asarray(values, STORED[code])
        values = in_float(stored)
    matrix = QuantizedMatrix(codes=stored, scales=scales, zeros=zeros, code=code)
    return matrix, values * np.repeat(in_float(scales), depth // groups, axis=-1)


def make_layer(code, group, depth, hidden, inner, outputs, seed=0):
    shapes = {"o": (hidden,), "gate_up": (2, inner), "down": (hidden,), "qkv": (outputs,)}
    depths = {"o": depth, "gate_up": hidden, "down": inner, "qkv": hidden}
    parts = {
        name: make_matrix(shape, depths[name], code, group, seed + index)
        for index, (name, shape) in enumerate(shapes.items())
        if shape != (None,)
    }
    weights = QuantizedWeights(**{name: parts[name][0] if name in parts else None for name in shapes})
    return weights, {name: parts[name][1] if name in parts else None for name in shapes}


def rows(num_rows, depth, dtype=jnp.bfloat16, seed=7):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((num_rows, depth)), dtype)


def in_float(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


def error(got, want):
    return np.linalg.norm(in_float(got) - want) / np.linalg.norm(want)


def silu(x):
    return x / (1 + np.exp(-x))


CASES = [
    ("int4", 128),
    ("int4", 32),
    ("uint4", 64),
    ("e2m1", 32),
    ("int8", None),
    ("int8", 128),
    ("fp8", None),
    ("fp8", 128),
]


@pytest.mark.parametrize("outputs", [(64,), (2, 64)])
@pytest.mark.parametrize(("code", "group"), CASES)
def test_a_matrix_dequantized_is_what_its_codes_and_scales_say(code, group, outputs):
    matrix, want = make_matrix(outputs, 256, code, group)
    assert matrix.shape == (*outputs, 256)
    assert (matrix.num_outputs, matrix.depth) == (np.prod(outputs), 256)
    np.testing.assert_allclose(matrix.dequantize(), want, rtol=1e-6)


@pytest.mark.parametrize(("code", "group"), CASES)
def test_xla_matches_the_definition(code, group):
    x = rows(3, 256, jnp.float32)
    matrix, want = make_matrix((64,), 256, code, group)
    bias = rows(1, 64, jnp.float32)[0]
    assert error(quantized_matmul(x, matrix, bias=bias), in_float(x) @ want.T + in_float(bias)) < 1e-6
    gated, (gate, up) = make_matrix((2, 64), 256, code, group)
    got = quantized_matmul(x, gated, activation=jax.nn.silu)
    assert error(got, silu(in_float(x) @ gate.T) * (in_float(x) @ up.T)) < 1e-6


@pytest.mark.parametrize("outputs", [64, None])
def test_a_layer_in_xla_matches_the_definition(outputs):
    weights, dense = make_layer("int4", 128, 128, 128, 128, outputs)
    heads, residual = rows(3, 128, jnp.float32), rows(3, 128, jnp.float32, seed=8)
    gains = (1 + 0.1 * rows(1, 128, jnp.float32)[0],) * 2
    got = quantized_layer_matmuls(heads, residual, weights, gains, activation=jax.nn.silu, eps=EPS)
    want = layer_matmuls_reference(
        *map(in_float, (heads, residual)), **dense, gains=tuple(map(in_float, gains)), activation=silu, eps=EPS
    )
    for a, b in zip(got, want, strict=True):
        assert error(a, b) < 1e-5


def test_what_does_not_fit_is_refused():
    matrix, _ = make_matrix((64,), 256, "int8", None)
    gated, _ = make_matrix((2, 64), 256, "int8", None)
    with pytest.raises(ValueError, match=r"x of shape \(2, 128\) does not fit a weight of 256 columns"):
        quantized_matmul(rows(2, 128), matrix)
    with pytest.raises(ValueError, match="gate and up and an activation go together"):
        quantized_matmul(rows(2, 256), gated)
    with pytest.raises(ValueError, match=r"bias must have shape \(64,\), got \(32,\)"):
        quantized_matmul(rows(2, 256), matrix, bias=rows(1, 32)[0])
    with pytest.raises(ValueError, match="unknown implementation 'triton', there is 'xla', 'sm90'"):
        inspect.unwrap(quantized_matmul)(rows(2, 256), matrix, implementation="triton")


def shape_of(code, group, *shape):
    """Return the shapes of a matrix."""
    of = jax.ShapeDtypeStruct
    *outputs, depth = shape
    scales = of((*outputs, depth // group if group else 1), jnp.bfloat16)
    codes = of((*outputs, depth // codes_per_byte(code)), STORED[code])
    return QuantizedMatrix(codes=codes, scales=scales, zeros=scales if code == "uint4" else None, code=code)


@pytest.mark.parametrize(
    ("x", "matrix", "reason"),
    [
        ((65, 256), ("int8", None, 64, 256), "1 to 64 rows, got 65"),
        ((0, 256), ("int8", None, 64, 256), "1 to 64 rows, got 0"),
        ((2, 256), ("int8", None, 72, 256), "outputs in multiples of 64 and K of 128, got 72 and 256"),
        ((2, 200), ("fp8", None, 64, 200), "outputs in multiples of 64 and K of 128, got 64 and 200"),
        ((2, 384), ("int4", None, 64, 384), "outputs in multiples of 64 and K of 256, got 64 and 384"),
        ((2, 256), ("e2m1", 16, 64, 256), "scales of all columns, or of 32 to 256 that are a power of two, got 16"),
        ((2, 512), ("uint4", None, 64, 512), "zero points of groups of columns, got those of all 512"),
        ((2, 256), ("uint4", 256, 64, 256), "zero points of groups of columns, got those of all 256"),
        ((2, 768), ("fp8", 384, 64, 768), "scales of all columns, or of 32 to 128 that are a power of two, got 384"),
    ],
)
def test_what_the_kernel_cannot_do_is_said(x, matrix, reason):
    x, matrix = jax.ShapeDtypeStruct(x, jnp.bfloat16), shape_of(*matrix)
    assert why_not(x, matrix) == reason
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(lambda x, w: quantized_matmul(x, w, implementation="sm90"), x, matrix)


def test_the_kernel_wants_rows_of_bfloat16_and_weights_that_it_can_take():
    of = jax.ShapeDtypeStruct
    weights = shapes_of("int4", 128, 256, 256, 256, 64)
    assert why_not(of((2, 128), jnp.float32), weights.o) == "rows of bfloat16, got float32"
    assert why_no_layer(of((2, 256), jnp.bfloat16), weights) is None
    narrow = weights._replace(down=shape_of("int4", 128, 72, 256))
    assert "got 72 and 256" in (why_no_layer(of((2, 256), jnp.bfloat16), narrow) or "")


@pytest.mark.parametrize("code", STORED)
def test_the_kernel_drops_no_zero_points_and_makes_none_up(code):
    matrix = shape_of(code, 128, 64, 512)
    x = jax.ShapeDtypeStruct((2, 512), jnp.bfloat16)
    assert why_not(x, matrix) is None
    other = dataclasses.replace(matrix, zeros=None if code == "uint4" else matrix.scales)
    assert why_not(x, other) == f"zero points of uint4, and of no other codes, got {code}"


@settings(max_examples=examples(100))
@given(blocks=st.integers(1, 300), depth=st.integers(1, 40), code=st.sampled_from(["int4", "int8"]))
def test_every_unit_has_one_thread_block(blocks, depth, code):
    matmul = cut(Product("w", "x", "y", shape_of(code, None, 64 * blocks, 128 * depth)))
    firsts = [matmul.first_unit(cta) for cta in range(133)]
    assert firsts[0] == 0
    assert firsts[132] == matmul.num_units
    sizes = np.diff(firsts)
    assert sizes.max() - sizes[: matmul.num_ctas].min() <= 1
    owners = np.repeat(np.arange(132), sizes)
    np.testing.assert_array_equal([matmul.owner(unit) for unit in range(matmul.num_units)], owners)


def shapes_of(code, group, depth, hidden, inner, outputs):
    return QuantizedWeights(
        o=shape_of(code, group, hidden, depth),
        gate_up=shape_of(code, group, 2, inner, hidden),
        down=shape_of(code, group, hidden, inner),
        qkv=None if outputs is None else shape_of(code, group, outputs, hidden),
    )


LLAMA_3_8B = (4096, 4096, 14336, 6144)


@pytest.mark.parametrize(
    ("num_rows", "code", "group", "sizes"),
    quick_first(
        [
            (1, "int4", 128, LLAMA_3_8B),
            (16, "int4", 32, LLAMA_3_8B),
            (64, "int4", 128, LLAMA_3_8B),
            (8, "e2m1", 32, (1024, 1024, 4864, None)),
            (8, "uint4", 128, LLAMA_3_8B),
            (8, "fp8", None, LLAMA_3_8B),
            (16, "fp8", 128, LLAMA_3_8B),
            (64, "fp8", 128, LLAMA_3_8B),
            (56, "e2m1", 32, (1024, 1024, 4864, 1152)),
            (64, "uint4", 32, (1024, 1024, 4864, 1152)),
            (40, "int8", None, (896, 896, 4864, 1152)),
        ]
    ),
)
def test_a_layer_compiles_without_spilling(num_rows, code, group, sizes):
    of = jax.ShapeDtypeStruct
    x, gain = of((num_rows, sizes[0]), jnp.bfloat16), of((sizes[1],), jnp.bfloat16)
    residual = of((num_rows, sizes[1]), jnp.bfloat16)

    def layer(heads, residual, weights, gains):
        return quantized_layer_matmuls(
            heads, residual, weights, gains, activation=jax.nn.silu, eps=EPS, implementation="sm90"
        )

    executable = compile_for_h200(layer, x, residual, shapes_of(code, group, *sizes), (gain, gain))
    [kernel] = executable.kernels
    assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0)


@pytest.mark.parametrize(("code", "group"), quick_first([("int4", 128), ("fp8", None)]))
def test_a_language_model_head_compiles_without_spilling(code, group):
    of = jax.ShapeDtypeStruct
    head = shapes_of(code, group, 128, 4096, 128, 128_256).qkv
    run = functools.partial(quantized_matmul, output_dtype=jnp.float32, implementation="sm90")
    [kernel] = compile_for_h200(run, of((8, 4096), jnp.bfloat16), head).kernels
    assert kernel.spill_bytes == 0


ON_A_GPU = [
    ("int4", 128, (512, 768, 1536, 320)),
    ("int4", 32, (1024, 1024, 4864, 1152)),
    ("uint4", 128, (1024, 1024, 2816, 1536)),
    ("e2m1", 32, (1024, 1024, 4864, None)),
    ("fp8", None, (640, 1152, 2944, 320)),
    ("fp8", 128, (896, 896, 4864, 1152)),
    ("int8", None, (1024, 1024, 2816, 1536)),
]


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("num_rows", [1, 3, 8, 13, 16, 17, 40, 64])
@pytest.mark.parametrize(("code", "group", "sizes"), ON_A_GPU)
def test_a_layer_on_a_gpu(code, group, sizes, num_rows):
    weights, dense = make_layer(code, group, *sizes)
    heads, residual = rows(num_rows, sizes[0]), rows(num_rows, sizes[1], seed=8)
    gains = (1 + 0.1 * rows(1, sizes[1])[0],) * 2

    def run():
        return quantized_layer_matmuls(
            heads, residual, weights, gains, activation=jax.nn.silu, eps=EPS, implementation="sm90"
        )

    got = run()
    want = layer_matmuls_reference(
        *map(in_float, (heads, residual)), **dense, gains=tuple(map(in_float, gains)), activation=silu, eps=EPS
    )
    for a, b in zip(got, want, strict=True):
        assert error(a, b) < TOLERANCE
    for _ in range(20):
        for a, b in zip(run(), got, strict=True):
            np.testing.assert_array_equal(in_float(a), in_float(b))


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("num_rows", [1, 16, 48])
@pytest.mark.parametrize(("code", "group"), [("int4", 64), ("fp8", None), ("int8", 128)])
def test_one_matmul_on_a_gpu(code, group, num_rows):
    x, bias = rows(num_rows, 768), rows(1, 320)[0]
    matrix, want = make_matrix((320,), 768, code, group)
    got = quantized_matmul(x, matrix, bias=bias, output_dtype=jnp.float32, implementation="sm90")
    assert error(got, in_float(x) @ want.T + in_float(bias)) < TOLERANCE
