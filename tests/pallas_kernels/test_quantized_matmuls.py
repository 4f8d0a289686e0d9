"""Matmuls of quantized weights: packing and dequantization against their definitions, XLA's against float64, how work
is cut, the Hopper kernel compiled for an H200 that is not there, and run where there is one.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.deviceless import compile_for_h200
from pallas_kernels.layer_matmuls.reference import layer_matmuls_reference
from pallas_kernels.quantized_matmuls import (
    PACKED_CODES,
    QuantizedMatrix,
    QuantizedWeights,
    pack_matrix,
    quantized_layer_matmuls,
    quantized_matmul,
    why_no_layer,
    why_not,
    why_not_packed,
)
from pallas_kernels.quantized_matmuls.packing import (
    interleave,
    pack_codes,
    pack_values,
    separate,
    unpack_codes,
    unpack_values,
)
from pallas_kernels.quantized_matmuls.sm90 import Product, cut

EPS = 1e-5
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
TOLERANCE = 6e-3
"""Of the norm of the result: what lies between two matmuls is rounded to 8 bits."""


def make_matrix(outputs, depth, code, group, seed=0, size=1.0):
    """A matrix, and its values in float64 by their definition."""
    rng = np.random.default_rng(seed)
    groups = depth // group if group else 1
    scales = rng.uniform(0.5, 1.5, (*outputs, groups)) * size * depth**-0.5
    repeat = depth // groups
    if code in PACKED_CODES:
        scales = np.asarray(jnp.asarray(scales, jnp.bfloat16), np.float64) / 4
        codes = rng.integers(0, 16, (*outputs, depth), np.uint8)
        matrix = pack_matrix(jnp.asarray(codes), jnp.asarray(scales, jnp.bfloat16), code=code)
        values = codes.astype(np.float64) - 8 if code == "int4" else E2M1[codes]
    else:
        scales = scales.astype(np.float32)
        values = rng.standard_normal((*outputs, depth))
        if code == "int8":
            values, scales = np.clip(np.round(values * 40), -128, 127), scales / np.float32(40)
        stored = jnp.asarray(values, jnp.int8 if code == "int8" else jnp.float8_e4m3fn)
        matrix = QuantizedMatrix(values=stored, scales=jnp.asarray(scales), code=code, is_gated=len(outputs) == 2)
        values = np.asarray(stored.astype(jnp.float32), np.float64)
    return matrix, values * np.repeat(scales.astype(np.float64), repeat, axis=-1)


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


@pytest.mark.parametrize("group", [16, 32, 64, 128])
def test_what_is_packed_is_unpacked(group):
    rng = np.random.default_rng(group)
    codes = jnp.asarray(rng.integers(0, 16, (192, 384)), jnp.uint8)
    scales = jnp.asarray(rng.standard_normal((192, 384 // group)), jnp.bfloat16)
    np.testing.assert_array_equal(unpack_codes(pack_codes(codes)), codes)
    np.testing.assert_array_equal(unpack_values(pack_values(scales, group)), scales.astype(jnp.float32))


def test_a_thread_has_the_codes_that_wgmma_wants_of_it():
    codes = np.zeros((64, 128), np.uint8)
    output, column = 16 * 2 + 8 * 1 + 5, 64 * 1 + 16 * 3 + 8 * 1 + 2 * 2 + 1
    codes[output, column] = 9
    words = np.asarray(pack_codes(jnp.asarray(codes))).view(np.uint32).reshape(2, 4, 8, 4, 4)
    [place] = np.argwhere(words)
    assert tuple(place) == (1, 2, 5, 2, 3)
    assert words[tuple(place)] == 9 << 4 * (1 + 2 * 1 + 4 * 1)


def test_gate_and_up_in_turns_of_eight_are_separated_again():
    gate, up = jnp.arange(32), 100 + jnp.arange(32)
    rows_of_both = interleave(gate, up)
    np.testing.assert_array_equal(rows_of_both[:24], [*range(8), *range(100, 108), *range(8, 16)])
    for got, want in zip(separate(rows_of_both), (gate, up), strict=True):
        np.testing.assert_array_equal(got, want)


CASES = [
    ("int4", 128),
    ("int4", 32),
    ("e2m1", 32),
    ("e2m1", 16),
    ("int8", None),
    ("int8", 128),
    ("e4m3", None),
    ("e4m3", 128),
]


@pytest.mark.parametrize("outputs", [(64,), (2, 64)])
@pytest.mark.parametrize(("code", "group"), CASES)
def test_a_matrix_dequantized_is_what_its_codes_and_scales_say(code, group, outputs):
    matrix, want = make_matrix(outputs, 256, code, group)
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


@pytest.mark.parametrize(
    ("x", "shape", "reason"),
    [
        ((65, 256), (64, 256), "1 to 64 rows, got 65"),
        ((0, 256), (64, 256), "1 to 64 rows, got 0"),
        ((2, 256), (72, 256), "outputs in multiples of 64 and K of 16, got 72 and 256"),
        ((2, 200), (64, 200), "outputs in multiples of 64 and K of 16, got 64 and 200"),
    ],
)
def test_what_the_kernel_cannot_do_is_said(x, shape, reason):
    of = jax.ShapeDtypeStruct
    matrix = QuantizedMatrix(values=of(shape, jnp.int8), scales=of((shape[0], 1), jnp.float32), code="int8")
    assert why_not(of(x, jnp.bfloat16), matrix) == reason
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(lambda x, w: quantized_matmul(x, w, implementation="sm90"), of(x, jnp.bfloat16), matrix)


def test_the_kernel_wants_rows_of_bfloat16_and_weights_of_one_format():
    of = jax.ShapeDtypeStruct
    weights, _ = make_layer("int4", 128, 128, 128, 128, 64)
    other, _ = make_layer("int4", 32, 128, 128, 128, 64)
    assert why_not(of((2, 128), jnp.float32), weights.o) == "rows of bfloat16, got float32"
    assert why_no_layer(of((2, 128), jnp.bfloat16), weights) is None
    mixed = weights._replace(down=other.down)
    assert why_no_layer(of((2, 128), jnp.bfloat16), mixed) == "weights of one code and group size in one kernel"


@pytest.mark.parametrize(
    ("outputs", "depth", "group", "reason"),
    [
        ((64,), 128, 256, "groups of 16, 32, 64 or 128 columns, got 256"),
        ((72,), 128, 128, "outputs in multiples of 64 and K in multiples of 128, got 72 and 128"),
        ((2, 40), 128, 128, "multiples of 64 and K in multiples of 128, got 80 and 128"),
        ((64,), 192, 64, "multiples of 64 and K in multiples of 128, got 64 and 192"),
    ],
)
def test_what_cannot_be_packed_is_said(outputs, depth, group, reason):
    assert reason in (why_not_packed(outputs, depth, group) or "")
    if depth >= group:
        with pytest.raises(NotImplementedError, match=reason):
            pack_matrix(jnp.zeros((*outputs, depth), jnp.uint8), jnp.zeros((*outputs, depth // group)), code="int4")


@given(blocks=st.integers(1, 700), depth=st.integers(1, 120), code=st.sampled_from(["int4", "int8"]))
def test_every_unit_has_one_thread_block(blocks, depth, code):
    of = jax.ShapeDtypeStruct
    if code == "int4":
        matrix = QuantizedMatrix(values=of((blocks, depth, 33, 32), jnp.int32), scales=None, code=code)
    else:
        values = of((64 * blocks, 128 * depth), jnp.int8)
        matrix = QuantizedMatrix(values=values, scales=of((64 * blocks, 1), jnp.float32), code=code)
    matmul = cut(Product("w", "x", "y", matrix))
    firsts = [matmul.first_unit(cta) for cta in range(133)]
    assert firsts[0] == 0
    assert firsts[132] == matmul.num_units
    sizes = np.diff(firsts)
    assert sizes.max() - sizes[: matmul.num_ctas].min() <= 1
    owners = np.repeat(np.arange(132), sizes)
    np.testing.assert_array_equal([matmul.owner(unit) for unit in range(matmul.num_units)], owners)


def shapes_of(code, group, depth, hidden, inner, outputs):
    of = jax.ShapeDtypeStruct

    def matrix(*shape):
        *outputs, depth = shape
        if code in PACKED_CODES:
            values = of((np.prod(outputs) // 64, depth // 128, 32 + 128 // group, 32), jnp.int32)
            return QuantizedMatrix(values=values, scales=None, code=code, is_gated=len(outputs) == 2)
        values = of(shape, jnp.int8 if code == "int8" else jnp.float8_e4m3fn)
        scales = of((*outputs, depth // group if group else 1), jnp.float32)
        return QuantizedMatrix(values=values, scales=scales, code=code, is_gated=len(outputs) == 2)

    qkv = None if outputs is None else matrix(outputs, hidden)
    return QuantizedWeights(matrix(hidden, depth), matrix(2, inner, hidden), matrix(hidden, inner), qkv)


LLAMA_3_8B = (4096, 4096, 14336, 6144)


@pytest.mark.parametrize(
    ("num_rows", "code", "group", "sizes"),
    [
        (1, "int4", 128, LLAMA_3_8B),
        (16, "int4", 32, LLAMA_3_8B),
        (64, "int4", 128, LLAMA_3_8B),
        (8, "e2m1", 16, (896, 896, 4864, None)),
        (8, "e4m3", None, LLAMA_3_8B),
        (16, "e4m3", 128, LLAMA_3_8B),
        (64, "e4m3", 128, LLAMA_3_8B),
        (40, "int8", None, (896, 896, 4864, 1152)),
    ],
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


@pytest.mark.parametrize(("code", "group"), [("int4", 128), ("e4m3", None)])
def test_a_language_model_head_compiles_without_spilling(code, group):
    of = jax.ShapeDtypeStruct
    head = shapes_of(code, group, 128, 4096, 128, 128_256).qkv
    run = functools.partial(quantized_matmul, output_dtype=jnp.float32, implementation="sm90")
    [kernel] = compile_for_h200(run, of((8, 4096), jnp.bfloat16), head).kernels
    assert kernel.spill_bytes == 0


ON_A_GPU = [
    ("int4", 128, (512, 640, 1408, 320)),
    ("int4", 32, (896, 896, 4864, 1152)),
    ("e2m1", 32, (896, 896, 4864, None)),
    ("e4m3", None, (640, 1152, 2944, 320)),
    ("e4m3", 128, (896, 896, 4864, 1152)),
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
@pytest.mark.parametrize(("code", "group"), [("int4", 64), ("e4m3", None), ("int8", 128)])
def test_one_matmul_on_a_gpu(code, group, num_rows):
    x, bias = rows(num_rows, 768), rows(1, 320)[0]
    matrix, want = make_matrix((320,), 768, code, group)
    got = quantized_matmul(x, matrix, bias=bias, output_dtype=jnp.float32, implementation="sm90")
    assert error(got, in_float(x) @ want.T + in_float(bias)) < TOLERANCE
